from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sentences import says, sentence
from tests.support.writtenrun import WrittenRun, write_run
from workbench import FineTune, PodSpec
from workbench.base.errors import ConfigError, RunError
from workbench.client.tensorboard.board import serve_folders
from workbench.lab import listing as lab
from workbench.lab import resubmit_cell
from workbench.lab.listing import Listing
from workbench.rundir.catalog.label import write_label
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import NotRegistered
from workbench.rundir.spec import ClusterSpec, RunSpec


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    run = write_run(tmp_path / "notebooks" / "runs")
    run.state("running", "training on 3 pods", hint="no step for 20 s")
    for step in (1, 2, 30):
        run.step(step)
    run.event("memory", rank=0, rss_gib=0.5)
    return run


@pytest.fixture
def listing(written: WrittenRun, tmp_path: Path) -> Listing:
    return Listing(tmp_path / "notebooks")


def name_of(written: WrittenRun) -> str:
    return f"runs/cluster/runs/{written.paths.root.name}"


def test_a_live_run_is_listed_with_its_progress_and_its_cluster(
    written: WrittenRun, listing: Listing
) -> None:
    answer = listing.look("", 50)
    (row,), (cluster,) = answer["runs"], answer["clusters"]
    assert (row["path"], row["cluster"]) == (name_of(written), "runs/cluster")
    assert (row["state"], row["live"], row["share"], row["message"]) == (
        "running",
        True,
        0.3,
        "no step for 20 s",
    )
    assert "30 of 100 steps" in row["bar"]
    assert (cluster["path"], cluster["phase"], cluster["pods"]) == (
        "runs/cluster",
        "ready",
        "3 pods",
    )
    written.step(50)
    write_label(written.paths, name="the first try")
    (row,) = listing.look("", 50)["runs"]
    assert (row["share"], row["what"]) == (0.5, "the first try")
    assert row["detail"] == f"zero1 · {written.paths.root.name}"
    assert (answer["total"], answer["live"]) == (1, 1)
    json.dumps(answer, allow_nan=False)
    assert listing.look("nothing/here", 50)["runs"] == []


