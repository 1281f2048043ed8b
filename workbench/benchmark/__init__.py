"""A grid of runs: schedule, rows, comparable groups and the report's figures."""
