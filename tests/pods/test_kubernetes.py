"""Faults of a Kubernetes cluster, in the platform's words, with nothing left behind.

The contract is in test_contract.py.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kubeplace import KubernetesPlace, role
from tests.pods.conftest import Launched, launching, on_pods
from tests.support.hurried import HurriedClock
from tests.support.poll import until
from tests.support.sentences import says, sentence
from tests.support.takeover import kill_keeper
from workbench.base.errors import BackendError, ConfigError, PodError, PodTimeout, WorkbenchError
from workbench.client.cluster import Cluster
from workbench.jobs.script import Script
from workbench.pods.backends import remove_left
from workbench.pods.kubernetes import access, session, status
from workbench.pods.kubernetes import api as kubeapi
from workbench.pods.kubernetes.manifests.volumes import Volume
from workbench.pods.kubernetes.pods import RECORD, KubernetesPods
from workbench.pods.notes import note_of, read_note, write_note
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity

AFFINITY = {"nodeAffinity": "gpu"}


PLACE = "kubernetes"


@pytest.fixture(scope="module")
def standing(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[KubernetesPlace, Launched]]:
    """Two pods that run, for tests that leave them as they were."""
    folder = tmp_path_factory.mktemp("standing")
    with KubernetesPlace(folder / "place") as made, launching(made, 2, folder) as launched:
        yield made, launched


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HurriedClock:
    """The clock of starts, and of the words about pods that wait."""
    made = HurriedClock()
    monkeypatch.setattr(session, "time", made)
    monkeypatch.setattr(status, "time", made)
    return made


def fault(place: KubernetesPlace, verb: str, resource: str, status: int, **more: Any) -> None:
    from tests.fakes.kubeserver import Fault

    place.server.faults.append(Fault(verb, resource, status, **more))


def refused(
    place: KubernetesPlace,
    context: LaunchContext,
    kind: type[Exception],
    words: str,
    count: int = 2,
    **options: Any,
) -> str:
    """A launch that fails with these words and leaves nothing."""
    backend = place.backend(**options)
    with pytest.raises(kind, match=words) as error:
        backend.launch(PodSpec(), count, context)
    assert place.left(context) == []
    until(lambda: place.kubelet.pods == {})
    assert list(backend.refresh()) == []
    assert not (note_of(context.directory, RECORD)).exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("list", "pods"),
        ("create", "secrets"),
        ("watch", "pods"),
        ("get", "pods/log"),
        # These would be missed only by SSH, and when the cluster closes.
        ("get", "pods/portforward"),
        ("create", "pods/portforward"),
        ("delete", "pods"),
    ],
)
def test_what_the_role_forbids_is_named(
    place: KubernetesPlace, context: LaunchContext, verb: str, resource: str
) -> None:
    place.server.allowed = role() - {(verb, resource)}
    words = (
        f'cannot {verb} resource "{resource}" in API group "" '
        'in the namespace "lab"; docker/kubernetes/rbac.yaml'
    )
    refused(place, context, BackendError, re.escape(words))


def test_the_shipped_role_allows_what_is_called_and_no_more(
    place: KubernetesPlace, context: LaunchContext
) -> None:
    fault(place, "create", "pods", 500, after=True)  # then it is read, to see whether it was made
    volume = Volume(mount="/data", claim="new", size_gib=1)
    backend = place.backend(volumes=[volume], queue="lab", connect_timeout_s=9)
    pods = backend.launch(PodSpec(), 1, context)
    assert pods[0].connect_timeout_s == 9
    found = {item["kind"]: item for item in place.server.live()}
    policy, labels = found["NetworkPolicy"], found["Pod"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    identity = Identity(context.directory / "identity")
    identity.pin(pods)
    SSHConnection(pods[0], identity).open().close()
    backend.stop()
    assert set(place.server.calls) == role()


def test_an_account_without_the_right_to_policies_starts_and_is_warned(
    place: KubernetesPlace, context: LaunchContext, caplog: pytest.LogCaptureFixture
) -> None:
    place.server.allowed = role() - {("create", "networkpolicies")}
    told: list[str] = []
    backend = place.backend()
    backend.launch(PodSpec(), 1, replace(context, report=told.append))
    found = {item["kind"]: item for item in place.server.live()}
    assert "NetworkPolicy" not in found
    assert "deepspeed-workbench/network" not in found["Pod"]["metadata"]["labels"]
    for words in (told[0], caplog.text):
        assert says(words, "other pods of the namespace may reach the ports of the pods")
        assert 'cannot create resource "networkpolicies"' in words
        assert "docker/kubernetes/rbac.yaml" in words
    backend.stop()


def test_quota_is_told_in_the_servers_words(place: KubernetesPlace, context: LaunchContext) -> None:
    words = (
        'pods "wb-test" is forbidden: exceeded quota: gpus, '
        "requested: requests.nvidia.com/gpu=8, used: 8, limited: 8"
    )
    fault(place, "create", "pods", 403, message=words, skip=1)
    refused(
        place,
        context,
        BackendError,
        f"{words}; ask for fewer or smaller pods, or for a larger quota",
    )


@pytest.mark.parametrize(
    ("resource", "advice"),
    [
        ("memory", "say memory_gib= in the PodSpec"),
        ("ephemeral-storage", "say ephemeral_storage_gib= in Kubernetes"),
    ],
)
def test_a_quota_on_a_resource_that_was_not_named_says_which_option(
    place: KubernetesPlace, context: LaunchContext, resource: str, advice: str
) -> None:
    words = (
        f'pods "wb-test" is forbidden: failed quota: q: must specify limits.{resource} for: worker'
    )
    fault(place, "create", "pods", 403, message=words)
    refused(
        place, context, BackendError, f"{words}; the namespace's quota asks for a limit: {advice}"
    )


def test_a_refusal_reaches_the_notebook_as_a_backend_error(
    place: KubernetesPlace, tmp_path: Path
) -> None:
    words = 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'
    fault(place, "create", "pods", 403, message=words)
    with pytest.raises(
        BackendError,
        match=sentence(
            "the {} in namespace",
            "did not create",
            "pod",
            "lab (403): violates PodSecurity",
        ),
    ):
        Cluster(place.backend(), PodSpec(), count=2, path=tmp_path / "cluster", warm=False).start()


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (
            404,
            'namespaces "lab" not found',
            'did not create the pod in namespace lab .404.: namespaces "lab" not found',
        ),
        (401, "Unauthorized", "Unauthorized; the credentials were valid before"),
        (409, 'pods "wb-test" already exists', "already exists"),
        (422, "spec.affinity: Invalid value", "spec.affinity: Invalid value"),
    ],
)
def test_other_refusals(
    place: KubernetesPlace, context: LaunchContext, status: int, message: str, words: str
) -> None:
    fault(place, "create", "pods", status, message=message)
    refused(place, context, BackendError, words)


def test_a_server_in_trouble_is_asked_again(place: KubernetesPlace, context: LaunchContext) -> None:
    fault(place, "list", "pods", 503)
    fault(place, "create", "secrets", 429, headers={"Retry-After": "1"})
    fault(place, "create", "services", 500, after=True)
    fault(place, "create", "pods", 504, after=True, skip=1)
    fault(place, "watch", "pods", 410)
    fault(place, "watch", "events", 500, times=2)
    fault(place, "delete", "pods", 500)
    backend = place.backend()
    began_s = time.monotonic()
    pods = backend.launch(PodSpec(), 2, context)
    assert time.monotonic() - began_s >= 1.0, "Retry-After was not heeded"
    assert [pod.name for pod in pods] == ["pod-0", "pod-1"]
    backend.stop()
    assert place.left(context) == []
    assert [fault for fault in place.server.faults if fault.times] == []


def test_a_manifest_that_the_users_options_spoil_is_refused(
    place: KubernetesPlace, context: LaunchContext
) -> None:
    refused(
        place,
        context,
        ConfigError,
        "manifest is not valid: spec.affinity.nodeAffinity",
        affinity=AFFINITY,
    )


def test_a_misspelt_field_of_a_pod_template_is_refused_by_its_name(
    place: KubernetesPlace, context: LaunchContext
) -> None:
    backend = place.backend(pod_template={"spec": {"hostNetwrk": True}})
    with pytest.raises(ConfigError, match=r"manifest is not valid: spec\.hostNetwrk"):
        backend.launch(PodSpec(), 1, context)
    assert place.left(context) == []


def test_a_server_that_is_not_there_is_named(
    tmp_path: Path, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = KubernetesPlace(tmp_path / "place")
    with place:
        pass  # its port is closed now
    monkeypatch.setattr(kubeapi, "_PATIENCE_S", 0.5)
    with pytest.raises(
        BackendError,
        match=sentence("the Kubernetes API server {} does not answer", "http://127.0.0.1"),
    ) as caught:
        place.backend().launch(PodSpec(), 1, context)
    assert "waits longer" not in str(caught.value), "a longer wait mends no refused connection"


def test_a_server_that_accepts_and_never_answers_names_the_option(
    place: KubernetesPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeapi, "_PATIENCE_S", 0.1)
    kubeconfig = tmp_path / "kubeconfig"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        lines = place.kubeconfig.read_text()
        kubeconfig.write_text(re.sub(r"http://127.0.0.1:\d+", f"http://127.0.0.1:{port}", lines))
        hurried = place.backend(kubeconfig=str(kubeconfig), connect_timeout_s=0.1)
        with pytest.raises(BackendError) as caught:
            kubeapi.KubeApi(hurried).list("pod")
    assert says(str(caught.value), "the Kubernetes API server {} does not answer")
    assert "connect_timeout_s=0.4) waits longer" in str(caught.value)


def test_what_could_not_be_deleted_is_told_and_deleted_later(
    place: KubernetesPlace, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeapi, "_PATIENCE_S", 0.5)
    backend = place.backend()
    backend.launch(PodSpec(), 1, context)
    fault(place, "delete", "pods", 500, message="etcd is down", times=99)
    words = (
        "may still be in namespace lab: .*etcd is down. "
        ".*kubectl -n lab delete pod,service,secret -l"
    )
    with pytest.raises(BackendError, match=words):
        backend.stop()
    with pytest.raises(BackendError, match=words):
        backend.stop()  # a second call must not forget what the first could not remove
    assert sorted(line.split()[0] for line in place.left(context)) == [
        *("NetworkPolicy", "Pod", "Secret", "Service")
    ]
    place.server.faults.clear()
    for _ in range(2):
        remove_left(backend.to_dict(), context.directory)
    until(lambda: place.left(context) == [])


@pytest.mark.long
def test_a_start_that_fails_while_the_server_is_away_forgets_nothing(
    place: KubernetesPlace,
    context: LaunchContext,
    clock: HurriedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubeapi, "_PATIENCE_S", 0.5)
    place.kubelet.behave["pod-1"] = "pending"

    def report(line: str) -> None:
        if "pod-1 (Unschedulable" in line:
            place.server.go_away()
            # The time-out ends 3 s later.
            clock.ahead_s = context.timeout_s - 3 - (time.monotonic() - began_s)

    backend = place.backend(volumes=[Volume(mount="/data", claim="new", size_gib=1)])
    words = (
        sentence("Call the cluster's close() again once the server answers", 2, 3)
        + sentence("of {} pods came up in {} s; missing")
        + sentence("the Kubernetes API server {} does not answer")
    )
    began_s = time.monotonic()
    with pytest.raises(PodTimeout, match=words):
        backend.launch(PodSpec(), 2, replace(context, report=report))
    record = note_of(context.directory, RECORD)
    for _ in range(2):
        with pytest.raises(
            BackendError,
            match=sentence("Call the cluster's close() again once the server answers", "lab"),
        ):
            backend.stop()
        with pytest.raises(
            BackendError,
            match=sentence("Call the cluster's close() again once the server answers", "lab"),
        ):
            remove_left(backend.to_dict(), context.directory)
        assert record.exists(), "what is left there would be forgotten"
    place.server.away = False
    assert sorted(line.split()[0] for line in place.left(context)) == [
        *("NetworkPolicy", "PersistentVolumeClaim", "Pod", "Pod", "Secret", "Service")
    ]
    remove_left(backend.to_dict(), context.directory)
    until(lambda: place.left(context) == [])
    assert not record.exists()
    backend.stop()


def test_a_second_start_removes_what_the_first_could_not(
    place: KubernetesPlace, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeapi, "_PATIENCE_S", 0.5)
    first = place.backend()
    first.launch(PodSpec(), 1, context)
    old = place.left(context)
    place.server.go_away()
    with pytest.raises(
        BackendError,
        match=sentence("Call the cluster's close() again once the server answers", "lab"),
    ):
        first.stop()
    with pytest.raises(
        BackendError,
        match=sentence("Call the cluster's close() again once the server answers", "lab"),
    ):
        place.backend().launch(PodSpec(), 1, context)
    place.server.away = False
    second = place.backend()
    second.launch(PodSpec(), 1, context)
    until(lambda: not set(old) & set(place.left(context)))
    second.stop()
    assert place.left(context) == []


def test_objects_of_another_server_are_not_forgotten(
    place: KubernetesPlace, context: LaunchContext
) -> None:
    backend = place.backend()
    backend.launch(PodSpec(), 1, context)
    record = note_of(context.directory, RECORD)
    noted = read_note(context.directory, RECORD)
    elsewhere = {"base": "wb-there-0a1b2c", "server": "https://other.example.org:6443"}
    write_note(context.directory, RECORD, {**noted, **elsewhere})
    with pytest.raises(
        BackendError,
        match=sentence(
            "the Kubernetes objects of",
            "wb-there-0a1b2c",
            "https://other.example.org:6443",
        ),
    ):
        remove_left(backend.to_dict(), context.directory)
    assert record.exists()
    renamed = {**noted, "server": "https://the-same-by-another-name:6443"}
    write_note(context.directory, RECORD, renamed)
    remove_left(place.backend(namespace="default").to_dict(), context.directory)
    until(lambda: place.left(context) == [])
    assert not record.exists()
    backend.stop()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (
            "no-claim",
            'pod-1 .* did not start: Unschedulable: .*persistentvolumeclaim "data" not found',
        ),
        (
            "image",
            r"did not start: ImagePullBackOff: "
            r'Back-off pulling image "example.org/nothing:1": not found',
        ),
        ("crash", r"did not start: Error \(exit code 3\): no sshd here"),
    ],
)
def test_a_pod_that_cannot_start_is_given_up_at_once(
    place: KubernetesPlace, context: LaunchContext, behaviour: str, words: str
) -> None:
    place.kubelet.behave["pod-1"] = behaviour
    refused(place, context, PodError, words)  # and not by the words of a time-out


def test_a_python_that_the_image_lacks(place: KubernetesPlace, context: LaunchContext) -> None:
    refused(
        place,
        context,
        PodError,
        'RunContainerError: exec: "python9": No such file',
        python="python9",
    )


def test_a_pending_pod_is_given_up_at_the_deadline_with_its_words(
    place: KubernetesPlace, context: LaunchContext, clock: HurriedClock
) -> None:
    place.kubelet.behave |= {"pod-1": "pending", "pod-2": "silent"}
    said: list[str] = []
    pending = "pod-1 (Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."

    def report(line: str) -> None:
        said.append(line)
        if line.startswith("1 of 3") and pending in line:
            clock.ahead_s = 2 * context.timeout_s

    short = replace(context, report=report)
    words = re.escape(
        f"1 of 3 pods came up in 300 s; missing: {pending} no new claims to deallocate"
    )
    error = refused(place, short, PodTimeout, words, count=3)
    assert error.count("3 Insufficient nvidia.com/gpu") == 1, "the scheduler's words come twice"
    assert "pod-2" in error
    assert "Startup probe" not in f"{error}{said}"
    assert any(pending in line for line in said), said


def test_a_token_comes_from_a_secret_and_its_absence_is_told(
    place: KubernetesPlace, context: LaunchContext, identity: Identity
) -> None:
    secrets = {"HF_TOKEN": "hub/token"}
    refused(
        place,
        context,
        PodError,
        'CreateContainerConfigError: secret "hub" not found',
        secrets=secrets,
    )
    place.do(place.kubelet.make_secret("hub", {"token": "hf_canary0000000000"}))
    backend = place.backend(secrets=secrets)
    pods = backend.launch(PodSpec(), 1, context)
    identity.pin(pods)
    with SSHConnection(pods[0], identity) as connection:
        assert connection.run(["printenv", "HF_TOKEN"]).stdout == "hf_canary0000000000\n"
    manifests = [item for item in place.server.live() if item["metadata"]["name"] != "hub"]
    seen = f"{manifests}{backend.logs('pod-0', 999)}{backend!r}{backend.to_dict()}{pods}"
    assert "hf_canary" not in seen
    backend.stop()
    assert place.left(context) == ["Secret hub"]


def test_pods_share_a_claim_that_is_made_and_only_a_kept_one_stays(
    place: KubernetesPlace, context: LaunchContext, identity: Identity
) -> None:
    volumes = [
        Volume(mount="/models", claim="hub", size_gib=10, hub_cache=True),
        Volume(mount="/runs", claim="runs", size_gib=1, keep=True),
    ]
    for _ in range(2):  # the second finds the kept one
        backend = place.backend(volumes=volumes)
        pods = backend.launch(PodSpec(), 2, context)
        identity.pin(pods)
        with SSHConnection(pods[0], identity) as one, SSHConnection(pods[1], identity) as other:
            cache = one.run(["printenv", "HF_HOME"]).stdout.strip()
            assert one.run(["touch", f"{cache}/model"]).exit_code == 0
            assert other.run(["sh", "-c", "ls $HF_HOME"]).stdout == "model\n"
        backend.stop()
        until(lambda: place.left(context) == ["PersistentVolumeClaim runs"])
    keeps_nothing = [Volume(mount="/runs", claim="runs", size_gib=1)]
    with pytest.raises(
        BackendError, match=sentence("and would be deleted with the cluster", "runs")
    ):
        place.backend(volumes=keeps_nothing).launch(PodSpec(), 1, context)
    assert place.left(context) == ["PersistentVolumeClaim runs"]


@pytest.mark.long
def test_the_time_out_runs_from_the_end_of_the_pull(
    place: KubernetesPlace,
    context: LaunchContext,
    clock: HurriedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status, "LOOK_S", 0.2)
    monkeypatch.setattr(session, "_REPORT_S", 0.2)
    place.kubelet.behave["pod-1"] = "pull"
    lines: list[str] = []
    arrived: list[Pod] = []

    def report(line: str) -> None:
        lines.append(line)
        if "pod-1 (pulling example.org/worker:1 for 10 min" in line:
            place.do(set_pulled())
        elif "pod-1 (pulling example.org/worker:1" in line:
            clock.ahead_s += context.timeout_s * 2 / 3

    async def set_pulled() -> None:
        place.kubelet.pulled.set()

    told = replace(context, report=report, arrived=arrived.extend)
    backend = place.backend()
    assert len(backend.launch(PodSpec(), 2, told)) == 2
    assert lines[-1] == "2 of 2 pods are up"
    waited = [pod.message for pod in arrived if pod.name == "pod-1" and not pod.address]
    assert any(words.startswith("pulling example.org/worker:1 for 10 min") for words in waited)
    backend.stop()

    place.kubelet.pulled.clear()
    hanging = place.backend(pull_timeout_s=1)
    with pytest.raises(
        PodTimeout,
        match=sentence(
            "of {} pods came up in {} s; missing", "pod-1 (pulling example.org/worker:1 for"
        ),
    ):
        hanging.launch(PodSpec(), 2, told)


def test_a_registry_that_is_away_is_waited_for(
    place: KubernetesPlace, context: LaunchContext, clock: HurriedClock
) -> None:
    place.kubelet.behave["pod-1"] = "registry-away"
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        if "ImagePullBackOff" in line:
            place.do(set_pulled())

    async def set_pulled() -> None:
        place.kubelet.pulled.set()

    backend = place.backend()
    backend.launch(PodSpec(), 2, replace(context, report=report))
    line = next(line for line in said if "; ErrImagePull: " in line)
    assert "pod-1 (pulling example.org/worker:1; ErrImagePull: failed to resolve reference" in line
    assert line.count("connection refused") == 1, "told once"
    backend.stop()

    def hurry(line: str) -> None:
        if "connection refused" in line:
            clock.ahead_s = 2 * context.timeout_s

    place.kubelet.pulled.clear()
    with pytest.raises(PodTimeout, match=r"missing: .*pod-1 .*connection refused"):
        place.backend(pull_timeout_s=1).launch(PodSpec(), 2, replace(context, report=hurry))


def test_a_config_map_that_is_not_there_ends_the_start_at_once(
    place: KubernetesPlace, context: LaunchContext
) -> None:
    volumes = [Volume(mount="/settings", config_map="settings")]
    words = r'pod-\d .* did not start: FailedMount: .*configmap "settings" not found'
    refused(place, replace(context, timeout_s=100.0), PodError, words, volumes=volumes)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user id takes root")
def test_a_user_id_without_a_name_runs_a_script(place: KubernetesPlace, tmp_path: Path) -> None:
    place.kubelet.user = 1_000_660_000
    (tmp_path / "who.py").write_text(
        "import getpass, os; print('I am', os.getuid(), os.getgid(), getpass.getuser())"
    )
    backend = place.backend(run_as_user=None, python="/usr/bin/python3")
    with Cluster(backend, PodSpec(), count=2, path=tmp_path / "cluster", warm=False) as cluster:
        assert [pod.user for pod in cluster.pods] == ["pod", "pod"]
        run = cluster.submit(Script(path=str(tmp_path / "who.py")))
        run.wait().raise_for_status()
        assert [run.logs(rank) for rank in range(2)] == ["I am 1000660000 0 pod"] * 2


@pytest.fixture
def running(launched: Launched, place: KubernetesPlace) -> Callable[[str], Pod]:
    """Waits until pod-1 has ended, and gives it."""

    def look(words: str) -> Pod:
        until(lambda: launched.backend.refresh()[1].phase.is_terminal)
        pod = launched.backend.refresh()[1]
        assert re.search(words, pod.message), pod
        assert pod.phase is Phase.FAILED
        assert launched.backend.refresh()[0].phase is Phase.RUNNING
        return pod

    return look


def test_a_lost_node_is_named_and_found_again(
    standing: tuple[KubernetesPlace, Launched],
) -> None:
    place, launched = standing
    place.lose_node()
    until(lambda: [pod.phase for pod in launched.backend.refresh()] == [Phase.UNKNOWN] * 2)
    assert all(
        pod.message.startswith("its node node-1 is not ready since 20")
        for pod in launched.backend.refresh()
    )
    place.do(place.kubelet.condition("pod-0", type="PodScheduled", status="True"))
    until(
        lambda: [pod.phase for pod in launched.backend.refresh()] == [Phase.RUNNING, Phase.UNKNOWN]
    )
    place.find_node()
    until(lambda: [pod.phase for pod in launched.backend.refresh()] == [Phase.RUNNING] * 2)


def test_a_server_that_does_not_answer_is_named_and_the_pods_keep_their_phase(
    standing: tuple[KubernetesPlace, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, launched = standing
    monkeypatch.setattr(kubeapi, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(session, "_AWAY_S", 1.0)
    place.server.go_away()
    until(lambda: all("does not answer" in pod.message for pod in launched.backend.refresh()), 60)
    assert [pod.phase for pod in launched.backend.refresh()] == [Phase.RUNNING] * 2
    place.server.away = False
    until(lambda: [pod.message for pod in launched.backend.refresh()] == ["", ""], 60)


@pytest.mark.parametrize(
    ("may_see", "status", "message"),
    [
        (True, 404, 'namespaces "lab" not found'),
        (
            False,
            403,
            'pods "wb-test" is forbidden: unable to create new content in namespace lab '
            "because it is being terminated",
        ),
    ],
)
def test_a_namespace_that_is_deleted_during_the_start_is_the_cause(
    place: KubernetesPlace, context: LaunchContext, may_see: bool, status: int, message: str
) -> None:
    place.server.allowed = role()
    place.server.deleted_namespace = True
    if may_see:
        place.server.allowed_everywhere = {("get", "namespaces")}
    fault(place, "create", "pods", status, message=message, skip=1)
    said = refused(place, context, BackendError, re.escape(message))
    cause = "the namespace lab was deleted, so the start failed: "
    assert said.startswith(cause) is may_see
    assert re.search("; the namespace lab (is being deleted|was deleted or never made): ", said)
    assert not any(other in said for other in ("rbac.yaml", "log in"))


def test_pods_that_go_with_their_namespace_during_the_start_name_the_cause(
    place: KubernetesPlace, context: LaunchContext
) -> None:
    place.server.allowed_everywhere = {("get", "namespaces")}
    place.kubelet.behave["pod-1"] = "silent"

    def report(line: str) -> None:
        if line.startswith("1 of 2 pods are up") and not place.server.deleted_namespace:
            place.server.deleted_namespace = True
            place.do(place.kubelet.delete("pod-1"))

    said = refused(place, replace(context, report=report), PodError, "pod-1")
    assert said.startswith("the namespace lab was deleted, so the start failed: pod-1 ")


@pytest.mark.parametrize("may_see", [True, False])
def test_a_namespace_that_is_deleted_is_the_cause(
    launched: Launched, place: KubernetesPlace, may_see: bool
) -> None:
    place.server.allowed = set()  # the Role is deleted too
    place.server.deleted_namespace = True
    if may_see:
        place.server.allowed_everywhere = {("get", "namespaces")}
    for name in ("pod-1", "pod-0"):
        place.do(place.kubelet.delete(name))
    lost = "this was allowed before: the namespace lab, the Role or its RoleBinding was removed"
    words = "the namespace lab was deleted" if may_see else lost
    until(lambda: all(words in pod.message for pod in launched.backend.refresh()))
    for pod in launched.backend.refresh():
        assert pod.message.startswith("it was deleted at ")
        assert not any(other in pod.message for other in ("rbac.yaml", "log in"))
    place.server.allowed = role()


@pytest.mark.long
def test_eviction_is_seen_though_the_watch_was_cut(
    running: Callable[[str], Pod], place: KubernetesPlace
) -> None:
    fault(place, "watch", "pods", 410, times=2)
    place.server.cut(place.server.watches)
    place.do(
        place.kubelet.fail(
            "pod-1", reason="Evicted", message="The node was low on resource: memory."
        )
    )
    running("Evicted: The node was low on resource: memory")


def test_a_kill_for_memory_is_told(running: Callable[[str], Pod], place: KubernetesPlace) -> None:
    killed = {"name": "worker", "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
    place.do(place.kubelet.fail("pod-1", containerStatuses=[killed]))
    running(r"OOMKilled \(exit code 137\)")


def test_preemption_and_deletion_by_others_are_told(
    running: Callable[[str], Pod], launched: Launched, place: KubernetesPlace
) -> None:
    words = {
        "reason": "PreemptionByScheduler",
        "message": "default-scheduler: preempting to accommodate a higher one",
    }
    place.kubelet.going_s = 3.0
    place.do(place.kubelet.condition("pod-1", type="DisruptionTarget", status="True", **words))
    place.do(place.kubelet.delete("pod-1"))
    pod = running(
        r"deleted at \d\d:\d\d:\d\d, not by this cluster; PreemptionByScheduler: default-scheduler"
    )
    assert on_pods([pod]) == []
    launched.backend.stop()


def test_a_deletion_while_the_watch_was_cut_is_not_missed(
    running: Callable[[str], Pod], place: KubernetesPlace
) -> None:
    fault(place, "watch", "pods", 503, times=2)
    place.server.cut(place.server.watches)
    place.do(place.kubelet.delete("pod-1"))
    running("not by this cluster")


def test_with_the_first_pod_all_goes(
    launched: Launched, place: KubernetesPlace, context: LaunchContext
) -> None:
    place.do(place.kubelet.delete("pod-0"))
    until(lambda: place.left(context) == [])
    until(lambda: [pod.phase for pod in launched.backend.refresh()] == [Phase.FAILED, Phase.FAILED])


def test_a_launch_clears_away_what_ended_long_ago(
    place: KubernetesPlace, context: LaunchContext
) -> None:
    forgotten, other = place.backend(), place.backend()
    forgotten.launch(PodSpec(), 1, context)
    ended = {"exitCode": 0, "finishedAt": "2020-01-01T00:00:00Z"}
    status = {
        "phase": "Succeeded",
        "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}],
    }
    place.do(place.kubelet.fail("pod-0", **status))
    until(lambda: forgotten.refresh()[0].phase is Phase.SUCCEEDED)
    old = place.left(context)
    other.launch(PodSpec(), 1, context)
    until(lambda: len(place.left(context)) == 4)
    assert not set(old) & set(place.left(context))
    for backend in (forgotten, other):
        backend.stop()
    assert place.left(context) == []


def test_a_broken_forward_is_opened_again(standing: tuple[KubernetesPlace, Launched]) -> None:
    place, launched = standing
    assert launched.pods[0].ssh_address == "127.0.0.1"
    connection = launched.connect().open()
    place.server.cut(place.server.forwards)
    with pytest.raises(WorkbenchError):
        connection.run(["true"], timeout_s=5)
    connection.close()
    with launched.connect() as again:
        assert again.run(["echo", "there"]).stdout == "there\n"


def test_a_forward_that_is_forbidden_does_not_hang(
    standing: tuple[KubernetesPlace, Launched],
) -> None:
    place, launched = standing
    place.server.allowed = role() - {("create", "pods/portforward")}
    try:
        with pytest.raises(PodError, match="pod-0"):
            launched.connect().open()
    finally:
        place.server.allowed = role()


def test_inside_a_cluster_pods_are_reached_directly(
    place: KubernetesPlace, context: LaunchContext, identity: Identity
) -> None:
    backend = place.backend(reach="direct")
    pods = backend.launch(PodSpec(), 1, context)
    assert (pods[0].ssh_address, pods[0].ssh_port) == ("", 2222)
    identity.pin(pods)
    SSHConnection(pods[0], identity).open().close()
    assert ("get", "pods/portforward") not in place.server.calls
    backend.stop()


def test_a_pods_root_file_system_cannot_be_written(
    standing: tuple[KubernetesPlace, Launched],
) -> None:
    _, launched = standing
    with launched.connect() as connection:
        # Without root the kubelet of the tests mounts nothing, and a user may write at home.
        home = [f"{Path.home()}/x"] if os.geteuid() == 0 else []
        for path in ("/etc/x", "/usr/bin/x", *home):
            refused = connection.run(["touch", path], timeout_s=300)
            assert (
                "Read-only file system" in refused.stderr or "Permission denied" in refused.stderr
            ), path
        script = (
            'import os, pathlib; p = pathlib.Path(os.environ["XDG_CACHE_HOME"], '
            '"hub"); p.mkdir(parents=True)'
        )
        assert connection.run(
            [launched.pods[0].python, "-c", f"{script}; print(p)"], timeout_s=300
        ).stdout.startswith(launched.pods[0].root)
        assert connection.run(["sh", "-c", "f=$(mktemp) && rm $f"], timeout_s=300).exit_code == 0


def test_the_notebooks_own_pod_owns_the_first(
    place: KubernetesPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.pods.kubernetes.api import KubeApi

    place.kubelet.behave[""] = "creating"
    api = KubeApi(place.backend())
    assert api.own_pod() is None, "outside a cluster there is none"
    monkeypatch.setattr(access, "_NAMESPACE", tmp_path / "namespace")
    (tmp_path / "namespace").write_text("lab\n")
    api.in_cluster = True
    assert api.own_pod() is None, "a pod on its node's network has another name"
    notebook = {
        "metadata": {"name": socket.gethostname()},
        "spec": {"containers": [{"name": "jupyterlab"}]},
    }
    made = api.create("pod", notebook)
    owner = api.own_pod()
    assert owner is not None
    assert {"uid": owner.uid, "name": owner.name}.items() <= made["metadata"].items()  # type: ignore[attr-defined]
    api.delete("pod", owner.name, "another-uid")
    assert api.read_pod(owner.name), "deleted though it is another of that name"


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_a_kubeconfig_that_cannot_be_used_is_named(
    tmp_path: Path, context: LaunchContext, text: str | None
) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        KubernetesPods(image="x", kubeconfig=str(path)).launch(PodSpec(), 1, context)
    assert str(caught.value).startswith(f"the kubeconfig {path} cannot be used: ")


@pytest.fixture(scope="module")
def with_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[KubernetesPlace, Cluster]]:
    """Two pods with a keeper for the tests below; the last of them kills the keeper."""
    folder = tmp_path_factory.mktemp("with_cluster")
    with KubernetesPlace(folder / "place") as made:
        path = folder / "cluster"
        cluster = Cluster(made.backend(), PodSpec(), count=2, path=path, warm=False)
        with cluster:
            yield made, cluster


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts take root")
def test_pods_share_neither_folders_nor_python_with_the_notebook(
    with_cluster: tuple[KubernetesPlace, Cluster], tmp_path: Path
) -> None:
    _, cluster = with_cluster
    script = tmp_path / "who.py"
    script.write_text("import os, sys; print(sys.executable, os.path.exists(sys.argv[1]))")
    there = cluster.pods[0].python
    assert there != sys.executable
    for launcher in ("ssh", "pdsh"):
        run = cluster.submit(
            Script(path=str(script), args=[str(cluster.path / "identity")], launcher=launcher)
        )
        run.wait(300, progress=False).raise_for_status()
        assert [run.logs(rank) for rank in range(2)] == [f"{there} False"] * 2
    with pytest.raises(
        WorkbenchError,
        match=sentence("launcher 'openmpi' needs pods with a connection to this machine"),
    ):
        cluster.submit(Script(path=str(script), launcher="openmpi"))


@pytest.mark.long
def test_an_outage_of_the_server_costs_no_run_and_few_lines_in_the_log(
    with_cluster: tuple[KubernetesPlace, Cluster], tmp_path: Path
) -> None:
    place, cluster = with_cluster
    end = tmp_path / "end"
    script = tmp_path / "wait.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "print('up', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.1)\n"
    )
    log = cluster.path / "keeper.log"
    before = len(log.read_text().splitlines())

    def lines() -> list[str]:
        return log.read_text().splitlines()[before:]

    run = cluster.submit(Script(path=str(script), args=[str(end)]))
    logs = [run.paths.rank_log(0, rank, "stdout") for rank in range(2)]
    until(lambda: all(each.exists() and "up" in each.read_text() for each in logs))
    # The node is lost, while the server answers; then the server is away too.
    place.lose_node()
    try:
        until(lambda: {pod.phase for pod in cluster.pods} == {Phase.UNKNOWN})
        place.server.go_away()
        until(lambda: any("the watch of pods broke" in line for line in lines()))
        until(lambda: any("port-forward to port 2222: " in line for line in lines()))
    finally:
        place.server.away = False
        place.find_node()
    until(lambda: any(says(line, "answers again after {} s") for line in lines()))
    end.touch()
    run.wait(300, progress=False).raise_for_status()
    # Each of many tries had a traceback of some 15 lines.
    assert not [line for line in lines() if "Traceback" in line]
    assert len(lines()) < 40, "\n".join(lines())


@pytest.mark.long
@pytest.mark.slow
def test_what_a_killed_keeper_left_is_removed(
    with_cluster: tuple[KubernetesPlace, Cluster], context: LaunchContext
) -> None:
    place, cluster = with_cluster
    pods = cluster.pods
    assert on_pods(pods)
    kill_keeper(cluster)
    assert len(place.left(context)) == 5
    cluster.close()
    cluster.close()
    until(lambda: place.left(context) == [] and on_pods(pods) == [])
