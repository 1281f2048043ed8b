"""How failures are shown: the card of a failed run, errors in a cell, the stacks of ranks that are stuck."""
