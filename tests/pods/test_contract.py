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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from measured import MEASURED

from tests.fakes.sshhosts import NOISE, READS, StrangersPlace
from tests.pods.conftest import PLACES, Launched, Platform, children, note_others, on_pods
from tests.support.sentences import sentence
from workbench import Cluster, FineTune
from workbench.base.errors import PodError, WorkbenchError
from workbench.pods.backends import backend_from_dict
from workbench.pods.hostfile import Hostfile
from workbench.pods.place import Place
from workbench.pods.pod import LaunchContext, Phase
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
ECHO = "import json,sys; print(json.dumps(sys.argv[1:]))"


def places(kinds: Iterable[str]) -> list[object]:
    """Return these kinds as parameters: `make test` tries local pods, `make test-all` all."""
    return [
        kind if kind == "local" else pytest.param(kind, marks=pytest.mark.long)
        for kind in sorted(kinds)
    ]


owning_only = pytest.mark.parametrize(
    "place", places(kind for kind in PLACES if PLACES[kind].owns_daemons), indirect=True
)

# Into hosts of the user's, OpenSSH's client has logged in before a test begins (test_hosts.py).
logging_in = pytest.mark.parametrize(
    "place", places(kind for kind in PLACES if kind != "ssh"), indirect=True
)

# Such runs elsewhere: local pods in test_cluster.py, hosts in test_apart.py and test_wheel.py,
# Kubernetes in test_places.py.
elsewhere = pytest.mark.parametrize("place", places(["cml"]), indirect=True)


STRANGERS = {f"ssh-{shell}-{noise}": (shell, noise) for shell in READS for noise in NOISE}
"""Hosts whose account has this shell, and a login that prints this."""
WHOLE = "ssh-tcsh-200 lines"
"""The strangers that every test is tried on."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try each test on every place, and on the strangers of its turn or on all of them."""
    if "place" not in metafunc.fixturenames or metafunc.definition.get_closest_marker(
        "parametrize"
    ):
        return
    if metafunc.config.getoption("--every-login"):
        chosen = set(STRANGERS)
    else:
        # Nine shells and five outputs have no common divisor: each pair has its turn.
        tests = [
            name
            for name, test in vars(metafunc.module).items()
            if name.startswith("test_") and not hasattr(test, "pytestmark")
        ]
        turn = tests.index(metafunc.function.__name__)
        chosen = {WHOLE, f"ssh-{list(READS)[turn % len(READS)]}-{list(NOISE)[turn % len(NOISE)]}"}
    metafunc.parametrize("place", places([*PLACES, *chosen]), indirect=True)


@pytest.fixture(scope="module")
def strangers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], StrangersPlace]]:
    """Give the strangers of a name, which the tests of this file share."""
    made: dict[str, StrangersPlace] = {}
    with ExitStack() as stack:

        def give(name: str) -> StrangersPlace:
            if name not in made:
                folder = tmp_path_factory.mktemp("strangers") / "place"
                made[name] = stack.enter_context(StrangersPlace(folder, *STRANGERS[name]))
            return made[name]

        yield give


@pytest.fixture
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    strangers: Callable[[str], StrangersPlace],
) -> Iterator[Platform]:
    if request.param in PLACES:
        with PLACES[request.param](tmp_path / "place") as made:
            note_others()
            yield made
        return
    shell, _ = STRANGERS[request.param]
    if os.geteuid() != 0 or not shutil.which(shell):
        pytest.skip(f"needs {shell}, and root to make an account")
    given = strangers(request.param)
    note_others()
    yield given


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
    for index, pod in enumerate(launched.pods):
        with launched.connect(index) as connection:
            done = connection.run([pod.python, "-c", ECHO, *NASTY])
            assert (done.exit_code, json.loads(done.stdout)) == (0, NASTY), done
            assert connection.run(["test", "-d", pod.root]).exit_code == 0


