"""The agent: a small process per pod that starts, watches and ends ranks.

The agent runs from a zip file on a bare Python.
"""
