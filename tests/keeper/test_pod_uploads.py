"""Pods upload their large files by links: no byte and no credential passes from here to there."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.s3server import SECRET, S3Server, s3_server
from tests.pods.test_store import PodHere
from workbench.base.errors import RunError
from workbench.keeper.link import files
from workbench.keeper.link.pod_uploads import PodUploads
from workbench.pods.pod import Pod
from workbench.pods.ssh.bulk import pipe
from workbench.pods.ssh.bulk.transfer import LARGE, SshRoute
from workbench.rundir.checkpoints import write_manifest
from workbench.rundir.paths import RunPaths
from workbench.rundir.stores.checkpoints import (
    StoredCheckpoint,
    checkpoint_of,
    is_stored,
    put_checkpoint,
)
from workbench.rundir.stores.store import Store

pytestmark = pytest.mark.slow
PODS = ("pod-0", "pod-1")
SIZE = LARGE + 4321
TENSORS = "rank-{}/tensors.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def store(server: S3Server, request: pytest.FixtureRequest) -> Iterator[Store]:
    with Store(f"s3://bucket/{request.node.name}", server.environment) as store:
        yield store


class Fleet:
    """Pods that are processes of this machine, with the parts of a checkpoint of step 7."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = RunPaths(folder / "run")
        self.cut: set[str] = set()
        """Names of pods that reach no store."""
        self.said: list[bytes] = []
        """What was sent to the pods."""
        monkeypatch.setattr(files, "route_to", self._route)
        write = pipe.Pipe.write

        def listen(line: pipe.Pipe, data: bytes) -> None:
            self.said.append(bytes(data))
            write(line, data)

        monkeypatch.setattr(pipe.Pipe, "write", listen)
        self.pods = [PodHere(folder / name) for name in PODS]
        for rank, pod in enumerate(self.pods):
            pod.pod = Pod(name=PODS[rank], address=f"127.0.0.{rank + 2}", root=pod.pod.root)
            content = random.Random(rank).randbytes(SIZE)
            copy = self.here.checkpoints / "step-7" / PODS[rank] / f"rank-{rank}"
            for part in (copy, self.part_of(rank)):
                part.mkdir(parents=True)
                (part / "tensors.safetensors").write_bytes(content)
                (part / "state.json").write_text("{}")
                write_manifest(part, rank=rank, step=7, world_size=2)

    def part_of(self, rank: int) -> Path:
        return self._checkpoints(self.pods[rank]) / "step-7" / f"rank-{rank}"

    def context(self) -> Any:
        def on_pod(link: PodHere) -> SimpleNamespace:
            return SimpleNamespace(checkpoints=PurePosixPath(self._checkpoints(link)))

        return SimpleNamespace(links=self.pods, on_pod=on_pod)

    def checkpoint(self) -> StoredCheckpoint:
        return checkpoint_of(self.here, 7)

    def _checkpoints(self, pod: PodHere) -> Path:
        return Path(pod.pod.root) / "checkpoints"

    def _route(self, pod: Pod, *_of: object) -> SshRoute:
        def command(argv: Sequence[str]) -> list[str]:
            return [*(["unshare", "-n"] if pod.name in self.cut else []), *argv]

        return SshRoute(
            name=pod.name, host=pod.address, login="", python=sys.executable, command=command
        )


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(tmp_path, monkeypatch)


def names(*ranks: int) -> set[str]:
    return {f"{PODS[rank]}/{TENSORS.format(rank)}" for rank in ranks}


def is_whole(server: S3Server, store: Store, fleet: Fleet) -> bool:
    """Whether the store has the files of the run directory, and nothing unfinished."""
    prefix = f"{store.address.removeprefix('s3://bucket/')}/step-7/"
    found = server.objects("bucket", prefix)
    found.pop(f"{prefix}checkpoint.json")
    folder = fleet.here.checkpoints / "step-7"
    expected = {f"{prefix}{name}": (folder / name) for name in fleet.checkpoint().files}
    unfinished = server.client().list_multipart_uploads(Bucket="bucket").get("Uploads", [])
    return found == {key: path.read_bytes() for key, path in expected.items()} and not unfinished


