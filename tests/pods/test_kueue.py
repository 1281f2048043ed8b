"""Pods in a queue of Kueue's, against Kueue's own rule for the pods of a group."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kubeplace import KubernetesPlace, role
from tests.support.poll import until
from tests.support.sentences import sentence
from tests.support.takeover import notebook
from workbench import Cluster, FineTune
from workbench.base.errors import BackendError
from workbench.pods.backends import remove_left
from workbench.pods.kubernetes import pods as kubepods
from workbench.pods.kubernetes import session
from workbench.pods.kubernetes.pods import RECORD
from workbench.pods.notes import note_of
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity
from workbench.rundir.state import RunState

PLACE = "kubernetes"


@pytest.fixture
def context(context: LaunchContext) -> LaunchContext:
    """The lease outlives the waits for Kueue."""
    return replace(context, lease_s=60.0)


def names(place: KubernetesPlace) -> list[str]:
    return sorted(item["metadata"]["name"] for item in place.server.live() if item["kind"] == "Pod")


def answer(pods: list[Pod], identity: Identity) -> None:
    """Check that every pod takes a login."""
    identity.pin(pods)
    for pod in pods:
        SSHConnection(pod, identity).open().close()


@pytest.mark.parametrize(("queue", "how"), [("lab", "failed"), ("lab", "deleted"), ("", "failed")])
def test_a_lost_pod_is_replaced_as_often_as_needed(
    place: KubernetesPlace, context: LaunchContext, identity: Identity, queue: str, how: str
) -> None:
    backend = place.backend(queue=queue)
    first = backend.launch(PodSpec(), 2, context)
    base = names(place)[0].removesuffix("-0")
    for turn in (1, 2):
        lose = place.kubelet.fail("pod-1") if how == "failed" else place.kubelet.delete("pod-1")
        place.do(lose)
        until(lambda: backend.refresh()[1].phase.is_terminal)
        pods = list(backend.restore({"pod-1"}, PodSpec(), context))
        assert [pod.name for pod in pods] == ["pod-0", "pod-1"]
        assert [pod.host_key for pod in pods] == [pod.host_key for pod in first]
        answer(pods, identity)
        until(lambda turn=turn: names(place) == [f"{base}-0", f"{base}-1-{turn}"])  # type: ignore[misc]
    # A later keeper finds the replacement by its labels.
    other = place.backend(queue=queue)
    adopted = list(other.adopt(pods, PodSpec(), context))
    assert [pod.phase for pod in adopted] == [Phase.RUNNING] * 2
    other.stop()
    assert place.left(context) == []


def test_a_group_with_a_lost_pod_is_closed_and_its_quota_free(
    place: KubernetesPlace, context: LaunchContext
) -> None:
    backend = place.backend(queue="lab")
    backend.launch(PodSpec(), 2, context)
    place.do(place.kubelet.fail("pod-1"))
    until(lambda: backend.refresh()[1].phase is Phase.FAILED)
    backend.stop()
    assert place.left(context) == []
    assert not note_of(context.directory, RECORD).exists()


def test_a_preempted_group_is_restored_as_another_group(
    place: KubernetesPlace, context: LaunchContext, identity: Identity
) -> None:
    backend = place.backend(queue="lab")
    backend.launch(PodSpec(), 2, context)
    before = names(place)
    words = "Preempted to accommodate a workload in the ClusterQueue"
    for name in ("pod-0", "pod-1"):
        condition = {"type": "TerminationTarget", "status": "True", "reason": "StoppedByKueue"}
        place.do(place.kubelet.condition(name, **condition, message=words))
        place.do(place.kubelet.delete(name))
    until(lambda: all(pod.phase.is_terminal for pod in backend.refresh()))
    for pod in backend.refresh():
        assert re.search(f"not by this cluster; StoppedByKueue: {words}$", pod.message), pod
    pods = list(backend.restore({"pod-0", "pod-1"}, PodSpec(), context))
    answer(pods, identity)
    until(lambda: len(names(place)) == 2)
    assert not set(before) & set(names(place)), "Kueue keeps the pods of the closed group"
    backend.stop()
    assert place.left(context) == []


def test_pods_that_kueue_keeps_are_named_until_they_are_gone(
    place: KubernetesPlace, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_GONE_S", 3.0)
    monkeypatch.setattr(kubepods, "_KUEUE_S", 0.1)
    backend = place.backend(queue="lab")
    backend.launch(PodSpec(), 1, context)
    (name,) = names(place)
    place.server.kueue = False
    kept = sentence("Call the cluster's close() again once the server answers") + sentence(
        "check that Kueue's controller runs", name
    )
    with pytest.raises(BackendError, match=kept):
        backend.stop()
    with pytest.raises(BackendError, match=kept):
        remove_left(backend.to_dict(), context.directory)
    place.server.kueue = True
    monkeypatch.setattr(session, "_GONE_S", 300.0)
    remove_left(backend.to_dict(), context.directory)
    until(lambda: place.left(context) == [])


def test_a_group_of_a_dead_keeper_is_closed_by_a_later_start(
    place: KubernetesPlace, context: LaunchContext, tmp_path: Path
) -> None:
    forgotten = place.backend(queue="lab")
    forgotten.launch(PodSpec(), 1, context)
    ended = {"exitCode": 1, "finishedAt": "2020-01-01T00:00:00Z"}
    status: Any = {"containerStatuses": [{"name": "worker", "state": {"terminated": ended}}]}
    place.do(place.kubelet.fail("pod-0", phase="Failed", **status))
    until(lambda: forgotten.refresh()[0].phase is Phase.FAILED)
    old = names(place)
    later = place.backend()
    later.launch(PodSpec(), 1, replace(context, directory=tmp_path / "later"))
    until(lambda: not set(old) & set(names(place)))
    for backend in (forgotten, later):
        backend.stop()


def test_a_queue_needs_the_right_to_close_its_group(
    place: KubernetesPlace, context: LaunchContext
) -> None:
    place.server.allowed = role() - {("patch", "pods")}
    with pytest.raises(BackendError, match=r'cannot patch resource "pods".*rbac\.yaml'):
        place.backend(queue="lab").launch(PodSpec(), 1, context)
    assert place.left(context) == []
    backend = place.backend()
    backend.launch(PodSpec(), 1, context)
    backend.stop()


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_kernel_keeps_the_place_in_the_queue_and_the_run_trains(
    place: KubernetesPlace, tmp_path: Path
) -> None:
    place.kubelet.behave = {"pod-0": "gated", "pod-1": "gated"}
    job = FineTune(
        dataset={"kind": "wikisql-mini", "train_rows": 16, "eval_rows": 4},
        max_steps=2,
        per_device_train_batch_size=4,
    )
    path = tmp_path / "cluster"
    kernel, run = notebook(place.backend(queue="lab"), path, job)
    until(lambda: len(names(place)) == 2, 120, every_s=0.2)
    queued = names(place)
    kernel.kill()
    kernel.communicate(timeout=300)

    attached = Cluster.attach(path)
    until(lambda: "SchedulingGated" in attached.message, 120, every_s=0.1)
    assert run.state is RunState.QUEUED
    assert names(place) == queued
    place.do(admit(place))
    attached.start()
    assert names(place) == queued, "no pod was asked for twice"
    result = run.wait(300, progress=False).raise_for_status()
    assert (result.steps, result.world_size) == (2, 2)
    attached.close()
    until(lambda: names(place) == [])


async def admit(place: KubernetesPlace) -> None:
    place.kubelet.admitted.set()
