"""The content of the sidebar: runs and clusters below a folder, as data.

A finished run is read once.

A run directory is data only. Listing or drawing a run starts nothing and follows no name in its
files. An unreadable run is listed as unreadable.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

from workbench.base.display_protocol import as_page
from workbench.base.errors import RunError
from workbench.base.files import records
from workbench.base.files.gate import open_within
from workbench.base.words import gib, pluralize, size, strip_controls
from workbench.benchmark.result import Report, rows_below
from workbench.client.cluster import Cluster
from workbench.client.deletion import bytes_of_run, delete_run
from workbench.client.result import RunResult, card_of
from workbench.client.run import Run
from workbench.client.tables.comparison import compare_views
from workbench.client.takeover import unfinished_runs
from workbench.client.tensorboard.board import BOARD_PATH, board_folder, has_board, serve_folders
from workbench.client.tensorboard.server import find_by_key
from workbench.display.kit.doc import to_page
from workbench.display.kit.plots.figure import look_of_run
from workbench.display.records.history import runs_doc
from workbench.display.run.facts import RunFacts
from workbench.display.run.page import RunPage
from workbench.display.run.panel import Drawings
from workbench.lab.resubmit_cell import again_code
from workbench.lab.rows import WORDS, Row, cluster_row, has_words, run_row
from workbench.rundir.catalog.find import find_all, stamp_of
from workbench.rundir.catalog.label import read_label, write_label
from workbench.rundir.catalog.store import RunRecord, record_of
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import (
    cluster_of,
    registered,
)
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    cluster_status,
    run_at,
)
from workbench.rundir.view import RunView

logger = logging.getLogger(__name__)
_VIEWS = 64  # of runs whose events are kept in memory
_PIECE = 1 << 20  # bytes of a model in memory
_MOST_COMPARED = 20  # runs on a page
_LOOK_S = 2.0  # limit of a search through folders: a home folder may hold very many


class Listing:
    """The runs and clusters below the root of a Jupyter server.

    `look` and `page` are for one thread at a time.
    """

    def __init__(self, root: Path):
        self.root = root.resolve()
        self.look_s = _LOOK_S
        self._ended: dict[Path, tuple[str, Row]] = {}
        self._sizes: dict[Path, tuple[str, str]] = {}
        self._views: dict[Path, tuple[RunView, Drawings]] = {}

    def look(self, folder: str, limit: int, find: str = "") -> Row:
        """List the folder's content with its newest `limit` runs, and the time of the search.

        Only runs with every word of `find` are listed. Runs that there was no time to read are
        counted as `unread`, and the next look reads them.
        """
        began = time.thread_time()
        end_s = began + self.look_s
        keepers: dict[Path, bool] = {}
        runs = []
        clusters = []
        unread = 0

        def goes_on() -> bool:
            return time.thread_time() < end_s

        # Find everything below the folder, until the time is over.
        places = list(find_all(self._place(folder), cpu_end_s=end_s))
        cut = not goes_on()
        # The names of runs begin with their time, so the newest are read first.
        for paths in sorted(places, key=lambda paths: paths.root.name, reverse=True):
            if isinstance(paths, ClusterPaths):
                clusters.append(self._cluster(paths))
            elif paths.root in self._ended or goes_on():
                runs.append(self._run(paths, keepers))
            else:
                unread += 1
        runs.sort(key=_place_in_list)
        titles = {cluster["path"]: cluster["title"] for cluster in clusters}
        found = []
        for row in runs:
            title = titles.get(row["cluster"], "")
            if has_words({WORDS: f"{row[WORDS]}\n{title.lower()}"}, find):
                found.append(row)
        # Only live runs that are shown are read for their progress.
        shown = []
        has_time = goes_on()
        for row in found[:limit]:
            so_far = self._so_far(row) if row["live"] else {}
            sent = {**row, **so_far, "disk": self._disk(row) if has_time else ""}
            del sent[WORDS]
            shown.append(sent)
        live = [row for row in runs if row["live"]]
        return {
            "runs": shown,
            "clusters": clusters,
            "found": len(found),
            "total": len(runs),
            "live": len(live),
            "cut": cut,
            "unread": unread,
            "took_s": time.thread_time() - began,
        }

    def page(self, name: str) -> Row:
        began = time.thread_time()
        run = self.run(name)
        view, drawings = self._view(run.root)
        title = f"Run {strip_controls(view.id)}"
        draw = partial(drawings.draw, at_once=view.state.is_terminal)
        page = RunPage(view, draw)
        html = to_page(page.doc(), title)
        return {
            "title": title,
            "state": view.state,
            "live": not view.state.is_terminal,
            "board": has_board(run),
            "disk": self._disk({"live": not view.state.is_terminal, "path": self._name(run.root)}),
            "over": view.is_over,
            "html": html,
            "took_s": time.thread_time() - began,
        }

    def compare(self, names: Sequence[str]) -> Row:
        """Draw the comparison of runs, which is current for live runs too."""
        began = time.thread_time()
        roots = [self.run(name).root for name in dict.fromkeys(names)]
        if not 2 <= len(roots) <= _MOST_COMPARED:
            raise RunError(
                f"{pluralize(len(roots), 'run')} cannot be compared; "
                f"tick two to {_MOST_COMPARED} runs"
            )
        # A run that is open in a tab keeps its view, which reads only what is new.
        views = []
        for root in roots:
            view, _ = self._view(root)
            views.append(view)
        comparison = compare_views(views)
        title = f"Comparison of {pluralize(len(views), 'run')}"
        runs = []
        # The list beside the page shows the same colours as the curves.
        for run in comparison.runs:
            look = look_of_run(run.view.id)
            runs.append(
                {
                    "path": self._name(run.record.path),
                    "id": strip_controls(run.view.id),
                    "what": run.name,
                    "colour": look.colour,
                    "state": run.record.state,
                }
            )
        live = any(run.record.is_live for run in comparison.runs)
        return {
            "title": title,
            "runs": runs,
            "state": "",
            "live": live,
            "over": not live,
            "html": to_page(runs_doc(comparison), title),
            "took_s": time.thread_time() - began,
        }

    def again(self, name: str) -> Row:
        """Return the code that submits a run's job again."""
        return {"source": again_code(self.run(name))}

    def label(self, name: str, changes: Mapping[str, object]) -> Row:
        """Change name or tags of a run."""
        write_label(self.run(name), **changes)
        return {"message": "saved"}

    def card(self, name: str) -> str:
        run = self.run(name)
        result = RunResult.load(run.root)
        return as_page(card_of(result))

    def report(self, folder: str) -> str:
        place = self._place(folder)
        rows, problems = rows_below([place])
        report = Report(rows, title=place.name, problems=problems)
        return as_page(report)

    def model(self, name: str) -> Iterator[bytes]:
        """Return the model of a run as the pieces of a zip; links in its folder are left out."""
        run = self.run(name)
        # The folder may be a link: the place of the link's target must be below the root too.
        model = self._name(run.model)
        folder = self._place(model)
        try:
            files = records.files_below(folder)
        except OSError as error:
            raise RunError(f"{folder} cannot be listed: {error.strerror}") from error
        if not files:
            raise RunError(f"there is no model in {folder}")
        for path in files:
            name = str(path.relative_to(folder))
            try:
                name.encode()
            except UnicodeEncodeError as error:
                raise RunError(
                    f"a zip cannot hold the file {strip_controls(name)} of the model: "
                    "the name is not UTF-8; rename the file"
                ) from error
        return _zip(folder, files)

    def delete(self, name: str) -> Row:
        """Delete the directory of a run that has ended, and return what that freed."""
        run = self.run(name)
        freed = size(bytes_of_run(run.root))
        notes = delete_run(run)
        return {"message": "; ".join([f"the run is deleted, {freed} are free", *notes])}

    def stop(self, name: str) -> Row:
        """Ask a run's keeper to end the run within two steps."""
        paths = self.run(name)
        run = Run(paths.root)
        if run.state.is_terminal:
            raise RunError(f"run {run.id} has ended with the state {run.state}")
        run.stop()
        return {"message": "asked to stop within two steps"}

    def stop_cluster(self, name: str) -> Row:
        """Stop the pods of a cluster of this user without a run, and wait for the end."""
        root = self._place(name)
        status = cluster_status(root)
        if not status.alive:
            raise RunError(f"no cluster runs in {root}: it is {status.phase}")
        registered(root)
        if unfinished_runs(root):
            raise RunError("the cluster has a run that has not ended; stop the run first")
        pods = pluralize(len(status.pods), "pod")
        Cluster.attach(root).close()
        return {"message": f"the cluster is closed; {pods} stopped"}

    def open_board(self, names: Sequence[str]) -> Row:
        """Start TensorBoard for runs, unless already running, and return its page's path."""
        folders = {}
        for name in names:
            run = self.run(name)
            label = read_label(run)
            folders[label.name or run.root.name] = board_folder(run)
        server = serve_folders(folders)
        return {"path": f"{BOARD_PATH}/{server.key}/"}

    def close_board(self, key: str) -> Row:
        """End a TensorBoard of the process."""
        server = find_by_key(key)
        if server and server.owner == os.getpid():
            server.stop()
        return {}

    def run(self, name: str) -> RunPaths:
        """Return the run of a row, by its path; a RunError where there is none below the root."""
        return run_at(self._place(name))

    def _place(self, name: str) -> Path:
        try:
            below = name.strip("/")
            path = (self.root / below).resolve()
        except (OSError, ValueError, RuntimeError):  # a NUL in it, or a circle of links
            path = Path()
        if not path.is_relative_to(self.root):
            raise RunError(f"not a folder below {self.root}: {strip_controls(name)}")
        return path

    def _name(self, path: Path) -> str:
        if path.is_relative_to(self.root):
            return str(path.relative_to(self.root))
        return str(path)

    def _run(self, paths: RunPaths, keepers: dict[Path, bool]) -> Row:
        stamp = stamp_of(paths)
        seen, row = self._ended.get(paths.root, ("", {}))
        if not row or seen != stamp:
            record = record_of(paths, keepers)
            row = self._row(record)
            if not record.is_live:
                self._ended[paths.root] = (stamp, row)
        return row

    def _row(self, record: RunRecord) -> Row:
        cluster = cluster_of(RunPaths(record.path))
        paths = {"path": self._name(record.path), "cluster": self._name(cluster)}
        row = {**paths, **run_row(record)}
        row[WORDS] = f"{row[WORDS]}\n{row['path'].lower()}"
        return row

    def _so_far(self, row: Row) -> Row:
        if row["state"] == RunState.QUEUED:
            return {}
        try:
            view, _ = self._view(self.root / row["path"])
            facts = RunFacts(view)
        except Exception:  # run boundary: bad files of one run must not hide the others
            logger.exception("reading %s", row["path"])
            return {}
        sizes = [host.gib.last for host in view.memory.values()]
        known = [size for size in sizes if size is not None]
        memory = ""
        if known:
            memory = f"{gib(max(known))} now"
        share = None
        if facts.progress.max_steps:
            share = facts.share
        # The message of a running job is in the bar already.
        message = facts.hint
        if not message and view.state is not RunState.RUNNING:
            message = facts.how
        return {
            "message": message,
            "share": share,
            "bar": facts.bar,
            "memory": memory,
        }

    def _disk(self, row: Row) -> str:
        """Return the size of an ended run's directory; empty for a live run."""
        if row["live"]:
            return ""
        root = self._place(row["path"])
        stamp = stamp_of(RunPaths(root))
        seen, disk = self._sizes.get(root, ("", ""))
        if not disk or seen != stamp:
            disk = size(bytes_of_run(root))
            self._sizes[root] = (stamp, disk)
        return disk

    def _view(self, path: Path) -> tuple[RunView, Drawings]:
        kept = self._views.pop(path, None)
        if kept is None:
            kept = RunView(path), Drawings()
        else:
            view, _ = kept
            view.refresh()
        # The view that was used last is at the end. The first view is forgotten.
        self._views[path] = kept
        if len(self._views) > _VIEWS:
            oldest = next(iter(self._views))
            del self._views[oldest]
        return kept

    def _cluster(self, paths: ClusterPaths) -> Row:
        return {"path": self._name(paths.root), **cluster_row(paths)}


class _Pieces(io.RawIOBase):
    """The bytes written to a zip since the last call."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, piece: Any) -> int:
        self.pieces.append(bytes(piece))
        return len(piece)

    def take(self) -> bytes:
        taken = b"".join(self.pieces)
        self.pieces.clear()
        return taken


def _zip(folder: Path, files: Sequence[Path]) -> Iterator[bytes]:
    """Yield a zip of the files, with a piece of a file in memory at a time."""
    pieces = _Pieces()
    with ZipFile(pieces, "w") as archive:
        for path in files:
            name = path.relative_to(folder)
            about = ZipInfo.from_file(path, name, strict_timestamps=False)
            with open_within(path, folder) as source, archive.open(about, "w") as target:
                while True:
                    piece = source.read(_PIECE)
                    if not piece:
                        break
                    target.write(piece)
                    yield pieces.take()
    yield pieces.take()


def _place_in_list(row: Row) -> tuple[bool, bool, float, str]:
    """Return the key to sort rows: live runs first, queued runs behind them, newest first."""
    is_queued = row["state"] == RunState.QUEUED
    return not row["live"], is_queued, -row["submitted_s"], row["path"]
