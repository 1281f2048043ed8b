"""`workbench mcp`: the verbs of this package for coding agents, over the Model Context Protocol."""
