"""A training script without torch that leaves a file of some size beside its results."""

import argparse
import os
import random
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--bytes", type=int, default=3_000_000)
parser.add_argument("--until", type=Path, help="end when this file exists")
args = parser.parse_args()

print("at work", flush=True)
if os.environ["RANK"] == "0":
    folder = Path(os.environ["WORKBENCH_RUN_DIR"]) / "out" / "files"
    folder.mkdir(parents=True)
    (folder / "big.bin").write_bytes(random.Random(11).randbytes(args.bytes))
while args.until and not args.until.exists():
    time.sleep(0.05)
