"""The agent as its keeper sees it: start, poll, records, output, requests that are wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.agent.clients.client import connect
from workbench.agent.machine import memory
from workbench.base.messages.rpc import Refused
from workbench.base.process import look_up

REPOSITORY = Path(__file__).resolve().parents[2]


def test_serve_is_idempotent_private_and_leaves_nothing(agent):
    assert agent.serve_only() == agent.pid
    assert agent.root.stat().st_mode & 0o777 == 0o700
    assert (agent.root / "agent.sock").stat().st_mode & 0o777 == 0o600
    process = look_up(agent.pid)
    assert json.loads((agent.root / "agent.json").read_text()) == {
        "pid": agent.pid,
        "start_time": process.start_time,
    }
    agent.ask("shutdown")
    assert sorted(path.name for path in agent.root.iterdir()) == ["agent.lock", "agent.log", "tmp"]
    second = agent.serve()
    assert second != process.pid


def test_many_serves_at_once_make_one_agent(make_agent):
    agent = make_agent()
    argv = [sys.executable, "-m", "workbench.agent", "serve", str(agent.root), "--no-warm"]
    started = [
        subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    answers = [json.loads(process.communicate(timeout=300)[0]) for process in started]
    assert all(answer["ok"] for answer in answers)
    assert len({answer["pid"] for answer in answers}) == 1


def test_a_rank_that_ends_well_is_done_and_gets_its_place(agent, tmp_path):
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR "
        "MASTER_PORT OMP_NUM_THREADS PYTHONUNBUFFERED"
    )
    code = (
        f"import os; print([os.environ[n] for n in '{names}'.split()], "
        "os.getcwd(), os.environ['WORKBENCH_RANK_DIR'])"
    )
    agent.start("r", code, ranks=2, threads=3)
    answer = agent.until_exited("r")
    assert [(r["exit_code"], r["done"], r["error"], r["stopped"]) for r in answer["ranks"]] == [
        (0, True, None, False)
    ] * 2
    folder = agent.root / "runs" / "r"
    for rank in (0, 1):
        expected = [str(rank), str(rank), "2", "2", "127.0.0.1", "29500", "3", "1"]
        assert (
            folder / f"attempt-0/rank-{rank}.stdout.log"
        ).read_text() == f"{expected} {folder} {folder}/rank-{rank}\n"
        assert (folder / f"rank-{rank}/done.json").exists()
    assert (
        agent.output["attempt-0/rank-0.stdout.log"]
        == (folder / "attempt-0/rank-0.stdout.log").read_bytes()
    )


@pytest.mark.parametrize(
    ("code", "exit_code", "kind", "message"),
    [
        ("raise ValueError('bad thing')", 1, "ValueError", "bad thing"),
        ("import sys; sys.exit(3)", 3, "exit", "exit code 3"),
        ("import sys; sys.exit('no such file: x')", 1, "exit", "exit code 1: no such file: x"),
        ("import os; os.kill(os.getpid(), 9)", -9, "signal", "killed by SIGKILL"),
        ("import os; os.abort()", -6, "signal", "killed by SIGABRT"),
    ],
)
def test_a_rank_that_fails_says_why(agent, code, exit_code, kind, message):
    agent.start("r", code)
    (rank,) = agent.until_exited("r")["ranks"]
    error = json.loads((agent.root / "runs/r/rank-0/error.json").read_text())
    assert (rank["exit_code"], rank["done"], rank["error"]["kind"]) == (exit_code, False, kind)
    assert rank["error"]["message"] == message
    assert (error["rank"], error["kind"], error["message"], error["echo"]) == (
        0,
        kind,
        message,
        False,
    )


def test_a_program_that_cannot_be_executed_says_why(agent):
    agent.start("r", "", argv=["/no/such/program", "x"])
    (rank,) = agent.until_exited("r")["ranks"]
    assert rank["exit_code"] == 127 and "/no/such/program" in rank["error"]["message"]


def test_a_finetune_rank_that_ends_with_0_without_its_record_has_failed(agent):
    agent.start("r", "pass", success="record")
    (rank,) = agent.until_exited("r")["ranks"]
    assert not rank["done"] and rank["error"]["message"] == "ended early with 0"


def test_the_record_of_the_rank_itself_wins_and_is_seen_before_it_ends(agent, tmp_path):
    seen = tmp_path / "seen"
    code = f"seen = {str(seen)!r}\n"
    code += """
