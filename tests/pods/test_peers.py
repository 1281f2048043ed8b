"""Pods take large files from each other: one copy leaves this machine, whole and verified."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.namespaces import Namespace, joined
from tests.fakes.sshhosts import SSHHost
from tests.pods.test_store import PodHere
from workbench import Cluster, FineTune, PodSpec, SSHPods
from workbench.base.errors import RemoteError
from workbench.keeper.link import files
from workbench.keeper.link.peers import Peers
from workbench.pods.pod import Pod
from workbench.pods.ssh.bulk import transfer
from workbench.pods.ssh.bulk.transfer import PodOffer, SshRoute, send_between
from workbench.pods.ssh.identity import Identity

MIB = 1 << 20
SIZE = 12 * MIB + 345


class Pods:
    """Pods that are processes of this machine, each with a store of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.peers = Peers()
        self.sent: list[str] = []
        """Names of the pods that got the file from this machine."""
        self.moved: list[tuple[str, str]] = []
        self.apart: set[str] = set()
        """Names of pods that reach no other pod."""
        self._lock = threading.Lock()
        monkeypatch.setattr(files, "route_to", self.route)
        send, between = transfer.send_file, transfer.send_between

        def send_file(route: SshRoute, *rest: Any) -> str:
            self.sent.append(route.name)
            return send(route, *rest)

        def send_between(giver: SshRoute, taker: SshRoute, *rest: Any) -> None:
            between(giver, taker, *rest)
            self.moved.append((giver.name, taker.name))

        monkeypatch.setattr(files, "send_file", send_file)
        monkeypatch.setattr(files, "send_between", send_between)

    def make(self, number: int, store: str = "") -> PodHere:
        pod = PodHere(self.folder / (store or f"pod-{number}") / f"pod-{number}")
        pod.pod = Pod(name=f"pod-{number}", address=f"127.0.0.{number + 2}", root=pod.pod.root)
        pod.peers = self.peers
        return pod

    def route(self, pod: Pod, *_of: object) -> SshRoute:
        def command(argv: Sequence[str]) -> list[str]:
            return [*(["unshare", "-n"] if pod.name in self.apart else []), *argv]

        return SshRoute(
            name=pod.name, host=pod.address, login="", python=sys.executable, command=command
        )


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pods:
    return Pods(tmp_path / "pods", monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content := random.Random(7).randbytes(SIZE))
    return path, hashlib.sha256(content).hexdigest()


def give_all(pods: Sequence[PodHere], model: tuple[Path, str]) -> None:
    """Send the file to all pods at once, and compare each copy."""
    with ThreadPoolExecutor(len(pods)) as pool:
        paths = list(pool.map(lambda pod: pod.put_once(*model), pods))
    for path in paths:
        assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == model[1]
        assert not [*Path(path).parent.glob("*.part*")]


def test_this_machine_sends_a_file_once_and_the_pods_send_the_rest(
    pods: Pods, model: tuple[Path, str]
) -> None:
    every = [pods.make(number) for number in range(6)]
    give_all(every, model)
    assert len(pods.sent) == 1
    takers = [taker for _, taker in pods.moved]
    assert sorted([*takers, *pods.sent]) == [f"pod-{number}" for number in range(6)]
    # The first pod does not send to all.
    assert len({giver for giver, _ in pods.moved}) > 1
    # A replaced pod gets the file from a pod of the earlier run.
    give_all([pods.make(6), every[3]], model)
    assert len(pods.sent) == 1
    assert not any(pod.unshared for pod in every)


