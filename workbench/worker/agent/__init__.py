"""The agent: the one small process per pod that starts, watches and ends ranks. Standard library and `base` only.

`__main__` is the command line; `main` brings the daemon up, `listener` is its loop and `supervisor` answers the
requests. `ranks/` has what was started and how, `machine/` looks at the pod, `clients/` are the programs there that
speak with the daemon; the keeper, which comes over SSH, has its own. All of it runs from a zip on a bare Python.
"""
