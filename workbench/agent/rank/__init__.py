"""What the ranks of a run say to each other and to their agent."""
