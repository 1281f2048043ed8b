"""GPUs of shared hosts: each GPU has one seat, and a cluster takes seats before its pods start."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeGpus, fake_gpus
from tests.fakes.sshhosts import HostsPlace
from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench import Cluster, Function
from workbench.base.errors import ConfigError
from workbench.base.machine import nvml, seats
from workbench.base.machine.seats import (
    gpus_here,
    keep_seats,
    leave_seats,
    take_seats,
    taken_words,
)
from workbench.base.process import find
from workbench.pods.bootstrap.guardian import NOTE
from workbench.pods.hosts import provision
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod import LaunchContext, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity

Launch = Callable[..., list[Pod]]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpus]:
    """Four GPUs on the machine of all hosts."""
    made = fake_gpus(tmp_path_factory.mktemp("gpus"), 4)
    yield made
    for lock in made.locks():
        lock.unlink()


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory, gpus: FakeGpus) -> Iterator[HostsPlace]:
    with HostsPlace(tmp_path_factory.mktemp("there")) as made:
        variables = f"LD_LIBRARY_PATH={gpus.folder}"
        made.add("127.0.0.5", made.hosts[0].port, settings=f"SetEnv {variables}")
        more = f"{variables} CUDA_VISIBLE_DEVICES=3,2"
        made.add("127.0.0.6", made.hosts[0].port, settings=f"SetEnv {more}")
        yield made


@pytest.fixture
def launch(there: HostsPlace, context: LaunchContext, tmp_path: Path) -> Iterator[Launch]:
    """Launches one pod of a cluster with this name; stopped afterwards."""
    made: list[SSHPods] = []

    def go(cluster: str, spec: PodSpec, host: str = "127.0.0.5") -> tuple[SSHPods, list[str]]:
        backend = there.backend(hosts=[host])
        made.append(backend)  # type: ignore[arg-type]
        lines: list[str] = []
        own = tmp_path / cluster
        own.mkdir()
        backend.launch(
            spec, 1, replace(context, cluster_id=cluster, directory=own, report=lines.append)
        )
        live_on(there.root.glob(f"{cluster}-*/pod-0"))
        return backend, lines  # type: ignore[return-value]

    yield go  # type: ignore[misc]
    for backend in made:
        backend.stop()


def live_on(places: Iterable[Path]) -> None:
    """Let pods count as pods with an agent, for as long as this process lives."""
    own = find(os.getpid())
    assert own is not None
    for place in places:
        agent = {"pid": own.pid, "start_time": own.start_time}
        (place / "agent.json").write_text(json.dumps(agent))


def variables(there: HostsPlace, cluster: str) -> dict[str, str]:
    (file,) = there.root.glob(f"{cluster}-*/pod-0/setup.json")
    found: dict[str, str] = json.loads(file.read_text())
    return found


def held_by(there: HostsPlace, cluster: str) -> int:
    (file,) = there.root.glob(f"{cluster}-*/pod-0/seats.json")
    return int(json.loads(file.read_text())["pid"])


def test_two_clusters_on_one_host_never_have_the_same_gpu(
    there: HostsPlace, launch: Launch
) -> None:
    first, _ = launch("ada", PodSpec(gpus=2))
    assert variables(there, "ada") == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    _, lines = launch("bob", PodSpec(gpus=1))
    assert variables(there, "bob")["CUDA_VISIBLE_DEVICES"] == "2"
    (line,) = [line for line in lines if "has GPUs" in line]
    assert says(line, "the pod has GPUs {}.", "127.0.0.5", "2")
    assert "GPU 0: " in line and "cluster ada, since 20" in line
    with pytest.raises(ConfigError) as caught:
        launch("eve", PodSpec(gpus=2))
    assert says(caught.value, "or take another host", "127.0.0.5", 2)
    for gpu, holder in ((0, "ada"), (1, "ada"), (2, "bob")):
        assert f"GPU {gpu}: " in str(caught.value)
        assert f"cluster {holder}, since 20" in str(caught.value)
    assert list(there.root.glob("eve-*")) == []
    first.stop()
    launch("joe", PodSpec(gpus=3))
    assert variables(there, "joe")["CUDA_VISIBLE_DEVICES"] == "0,1,3"


def test_a_gpu_that_is_busy_without_a_seat_is_passed_over_and_named(
    there: HostsPlace, launch: Launch, gpus: FakeGpus
) -> None:
    gpus.use(gpus.uuids[0], 35)
    try:
        _, lines = launch("ada", PodSpec(gpus=3))
        assert variables(there, "ada")["CUDA_VISIBLE_DEVICES"] == "1,2,3"
        assert any("GPU 0: programs without a seat use 35.0 GiB" in line for line in lines)
        with pytest.raises(
            ConfigError, match=r"GPU 0: programs without a seat use 35\.0 GiB of its memory"
        ):
            launch("bob", PodSpec(gpus=1))
    finally:
        gpus.use(gpus.uuids[0], 0)


def test_a_host_with_few_cores_for_its_gpus_is_named(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = provision.create_pod_folder
    monkeypatch.setattr(
        provision, "create_pod_folder", lambda *of, **by: replace(made(*of, **by), cores=7)
    )
    _, lines = launch("ada", PodSpec(gpus=4))
    assert "127.0.0.5 has 7 cores for 4 GPUs: a rank needs 2 or more" in lines


def test_gpus_that_a_host_or_a_user_names_are_the_ones_to_choose_from(
    there: HostsPlace, launch: Launch, gpus: FakeGpus
) -> None:
    launch("ada", PodSpec(gpus=1), "127.0.0.6")
    assert variables(there, "ada")["CUDA_VISIBLE_DEVICES"] == "3"
    named = f"3,{gpus.uuids[1]}"
    launch("bob", PodSpec(gpus=1, env={"CUDA_VISIBLE_DEVICES": named}), "127.0.0.6")
    assert variables(there, "bob") == {"CUDA_VISIBLE_DEVICES": gpus.uuids[1]}
    with pytest.raises(ConfigError, match=f"GPU {gpus.uuids[3]}: .*cluster ada"):
        launch("eve", PodSpec(gpus=1, env={"CUDA_VISIBLE_DEVICES": gpus.uuids[3]}))


def test_a_holder_that_was_killed_frees_the_seats_and_the_next_agent_takes_them_again(
    there: HostsPlace, launch: Launch
) -> None:
    launch("ada", PodSpec(gpus=4))
    (place,) = there.root.glob("ada-*/pod-0")
    os.kill(held_by(there, "ada"), signal.SIGKILL)
    until(lambda: find(held_by(there, "ada")) is None)
    keep_seats(place)
    assert find(held_by(there, "ada")) is not None
    with pytest.raises(ConfigError, match="cluster ada"):
        launch("bob", PodSpec(gpus=1))
    os.kill(held_by(there, "ada"), signal.SIGKILL)
    until(lambda: find(held_by(there, "ada")) is None)
    launch("eve", PodSpec(gpus=1))
    with pytest.raises(ValueError, match=sentence("GPUs of the pod are taken", "eve")):
        keep_seats(place)


def shown() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_ranks_use_the_gpus_that_their_pod_has_taken(
    there: HostsPlace, launch: Launch, tmp_path: Path
) -> None:
    launch("ada", PodSpec(gpus=1))
    spec = PodSpec(gpus=2, env={"CUDA_VISIBLE_DEVICES": "0,2,3"})
    backend = there.backend(hosts=["127.0.0.5"])
    with Cluster(backend, spec, path=tmp_path / "c", warm=False) as cluster:
        assert cluster.run(shown, progress=False) == ["2,3", "2,3"]
        for file in there.root.glob("*/pod-0/seats.json"):  # of both clusters
            holder = int(json.loads(file.read_text())["pid"])
            assert find(holder) is not None, "held after a run"
        with pytest.raises(
            ConfigError, match=sentence("and the pods have taken GPUs of their hosts")
        ):
            cluster.submit(Function(shown, env={"CUDA_VISIBLE_DEVICES": "0"}))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """Two GPUs of this process, the second in two slices; the locks in a folder of the test's."""
    made = fake_gpus(tmp_path / "gpus", 2, slices=2)
    library = str(made.folder / "libnvidia-ml.so.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(seats, "open_nvml", lambda: nvml.open_nvml(library))
    locks = tmp_path / "locks"
    locks.mkdir()
    locks.chmod(0o1777)
    monkeypatch.setattr(seats, "_FOLDERS", (str(locks),))
    return made


def test_the_slices_of_a_gpu_are_seats_in_its_place(here: FakeGpus, tmp_path: Path) -> None:
    whole, first, second = here.uuids[0], *here.uuids[2:]
    assert [gpu.name for gpu in gpus_here(None)] == ["0", first, second]
    assert [gpu.key for gpu in gpus_here(f"0,{whole},{second}")] == [whole, second]
    place = tmp_path / "pod-0"
    place.mkdir()
    try:
        taken, _ = take_seats([place], "ada", 1, first)
        assert [gpu.key for gpu in taken[0]] == [first]
        more, others = take_seats([tmp_path], "bob", 1, first)
        assert (more, [other["cluster"] for other in others]) == ([], ["ada"])
        # CUDA shows a rank one slice: a pod with two ranks cannot use two.
        more, others = take_seats([tmp_path], "bob", 2, f"{whole},{second}")
        assert (more, list(map(taken_words, others))) == (
            [],
            [f"GPU {second}: a slice (MIG), and only a pod with gpus=1 can use slices"],
        )
    finally:
        leave_seats(place)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", []),
        ("-1", []),
        ("0,-1,1", ["whole"]),
        (" 0 , ", ["whole"]),
        ("9,0", []),
        *((word, []) for word in ("NoDevFiles", "none", "void", "all", "-", "--1", "²", "٣")),
        ("0,none,1", ["whole"]),
        (f"{'1' * 5000},0", []),
        ("00", ["whole"]),
        ("0x0", []),
        ("GPU-", []),  # the beginning of two UUIDs
        ("WHOLE", ["whole"]),
        ("MIG-SLICED/3/0", ["first"]),
        ("MIG-SLICED/4/0,MIG-SLICED/3/0", ["second", "first"]),
        ("MIG-SLICED/9/0", []),
        ("SECOND", ["second"]),
        ("SLICED", ["first", "second"]),
        ("1", ["first", "second"]),
    ],
)
def test_every_spelling_of_visible_gpus_is_read_as_cuda_reads_it(
    here: FakeGpus, given: str, found: list[str]
) -> None:
    whole, sliced, first, second = here.uuids
    names = {"whole": whole, "first": first, "second": second}
    given = given.replace("WHOLE", whole)
    given = given.replace("SLICED", sliced).replace("SECOND", second)
    assert [gpu.key for gpu in gpus_here(given)] == [names[name] for name in found]


