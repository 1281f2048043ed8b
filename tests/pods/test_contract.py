"""What every backend must do, against each of `conftest.PLACES`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from tests.fakes.sshhosts import NOISE, READS, StrangersPlace
from tests.pods.conftest import (
    NAMELESS,
    PLACES,
    Launched,
    Platform,
    children,
    launching,
    note_others,
    on_pods,
)
from tests.support.sentences import sentence
from workbench import Cluster, Function
from workbench.base.errors import PodError, WorkbenchError
from workbench.pods.backends import backend_from_dict
from workbench.pods.hostfile import Hostfile
from workbench.pods.place import Place
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import ssh_argv

NASTY = [
    "a b",
    "$(touch canary)",
    "x;id",
    "'",
    '"',
    "\\",
    "`id`",
    "*",
    "~",
    "",
    "é\n\t",
    "-n",
    "%h",
    "#",
]
EVERY = {**PLACES, **NAMELESS}
ECHO = "import json,sys; print(json.dumps(sys.argv[1:]))"


def places(kinds: Iterable[str]) -> list[object]:
    """Return these kinds as parameters: `make test` tries local pods, `make test-all` all."""
    return [
        kind if kind == "local" else pytest.param(kind, marks=pytest.mark.long)
        for kind in sorted(kinds)
    ]


owning_only = pytest.mark.parametrize(
    "place", places(kind for kind in EVERY if EVERY[kind].owns_daemons), indirect=True
)

# Into hosts of the user's, OpenSSH's client has logged in before a test begins (test_hosts.py).
logging_in = pytest.mark.parametrize(
    "place", places(kind for kind in EVERY if kind != "ssh"), indirect=True
)

# Such runs elsewhere: local pods in test_cluster.py, hosts in test_apart.py and test_wheel.py,
# Kubernetes in test_places.py.
elsewhere = pytest.mark.parametrize("place", places(["cml"]), indirect=True)


STRANGERS = {f"ssh-{shell}-{noise}": (shell, noise) for shell in READS for noise in NOISE}
"""Hosts whose account has this shell, and a login that prints this."""
WHOLE = "ssh-tcsh-200 lines"
"""The strangers that every test is tried on."""
EACH_ONCE = [
    f"ssh-{shell}-{list(NOISE)[turn % len(NOISE)]}" for turn, shell in enumerate(READS, start=1)
]
"""Strangers with every shell once, and with every output."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try each test on every place; start and stop a pod on strangers with every shell."""
    if "stranger" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-login")
        chosen = [name for name in (STRANGERS if every else EACH_ONCE) if name != WHOLE]
        metafunc.parametrize("stranger", places(chosen), indirect=True)
    elif "place" in metafunc.fixturenames and not metafunc.definition.get_closest_marker(
        "parametrize"
    ):
        metafunc.parametrize("place", places([*EVERY, WHOLE]), indirect=True)


@pytest.fixture(scope="module")
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    """One platform for all tests of its kind, beside the folders of the tests."""
    folder = tmp_path_factory.getbasetemp() / f"contract-{request.param.replace(' ', '-')}"
    with (
        EVERY[request.param](folder)
        if request.param in EVERY
        else stranger_of(request.param, folder) as made
    ):
        yield made


@pytest.fixture
def stranger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StrangersPlace]:
    with stranger_of(request.param, tmp_path / "place") as made:
        yield made


def stranger_of(name: str, folder: Path) -> StrangersPlace:
    shell, noise = STRANGERS[name]
    if os.geteuid() != 0 or not shutil.which(shell):
        pytest.skip(f"needs {shell}, and root to make an account")
    return StrangersPlace(folder, shell, noise)


