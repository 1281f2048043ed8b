"""What a pod has, and how fast pods speak to each other."""
