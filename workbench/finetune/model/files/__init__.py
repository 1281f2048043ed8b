"""The folder of a model: its weights are read and checked, and written for its readers."""
