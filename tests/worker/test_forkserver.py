"""The fork server: its forks are warm servers like executed ones, and whoever cannot have one executes it.

What a warm server does is tried in `test_warm.py`, for both kinds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket as sockets
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from poll import until

from tests.worker.test_warm import TOY, argv, fork_server, paths, record, server_of, start
from workbench.base.allocator import preloaded
from workbench.base.process import find, look_up, marks, with_mark
from workbench.pods.guest.machine import MemoryLimit
from workbench.pods.local import forkserver
from workbench.pods.local.forkserver import ForkServer
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod import LaunchContext
from workbench.pods.pod_spec import PodSpec
from workbench.worker.agent.warm_link import FORK_SERVER
from workbench.worker.forkserver import _LINGER_S

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
    return b"workbench.worker.forkserver" in argv(server_of(agent))


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
            agent.serve("--warm", env={**env, FORK_SERVER: socket})
    finally:
        os.umask(umask)
    start(agent, "limits")
    assert agent.until_exited("r")["ranks"][0]["how"] == "warm" and is_forked(agent), log(agent)
    taken = record(agent)
    assert (taken["files"], taken["umask"]) == (777, 0o027)
    assert Path(taken["package"]).parents[1] == Path(env["PYTHONPATH"].split(os.pathsep)[0])
    server = server_of(agent)
    assert marks(server.pid) == {"WORKBENCH_POD": str(agent.root)}
    assert Path(f"/proc/{server.pid}/cwd").readlink() == agent.root == Path(taken["first"])
    assert Path(f"/proc/{server.pid}/fd/1").readlink() == agent.root / "agent.log"
    assert server.session == server.pid and server.parent != agent.pid
    assert ("libjemalloc" in Path(f"/proc/{server.pid}/maps").read_text()) == bool(preloaded())
    start(agent, "facts", run="facts")
    agent.until_exited("facts")
    (own,) = with_mark("WORKBENCH_POD", [str(tmp_path / "fork-server")])
    assert own.pid == server.parent


def test_agents_share_one_and_outlive_it(make_agent, tmp_path, env):
    agents = [make_agent(f"pod-{number}") for number in range(3)]
    with fork_server(tmp_path, env) as socket:
        for agent in agents:
            agent.serve("--warm", env={**env, FORK_SERVER: socket})
        assert all(is_forked(agent) for agent in agents)
        assert len({server_of(agent).parent for agent in agents}) == 1
    start(agents[1], "stamp")
    assert agents[1].until_exited("r")["ranks"][0]["how"] == "warm"
    os.kill(agents[2].pid, signal.SIGKILL)
    agents[2].serve("--warm", env={**env, FORK_SERVER: socket})
    assert "no fork server" in log(agents[2]) and not is_forked(agents[2])


def test_clusters_share_one_import_and_outlive_who_did_it(make_agent, tmp_path, env, monkeypatch):
    for name in ("LANG", "LC_ALL", "LC_CTYPE"):  # each Python then sets the last one for itself
        monkeypatch.delenv(name, raising=False)

    def agent_of(name: str, socket: str):
        agent = make_agent(name)
        agent.serve("--warm", env={**env, FORK_SERVER: socket})
        assert is_forked(agent), log(agent)
        return agent

    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    with fork_server(folders[0], env) as one, fork_server(folders[1], env) as other:
        servers = [
            look_up(server_of(agent_of(*words)).parent)
            for words in (("pod-0", one), ("pod-1", other))
        ]
        assert servers[0] != servers[1]
        (importer,) = {server.parent for server in servers}
        os.kill(importer, signal.SIGKILL)
        until(lambda: find(importer) is None, 10)  # its socket lives until its memory is given back
        with fork_server(folders[2], env) as third:
            next_one = look_up(server_of(agent_of("pod-2", third)).parent).parent
            assert next_one != importer
            agent_of("pod-3", one)
    until(lambda: look_up(next_one) is None, 60.0)  # it has nobody to serve any more


def test_the_import_lasts_as_long_as_a_cluster_that_uses_it(make_agent, tmp_path, env):
    """The process that imported must not take the request of a keeper for the end of the keeper."""
    agent = make_agent()
    with fork_server(tmp_path, env) as socket:
        agent.serve("--warm", env={**env, FORK_SERVER: socket})
        assert is_forked(agent), log(agent)
        importer = find(look_up(server_of(agent).parent).parent)
        assert b"workbench.worker.forkserver" in argv(importer)
        time.sleep(_LINGER_S + 3)
        assert find(importer.pid) == importer
    until(lambda: find(importer.pid) != importer, 6 * _LINGER_S)


def own_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this user's sockets in a folder of the test's own."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run" / "deepspeed-workbench"


def in_vain_as_nobody(path: Path) -> None:
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


def test_the_process_that_imports_has_no_name_that_all_can_read(tmp_path, env, monkeypatch):
    run = own_run_folder(tmp_path, monkeypatch)
    server = ForkServer(tmp_path, {**os.environ, **env}, "WORKBENCH_POD", env["PYTHONPATH"])
    try:
        # No abstract socket, which all can name and take.
        assert Path(server._line.getpeername()).name in [
            each.name for each in run.glob("importer-*.sock")
        ]
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
        assert {stat.S_IMODE(each.stat().st_mode) for each in run.iterdir()} == {0o600}
    finally:
        server.end()


@pytest.mark.parametrize(
    "left", ["a socket without a process", "a process that takes nothing", "a lock that is held"]
)
def test_a_name_that_is_taken_costs_seconds_and_not_the_start(tmp_path, env, monkeypatch, left):
    monkeypatch.setattr(forkserver, "_REACH_S", 1.0)
    run = own_run_folder(tmp_path, monkeypatch)
    run.mkdir(mode=0o700)
    monkeypatch.setattr(forkserver, "_importer_name", lambda _: "importer.sock")
    held = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
    waiting = []
    if left == "a lock that is held":
        handle = os.open(run / "importer.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
    else:
        monkeypatch.chdir(run)  # a path as a whole may be too long for a socket
        held.bind("importer.sock")
    if left == "a process that takes nothing":
        held.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect("importer.sock")
    backend, began_s = LocalPods(), time.monotonic()
    context = LaunchContext(
        cluster_id="c", directory=tmp_path, public_key="", lease_s=5.0, timeout_s=5.0, warm=True
    )
    (tmp_path / "pods").mkdir()
    try:
        backend._start_fork_server(PodSpec(), context)
        assert (backend._fork_server is None) is (left != "a socket without a process")
        assert time.monotonic() - began_s < 60
        assert (tmp_path / "pods" / "fork-server.sock").exists() is (
            backend._fork_server is not None
        )
    finally:
        backend.stop()
        for each in (held, *waiting):
            each.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")
def test_another_user_is_not_served(tmp_path, env, monkeypatch):
    run = own_run_folder(tmp_path, monkeypatch)
    server = ForkServer(tmp_path, {**os.environ, **env}, "WORKBENCH_POD", env["PYTHONPATH"])
    try:
        (path,) = run.glob("*.sock")
        with pytest.raises(AssertionError):
            in_vain_as_nobody(path)  # nobody else reaches it
        run.chmod(0o755)  # and who did would get nothing
        path.chmod(0o666)
        log, for_log = os.pipe()
        if (asks := os.fork()) == 0:
            try:
                os.chdir(run)
                os.setuid(65534)
                line = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
                line.connect(path.name)
                request = {"python": sys.executable, "name": server.name}
                with contextlib.suppress(
                    BrokenPipeError, ConnectionResetError
                ):  # it may hang up before it is asked
                    sockets.send_fds(line, [json.dumps(request).encode()], [for_log, for_log])
                os.close(for_log)
                os._exit(
                    os.read(log, 1) != b""
                )  # a server that served would hold this pipe, or write into it why not
            finally:
                os._exit(2)
        os.close(for_log)
        assert os.waitpid(asks, 0)[1] == 0
    finally:
        server.end()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "other values of HF_HUB_OFFLINE"),
        ({"OMP_NUM_THREADS": "3"}, "of OMP_NUM_THREADS"),
    ],
)
def test_it_refuses_who_differs_in_what_imports_read(make_agent, socket, env, other, why):
    agent = make_agent()
    agent.serve("--warm", env={**env, **other, FORK_SERVER: socket})
    start(agent, "stamp")
    assert agent.until_exited("r")["ranks"][0]["how"] == "warm"
    assert why in log(agent) and not is_forked(agent)


def test_its_death_during_the_imports_costs_nothing_but_time(make_agent, tmp_path, env):
    go = held_imports(tmp_path)
    agent = make_agent()
    with fork_server(tmp_path, env) as socket:
        agent.serve("--warm", env={**env, FORK_SERVER: socket})
        start(agent, "stamp")
    go.touch()
    (rank,) = agent.until_exited("r")["ranks"]
    assert (rank["how"], rank["done"]) == ("warm", True) and not is_forked(agent)


def test_an_agent_that_ends_during_the_imports_leaves_nothing(make_agent, tmp_path, env):
    go = held_imports(tmp_path)
    agent, next_one = make_agent("pod-0"), make_agent("pod-1")
    with fork_server(tmp_path, env) as socket:
        for each in (agent, next_one):
            each.serve("--warm", env={**env, FORK_SERVER: socket})
        agent.ask("shutdown", grace_s=0.2)
        go.touch()
        start(next_one, "stamp")
        next_one.until_exited("r")  # the fork server answers in turn
        assert with_mark("WORKBENCH_POD", [str(agent.root)]) == []
        assert [p.pid for p in with_mark("WORKBENCH_POD", [str(tmp_path / "fork-server")])]


def test_ranks_have_their_grace_when_the_agent_ends(make_agent, socket, env):
    agent = make_agent()
    agent.serve("--warm", env={**env, FORK_SERVER: socket})
    start(agent, "last_words")
    agent.until_printed("r", "up")
    server = server_of(agent)
    agent.ask("shutdown", grace_s=5)
    assert record(agent) == {"said": "goodbye"}
    until(lambda: look_up(server.pid) is None, 10)


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
            agent.serve("--warm", env={**env, FORK_SERVER: socket})
        limit.take(small.pid)
        go.touch()
        start(large, "sleeps")
        large.until_printed("r", "up")
        start(small, "eats")
        (rank,) = small.until_exited("r", timeout_s=60)["ranks"]
        assert (rank["how"], rank["exit_code"]) == ("warm", -9) and "out of memory" in rank[
            "error"
        ]["message"]
        assert "the agent has another control group" in log(small)
        assert not is_forked(small) and is_forked(large)
        assert large.poll("r")["ranks"][0]["phase"] == "running"
        for agent in (small, large):
            agent.close()
    limit.remove()
    assert not limit.folder.exists()


def test_pods_with_folders_of_their_own_share_one_import(make_agent, tmp_path, env):
    """Each pod has a TMPDIR of its own: the fork takes it over, and what was found before it is forgotten."""
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
                FORK_SERVER: socket,
                "TMPDIR": str(own),
                "TORCHINDUCTOR_CACHE_DIR": str(own),
            },
        )
        start(agent, "where")
        assert agent.until_exited("r")["ranks"][0]["how"] == "warm" and is_forked(agent), log(agent)
    assert record(agent)["now"] == str(own) != record(agent)["before"]
