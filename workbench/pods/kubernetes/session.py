"""The pods of a cluster in Kubernetes.

Every object is noted before its creation, so `close` finds all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from workbench.base.errors import BackendError, ConfigError, PodError, PodTimeout, WorkbenchError
from workbench.base.json_values import as_str, get_object
from workbench.base.versions import VERSION
from workbench.pods.kubernetes import status
from workbench.pods.kubernetes.api import ApiRefusal, Kind, KubeApi
from workbench.pods.kubernetes.manifests import kueue
from workbench.pods.kubernetes.manifests.objects import (
    CLUSTER_LABEL,
    ClusterObjects,
    HostKey,
    Manifest,
    Owner,
)
from workbench.pods.kubernetes.manifests.volumes import Volume
from workbench.pods.kubernetes.portforward import PortForward
from workbench.pods.kubernetes.watch import WatchedObjects
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.rendezvous.listener import decode_report

_LOG = logging.getLogger(__name__)
_AT_ONCE = 16
_LOG_LINES = 200
_LAST_LINES = 20
_GONE_S = 15.0
_REPORT_S = 5.0
_LOOK_S = 0.2
_AWAY_S = 5.0  # a watch that broke is mostly there again sooner


@dataclass(frozen=True, slots=True)
class _Look:
    seen: Mapping[str, Any] | None
    gone: str
    """Message for the user after a deletion by others."""


class Session:
    """One launch, from its first object to the removal of the last."""

    def __init__(
        self,
        api: KubeApi,
        objects: ClusterObjects,
        context: LaunchContext,
        forward: bool,
    ):
        self._api = api
        self._objects = objects
        self._context = context
        self._forward = forward
        self._host_keys = [HostKey.generate() for _ in range(objects.count)]
        self._public_keys = [key.public for key in self._host_keys]
        self._turns = [0] * objects.count
        """How many pods had the place of each pod before."""
        # The pods, by name and unique id. All else goes with the first pod.
        self._made: list[tuple[str, str]] = []
        self._making = threading.Lock()
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._pods: dict[int, Pod] = {}
        self._forwards: list[PortForward] = []
        self._reported = ""
        self._logs: dict[str, str] = {}
        self._removed = False
        self._gone: list[str] = []
        self._namespace_end = ""
        self._waits = status.Waits()
        self._watched = WatchedObjects(api, "pod", self._changed, label_selector=objects.selector)
        self._events: WatchedObjects | None = None

    def open(self) -> list[Pod]:
        """Make all objects and wait until every pod listens; see `Place.launch`."""
        return self._await_made(self._make_all)

    def _await_made(self, make: Callable[[], None]) -> list[Pod]:
        self._events = WatchedObjects(
            self._api,
            "event",
            self._changed,
            field_selector="involvedObject.kind=Pod",
        )
        try:
            make()
            return self._await_all()
        except (BackendError, PodError) as error:
            end = self._api.namespace_end()
            # The cause comes first; without a look at the namespace, the words are a refusal.
            if end.startswith(f"the namespace {self._api.namespace} "):
                error.args = (f"{end}, so the start failed: {error}",)
            raise
        finally:
            self._events.close()

    @property
    def _names(self) -> list[str]:
        """Names of the pods' objects; a replacement has another name than the lost pod."""
        return [self._objects.name(index, turn) for index, turn in enumerate(self._turns)]

    def restore(self, lost: Collection[int]) -> list[Pod]:
        """Make lost pods again, except the first, with other names and the same host keys."""
        names = {self._names[index] for index in lost}
        for name, uid in self._made:
            if name in names:  # at once: a lost node never confirms the end
                self._api.delete("pod", name, uid, grace_s=0)
        # On a claim, a replacement has the folder of the lost pod. Kueue keeps the ended pod until
        # it sees the replacement.
        with self._changed:
            self._changed.wait_for(lambda: not names & self._watched.alive, _GONE_S)
        for index in lost:
            self._turns[index] += 1
        before = self._pods
        self._pods = {index: pod for index, pod in self._pods.items() if index not in lost}
        first = self._names[0]
        owner = Owner(name=first, uid=dict(self._made)[first])
        try:
            return self._await_made(partial(self._make_pods, lost, owner))
        finally:
            self._pods = {**before, **self._pods}

    def adopt(self, pods: Sequence[Pod]) -> list[Pod]:
        """Take over the pods of another session, and all their objects."""
        # The names let `close` find the pods if the next call fails.
        self._made = [(name, "") for name in self._names]
        found = self._api.pods_of(self._objects.selector)
        self._made = [status.identity(pod) for pod in found]
        for pod in found:
            index, turn = status.place_of(pod)
            self._turns[index] = max(turn, self._turns[index])
        with self._changed:
            self._changed.wait_for(lambda: self._watched.changes, _REPORT_S)
        self._pods = dict(enumerate(pods))
        # The Secret with the keys of the pods is still there.
        self._public_keys = [pod.host_key for pod in pods]
        if self._forward:
            self._pods = {index: self._forwarded(index, pod) for index, pod in self._pods.items()}
        return self.look()

    def _forwarded(self, index: int, pod: Pod) -> Pod:
        port = self._objects.options.port
        name = self._names[index]
        connect = partial(self._api.forward, name, port)
        forward = PortForward(connect, port)
        self._forwards.append(forward)
        return replace(pod, ssh_address="127.0.0.1", ssh_port=forward.port)

    def look(self) -> list[Pod]:
        with self._changed:
            looks = list(self._looks())
            away = self._watched.trouble(_AWAY_S)
        gone = [look.gone for look in looks]
        if any(gone) and gone != self._gone:
            self._gone = gone
            end = self._api.namespace_end()
            self._namespace_end = f"; {end}" if end else ""
        looks = [
            replace(look, gone=look.gone and look.gone + self._namespace_end) for look in looks
        ]
        return [_with_look(pod, looks[index], away) for index, pod in sorted(self._pods.items())]

    def log(self, name: str, tail: int) -> str:
        """Return the last lines of a pod's log; for a deleted pod, the lines read last."""
        names = [f"pod-{index}" for index in range(self._objects.count)]
        if name not in names:
            raise ConfigError(
                f"no Kubernetes pod {name!r} was launched; there are: {', '.join(names)}"
            )
        why = ""
        if not self._closed.is_set():
            why = self._keep_log(names.index(name), max(tail, _LOG_LINES))
        lines = self._logs.get(name, why).splitlines()
        return "\n".join(lines[-tail:])

    def close(self) -> None:
        """Delete all objects and wait until the pods are gone.

        Idempotent; retries after an error.
        """
        if self._removed:
            return
        self._closed.set()
        self._api.giving_up.set()
        with self._changed:
            self._changed.notify_all()
        with self._making:
            made = list(self._made)
        for forward in self._forwards:
            forward.close()
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            list(pool.map(self._keep_log, self._pods))
        left = []
        if self._objects.options.queue:
            left = [self._api.close_group(name for name, _ in made)]
        left = [*filter(None, left), *self._api.end_pods(made)]
        if made and not left:
            try:
                left = self._await_gone({name for name, _ in made})
            except ApiRefusal as error:
                _LOG.info("all is deleted, but the end of the pods was not seen: %s", error)
        if left:
            raise BackendError(left_behind(self._api.namespace, self._objects.base, left))
        self._watched.close()
        self._removed = True

    def _make_all(self) -> None:
        """Make the first pod. All later objects belong to the first pod and are removed with it."""
        objects = self._objects
        # An account that may not delete or patch would be told only when the cluster closes.
        self._api.delete("pod", self._names[0])
        if objects.options.queue:
            refused = self._api.close_group([self._names[0]])
            if refused:
                raise BackendError(refused)
        notebook = self._api.own_pod()
        first = self._make("pod", objects.pod(0, notebook))
        metadata: Any = first["metadata"]
        owner = Owner(name=self._names[0], uid=str(metadata["uid"]))
        secret = objects.secret(self._context.public_key, self._host_keys, owner)
        self._make("secret", secret)
        self._make("service", objects.service(owner))
        if objects.guarded:
            policy = objects.network_policy(owner, notebook, direct=not self._forward)
            self._make("network_policy", policy)
        for volume in objects.claims:
            self._make_claim(volume, owner)
        self._make_pods(range(1, objects.count), owner)

    def _make_pods(self, indices: Iterable[int], owner: Owner) -> None:
        for index in indices:
            self._make("pod", self._objects.pod(index, owner, self._turns[index]))

    def _make(self, kind: Kind, manifest: Manifest) -> Manifest:
        asked: Any = manifest["metadata"]
        with self._making:
            self._check_open()
            # A pod is noted before its creation, and again with its unique id.
            if kind == "pod":
                self._made.append((asked["name"], ""))
            made = self._api.create(kind, manifest)
            if kind == "pod":
                uid = as_str(get_object(made, "metadata").get("uid"))
                self._made[-1] = (asked["name"], uid)
            return made

    def _make_claim(self, volume: Volume, owner: Owner) -> None:
        try:
            self._make("persistent_volume_claim", self._objects.claim(volume, owner))
        except ApiRefusal as error:
            if error.status != 409:
                raise
            if not volume.keep:
                raise BackendError(
                    f"the claim {volume.claim} exists already, and would be deleted with the"
                    " cluster. Leave size_gib out to"
                    " use the claim, or give keep=True"
                ) from error

    def _await_all(self) -> list[Pod]:
        began = time.monotonic()
        deadline = began + self._context.timeout_s
        longest = began + self._objects.options.pull_timeout_s
        while True:
            self._check_open()
            # A missing right does not come back by waiting.
            match self._watched.error:
                case ApiRefusal(status=401 | 403) as refusal:
                    raise refusal
            with self._changed:
                seen = self._changes()
                looks = list(self._looks())
                lost = self._lost(looks)
                awaited = {i: look.seen for i, look in enumerate(looks) if i not in self._pods}
                waits = self._waits.look(awaited, self._warnings())
            if self._waits.pulling:  # the time-out runs from the end of the last pull
                deadline = min(time.monotonic(), longest) + self._context.timeout_s
            # A pod that has ended will not become ready.
            if lost:
                raise PodError(self._exit_message(*lost))
            for index, look in enumerate(looks):
                if index in self._pods or not look.seen:
                    continue
                if status.is_ready(look.seen):
                    self._admit(index, look.seen)
            waits = {i: reason for i, reason in waits.items() if i not in self._pods}
            self._report_progress(waits)
            if len(self._pods) == self._objects.count:
                return [self._pods[index] for index in range(self._objects.count)]
            if time.monotonic() >= deadline:
                raise PodTimeout(self._missing(waits))
            # Any change of a pod or an event ends the pause.
            self._pause(seen, max(0.0, deadline - time.monotonic()))

    def _pause(self, seen: tuple[object, ...], left_s: float) -> None:
        # While a node pulls an image, the time of the pull is reported anew.
        if self._waits.pulling:
            left_s = min(left_s, status.LOOK_S)
        with self._changed:
            self._changed.wait_for(lambda: self._changes() != seen, left_s)

    def _changes(self) -> tuple[object, ...]:
        assert self._events is not None
        return self._closed.is_set(), self._watched.changes, self._events.changes

    def _looks(self) -> Iterator[_Look]:
        by_name = {}
        for item in self._watched.objects.values():
            by_name[item["metadata"]["name"]] = item
        gone = {}
        for item, when_s in self._watched.gone.values():
            gone[item["metadata"]["name"]] = (item, when_s)
        for name in self._names:
            seen = by_name.get(name)
            words = ""
            if seen is None and name in gone:
                item, when_s = gone[name]
                words = status.as_gone(item, _clock(when_s))
            elif seen is not None and status.is_going(seen):
                words = status.as_gone(seen, _clock(time.time()))
                seen = None
            yield _Look(seen, words)

    def _lost(self, looks: Sequence[_Look]) -> tuple[int, str] | None:
        claims = [volume.claim for volume in self._objects.claims]
        for index, look in enumerate(looks):
            if look.gone or (look.seen and status.is_hopeless(look.seen, claims, self._warnings())):
                return index, look.gone or status.why(
                    look.seen or {}, self._warnings()
                ) or "it ended"
        return None

    def _warnings(self) -> list[Mapping[str, Any]]:
        if self._events is None:
            return []
        return list(self._events.objects.values())

    def _report_progress(self, waits: Mapping[int, str]) -> None:
        line = f"{len(self._pods)} of {self._objects.count} pods are up"
        line += f"; waiting for {status.listed(waits)}" if waits else ""
        if line != self._reported:
            self._reported = line
            pods = dict(self._pods)
            for index, reason in waits.items():
                pods[index] = Pod(name=f"pod-{index}", message=reason)
            self._context.arrived([pods[index] for index in sorted(pods)])
            self._context.report(line)

    def _admit(self, index: int, seen: Mapping[str, Any]) -> None:
        address = str(seen["status"]["podIP"])
        name = self._names[index]
        report = status.report_of(self._api, index, name, self._check_open)
        pod = decode_report(report)
        # The report must be of this pod: its name, its address, and the host key made for the pod.
        expected = (f"pod-{index}", address, self._public_keys[index])
        if (pod.name, pod.address, pod.host_key) != expected:
            raise PodError(
                f"pod-{index} ({name}) reports itself as {pod.name} at {pod.address}, not {address}"
            )
        if self._forward:
            pod = self._forwarded(index, pod)
        versions = {**pod.versions, "workbench": VERSION}
        options = self._objects.options
        limit_s = float(options.connect_timeout_s)
        # The first pod shows whether the server allows port-forwards.
        if self._forward and not self._pods:
            self._forwards[-1].check(limit_s)
        self._pods[index] = replace(
            pod,
            versions=versions,
            connect_timeout_s=limit_s,
            ends_s=status.end_of(seen),
            leave_s=options.leave_s,
        )

    def _exit_message(self, index: int, words: str) -> str:
        lines = self.log(f"pod-{index}", _LAST_LINES).splitlines()
        tail = "\n".join(lines)
        last = (
            f"\nLast lines of its log:\n{tail}" if any(line not in words for line in lines) else ""
        )
        return f"pod-{index} ({self._names[index]}) did not start: {words}{last}"

    def _missing(self, waits: Mapping[int, str]) -> str:
        count = self._objects.count
        limit_s = self._context.timeout_s
        text = (
            f"{len(self._pods)} of {count} pods came up in "
            f"{limit_s:.0f} s; missing: {status.listed(waits)}"
        )
        events = self._events.error if self._events is not None else None
        for error in (self._watched.error, events):
            if error is not None:
                text += f"; {error}"
        return text

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise PodError("the Kubernetes pods were stopped before all were up")

    def _keep_log(self, index: int, lines: int = _LOG_LINES) -> str:
        """Read the log of a pod. Return why the log cannot be read, else an empty text."""
        try:
            self._logs[f"pod-{index}"] = self._api.log(self._names[index], lines)
        except WorkbenchError as error:
            return str(error)
        return ""

    def _await_gone(self, names: set[str]) -> list[str]:
        """Wait until the kubelets have ended the pods, with a limit for pods of lost nodes.

        Return the reasons of pods that do not end by themselves.
        """
        deadline = time.monotonic() + _GONE_S
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: not names & self._watched.names, max(0.0, deadline - time.monotonic())
                )
            left, _ = self._api.list(
                "pod", label_selector=self._objects.selector
            )  # a watch that broke sees nothing
            if not left or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        if left:
            _LOG.warning(
                "%d pods are still being deleted; Kubernetes continues to delete them", len(left)
            )
        return held_by_kueue(left)


