"""What happens to a run when its pods, their agents, their network or single ranks fail."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.hanging import hanging
from tests.support.poll import until
from tests.support.sentences import says
from workbench import Cluster, LocalPods, Run, Script
from workbench.base.errors import RunError
from workbench.base.process import activity
from workbench.keeper.link import agent
from workbench.pods.pod import Pod
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow
long = pytest.mark.long


@pytest.mark.parametrize(
    ("script", "launcher"),
    [("beat.py", "ssh"), pytest.param("mesh.py", "pdsh", marks=long)],
)
def test_a_killed_agent_is_named(world: World, script: str, launcher: str) -> None:
    """Row 12. In a mesh the other ranks fail at once, for they lost a peer; that is an echo."""
    run = world.submit(script, launcher=launcher)
    world.until(lambda: all(" 3" in world.log(run, rank) for rank in range(3)), 120)
    pod = world.cluster.pods[1]
    killed = time.monotonic()
    os.kill(json.loads((Path(pod.root) / "agent.json").read_text())["pid"], signal.SIGKILL)
    there = [
        p
        for p in world.of(run)
        if p.environ.get("WORKBENCH_POD") == pod.root and "RANK" in p.environ
    ]
    gone_s = world.until(
        lambda: not {p.pid for p in there} & {p.pid for p in world.of(run)}, 120, every_s=0.1
    )
    world.measured("12", f"agent killed ({script}, {launcher}) -> its ranks gone", gone_s, 2)
    result = world.ended(run)
    world.measured(
        "12", f"agent killed ({script}, {launcher}) -> result", time.monotonic() - killed, 10
    )
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert (result.error.kind, result.error.host, result.error.rank) == ("pod", pod.address, None)
    assert says(result.error.message, "the ranks on the pod died with the agent", "pod-1")
    if script == "mesh.py":
        assert (
            says(result.error.others, "lost their peer ({})")
            or "lost its peer" in result.error.others
        )


def agent_of(pod: Pod) -> int:
    return int(json.loads((Path(pod.root) / "agent.json").read_text())["pid"])


@pytest.mark.long
def test_an_agent_that_hangs_is_named(world: World) -> None:
    run = world.beating()
    pod = world.cluster.pods[2]
    hung = time.monotonic()
    with hanging(agent_of(pod)):
        result = world.ended(run)
    world.measured("12", "agent hangs -> result", time.monotonic() - hung, 25)
    message = world.blames(result, pod)
    assert says(message, "the ranks on the pod died with the agent", "pod-2")
    assert "the agent did not answer" in message


@long
def test_an_agent_that_is_stopped_costs_nothing(world: World, tmp_path: Path) -> None:
    run = world.beating("--until", str(tmp_path / "end"))
    pod = world.cluster.pods[2]
    before = agent_of(pod)
    os.kill(before, signal.SIGSTOP)
    world.until(lambda: not activity(before)[1], 60)
    seen = len(world.log(run, 2))
    world.until(lambda: len(world.log(run, 2)) > seen, 60)
    assert (run.state, agent_of(pod)) == (RunState.RUNNING, before)
    (tmp_path / "end").touch()
    world.ended(run).raise_for_status()


def test_the_cluster_lives_on_after_lost_agents(world: World) -> None:
    world.ended(world.submit("beat.py", "--lines", "3")).raise_for_status()


@long
def test_a_cut_line_loses_and_doubles_nothing(world: World) -> None:
    """Row 23. The pod's end of the keeper's connection is killed twice while lines are printed."""
    run = world.submit("beat.py", "--lines", "300", "--pause-s", "0.02")
    for mark in (" line 50", " line 150"):
        world.until(lambda mark=mark: mark in world.log(run, 1), 120)
        before = len(world.log(run, 1))
        cut = time.monotonic()
        for pid in sessions(world, world.cluster.pods[1]):
            os.kill(pid, signal.SIGKILL)
        # On a busy machine the last line may have come before the second cut.
        world.until(
            lambda before=before: len(world.log(run, 1)) > before or run.state.is_terminal, 120
        )
        world.measured("23", "line cut -> lines come again", time.monotonic() - cut, 10)
    result = world.ended(run)
    result.raise_for_status()
    for rank in range(3):
        assert world.log(run, rank) == "".join(f"rank {rank} line {n}\n" for n in range(300))


def test_a_pod_that_dies_is_named_at_once(world: World, tmp_path: Path) -> None:
    """Row 48, with a cluster of its own, for this one is no good afterwards."""
    with Cluster(LocalPods(), count=3, path=tmp_path / "c", warm=False) as cluster:
        run = world.beating(cluster=cluster)
        pod = cluster.pods[2]
        killed = time.monotonic()
        os.kill(parent_of(daemon(world, pod)), signal.SIGKILL)
        result = world.ended(run)
        world.measured("48", "pod killed -> result", time.monotonic() - killed, 10)
        assert "SIGKILL" in world.blames(result, pod)
        world.until(lambda: pod.name in cluster.message, 120)
        with pytest.raises(RunError, match=f"{pod.name} is Failed"):
            world.submit("beat.py", cluster=cluster)
        assert [run.state for run in cluster.runs] == [RunState.FAILED] * 2, (
            "a refused run's directory says so too"
        )
        closing = time.monotonic()
    world.measured("48", "close with a dead pod", time.monotonic() - closing, 8)
    assert cluster.phase == "closed"
    assert not [p for p in world.processes() if any(str(cluster.path) in word for word in p.argv)]


def test_a_rank_that_leaves_early_is_the_cause(world: World) -> None:
    """Row 5. The ranks that wait for it fail first; it ended with 0 before."""
    began = time.monotonic()
    result = world.ended(world.submit("mesh.py", "--fail", "leave", "--at", "20"))
    world.measured("5", "whole run with a rank that leaves early", time.monotonic() - began, 5)
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert (result.error.rank, result.error.host, result.error.kind) == (1, "127.0.0.3", "exit")
    assert "ended early with 0" in result.error.message
    assert says(result.error.others, "lost their peer ({})")


def test_ranks_that_do_not_listen_are_killed(world: World) -> None:
    """Row 6."""
    run = world.beating("--deaf")
    asked = time.monotonic()
    run.cancel()
    result = world.ended(run)
    world.measured("6", "cancel of deaf ranks -> result", time.monotonic() - asked, 5)
    assert result.state is RunState.CANCELLED
    assert (
        result.message
        == "stopped when asked: ranks [0, 1, 2] did not end when asked and were killed"
    )


@long
def test_a_master_port_that_was_snatched_is_replaced(world: World) -> None:
    """Row 34, with torch: another process takes the chosen port before rank 0 listens."""
    taken: list[socket.socket] = []
    snatch = threading.Thread(target=lambda: taken.append(snatched_port(run)))
    run = world.submit("ring.py", launcher="ssh", pods=2)
    snatch.start()
    result = world.ended(run, 120)
    snatch.join(300)
    assert taken
    with taken[0] as holder:
        port = holder.getsockname()[1]
        result.raise_for_status()
        assert f"--master-port {port} " not in run.paths.command.read_text()
        assert "EADDRINUSE" in run.logs(0, "stderr")
        assert run.logs(0, "stdout").count("step 4 sum 2") == 1


def snatched_port(run: Run) -> socket.socket:
    command = run.paths.command
    until(lambda: command.exists() and command.read_text().endswith("\n"), every_s=0.002)
    port = command.read_text().partition("--master-port ")[2].split()[0].strip("'\"")
    return socket.create_server(("", int(port)))  # like torch, which listens on all addresses


def sessions(world: World, pod: Pod) -> list[int]:
    """The sshd processes that serve connections to a pod."""
    return children_of(daemon(world, pod))


def daemon(world: World, pod: Pod) -> int:
    """The pod's sshd: a child of the pod's own process."""
    own = children_of(json.loads((Path(pod.root) / "guardian.json").read_text())["pid"])
    return next(
        p.pid
        for p in world.processes()
        if p.pid in own and p.argv and p.argv[0].startswith("sshd: ")
    )


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@long
def test_a_silent_pod_costs_the_others_no_agent(world: World, tmp_path: Path) -> None:
    lease_s = 4.0  # half of the time that the keeper waits for an answer
    root = tmp_path / "c"

    def agents() -> dict[str, int]:
        serving = [
            p
            for p in world.processes()
            if "serve" in p.argv and any(str(root) in word for word in p.argv)
        ]
        return {Path(p.argv[p.argv.index("serve") + 1]).name: p.pid for p in serving}

    with Cluster(LocalPods(), count=3, path=root, warm=False, lease_s=lease_s):
        before = agents()
        assert sorted(before) == ["pod-0", "pod-1", "pod-2"]
        silent_s = time.monotonic()
        os.kill(before["pod-2"], signal.SIGSTOP)
        try:
            world.until(lambda: time.monotonic() - silent_s > 3 * lease_s, 60)
            assert {name: pid for name, pid in agents().items() if name != "pod-2"} == {
                name: before[name] for name in ("pod-0", "pod-1")
            }
        finally:
            with suppress(ProcessLookupError):  # the keeper may have ended it, and started another
                os.kill(before["pod-2"], signal.SIGCONT)


WHERE = """
import os, tempfile, time, neighbour
print(tempfile.gettempdir(), os.environ["TORCHINDUCTOR_CACHE_DIR"], neighbour.NAME)
open(os.environ["HERE"] + os.environ["RANK"], "w").close()
while not os.path.exists(os.environ["HERE"] + "end"):
    time.sleep(0.05)
