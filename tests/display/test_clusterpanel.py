from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.poll import until
from tests.support.sentences import says
from tests.support.writtenrun import T0, WrittenRun
from workbench.base.errors import PodError
from workbench.base.files import read_json, write_json
from workbench.base.files.private import make_cluster_folder
from workbench.base.words import moment
from workbench.client.cluster import Cluster
from workbench.client.lifecycle import await_ready
from workbench.client.run import Run
from workbench.display import cluster as panels
from workbench.display.cluster import ClusterPanel, cluster_doc, follow_start, look_at
from workbench.display.kit.doc import to_text
from workbench.pods.local.pods import LocalPods
from workbench.rundir.view import RunView


def test_a_cluster_is_followed_until_its_pods_are_gone(written: WrittenRun) -> None:
    written.keeper("starting")
    panel = ClusterPanel(Cluster(LocalPods(), count=3, path=written.cluster.root))
    assert "Cluster starting" in to_text(panel.look())
    written.keeper("ready")
    text = to_text(panel.look())
    assert "Cluster ready" in text and text.count("Running") == 3
    assert not panel.over and not panel.bar().widget.buttons[0]["disabled"]
    written.keeper("closed", alive=False)
    text = to_text(panel.look())
    assert "Cluster closed" in text and text.count("stopped") == 3 and "Running" not in text
    assert panel.over and panel.bar().widget.buttons[0]["disabled"]


def test_a_cluster_that_is_not_started_says_so(tmp_path: Path) -> None:
    cluster = Cluster(LocalPods(), count=3, path=tmp_path / "none")
    text = to_text(ClusterPanel(cluster).look())
    assert says(text, "cluster.start() starts", "3 pods")
    assert "none" not in text, "a folder that does not exist"


def test_a_closed_cluster_says_from_when_to_when_it_was_ready(written: WrittenRun) -> None:
    cluster = Cluster(LocalPods(), count=3, path=written.cluster.root)

    def shown(phase: str, **times: float) -> str:
        written.keeper(phase, alive=phase == "ready")
        write_json(written.cluster.state, {**read_json(written.cluster.state), **times})
        return to_text(cluster_doc(look_at(cluster)))

    day = moment(T0, "%Y-%m-%d")
    ready, closed, next_day = (moment(T0 + s, "%Y-%m-%d %H:%M") for s in (0, 660, 100_000))
    assert day == closed[:10] != next_day[:10]
    text = shown("closed", ready_s=T0, time_s=T0 + 660)
    assert f"ready from {ready} to {closed[11:]} with 3 pods" in text
    assert f"to {next_day} with" in shown("closed", ready_s=T0, time_s=T0 + 100_000)
    assert "ready from" not in shown("ready", ready_s=T0, time_s=T0 + 660)
    assert "ready from" not in shown("closed", time_s=T0 + 660), "it was never ready"


