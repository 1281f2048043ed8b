"""The warm server: its forks are programs like any other, only sooner; else ranks start cold."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.poll import until
from tests.support.sentences import says
from workbench.agent.machine import resident
from workbench.agent.probe.examine import process_gib
from workbench.agent.supervisor import Agent
from workbench.base.process import (
    FORK_SERVER_SOCKET,
    Process,
    end_all,
    of_pods,
    pod_of,
    process_table,
)
from workbench.pods.local.forkserver import ForkServer

TOY = """
import atexit, json, multiprocessing, os, subprocess, sys, threading, time
CHANGED = []

def done(**data):
    path = os.environ["WORKBENCH_RANK_DIR"] + "/done.json"
    open(path + "x", "w").write(json.dumps(data)); os.rename(path + "x", path)

def stamp(): done(entered=time.time())

def facts():
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR WORKBENCH_POD SECRET WORKBENCH_TOY".split()
    with open("/proc/self/oom_score_adj") as file: score = file.read().strip()
    done(env={n: os.environ.get(n) for n in names}, cwd=os.getcwd(),
         sid=os.getsid(0) == os.getpid(), threads=threading.active_count(),
         term=str(__import__("signal").getsignal(15)), oom=score,
         fds=sorted(os.path.basename(os.readlink(f"/proc/self/fd/{f}"))
                    for f in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{f}")), argv=sys.argv)

def prints():
    atexit.register(lambda: print("atexit"))
    def late(): time.sleep(0.5); print("thread")
    threading.Thread(target=late).start()
    print("caf\\u00e9 \\udcff"); sys.stdout.write("no newline ")
    print("warn", file=sys.stderr); done()

def fails(): raise ValueError("in the fork")
def exits(): sys.exit(4)
def segfaults(): __import__("ctypes").string_at(0)
def changes(): CHANGED.append(1); print(len(CHANGED), flush=True); done()
def sleeps(): print("up"); time.sleep(60)
def hides():
    # A DataLoader's worker, gone from session and parent, without an exec and so without marks.
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        __import__("signal").signal(15, __import__("signal").SIG_IGN); time.sleep(60)
    print("up", flush=True); time.sleep(60)
def spawns():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(abs, (-3,)), flush=True)
    done()
def spins():
    print("up", flush=True)
    while True: pass
def waits():
    import ctypes
    print("up", flush=True)
    ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # as in a collective
    print("went on", flush=True)
"""


@pytest.fixture(params=["executed", "forked"])
def warm(make_agent, tmp_path, request):
    """An agent whose warm server has only a toy imported, and serves it as soon as asked."""
    (tmp_path / "toy_job.py").write_text(TOY)
    agent = make_agent()
    env = paths(tmp_path, WORKBENCH_WARM_MODULES="toy_job", WORKBENCH_TOY="1")
    if request.param == "executed":
        agent.serve("--warm", env=env)
        yield agent
        return
    with fork_server(tmp_path, env) as socket:
        agent.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
        yield agent
        agent.close()


@contextlib.contextmanager
def fork_server(folder: Path, env: dict[str, str]) -> Iterator[str]:
    """The socket of a fork server with the tests' environment and imports, as agents have one."""
    (folder / "pods").mkdir(mode=0o700, exist_ok=True)  # beside the agents' folders
    (folder / "own").mkdir(mode=0o700, exist_ok=True)  # where a keeper has the private folder
    address = folder / "own" / "fork-server.sock"
    server = ForkServer(folder / "pods", address, {**os.environ, **env}, env["PYTHONPATH"])
    try:
        yield str(server.socket)
    finally:
        server.end()
        end_all(lambda: of_pods([server.name]), grace_s=0.0)


def server_of(agent) -> Process:
    """The warm server, wherever it comes from."""
    until_ready(agent)
    names = (b"workbench.agent.warm", b"workbench.agent.forkserver")
    below = [p for p in process_table().values() if pod_of(p.pid) == str(agent.root)]
    # What it has forked is called as it is, and came later.
    return min(
        (p for p in below if {*argv(p).split(b"\0")[:5]} & {*names}),
        key=lambda p: (p.start_time, p.pid),
    )


def argv(process: Process) -> bytes:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes()


def children(agent) -> list[Process]:
    """What the agent has below it, and its warm server if that is another's child."""
    parents = {agent.pid, server_of(agent).pid}
    return [
        p for p in process_table().values() if p.parent in parents or p.pid in parents - {agent.pid}
    ]


def paths(folder: Path, **env: str) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "",
        "PYTHONPATH": f"{Path(__file__).resolve().parents[2]}{os.pathsep}{folder}",
        **env,
    }


