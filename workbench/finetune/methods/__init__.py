"""Methods of training: what a model learns from a row, one file for each method."""
