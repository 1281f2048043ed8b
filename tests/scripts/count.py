"""A training script without torch that speaks like the trainer: numbered lines, each an event."""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--lines", type=int, default=100)
parser.add_argument("--pause-s", type=float, default=0.02)
parser.add_argument(
    "--gate", type=Path, help="print 50 lines for each byte of this file, as they come"
)
parser.add_argument(
    "--until", type=Path, help="go on after the lines, in silence, until this file exists"
)
parser.add_argument("--leaves-mib", type=int, default=0, help="write files of 1 MiB at the end")
args = parser.parse_args()

rank = int(os.environ["RANK"])
for n in range(args.lines):
    while args.gate and args.gate.stat().st_size <= n // 50:
        time.sleep(0.02)
    event = {
        "time_s": time.time(),
        "rank": rank,
        "kind": "step",
        "step": n + 1,
        "max_steps": args.lines,
        "loss": 1.0 / (n + 1),
    }
    os.write(1, f"rank {rank} line {n}\n@workbench {json.dumps(event)}\n".encode())
    time.sleep(args.pause_s)
while args.until and not args.until.exists():
    time.sleep(0.05)
for n in range(args.leaves_mib):
    Path(f"left-{rank}-{n}").write_bytes(os.urandom(1 << 20))
