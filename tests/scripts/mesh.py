"""A collective without torch: every rank waits for rank 0 at each step, and says what gloo says when a peer is gone."""

import argparse
import os
import socket
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--leaver", type=int, default=-1, help="the rank that exits with 0")
parser.add_argument("--at", type=int, default=20, help="the step at which it does")
args = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def connect() -> socket.socket:
    while True:
        try:
            return socket.create_connection(where, timeout=60)
        except ConnectionRefusedError:
            time.sleep(0.05)


if rank == 0:
    with socket.create_server(where) as server:
        peers = [server.accept()[0] for _ in range(world - 1)]
else:
    peers = [connect()]
for step in range(args.steps):
    if rank == args.leaver and step == args.at:
        sys.exit(0)
    if rank:
        peers[0].sendall(b".")
    if any(not peer.recv(1) for peer in peers):
        raise RuntimeError(f"Connection closed by peer [{where[0]}]:{where[1]}")
    if not rank:
        for peer in peers:
            peer.sendall(b".")
    print("step", step, flush=True)
    time.sleep(0.02)
