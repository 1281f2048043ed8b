"""Export of a run as Kubeflow manifests."""
