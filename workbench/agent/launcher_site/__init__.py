"""Stand-ins for DeepSpeed in the processes of DeepSpeed's own launcher."""
