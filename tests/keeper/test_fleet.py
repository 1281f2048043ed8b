"""The pods of a cluster, from their launch to their end, over a place of this test: no process."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench.base.errors import PodError, RemoteError, RunError, WorkbenchError
from workbench.keeper import fleet as module
from workbench.keeper.fleet import Fleet
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec


def pod(number: int, **facts: Any) -> Pod:
    given = {"phase": Phase.RUNNING, "host_key": f"ssh-ed25519 {number}", **facts}
    return Pod(name=f"pod-{number}", address=f"10.0.0.{number}", **given)


class StubPlace:
    """A place that has pods at once, and does what a test says."""

    def __init__(self) -> None:
        self.pods: list[Pod] = [pod(0), pod(1)]
        self.restored: list[Collection[str]] = []
        self.contexts: list[LaunchContext] = []
        self.at: Callable[[], object] = lambda: None
        self.stops = 0

    def launch(self, _spec: PodSpec, count: int, context: LaunchContext) -> Sequence[Pod]:
        assert count == len(self.pods)
        self.contexts.append(context)
        self.at()
        return list(self.pods)

    def adopt(self, pods: Sequence[Pod], _spec: PodSpec, _context: object) -> Sequence[Pod]:
        return [replace(each, address=each.address.replace("10.0.0", "10.0.1")) for each in pods]

    def restore(self, lost: Collection[str], _spec: PodSpec, context: object) -> Sequence[Pod]:
        self.restored.append(sorted(lost))
        self.at()
        return list(self.pods)

    def refresh(self) -> Sequence[Pod]:
        return list(self.pods)

    def stop(self) -> None:
        self.stops += 1


class StubLink:
    """A line to an agent that notes what it is asked."""

    def __init__(self, pod: Pod, _identity: object, **options: Any) -> None:
        self.pod = pod
        self.options = options
        self.package = f"/store/{pod.name}.zip"
        self.shared: Sequence[str] = ()
        self.asked: list[str] = []
        self.fails: set[str] = set()
        self.silent_s = math.inf
        self.has_environments: object = False
        self.reason_gone: Callable[[float], str] = lambda _silent_s: ""

    def _do(self, what: str) -> None:
        self.asked.append(what)
        if what in self.fails:
            raise RemoteError(f"{self.pod.name} is silent", host=self.pod.address)

    def open(self) -> None:
        self._do("open")

    def ensure(self) -> None:
        self._do("ensure")

    def close(self) -> None:
        self._do("close")

    def install(self, spec: PodSpec, timeout_s: float) -> None:
        self._do(f"install {'+'.join(spec.pip)}")

    def renew(self, pod: Pod) -> None:
        self._do("renew")
        self.pod = pod

    def call(self, op: str, **_fields: object) -> dict[str, object]:
        self._do(op)
        return {"environments": self.has_environments}

    def work(self, op: str, timeout_s: float) -> dict[str, object]:
        self._do(op)
        return {}


class StubIdentity:
    """A key that is destroyed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder / "id_ed25519"
        self.public_key = "ssh-ed25519 own"
        self.pinned: list[Sequence[str]] = []
        self.destroyed = False

    @classmethod
    def create(cls, folder: Path) -> StubIdentity:
        return cls(folder)

    def pin(self, pods: Sequence[Pod]) -> None:
        self.pinned.append([each.host_key for each in pods])

    def destroy(self) -> None:
        self.destroyed = True


