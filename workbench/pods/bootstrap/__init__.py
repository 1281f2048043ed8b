"""Our side inside a pod that we start: its SSH daemon, guardian, addresses and memory limit."""
