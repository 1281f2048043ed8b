"""The objects of a cluster as Kubernetes takes them."""
