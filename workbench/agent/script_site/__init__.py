"""What Python imports first of all in a rank of a script."""
