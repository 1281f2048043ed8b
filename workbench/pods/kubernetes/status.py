"""Read the state of a pod in Kubernetes: its phase, readiness, obstacles and own report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from workbench.base.errors import PodError
from workbench.base.words import duration
from workbench.pods.bootstrap.pod_main import REPORT
from workbench.pods.kubernetes.api import ApiRefusal, KubeApi
from workbench.pods.kubernetes.manifests.objects import CLUSTER_LABEL, POD_LABEL, TURN_LABEL
from workbench.pods.pod import Phase

_HOPELESS = {
    *("ErrImageNeverPull", "InvalidImageName", "ImageInspectError"),
    *(
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    ),
}
"""Waiting reasons that never resolve: a missing image or Secret, a command that cannot start."""
_PULL_FAILED = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
_NO_IMAGE = re.compile(
    r"not found|NotFound|manifest unknown|does not exist"
    r"|unauthorized|authentication required|authorization failed"
    r"|access denied|is denied|Forbidden|invalid",
    re.IGNORECASE,
)
"""Causes of failed pulls that never resolve. A registry that is down, slow or busy (429) may
recover."""
_NO_CONFIG_MAP = re.compile(r'configmap "[^"]+" not found')

_PULLS = ("Pulling", "Pulled", "Failed", "BackOff")
_NO_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_WARNINGS_SHOWN = 2
_HEALTHY = re.compile(r'Startup probe failed|.*: object "[^"]*"/"[^"]*" not registered$')
"""Messages of events that every start may have: no daemon listens yet, or kubelet has not read a
new Secret."""
_PULL_CAUSE = re.compile(r'^(Failed to pull image "[^"]*"|Error): ')
_FORGOTTEN_S = 600.0
LOOK_S = 5.0
"""How often the time of a pull is told anew."""
_TERMINATED = 143
"""Exit code of a container after SIGTERM."""
_REPORT_S = 5.0
_LOG_LINES = 200
_LAST_LINES = 20


def identity(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and unique id of a pod's object."""
    metadata = _metadata(pod)
    return str(metadata["name"]), str(metadata["uid"])


def place_of(pod: Mapping[str, Any]) -> tuple[int, int]:
    """Return a pod's number in its cluster, and how many pods had its place before."""
    labels = _metadata(pod)["labels"]
    return int(labels[POD_LABEL].removeprefix("pod-")), int(labels[TURN_LABEL])


def phase_of(pod: Mapping[str, Any]) -> Phase:
    """Return the phase; Unknown also where the node stopped reporting."""
    status = _status(pod)
    phase = Phase(str(status.get("phase") or Phase.PENDING.value))
    if phase is Phase.RUNNING and _is_on_lost_node(pod):
        return Phase.UNKNOWN
    return phase


def _is_on_lost_node(pod: Mapping[str, Any]) -> bool:
    """Return whether the node is silent: `Ready` is False without a reason, and containers run."""
    # The controller of nodes sets `Ready` so. A kubelet knows of failed probes and of containers
    # that have ended. So a kubelet always gives a reason, such as ContainersNotReady.
    ready = _condition(pod, "Ready", "False")
    if not ready or ready.get("reason"):
        return False
    containers: Iterable[Mapping[str, Any]] = _status(pod).get("containerStatuses") or ()
    return all("running" in each.get("state", {}) for each in containers)


def _node_words(pod: Mapping[str, Any]) -> str:
    node = pod.get("spec", {}).get("nodeName")
    since = _condition(pod, "Ready", "False").get("lastTransitionTime")
    return f"its node {node or ''} is not ready".replace("  ", " ") + (
        f" since {since}" if since else ""
    )


def end_of(pod: Mapping[str, Any]) -> float | None:
    """Return when Kubernetes ends the pod by its deadline, in seconds since the epoch."""
    start = _status(pod).get("startTime")
    deadline_s = pod.get("spec", {}).get("activeDeadlineSeconds")
    if not start or not deadline_s:
        return None
    return datetime.fromisoformat(str(start)).timestamp() + float(deadline_s)


