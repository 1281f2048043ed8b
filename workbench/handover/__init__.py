"""A run without this keeper: Kubeflow manifests, and ranks that run unattended."""
