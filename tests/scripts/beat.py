"""A training script without torch: numbered lines, until there are enough or a file appears."""

import argparse
import os
import signal
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--lines", type=int, default=1_000_000)
parser.add_argument("--pause-s", type=float, default=0.02)
parser.add_argument("--until", type=Path, help="end when this file exists")
parser.add_argument("--deaf", action="store_true", help="do not listen to SIGTERM")
args = parser.parse_args()

if args.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.environ["RANK"]
for n in range(args.lines):
    print(f"rank {rank} line {n}", flush=True)
    if args.until and args.until.exists():
        break
    time.sleep(args.pause_s)
