"""The parts of a checkpoint and whether they are whole."""
