"""Ask the models of runs and judge the answers."""
