from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from writtenrun import WrittenRun, write_run

from tests.support.sentences import says
from workbench.base.errors import RunError
from workbench.client.tensorboard.board import serve_folders
from workbench.lab import listing as lab
from workbench.lab.listing import Listing
from workbench.rundir.catalog.store import write_label


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
    assert row["bar"] == "100 steps · 25.5 s · evaluation loss 0.75"
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
        assert (row["state"], row["live"]) == ("lost", False)
        assert "result.json" in row["message"]
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
    assert page["over"] and says(page["html"], "display.facts._pods_left.pods-cluster", "closed")


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
        assert says(error, "lab.listing._place.folder-below")


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
