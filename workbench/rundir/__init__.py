"""What happens: the keeper, its runs, their directories, events, commands and results."""
