"""A training script without torch that writes into its folder as people do, and ends on request."""

import argparse
import contextlib
import fcntl
import os
import socket
import sys
import termios
import time
from pathlib import Path

import workbench

parser = argparse.ArgumentParser()
parser.add_argument("--end", choices=("well", "fail", "wait"), default="well")
parser.add_argument("--bytes", type=int, default=9 << 20)
args = parser.parse_args()

rank = int(os.environ["RANK"])
Path("out").mkdir(exist_ok=True)
Path("out", "common.txt").write_text("the same on every pod")
Path("out", f"shard-{rank}.pt").write_text(f"shard {rank}")
Path(f"note-{rank}.txt").write_text(
    " ".join([f"note {rank}", *(os.environ.get(name, "-") for name in ("JOBS", "PODS"))])
)
if rank == 0:
    Path("final").mkdir()
    Path("final", "model.bin").write_bytes(bytes(range(256)) * (args.bytes // 256))
    Path("config.txt").write_text("changed")
    Path("__pycache__").mkdir()
    Path("__pycache__", "a.pyc").write_text("a cache")
    Path("passwd").symlink_to("/etc/passwd")
    os.mkfifo("pipe")
    Path(os.fsdecode(b"bad-\xff")).write_text("a name that is not UTF-8")
for number in range(4):  # by turns, each once the other has been read
    while any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)) != bytes(4) for fd in (1, 2)):
        time.sleep(0.01)
    print(f"line {number}", file=(sys.stdout, sys.stderr)[number % 2], flush=True)
for step in (1, 2):
    workbench.log(
        step, loss=3.0 - step, max_steps=2, samples_per_s=8, accuracy=step / 4, note="not a number"
    )
workbench.log(2, eval_loss=0.75, eval_rouge=0.5)
print("written", flush=True)
if args.end == "fail":  # not before the other rank, which would be ended too, has come as far
    meeting = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        socket.create_server(meeting).accept()
    while rank:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(meeting)
            break
        time.sleep(0.01)
    raise ValueError("failed after it wrote")
while args.end == "wait":
    time.sleep(0.05)