def is_ready(pod: Mapping[str, Any]) -> bool:
    if _condition(pod, "Ready").get("status") != "True":
        return False
    if _metadata(pod).get("deletionTimestamp"):
        return False
    return bool(_status(pod).get("podIP"))


def is_going(pod: Mapping[str, Any]) -> bool:
    """Return whether the pod ends by a deletion.

    Its phase is Failed for a moment, with the exit code of SIGTERM.
    """
    if not _metadata(pod).get("deletionTimestamp"):
        return False
    return phase_of(pod).is_terminal


def is_hopeless(
    pod: Mapping[str, Any],
    made: Collection[str] = (),
    events: Iterable[Mapping[str, Any]] = (),
) -> bool:
    """Return whether waiting is useless: the pod ended, is deleted, or lacks something for good."""
    if phase_of(pod).is_terminal or _metadata(pod).get("deletionTimestamp"):
        return True
    if _waits_for(pod, _HOPELESS):
        return True
    uid = _metadata(pod).get("uid")
    own = [event for event in events if _uid_of(event) == uid]
    if _has_failed_pull(pod):
        for words in _pull_words(pod, own):
            if _NO_IMAGE.search(words):
                return True
    for event in own:
        message = str(event.get("message", ""))
        if event.get("reason") == "FailedMount" and _NO_CONFIG_MAP.search(message):
            return True
    # A claim that the cluster itself makes may appear later.
    scheduled = _condition(pod, "PodScheduled")
    missing = _NO_CLAIM.findall(str(scheduled.get("message", "")))
    return not set(missing) <= set(made)


def _waits_for(pod: Mapping[str, Any], reasons: Collection[str]) -> bool:
    """Return whether a container waits for one of the reasons."""
    current = [_waiting(container).get("reason") for container in _containers(pod)]
    return any(reason in reasons for reason in current)


def _has_failed_pull(pod: Mapping[str, Any]) -> bool:
    return _waits_for(pod, _PULL_FAILED)


