"""Our side inside a pod: SSH daemon, guardian, addresses and memory limit."""