def held_by_kueue(pods: Iterable[Manifest]) -> list[str]:
    """Return the message on ended pods that Kueue has not released; empty without such pods."""
    held = []
    for pod in pods:
        if kueue.is_held(pod) and status.phase_of(pod).is_terminal:
            name, _ = status.identity(pod)
            held.append(name)
    if not held:
        return []
    return [
        f"Kueue keeps {', '.join(sorted(held))} by the finalizer {kueue.FINALIZER}, and the quota"
        " of the group; check that Kueue's controller runs"
    ]


def left_behind(namespace: str, base: str, why: Sequence[str]) -> str:
    """Return the message on objects that could not be removed; repeated reasons appear once."""
    selector = f"{CLUSTER_LABEL}={base}"
    return (
        f"Kubernetes objects of {base} may still be in namespace {namespace}:"
        f" {'; '.join(dict.fromkeys(why))}. Call the"
        " cluster's close() again once the server answers, or run:"
        f" kubectl -n {namespace} delete pod,service,secret -l {selector}"
    )


def _clock(when_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when_s))


def _with_look(pod: Pod, look: _Look, away: str) -> Pod:
    """Return a pod in its last known state; `away` is the reason for a silent server."""
    if look.seen is None:
        return replace(pod, phase=Phase.FAILED, message=look.gone or "it is not there any more")
    phase = status.phase_of(look.seen)
    words = "; ".join(filter(None, [status.why(look.seen), "" if phase.is_terminal else away]))
    return replace(pod, phase=phase, message=words or ("it ended" if phase.is_terminal else ""))