def test_the_beginning_of_a_uuid_is_the_gpu_if_it_is_the_only_one(here: FakeGpus) -> None:
    """CUDA takes `GPU-8932f937` for the GPU whose UUID begins so."""
    whole, _, first, _ = here.uuids
    for name in (whole, first):
        for end in range(len("GPU-0"), len(name) + 1):
            (gpu,) = gpus_here(name[:end])
            assert (gpu.name, gpu.key) == (name[:end], name)


@pytest.mark.parametrize("given", ["-1", "", "-1,0", "none,", "²"])
def test_without_a_driver_no_gpu_is_made_up(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    def none() -> None:
        raise OSError("no driver")

    monkeypatch.setattr(seats, "open_nvml", none)
    assert gpus_here(given) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_here(None) == []


def lock_of(tmp_path: Path, uuid: str, user: int) -> Path:
    return tmp_path / "locks" / f"deepspeed-workbench-gpu-{uuid}.{user}"


def locked(path: Path, content: str) -> int:
    path.write_text(content)
    opened = os.open(path, os.O_RDONLY)
    fcntl.flock(opened, fcntl.LOCK_EX)
    return opened


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_the_seat_of_another_user_is_theirs(here: FakeGpus, tmp_path: Path) -> None:
    path = lock_of(tmp_path, here.uuids[0], 54321)
    opened = locked(path, json.dumps({"cluster": "night\x1b[31m", "since_s": 0}))
    os.chown(path, 54321, -1)
    try:
        _, (taken,) = take_seats([tmp_path], "bob", 1, "0")
        assert taken["user"] == "user 54321"
        assert taken["cluster"] == "night[31m"
    finally:
        os.close(opened)


NOTES = [
    *(f'{{"cluster": "c", "since_s": {text}}}' for text in ("1e300", "NaN", "-1e18", "null", "[]")),
    *('{"cluster": "c', "", "[]", "5", "\udcff", "[" * 4000),
]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
@pytest.mark.parametrize("note", NOTES)
def test_a_seat_with_any_note_of_its_holder_is_named(
    here: FakeGpus, tmp_path: Path, note: str
) -> None:
    path = lock_of(tmp_path, here.uuids[0], 54321)
    path.write_bytes(note.encode(errors="surrogateescape"))
    opened = os.open(path, os.O_RDONLY)
    fcntl.flock(opened, fcntl.LOCK_EX)
    os.chown(path, 54321, -1)
    try:
        _, (taken,) = take_seats([tmp_path], "bob", 1, "0")
        words = taken_words(json.loads(json.dumps(taken)))
        assert says(words, "GPU {}: {}, cluster {}, since", "user 54321", "unknown")
    finally:
        os.close(opened)


@pytest.mark.parametrize(
    "kept",
    [
        *("[]", "null", "{", "\udcff", '{"pid": 1}', '{"pid": 1e400}', "[" * 4000),
        '{"pid": 1, "start_time": 1, "cluster": "c", "gpus": 5}',
        '{"pid": 1, "start_time": 1, "cluster": "c", "gpus": [["0"]]}',
        '{"pid": 1, "start_time": 1, "gpus": []}',
    ],
)
def test_a_pod_whose_note_on_its_seats_is_damaged_has_none(tmp_path: Path, kept: str) -> None:
    (tmp_path / "seats.json").write_bytes(kept.encode(errors="surrogateescape"))
    assert keep_seats(tmp_path) == []
    leave_seats(tmp_path)


def test_a_file_in_the_name_of_another_user_and_a_link_are_no_seats(
    here: FakeGpus, tmp_path: Path
) -> None:
    forged = locked(lock_of(tmp_path, here.uuids[0], 54321), "{}")
    target = tmp_path / "target"
    target.write_text("precious")
    lock_of(tmp_path, here.uuids[0], 54322).symlink_to(target)
    try:
        free, taken = seats._sorted_out(tmp_path / "locks", gpus_here("0"), 1)
        assert ([gpu.name for gpu in free], taken) == (["0"], [])
        own = lock_of(tmp_path, here.uuids[0], os.geteuid())
        own.symlink_to(target)
        with pytest.raises(OSError, match="symbolic links"):
            take_seats([tmp_path], "ada", 1, "0")
        assert target.read_text() == "precious"
    finally:
        os.close(forged)


def test_a_turn_that_is_never_over_is_named(
    here: FakeGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "_TURN_S", 0.2)
    opened = locked(tmp_path / "locks" / "deepspeed-workbench-gpus.lock", "")
    try:
        with pytest.raises(ValueError, match=sentence("End the process named by `fuser")):
            take_seats([tmp_path], "ada", 1, "0")
    finally:
        os.close(opened)


def test_a_machine_without_a_folder_for_all_is_refused(
    here: FakeGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "_FOLDERS", (str(tmp_path / "none"), str(tmp_path)))
    with pytest.raises(ValueError, match="mode 1777"):
        take_seats([tmp_path], "ada", 1, "0")


Local = Callable[..., LocalPods]


@pytest.fixture
def on_this_machine(
    gpus: FakeGpus, context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Local]:
    """Launches local pods of a cluster with this name; stopped afterwards."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(gpus.folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made: list[LocalPods] = []

    def go(
        cluster: str, spec: PodSpec, count: int = 1, lines: list[str] | None = None
    ) -> LocalPods:
        backend = LocalPods()
        made.append(backend)
        own = tmp_path / cluster
        own.mkdir()
        report = (lines if lines is not None else []).append
        there = replace(context, cluster_id=cluster, directory=own, report=report)
        backend.launch(spec, count, there)
        live_on(own.glob("pods/pod-?"))
        return backend

    yield go
    for backend in made:
        backend.stop()


def gpus_of(backend: LocalPods, identity: Identity) -> list[str]:
    """What CUDA sees in a session of each pod."""
    pods = backend.refresh()
    identity.pin(pods)
    found = []
    for pod in pods:
        with SSHConnection(pod, identity) as connection:
            found.append(connection.run(["printenv", "CUDA_VISIBLE_DEVICES"]).stdout.strip())
    return found


def test_local_pods_and_hosts_never_have_the_same_gpu(
    launch: Launch,
    on_this_machine: Local,
    identity: Identity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch("host", PodSpec(gpus=1))
    lines: list[str] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setenv("NCCL_LAB", 'a "name"')
    first = on_this_machine("ada", PodSpec(gpus=1), 2, lines)
    assert gpus_of(first, identity) == ["1", "2"]
    assert any("GPU 0: " in line and "cluster host, since 20" in line for line in lines)
    assert any(line.startswith("left out of the pods: NCCL_LAB. ") for line in lines)
    assert "each local pod has 1 cores for 1 GPUs: a rank needs 2 or more" in lines
    with pytest.raises(ConfigError) as caught:
        on_this_machine("bob", PodSpec(gpus=1), 2)
    assert says(caught.value, "GPUs of this machine are free", 2)
    for gpu, holder in ((0, "host"), (1, "ada"), (2, "ada")):
        assert f"GPU {gpu}: " in str(caught.value)
        assert f"cluster {holder}, since 20" in str(caught.value)
    with pytest.raises(ConfigError, match="cluster ada"):
        launch("eve", PodSpec(gpus=2))
    first.stop()
    assert gpus_of(on_this_machine("joe", PodSpec(gpus=3)), identity) == ["1,2,3"]


def test_a_local_cluster_that_finds_too_few_gpus_leaves_no_seat_and_no_folder(
    on_this_machine: Local, gpus: FakeGpus, tmp_path: Path, identity: Identity
) -> None:
    gpus.use(gpus.uuids[3], 20)
    try:
        with pytest.raises(ConfigError, match=r"GPU 3: programs without a seat use 20\.0 GiB"):
            on_this_machine("ada", PodSpec(gpus=2), 2)
        assert list((tmp_path / "ada" / "pods").glob("pod-*")) == []
        named = {"CUDA_VISIBLE_DEVICES": f"2,{gpus.uuids[0][:9]}"}
        assert gpus_of(on_this_machine("bob", PodSpec(gpus=2, env=named)), identity) == [
            f"2,{gpus.uuids[0][:9]}"
        ]
    finally:
        gpus.use(gpus.uuids[3], 0)


def test_a_local_pod_that_is_started_again_keeps_its_gpus(
    on_this_machine: Local, context: LaunchContext, tmp_path: Path, identity: Identity
) -> None:
    spec = PodSpec(gpus=1)
    own = on_this_machine("ada", spec, 2)
    guardian = json.loads((tmp_path / "ada" / "pods" / "pod-0" / NOTE).read_text())
    os.kill(guardian["pid"], signal.SIGKILL)
    until(lambda: own.refresh()[0].phase.is_terminal)
    on_this_machine("bob", spec)
    own.restore(["pod-0"], spec, replace(context, cluster_id="ada", directory=tmp_path / "ada"))
    assert gpus_of(own, identity) == ["0", "1"]
