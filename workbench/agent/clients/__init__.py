"""Programs on the pod with a connection to the agent: a launcher's rank and SSH's bridge."""
