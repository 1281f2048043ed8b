"""The fork server: its forks are warm servers like executed ones; without a fork, one is executed.

What a warm server does is tried in `test_warm.py`, for both kinds.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket as sockets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.test_warm import TOY, argv, fork_server, paths, record, server_of, start
from tests.support.poll import until
from tests.support.sentences import says
from workbench.base.files.private import cluster_folder
from workbench.base.machine.allocator import preloaded
from workbench.base.process import (
    FORK_SERVER_SOCKET,
    Process,
    find,
    of_pods,
    pod_of,
    process_table,
)
from workbench.pods.bootstrap.machine import MemoryLimit
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod import LaunchContext
from workbench.pods.pod_spec import PodSpec

MORE = """
import resource, time
def limits():
    os.umask(mask := os.umask(0))
    done(files=resource.getrlimit(resource.RLIMIT_NOFILE)[0], umask=mask,
         package=sys.modules["workbench"].__file__, first=sys.path[0])
def last_words():
    __import__("signal").signal(15, lambda *_: (time.sleep(1), done(said="goodbye"), os._exit(0)))
    print("up", flush=True); time.sleep(60)
def eats():
    kept = []
    while True: kept.append(bytearray(os.urandom(1 << 20)))
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "toy_job.py").write_text(TOY + MORE)
    # One value for the fixtures and the test: the fork server refuses who has others.
    return paths(tmp_path, WORKBENCH_WARM_MODULES="toy_job", PYTEST_CURRENT_TEST="")


@pytest.fixture
def socket(tmp_path: Path, env: dict[str, str]) -> Iterator[str]:
    with fork_server(tmp_path, env) as path:
        yield path


def held_imports(tmp_path: Path) -> Path:
    """Write a module whose import lasts until the file that is returned exists."""
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
    (tmp_path / "toy_job.py").write_text(f"{wait}{TOY}{MORE}")
    return go


def log(agent) -> str:
    return (agent.root / "agent.log").read_text()


def is_forked(agent) -> bool:
    return b"workbench.agent.forkserver" in argv(server_of(agent))


def adopted_by(server: Process) -> list[Process]:
    """Return the orphans of ranks below a warm server: no rank is in the session of another."""
    table = process_table().values()
    return [p for p in table if p.parent == server.pid and p.session != p.pid and not p.zombie]


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_it_takes_after_the_agent(make_agent, socket, env, tmp_path):
    agent = make_agent()
    umask = os.umask(0o027)
    try:
        with open_files(777):
            agent.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
    finally:
        os.umask(umask)
    start(agent, "limits")
    assert agent.until_exited("r")["ranks"][0]["how"] == "warm" and is_forked(agent), log(agent)
    taken = record(agent)
    assert (taken["files"], taken["umask"]) == (777, 0o027)
    assert Path(taken["package"]).parents[1] == Path(env["PYTHONPATH"].split(os.pathsep)[0])
    server = server_of(agent)
    assert pod_of(server.pid) == str(agent.root)
    assert Path(f"/proc/{server.pid}/cwd").readlink() == agent.root
    assert taken["first"] == env["PYTHONPATH"].split(os.pathsep)[0]
    assert Path(f"/proc/{server.pid}/fd/1").readlink() == agent.root / "agent.log"
    assert server.session == server.pid and server.parent != agent.pid
    assert ("libjemalloc" in Path(f"/proc/{server.pid}/maps").read_text()) == bool(preloaded())
    start(agent, "facts", run="facts")
    agent.until_exited("facts")
    (own,) = of_pods([str(tmp_path / "pods" / "fork-server")])
    assert own.pid == server.parent


def test_agents_share_one_and_outlive_it(make_agent, tmp_path, env):
    agents = [make_agent(f"pod-{number}") for number in range(3)]
    with fork_server(tmp_path, env) as socket:
        for agent in agents:
            agent.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
        assert all(is_forked(agent) for agent in agents)
        assert len({server_of(agent).parent for agent in agents}) == 1
    start(agents[1], "stamp")
    assert agents[1].until_exited("r")["ranks"][0]["how"] == "warm"
    os.kill(agents[2].pid, signal.SIGKILL)
    agents[2].serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
    assert says(log(agents[2]), "warm server: no fork server at") and not is_forked(agents[2])


