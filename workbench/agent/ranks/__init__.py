"""A run on the pod: request, ranks and output."""
