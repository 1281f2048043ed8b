"""A run as manifests for Kubeflow."""
