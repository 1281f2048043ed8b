"""A real agent for a test: served by its own command line, spoken to by socket, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.poll import until
from workbench.agent.clients.client import Client
from workbench.agent.main import end_leftovers
from workbench.base.process import Process, look_up

REPOSITORY = Path(__file__).resolve().parents[2]
AGENT = (sys.executable, "-m", "workbench.agent")
PATIENCE_S = 600.0
HOME = pwd.getpwuid(os.geteuid()).pw_dir
"""As the pods' daemon sets it, whatever the home folder of the tests is."""


class PodAgent:
    """The agent of one pod's root, as a keeper uses it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pid = 0
        self.keeper: Client | None = None
        self.offsets: dict[str, dict[str, int]] = {}
        self.output: dict[str, bytes] = {}

    def serve(
        self, *flags: str, env: dict[str, str] | None = None, timeout_s: float = PATIENCE_S
    ) -> int:
        """Bring it up (again) and say hello as the keeper."""
        self.pid = self.serve_only(*flags, env=env, timeout_s=timeout_s)
        self.keeper = Client(self.root, PATIENCE_S)
        self.ask("hello", keeper=True, address="127.0.0.1")
        return self.pid

    def serve_only(
        self, *flags: str, env: dict[str, str] | None = None, timeout_s: float = PATIENCE_S
    ) -> int:
        flags = flags if "--warm" in flags else (*flags, "--no-warm")
        done = subprocess.run(
            [*AGENT, "serve", str(self.root), *flags],
            env={**os.environ, "HOME": HOME, "PYTHONPATH": str(REPOSITORY), **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        answer = json.loads(done.stdout)
        assert answer["ok"] and done.returncode == 0, done
        return int(answer["pid"])

    def ask(self, op: str, **message: object) -> dict:
        assert self.keeper is not None
        return self.keeper.ask(op, **message)

    def request(self, run: str, code: str, ranks: int = 1, **more: object) -> dict:
        return {
            "run": run,
            "success": "exit code",
            "ranks": [{"rank": r, "local_rank": r, "pod": self.root.name} for r in range(ranks)],
            "world_size": ranks,
            "master_addr": "127.0.0.1",
            "master_port": 29500,
            "env": {},
            "argv": [sys.executable, "-c", code],
            **more,
        }

    def start(self, run: str, code: str, ranks: int = 1, **more: object) -> None:
        self.ask("prepare", run=run, request=self.request(run, code, ranks, **more))
        self.ask("start", run=run)

    def poll(self, run: str, max_bytes: int = 1 << 20) -> dict:
        """Poll once, and keep what came of the output in `output`."""
        known = self.offsets.setdefault(run, {})
        answer = self.ask("poll", run=run, offsets=known, max_bytes=max_bytes)
        for name, chunk in answer["chunks"].items():
            assert chunk["offset"] == known.get(name, 0)
            data = chunk["data"].encode("latin-1")
            known[name] = chunk["offset"] + len(data)
            self.output[name] = self.output.get(name, b"") + data
        return answer

    def until(self, run: str, met: Callable[[dict], bool], timeout_s: float = PATIENCE_S) -> dict:
        """Poll until something is so."""
        answers: list[dict] = []
        until(
            lambda: answers.append(self.poll(run)) or met(answers[-1]),
            timeout_s,
            why=lambda: answers[-1],
        )
        return answers[-1]

    def until_exited(self, run: str, timeout_s: float = PATIENCE_S) -> dict:
        """Poll until all ranks and their processes have ended and their output has been read."""
        return self.until(
            run,
            lambda a: (
                all(r["phase"] == "exited" for r in a["ranks"])
                and not a["live_processes"]
                and not a["chunks"]
            ),
            timeout_s,
        )

    def until_printed(self, run: str, text: str, timeout_s: float = PATIENCE_S) -> bytes:
        """Poll until rank 0 has printed something."""
        self.until(
            run,
            lambda _: text.encode() in self.output.get("attempt-0/rank-0.stdout.log", b""),
            timeout_s,
        )
        return self.output["attempt-0/rank-0.stdout.log"]

    def close(self) -> None:
        """End it and all it started."""
        if self.keeper is not None:
            with contextlib.suppress(OSError):  # the test has ended it
                self.keeper.ask("shutdown", grace_s=0.2)
            self.keeper.close()
        state = self.root / "agent.json"
        if state.exists():
            said = json.loads(state.read_text())
            process = look_up(said["pid"])
            if process is not None and process.start_time == said["start_time"]:
                process.send(9)
        end_leftovers(self.root)


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[Callable[..., PodAgent]]:
    """Makes agents, not yet served, for pods of one machine."""
    made: list[PodAgent] = []

    def make(name: str = "pod-0", under: Path | None = None) -> PodAgent:
        made.append(PodAgent((under or tmp_path) / "pods" / name))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def in_fork() -> Iterator[None]:
    """Take away the handler that a fork of the agent, which makes an environment, would keep."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def agent(make_agent: Callable[..., PodAgent]) -> PodAgent:
    """An agent without a warm server, with a keeper's connection."""
    made = make_agent()
    made.serve()
    return made


def gone(process: Process | None) -> bool:
    """Tell whether this very process has ended."""
    if process is None:
        return True
    now = look_up(process.pid)
    return now is None or now != process or now.zombie


@pytest.fixture
def wait_gone() -> Callable[..., float]:
    """Waits until processes have ended; returns the seconds it took."""

    def wait(*processes: Process | None, timeout_s: float = 10.0) -> float:
        return until(
            lambda: all(map(gone, processes)), timeout_s, every_s=0.01, why=lambda: processes
        )

    return wait
