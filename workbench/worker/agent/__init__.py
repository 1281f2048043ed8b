"""The agent: the one small process per pod that starts, watches and ends ranks. Standard library only.

`__main__` is the command line. `serve` brings the daemon up and `server` is its loop; `core` answers the requests;
`launching` starts ranks, through `warmlink` where the warm server can, and `helper` what works beside them; `run` and
`rank` know what was started, `records` says why a rank failed, `chunks` reads its output. `request` is what the keeper
asks for. `proc`, `cgroup`, `gpus` and `network` look at the machine. `client`, `connect` and `launched` are
programs that speak with the daemon.
Nothing here imports another room: all of it runs from a zip on a bare Python.
"""
