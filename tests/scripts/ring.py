"""A training script as a user might bring it: gloo, a few steps, and ways to go wrong on request."""

import argparse
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--pause-s", type=float, default=0.0)
parser.add_argument("--fail", default="")
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("words", nargs="*")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"words {args.words} token {os.environ.get('MY_TOKEN', '')[:3]}", flush=True)
for step in range(args.steps):
    total = torch.ones(4)
    dist.all_reduce(total)
    print(f"step {step} sum {total[0].item():.0f}", flush=True)
    time.sleep(args.pause_s)
    if step == 2 and rank == args.rank:
        match args.fail:
            case "raise":
                raise ValueError("row 17 is bad")
            case "kill":
                subprocess.Popen(["sleep", "600"])
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.exit(3)
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
dist.destroy_process_group()