def start(agent, function: str, run: str = "r", **more: object) -> None:
    # What a cold start would print tells it from a warm one.
    agent.start(
        run,
        f"import toy_job; print('cold'); toy_job.{function}()",
        **{"success": "record", "entry": f"toy_job:{function}", **more},
    )


def record(agent, run: str = "r", rank: int = 0) -> dict:
    return json.loads((agent.root / f"runs/{run}/rank-{rank}/done.json").read_text())


def until_ready(agent) -> None:
    until(lambda: agent.ask("hello")["warm"] == "ready")


def test_a_pod_measures_an_idle_process_when_its_imports_are_done(warm):
    assert process_gib(warm.root / "nowhere") is None
    until(lambda: process_gib(warm.root))
    idle_gib = resident(server_of(warm).pid).bytes / 2**30
    # A fork shows the pages that the fork has touched, its importer all pages of the imports.
    assert process_gib(warm.root) >= 0.5 * idle_gib


def test_a_forked_rank_is_the_agent_s_own_and_has_its_own_place(warm):
    start(warm, "facts", ranks=2, env={"SECRET": "s"}, threads=2)
    ranks = warm.until_exited("r")["ranks"]
    assert [(r["how"], r["exit_code"], r["done"], r["error"]) for r in ranks] == [
        ("warm", 0, True, None)
    ] * 2
    for rank in (0, 1):
        facts = record(warm, rank=rank)
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert facts["env"] == {
            **place,
            "WORKBENCH_POD": str(warm.root),
            "SECRET": "s",
            "WORKBENCH_TOY": "1",
        }
        assert facts["cwd"] == str(warm.root / "runs/r") and facts["sid"] and facts["threads"] == 1
        assert facts["oom"] == "500" and facts["argv"] == ["toy_job:facts"] and facts["term"] == "0"
        assert facts["fds"] == [
            "null",
            f"rank-{rank}.stderr.pipe",
            f"rank-{rank}.stdout.pipe",
            "stacks.txt",
        ]


def test_a_kernel_that_ignores_sigterm_ends_its_fork_server_and_ranks_hear_the_signal(
    make_agent, tmp_path
):
    (tmp_path / "toy_job.py").write_text(TOY)
    agent = make_agent()
    env = paths(tmp_path, WORKBENCH_WARM_MODULES="toy_job", WORKBENCH_TOY="1")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with fork_server(tmp_path, env) as socket:
            agent.serve("--warm", env={**env, FORK_SERVER_SOCKET: socket})
            start(agent, "facts")
            agent.until_exited("r")
            agent.close()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert record(agent)["term"] == "0"


def test_a_rank_that_is_asked_for_during_the_imports_waits_for_them(make_agent, tmp_path):
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
    (tmp_path / "toy_job.py").write_text(wait + TOY)
    agent = make_agent()
    agent.serve("--warm", env=paths(tmp_path, WORKBENCH_WARM_MODULES="toy_job"))
    assert agent.ask("hello")["warm"] == "starting"
    start(agent, "stamp")
    start(agent, "stamp", run="stopped")
    agent.ask("stop", run="stopped", grace_s=5)
    (rank,) = agent.poll("stopped")["ranks"]
    assert (rank["phase"], rank["stopped"], rank["pid"]) == ("exited", True, None)
    go.touch()
    (rank,) = agent.until_exited("r")["ranks"]
    assert rank["how"] == "warm" and agent.ask("hello")["warm"] == "ready"


