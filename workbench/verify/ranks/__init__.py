"""Functions for ranks. No other module of the room imports torch."""
