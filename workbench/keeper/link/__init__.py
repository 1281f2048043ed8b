"""Connection to a pod: requests, files, and shared folders."""
