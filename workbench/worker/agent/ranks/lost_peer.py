"""Whether what a rank failed with says only that another rank went away; such a rank is never the first cause."""

from __future__ import annotations

import re

# What gloo, NCCL, torch's store and MPI say of another rank, and nothing else does. Gloo names its peer `[address]`.
_OF_A_RANK = re.compile(
    r"closed by (remote )?peer (\[\S+\]:|\S+<)\d+|(read|write|connect) (error|timeout) \["
    r"|socket (unexpectedly )?closed \[|application timeout caused pair closure|gloo connectfullmesh failed"
    r"|timed out waiting \d+ ?ms for (send|recv) operation|reached monitoredbarrier, but|to pass monitoredbarrier"
    r"|remote process exit(ed|ing)|ncclremoteerror|watchdog caught collective operation timeout"
    r"|failed to (recv, got|send, sent) 0 bytes|did the remote server shutdown or crash"
    r"|wait timeout after \d+ ?ms, keys:|timed out after \d+ seconds waiting for clients"
    r"|the client socket has timed out after|the connection to the c10d store has failed"
    r"|lost communication with a remote daemon|mpi_err_proc_failed",
    re.IGNORECASE,
)
# What any socket may say, one to a hub or a tracker too: it counts where a library that ranks talk through says it,
_OF_A_SOCKET = re.compile(
    r"connection (refused|reset|closed|aborted)|(closed|reset) by peer|broken pipe|socket timeout|timed out waiting",
    re.IGNORECASE,
)
_LIBRARY = re.compile(r"\bgloo\b|\bnccl\b|tcpstore|c10d|socketimpl|btl_tcp|processgroup(gloo|nccl)", re.IGNORECASE)
# or where it is all there is: of a lost rank torch's store says "Broken pipe", while a hub's client names the hub.
_ALONE = re.compile(
    r"(\[errno \d+\] )?(broken pipe|connection (reset|closed) by peer|socket timeout)\.?", re.IGNORECASE
)


def only_lost_its_peer(text: str) -> bool:
    """Whether an error's message is what a rank says when another one has gone: an echo, not a cause."""
    if _OF_A_RANK.search(text) or _ALONE.fullmatch(text.strip()):
        return True
    return bool(_OF_A_SOCKET.search(text) and _LIBRARY.search(text))
