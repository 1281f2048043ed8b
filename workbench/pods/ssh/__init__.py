"""SSH to a pod, in three ways: paramiko for the keeper, OpenSSH for the doctor, OpenSSH in bulk for large files."""
