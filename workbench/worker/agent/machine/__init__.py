"""What the agent sees of its machine: memory limits and kills, GPUs, network."""
