"""Programs on the pod that speak with the agent: one rank of a launcher, and the bridge that SSH runs."""
