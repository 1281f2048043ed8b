"""The agent: the one small process per pod that starts, watches and ends ranks; it runs from a zip on a bare Python."""