import json, os, time
own = {"rank": 0, "kind": "Mine", "message": "m", "traceback": "t", "time_s": 1.0, "echo": True}
path = os.environ["WORKBENCH_RANK_DIR"] + "/error.json"
open(path + "x", "w").write(json.dumps(own)); os.rename(path + "x", path)
while not os.path.exists(seen): time.sleep(0.02)
raise SystemExit(5)
"""
    agent.start("r", code, success="record")
    answer = agent.until("r", lambda a: a["ranks"][0]["error"])
    assert (
        answer["ranks"][0]["phase"] == "running" and answer["ranks"][0]["error"]["kind"] == "Mine"
    )
    seen.touch()
    assert agent.until_exited("r")["ranks"][0]["error"]["kind"] == "Mine"


def test_output_is_byte_exact_however_it_is_read(agent, tmp_path):
    noise = random.Random(0).randbytes(50_000)
    expected = (
        b"x" * 1_000_000
        + b"\n"
        + "".join(f"\r{i}% █▌" for i in range(3000)).encode()
        + noise
        + b"\x1b[31mred"
    )
    (tmp_path / "bytes").write_bytes(expected)
    code = "import sys; data = open(sys.argv[1], 'rb').read(); "
    code += "sys.stdout.buffer.write(data); sys.stderr.buffer.write(data[::-1])"
    agent.start("r", "", argv=[sys.executable, "-c", code, str(tmp_path / "bytes")])
    deadline = time.monotonic() + 300
    while sum(
        len(agent.output.get(f"attempt-0/rank-0.{name}.log", b"")) for name in ("stdout", "stderr")
    ) < 2 * len(expected):
        answer = agent.poll("r", max_bytes=77_777)
        assert sum(len(chunk["data"]) for chunk in answer["chunks"].values()) <= 77_777
        assert time.monotonic() < deadline
    agent.output.pop("attempt-0/rank-0.order.log", None)
    assert agent.output == {
        "attempt-0/rank-0.stdout.log": expected,
        "attempt-0/rank-0.stderr.log": expected[::-1],
    }


def test_a_quiet_stream_is_not_starved_by_a_noisy_one(agent):
    agent.start("r", "import sys; print('x' * 500_000); print('important', file=sys.stderr)")
    agent.until("r", lambda a: a["ranks"][0]["phase"] == "exited")
    agent.offsets.clear(), agent.output.clear()
    agent.poll("r", max_bytes=1000)
    assert agent.output["attempt-0/rank-0.stderr.log"] == b"important\n"
    assert sum(map(len, agent.output.values())) == 1000


def test_two_noisy_streams_share_the_cap(agent):
    agent.start("r", "import sys; print('x' * 500_000); print('y' * 500_000, file=sys.stderr)")
    agent.until("r", lambda a: a["ranks"][0]["phase"] == "exited")
    agent.offsets.clear(), agent.output.clear()
    agent.poll("r", max_bytes=1000)
    order = len(agent.output.pop("attempt-0/rank-0.order.log", b""))
    assert sorted(len(data) for data in agent.output.values()) == [
        (1000 - order) // 2,
        1000 - order - (1000 - order) // 2,
    ]


def test_noise_neither_slows_the_agent_nor_grows_it(agent):
    code = (
        "import time\n"
        "block = 'a log line of fifty characters, give or take a few\\n' * 10000\n"
        "for _ in range(30): print(block, end='', flush=True); time.sleep(0.08)"
    )
    before, _ = memory(agent.pid)
    agent.start("r", code)
    while True:
        answer = agent.poll("r", max_bytes=65_536)
        carried = sum(len(chunk["data"]) for chunk in answer["chunks"].values())
        assert carried <= 65_536, "an answer is as short as asked, whatever waits behind it"
        if answer["ranks"][0]["phase"] == "exited":
            break
        time.sleep(0.05)
    assert (agent.root / "runs/r/attempt-0/rank-0.stdout.log").stat().st_size == 300_000 * 51
    assert memory(agent.pid)[0] - before < 8 << 20


def test_memory_is_of_the_rank_and_its_children(agent):
    code = """
