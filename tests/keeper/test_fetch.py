"""One pod fetches a hub model, and the other pods take its files: each byte leaves the hub once."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.modelhub import MODEL, TOKEN, ModelHub, model_hub
from tests.pods.test_store import PodHere
from workbench.finetune.job.finetune import FineTune
from workbench.keeper.link import files
from workbench.keeper.link.context import RunContext
from workbench.keeper.link.peers import Peers
from workbench.keeper.run.fetch import FETCHED, PodFetches
from workbench.pods.pod import Pod
from workbench.pods.ssh.bulk import transfer
from workbench.pods.ssh.bulk.transfer import SshRoute
from workbench.pods.ssh.identity import Identity
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import ClusterSpec, RunSpec

WEIGHTS = random.Random(3).randbytes((9 << 20) + 77)
CONTENT = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": WEIGHTS,
}
UNREAD = {"pytorch_model.bin": b"older form", "onnx/model.onnx": b"other", "README.md": b"# me"}


class Fleet:
    """Pods that are processes of this machine, each with a cache of its own."""

    def __init__(self, folder: Path, hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.hub, self.peers = folder, hub, Peers()
        self.passed: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.argv: list[str] = []
        self.homes: dict[str, str] = {}
        """Cache of a pod, by name. Default: the name of the pod."""
        self.dead: set[str] = set()
        """Names of pods that send no file."""
        monkeypatch.setattr(files, "route_to", self.route)
        between, mark = transfer.send_between, files.marked

        def marked(argv: Sequence[str]) -> tuple[list[str], bytes]:
            self.argv += argv
            return mark(argv)

        monkeypatch.setattr(files, "marked", marked)

        def send_between(giver: SshRoute, taker: SshRoute, *rest: Any) -> None:
            if giver.name in self.dead:
                giver = dataclasses.replace(giver, command=lambda _argv: ["false"])
            between(giver, taker, *rest)
            self.passed.append((giver.name, taker.name))

        monkeypatch.setattr(files, "send_between", send_between)
        self.links = [self.make(number) for number in range(3)]

    def make(self, number: int) -> PodHere:
        pod = PodHere(self.folder / f"pod-{number}")
        pod.pod = Pod(
            name=f"pod-{number}",
            address=f"127.0.0.{number + 2}",
            root=pod.pod.root,
            python=sys.executable,
        )
        pod.peers = self.peers
        return pod

    def home(self, pod: str) -> Path:
        return self.folder / "homes" / self.homes.get(pod, pod)

    def route(self, pod: Pod, *_of: object) -> SshRoute:
        def command(argv: Sequence[str]) -> list[str]:
            return ["env", f"HF_HOME={self.home(pod.name)}", *argv]

        return SshRoute(
            name=pod.name, host=pod.address, login="", python=sys.executable, command=command
        )

    def fetch(self, revision: str | None = None, *, attempt: int = 1) -> dict[str, str]:
        env = {"HF_ENDPOINT": self.hub.url, "HF_TOKEN": TOKEN}
        job = FineTune(model=MODEL, model_revision=revision, env=env)
        root = self.folder / "run"
        root.mkdir(exist_ok=True)
        context = RunContext(
            run_id="run",
            paths=RunPaths(root),
            spec=RunSpec(cluster=ClusterSpec(count=3), job=job),
            identity=Identity(root),
            refresh=list,
            links=self.links,  # type: ignore[arg-type]
            attempt=attempt,
        )
        wanted = job.fetch_for_pods()
        assert wanted is not None
        fetches = PodFetches(context, wanted, self.notes.append, lambda: False)
        fetches.run(lambda action, link: action(link))
        return fetches.folders

    def check(self, folders: dict[str, str], content: dict[str, bytes] = CONTENT) -> None:
        """Compare the content of all caches, as `huggingface_hub` reads them without a network."""
        assert sorted(folders) == ["pod-0", "pod-1", "pod-2"], self.notes
        for pod, folder in folders.items():
            there = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
            assert there == content
            assert not [*self.home(pod).rglob("*.part*")]
        # transformers finds the files of a pod that took them, without a network.
        code = (
            "import os; from transformers.utils.hub import cached_file;"
            f"print(os.path.dirname(cached_file({MODEL!r}, 'config.json')))"
        )
        env = {**os.environ, "HF_HOME": str(self.home("pod-2")), "HF_HUB_OFFLINE": "1"}
        env.pop("HF_HUB_CACHE", None)
        found = subprocess.run(
            [sys.executable, "-c", code], env=env, check=True, stdout=-1, text=True
        )
        assert found.stdout.strip() == folders["pod-2"]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with model_hub({**CONTENT, **UNREAD}) as hub:
        yield Fleet(tmp_path, hub, monkeypatch)


def sizes(content: dict[str, bytes]) -> dict[str, int]:
    return {name: len(data) for name, data in content.items()}


def test_the_hub_serves_a_model_once_and_the_pods_pass_it_on(fleet: Fleet) -> None:
    fleet.check(fleet.fetch())
    assert fleet.hub.served == sizes(CONTENT)
    assert sorted({taker for _, taker in fleet.passed}) == ["pod-1", "pod-2"]
    assert len(fleet.passed) == 2 * len(CONTENT)
    record = json.loads((fleet.folder / "run" / FETCHED).read_text())
    assert record["commit"] == fleet.hub.main and record["bytes"] == sum(sizes(CONTENT).values())
    assert fleet.notes == [f"all pods use me/small at {fleet.hub.main}; pod-0 fetched the files"]
    # The token is in no argument, note or record.
    assert fleet.argv
    assert TOKEN not in " ".join([*fleet.argv, *fleet.notes, json.dumps(record)])
    # Pods that have the files take nothing.
    fleet.passed.clear()
    fleet.check(fleet.fetch())
    assert not fleet.passed and fleet.hub.served == sizes(CONTENT)


def test_a_restart_continues_with_the_commit_of_the_start(fleet: Fleet) -> None:
    first = fleet.fetch()
    fleet.hub.push({**CONTENT, "config.json": b"{}"})
    # A replaced pod has an empty cache.
    fleet.homes["pod-1"] = "new"
    again = fleet.fetch(attempt=2)
    assert {Path(folder).name for folder in again.values()} == {Path(first["pod-0"]).name}
    fleet.check(again)


def test_pods_with_one_cache_take_nothing(fleet: Fleet) -> None:
    fleet.homes = {"pod-1": "pod-0", "pod-2": "pod-0"}
    fleet.check(fleet.fetch())
    assert not fleet.passed and fleet.hub.served == sizes(CONTENT)


def test_a_pod_that_cannot_take_fetches_the_same_commit_itself(fleet: Fleet) -> None:
    fleet.dead.add("pod-0")
    fleet.check(fleet.fetch())
    assert sum("itself" in note for note in fleet.notes) == 2
    assert fleet.hub.served == {name: 3 * size for name, size in sizes(CONTENT).items()}


def test_a_fetch_that_breaks_half_way_continues(fleet: Fleet) -> None:
    fleet.hub.breaks.add("model.safetensors")
    fleet.check(fleet.fetch())
    # huggingface_hub asks for the rest, or for the one file again.
    served = {**fleet.hub.served}
    assert served.pop("model.safetensors") in (len(WEIGHTS), len(WEIGHTS) // 2 + len(WEIGHTS))
    assert served == {n: len(data) for n, data in CONTENT.items() if n != "model.safetensors"}


def test_without_the_hub_and_without_the_files_ranks_fetch_and_a_note_says_so(
    fleet: Fleet,
) -> None:
    fleet.hub.url = "http://127.0.0.1:9"
    assert fleet.fetch() == {}
    assert len(fleet.notes) == 1
    assert fleet.notes[0].startswith("pod-0 did not fetch me/small, so ranks fetch it: pod-0")
