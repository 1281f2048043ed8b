"""The kinds of dataset a job may name, and their preparation into files that travel to the pods."""
