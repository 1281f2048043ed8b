"""A training script without torch: numbered lines, and a record here of each rank's progress."""

import argparse
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--lines", type=int, default=60)
parser.add_argument("--pause-s", type=float, default=0.03)
parser.add_argument("--witness", type=Path, required=True, help="a folder outside of any run")
args = parser.parse_args()

rank = os.environ["RANK"]
count = os.open(args.witness / f"rank-{rank}.count", os.O_WRONLY | os.O_CREAT)
for n in range(args.lines):
    print(f"rank {rank} line {n}", flush=True)
    os.pwrite(count, b"%8d" % (n + 1), 0)
    time.sleep(args.pause_s)
(args.witness / f"rank-{rank}.whole").touch()