def test_a_small_file_and_the_file_of_a_shared_folder_travel_as_before(
    pods: Pods, model: tuple[Path, str], tmp_path: Path
) -> None:
    small = tmp_path / "config.json"
    small.write_bytes(b"{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    for number in range(3):
        pods.make(number).put_once(small, digest)
    stock = files.ContentStore()
    every = [pods.make(number) for number in range(3, 6)]
    for pod in every:
        pod.common = (Path(tmp_path / "lustre"), stock)  # type: ignore[assignment]
    give_all(every, model)
    assert (len(pods.sent), pods.moved) == (1, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run a pod without a network")
def test_a_pod_that_reaches_no_other_gets_its_files_from_here_and_says_why(
    pods: Pods, model: tuple[Path, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first, lone, third = (pods.make(number) for number in range(3))
    pods.apart.add("pod-1")
    for pod in (first, lone, third):
        give_all([pod], model)
    assert pods.sent == ["pod-0", "pod-1"]
    why = (
        "pod-1 gets model.safetensors from this machine, because the file did not arrive from "
        "pod-0: pod-1 (127.0.0.3) says: Network is unreachable at 127.0.0.2, port"
    )
    assert why in lone.unshared
    assert why in caplog.text
    assert [taker for _, taker in pods.moved] == ["pod-2"]
    # Its other files are not tried again.
    other = tmp_path / "other"
    other.write_bytes(content := random.Random(8).randbytes(SIZE))
    lone.unshared = ""
    again = (other, hashlib.sha256(content).hexdigest())
    give_all([first], again)
    give_all([lone], again)
    assert (pods.sent[2:], lone.unshared) == (["pod-0", "pod-1"], "")


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(bytes(SIZE))])
def test_a_pod_whose_copy_is_missing_or_damaged_is_not_believed(
    pods: Pods, model: tuple[Path, str], spoil: Callable[[Path], object]
) -> None:
    first, second = pods.make(0), pods.make(1)
    path = Path(first.put_once(*model))
    spoil(path)
    give_all([second], model)
    assert pods.sent == ["pod-0", "pod-1"]
    assert "the file did not arrive from pod-0" in second.unshared


def test_a_transfer_that_broke_continues_from_here(
    pods: Pods, model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pods.make(0), pods.make(1)
    first.put_once(*model)
    path = Path(second.store / model[1][:32])
    heard: list[int] = []
    send = files.send_file

    def breaks(_giver: SshRoute, taker: SshRoute, _offer: PodOffer, _to: str, part: str, _t: Any):
        path.parent.mkdir(parents=True)
        Path(part).write_bytes(model[0].read_bytes()[: 5 * MIB])
        raise RemoteError("the line broke", host=taker.host)

    def send_file(route: SshRoute, local: Path, remote: str, part: str, tell: Any) -> str:
        return send(route, local, remote, part, lambda done, _size: heard.append(done))

    monkeypatch.setattr(files, "send_between", breaks)
    monkeypatch.setattr(files, "send_file", send_file)
    give_all([second], model)
    assert heard[0] == 5 * MIB


def test_a_stranger_without_the_key_gets_and_gives_nothing(
    pods: Pods, model: tuple[Path, str], tmp_path: Path
) -> None:
    """Both ends ask for the key, so neither a file nor a part of a file reaches a stranger."""
    first, second = pods.make(0), pods.make(1)
    path = first.put_once(*model)
    taken = Path(second.store / "file")

    def take(giver_key: str, taker_key: str) -> None:
        giver, taker = pods.route(first.pod), pods.route(second.pod)
        offer = PodOffer(path=path, address="127.0.0.2", sha256=model[1], key=giver_key)
        say = transfer._send

        def send(pipe: Any, data: bytes, route: SshRoute) -> None:
            asked = json.loads(data)
            say(pipe, data if "port" not in asked else words(asked), route)

        def words(asked: dict[str, object]) -> bytes:
            return json.dumps({**asked, "key": taker_key}).encode() + b"\n"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer, "_send", send)
            send_between(giver, taker, offer, str(taken), f"{taken}.part")

    mine, strange = Peers().key, Peers().key
    with pytest.raises(RemoteError, match="certificate verify failed"):
        take(mine, strange)
    assert not taken.exists()
    assert not Path(f"{taken}.part").exists() or not Path(f"{taken}.part").stat().st_size
    take(mine, mine)
    assert taken.stat().st_size == SIZE


@pytest.mark.parametrize("takers", [7, 31])
def test_no_pod_waits_for_ever_and_none_sends_to_two_at_once(takers: int) -> None:
    """31 pods ask at once; every third finds no way to another pod."""
    peers, lock = Peers(), threading.Lock()
    every: list[Any] = [f"pod-{number}" for number in range(takers + 1)]
    giving: dict[str, int] = dict.fromkeys(every, 0)
    most, here = [0], []

    def bring(pod: Any) -> None:
        def take(source: Any) -> bool:
            with lock:
                giving[source] += 1
                most[0] = max(most[0], giving[source])
            threading.Event().wait(0.01)
            with lock:
                giving[source] -= 1
            if int(pod[4:]) % 3:
                return True
            peers.blame("digest", source, pod, offered=True)
            return False

        peers.deliver("digest", pod, take, lambda: here.append(pod))

    with ThreadPoolExecutor(len(every)) as pool:
        list(pool.map(bring, every, timeout=300))
    assert most[0] == 1
    assert len([pod for pod in here if int(pod[4:]) % 3]) <= 1


def test_a_failed_first_transfer_leaves_the_next_pod_to_be_the_first() -> None:
    peers, here = Peers(), []
    first: Any = "pod-0"

    def fails() -> None:
        raise RemoteError("gone", host="pod-0")

    with pytest.raises(RemoteError):
        peers.deliver("digest", first, lambda _: True, fails)
    for name in ("pod-1", "pod-2"):
        pod: Any = name
        peers.deliver("digest", pod, lambda _: True, lambda name=name: here.append(name))  # type: ignore[misc]
    assert here == ["pod-1"]


@pytest.fixture
def namespaces() -> Any:
    with joined(3) as made:
        yield made


OWN = 'mount --make-rprivate /; mount --bind "$1" "$2"; shift 2; exec "$@"'
"""Shows a program a folder of its own in the place of the root of the pods."""


@pytest.mark.slow
def test_three_hosts_train_a_model_of_this_machine_that_left_it_once(
    namespaces: list[Namespace], tmp_path: Path
) -> None:
    """The kernel counts the bytes at each host's card."""
    from tests.support.tinyfolders import llama

    folder = llama(tmp_path / "model", hidden_size=512, intermediate_size=2048)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 2 * files.LARGE
    root = tmp_path / "root"
    root.mkdir()
    user = Identity.create(tmp_path / "user")

    def is_model(path: Path) -> bool:
        return path.is_file() and path.stat().st_size == size

    bridge = namespaces[0].port.rpartition("v")[0]

    def bytes_sent() -> int:
        """Return the bytes from this machine to the hosts, without those between the hosts."""
        words = ["ip", "-s", "-j", "link", "show", bridge]
        told = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
        return int(told[0]["stats64"]["tx"]["bytes"])

    with ExitStack() as undo:
        hosts = []
        for each in namespaces:
            own = tmp_path / f"root-{each.name}"
            own.mkdir()
            prefix = (*each.prefix, "unshare", "--mount", "sh", "-ec", OWN, "sh")
            host = SSHHost(
                tmp_path / each.name,
                each.address,
                22,
                user.public_key,
                prefix=(*prefix, str(own), str(root)),
            )
            hosts.append(host.start())
            undo.callback(host.stop)
        place = SSHPods(
            [host.address for host in hosts],
            key=user.key,
            trust={host.address: host.fingerprint for host in hosts},
            python=sys.executable,
            root=str(root),
            connect_timeout_s=60,
        )
        path = tmp_path / "cluster"
        with Cluster(place, PodSpec(), count=3, path=path, warm=False) as cluster:
            before = bytes_sent()
            run = cluster.submit(
                FineTune(
                    model=str(folder),
                    dataset="wikisql-mini",
                    technique="ddp",
                    max_steps=1,
                    per_device_train_batch_size=1,
                    max_source_length=16,
                    max_target_length=16,
                    eval_strategy="no",
                ),
                pods=3,
            )
            run.wait(300, progress=False).raise_for_status()
            sent = bytes_sent() - before
            stores = [tmp_path / f"root-{each.name}" for each in namespaces]
            copies = [
                path for store in stores for path in store.glob("*/store/*") if is_model(path)
            ]
            assert len(copies) == 3
            assert size < sent < 1.2 * size
            notes = [each.data for each in run.events() if each.kind == "note"]
            assert "from this machine" not in str(notes)