"""


@pytest.mark.parametrize("launcher", ["ssh", pytest.param("openmpi", marks=pytest.mark.long)])
def test_nothing_of_a_pod_lies_where_other_users_may_have_been(
    world: World, tmp_path: Path, launcher: str
) -> None:
    """Temporary folders are in the pod's own; no Python of ours imports from its working folder."""
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "where.py").write_text(WHERE)
    (tmp_path / "script" / "neighbour.py").write_text("NAME = 'neighbour'")
    job = Script(
        path=str(tmp_path / "script" / "where.py"), launcher=launcher, env={"HERE": f"{tmp_path}/"}
    )
    run = world.cluster.submit(job, pods=2)
    world.until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), 120)
    root = world.cluster.path
    ours = [
        p
        for p in world.processes()
        if any(str(root) in word for word in [*p.argv, *p.environ.values()])
    ]
    pythons = [p.argv for p in ours if p.argv and Path(p.argv[0]).name.startswith("python")]
    started = [argv for argv in pythons if any(word.startswith("workbench.") for word in argv[1:6])]
    assert len(started) >= 4  # the keeper and three agents
    assert [argv for argv in started if argv[1] != "-P"] == []
    if launcher == "openmpi":
        assert all(list((root / "pods" / f"pod-{rank}").glob("ompi.*")) for rank in range(2))
        assert list(ClusterPaths(root).identity.glob("*/ompi.*"))
    (tmp_path / "end").touch()
    world.ended(run).raise_for_status()
    for rank in range(2):
        own = f"{root}/pods/pod-{rank}/tmp"
        # Sockets have no room in a longer folder.
        temporary = own if len(own) <= agent._SHORT else tempfile.gettempdir()
        assert f"{temporary} {own}/inductor neighbour" in run.logs(rank, "stdout")