def test_pods_upload_their_large_files_and_this_machine_the_rest(
    fleet: Fleet, server: S3Server, store: Store
) -> None:
    uploads = PodUploads(fleet.context())
    checkpoint = fleet.checkpoint()
    there = uploads.upload(store, checkpoint)
    assert there == names(0, 1)
    assert uploads.notes == []
    # A copy that cannot be read here would fail an upload from here.
    for name in there:
        (fleet.here.checkpoints / "step-7" / name).rename(fleet.here.root / name.replace("/", "-"))
    put_checkpoint(store, fleet.here, checkpoint, there)
    for name in there:
        (fleet.here.root / name.replace("/", "-")).rename(fleet.here.checkpoints / "step-7" / name)
    assert is_stored(store, checkpoint)
    assert is_whole(server, store, fleet)
    sent = b"".join(fleet.said)
    assert SECRET.encode() not in sent
    assert len(sent) < SIZE // 100


def test_a_file_goes_in_parts_and_arrives_whole(
    fleet: Fleet, server: S3Server, store: Store
) -> None:
    part_bytes = 5 << 20  # the least of S3
    begun = store.begin("step-7/parts", SIZE)
    assert (begun.part_bytes, len(begun.links)) == (64 << 20, 1)
    assert "http" not in repr(begun)
    store.drop(begun)
    code = (
        "import sys, json; from workbench.rundir.stores import work; "
        f"work._PART_BYTES = {part_bytes}; work.main()"
    )
    with Store(store.address, server.environment) as small, pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.rundir.stores.store.main_of", lambda _name: ("-c", code))
        begun = small.begin("step-7/parts", SIZE)
    assert len(begun.links) == 2
    told: list[tuple[int, int]] = []
    digest, tags = fleet.pods[0].upload(
        str(fleet.part_of(0) / "tensors.safetensors"),
        begun.links,
        begun.part_bytes,
        lambda done, size: told.append((done, size)),
    )
    store.join(begun, tags)
    key = f"{store.address.removeprefix('s3://bucket/')}/step-7/parts"
    sent = (fleet.part_of(0) / "tensors.safetensors").read_bytes()
    assert server.objects("bucket", key)[key] == sent
    assert digest == fleet.checkpoint().files[f"pod-0/{TENSORS.format(0)}"].sha256


@pytest.mark.parametrize("fault", ["out of reach", "gone", "changed", "no link"])
def test_what_a_pod_cannot_upload_is_named_and_sent_from_here(
    fault: str, fleet: Fleet, server: S3Server, store: Store
) -> None:
    file = fleet.part_of(1) / "tensors.safetensors"
    context = fleet.context()
    match fault:
        case "out of reach":
            fleet.cut.add("pod-1")
        case "gone":
            file.unlink()
        case "changed":
            file.write_bytes(b"!" * SIZE)
        case "no link":
            context.links = context.links[:1]
    uploads = PodUploads(context)
    checkpoint = fleet.checkpoint()
    there = uploads.upload(store, checkpoint)
    assert there == names(0)
    words = {
        "out of reach": "the store took no part from here",
        "gone": "No such file",
        "changed": "is not the file that was copied",
    }
    if fault in words:
        (note,) = uploads.notes
        assert note.startswith("this machine uploaded the checkpoints of pod-1, because pod-1")
        assert words[fault] in note
        assert "http" not in note
        # The pod is not asked again, until a user asks for the files again.
        assert uploads.upload(store, checkpoint) == names(0)
    put_checkpoint(store, fleet.here, checkpoint, there)
    assert is_whole(server, store, fleet)
    uploads.resume()
    assert uploads.notes == []


def test_an_abandoned_upload_ends(fleet: Fleet, store: Store) -> None:
    uploads = PodUploads(fleet.context())
    begun = threading.Event()

    def hang(*_of: Any) -> tuple[str, list[str]]:
        begun.set()
        while True:
            _of[-1](1, SIZE)

    fleet.pods[0].upload = hang  # type: ignore[method-assign]
    thread = threading.Thread(target=uploads.upload, args=(store, fleet.checkpoint()))
    thread.start()
    assert begun.wait(300)
    uploads.abandon()
    thread.join(300)
    assert not thread.is_alive()


def test_other_stores_get_every_file_from_here(fleet: Fleet) -> None:
    store: Any = SimpleNamespace(address="gs://bucket/runs")
    assert PodUploads(fleet.context()).upload(store, fleet.checkpoint()) == set()


def test_a_store_that_refuses_fails_the_upload(fleet: Fleet, server: S3Server) -> None:
    with (
        Store("s3://nowhere/x", server.environment) as store,
        pytest.raises(RunError, match="s3://nowhere/x cannot be written to"),
    ):
        PodUploads(fleet.context()).upload(store, fleet.checkpoint())