def test_it_ends_like_a_program_threads_awaited_atexit_run_output_whole(warm):
    start(warm, "prints")
    (rank,) = warm.until_exited("r")["ranks"]
    assert rank["exit_code"] == 0
    assert (
        warm.output["attempt-0/rank-0.stdout.log"].decode() == "café ?\nno newline thread\natexit\n"
    )
    assert warm.output["attempt-0/rank-0.stderr.log"] == b"warn\n"


@pytest.mark.parametrize(
    ("function", "exit_code", "kind", "message"),
    [
        ("fails", 1, "ValueError", "in the fork"),
        ("exits", 4, "exit", "exit code 4"),
        ("segfaults", -11, "signal", "killed by SIGSEGV"),
        (
            "no_such_function",
            1,
            "AttributeError",
            "module 'toy_job' has no attribute 'no_such_function'",
        ),
    ],
)
def test_it_fails_like_a_program(warm, function, exit_code, kind, message):
    start(warm, function)
    (rank,) = warm.until_exited("r")["ranks"]
    assert (rank["how"], rank["exit_code"], rank["error"]["kind"]) == ("warm", exit_code, kind)
    assert rank["error"]["message"] == message
    assert warm.ask("hello")["warm"] == "ready"


def test_a_segfault_leaves_the_python_stack(warm):
    start(warm, "segfaults")
    assert "segfaults" in warm.until_exited("r")["ranks"][0]["error"]["traceback"]


def test_ranks_do_not_see_one_another_s_changes(warm):
    for run in ("a", "b"):
        warm.output.clear()
        start(warm, "changes", run=run)
        warm.until_exited(run)
        assert warm.output["attempt-0/rank-0.stdout.log"] == b"1\n"


def test_multiprocessing_spawn_works_inside(warm):
    start(warm, "spawns")
    warm.until_exited("r")
    assert warm.output["attempt-0/rank-0.stdout.log"] == b"3\n"


def test_stop_and_sweep_reach_forked_ranks_and_what_hides_from_them(warm, wait_gone):
    server = children(warm)
    start(warm, "hides")
    warm.until_printed("r", "up")
    until(lambda: len([p for p in children(warm) if not p.zombie]) == 3)
    warm.ask("stop", run="r", grace_s=0.3)
    warm.until_exited("r")
    until(lambda: children(warm) == server)


def test_killed_agent_leaves_no_forked_rank_and_no_server(warm, wait_gone):
    start(warm, "sleeps")
    warm.until_printed("r", "up")
    below = children(warm)
    assert len(below) == 2
    os.kill(warm.pid, signal.SIGKILL)
    wait_gone(*below, timeout_s=30)


def test_stacks_come_from_ranks_that_can_tell_and_do_not_harm_the_others(warm):
    start(warm, "spins", ranks=2)
    start(warm, "sleeps", run="cold", success="exit code", entry=None)
    warm.until("r", lambda _: sum(text == b"up\n" for text in warm.output.values()) == 2)
    warm.until("cold", lambda a: a["ranks"][0]["phase"] == "running")
    for _ in range(2):
        texts = warm.ask("stacks", run="r")["stacks"]
        assert set(texts) == {"0", "1"} and all(
            text.count("in spins") == 1 and "stacks.py" not in text for text in texts.values()
        )
    assert warm.ask("stacks", run="cold")["stacks"] == {"0": ""}
    os.kill(warm.poll("r")["ranks"][1]["pid"], signal.SIGSTOP)
    assert warm.ask("stacks", run="r")["stacks"]["1"] == ""
    assert (
        warm.poll("cold")["ranks"][0]["phase"] == warm.poll("r")["ranks"][0]["phase"] == "running"
    )


