"""Modules that the processes of DeepSpeed's own launcher import in place of DeepSpeed."""
