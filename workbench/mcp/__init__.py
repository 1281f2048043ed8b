"""`workbench mcp`: tools for coding agents, over the Model Context Protocol."""
