"""Copy the output of ranks into local logs and events, and follow growing logs."""
