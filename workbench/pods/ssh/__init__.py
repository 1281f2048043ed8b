"""SSH to a pod: connections, commands and files."""