def test_each_is_reached_by_the_ssh_client(launched: Launched, place: Platform) -> None:
    # No quotes of csh hold a line break, and fish reads a backslash inside quotes.
    shell = place.shell if isinstance(place, StrangersPlace) else ""
    unfit = "\n" if "csh" in shell else "\\" if shell == "fish" else "\0"
    words = [word for word in NASTY if unfit not in word]
    for index, pod in enumerate(launched.pods):
        done = ssh(launched, place, index, [pod.python, "-c", ECHO, *words])
        assert done.returncode == 0, done
        assert json.loads(done.stdout) == words


def test_the_printed_command_works_when_pasted(launched: Launched, place: Platform) -> None:
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
    launched.identity.pin([replace(first, host_key=second.host_key), second])
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
def test_a_host_that_is_not_pinned_is_not_greeted(launched: Launched, place: Platform) -> None:
    launched.identity.pin(launched.pods[1:])
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
            forward, capture_output=True, timeout=120, stdin=subprocess.DEVNULL
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
        asked, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert "Permission denied (publickey)" in done.stderr


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


def test_stop_ends_all_and_may_be_repeated(
    launched: Launched, place: Platform, context: LaunchContext
) -> None:
    start_daemons(launched, place)
    open_session = launched.connect().open()
    left_before = [*children(), *on_pods(launched.pods)]
    began_s = time.monotonic()
    launched.backend.stop()
    MEASURED.append(
        f"stop of two pods ({launched.backend.kind}): {time.monotonic() - began_s:.2f} s (aim 5 s)"
    )
    launched.backend.stop()
    assert [process for process in left_before if process.is_alive()] == []
    assert on_pods(launched.pods) == []
    assert not any(Path(pod.root).exists() for pod in launched.pods)
    assert place.left(context) == []
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


def test_a_launch_after_stop_works(
    backend: Place, context: LaunchContext, identity: Identity
) -> None:
    for _ in range(2):
        assert len(backend.launch(PodSpec(), 1, context)) == 1
        backend.stop()


def test_stop_during_launch_leaves_nothing(
    backend: Place, place: Platform, context: LaunchContext
) -> None:
    def stop_at_the_first(line: str) -> None:
        thread = threading.Thread(target=backend.stop)
        thread.start()
        thread.join(180)

    before = children()
    with pytest.raises(PodError):
        backend.launch(PodSpec(), 3, replace(context, report=stop_at_the_first))
    assert [process for process in children() if process not in before] == []
    assert place.left(context) == []


@owning_only
def test_logs_are_the_pods_own(launched: Launched) -> None:
    with launched.connect(1):
        pass
    assert "Accepted publickey" in launched.backend.logs("pod-1")


def test_logs_are_as_long_as_asked_and_of_pods_that_exist(launched: Launched) -> None:
    assert len(launched.backend.logs("pod-1", tail=1).splitlines()) == 1
    with pytest.raises(WorkbenchError, match="pod-7"):
        launched.backend.logs("pod-7")


@elsewhere
@pytest.mark.slow
def test_a_run_over_two_pods_goes_as_it_does_on_local_ones(place: Platform, tmp_path: Path) -> None:
    job = FineTune(
        dataset={"kind": "wikisql-mini", "train_rows": 100, "eval_rows": 10},
        technique="zero1",
        max_steps=2,
        predict_rows=2,
        per_device_train_batch_size=2,
    )
    with Cluster(place.backend(), PodSpec(), count=2, path=tmp_path / "cluster") as cluster:
        assert cluster.hostfile.world_size == 2
        pods = cluster.pods
        runs = [cluster.submit(job.replace(launcher=launcher)) for launcher in place.launchers]
        results = [run.wait(300, progress=False).raise_for_status() for run in runs]
        context = LaunchContext(cluster_id="", directory=cluster.path, public_key="")
    for run, result in zip(runs, results, strict=True):
        assert (result.world_size, result.steps) == (2, 2)
        told = json.loads(run.paths.result.read_text())["hosts"]
        assert [host["address"] for host in told] == [pod.address for pod in pods]
        assert (run.path / "model" / "model.safetensors").stat().st_size > 1000
    assert len({result.train_loss for result in results}) == 1
    assert on_pods(pods) == []
    assert place.left(context) == []