@pytest.fixture(scope="module")
def launched(place: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Two pods that run, for all tests of a kind; one of the last tests stops them."""
    note_others()
    with launching(place, 2, tmp_path_factory.mktemp("launched")) as made:
        yield made


@pytest.fixture(autouse=True)
def others() -> None:
    """Note nothing: pods that an earlier test has launched are this file's own."""


def trusting(launched: Launched, pods: Sequence[Pod], folder: Path) -> Launched:
    """The same pods for a person who trusts the host keys of these alone."""
    identity = Identity(shutil.copytree(launched.identity.folder, folder))
    identity.pin(pods)
    return replace(launched, identity=identity)


def ssh(
    launched: Launched, place: Platform, index: int, command: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run ssh as a user does, and leave out what the login prints."""
    return without_greeting(place, ssh_argv(launched.pods[index], launched.identity, command))


def without_greeting(place: Platform, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program and leave out what the login prints."""
    greeting = place.greeting if isinstance(place, StrangersPlace) else b""
    done = subprocess.run(argv, capture_output=True, timeout=600, stdin=subprocess.DEVNULL)
    out, err = done.stdout.removeprefix(greeting).decode(), done.stderr.decode(errors="replace")
    return subprocess.CompletedProcess(argv, done.returncode, out, err)


def test_it_describes_itself(backend: Place) -> None:
    data = json.loads(json.dumps(backend.to_dict()))
    assert data["kind"] == backend.kind
    assert backend_from_dict(data).to_dict() == data
    assert list(backend.refresh()) == []


def test_pods_come_in_rank_order_and_know_themselves(launched: Launched) -> None:
    assert [pod.name for pod in launched.pods] == ["pod-0", "pod-1"]
    assert len({pod.address for pod in launched.pods}) == 2
    assert len({PurePosixPath(pod.root).parent for pod in launched.pods}) == 1
    for pod in launched.pods:
        assert pod.phase is Phase.RUNNING
        assert pod.slots == 1
        assert PurePosixPath(pod.root).name == pod.name
        assert {"python", "workbench"} <= set(pod.versions)
    assert list(launched.backend.refresh()) == list(launched.pods)


def test_a_hostfile_can_be_made(launched: Launched) -> None:
    assert Hostfile.parse(str(Hostfile.from_pods(launched.pods))).world_size == 2


def test_each_is_reached_by_the_keeper(launched: Launched) -> None:
    reached_by_keeper(launched)


def reached_by_keeper(launched: Launched) -> None:
    for index, pod in enumerate(launched.pods):
        with launched.connect(index) as connection:
            done = connection.run([pod.python, "-c", ECHO, *NASTY])
            assert (done.exit_code, json.loads(done.stdout)) == (0, NASTY), done
            assert connection.run(["test", "-d", pod.root]).exit_code == 0


def test_each_is_reached_by_the_ssh_client(launched: Launched, place: Platform) -> None:
    reached_by_client(launched, place)


def reached_by_client(launched: Launched, place: Platform) -> None:
    # No quotes of csh hold a line break, and fish reads a backslash inside quotes.
    shell = place.shell if isinstance(place, StrangersPlace) else ""
    unfit = "\n" if "csh" in shell else "\\" if shell == "fish" else "\0"
    words = [word for word in NASTY if unfit not in word]
    for index, pod in enumerate(launched.pods):
        done = ssh(launched, place, index, ["env", pod.python, "-c", ECHO, *words])
        assert done.returncode == 0, done
        assert json.loads(done.stdout) == words


def test_the_printed_command_works_when_pasted(launched: Launched, place: Platform) -> None:
    reached_by_pasting(launched, place)


def test_a_pod_on_a_host_of_any_login_shell_and_output(
    stranger: StrangersPlace, tmp_path: Path
) -> None:
    with launching(stranger, 1, tmp_path) as launched:
        reached_by_keeper(launched)
        reached_by_client(launched, stranger)
        reached_by_pasting(launched, stranger)
    assert on_pods(launched.pods) == []
    assert stranger.left(launched.context) == []


def reached_by_pasting(launched: Launched, place: Platform) -> None:
    line = shlex.join(ssh_argv(launched.pods[0], launched.identity, ["echo", "a  b"]))
    done = without_greeting(place, ["sh", "-c", line])
    assert done.stdout == "a  b\n", done


def test_files_travel_both_ways(launched: Launched, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    data = os.urandom(5_000_001)
    (source / "deep" / "data.bin").write_bytes(data)
    (source / "empty").write_bytes(b"")
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    with launched.connect() as connection:
        folder = f"{launched.pods[0].root}/in put"
        for name in ("deep/data.bin", "empty", "run.sh"):
            connection.put_bytes((source / name).read_bytes(), f"{folder}/{name}")
        assert connection.size(f"{folder}/deep/data.bin") == len(data)
        assert connection.run(["sh", f"{folder}/run.sh"]).stdout == "ran\n"
        connection.put_bytes(b"second", f"{folder}/empty")
        for name in ("deep/data.bin", "empty"):
            connection.get(f"{folder}/{name}", tmp_path / "back" / name)
        assert (tmp_path / "back" / "empty").read_bytes() == b"second"
        assert (tmp_path / "back" / "deep" / "data.bin").read_bytes() == data
        listing = connection.run(["find", folder, "-perm", "/077"])
        assert listing.stdout == "", "others may read what was sent"
        assert (
            connection.run(["sh", "-c", f"find {shlex.quote(folder)} -name '*.part'"]).stdout == ""
        )


@logging_in
def test_a_wrong_host_key_is_a_hard_stop(
    launched: Launched, place: Platform, tmp_path: Path
) -> None:
    first, second = launched.pods
    wrong = replace(first, host_key=second.host_key)
    launched = trusting(launched, [wrong, second], tmp_path / "identity")
    pinned = launched.identity.known_hosts.read_text()
    canary = tmp_path / "canary"
    with pytest.raises(
        PodError,
        match=sentence("; another machine answers there", "pod-0", "SHA256"),
    ):
        launched.connect().open()
    done = ssh(launched, place, 0, ["touch", str(canary)])
    assert done.returncode == 255
    assert "host key" in done.stderr.lower()
    assert not canary.exists()
    assert launched.identity.known_hosts.read_text() == pinned


@logging_in
def test_a_host_that_is_not_pinned_is_not_greeted(
    launched: Launched, place: Platform, tmp_path: Path
) -> None:
    launched = trusting(launched, launched.pods[1:], tmp_path / "identity")
    with pytest.raises(
        PodError,
        match=sentence("no host key is pinned for {} at {}; {} is no pod of the cluster", "pod-0"),
    ):
        launched.connect().open()
    assert ssh(launched, place, 0, ["true"]).returncode == 255


@logging_in
def test_another_key_is_refused(launched: Launched, place: Platform, tmp_path: Path) -> None:
    other = Identity.create(tmp_path / "other")
    pod = replace(launched.pods[0], key="")
    other.pin([pod])
    with pytest.raises(
        PodError,
        match=sentence(
            "permission denied (publickey) for {}@{} ({}), key file", pod.user, other.key
        ),
    ):
        SSHConnection(pod, other).open()
    done = ssh(replace(launched, identity=other), place, 0, ["true"])
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


@owning_only
def test_no_forwarding_and_no_password(launched: Launched) -> None:
    argv = ssh_argv(launched.pods[0], launched.identity)
    forward = [
        *argv[:3],
        "-o",
        "ExitOnForwardFailure=yes",
        "-R",
        "127.0.0.1:0:127.0.0.1:1",
        *argv[3:],
        "true",
    ]
    assert (
        subprocess.run(
            forward, capture_output=True, timeout=300, stdin=subprocess.DEVNULL
        ).returncode
        == 255
    )
    asked = [
        *argv[:3],
        "-o",
        "PreferredAuthentications=password,keyboard-interactive",
        *argv[3:],
        "true",
    ]
    done = subprocess.run(
        asked, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert "Permission denied (publickey)" in done.stderr


@owning_only
def test_logs_are_the_pods_own(launched: Launched) -> None:
    with launched.connect(1):
        pass
    assert "Accepted publickey" in launched.backend.logs("pod-1")


def test_logs_are_as_long_as_asked_and_of_pods_that_exist(launched: Launched) -> None:
    assert len(launched.backend.logs("pod-1", tail=1).splitlines()) == 1
    with pytest.raises(WorkbenchError, match="pod-7"):
        launched.backend.logs("pod-7")


# These tests come last: the first of them stops the pods that the others share.


def start_daemons(launched: Launched, place: Platform) -> None:
    """Leave on each pod a process that was daemonised and ignores TERM.

    Where the daemon is not the backend's own, it bears the
    pod's mark as an agent does; one without it is a stranger's.
    """
    for index, pod in enumerate(launched.pods):
        with launched.connect(index) as connection:
            script = "trap '' TERM HUP; setsid sleep 600 >/dev/null 2>&1 </dev/null & sleep 0.1"
            mark = [] if place.owns_daemons else ["env", f"WORKBENCH_POD={pod.root}"]
            assert connection.run([*mark, "sh", "-c", script]).exit_code == 0
    assert len(on_pods(launched.pods)) >= 2


def test_stop_ends_all_and_may_be_repeated_and_a_launch_after_it_works(
    launched: Launched, place: Platform
) -> None:
    start_daemons(launched, place)
    open_session = launched.connect().open()
    left_before = [*children(), *on_pods(launched.pods)]
    launched.backend.stop()
    launched.backend.stop()
    assert [process for process in left_before if process.is_alive()] == []
    assert on_pods(launched.pods) == []
    assert not any(Path(pod.root).exists() for pod in launched.pods)
    assert place.left(launched.context) == []
    assert list(launched.backend.refresh()) == []
    assert launched.backend.logs("pod-0")
    if place.owns_daemons:
        for pod in launched.pods:
            with pytest.raises(OSError):
                socket.create_connection((pod.ssh_address or pod.address, pod.ssh_port), timeout=2)
        with pytest.raises(WorkbenchError):
            open_session.run(["true"], timeout_s=5)
    elif not launched.pods[0].control:  # else the connection was the place's
        assert open_session.run(["echo", "still here"]).stdout == "still here\n"
    open_session.close()
    assert len(launched.backend.launch(PodSpec(), 1, launched.context)) == 1
    launched.backend.stop()


def test_stop_during_launch_leaves_nothing(
    backend: Place, place: Platform, context: LaunchContext
) -> None:
    def stop_at_the_first(line: str) -> None:
        thread = threading.Thread(target=backend.stop)
        thread.start()
        thread.join(300)

    before = children()
    with pytest.raises(PodError):
        backend.launch(PodSpec(), 2, replace(context, report=stop_at_the_first))
    assert [process for process in children() if process not in before] == []
    assert place.left(context) == []


def meet() -> str:
    """Have rank 0 send the other rank a word, where the launcher has told both to meet."""
    there = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server(there) as server:
            server.settimeout(300)
            with server.accept()[0] as other:
                other.sendall(b"met")
        return "met"
    for _ in range(3000):
        try:
            with socket.create_connection(there, timeout=300) as first:
                return first.recv(3).decode()
        except ConnectionRefusedError:
            time.sleep(0.1)
    return "nobody listens"


@elsewhere
@pytest.mark.slow
def test_the_ranks_of_a_run_meet_and_nothing_is_left(place: Platform, tmp_path: Path) -> None:
    with Cluster(
        place.backend(), PodSpec(), count=2, path=tmp_path / "cluster", warm=False
    ) as cluster:
        assert cluster.hostfile.world_size == 2
        pods = cluster.pods
        run = cluster.submit(Function(meet))
        run.wait(300, progress=False).raise_for_status()
        context = LaunchContext(cluster_id="", directory=cluster.path, public_key="")
    assert run.returned == ["met", "met"]
    told = json.loads(run.paths.result.read_text())["hosts"]
    assert [host["address"] for host in told] == [pod.address for pod in pods]
    assert on_pods(pods) == []
    assert place.left(context) == []
