"""SSH to a pod: paramiko for the keeper, OpenSSH for the doctor and for large files."""
