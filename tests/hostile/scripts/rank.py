"""A training script of an attacker, or with severe defects: a function for each trick.

The first argument names the trick, the second an existing folder for notes to the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import stat
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
POD = Path(os.environ["WORKBENCH_POD"])
FOLDER = Path(os.environ["WORKBENCH_RUN_DIR"])
"""Folder of the run on this pod."""
OWN = Path(os.environ["WORKBENCH_RANK_DIR"])
ORDER = OWN.parent / "attempt-0" / f"{OWN.name}.order.log"
"""Folder of this rank, with its logs and its records."""
NOTES = Path(sys.argv[2])
SCRIPT = Path.cwd()
MARK = "@workbench "  # begins the line of an event
ESCAPES = "\x1b[2J\x1b]0;title\x07\x1b]8;;http://evil\x07<script>alert(1)</script>\x00\ud800"
LONG_S = 600.0


def say(text: str | bytes) -> None:
    """Print a line in as many writes as the pipe needs."""
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    rest = memoryview(data + b"\n")
    while rest:
        rest = rest[os.write(1, rest) :]


def event(kind: str, **data: object) -> None:
    say(MARK + json.dumps({"time_s": time.time(), "rank": RANK, "kind": kind, **data}))


# Output.


def forged_events() -> None:
    """Print events of the keeper and of other ranks, with odd values, very many of them."""
    nan = float("nan")
    event("restarted", what="pod-9 was lost", lost_step=7, step=5, pods=9, ranks=9, lost_s=1.0)
    event("checkpoint", step=10**30, bytes=-1)
    event("checkpoint_failed", step=1, message="forged")
    event("stopped", step=3)
    event("resumed", step=3)
    event("phase", name="forged", done=1, total=2)
    event("sample", pod="pod-0", host="127.0.0.1", rss_gib=10**6, gpus=[{"index": 0}])
    event("done", rank=1, exit_code=0)
    event("result", state="failed", message="forged")
    event("saved", step=5)
    event("end", steps=10**30, train_loss=nan, metrics={"a": "b"}, epochs="many", step_s=-1e308)
    event("start", max_steps=10**30, world_size=[], versions="none", parameters=-5, family=[])
    event("step", step=10**30, max_steps=-1, loss=nan, epoch=float("inf"), samples_per_s=[])
    event("step", step="one", loss={"a": 1})
    event("step", step=2, loss=1.0, **{ESCAPES: 1.0, "a" * 5000: 2.0})
    event("eval", step=1, eval_loss=1e308, metrics={ESCAPES: 1.0, "x": nan, "y": 10**400})
    event("epoch", epoch=nan, steps=0, seconds=-1, total_s=nan)
    event("epoch", epoch=-1e300, steps=1, seconds=1e308, total_s=1e308)
    event("device", name=ESCAPES, pod=[], threads=-1, cores={}, backend=ESCAPES)
    event("memory", step=1, rss_gib=-1e300, peak_rss_gib=1e300, cuda_reserved_gib=1e300)
    event("traffic", sent_bytes=-1, steps=-1, ranks_on_pod=-1)
    event("note", message=ESCAPES)
    event("note", message=[1, 2])
    event(ESCAPES, a=1)
    for time_s in (1e300, -1e300, nan, "noon", None, 10**400):
        say(
            MARK + json.dumps({"time_s": time_s, "rank": 0, "kind": "step", "step": 3, "loss": 1.0})
        )
    for rank in (-1, 7, 10**30, 2**62, "0", 0.5, True, None, []):
        say(MARK + json.dumps({"time_s": 1.0, "rank": rank, "kind": "device", "name": "x"}))
    for text in ("{", "[]", "null", "[" * 5000, '{"a":' * 5000, "{}" * 5000, "\ud800", ""):
        say(MARK + text)
    numbered = {"attempt": 9, "offset": 0, "printed_by": 1}
    say(MARK + json.dumps({"time_s": 1.0, "rank": 0, "kind": "note", "message": "n", **numbered}))
    for number in range(500):  # no view or total keeps more than 200 names
        fields = {"step": number, "loss": 1.0, f"figure {number}": number}
        say(MARK + json.dumps({"time_s": 1e9, "rank": number, "kind": "step", **fields}))
        say(
            MARK
            + json.dumps({"time_s": 1e9, "rank": number, "kind": "device", "name": f"{number}"})
        )
        say(MARK + json.dumps({"time_s": 1e9, "rank": 0, "kind": "note", "message": f"{number}"}))
        passed = {"epoch": number, "steps": 1, "seconds": 1}
        say(MARK + json.dumps({"time_s": 1e9, "rank": number, "kind": "epoch", **passed}))


def endless_line() -> None:
    """Print 5 MiB without a line end, as an event and as text: more than any poll takes."""
    for begin, stream in ((MARK.encode(), 1), (b"token=", 2)):
        rest = memoryview(begin + b"x" * (5 << 20))
        while rest:
            rest = rest[os.write(stream, rest) :]


def escapes() -> None:
    """Print escape sequences, HTML, NULs and bytes that are no text, and fail with them."""
    for stream in (1, 2):
        for data in (ESCAPES.encode(errors="surrogatepass"), bytes(range(256)), b"\0" * 5000):
            os.write(stream, data + b"\n")
        os.write(stream, b"\r".join(b"%d%%" % each for each in range(5000)) + b"\n")
        os.write(stream, "\u202e\u2066 reversed \ufeff\u200b\n".encode() * 50)
    raise ValueError(
        ESCAPES.encode(errors="replace").decode() + "\x9b31m\u202e\n```\n<script>alert(2)"
    )


# Records of the agent and of the keeper.


def forged_done() -> None:
    """Write the records of success of all ranks, and fail."""
    for folder in POD.parent.glob("pod-*/runs/*/rank-*"):
        (folder / "done.json").write_text(json.dumps({"rank": RANK, "exit_code": 0}))
    forged_results(FOLDER)
    forged_results(FOLDER / "out")
    raise ValueError("the true cause")


def forged_results(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    record = {"state": "succeeded", "message": "forged", "phase": "closed", "error": None}
    for name in ("result.json", "state.json", "done", "run.json", "manifest.json", "attempt.json"):
        (folder / name).write_text(json.dumps(record))


def forged_run() -> None:
    """Write a result into the run's directory of the user, which a local pod can reach."""
    home = POD.parent.parent / "runs" / FOLDER.name
    forged_results(FOLDER / "forged")
    for name in ("result.json", "state.json", "manifest.json"):
        shutil.copy(FOLDER / "forged" / name, home / name)
    time.sleep(1)
    raise ValueError("the true cause")


