from __future__ import annotations

import time

from poll import until
from writtenrun import T0, WrittenRun

from workbench.client.cluster import Cluster
from workbench.display.cluster.panel import ClusterPanel
from workbench.display.cluster.view import look_at
from workbench.display.kit.follow import follow_start
from workbench.pods.local.pods import LocalPods


def test_a_cluster_is_followed_until_its_pods_are_gone(written: WrittenRun) -> None:
    written.keeper("starting")
    cluster = Cluster(LocalPods(), count=3, path=written.cluster.root)
    settled: list[str] = []
    panel = ClusterPanel(cluster, ended=lambda: settled.append(cluster.phase)).start()
    assert "Cluster starting" in panel._table.value
    written.keeper("ready")
    until(lambda: "Cluster ready" in panel._table.value)
    assert not panel.stop.widget.disabled
    written.keeper("closed", alive=False)
    until(lambda: bool(settled))
    assert settled == ["closed"]
    assert "Cluster closed" in panel._table.value
    assert panel.stop.widget.disabled


def test_memory_is_that_of_the_run_in_progress(written: WrittenRun) -> None:
    cluster = Cluster(LocalPods(), count=3, path=written.cluster.root)
    for rank in range(3):
        written.event("memory", T0, rank=rank, step=1, rss_gib=0.5 + rank, peak_rss_gib=3.0)
    assert look_at(cluster).running == ""
    written.state("running", "training")
    view = look_at(cluster)
    assert view.running == written.paths.root.name
    assert view.memory == {"127.0.0.2": 0.5, "127.0.0.3": 1.5, "127.0.0.4": 2.5}
    written.end()
    assert look_at(cluster).memory == {}


def test_stopping_asks_once_and_says_what_went_wrong(written: WrittenRun) -> None:
    panel = ClusterPanel(Cluster(LocalPods(), count=3, path=written.cluster.root))
    panel._cluster.close = refuse  # type: ignore[method-assign]
    panel.stop.click()
    assert panel._note.value == ""
    panel.stop.click()
    until(lambda: "it will not end &lt;b&gt;" in panel._note.value)
    assert panel.in_use


def refuse() -> None:
    raise OSError("it will not end <b>")


def test_a_start_that_takes_long_says_what_it_waits_for(capsys: object) -> None:
    class Starting:
        message = "1 of 3 workers reported: pod-0 at 127.0.0.2:2222; waiting for pod-1, pod-2"

    with follow_start(Starting()) as draw:
        draw()
        assert capsys.readouterr().out == ""  # type: ignore[attr-defined]
        time.sleep(2.2)
        draw()
    assert capsys.readouterr().out == f"starting: {Starting.message}\n"  # type: ignore[attr-defined]
