"""The processes of a cluster by our marks, our records and descent, never by a name alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from workbench import Run
from workbench.base.process import (
    POD_MARK,
    RANK_MARK,
    RUN_MARK,
    Process,
    descendants,
    find,
    live_descendants,
    marks,
    of_pods,
    process_table,
    with_mark,
)
from workbench.pods.pod import Pod
from workbench.rundir.status import cluster_status

_CARRIES = "Carry bytes between stdin, stdout and a socket"
"""The words of the program of a bridge."""
_LAUNCHERS = {"deepspeed", "pdsh", "mpirun", "orted"}


def words_of(pid: int) -> list[str]:
    """Return the arguments of a process; none where it is gone."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")[:-1]
    except OSError:
        return []


def keeper(cluster: Path) -> Process | None:
    """Return the keeper, by its own record."""
    pid = cluster_status(cluster).pid
    return None if pid is None else find(pid)


def noted(pod: Pod, name: str) -> Process | None:
    """Return the process of a pod that a file in its folder names."""
    try:
        return find(json.loads((Path(pod.root) / name).read_text())["pid"])
    except (OSError, ValueError):
        return None


def agent(pod: Pod) -> Process | None:
    """Return the agent of a pod."""
    return noted(pod, "agent.json")


def worker(pod: Pod) -> Process | None:
    """Return the process that stands for the pod."""
    return noted(pod, "guardian.json")


def sshd(pod: Pod) -> Process | None:
    """Return the pod's daemon: a child of the process that stands for the pod."""
    guardian = worker(pod)
    own = (
        []
        if guardian is None
        else [p for p in live_descendants(guardian.pid) if p.parent == guardian.pid]
    )
    return next((p for p in own if (words_of(p.pid) or [""])[0].startswith("sshd: ")), None)


def sessions(pod: Pod) -> list[Process]:
    """Return what serves connections to the pod."""
    daemon = sshd(pod)
    return (
        []
        if daemon is None
        else [p for p in live_descendants(daemon.pid) if p.parent == daemon.pid]
    )


def bridges(pod: Pod) -> list[Process]:
    """Return what carries the keeper's words to the agent: the pod's marked processes.

    The agent was started over such a line and may still be
    below the daemon: it and all below it are no bridges.
    What a launcher starts over SSH is below the daemon too, and is no bridge either.
    """
    daemon, serves = sshd(pod), agent(pod)
    if daemon is None:
        return []
    table = process_table()
    others = set() if serves is None else descendants(table, [serves.pid])
    others |= {
        process.pid
        for process in table.values()
        if serves is not None and process.session == serves.session
    }
    found = []
    for process in live_descendants(daemon.pid):
        marked = POD_MARK in marks(process.pid) and process.pid not in others
        if marked and any(_CARRIES in word for word in words_of(process.pid)):
            found.append(process)
    return found


def ranks(run: Run, pod: Pod | None = None) -> list[Process]:
    """Return the ranks of a run themselves, not what they started."""
    return [p for p in with_mark(RUN_MARK, [run.id]) if _is_rank(p, run, pod)]


def _is_rank(process: Process, run: Run, pod: Pod | None) -> bool:
    here = marks(process.pid)
    above = marks(process.parent)
    mine = here.get(RANK_MARK, "") and here.get(RANK_MARK) != above.get(RANK_MARK)
    return (
        bool(mine)
        and here.get(RUN_MARK) == run.id
        and (pod is None or here.get(POD_MARK) == pod.root)
    )


def launchers(run: Run, cluster: Path) -> list[Process]:
    """Return the launcher's processes: below the keeper, with the launcher's program as a word."""
    owner = keeper(cluster)
    below_keeper = [] if owner is None else live_descendants(owner.pid)
    return [
        p for p in below_keeper if _LAUNCHERS & {Path(word).name for word in words_of(p.pid)[:4]}
    ]


def warm(pod: Pod) -> list[Process]:
    """Return the warm server of a pod: a marked child of the agent that is no part of a run."""
    parent = agent(pod)
    children = (
        [] if parent is None else [p for p in of_pods([pod.root]) if RUN_MARK not in marks(p.pid)]
    )
    return [p for p in children if p != parent and "connect" not in words_of(p.pid)]


def fork_server(cluster: Path) -> list[Process]:
    """Return the process that imports torch once for all pods."""
    return of_pods([str(cluster / "pods" / "fork-server")])


def of_run(run_id: str) -> list[Process]:
    """Return every process of a run."""
    return with_mark(RUN_MARK, [run_id])


def below(folder: Path) -> Iterator[Process]:
    """Yield the live processes with this folder in their words or environment, but our own line."""
    word = os.fsencode(folder)
    for pid, process in process_table().items():
        if process.zombie or pid == os.getpid():
            continue
        try:
            text = (
                Path(f"/proc/{pid}/cmdline").read_bytes()
                + Path(f"/proc/{pid}/environ").read_bytes()
            )
        except OSError:
            continue
        if word in text:
            yield process


def growth_of(process: Process) -> dict[str, float]:
    """Return what a process holds now: MiB, file descriptors, threads."""
    folder = Path(f"/proc/{process.pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return {
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20),
        "fds": float(len(list((folder / "fd").iterdir()))),
        "threads": float(len(list((folder / "task").iterdir()))),
    }


def find_victims(what: str, cluster: Path, pod: Pod, run: Run | None) -> list[Process]:
    """Return the processes of one kind: of a pod or of the run, as the kind is."""
    match what:
        case "keeper":
            one = [keeper(cluster)]
        case "agent":
            one = [agent(pod)]
        case "worker":
            one = [worker(pod)]
        case "sshd":
            one = [sshd(pod)]
        case "session":
            one = [*sessions(pod)]
        case "bridge":
            one = [*bridges(pod)]
        case "warm":
            one = [*warm(pod)]
        case "forkserver":
            one = [*fork_server(cluster)]
        case "rank":
            one = [*ranks(run, pod)] if run else []
        case "launcher":
            one = [*launchers(run, cluster)] if run else []
        case _:
            raise ValueError(what)
    return [process for process in one if process is not None]