def test_the_end_of_the_pods_is_shown_and_a_run_that_reaches_it_says_so(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    clock = SimpleNamespace(time=lambda: now_s, monotonic=time.monotonic)
    for module in ("workbench.rundir.view", "workbench.client.run"):
        monkeypatch.setattr(f"{module}.time", clock)
    cluster = Cluster(LocalPods(), count=3, path=written.cluster.root)
    written.keeper("ready")
    written.state("running", "training")
    for step in range(1, 11):
        written.step(step)  # a step a second; 90 of 100 are left

    written.event("checkpoint", step=8, file="checkpoints/step-8")

    def look(ends_in_s: float | None) -> tuple[str, str]:
        ends_s = None if ends_in_s is None else now_s + ends_in_s
        state = read_json(written.cluster.state)
        pods = cast("list[dict[str, object]]", state["pods"])
        write_json(
            written.cluster.state, {**state, "pods": [{**pod, "ends_s": ends_s} for pod in pods]}
        )
        view = RunView(written.paths.root)
        view.refresh()
        assert Run.load(written.paths.root).progress.early_end == view.hint
        return to_text(cluster_doc(look_at(cluster))), view.hint

    panel, hint = look(10.0)
    assert says(panel, "The platform ends the pods at {} in any case.")
    assert ", about step 20 of 100, before this run with " in hint
    assert "the last checkpoint is of step 8. Start a cluster with a later deadline" in hint
    panel, hint = look(86_400.0)
    assert says(panel, "The platform ends the pods at {} in any case.")
    assert hint == ""
    panel, hint = look(None)
    assert "in any case" not in panel
    assert hint == ""


def test_memory_is_that_of_the_run_in_progress(written: WrittenRun) -> None:
    cluster = Cluster(LocalPods(), count=3, path=written.cluster.root)
    for rank in range(3):
        written.event("memory", T0, rank=rank, step=1, rss_gib=0.5 + rank, peak_rss_gib=3.0)
    assert not look_at(cluster).runs
    written.state("running", "training")
    view = look_at(cluster)
    assert {*view.runs.values()} == {written.paths.root.name}
    assert view.memory == {"127.0.0.2": 0.5, "127.0.0.3": 1.5, "127.0.0.4": 2.5}
    written.end()
    assert look_at(cluster).memory == {}


def test_stopping_asks_and_says_what_went_wrong(written: WrittenRun) -> None:
    cluster = Cluster(LocalPods(), count=3, path=written.cluster.root)
    cluster.close = refuse  # type: ignore[method-assign]
    bar = ClusterPanel(cluster).bar()
    assert bar.widget.buttons[0]["sure"].startswith("Really stop?")
    bar.hear({"click": "stop"})
    until(lambda: "it will not end <b>" in bar.note)
    assert bar.in_use


def refuse() -> None:
    raise OSError("it will not end <b>")


def test_a_start_that_takes_long_says_what_it_waits_for(
    written: WrittenRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(LocalPods(), count=3, path=written.cluster.root)
    written.keeper("starting")
    with follow_start(cluster) as draw:
        draw()
        assert capsys.readouterr().out == ""
        began = time.monotonic()
        monkeypatch.setattr(panels.time, "monotonic", lambda: began + 60)
        draw()
    assert capsys.readouterr().out == "starting: 3 pods are ready\n"


def test_a_start_shows_the_pods_as_they_come_and_leaves_a_line(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(LocalPods(), count=3, path=written.cluster.root)
    shown: list[str] = []
    monkeypatch.setattr("workbench.display.kit.line.is_notebook", lambda _stream: True)
    monkeypatch.setattr(
        "workbench.display.kit.line.Screen.show", lambda _, data: shown.append(data["text/plain"])
    )
    monkeypatch.setattr(panels, "_PATIENCE_S", -1.0)
    written.keeper("starting", arrived=0)
    with follow_start(cluster) as draw:
        draw()
        written.keeper("starting", arrived=2)
        until(lambda: draw() or len(shown) > 1)
        state = read_json(written.cluster.state)
        awaited = {"name": "pod-2", "message": "pulling example.org/worker:1 for 5.0 s"}
        write_json(written.cluster.state, {**state, "arrived": [*state["arrived"], awaited]})
        until(lambda: draw() or len(shown) > 2)
        written.keeper("ready")
    assert says(shown[0], "pods were asked for; none has come yet", 3)
    assert "Cluster starting" in shown[1] and (
        shown[1].count("Running"),
        shown[1].count("Pending"),
    ) == (2, 1)
    note = "pulling example.org/worker:1 for 5.0 s"
    assert re.search(rf"pod-2 +Pending .*{note}", shown[2])
    assert "3 pods are ready, " in shown[-1] and "pod-1" not in shown[-1]


def test_a_start_is_waited_for_as_long_as_its_keeper_has_news(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s, sleep=lambda _s: None)
    monkeypatch.setattr("workbench.client.lifecycle.time", clock)

    def draw() -> None:
        clock.now_s += 60.0
        written.keeper("starting" if clock.now_s < 600 else "ready", arrived=0)
        news = {
            "message": f"0 of 3 pods are up; waiting for pod-0 (pulling x:1 for {clock.now_s} s)"
        }
        write_json(written.cluster.state, {**read_json(written.cluster.state), **news})

    written.keeper("starting", arrived=0)
    spec = Cluster(LocalPods(), count=3, path=written.cluster.root, start_timeout_s=120).spec
    keeper = cast(subprocess.Popen[bytes], SimpleNamespace(poll=lambda: None))
    await_ready(written.cluster, spec, keeper, draw, lambda: False)
    assert clock.now_s == 600.0  # start_timeout_s and half a minute is what silence is allowed


def test_a_start_that_fails_gives_the_reason_before_the_copy_in_the_folder_does(
    written: WrittenRun,
) -> None:
    written.keeper("starting", arrived=0)
    cluster = written.cluster
    make_cluster_folder(cluster.root)
    write_json(cluster.own_state, {"phase": "failed", "message": "no pod can be had"})
    spec = Cluster(LocalPods(), count=3, path=cluster.root).spec
    keeper = cast(subprocess.Popen[bytes], SimpleNamespace(poll=lambda: None))
    with pytest.raises(PodError, match=r"^no pod can be had\n"):
        await_ready(cluster, spec, keeper, lambda: None, lambda: False)
