"""A training script without torch: numbered lines and events, and each rank's own record of them.

The record tells every start of a rank and every printed line apart by the attempt, so that a run
that was trained twice, and a line or an event that came twice, can be counted.
"""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--lines", type=int, default=40)
parser.add_argument("--witness", type=Path, required=True, help="a folder outside of any run")
args = parser.parse_args()

rank = os.environ["RANK"]
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
with (args.witness / "starts").open("a") as starts:
    starts.write(f"{attempt} {rank}\n")
name = f"try-{attempt}-rank-{rank}"
count = os.open(args.witness / f"{name}.count", os.O_WRONLY | os.O_CREAT)
for n in range(args.lines):
    print(f"try {attempt} rank {rank} line {n}", flush=True)
    beat = {"time_s": time.time(), "rank": int(rank), "kind": "beat", "n": n}
    beat |= {"of": rank, "try": attempt}
    print("@workbench " + json.dumps(beat), flush=True)
    os.pwrite(count, b"%8d" % (n + 1), 0)
    time.sleep(0.04)
(args.witness / f"{name}.whole").touch()