def test_stacks_come_from_a_rank_that_waits_in_compiled_code_and_it_waits_on(warm):
    start(warm, "waits")
    warm.until_printed("r", "up")
    for _ in range(2):
        text = warm.ask("stacks", run="r")["stacks"]["0"]
        assert text.count("in waits") == 1
    (rank,) = warm.poll("r")["ranks"]
    assert rank["phase"] == "running"


def test_imports_that_fail_are_told_and_ranks_start_cold(make_agent, tmp_path):
    (tmp_path / "toy_job.py").write_text(TOY)
    (tmp_path / "broken.py").write_text("raise RuntimeError('libcudart is missing')")
    agent = make_agent()
    agent.serve("--warm", env=paths(tmp_path, WORKBENCH_WARM_MODULES="toy_job,broken"))
    start(agent, "stamp")
    (rank,) = agent.until_exited("r")["ranks"]
    assert rank["how"] == "cold" and rank["done"] and agent.poll("r")["warm"] == "failed"
    assert "libcudart is missing" in (agent.root / "agent.log").read_text()
    assert agent.output["attempt-0/rank-0.stdout.log"] == b"cold\n"


def test_imports_that_initialize_cuda_have_ranks_start_cold(make_agent, tmp_path):
    (tmp_path / "toy_job.py").write_text(TOY)
    # A stand-in for torch on a GPU, which this machine lacks.
    cuda = "types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)"
    (tmp_path / "torch.py").write_text(f"import types\ncuda = {cuda}\n")
    agent = make_agent()
    agent.serve("--warm", env=paths(tmp_path, WORKBENCH_WARM_MODULES="torch,toy_job"))
    start(agent, "stamp")
    (rank,) = agent.until_exited("r")["ranks"]
    assert rank["how"] == "cold" and rank["done"] and agent.poll("r")["warm"] == "failed"
    assert says((agent.root / "agent.log").read_text(), "an import initialized CUDA")


@pytest.mark.parametrize(
    ("pods", "used"),
    [("", "2"), ("12", "12"), ("4,2", "4"), (" 3 ", "3"), ("0", "-"), ("-1", "-"), ("all", "-")],
)
def test_a_warm_rank_has_the_threads_of_its_pod(make_agent, tmp_path, pods: str, used: str) -> None:
    toy = "import torch\ndef main():\n    print(torch.threads, flush=True)\n"
    (tmp_path / "toy_job.py").write_text(toy)
    # A stand-in for torch, which loads in an instant.
    cuda = "types.SimpleNamespace(is_initialized=lambda: False)"
    setter = "def set_num_threads(number):\n    global threads\n    threads = number\n"
    text = f"import types\ncuda = {cuda}\nthreads = '-'\n{setter}"
    (tmp_path / "torch.py").write_text(text)
    agent = make_agent()
    variables = {"WORKBENCH_WARM_MODULES": "torch,toy_job", "OMP_NUM_THREADS": pods}
    agent.serve("--warm", env=paths(tmp_path, **variables))
    until(lambda: agent.ask("hello")["warm"] != "starting", 60)
    start(agent, "main", threads=2)
    (rank,) = agent.until_exited("r")["ranks"]
    assert (rank["how"], agent.output["attempt-0/rank-0.stdout.log"]) == (
        "warm",
        f"{used}\n".encode(),
    )


def test_ranks_of_a_killed_server_continue_unless_it_is_their_parent_and_the_next_start_cold(
    warm,
):
    server = server_of(warm)
    start(warm, "sleeps")
    warm.until_printed("r", "up")
    server.send(signal.SIGKILL)
    start(warm, "stamp", run="next")
    assert warm.until_exited("next")["ranks"][0]["how"] == "cold"
    answer = warm.poll("r")
    if server.parent == warm.pid:
        assert answer["warm"] == "failed"
        assert answer["ranks"][0]["phase"] == "running"
    else:  # it was their parent
        (rank,) = warm.until_exited("r")["ranks"]
        assert (rank["exit_code"], rank["error"]["message"]) == (-9, "killed by SIGKILL")


