"""Messages of a run's ranks to other ranks and to the agent."""