import subprocess, sys
eat = "x = bytearray(60 << 20); x[::4096] = b'1' * len(x[::4096]); input()"
child = subprocess.Popen([sys.executable, "-c", eat], stdin=subprocess.PIPE)
print("up", flush=True); child.wait()
"""
    agent.start("r", code)
    (rank,) = agent.until("r", lambda a: a["ranks"][0]["rss_bytes"] > 60 << 20)["ranks"]
    assert rank["rss_bytes"] < 200 << 20
    agent.ask("stop", run="r", grace_s=1)
    (rank,) = agent.until_exited("r")["ranks"]
    assert rank["rss_bytes"] == 0 and rank["peak_rss_bytes"] > 60 << 20


def test_secrets_reach_the_rank_and_nothing_else(agent):
    canary = "canary-" + random.Random().randbytes(8).hex()
    seen = REPOSITORY  # any folder: the code prints a hash only
    agent.start(
        "r",
        "import os, time; print(len(os.environ['TOKEN']), flush=True); time.sleep(1); 1/0",
        env={"TOKEN": canary},
        cwd=str(seen),
    )
    agent.until_printed("r", str(len(canary)))
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert canary.encode() not in (folder / "cmdline").read_bytes()
        except OSError:
            continue
    agent.until_exited("r")
    with pytest.raises(Refused) as refused:
        agent.ask(
            "prepare", run="x", request={**agent.request("x", ""), "env": {"A": 1, "B": canary}}
        )
    assert canary not in str(refused.value)
    files = [path for path in agent.root.rglob("*") if path.is_file()]
    assert files and not any(canary.encode() in path.read_bytes() for path in files)


def test_a_run_with_live_ranks_cannot_be_prepared_again_but_an_ended_one_can(agent):
    agent.start("r", "import time; time.sleep(60)")
    with pytest.raises(Refused, match=sentence("run {} has live processes on {}; stop it first")):
        agent.ask("prepare", run="r", request=agent.request("r", "pass"))
    agent.ask("stop", run="r", grace_s=1)
    agent.until_exited("r")
    with pytest.raises(Refused, match=sentence("run {} was stopped; prepare it again")):
        agent.ask("start", run="r")
    agent.start("r", "print('second')")
    assert agent.until_exited("r")["ranks"][0]["done"]


def test_start_again_starts_nothing_twice(agent):
    agent.start("r", "print('once'); import time; time.sleep(0.3)")
    agent.ask("start", run="r")
    agent.until_exited("r")
    agent.ask("start", run="r")
    agent.until_exited("r")
    assert agent.output["attempt-0/rank-0.stdout.log"] == b"once\n"


@pytest.mark.parametrize(
    ("op", "message", "words"),
    [
        ("no_such_op", {}, "no_such_op"),
        ("poll", {"run": "unknown"}, sentence("run {} is not prepared on")),
        ("poll", {"run": "../../etc"}, "run id"),
        ("prepare", {"run": "r"}, "request"),
        ("prepare", {"run": "r", "request": {"ranks": [], "argv": ["x"]}}, "ranks"),
        (
            "prepare",
            {"run": "r", "request": {"ranks": [{"rank": 0, "pod": "pod-9"}], "argv": ["x"]}},
            "pod-0",
        ),
        (
            "prepare",
            {"run": "r", "request": {"ranks": [{"rank": -1, "pod": "pod-0"}], "argv": ["x"]}},
            "rank",
        ),
        (
            "start_rank",
            {"run": "unknown", "rank": 0},
            sentence("run {} is not prepared on"),
        ),
        ("free_port", {}, "address"),
    ],
)
def test_a_wrong_request_is_refused_in_words(agent, op, message, words):
    with pytest.raises(Refused, match=words):
        agent.ask(op, **message)
    assert agent.ask("ping")["pid"] == agent.pid


def test_garbage_on_the_socket_harms_nobody(agent):
    for junk in (
        b"\xff\x00\n",
        b"[]\n",
        b"null\n",
        b'"x"\n',
        b"{}\n",
        b"\n\n\n",
        b"{" * 100_000 + b"\n",
    ):
        with connect(agent.root) as end:
            end.sendall(junk)
            end.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda end=end: end.recv(65536), b""))
            assert not answer or json.loads(answer.splitlines()[0])["ok"] is False
    idle = [connect(agent.root) for _ in range(50)]
    assert agent.ask("ping")["pid"] == agent.pid
    for end in idle:
        end.close()
    assert agent.ask("ping")["pid"] == agent.pid


def test_who_never_reads_the_answers_does_not_fill_the_agent(agent):
    agent.start("r", "print('y' * 3_000_000)")
    agent.until_exited("r")
    before, _ = memory(agent.pid)
    line = b'{"op": "poll", "run": "r", "max_bytes": 2000000}\n'
    with connect(agent.root) as end:
        end.settimeout(1)
        with pytest.raises(TimeoutError):
            for _ in range(20_000):
                end.sendall(line)
        assert memory(agent.pid)[0] - before < 64 << 20
        assert agent.ask("ping")["pid"] == agent.pid


def test_hello_names_the_interface_and_free_port_is_free(agent):
    assert agent.ask("hello", address="127.0.0.3")["interface"] == "lo"
    assert agent.ask("hello", address="::1")["interface"] == "lo"
    port = agent.ask("free_port", address="127.0.0.5")["port"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.5", port))


def test_a_root_deeper_than_a_socket_address_works(make_agent, tmp_path):
    agent = make_agent(under=tmp_path / ("long" * 20) / ("deep" * 20))
    assert len(str(agent.root)) > 160
    agent.serve()
    agent.start("r", "print('hi')")
    assert agent.until_exited("r")["ranks"][0]["done"]


def test_connect_carries_lines_and_ends_with_either_side(agent):
    argv = [sys.executable, "-m", "workbench.agent", "connect", str(agent.root)]
    done = subprocess.run(
        argv, input=b'{"id": 7, "op": "ping"}\n', capture_output=True, cwd=REPOSITORY, timeout=300
    )
    assert json.loads(done.stdout)["id"] == 7 and done.returncode == 0
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as bridge:
        bridge.stdin.write(b'{"id": 1, "op": "ping"}\n')
        bridge.stdin.flush()
        assert json.loads(bridge.stdout.readline())["ok"]
        os.kill(agent.pid, signal.SIGKILL)
        assert bridge.wait(timeout=300) == 0


def test_connect_without_an_agent_says_so(tmp_path):
    argv = [sys.executable, "-m", "workbench.agent", "connect", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, cwd=REPOSITORY, timeout=300)
    assert done.returncode == 1 and b"no agent serves" in done.stderr


def test_it_all_works_from_a_zip_on_a_bare_python(make_agent, tmp_path):
    archive = tmp_path / "code.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (REPOSITORY / "workbench").rglob("*.py"):
            file.write(path, path.relative_to(REPOSITORY))
    agent = make_agent()
    argv = [
        sys.executable,
        "-S",
        "-m",
        "workbench.agent",
        "serve",
        str(agent.root),
        "--no-warm",
    ]
    done = subprocess.run(
        argv,
        env={"PYTHONPATH": "code.zip"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert json.loads(done.stdout)["ok"], done
    agent.serve()
    agent.start("r", "import workbench.base.errors; print(workbench.base.errors.__file__)")
    agent.until_exited("r")
    assert agent.output["attempt-0/rank-0.stdout.log"].decode().startswith(str(archive))


def test_ranks_keep_the_number_of_their_attempt_also_for_the_next_agent(agent):
    def found(run: str) -> tuple[list[str], int, int]:
        request = agent.request(run, "pass", attempt=9, restart=9)
        answer = agent.ask("rejoin", run=run, request=request)
        return answer["phases"], answer["attempt"], answer["restart"]

    assert found("r") == ([], 0, 0)
    agent.start("r", "pass", attempt=1)
    agent.until_exited("r")
    assert found("r") == (["exited"], 1, 0)
    agent.start("r", "pass", attempt=3, restart=1)
    agent.until_exited("r")
    agent.start("old", "pass")
    agent.until_exited("old")
    os.kill(agent.pid, signal.SIGKILL)
    agent.serve()
    assert found("r") == (["exited"], 3, 1), "from the folder of the run"
    assert found("old") == (["exited"], 0, 0), "the keeper named no attempt"
    (agent.root / "runs" / "r" / "attempt.json").unlink()
    os.kill(agent.pid, signal.SIGKILL)
    agent.serve()
    assert found("r") == (["exited"], 0, 1), "the file was removed"


def test_a_rank_with_pipes_in_place_of_its_files_does_not_hold_the_agent(agent):
    code = (
        "import os, time\n"
        "os.chdir(os.environ['WORKBENCH_RANK_DIR'])\n"
        "for name in ('error.json', 'order.log', 'stacks.txt'):\n"
        "    os.path.exists(name) and os.unlink(name)\n"
        "    os.mkfifo(name)\n"
        "for number in range(20):\n"
        "    os.write(1 + number % 2, b'line\\n')\n"
        "    time.sleep(0.02)\n"
        "os.write(1, b'up\\n')\n"
        "time.sleep(60)\n"
    )
    agent.start("r", code)
    agent.until_printed("r", "up\n")
    # Without a handler, the signal for the stacks ends the rank.
    assert agent.ask("stacks", run="r")["stacks"] == {"0": ""}
    (state,) = agent.until_exited("r")["ranks"]
    assert not state["done"]
    assert agent.ask("ping")["pid"] == agent.pid


def test_an_agent_starts_where_a_rank_left_pipes_and_folders_in_place_of_its_files(
    make_agent, tmp_path
):
    agent = make_agent()
    root = agent.root
    root.mkdir(parents=True)
    for name in ("agent.json", "agent.log"):
        os.mkfifo(root / name)
    (root / "agent.lock").mkdir()
    (root / "agent.lock" / "file").touch()
    (root / "tmp").symlink_to(tmp_path / "nowhere")
    agent.serve()
    assert agent.ask("ping")["pid"] == agent.pid
    assert (root / "agent.log").is_file()
    assert (root / "tmp").is_dir()
    assert not (tmp_path / "nowhere").exists()