def test_it_ends_with_a_keeper_that_is_killed(tmp_path, env):
    """A keeper that is killed closes nothing by itself: the kernel closes the server's stdin."""
    (tmp_path / "pods").mkdir()
    with_keeper = f"""
import os, time
from pathlib import Path
from workbench.pods.local.forkserver import ForkServer
folder = Path({str(tmp_path / "pods")!r})
ForkServer(folder, folder / "s", os.environ, os.environ["PYTHONPATH"])
print("up", flush=True); time.sleep(60)
"""
    argv = [sys.executable, "-c", with_keeper]
    keeper = subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, **env})
    try:
        assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
        assert of_pods([str(tmp_path / "pods" / "fork-server")])
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()
    until(lambda: not of_pods([str(tmp_path / "pods" / "fork-server")]), 60.0)


def connect_as_nobody(path: Path) -> None:
    """Hold that another user can connect to a socket."""
    if (tries := os.fork()) == 0:
        try:
            os.chdir(path.parent)
            os.setuid(65534)
            sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET).connect(path.name)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(tries, 0)[1] == 0


def test_it_is_reached_below_a_long_path(make_agent, tmp_path, env):
    """A home folder may be deep, and a Unix socket's address holds 108 bytes."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    agent = make_agent(under=deep)
    with fork_server(deep, env) as socket:
        assert len(socket) > 200
        agent.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
        assert is_forked(agent), log(agent)
        agent.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")
def test_another_user_cannot_reach_it(tmp_path, env):
    with fork_server(tmp_path, env) as socket:
        Path(socket).parent.chmod(0o755)  # the socket's own rights suffice
        with pytest.raises(AssertionError):
            connect_as_nobody(Path(socket))
        Path(socket).chmod(0o666)
        connect_as_nobody(Path(socket))  # the attempt itself is sound


def test_pods_import_for_themselves_where_it_cannot_be_started(tmp_path, caplog):
    (cluster_folder(tmp_path) / "fork-server.sock" / "in the way").mkdir(parents=True)
    context = LaunchContext(
        cluster_id="c", directory=tmp_path, public_key="", lease_s=5.0, timeout_s=5.0, warm=True
    )
    backend = LocalPods()
    backend._start_fork_server(PodSpec(), context)
    assert backend._fork_server is None
    assert says(caplog.text, "each local pod imports torch for itself")
    backend.stop()


def test_an_agent_with_another_package_executes_its_own(make_agent, tmp_path, socket, env):
    first, other = make_agent("pod-0"), make_agent("pod-1")
    first.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
    assert is_forked(first), log(first)
    (tmp_path / "more").mkdir()
    path = f"{env['PYTHONPATH']}{os.pathsep}{tmp_path / 'more'}"
    other.serve("--warm", env={**env, "PYTHONPATH": path, FORK_SERVER_SOCKET: socket})
    assert not is_forked(other) and "the agent has another" in log(other)


def test_what_a_warm_server_leaves_is_found_by_its_folder(make_agent, socket, env):
    """A fork of a rank that left session and parent has no mark of its pod in its environment."""
    agent, beside = make_agent("pod-0"), make_agent("pod-1")
    for each in (agent, beside):
        each.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
        assert is_forked(each), log(each)
    start(agent, "hides")
    agent.until_printed("r", "up")
    server = server_of(agent)
    until(lambda: adopted_by(server), 10)
    (hidden,) = adopted_by(server)
    os.kill(agent.pid, signal.SIGKILL)
    server.send(signal.SIGKILL)
    until(lambda: server not in of_pods([str(agent.root)]), 10)
    assert hidden in of_pods([str(agent.root)])
    agent.serve("--warm", env=env)  # it ends first what the dead one left
    assert hidden not in of_pods([str(agent.root)])
    assert server_of(beside) in of_pods([str(beside.root)])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "other values of HF_HUB_OFFLINE"),
        ({"OMP_NUM_THREADS": "3"}, "of OMP_NUM_THREADS"),
    ],
)
def test_it_refuses_who_differs_in_what_imports_read(make_agent, socket, env, other, why):
    agent = make_agent()
    agent.serve("--warm", env={**env, **other, FORK_SERVER_SOCKET: socket})
    start(agent, "stamp")
    assert agent.until_exited("r")["ranks"][0]["how"] == "warm"
    assert why in log(agent) and not is_forked(agent)


def test_its_death_during_the_imports_costs_nothing_but_time(make_agent, tmp_path, env):
    go = held_imports(tmp_path)
    agent = make_agent()
    with fork_server(tmp_path, env) as socket:
        agent.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
        start(agent, "stamp")
    go.touch()
    (rank,) = agent.until_exited("r")["ranks"]
    assert (rank["how"], rank["done"]) == ("warm", True) and not is_forked(agent)


def test_an_agent_that_ends_during_the_imports_leaves_nothing(make_agent, tmp_path, env):
    go = held_imports(tmp_path)
    agent, next_one = make_agent("pod-0"), make_agent("pod-1")
    with fork_server(tmp_path, env) as socket:
        for each in (agent, next_one):
            each.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
        agent.ask("shutdown", grace_s=0.2)
        go.touch()
        start(next_one, "stamp")
        next_one.until_exited("r")  # the fork server answers in turn
        assert of_pods([str(agent.root)]) == []
        assert of_pods([str(tmp_path / "pods" / "fork-server")])


def test_ranks_have_their_grace_when_the_agent_ends(make_agent, socket, env):
    agent = make_agent()
    agent.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
    start(agent, "last_words")
    agent.until_printed("r", "up")
    server = server_of(agent)
    agent.ask("shutdown", grace_s=300)
    assert record(agent) == {"said": "goodbye"}
    until(lambda: find(server.pid) is None)


def test_a_pod_under_a_memory_limit_imports_for_itself_and_no_other_pays_for_it(
    make_agent, tmp_path, env
):
    go = held_imports(tmp_path)
    limit = MemoryLimit.make(f"test-fork-{os.getpid()}", 96 / 1024)
    if limit is None:
        pytest.skip("this user may not make a memory cgroup here")
    small, large = make_agent("pod-0"), make_agent("pod-1")
    with fork_server(tmp_path, env) as socket:
        for agent in (small, large):
            agent.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
        limit.take(small.pid)
        go.touch()
        start(large, "sleeps")
        large.until_printed("r", "up")
        start(small, "eats")
        (rank,) = small.until_exited("r", timeout_s=60)["ranks"]
        assert (rank["how"], rank["exit_code"]) == ("warm", -9) and "out of memory" in rank[
            "error"
        ]["message"]
        assert says(log(small), "the agent has another", "control group")
        assert not is_forked(small) and is_forked(large)
        assert large.poll("r")["ranks"][0]["phase"] == "running"
        for agent in (small, large):
            agent.close()
    limit.remove()
    assert not limit.folder.exists()


def test_pods_with_folders_of_their_own_share_one_import(make_agent, tmp_path, env):
    """Each pod has its own TMPDIR: the fork takes it over, and forgets what was found before it."""
    toy = f"import tempfile; before = tempfile.gettempdir()\n{TOY}{MORE}"
    (tmp_path / "toy_job.py").write_text(
        f"{toy}def where(): done(before=before, now=tempfile.gettempdir())\n"
    )
    own = tmp_path / "own"
    own.mkdir()
    agent = make_agent()
    with fork_server(tmp_path, env) as socket:
        agent.serve(
            "--warm",
            env={
                **env,
                FORK_SERVER_SOCKET: socket,
                "TMPDIR": str(own),
                "TORCHINDUCTOR_CACHE_DIR": str(own),
            },
        )
        start(agent, "where")
        assert agent.until_exited("r")["ranks"][0]["how"] == "warm" and is_forked(agent), log(agent)
    assert record(agent)["now"] == str(own) != record(agent)["before"]