def _pull_words(pod: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the cause of a failed pull, from the container's state and the Event.

    Older kubelets write the cause to the Event alone.
    """
    texts = []
    for container in _containers(pod):
        waiting = _waiting(container)
        texts.append(str(waiting.get("message", "")))
    for event in events:
        if event.get("reason") == "Failed":
            texts.append(str(event.get("message", "")))
    image_names = re.compile(r'image "[^"]*"')  # a name may hold such words itself
    return [image_names.sub("image", text) for text in texts]


def is_pulling(pod: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the node pulls the pod's image, or tries a failed pull again."""
    if phase_of(pod) is not Phase.PENDING:
        return False
    if _has_failed_pull(pod):
        return True
    if any(_waiting(container) for container in _containers(pod)):
        return False
    uid = _metadata(pod).get("uid")
    pulls = []
    for event in events:
        if _uid_of(event) == uid and event.get("reason") in _PULLS:
            pulls.append(event)
    if not pulls:
        return False
    pulls.sort(key=_time_of)
    return bool(pulls[-1]["reason"] == "Pulling")


def _time_of(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def why(pod: Mapping[str, Any], events: Iterable[Mapping[str, Any]] = ()) -> str:
    """Return why a pod is as it is; empty where there is nothing to say."""
    status = _status(pod)
    containers = _containers(pod)
    reasons = [_join(status)]
    for container in containers:
        end = _ended(container)
        is_deletion = _exit_code(container) == _TERMINATED and "deletionTimestamp" in _metadata(pod)
        if end and not is_deletion:
            reasons.append(_join(end))
    reasons.append(_join(_condition(pod, "DisruptionTarget", "True")))
    reasons.append(_join(_condition(pod, "TerminationTarget", "True")))  # by Kueue
    if phase_of(pod) is Phase.UNKNOWN:
        reasons.append(_node_words(pod) if _is_on_lost_node(pod) else "its node does not report")
    if not any(reasons):
        told_words = []
        for container in containers:
            waiting = _waiting(container)
            if waiting:
                told_words.append(_join(waiting))
        unscheduled = _condition(pod, "PodScheduled", "False")
        told_words.append(_join(unscheduled))
        reasons += told_words
        reasons += _warnings(pod, events, told_words)
    return "; ".join(dict.fromkeys(words for words in reasons if words))


def as_gone(pod: Mapping[str, Any], when: str) -> str:
    """Return the message for a pod deleted by others, with the reason if known."""
    words = why(pod)
    return f"it was deleted at {when}, not by this cluster" + (f"; {words}" if words else "")


def leftovers(pods: Iterable[Mapping[str, Any]], now_s: float) -> list[Mapping[str, Any]]:
    """Return abandoned pods: all pods of their cluster ended ten minutes ago."""
    clusters: dict[str, list[Mapping[str, Any]]] = {}
    for pod in pods:
        labels = _metadata(pod).get("labels", {})
        cluster = labels.get(CLUSTER_LABEL, "")
        clusters.setdefault(cluster, []).append(pod)
    latest_s = now_s - _FORGOTTEN_S
    forgotten: list[Mapping[str, Any]] = []
    for members in clusters.values():
        if all(phase_of(pod).is_terminal and _ended_s(pod) < latest_s for pod in members):
            forgotten += members
    return forgotten


class Waits:
    """The reasons, by the pod's number; empty text where none is known."""

    def __init__(self) -> None:
        self.pulling = False
        """Whether a node pulls an image; the start's time-out does not count meanwhile."""
        self._begun: dict[int, float] = {}

    def look(
        self, pods: Mapping[int, Mapping[str, Any] | None], events: Sequence[Mapping[str, Any]]
    ) -> dict[int, str]:
        """Return the reason of every pod, given as the server shows it; None is not there yet."""
        now = time.monotonic()
        begun = {}
        for index, pod in pods.items():
            if pod and is_pulling(pod, events):
                begun[index] = self._begun.get(index, now)
        self._begun = begun
        self.pulling = bool(begun)
        reasons = {}
        for index, pod in pods.items():
            reasons[index] = ""
            if pod:
                reasons[index] = self._reason(index, pod, events, now)
        return reasons

    def _reason(
        self,
        index: int,
        pod: Mapping[str, Any],
        events: Sequence[Mapping[str, Any]],
        now: float,
    ) -> str:
        if index not in self._begun:
            return why(pod, events)
        told_s = (now - self._begun[index]) // LOOK_S * LOOK_S
        words = f"pulling {pod['spec']['containers'][0]['image']}" + (
            f" for {duration(told_s)}" if told_s else ""
        )
        trouble = why(pod, events) if _has_failed_pull(pod) else ""
        return f"{words}; {trouble}" if trouble else words


def listed(waits: Mapping[int, str]) -> str:
    """Name pods with their waiting reasons; pods with the same reason are grouped.

    Example:
        >>> listed({0: "", 2: "no room", 3: "no room", 4: "no room", 7: "no room"})
        'pod-0, pod-2 to pod-4 and pod-7 (no room)'
    """
    alike: dict[str, list[int]] = {}
    for index, reason in waits.items():
        alike.setdefault(reason, []).append(index)
    return ", ".join(
        _names(indices) + (f" ({reason})" if reason else "") for reason, indices in alike.items()
    )


def _names(indices: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    names: list[str] = []
    for run in runs:
        if len(run) > 2:
            names.append(f"pod-{run[0]} to pod-{run[-1]}")
        else:
            names += [f"pod-{index}" for index in run]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def report_of(api: KubeApi, index: int, name: str, check_open: Callable[[], None]) -> str:
    """Find the report of a running pod in its log, which may take a moment to appear."""
    deadline = time.monotonic() + _REPORT_S
    while True:
        text = ""
        trouble = None
        try:
            text = api.log(name, _LOG_LINES)
        except ApiRefusal as error:
            trouble = error
        # The last report counts.
        for line in reversed(text.splitlines()):
            if line.startswith(REPORT):
                return line.removeprefix(REPORT)
        check_open()
        is_late = time.monotonic() > deadline
        if trouble is not None and (is_late or trouble.status in (401, 403)):
            raise trouble
        if is_late:
            lines = "\n".join(text.splitlines()[-_LAST_LINES:]) or "(nothing)"
            raise PodError(f"pod-{index} is up, but its log has no report of the pod:\n{lines}")
        time.sleep(0.1)


def _ended_s(pod: Mapping[str, Any]) -> float:
    """Return when the last container ended, in seconds since the epoch.

    When the pod was made where none started.
    """
    times = []
    for container in _containers(pod):
        ended = container.get("state", {}).get("terminated", {})
        end = ended.get("finishedAt")
        if end:
            times.append(end)
    if not times:
        times.append(_metadata(pod).get("creationTimestamp"))
    return max(datetime.fromisoformat(str(text)).timestamp() for text in times)


def _uid_of(event: Mapping[str, Any]) -> object:
    return event.get("involvedObject", {}).get("uid")


def _warnings(
    pod: Mapping[str, Any],
    events: Iterable[Mapping[str, Any]],
    told: Sequence[str],
) -> list[str]:
    """Return the warnings of a pod's events, without start-up probes and repeated states."""
    uid = _metadata(pod).get("uid")
    warnings = []
    for event in events:
        if _uid_of(event) != uid or event.get("type") != "Warning":
            continue
        message = str(event.get("message", ""))
        # The scheduler writes its words into the condition too. The cause of a failed pull stands
        # in the container's state.
        cause = _PULL_CAUSE.sub("", message)
        is_told = cause != "" and any(cause in words for words in told)
        if is_told or _HEALTHY.match(message):
            continue
        warnings.append(_join(event))
    distinct = list(dict.fromkeys(warnings))
    return distinct[-_WARNINGS_SHOWN:]


def _exit_code(container: Mapping[str, Any]) -> object:
    return (container.get("state", {}).get("terminated") or {}).get("exitCode")


def _ended(container: Mapping[str, Any]) -> dict[str, str]:
    ended = container.get("state", {}).get("terminated")
    if not ended or (ended.get("reason") == "Completed" and not ended.get("message")):
        return {}
    code = ended.get("exitCode")
    number = ended.get("signal")
    how = f" (signal {number})" if number else f" (exit code {code})" if code else ""
    return {
        "reason": f"{ended.get('reason') or 'Ended'}{how}",
        "message": str(ended.get("message") or "").strip(),
    }


def _waiting(container: Mapping[str, Any]) -> Mapping[str, Any]:
    waiting: Mapping[str, Any] = container.get("state", {}).get("waiting") or {}
    if waiting.get("reason") in ("ContainerCreating", "PodInitializing"):
        return {}
    return waiting


def _join(words: Mapping[str, Any]) -> str:
    return ": ".join(str(words[key]) for key in ("reason", "message") if words.get(key))


def _condition(pod: Mapping[str, Any], kind: str, value: str = "") -> Mapping[str, Any]:
    conditions: Iterable[Mapping[str, Any]] = _status(pod).get("conditions") or ()
    for condition in conditions:
        if condition.get("type") != kind:
            continue
        if not value or condition.get("status") == value:
            return condition
    return {}


def _containers(pod: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    status = _status(pod)
    first = status.get("initContainerStatuses") or ()
    others = status.get("containerStatuses") or ()
    return [*first, *others]


def _status(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return pod.get("status") or {}


def _metadata(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return pod.get("metadata") or {}
