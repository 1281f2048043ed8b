"""The guide "A place" of docs/extending.md, followed: a place of another package.

Its class is in `guide/yardpods.py`, and an entry point makes it known to the keeper.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.pods.conftest import Platform, children, note_others, on_pods
from tests.pods.test_contract import (  # noqa: F401 (the core of the contract, collected here too)
    start_daemons,
    test_a_hostfile_can_be_made,
    test_each_is_reached_by_the_keeper,
    test_each_is_reached_by_the_ssh_client,
    test_it_describes_itself,
    test_logs_are_as_long_as_asked_and_of_pods_that_exist,
    test_pods_come_in_rank_order_and_know_themselves,
    test_stop_during_launch_leaves_nothing,
    test_stop_ends_all_and_may_be_repeated_and_a_launch_after_it_works,
)
from tests.support.poll import until
from tests.support.sentences import sentence
from tests.support.takeover import counting, exact, kill_keeper, printed
from workbench import Cluster, PodSpec, Run
from workbench.base.errors import ConfigError
from workbench.pods import backends
from workbench.pods.place import Place
from workbench.pods.pod import LaunchContext
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.status import cluster_status

GUIDE = Path(__file__).parent / "guide"
PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def install(site: Path, package: str, **points: str) -> None:
    """Write what pip writes of a package that adds places."""
    folder = site / f"{package}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{kind} = {value}" for kind, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{backends.GROUP}]", *lines, ""]))


class YardPlace:
    """The package with `YardPods` installed, for this process and for keepers that it starts."""

    owns_daemons = True
    launchers = ("ssh",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = [str(folder), str(GUIDE)]

    def __enter__(self) -> Self:
        install(self.folder, "yardpods", yard="yardpods:YardPods")
        self.before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(self.paths)
        sys.path[:0] = self.paths
        importlib.invalidate_caches()
        return self

    def __exit__(self, *_exc: object) -> None:
        for path in self.paths:
            sys.path.remove(path)
        sys.modules.pop("yardpods", None)
        if self.before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = self.before

    def backend(self) -> Place:
        return backends.backend_from_dict({"kind": "yard"})

    def left(self, context: LaunchContext) -> list[str]:
        return [str(path) for path in (context.directory / "yard").glob("pod-?")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Platform]:
    with YardPlace(tmp_path / "place") as made:
        note_others()
        yield made


VERBS = ["launch", "adopt", "refresh", "logs", "stop", "remove_left"]


def verb(*_args: object, **_more: object) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize("missing", VERBS)
def test_a_class_that_lacks_a_verb_is_refused_when_it_is_made(missing: str) -> None:
    verbs = {name: verb for name in VERBS if name != missing}
    with pytest.raises(
        TypeError, match=sentence("lacks {}; a place defines every verb of Place", "Half", missing)
    ):
        type("Half", (Place,), {"kind": "half", "__module__": __name__, **verbs})


def test_a_class_without_a_kind_is_refused_when_it_is_made() -> None:
    with pytest.raises(
        TypeError, match=sentence("needs a kind, the word for it in SPEC.json", "Half")
    ):
        type("Half", (Place,), {"__module__": __name__, **dict.fromkeys(VERBS, verb)})


def test_the_guide_names_every_verb_and_every_attribute_of_a_place() -> None:
    guide = PAGE.read_text().partition("\n## A place\n")[2]
    assert sorted(Place.__abstractmethods__) == sorted(VERBS)
    own = [name for name in vars(Place) if not name.startswith("_") and name != "model_config"]
    ours = [name for name in own if name in {*VERBS, *Place.__annotations__, "restore"}]
    assert {"restore", "on_this_machine", *VERBS} <= set(ours)
    assert [name for name in ours if f"`{name}`" not in guide] == []
    assert f"`{backends.GROUP}`" in guide


def test_lost_pods_stay_lost_where_a_place_does_not_replace_them(
    place: Platform, context: LaunchContext
) -> None:
    backend = place.backend()
    try:
        backend.launch(PodSpec(), 2, context)
        first, second = backend.restore(["pod-1"], PodSpec(), context)
        assert (first.phase, second.phase) == ("Running", "Failed")
        assert second.message == "YardPods has no other pod in its place"
    finally:
        backend.stop()


@pytest.mark.long
@pytest.mark.slow
def test_another_keeper_continues_and_a_close_after_its_death_leaves_nothing(
    place: Platform, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"count": 2, "warm": False, "lease_s": 60.0}
    cluster = Cluster(place.backend(), PodSpec(), path=tmp_path / "cluster", **options).start()
    try:
        assert cluster.spec.is_local
        gate = tmp_path / "gate"
        gate.write_text("1")  # the run does not end before its keeper
        run = counting(cluster, "--lines", "200", "--gate", str(gate))
        until(
            lambda: all(" line 49" in printed(run, rank) for rank in (0, 1)),
            120,
            why=lambda: run.message,
        )
        # The run continues under another keeper, which adopted the pods.
        first, pods = kill_keeper(cluster), cluster.pods
        gate.write_text("1" * 4)
        Run.load(run.path).wait(300, progress=False).raise_for_status()
        exact(run, 200)
        assert cluster_status(cluster.path).pid not in (None, first)
        assert len(on_pods(pods)) >= 2  # their agents
        # No keeper follows the second one: the notebook's close removes what it left.
        kill_keeper(cluster)
    finally:
        cluster.close()
    assert on_pods(pods) == []
    assert children() == []
    assert place.left(LaunchContext(cluster_id="", directory=cluster.path, public_key="")) == []


@pytest.mark.slow
def test_pods_whose_keeper_died_end_by_their_lease(place: Platform, tmp_path: Path) -> None:
    options: dict[str, Any] = {"count": 2, "warm": False, "lease_s": 10.0}
    cluster = Cluster(place.backend(), PodSpec(), path=tmp_path / "cluster", **options).start()
    try:
        pods = cluster.pods
        kill_keeper(cluster)
        until(lambda: not on_pods(pods), 60)
    finally:
        cluster.close()


def test_a_place_that_no_package_registers_is_refused_before_a_keeper_starts(
    tmp_path: Path,
) -> None:
    wanted = {"kind": "lone", "__module__": __name__, **dict.fromkeys(VERBS, verb)}
    lone: Any = type("LonePods", (Place,), wanted)
    with pytest.raises(
        ConfigError,
        match=sentence(
            "and no installed package adds that kind",
            "LonePods",
            "lone",
            "workbench.places",
        ),
    ):
        Cluster(lone(), path=tmp_path / "cluster")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(GUIDE))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


def test_an_unknown_kind_is_answered_with_the_places_of_other_packages_too(site: Path) -> None:
    install(site, "yards", yard="yardpods:YardPods")
    with pytest.raises(
        ConfigError,
        match=sentence("is not known", "yrad", "yard") + sentence(": did you mean '{}'?"),
    ):
        backends.backend_from_dict({"kind": "yrad"})


def test_two_packages_may_not_add_one_kind(site: Path) -> None:
    install(site, "yards", yard="yardpods:YardPods")
    install(site, "fields", yard="yardpods:YardPods")
    with pytest.raises(ConfigError, match=sentence("uninstall all but one", 2, "package")):
        backends.backend_from_dict({"kind": "yard"})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "nothing_there:Pods",
            sentence(
                "the place {} of {} cannot be imported",
                "yard",
                "package yards",
                "ModuleNotFoundError",
            ),
        ),
        (
            "yardpods:Pod",
            sentence(
                "not a subclass of workbench.pods.place.Place",
                "yard",
                "package yards",
                "yardpods:Pod",
            ),
        ),
        (
            "workbench.pods.local.pods:LocalPods",
            sentence("the two names must be equal", "local"),
        ),
    ],
)
def test_an_entry_point_that_leads_to_no_place_is_named(site: Path, value: str, words: str) -> None:
    install(site, "yards", yard=value)
    with pytest.raises(ConfigError, match=words):
        backends.backend_from_dict({"kind": "yard"})


def test_no_package_replaces_one_of_our_places(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "yards", local="yardpods:YardPods")
    assert backends.backend_class("local").__name__ == "LocalPods"
    with pytest.raises(ConfigError, match=sentence("is not known")):
        backends.backend_class("lokal")
    assert "the place 'local' of package yards is not used" in caplog.text


def test_a_spec_of_a_place_that_is_not_installed_here_still_opens() -> None:
    spec = ClusterSpec.from_dict({"backend": {"kind": "yard"}, "count": 2})
    assert not spec.is_local
    assert spec.pod_memory_gib(2) is None