def test_a_run_that_has_ended_is_read_once_until_its_files_change(
    written: WrittenRun, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.end(steps=100, eval_loss=0.75, peak_memory_gib={"127.0.0.2": 1.5, "127.0.0.3": 1.0})
    for number in range(20):
        shutil.copytree(written.paths.root, written.paths.root.with_name(f"copy-{number:02d}"))
    read: list[Path] = []
    whole = lab.record_of
    monkeypatch.setattr(
        lab, "record_of", lambda paths, alive: read.append(paths.root) or whole(paths, alive)
    )
    first = listing.look("", 5)
    assert (len(read), first["total"], len(first["runs"]), first["live"]) == (21, 21, 5, 0)
    row = next(row for row in listing.look("", 50)["runs"] if row["path"] == name_of(written))
    assert row["bar"] == "eval loss 0.75 · 100 steps · 25.5 s"
    assert (row["state"], row["memory"], row["share"]) == ("succeeded", "peak 1.50 GiB", None)
    assert len(read) == 21
    written.end("failed", "rank 1 failed")
    assert "failed" in {row["state"] for row in listing.look("", 50)["runs"]}
    assert read[21:] == [written.paths.root]


def test_a_damaged_or_hostile_run_is_a_row_that_says_so(
    written: WrittenRun, listing: Listing, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"state": "failed", "message": "the secret"}')
    bad = written.paths.root.with_name("bad")
    for kind in ("cut", "link", "fifo", "huge"):
        folder = bad.with_name(f"bad-{kind}")
        shutil.copytree(written.paths.root, folder)
        (folder / "state.json").unlink()
    (bad.with_name("bad-cut") / "result.json").write_text('{"state":')
    (bad.with_name("bad-link") / "result.json").symlink_to(secret)
    os.mkfifo(bad.with_name("bad-fifo") / "result.json")
    (bad.with_name("bad-huge") / "result.json").write_text("[" * 100_000)
    (bad.with_name("bad-elsewhere")).symlink_to(tmp_path)
    rows = {row["path"].rpartition("/")[2]: row for row in listing.look("", 50)["runs"]}
    assert len(rows) == 5
    for kind in ("cut", "link", "fifo", "huge"):
        row = rows[f"bad-{kind}"]
        # A torn result counts as missing, and the keeper lives.
        is_torn = kind == "cut"
        assert (row["state"], row["live"]) == (("queued", True) if is_torn else ("lost", False))
        assert is_torn or "result.json" in row["message"]
        assert "the secret" not in json.dumps(row)
        assert "html" in listing.page(row["path"])
    assert rows[written.paths.root.name]["state"] == "running"


def test_the_page_runs_nothing_and_loads_nothing(written: WrittenRun, listing: Listing) -> None:
    written.log(0, "<script>alert(1)</script><img src=x onerror=alert(2)>\n")
    page = listing.page(name_of(written))
    assert (page["state"], page["live"], page["over"]) == ("running", True, False)
    assert "default-src 'none'" in page["html"]
    assert "<script" not in page["html"]
    assert "<img" not in page["html"]
    assert "alert(1)" in page["html"]
    written.end()
    page = listing.page(name_of(written))
    assert (page["live"], page["over"]) == (False, False), "its cluster may go on"
    written.keeper("closed", alive=False)
    page = listing.page(name_of(written))
    assert page["over"] and says(page["html"], "Pods: {}; the cluster is", "closed")


def test_the_figures_of_a_page_do_not_wait_for_its_plots(
    written: WrittenRun, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.display.run.panel._PLOT_EVERY_S", float("inf"))

    def look() -> tuple[str, list[str]]:
        html = str(listing.page(name_of(written))["html"])
        return html, re.findall(r"<svg.*?</svg>", html, re.DOTALL)

    for step in (1, 2, 3):
        written.step(step)
    _, before = look()
    written.step(40)
    html, after = look()
    assert "40 of 100 steps" in html
    assert before == after != []
    written.end()
    assert look()[1] != after, "what has ended is drawn to its end"


def test_a_look_through_too_many_folders_ends_and_says_so(
    written: WrittenRun, listing: Listing
) -> None:
    (listing.root / "runs" / "zero").mkdir()
    assert not listing.look("", 50)["cut"]
    listing.look_s = -1.0
    answer = listing.look("", 50)
    assert (answer["cut"], answer["runs"]) == (True, [])


def test_runs_that_there_was_no_time_to_read_are_counted_and_read_by_the_next_looks(
    written: WrittenRun, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.end()
    for n in range(1, 30):
        shutil.copytree(written.paths.root, written.paths.root.with_name(f"2030-{n:02}"))
    # Every look at the clock takes a second of CPU.
    seconds = itertools.count()
    monkeypatch.setattr("workbench.lab.listing.time.thread_time", lambda: float(next(seconds)))
    other = Listing(listing.root)
    other.look_s = 1000.0
    whole_s = other.look("", 50)["took_s"]
    # Too little for a third of the runs.
    listing.look_s = whole_s - 12.0
    first, second = (listing.look("", 50) for _ in range(2))
    assert 5 < first["unread"] < 20 and first["total"] + first["unread"] == 30
    assert (second["unread"], second["total"]) == (0, 30)
    assert not first["cut"] and not second["cut"]
    names = {Path(row["path"]).name for row in first["runs"]}
    assert names == {f"2030-{n:02}" for n in range(29, 29 - len(names), -1)}


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "runs/../../..", "a\0b", "link"])
def test_nothing_outside_the_servers_root_is_read(
    name: str, listing: Listing, tmp_path: Path
) -> None:
    write_run(tmp_path / "elsewhere")
    (tmp_path / "notebooks" / "link").symlink_to(tmp_path / "elsewhere" / "cluster")
    with pytest.raises(RunError):
        listing.run(name)
    try:
        assert listing.look(name, 50)["runs"] == []  # /etc is below the root, and not there
    except RunError as error:
        assert says(error, "not a folder below")


def test_a_name_cannot_place_a_link_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("workbench.client.tensorboard.board.serve", lambda folder, port: folder)
    shown = serve_folders({"a/../../b": tmp_path / "one", "c": tmp_path / "two", "..": tmp_path})
    assert isinstance(shown, Path)
    assert sorted(path.name for path in shown.iterdir()) == ["a .. .. b", "c", "run"]
    assert (shown / "c").readlink() == tmp_path / "two"
    assert (
        serve_folders({"..": tmp_path, "a/../../b": tmp_path / "one", "c": tmp_path / "two"})
        == shown
    )


def test_runs_are_found_by_the_words_of_their_rows(written: WrittenRun, listing: Listing) -> None:
    written.end("failed", "rank 1 failed")
    other = write_run(listing.root / "sweep", {"kind": "script", "path": "/home/train.py"})
    config = {"count": 3, "backend": {"kind": "slurm"}}
    other.paths.spec.write_text(
        json.dumps({**json.loads(other.paths.spec.read_text()), "cluster": config})
    )
    listing.label(
        f"sweep/cluster/runs/{other.paths.root.name}", {"name": "Try 7", "tags": ["paper"]}
    )
    for find, found in {
        "": {"runs", "sweep"},
        "FAILED finetune": {"runs"},
        "zero1-6c8c": {"runs", "sweep"},
        "try paper": {"sweep"},
        "slurm": {"sweep"},
        "script queued": {"sweep"},
        "paper failed": set(),
    }.items():
        answer = listing.look("", 50, find)
        assert {row["path"].partition("/")[0] for row in answer["runs"]} == found, find
        assert (answer["found"], answer["total"]) == (len(found), 2)
    row = next(row for row in listing.look("", 1, "paper")["runs"])
    assert (row["name"], row["tags"], row["kind"], row["place"]) == (
        "Try 7",
        ["paper"],
        "script",
        "Slurm",
    )
    json.dumps(row)
    assert lab.WORDS not in row
    with pytest.raises(ConfigError):
        listing.label(row["path"], {"tags": "paper"})


def test_a_cluster_is_called_by_its_name_or_by_its_notebook_and_place(
    written: WrittenRun, listing: Listing
) -> None:
    def title() -> str:
        (cluster,) = listing.look("", 50)["clusters"]
        return str(cluster["title"])

    assert title() == "cluster"
    root = written.cluster.root.with_name("cluster-20261124-191654-1373")
    written.cluster.root.rename(root)
    paths = ClusterPaths(root)
    config: dict[str, object] = {"backend": {"kind": "local"}}
    started = {"time": "2026-11-24 19:16:54"}
    paths.config.write_text(json.dumps({**config, "started": started}))
    assert title() == "local pods · 2026-11-24 19:16"
    started["notebook"] = "t5\n.ipynb"
    paths.config.write_text(json.dumps({**config, "started": started}))
    assert title() == "t5 .ipynb · local pods · 2026-11-24 19:16"
    paths.config.write_text(json.dumps({"backend": {"kind": "yard"}, "started": []}))
    assert title() == "yard"


def test_tensorboard_is_offered_for_event_files_alone(
    written: WrittenRun, listing: Listing
) -> None:
    def is_offered() -> bool:
        (row,) = listing.look("", 50)["runs"]
        assert listing.page(name_of(written))["board"] == row["board"]
        return bool(row["board"])

    written.paths.tensorboard.mkdir()
    assert not is_offered()
    (written.paths.tensorboard / "events.out.tfevents.1").touch()
    assert is_offered()
    shutil.rmtree(written.paths.tensorboard)
    (written.paths.outputs / "logs").mkdir(parents=True)
    assert not is_offered()
    (written.paths.outputs / "logs" / "events.out.tfevents.1").touch()
    assert is_offered()


def test_ticked_runs_are_compared_live_in_the_colours_of_their_rows(
    written: WrittenRun, listing: Listing
) -> None:
    copies = []
    for number in range(20):
        copy = written.paths.root.with_name(f"copy-{number:02d}")
        shutil.copytree(written.paths.root, copy)
        (copy / "run.json").write_text(
            json.dumps({"id": copy.name, "cluster": str(written.cluster.root)})
        )
        copies.append(f"runs/cluster/runs/{copy.name}")
    names = [name_of(written), copies[0], copies[0]]
    page = listing.compare(names)
    assert (page["live"], page["over"], len(page["runs"])) == (True, False, 2)
    rows = {row["path"]: row["colour"] for row in listing.look("", 50)["runs"]}
    for run in page["runs"]:
        assert run["colour"] == rows[run["path"]]
        assert f"stroke:{run['colour']}" in page["html"], "the line has the colour of the row"
    assert "<script" not in page["html"], "the frame of the page runs no script"
    written.step(77, loss=0.125)
    assert listing.compare(names)["html"] != page["html"], "a live run is followed"
    for wrong in ([], names[:1], [name_of(written), *copies]):
        with pytest.raises(RunError, match="cannot be compared"):
            listing.compare(wrong)


def test_the_code_to_run_again_makes_the_same_job(
    written: WrittenRun, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"kind": "wikisql-mini", "train_rows": 9}
    spec = RunSpec(
        job=FineTune(technique="zero3", learning_rate=1e-5, dataset=data, env={"HF": "${HF}"}),
        cluster=ClusterSpec(count=2, pods=PodSpec(cpus=2), idle_timeout_s=60.0),
    )
    written.paths.spec.write_text(json.dumps(spec.to_dict()))
    info = {"id": "a\nimport os", "cluster": str(written.cluster.root)}
    written.paths.info.write_text(json.dumps(info))
    source = listing.again(name_of(written))["source"]
    made, _, rest = source.partition("with ")
    scope: dict[str, Any] = {}
    exec(f"{made}cluster = {rest.partition(' as cluster:')[0]}", scope)
    assert scope["job"] == spec.job
    assert "os" not in scope, "an id of several lines is a comment of one line"
    assert (scope["cluster"].spec.count, scope["cluster"].spec.pods) == (2, PodSpec(cpus=2))
    assert scope["cluster"].spec.idle_timeout_s == 60.0
    compile(source, "cell", "exec")
    # The pods of a ready cluster of this user are used again.
    monkeypatch.setattr(resubmit_cell, "registration", lambda _: object())
    source = listing.again(name_of(written))["source"]
    assert f'with Cluster.attach("{written.cluster.root}") as cluster:' in source
    assert "PodSpec" not in source
    compile(source, "cell", "exec")


def test_only_a_registered_cluster_without_a_run_is_stopped(
    written: WrittenRun, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Path] = []
    monkeypatch.setattr(
        lab.Cluster, "attach", lambda path: SimpleNamespace(close=lambda: closed.append(path))
    )
    (row,) = listing.look("", 50)["clusters"]
    assert (row["live"], row["own"]) == (True, False), "a given folder has no button"
    with pytest.raises(NotRegistered):
        listing.stop_cluster("runs/cluster")
    with pytest.raises(RunError):
        listing.stop_cluster("../elsewhere")
    # The cluster of a user who is logged in, with a run in its queue and then without.
    monkeypatch.setattr(lab, "registered", lambda _: None)
    busy = [True, False]
    monkeypatch.setattr(lab, "unfinished_runs", lambda _: busy.pop(0))
    with pytest.raises(RunError, match="stop the run first"):
        listing.stop_cluster("runs/cluster")
    assert closed == []
    assert "3 pods" in listing.stop_cluster("runs/cluster")["message"]
    assert closed == [written.cluster.root.resolve()]
    written.keeper("closed", alive=False)
    with pytest.raises(RunError, match="no cluster runs"):
        listing.stop_cluster("runs/cluster")


def test_a_run_that_is_lost_or_over_is_not_stopped_in_silence(
    written: WrittenRun, listing: Listing
) -> None:
    written.keeper(alive=False)
    with pytest.raises(RunError, match=sentence("run {} has ended with the state")):
        listing.stop(name_of(written))


def test_a_run_that_has_ended_is_deleted_and_says_what_that_freed(
    written: WrittenRun, listing: Listing
) -> None:
    (row,) = listing.look("", 50)["runs"]
    assert row["disk"] == "" and row["when"], "a live run still grows"
    with pytest.raises(RunError, match="Only an ended run can be deleted"):
        listing.delete(row["path"])
    written.end()
    written.paths.model.mkdir()
    (written.paths.model / "model.safetensors").write_bytes(bytes(3 << 20))
    written.keeper("closed", alive=False)
    (row,) = listing.look("", 50)["runs"]
    assert row["disk"].startswith("3.0 MiB")
    assert listing.delete(row["path"])["message"] == "the run is deleted, 3.0 MiB are free"
    assert listing.look("", 50)["runs"] == []
    with pytest.raises(RunError):
        listing.delete("../elsewhere")
