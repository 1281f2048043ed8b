"""Functions shared by runs and their recipes. A run card includes every file here."""
