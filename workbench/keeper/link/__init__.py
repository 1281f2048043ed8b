"""The keeper's line to a pod: requests, files, what is shared."""
