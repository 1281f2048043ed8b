"""The agent's command line: `serve`, `connect`, `rank`. Other modules do the work."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.agent.clients.client import bridge, launch_rank, place_from
from workbench.base.process import LEASE_S


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Every pod waits for this program to start, so a command imports only its own modules.
    """
    asked = _parser().parse_args(argv)
    root = Path(asked.root)
    if asked.command == "serve":
        code = _serve(root, asked.lease_s, asked.warm, quiet=asked.connect)
        if asked.connect and code == 0:
            return bridge(root.resolve())
        return code
    if asked.command == "connect":
        return bridge(root)
    return _launch_rank(root, asked)


def _serve(root: Path, lease_s: float, warm: bool, *, quiet: bool) -> int:
    """Start the agent and print its pid, unless quiet: a bridge carries answers only."""
    from workbench.agent.main import serve

    answer: dict[str, object]
    try:
        pid = serve(root, lease_s=lease_s, warm=warm)
        answer = {"ok": True, "pid": pid}
    except (RuntimeError, OSError, ValueError) as error:
        answer = {"ok": False, "error": str(error)}
        sys.stderr.write(f"{error}\n")
    if not quiet:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0 if answer["ok"] else 1


def _launch_rank(root: Path, asked: argparse.Namespace) -> int:
    try:
        place = place_from(vars(asked), os.environ)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return launch_rank(root, asked.run, place, quiet=asked.quiet)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workbench.agent", description="Start, watch and end ranks on a pod."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="make sure that an agent serves a pod's root")
    serving.add_argument("root", metavar="POD_ROOT")
    serving.add_argument(
        "--lease-s",
        type=float,
        default=LEASE_S,
        help="how long to live without a word of the keeper",
    )
    serving.add_argument(
        "--warm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep torch imported",
    )
    serving.add_argument(
        "--connect", action="store_true", help="then bridge stdin and stdout to it"
    )
    connecting = commands.add_parser("connect", help="bridge stdin and stdout to the agent")
    connecting.add_argument("root", metavar="POD_ROOT")
    rank = commands.add_parser("rank", help="start one rank of a prepared run and wait for it")
    rank.add_argument("root", metavar="PODS_ROOT")
    rank.add_argument("run", metavar="RUN_ID")
    for flag in ("--rank", "--local-rank", "--world-size", "--master-port"):
        rank.add_argument(flag, type=int)
    rank.add_argument("--master-addr")
    rank.add_argument("--quiet", action="store_true", help="leave what it prints in the pod's logs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