def test_a_server_that_died_is_replaced_once_the_pod_is_idle(warm):
    server = server_of(warm)
    server.send(signal.SIGKILL)
    until(lambda: warm.ask("hello")["warm"] == "failed", 20)
    until(lambda: warm.ask("hello")["warm"] == "ready", 60)
    start(warm, "stamp")
    assert warm.until_exited("r")["ranks"][0]["how"] == "warm"
    assert says((warm.root / "agent.log").read_text(), "warm server: another one is started")


def test_an_agent_that_slept_gives_its_server_the_lost_time(tmp_path, monkeypatch):
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    agent = Agent(tmp_path, 300.0)
    monkeypatch.setattr(agent, "_reap", lambda: None)  # children here are pytest's
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        agent.warm.start(tmp_path, str(tmp_path / "s"))
        agent.tick()
        now_s += 3600.0  # the imports may take 300 s
        for _ in range(3):
            agent.tick()
        assert agent.warm.state == "starting"
        for _ in range(80):
            now_s += 4.0
            agent.renew()
            agent.tick()
        assert agent.warm.state == "failed"


def test_a_variable_that_imports_read_is_honoured_by_a_cold_start(warm):
    start(warm, "stamp", env={"HF_HUB_OFFLINE": "1"})
    start(warm, "stamp", run="token", env={"HF_TOKEN": "x", "HF_HUB_DISABLE_TELEMETRY": "1"})
    assert warm.until_exited("r")["ranks"][0]["how"] == "cold"
    assert warm.until_exited("token")["ranks"][0]["how"] == "warm"


def test_scripts_and_an_agent_without_a_server_start_cold(warm, agent):
    start(warm, "stamp", success="exit code", entry=None)
    assert warm.until_exited("r")["ranks"][0]["how"] == "cold"


def test_runs_one_after_another_are_forked_from_one_server(warm):
    until_ready(warm)
    for number in range(10):
        run = f"r{number}"
        start(warm, "stamp", run=run, ranks=3)
        ranks = warm.until_exited(run)["ranks"]
        log = (warm.root / "agent.log").read_text()
        assert [rank["how"] for rank in ranks] == ["warm"] * 3, log
        assert all(record(warm, run, rank)["entered"] for rank in range(3))


REAL = """
import datetime, json, os, time
def main():
    entered = time.time()
    import torch
    import torch.distributed as dist
    assert not torch.cuda.is_initialized()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    ones = torch.ones(64, 64) @ torch.ones(64, 64)
    dist.all_reduce(ones)
    import deepspeed, transformers
    print(ones[0, 0].item(), torch.get_num_threads(), flush=True)
    dist.barrier(); dist.destroy_process_group()
    with open(os.environ["WORKBENCH_RANK_DIR"] + "/done.json", "w") as file:
        json.dump({"entered": entered}, file)
"""


@pytest.mark.slow
def test_the_real_imports_then_gloo_between_two_ranks(make_agent, tmp_path):
    (tmp_path / "real_job.py").write_text(REAL)
    agent = make_agent()
    agent.serve("--warm", env=paths(tmp_path))
    until(lambda: agent.ask("hello")["warm"] != "starting", 120, every_s=0.1)
    assert agent.ask("hello")["warm"] == "ready", (agent.root / "agent.log").read_text()
    assert "left threads" not in (agent.root / "agent.log").read_text()
    for number in range(2):
        run = f"r{number}"
        port = agent.ask("free_port", address="127.0.0.1")["port"]
        request = agent.request(
            run, "", ranks=2, success="record", entry="real_job:main", master_port=port, threads=1
        )
        agent.ask("prepare", run=run, request=request)
        agent.ask("start", run=run)
        ranks = agent.until_exited(run)["ranks"]
        assert [(r["how"], r["exit_code"], r["done"]) for r in ranks] == [("warm", 0, True)] * 2, (
            ranks
        )
        assert all(record(agent, run, rank)["entered"] for rank in range(2))
    assert agent.output["attempt-0/rank-0.stdout.log"] == b"128.0 1\n" * 2