class Kept:
    """A fleet with its place, and what it reports."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.reports: list[str] = []
        self.changes = 0
        self.closing = threading.Event()
        spec = ClusterSpec(count=2, **options)
        self.fleet = Fleet(
            ClusterPaths(root),
            spec,
            self.reports.append,
            self._change,
            closing=self.closing,
        )
        self.place: StubPlace = self.fleet._backend  # type: ignore[assignment]

    def _change(self) -> None:
        self.changes += 1

    @property
    def links(self) -> list[Any]:
        return self.fleet._links

    @property
    def identity(self) -> Any:
        return self.fleet.identity

    def launched(self) -> Kept:
        self.fleet.launch()
        self.reports.clear()
        for link in self.links:
            link.asked.clear()
        return self


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own"))  # for the cluster's key
    monkeypatch.setattr(module, "backend_from_dict", lambda _options: StubPlace())
    monkeypatch.setattr(module, "AgentLink", StubLink)
    monkeypatch.setattr(module, "Identity", StubIdentity)
    monkeypatch.setattr(module, "package_zip", lambda: ("w.zip", b""))
    monkeypatch.setattr(module, "folders_to_probe", lambda _spec, _root: ())
    return Kept(tmp_path)


# The launch.


def test_a_launch_opens_a_line_to_the_agent_of_every_pod(kept: Kept) -> None:
    fleet = kept.fleet
    assert (fleet.package, fleet.owned) == ("", False)
    assert (list(fleet.pods), list(fleet.arrived)) == ([], [])
    kept.place.at = lambda: kept.place.contexts[0].arrived([pod(0)])
    fleet.launch()
    assert fleet.owned
    assert [each.name for each in fleet.pods] == ["pod-0", "pod-1"]
    assert [link.asked for link in kept.links] == [["open"], ["open"]]
    assert kept.identity.pinned == [["ssh-ed25519 0", "ssh-ed25519 1"]]
    assert fleet.package == "/store/pod-0.zip"
    assert list(fleet.arrived) == [], "the launch is over"
    hosts = fleet.paths.hostfile.read_text().splitlines()
    assert [line.split()[0] for line in hosts] == ["10.0.0.0", "10.0.0.1"]


def test_pods_that_arrive_first_are_shown_while_the_launch_waits(kept: Kept) -> None:
    seen: list[Sequence[Pod]] = []

    def arrive() -> None:
        kept.place.contexts[0].arrived([pod(1)])
        seen.append(kept.fleet.arrived)
        assert kept.fleet.owned, "pods exist that must be taken down"

    kept.place.at = arrive
    kept.fleet.launch()
    assert seen == [(pod(1),)]


def test_packages_of_the_pods_are_installed(kept: Kept) -> None:
    kept.fleet.spec = kept.fleet.spec.replace(pods=PodSpec(pip=["einops"]))
    kept.fleet.launch()
    assert [link.asked for link in kept.links] == [["open", "install einops"]] * 2
    assert "einops" in kept.reports[-1]


def test_pods_with_different_versions_are_refused(kept: Kept) -> None:
    kept.place.pods = [
        pod(0, versions={"torch": "2.13", "python": "3.11"}),
        pod(1, versions={"torch": "2.14", "python": "3.11"}),
    ]
    with pytest.raises(
        PodError, match=sentence("the pods have different versions; make them equal first")
    ) as refused:
        kept.fleet.launch()
    assert "torch: pod-0 2.13, pod-1 2.14" in str(refused.value)
    assert "python" not in str(refused.value)
    kept.place.pods = [pod(0, versions={"torch": "2.13"}), pod(1)]
    with pytest.raises(PodError, match=r"torch: pod-0 2\.13, pod-1 none"):
        kept.fleet.launch()


def test_a_launch_that_was_given_up_before_it_started_starts_no_pod(kept: Kept) -> None:
    kept.fleet.give_up()
    assert kept.place.stops == 1
    with pytest.raises(PodError, match=sentence("the cluster was closed during its start")):
        kept.fleet.launch()
    assert kept.place.contexts == []


def test_a_launch_that_is_given_up_opens_no_line(kept: Kept) -> None:
    kept.place.at = kept.fleet.give_up
    with pytest.raises(PodError, match=sentence("the cluster was closed during its start")):
        kept.fleet.launch()
    assert kept.links == []


def test_a_place_that_cannot_stop_pods_hinders_no_end(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("no route")

    monkeypatch.setattr(kept.place, "stop", fail)
    kept.fleet.give_up()
    assert says(caplog.text, "stopping the pods")


# Another keeper.


def test_a_keeper_adopts_the_pods_of_a_dead_one(kept: Kept) -> None:
    paths = kept.fleet.paths
    key = paths.identity / "id_ed25519"
    kept.fleet.pods = [pod(0), pod(1)]
    with pytest.raises(PodError, match=sentence("the pods cannot be reached any more", key)):
        kept.fleet.adopt()
    assert not kept.fleet.owned
    key.parent.mkdir(parents=True)
    key.touch()
    kept.fleet.adopt()
    assert kept.fleet.owned
    assert [link.pod.address for link in kept.links] == ["10.0.1.0", "10.0.1.1"]
    assert [link.asked for link in kept.links] == [["open"], ["open"]]
    assert kept.identity.key == key


def test_a_pod_that_is_silent_is_adopted_too(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    key = kept.fleet.paths.identity / "id_ed25519"
    key.parent.mkdir(parents=True)
    key.touch()
    kept.fleet.pods = [pod(0), pod(1)]

    def silent(link: StubLink) -> None:
        raise RemoteError("no line", host=link.pod.address)

    monkeypatch.setattr(StubLink, "open", silent)
    kept.fleet.adopt()
    assert says(caplog.text, "does not answer", "pod-1")


# Pods for a run.


def test_a_run_gets_the_first_pods_that_live(kept: Kept) -> None:
    fleet = kept.launched().fleet
    assert [link.pod.name for link in fleet.first_live(1)] == ["pod-0"]
    assert fleet.first_live(2) == kept.links
    for count in (0, 3):
        with pytest.raises(
            RunError, match=sentence("the job asks for {} pods; the cluster has", count, 2)
        ):
            fleet.first_live(count)
    kept.place.pods[0] = pod(0, phase=Phase.FAILED, message="evicted")
    fleet.refresh()
    assert [link.pod.name for link in fleet.first_live(1)] == ["pod-1"]
    with pytest.raises(RunError, match=sentence("start another cluster")) as refused:
        fleet.first_live(2)
    assert "pod-0" in str(refused.value) and "evicted" in str(refused.value)


def test_a_run_gets_free_pods_or_waits(kept: Kept) -> None:
    fleet = kept.launched().fleet
    first, second = kept.links
    assert fleet.free(2, []) == [first, second]
    assert fleet.free(1, [first]) == [second]
    assert fleet.free(2, [first]) is None
    assert fleet.free(1, []) == [first]


def test_a_run_that_waited_for_pods_that_died_starts_and_reports_the_loss(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.place.pods[1] = pod(1, phase=Phase.FAILED)
    fleet.refresh()
    first, second = kept.links
    assert fleet.free(2, []) == [first, second]
    assert fleet.free(2, [first]) is None, "the other run ends first"
    assert fleet.free(1, []) == [first]
    kept.place.pods = [pod(0, phase=Phase.FAILED), pod(1)]
    fleet.pods = [pod(0), pod(1)]
    fleet.refresh()
    assert fleet.free(1, []) == [second]


def test_pods_are_found_by_name_and_by_address(kept: Kept) -> None:
    fleet = kept.launched().fleet
    first, second = kept.links
    assert fleet.named(["pod-1"]) == [second]
    assert fleet.at(["10.0.0.0"]) == [first]
    fleet.stop_ranks("r")
    assert [link.asked for link in kept.links] == [["stop"], ["stop"]]


# The state of pods.


def test_a_pod_that_ends_is_reported_once(kept: Kept) -> None:
    fleet = kept.launched().fleet
    fleet.refresh()
    assert (kept.changes, kept.reports) == (0, [])
    kept.place.pods[1] = pod(1, phase=Phase.FAILED, message="evicted")
    seen = fleet.refresh()
    assert [each.phase for each in seen] == [Phase.RUNNING, Phase.FAILED]
    assert kept.changes == 1
    assert len(kept.reports) == 1
    assert "pod-1" in kept.reports[0] and "evicted" in kept.reports[0]
    fleet.refresh()
    assert (kept.changes, len(kept.reports)) == (1, 1)
    kept.place.pods[0] = pod(0, message="its node is busy")
    fleet.refresh()
    assert (kept.changes, len(kept.reports)) == (2, 1)


def test_a_pod_that_its_place_does_not_list_has_failed(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.place.pods = [pod(0)]
    seen = fleet.refresh()
    assert [each.phase for each in seen] == [Phase.RUNNING, Phase.FAILED]
    assert says(seen[1].message, "the pod does not exist any more")


def test_a_line_asks_why_its_pod_has_gone(kept: Kept) -> None:
    kept.launched()
    assert [link.reason_gone(0.0) for link in kept.links] == ["", ""]
    kept.place.pods[1] = pod(1, phase=Phase.FAILED, message="evicted")
    assert kept.links[0].reason_gone(0.0) == ""
    assert "evicted" in kept.links[1].reason_gone(0.0)
    kept.place.pods[1] = pod(1, phase=Phase.FAILED)
    assert says(kept.links[1].reason_gone(0.0), "no more is known")


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.RUNNING, Phase.UNKNOWN, Phase.FAILED])
@pytest.mark.parametrize("is_closing", [False, True])
def test_a_closing_cluster_has_lost_a_pod_that_may_answer_again(
    kept: Kept, phase: Phase, is_closing: bool
) -> None:
    kept.launched()
    kept.place.pods[1] = pod(1, phase=phase, message="the connection broke")
    if is_closing:
        kept.closing.set()
    why = kept.links[1].reason_gone(0.0)
    is_lost = phase is Phase.FAILED or (phase is Phase.UNKNOWN and is_closing)
    assert bool(why) is is_lost
    assert not why or ("pod-1" in why and "the connection broke" in why)
    assert kept.links[0].reason_gone(0.0) == ""


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.RUNNING])
def test_a_closing_cluster_does_not_wait_for_a_pod_that_runs_and_does_not_answer(
    kept: Kept, phase: Phase
) -> None:
    kept.launched()
    kept.place.pods[1] = pod(1, phase=phase)
    dead, live = kept.links[1], kept.links[0]
    assert dead.reason_gone(3600.0) == ""  # a run waits for its lease
    kept.closing.set()
    assert dead.reason_gone(module._CLOSING_S / 2) == ""
    why = dead.reason_gone(module._CLOSING_S)
    assert says(why, "the cluster closes without its files", "pod-1")
    # One wait a pod: the next part of the same pod does not wait anew.
    assert dead.reason_gone(0.0) == why
    assert live.reason_gone(0.0) == ""


# Lost pods.


def test_a_pod_that_answers_again_is_kept(kept: Kept) -> None:
    fleet = kept.launched().fleet
    assert fleet.restore(["pod-1"]) == {}
    assert [link.asked for link in kept.links] == [[], ["open"]]
    assert kept.place.restored == []


def test_a_silent_pod_is_replaced(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.links[1].fails = {"open"}
    kept.place.at = lambda: kept.place.pods.__setitem__(1, pod(1, host_key="ssh-ed25519 new"))
    assert fleet.restore(["pod-1"]) == {}
    assert kept.place.restored == [["pod-1"]]
    assert kept.links[1].asked == ["open", "renew", "install "]
    assert kept.links[1].pod.host_key == "ssh-ed25519 new"
    assert kept.links[0].asked == []
    assert kept.identity.pinned[-1] == ["ssh-ed25519 0", "ssh-ed25519 new"]
    assert says(kept.reports[-1], "is there again", "pod-1")


def test_a_pod_that_has_ended_is_replaced_without_being_asked(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.place.pods[1] = pod(1, phase=Phase.FAILED, message="evicted")
    kept.place.at = lambda: kept.place.pods.__setitem__(1, pod(1))
    assert fleet.restore(["pod-1"]) == {}
    assert kept.links[1].asked == ["renew", "install "]


def test_a_peer_that_its_place_started_again_is_renewed_too(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.links[1].fails = {"open"}
    kept.place.at = lambda: kept.place.pods.__setitem__(0, pod(0, host_key="ssh-ed25519 new"))
    assert fleet.restore(["pod-1"]) == {}
    assert kept.links[0].asked == ["renew", "install "]


def test_a_pod_that_stays_lost_is_named_with_the_reason(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.links[1].fails = {"open"}
    failed = pod(1, phase=Phase.FAILED, message="no host")
    kept.place.at = lambda: kept.place.pods.__setitem__(1, failed)
    assert fleet.restore(["pod-1"]) == {"pod-1": "no host"}
    assert "renew" not in kept.links[1].asked
    kept.place.at = lambda: kept.place.pods.__setitem__(1, replace(failed, message=""))
    (why,) = fleet.restore(["pod-1"]).values()
    assert says(why, "the pod has ended")


def test_a_new_pod_that_does_not_answer_stays_lost(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.links[1].fails = {"open", "renew"}
    (why,) = fleet.restore(["pod-1"]).values()
    assert says(why, "was started again and cannot be used", "pod-1")


def test_a_place_that_replaces_no_pod_names_the_reason_for_all(kept: Kept) -> None:
    fleet = kept.launched().fleet

    def refuse() -> None:
        raise PodError("no quota")

    kept.place.at = refuse
    for link in kept.links:
        link.fails = {"open"}
    assert fleet.restore(["pod-0", "pod-1"]) == {"pod-0": "no quota", "pod-1": "no quota"}
    kept.place.pods[1] = pod(1, phase=Phase.FAILED)
    assert fleet.refresh()[1].phase is Phase.FAILED, "pods are looked at again"


def test_pods_are_not_looked_at_while_they_are_replaced(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.links[1].fails = {"open"}
    seen: list[Sequence[Pod]] = []

    def half() -> None:
        kept.fleet._arrive([pod(1)])
        kept.place.pods = [pod(0)]
        seen.append(fleet.refresh())
        kept.place.pods = [pod(0), pod(1)]

    kept.place.at = half
    assert fleet.restore(["pod-1"]) == {}
    assert [each.phase for each in seen[0]] == [Phase.RUNNING, Phase.RUNNING]
    assert list(fleet.arrived) == []


def test_a_replacement_with_other_versions_is_refused(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.links[1].fails = {"open"}
    kept.place.at = lambda: kept.place.pods.__setitem__(1, pod(1, versions={"torch": "2.14"}))
    (why,) = fleet.restore(["pod-1"]).values()
    assert says(why, "the pods have different versions; make them equal first")


def test_versions_of_a_pod_that_stays_lost_do_not_matter(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.links[1].fails = {"open"}
    ended = pod(1, phase=Phase.FAILED, message="no host", versions={"torch": "2.14"})
    kept.place.at = lambda: kept.place.pods.__setitem__(1, ended)
    assert fleet.restore(["pod-1"]) == {"pod-1": "no host"}


# Leases.


class Closing:
    """An event that is set after some waits."""

    def __init__(self, rounds: int) -> None:
        self.waits: list[float] = []
        self._left = {threading.current_thread(): rounds}
        self._rounds = rounds
        self._lock = threading.Lock()

    def wait(self, seconds: float) -> bool:
        with self._lock:
            self.waits.append(seconds)
            thread = threading.current_thread()
            left = self._left.setdefault(thread, self._rounds)
            self._left[thread] = left - 1
            return left <= 0


def test_each_agent_is_asked_often_enough_for_its_lease(kept: Kept) -> None:
    fleet = kept.launched().fleet
    fleet.spec = fleet.spec.replace(lease_s=6.0)
    first, second = kept.links
    second.fails = {"ensure"}
    closing: Any = Closing(2)
    kept.place.pods[1] = pod(1, phase=Phase.FAILED)
    fleet.renew_leases(closing, lambda: [first])
    until(lambda: bool(first.asked and second.asked), 300)
    assert (first.asked, second.asked) == (["ping"], ["ensure"])
    # A pod has its turn each two seconds, and the pods are looked at as often.
    assert set(closing.waits) == {1.0, 2.0}
    assert kept.changes == 1, "the pods are looked at meanwhile"


def test_a_pod_that_has_just_answered_is_not_asked(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.links[0].silent_s = 1.0
    closing: Any = Closing(2)
    fleet.renew_leases(closing, list)
    until(lambda: len(closing.waits) == 6 and bool(kept.links[1].asked), 300)
    assert [link.asked for link in kept.links] == [[], ["ensure"]]


def test_many_pods_share_a_few_threads_and_a_silent_one_delays_no_other(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = kept.launched().fleet
    asked: Counter[str] = Counter()
    is_over = threading.Event()

    def keep_alive(link: Any, *_: object) -> None:
        asked[link.pod.name] += 1
        if link.pod.name == "pod-3":
            is_over.wait()

    many: Any = [StubLink(pod(number), None) for number in range(32)]
    monkeypatch.setattr(fleet, "_links", many)
    monkeypatch.setattr(module, "_keep_alive", keep_alive)
    fleet.spec = fleet.spec.replace(lease_s=0.3)
    before = threading.active_count()
    loop = threading.Thread(target=fleet.renew_leases, args=(is_over, list))
    loop.start()
    try:
        until(lambda: len(asked) == 32 and min((asked - Counter(["pod-3"])).values()) > 2, 60)
        assert asked["pod-3"] == 1
        assert threading.active_count() - before <= 6
    finally:
        is_over.set()
        loop.join()


def test_a_long_lease_is_renewed_every_few_seconds(kept: Kept) -> None:
    fleet = kept.launched().fleet
    fleet.spec = fleet.spec.replace(lease_s=600.0)
    closing: Any = Closing(0)
    fleet.renew_leases(closing, list)
    until(lambda: len(closing.waits) == 2, 300)
    assert set(closing.waits) == {1.5, 3.0}


def test_leases_are_renewed_though_a_call_or_a_look_fails(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = kept.launched().fleet

    def fail() -> Any:
        raise ValueError("an odd answer")

    monkeypatch.setattr(kept.place, "refresh", fail)
    closing: Any = Closing(2)
    fleet.renew_leases(closing, fail)
    until(lambda: len(closing.waits) == 6, 300)


# The end.


def test_the_end_stops_agents_and_pods_and_destroys_the_key(kept: Kept) -> None:
    fleet = kept.launched().fleet
    kept.links[1].fails = {"shutdown"}
    identity = kept.identity
    fleet.take_down()
    assert [link.asked for link in kept.links] == [["shutdown", "close"]] * 2
    assert (kept.place.stops, identity.destroyed) == (1, True)


def test_a_fleet_that_never_started_ends_without_a_key(kept: Kept) -> None:
    kept.fleet.take_down()
    assert kept.place.stops == 1


def test_environments_are_removed_where_there_are_any(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    fleet = kept.launched().fleet
    first, second = kept.links
    first.has_environments = True
    second.fails = {"has_environments"}
    fleet.remove_environments(kept.reports.append)
    assert first.asked == ["has_environments", "remove_environments"]
    assert second.asked == ["has_environments"]
    assert says(caplog.text, "removing the environments", "pod-1")
    assert kept.reports == []
    second.fails, second.has_environments = set(), "many"
    fleet.remove_environments(kept.reports.append)
    assert "remove_environments" not in second.asked, "an answer of another form"


def test_a_long_removal_shows_its_seconds(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = kept.launched().fleet
    monkeypatch.setattr(module, "_REMOVAL_SHOWN_S", 0.02)
    first = kept.links[0]
    first.has_environments = True
    monkeypatch.setattr(first, "work", lambda _op, _s: until(lambda: len(kept.reports) >= 2, 10))
    fleet.remove_environments(kept.reports.append)
    for line, seconds in zip(kept.reports, ("0.02", "0.04"), strict=False):
        assert says(line, "removing the environments of scripts, {} s so far", seconds)


def test_all_pods_of_a_large_cluster_are_asked_some_at_once(kept: Kept) -> None:
    fleet = kept.fleet
    links: Any = [SimpleNamespace(pod=pod(number)) for number in range(70)]
    fleet._links = links
    asked: list[int] = []
    fleet._everywhere(lambda link: asked.append(int(link.pod.name.split("-")[1])))
    assert sorted(asked) == list(range(70))


# Every call fails once.


class Faults:
    """Calls of a fleet to its place, its lines, its key and its files; the n-th fails."""

    def __init__(self, nth: int, error: Exception) -> None:
        self.nth, self.error, self.calls = nth, error, 0

    def of(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.nth:
                raise self.error
            return act(*args, **options)

        return call


def faulty(kept: Kept, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("launch", "adopt", "restore", "refresh", "stop"):
        setattr(kept.place, name, faults.of(getattr(kept.place, name)))
    for name in ("open", "ensure", "install", "renew", "call", "work"):
        monkeypatch.setattr(StubLink, name, faults.of(getattr(StubLink, name)))
    monkeypatch.setattr(StubIdentity, "pin", faults.of(StubIdentity.pin))
    monkeypatch.setattr(module, "write_text", faults.of(module.write_text))
    monkeypatch.setattr(module, "in_threads", lambda act, items: [act(item) for item in items])


@pytest.mark.parametrize(
    "error", [RemoteError("it is silent", host="10.0.0.1"), OSError(28, "No space left")]
)
@pytest.mark.parametrize("begin", ["launch", "adopt"])
def test_a_fleet_whose_nth_call_fails_loses_no_pod_and_ends_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Kept, begin: str, error: Exception
) -> None:
    identity = kept.fleet.paths.identity
    identity.mkdir(parents=True)
    StubIdentity(identity).key.touch()
    for nth in range(1, 100):
        with monkeypatch.context() as patched:
            kept = Kept(tmp_path)
            kept.fleet.pods = kept.place.pods
            faults = Faults(nth, error)
            faulty(kept, faults, patched)
            try:
                getattr(kept.fleet, begin)()
            except (WorkbenchError, OSError):
                # The keeper ends with what it owns, or the next keeper adopts the pods.
                assert kept.fleet.owned or begin == "adopt", nth
            else:
                kept.fleet.refresh()
                kept.place.pods[1] = pod(1, phase=Phase.FAILED, message="evicted")
                left = kept.fleet.restore({"pod-1"})
                assert set(left) <= {"pod-1"}, nth
                kept.fleet.remove_environments(lambda _words: None)
            for link in kept.links:
                link.asked.clear()
            kept.fleet.take_down()
            assert all("close" in link.asked for link in kept.links), nth
            assert kept.fleet._identity is None or kept.identity.destroyed, nth
            if faults.calls < nth:
                break
    assert nth > 10
