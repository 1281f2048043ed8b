"""Ask the models of runs, and judge what they answer."""
