"""A training script as of a user: torch and gloo, for five steps or until a file appears."""

import argparse
import itertools
import time
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--until", type=Path, help="end when this file exists")
args = parser.parse_args()

dist.init_process_group("gloo")
for step in itertools.count():
    total = torch.ones(4)
    total[3] = float(args.until.exists() if args.until else step == 4)
    dist.all_reduce(total)
    print(f"step {step} sum {total[0].item():.0f}", flush=True)
    if total[3]:
        break
    time.sleep(0.02)
dist.destroy_process_group()
