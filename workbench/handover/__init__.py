"""Runs without a keeper: Kubeflow manifests, and unattended ranks."""
