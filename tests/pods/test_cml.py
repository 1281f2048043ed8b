"""`CMLPods` beyond the contract: the platform's refusals, failures; only ours is stopped."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.cmlplace import CMLPlace
from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench.base.errors import BackendError, ConfigError, PodError, PodTimeout
from workbench.base.process import find
from workbench.pods.backends import backend_from_dict, remove_left
from workbench.pods.bootstrap import worker
from workbench.pods.bootstrap.guardian import WorkerConfig
from workbench.pods.cml import worker as cmlworker
from workbench.pods.cml.pods import IDS, CMLPods
from workbench.pods.notes import read_note
from workbench.pods.pod import LaunchContext, Phase
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity


@pytest.fixture
def session(tmp_path: Path) -> Iterator[CMLPlace]:
    with CMLPlace(tmp_path / "place") as made:
        yield made


@pytest.fixture
def backend(session: CMLPlace) -> Iterator[CMLPods]:
    made = session.backend()
    assert isinstance(made, CMLPods)
    yield made
    made.stop()


def stopped(session: CMLPlace) -> list[object]:
    return [what for verb, what in session.api.calls if verb == "stop_workers"]


class ReadTimeout(OSError):
    """As the library requests has it: no TimeoutError."""


def test_a_platform_that_answers_late_has_refused_nothing(
    session: CMLPlace, backend: CMLPods, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_args: object, **_options: object) -> None:
        raise ReadTimeout("read timed out")

    monkeypatch.setattr(sys.modules["cml.workers_v1"], "launch_workers", late)
    with pytest.raises(BackendError) as caught:
        backend.launch(PodSpec(), 1, context)
    assert says(
        str(caught.value), "Cloudera ML did not answer {} in time: {}; try again", "launch_workers"
    )
    assert "refused" not in str(caught.value)


def test_a_late_report_on_workers_of_an_earlier_launch_fails_no_later_launch(
    session: CMLPlace, backend: CMLPods, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = sys.modules["cml.workers_v1"]
    real = api.await_workers
    is_launched = threading.Event()
    waits: list[threading.Event] = [is_launched]

    def wait(ids: Sequence[int], **options: object) -> object:
        if waits:
            waits.pop().wait(300)
        return real(ids, **options)

    monkeypatch.setattr(api, "await_workers", wait)
    assert len(backend.launch(PodSpec(), 1, context)) == 1
    backend.stop()
    launched = backend._launch_one

    def launch_one(*args: object) -> None:
        launched(*args)  # type: ignore[arg-type]
        is_launched.set()
        time.sleep(0.5)  # the report on the first worker, which was stopped

    monkeypatch.setattr(CMLPods, "_launch_one", lambda _, *args: launch_one(*args))
    assert len(backend.launch(PodSpec(), 1, context)) == 1


def test_the_option_of_a_slow_line_reaches_the_pods(
    session: CMLPlace, context: LaunchContext
) -> None:
    backend = CMLPods(connect_timeout_s=9, **session.options)
    (pod,) = backend.launch(PodSpec(), 1, context)
    backend.stop()
    assert pod.connect_timeout_s == 9


def test_a_worker_that_fails_to_start_is_named_with_the_platforms_words(
    session: CMLPlace, backend: CMLPods, context: LaunchContext
) -> None:
    session.api.failing.add(102)
    with pytest.raises(
        PodError,
        match=sentence("(worker {}) did not start", "pod-1", 102, "ImagePullBackOff"),
    ):
        backend.launch(PodSpec(), 3, context)
    assert stopped(session) == [(101, 102, 103)]
    assert session.left(context) == []


def test_workers_that_cannot_be_stopped_after_a_failed_launch_are_reported(
    session: CMLPlace, backend: CMLPods, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_ids: int) -> None:
        raise RuntimeError("the platform is away")

    session.api.failing.add(101)
    lines: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["cml.workers_v1"], "stop_workers", refuse)
        with pytest.raises(PodError, match="ImagePullBackOff"):
            backend.launch(PodSpec(), 1, replace(context, report=lines.append))
    assert "pods that were asked for may still run" in lines[-1]
    assert "the platform is away" in lines[-1]


def test_a_worker_that_never_registers_is_named_at_the_deadline(
    session: CMLPlace, backend: CMLPods, context: LaunchContext
) -> None:
    session.api.mute.add(101)
    with pytest.raises(PodTimeout) as caught:
        backend.launch(PodSpec(), 1, replace(context, timeout_s=1.0))
    assert (
        "0 of 1 workers reported in 1 s; missing: pod-0 (worker 101, last log line: none)"
        in str(caught.value)
    )
    assert stopped(session) == [(101,)]
    assert session.left(context) == []


def test_a_refusal_carries_the_platforms_words_and_stops_what_began(
    session: CMLPlace, backend: CMLPods, context: LaunchContext
) -> None:
    session.api.quota = 1
    with pytest.raises(
        BackendError,
        match=sentence("Cloudera ML refused", "launch_workers", "403: cpu quota exceeded"),
    ):
        backend.launch(PodSpec(), 2, context)
    assert stopped(session) == [(101,)]
    backend.stop()
    assert stopped(session) == [(101,)], "a second stop has no ids and so asks for nothing"


def test_workers_get_what_was_asked_and_the_projects_other_workers_live_on(
    session: CMLPlace, context: LaunchContext
) -> None:
    (other,) = session.api.launch_workers(1, 1, 1, code="import time; time.sleep(600)")
    mine = CMLPods(cpu=2, nvidia_gpu=3, port=free_port(), **session.options)
    (pod,) = mine.launch(PodSpec(cpus=1, memory_gib=6), 1, context)
    assert session.api.calls[1][1] == {"n": 1, "cpu": 2, "memory": 6, "nvidia_gpu": 3}
    assert (pod.slots, pod.ssh_port, pod.address) == (3, mine.port, "127.0.0.3")
    assert mine.refresh()[0].phase is Phase.RUNNING
    session.api.stop_workers(102)
    (pod,) = mine.refresh()
    assert (pod.phase, says(pod.message, "its worker has ended")) == (Phase.FAILED, True)
    mine.stop()
    assert session.api.processes[other["id"]].poll() is None
    assert session.left(context) == [f"worker {other['id']}"]


def free_port() -> int:
    with socket.create_server(("127.0.0.3", 0)) as probe:
        return int(probe.getsockname()[1])


def test_the_port_and_the_addresses_where_the_platform_has_its_own_daemon_and_tells_none(
    session: CMLPlace, context: LaunchContext
) -> None:
    session.api.tells_addresses = False
    with socket.create_server(("127.0.0.2", 0)) as platforms_own:
        port = platforms_own.getsockname()[1]
        backend = CMLPods(port=port, **session.options)
        (pod,) = backend.launch(PodSpec(), 1, context)
        assert pod.address == "127.0.0.2"
        assert pod.ssh_port != port
        backend.stop()


def test_a_worker_takes_another_port_when_one_is_snatched(
    tmp_path: Path, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cmlworker.ADDRESS, "127.0.0.2")
    before = signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        looks = iter([lambda *_: None])  # the first look comes before the other process
        look = worker.check_free
        monkeypatch.setattr(worker, "check_free", lambda *asked: next(looks, look)(*asked))
        config = WorkerConfig(
            name="pod-0",
            address="",
            port=port,
            slots=1,
            root=str(tmp_path / "pods" / "pod-0"),
            log=str(tmp_path / "log"),
            public_key=context.public_key,
            environment={},
            lease_s=5,
            timeout_s=0.1,
            rendezvous=("127.0.0.1", 1),
            token=32 * "00",
        )
        (tmp_path / "asked.json").write_bytes(config.to_line())
        assert (
            cmlworker.CMLWorker().run(tmp_path / "asked.json") == 1
        )  # there is no rendezvous to report to
    signal.signal(signal.SIGTERM, before)
    said = (tmp_path / "log").read_text()
    assert f"Bind to port {port} on 127.0.0.2 failed" in said
    assert "Server listening on 127.0.0.2" in said.partition(f"Bind to port {port}")[2]


def test_a_worker_that_contradicts_the_platform_is_refused(
    session: CMLPlace, backend: CMLPods, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = session.api.list_workers
    module = sys.modules["cml.workers_v1"]
    monkeypatch.setattr(
        module, "list_workers", lambda: [{**w, "ip_address": "10.1.1.1"} for w in real()]
    )
    with pytest.raises(
        PodError,
        match=sentence("nothing was sent to either address", "pod-0", "127.0.0.2", "10.1.1.1"),
    ):
        backend.launch(PodSpec(), 1, context)
    assert session.left(context) == []


def test_a_pod_that_nobody_logs_in_to_ends_with_its_lease(
    session: CMLPlace, backend: CMLPods, context: LaunchContext, identity: Identity
) -> None:
    pods = backend.launch(PodSpec(), 1, replace(context, lease_s=0.5))
    identity.pin(pods)
    with SSHConnection(pods[0], identity):
        time.sleep(1.5)  # three leases
        assert session.api.processes[101].poll() is None
    assert session.api.processes[101].wait(300) == 0
    assert "nobody was logged in for 0 s" in backend.logs("pod-0")
    assert backend.refresh()[0].phase is Phase.FAILED
    backend.stop()
    assert session.left(context) == []


def test_the_token_is_in_no_argument_and_no_environment(
    session: CMLPlace, backend: CMLPods, context: LaunchContext
) -> None:
    backend.launch(PodSpec(), 1, context)
    file = context.directory / "pods" / "pod-0.json"
    assert file.stat().st_mode & 0o077 == 0
    token = file.read_text().split('"token": "')[1].partition('"')[0]
    assert len(token) == 64
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        assert token.encode() not in text
    assert token not in backend.logs("pod-0")


def test_outside_a_session_the_error_says_so(
    context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cml", raising=False)
    with pytest.raises(
        ConfigError,
        match=sentence("CMLPods works only inside a session of Cloudera ML")
        + sentence("there is no module cml.workers_v1"),
    ):
        CMLPods().launch(PodSpec(), 1, context)


def test_a_directory_that_workers_do_not_share_is_refused(
    session: CMLPlace, context: LaunchContext
) -> None:
    with pytest.raises(
        ConfigError,
        match=sentence("The workers share only this folder with the session", "/home/cdsw"),
    ):
        CMLPods().launch(PodSpec(), 1, context)
    assert session.api.calls == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nvidia_gpu": -1}, "nvidia_gpu is -1"),
        ({"cpu": 0}, "cpu is 0"),
        ({"memory_gib": -1}, "memory_gib is -1"),
        (
            {"port": 0},
            sentence("a port, a whole number from 1 to 65535", "port is 0")
            + sentence("it must be"),
        ),
        ({"root": "tmp"}, sentence("it must be an absolute path on the workers", "tmp")),
        ({"root": "/s/$USER"}, sentence("it must be an absolute path on the workers", "USER")),
        (
            {"options": {"code": "x"}},
            sentence("CMLPods options may not hold {}; the workbench sets them itself", "code"),
        ),
        ({"options": 7}, sentence("is {}; it must be an object", "options", 7)),
        ({"option": {}}, sentence(": did you mean '{}'?", "options")),
    ],
)
def test_refusals(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CMLPods(**options)  # type: ignore[arg-type]


def test_it_comes_back_from_json() -> None:
    backend = CMLPods(cpu=4, memory_gib=16, nvidia_gpu=1, options={"accelerator_label_id": 3})
    assert (
        repr(backend)
        == "CMLPods(cpu=4, memory_gib=16, nvidia_gpu=1, options={'accelerator_label_id': 3})"
    )
    assert repr(backend_from_dict(backend.to_dict())) == repr(backend)


def test_the_session_is_pod_0_itself(
    session: CMLPlace, context: LaunchContext, identity: Identity
) -> None:
    said: list[str] = []
    backend = CMLPods(session=True, **session.options)
    pods = backend.launch(PodSpec(), 3, replace(context, report=said.append))
    assert said[0] == "asked Cloudera ML for 2 workers; pod-0 is this session"
    assert [pod.address for pod in pods] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    identity.pin(pods)
    for pod in pods:
        with SSHConnection(pod, identity) as connection:
            assert connection.run(["printenv", "WORKBENCH_POD"]).stdout.strip() == pod.root
    assert [pod.phase for pod in backend.refresh()] == [pod.phase for pod in pods]
    own = find(read_note(context.directory, IDS)["pod-0"]["pid"])  # type: ignore[index]
    assert own is not None

    heir = CMLPods(
        session=True, **session.options
    )  # another keeper, as after the death of the first
    heir.adopt(pods, PodSpec(), context)
    own.send(signal.SIGTERM)
    until(lambda: not own.is_alive())
    assert [pod.phase.is_terminal for pod in heir.refresh()] == [True, False, False]
    assert says(heir.refresh()[0].message, "its worker has ended", "status exited")
    backend.stop()
    assert stopped(session) == [(101, 102)]
    assert session.left(context) == []


def test_a_session_alone_needs_no_worker_and_says_what_gpus_it_lacks(
    session: CMLPlace, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    backend = CMLPods(session=True, **session.options)
    with pytest.raises(ConfigError, match=sentence("the pods of this machine need", 2, 1)):
        backend.launch(PodSpec(gpus=2), 2, context)
    (pod,) = backend.launch(PodSpec(), 1, context)
    own = find(read_note(context.directory, IDS)["pod-0"]["pid"])  # type: ignore[index]
    assert (pod.address, session.api.calls, own is not None) == ("127.0.0.1", [], True)
    for _ in range(2):
        remove_left(backend.to_dict(), context.directory)
    until(lambda: session.left(context) == [])


def test_the_workers_of_a_killed_keeper_are_stopped(
    session: CMLPlace, context: LaunchContext
) -> None:
    backend = session.backend()
    backend.launch(PodSpec(), 2, context)
    for _ in range(2):  # another process, which knows the backend's JSON form alone
        remove_left(backend.to_dict(), context.directory)
    assert stopped(session) == [(101, 102)]
    assert session.left(context) == []