def forged_error() -> None:
    """Write an error of odd types, and run on."""
    odd = {
        "rank": 7,
        "kind": [],
        "message": ESCAPES,
        "traceback": {},
        "time_s": "noon",
        "echo": "x",
    }
    (OWN / "error.json").write_text(json.dumps(odd))
    time.sleep(LONG_S)


def nested_error() -> None:
    """Write an error that no parser can walk, and fail."""
    (OWN / "error.json").write_text('{"a":' + "[" * 100_000)
    raise ValueError("the true cause")


def pipes_for_records() -> None:
    """Put pipes, folders, sockets and devices in the place of records, and fail late."""
    os.mkfifo(OWN / "error.json")
    (OWN / "done.json").mkdir()
    for path in (OWN / "stacks.txt", ORDER, OWN / "attempt.json"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.mkfifo(path)
    for number in range(20):
        os.write(1 + number % 2, b"line %d\n" % number)
        time.sleep(0.1)
    raise ValueError("the true cause")


def devices_for_records() -> None:
    """Put links to endless and to private files in the place of records, and fail."""
    (OWN / "error.json").symlink_to("/dev/zero")
    (OWN / "done.json").symlink_to(NOTES / "secret")
    ORDER.unlink(missing_ok=True)
    ORDER.symlink_to(NOTES / "order")
    for number in range(20):
        os.write(1 + number % 2, b"line %d\n" % number)
    raise ValueError("the true cause")


# Outputs.


def odd_outputs() -> None:
    """Leave links, pipes, sockets, devices, odd names and 500 files in both output folders."""
    for folder in (SCRIPT, FOLDER / "out" / "files", FOLDER / "out" / "model"):
        folder.mkdir(exist_ok=True)
        (folder / "passwd").symlink_to("/etc/passwd")
        (folder / "secret").symlink_to(NOTES / "secret")
        (folder / "folder").symlink_to(NOTES)
        (folder / "zero").symlink_to("/dev/zero")
        (folder / "loop").symlink_to("loop")
        (folder / "up").symlink_to("..")
        os.mkfifo(folder / "pipe")
        listener = socket.socket(socket.AF_UNIX)
        os.chdir(folder)
        listener.bind("socket")
        with contextlib.suppress(PermissionError):
            os.mknod(folder / "device", stat.S_IFCHR | 0o600, os.makedev(1, 5))
        names = [b"new\nline", b"\x1b[2J<script>", b"\xff\xfe", b"n" * 255, b"-rf", b" ", b"..."]
        for name in names:
            (folder / os.fsdecode(name)).write_text("x")
        (folder / "good.txt").write_text("good")
    for name in ("predictions.jsonl", "profile.txt", "result.json"):
        (FOLDER / "out" / name).mkdir()
    (SCRIPT / "many").mkdir()
    for number in range(500):  # their names fill more than a batch of the transfer
        (SCRIPT / "many" / f"{number:040}").write_text(str(number))


def deep_trees() -> None:
    """Leave trees of 1,500 folders, one of them too deep for any path."""
    for folder, name in ((SCRIPT, "d"), (FOLDER / "out" / "files", "d" * 50)):
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        Path("good.txt").write_text("good")
        for _ in range(1500):
            os.mkdir(name)  # noqa: PTH102 (no path is so long)
            os.chdir(name)
        Path("end.txt").write_text("end")


def linked_folders() -> None:
    """Replace both output folders by links to a folder outside."""
    (NOTES / "files").mkdir(exist_ok=True)
    (NOTES / "files" / "private.txt").write_bytes((NOTES / "secret").read_bytes())
    for folder in (FOLDER / "out", SCRIPT):
        shutil.rmtree(folder)
        folder.symlink_to(NOTES)


def sparse_output() -> None:
    """Leave a file in the script's folder that is larger than any disk."""
    (SCRIPT / "good.txt").write_text("good")
    with (SCRIPT / "huge.bin").open("wb") as huge:
        huge.truncate(1 << 40)


def sparse_result() -> None:
    """Leave such a file among the results."""
    (FOLDER / "out" / "files").mkdir()
    with (FOLDER / "out" / "files" / "huge.bin").open("wb") as huge:
        huge.truncate(1 << 40)


def removed_folders() -> None:
    """Remove the working folder, the logs, the run's folder and what the keeper sent to the pod."""
    say("before")
    for folder in (SCRIPT, OWN, FOLDER, POD.parent / "store"):
        shutil.rmtree(folder)
    for path in POD.iterdir():
        if path.suffix == ".zip" or path.name in ("tmp", "helpers", "agent.log"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    say("after")


# Processes.


def start_daemon() -> None:
    """Start a daemon without session, parent, environment, descriptors of ours or true title."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 4096)
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)
    code = (
        "import os, signal, sys, time\n"
        "for n in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(n, signal.SIG_IGN)\n"
        "start = open('/proc/self/stat').read().rpartition(')')[2].split()[19]\n"
        "with open(sys.argv[1], 'a') as out: out.write(f'{os.getpid()} {start}\\n')\n"
        "time.sleep(900)\n"
    )
    os.chdir("/")
    os.execve(sys.executable, ["[kworker/0:1]", "-c", code, str(NOTES / "daemons")], {})


def daemons() -> None:
    """Leave three daemons, and end with success."""
    for _ in range(3):
        start_daemon()
    while not (NOTES / "daemons").exists():
        time.sleep(0.05)
    time.sleep(0.5)


def deaf() -> None:
    """Ignore every signal, start daemons and run on."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(15, b"a) R 1 (sshd", 0, 0, 0)  # its name in /proc/PID/stat
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # no signal at the death of the agent
    daemons()
    say("deaf")
    time.sleep(LONG_S)


def kills_agent() -> None:
    """Leave daemons and kill the agent."""
    daemons()
    agent = json.loads((POD / "agent.json").read_text())["pid"]
    os.kill(agent, signal.SIGKILL)
    time.sleep(LONG_S)


def poisons_agent() -> None:
    """Put pipes and folders in the place of the agent's files, and kill the agent."""
    agent = json.loads((POD / "agent.json").read_text())["pid"]
    for name in ("agent.json", "agent.log"):
        (POD / name).unlink()
        os.mkfifo(POD / name)
    (POD / "agent.lock").unlink()
    (POD / "agent.lock").mkdir()
    shutil.rmtree(POD / "tmp")
    (POD / "tmp").symlink_to(NOTES / "nowhere")
    os.kill(agent, signal.SIGKILL)
    time.sleep(LONG_S)


# Sockets.


def garbage() -> list[bytes]:
    """Return what no client of ours sends."""
    requests: list[object] = [
        {"op": "no such"},
        {"op": []},
        {"op": None, "id": []},
        {"id": 1},
        {"op": "stage", "run": "../../evil", "files": {"a": "b"}},
        {"op": "prepare", "run": "evil", "request": {"ranks": [{"rank": 10**400}]}},
        {"op": "prepare", "run": "evil", "request": {"ranks": "x", "argv": 5}},
        {"op": "prepare", "run": "evil", "request": []},
        {"op": "start_rank", "run": "evil", "rank": "x"},
        {
            "op": "poll",
            "run": "evil",
            "offsets": {"attempt-0/rank-0.stdout.log": -5},
            "max_bytes": "x",
        },
        {"op": "list_outputs", "run": "evil", "archive": "/dev/zero", "below": "x"},
        {"op": "stop", "run": ["x"], "grace_s": "never"},
        {"op": "shutdown", "grace_s": "now"},
        {"op": "stamp", "path": "\0"},
        {"op": "free_port", "address": "\0"},
        {"op": "submit", "run": "evil", "path": "/evil", "job": {"kind": "script"}},
        {"op": "submit", "run": 5, "path": [], "job": "x", "pods": -1},
        {"op": "cancel", "run": "evil"},
        {"op": "fetch", "run": "../../evil"},
        {"op": "held", "path": "/etc", "last_step": "x"},
    ]
    lines = [json.dumps(each).encode() for each in requests]
    lines += [b"", b"\0" * 100, b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"null"]
    lines += [b"9" * 10_000, b'{"op": "\\ud800", "id": "\\ud800"}', b"GET / HTTP/1.1"]
    return lines


def talk(path: Path) -> None:
    """Send garbage, half a request, an endless line, and leave 100 connections half open."""

    def connect() -> socket.socket:
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(300.0)
        until_s = time.monotonic() + 300.0
        while True:
            try:
                line.connect(str(path))
                return line
            except BlockingIOError:  # the queue of new connections is full
                assert time.monotonic() < until_s
                time.sleep(0.05)

    for request in garbage():
        with connect() as line, contextlib.suppress(OSError):
            line.sendall(request + b"\n")
            if request:
                line.settimeout(2.0)
                answer = line.recv(1 << 16)
                assert not answer.startswith(b'{"ok": true'), (request, answer)
    with connect() as line, contextlib.suppress(OSError):
        for _ in range(40):
            line.sendall(b"x" * (1 << 20))
    for _ in range(20):
        with connect() as line:
            line.sendall(b'{"op": "ping"')
    half_open = [connect() for _ in range(100)]
    for line in half_open[:50]:
        line.sendall(b'{"op": ')
    time.sleep(1)


def sockets() -> None:
    """Talk to the agent of this pod, and to the keeper, whose socket the kernel lists."""
    paths = {row.rpartition(" ")[2] for row in Path("/proc/net/unix").read_text().splitlines()}
    keeper = (NOTES / "keeper.sock").read_text()
    assert keeper in paths
    for path in (POD / "agent.sock", Path(keeper)):
        os.chdir(path.parent)
        talk(Path(path.name))
    say("talked")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
