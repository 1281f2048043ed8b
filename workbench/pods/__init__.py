"""Where a job runs: pods, their addresses and keys, and one file per place that pods come from."""
