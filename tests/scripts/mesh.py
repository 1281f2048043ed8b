"""A collective without torch: rank 0 counts the ranks at each step; ways to go wrong on request.

Says what gloo says when a peer is gone.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--pause-s", type=float, default=0.02)
parser.add_argument("--fail", choices=("leave", "raise", "kill", "deaf"))
parser.add_argument("--rank", type=int, default=1, help="the rank that fails")
parser.add_argument("--at", type=int, default=2, help="the step at which it does")
parser.add_argument("words", nargs="*")
args = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def connect() -> socket.socket:
    while True:
        try:
            return socket.create_connection(where, timeout=300)
        except ConnectionRefusedError:
            time.sleep(0.05)


def heard(peer: socket.socket) -> int:
    if not (told := peer.recv(1)):
        raise RuntimeError(f"Connection closed by peer [{where[0]}]:{where[1]}")
    return told[0]


def fail() -> None:
    match args.fail:
        case "leave":
            sys.exit(0)
        case "raise":
            raise ValueError("row 17 is bad")
        case "kill":
            subprocess.Popen(["sleep", "600"])
            os.kill(os.getpid(), signal.SIGKILL)
        case "deaf":
            time.sleep(600)


if rank == args.rank and args.fail == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"words {args.words} token {os.environ.get('MY_TOKEN', '')[:3]}", flush=True)
if rank == 0:
    with socket.create_server(where) as server:
        peers = [server.accept()[0] for _ in range(world - 1)]
else:
    peers = [connect()]
for step in range(args.steps):
    if rank == args.rank and step == args.at:
        fail()
    if rank:
        peers[0].sendall(bytes([1]))
        total = heard(peers[0])
    else:
        total = 1 + sum(map(heard, peers))
        for peer in peers:
            peer.sendall(bytes([total]))
    print(f"step {step} sum {total}", flush=True)
    time.sleep(args.pause_s)
