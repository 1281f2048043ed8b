"""Methods of training: the lesson of a row for a model. Every method is a file."""
