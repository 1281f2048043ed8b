"""What pods and events say, read from samples as a cluster writes them."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.pods.kubernetes.manifests.objects import CLUSTER_LABEL
from workbench.pods.kubernetes.status import (
    as_gone,
    end_of,
    identity,
    is_hopeless,
    is_pulling,
    is_ready,
    leftovers,
    listed,
    phase_of,
    why,
)
from workbench.pods.pod import Phase

NOW_S = 1_795_000_000.0  # 2026-11-18T11:06:40Z


def pod(
    phase: str = "Pending",
    *conditions: dict[str, str],
    state: dict[str, Any] | None = None,
    **status: Any,
) -> Any:
    containers = [{"name": "worker", "state": state}] if state is not None else None
    found = {
        "phase": phase,
        "conditions": list(conditions),
        "containerStatuses": containers,
        **status,
    }
    return {"metadata": {"name": "wb-a-0", "uid": "u-0"}, "status": found}


def condition(kind: str, value: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": value, "reason": reason, "message": message}


UNSCHEDULABLE = condition(
    "PodScheduled", "False", "Unschedulable", "0/3 nodes are available: 3 Insufficient cpu."
)
GATED = condition(
    "PodScheduled",
    "False",
    "SchedulingGated",
    "Scheduling is blocked due to non-empty scheduling gates",
)
NO_CLAIM = condition(
    "PodScheduled", "False", "Unschedulable", 'persistentvolumeclaim "data" not found'
)
READY = condition("Ready", "True")
LOST = {
    "type": "Ready",
    "status": "False",
    "lastTransitionTime": "2026-11-24T14:31:07Z",
}  # as a real server has it
FAILING = condition(
    "Ready", "False", "ContainersNotReady", "containers with unready status: [worker]"
)
PREEMPTED = condition(
    "DisruptionTarget", "True", "PreemptionByScheduler", "preempting to accommodate a higher one"
)


@pytest.mark.parametrize(
    ("seen", "phase", "hopeless", "words"),
    [
        ({"metadata": {}}, Phase.PENDING, False, ""),
        (pod(), Phase.PENDING, False, ""),
        (
            pod("Pending", UNSCHEDULABLE),
            Phase.PENDING,
            False,
            "Unschedulable: 0/3 nodes are available: 3 Insuff",
        ),
        (pod("Pending", GATED), Phase.PENDING, False, "SchedulingGated: Scheduling is blocked"),
        (
            pod("Pending", NO_CLAIM),
            Phase.PENDING,
            True,
            'Unschedulable: persistentvolumeclaim "data" not found',
        ),
        (pod(state={"waiting": {"reason": "ContainerCreating"}}), Phase.PENDING, False, ""),
        (
            pod(state={"waiting": {"reason": "ErrImagePull", "message": "i/o timeout"}}),
            Phase.PENDING,
            False,
            "ErrIm",
        ),
        (
            pod(state={"waiting": {"reason": "ImagePullBackOff", "message": "x"}}),
            Phase.PENDING,
            False,
            "ImagePullBac",
        ),
        (pod("Running", READY, state={"running": {}}, podIP="10.0.0.7"), Phase.RUNNING, False, ""),
        (
            {
                **pod("Running", LOST, state={"running": {}}, podIP="10.0.0.7"),
                "spec": {"nodeName": "gpu-7"},
            },
            Phase.UNKNOWN,
            False,
            "its node gpu-7 is not ready since 2026-11-24T14:31:07Z",
        ),
        (
            pod("Running", FAILING, state={"running": {}}, podIP="10.0.0.7"),
            Phase.RUNNING,
            False,
            "",
        ),
        (
            pod("Running", LOST, state={"terminated": {"reason": "Completed"}}),
            Phase.RUNNING,
            False,
            "",
        ),
        (
            pod("Running", READY, PREEMPTED, podIP="10.0.0.7"),
            Phase.RUNNING,
            False,
            "PreemptionByScheduler: preem",
        ),
        (
            pod("Failed", reason="Evicted", message="low on memory"),
            Phase.FAILED,
            True,
            "Evicted: low on memory",
        ),
        (pod("Failed", reason="DeadlineExceeded"), Phase.FAILED, True, "DeadlineExceeded"),
        (
            pod("Failed", state={"terminated": {"reason": "OOMKilled", "exitCode": 137}}),
            Phase.FAILED,
            True,
            "OOMKilled (exit code 137)",
        ),
        (
            pod(
                "Failed",
                state={"terminated": {"reason": "Error", "exitCode": 1, "message": "no sshd\n"}},
            ),
            Phase.FAILED,
            True,
            "Error (exit code 1): no sshd",
        ),
        (
            pod("Succeeded", state={"terminated": {"reason": "Completed", "exitCode": 0}}),
            Phase.SUCCEEDED,
            True,
            "",
        ),
    ],
)
def test_phase_and_words(seen: dict[str, Any], phase: Phase, hopeless: bool, words: str) -> None:
    assert (phase_of(seen), is_hopeless(seen)) == (phase, hopeless)
    assert why(seen).startswith(words)
    assert bool(why(seen)) == bool(words)


def test_a_pod_is_up_once_its_daemon_listens_and_it_has_an_address() -> None:
    up = pod("Running", READY, podIP="10.0.0.7")
    assert is_ready(up)
    assert not is_ready(pod("Running", READY))
    assert not is_ready(pod("Running", condition("Ready", "False"), podIP="10.0.0.7"))
    going = {**up, "metadata": {**up["metadata"], "deletionTimestamp": "2026-11-18T11:00:00Z"}}
    assert not is_ready(going)
    assert is_hopeless(going)


def test_a_pull_is_seen_from_its_begin_to_its_end() -> None:
    creating = pod(state={"waiting": {"reason": "ContainerCreating"}})
    events = [
        {
            "reason": reason,
            "involvedObject": {"uid": "u-0"},
            "lastTimestamp": f"2026-11-18T11:00:0{second}Z",
        }
        for reason, second in (("Scheduled", 0), ("Pulling", 1), ("Pulled", 3), ("Pulling", 2))
    ]
    assert not is_pulling(creating, events[:1])
    assert is_pulling(creating, events[:2])
    assert not is_pulling(creating, [{**events[1], "involvedObject": {"uid": "u-1"}}])
    assert not is_pulling(creating, events)
    assert not is_pulling(creating, [*events[:2], {**events[1], "reason": "Failed"}])
    assert is_pulling(
        pod(state={"waiting": {"reason": "ErrImagePull", "message": "x"}}), events[:2]
    ), "it tries again"
    assert not is_pulling(pod("Running", state={"running": {}}), events[:2])


def test_a_claim_that_is_being_made_is_waited_for() -> None:
    assert is_hopeless(pod("Pending", NO_CLAIM), ["other"])
    assert not is_hopeless(pod("Pending", NO_CLAIM), ["data"])


def test_events_tell_what_the_status_does_not() -> None:
    mount = {
        "type": "Warning",
        "reason": "FailedMount",
        "message": "timed out",
        "involvedObject": {"uid": "u-0"},
    }
    events = [mount, mount, {**mount, "involvedObject": {"uid": "u-1"}, "message": "another's"}]
    events.append({**mount, "type": "Normal", "reason": "Pulled"})
    assert why(pod(), events) == "FailedMount: timed out"
    assert as_gone(pod("Running", PREEMPTED), "11:06:40").startswith(
        "it was deleted at 11:06:40, not by this cluster; Pre"
    )


def ended(cluster: str, name: str, finished: str, phase: str = "Succeeded") -> Any:
    seen = pod(phase, state={"terminated": {"exitCode": 0, "finishedAt": finished}})
    return {
        **seen,
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {CLUSTER_LABEL: cluster}},
    }


def test_only_what_nobody_looks_after_any_more_is_left_over() -> None:
    old, recent = "2026-11-18T10:00:00Z", "2026-11-18T11:05:00Z"
    half = {**pod("Running"), "metadata": {"name": "half-1", "labels": {CLUSTER_LABEL: "half"}}}
    pods = [
        *(ended("dead", "dead-0", old), ended("dead", "dead-1", old, "Failed")),
        *(ended("half", "half-0", old), half),
        *(ended("fresh", "fresh-0", old), ended("fresh", "fresh-1", recent)),
    ]
    found = [identity(pod) for pod in leftovers(pods, NOW_S)]
    assert found == [("dead-0", "uid-dead-0"), ("dead-1", "uid-dead-1")]


def event(reason: str, message: str, kind: str = "Warning") -> dict[str, Any]:
    return {"type": kind, "reason": reason, "message": message, "involvedObject": {"uid": "u-0"}}


def test_a_healthy_start_raises_no_alarm() -> None:
    starting = pod("Running", FAILING, state={"running": {}}, podIP="10.0.0.7")
    early = [
        event("Unhealthy", "Startup probe failed: "),
        event(
            "FailedMount",
            'MountVolume.SetUp failed for volume "secret" : object "lab"/"wb-a" not registered',
        ),
    ]
    assert why(starting, early) == ""
    assert (
        why(starting, [event("Unhealthy", "Liveness probe failed: x")])
        == "Unhealthy: Liveness probe failed: x"
    )


def test_what_the_status_tells_is_not_told_again_by_an_event() -> None:
    words = UNSCHEDULABLE["message"]
    assert (
        why(pod("Pending", UNSCHEDULABLE), [event("FailedScheduling", words)])
        == f"Unschedulable: {words}"
    )
    other = event("FailedScheduling", "0/4 nodes are available")
    assert why(pod("Pending", UNSCHEDULABLE), [other]).endswith(
        "; FailedScheduling: 0/4 nodes are available"
    )
    cause = 'failed to resolve reference "x": dial tcp: connection refused'
    waiting = pod(state={"waiting": {"reason": "ErrImagePull", "message": cause}})
    again = [
        event("Failed", f'Failed to pull image "x": {cause}'),
        event("Failed", "Error: ErrImagePull"),
    ]
    assert why(waiting, again) == f"ErrImagePull: {cause}"


def test_pods_with_one_reason_are_named_together() -> None:
    assert (
        listed(dict.fromkeys(range(16), "Unschedulable: x")) == "pod-0 to pod-15 (Unschedulable: x)"
    )
    assert listed({0: "a", 1: "", 2: "a", 3: ""}) == "pod-0 and pod-2 (a), pod-1 and pod-3"
    assert listed({1: "a"}) == "pod-1 (a)"


RESOLVE = (
    'failed to pull and unpack image "r.example.org/w:1": '
    'failed to resolve reference "r.example.org/w:1"'
)


@pytest.mark.parametrize(
    ("hopeless", "cause"),
    [
        (True, f"rpc error: code = NotFound desc = {RESOLVE}: r.example.org/w:1: not found"),
        (
            True,
            f"rpc error: code = Unknown desc = {RESOLVE}: "
            "unexpected status from HEAD request: 401 Unauthorized",
        ),
        (True, "pull access denied, repository does not exist or may require authorization"),
        (True, "failed to authorize: failed to fetch anonymous token: 403 Forbidden"),
        (False, f"{RESOLVE}: dial tcp 10.0.0.9:443: connect: connection refused"),
        (False, f"{RESOLVE}: dial tcp: lookup r.example.org: network is unreachable"),
        (
            False,
            "429 Too Many Requests: toomanyrequests: You have "
            "reached your unauthenticated pull rate limit",
        ),
        (False, 'failed to pull image "not found/invalid:1": i/o timeout'),
    ],
)
def test_only_an_image_that_will_never_come_ends_the_start(hopeless: bool, cause: str) -> None:
    for reason, message in (
        ("ErrImagePull", cause),
        ("ImagePullBackOff", f'Back-off pulling image "w": {cause}'),
    ):
        assert (
            is_hopeless(pod(state={"waiting": {"reason": reason, "message": message}})) == hopeless
        )
    older = pod(
        state={"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "w"'}}
    )
    assert (
        is_hopeless(older, (), [event("Failed", f'Failed to pull image "w": {cause}')]) == hopeless
    )
    assert not is_hopeless(pod(), (), [event("Failed", cause)]), (
        "an earlier try; the image has come since"
    )


def test_a_config_map_that_is_missing_ends_the_start() -> None:
    missing = event(
        "FailedMount",
        'MountVolume.SetUp failed for volume "volume-0" : configmap "settings" not found',
    )
    assert is_hopeless(pod(), (), [missing])
    assert not is_hopeless(pod(), (), [{**missing, "involvedObject": {"uid": "u-1"}}])
    assert not is_hopeless(pod(), (), [{**missing, "message": 'secret "wb-a" not found'}]), (
        "ours comes a moment later"
    )


def test_the_end_of_a_pod_is_its_start_and_its_deadline() -> None:
    start = {"status": {"startTime": "2026-01-01T00:00:00Z"}}
    assert end_of({**start, "spec": {"activeDeadlineSeconds": 3600}}) == 1_767_229_200.0
    assert end_of({**start, "spec": {}}) is None
    assert end_of({"spec": {"activeDeadlineSeconds": 3600}}) is None
