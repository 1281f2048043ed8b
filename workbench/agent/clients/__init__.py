"""Programs on the pod that connect to the agent: a launcher's rank and SSH's bridge."""
