"""What the site of a pod has set for the ranks, in setup lines and in NCCL's own files."""
