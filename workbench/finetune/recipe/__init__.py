"""Functions of a run that its recipe needs too. Each file here is also a file of a run card."""
