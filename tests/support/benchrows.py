"""Rows of a benchmark made by hand, for comparisons and plots; and a page as its reader gets it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from workbench import display
from workbench.benchmark.row import BenchmarkRow, Outcome, Provenance
from workbench.display.benchmark.sheet import Sheet
from workbench.rundir.paths import RunPaths

_SORT = Path(display.__file__).parent / "templates" / "assets" / "sort.js"
SORT = f"<script>{_SORT.read_text().rstrip()}</script>"
"""The one script that a page of ours may hold."""
SAMPLE = Path(__file__).resolve().parents[1] / "samples" / "flops_profile.txt"


def make_row(technique: str, pods: int, speed: float | None, **other: Any) -> BenchmarkRow:
    """Make the row of a run that did the same work as the others, unless told otherwise."""
    known: dict[str, Any] = {
        "name": f"{technique}-{pods}",
        "key": f"{technique}-{pods}",
        "outcome": Outcome.SUCCEEDED,
        "model": "tiny-t5",
        "technique": technique,
        "precision": "fp32",
        "launcher": "ssh",
        "pods": pods,
        "world_size": pods,
        "global_batch_size": 24,
        "steps": 20,
        "epochs": 0.48,
        "sequence": "source 96, target 96, padded to the longest",
        "dataset": "wikisql-mini",
        "duration_s": 25.5 + pods,
        "time_to_first_step_s": 4.25,
        "train_samples_per_s": speed,
        "useful_tokens_per_s": None if speed is None else 39.5 * speed,
        "peak_memory_gib": 0.49 + pods / 100,
        "memory_kind": "resident",
        "predicted_memory_gib": 0.92,
        "train_loss": 6.2,
        "eval_loss": 4.91,
        "pod_hours": pods * (25.5 + pods) / 3600,
        "spec": {"cluster": {"count": 3}, "job": {"technique": technique}},
        "provenance": Provenance(
            versions={"torch": "2.13.0"}, device="a CPU", devices=pods, seed=7, data="d1"
        ),
    }
    return BenchmarkRow(**{**known, **other})


def mixed_rows() -> list[BenchmarkRow]:
    """Make rows of every kind of end, some of them not like the others."""
    nothing = dict.fromkeys(
        ("duration_s", "train_samples_per_s", "peak_memory_gib", "train_loss", "eval_loss")
    )
    nothing |= {
        "useful_tokens_per_s": None,
        "time_to_first_step_s": None,
        "pod_hours": None,
        "steps": None,
    }
    return [
        make_row("single", 1, 130.25),
        make_row("zero1", 1, 140.0, from_disk=True),
        make_row("zero1", 3, 249.5, sent_bytes_per_step=8.2e6),
        make_row("zero3", 3, 88.125, launcher="pdsh"),
        make_row(
            "ddp", 3, None, outcome=Outcome.FAILED, reason="rank 1: <b>no such thing</b>", **nothing
        ),
        make_row(
            "ddp",
            1,
            None,
            outcome=Outcome.OUT_OF_MEMORY,
            reason="killed",
            wanted_gib=2.5,
            free_gib=0.375,
            **nothing,
        ),
        make_row("zero1", 2, 200.0, key="large", name="large", global_batch_size=72),
        make_row(
            "single",
            1,
            None,
            key="3b",
            name="3b",
            model="t5-3b",
            outcome=Outcome.SKIPPED,
            reason="needs 91 GiB",
            **{**nothing, "predicted_memory_gib": 91.0, "global_batch_size": None},
        ),
    ]


def repeated_rows(speeds: dict[str, list[float]]) -> list[BenchmarkRow]:
    """Make rows of one pod, by technique the samples/s of each repeat."""
    return [
        make_row(technique, 1, speed, repeat=n, name=f"{technique}-{n}")
        for technique, of in speeds.items()
        for n, speed in enumerate(of)
    ]


def write_row(
    root: Path,
    *,
    technique: str = "zero1",
    model: str = "tiny-t5",
    pods: int = 1,
    seed: int = 3,
    **facts: Any,
) -> Path:
    """Write the run directory of a finished run, with losses, a profile and answers."""
    paths = RunPaths(root)
    paths.logs.mkdir(parents=True)
    job = {
        "kind": "finetune",
        "model": model,
        "technique": technique,
        "max_steps": 9,
        "seed": seed,
        "dataset": {"kind": "wikisql-mini"},
        "per_device_train_batch_size": 24 // pods,
    }
    hosts = [{"address": f"10.0.0.{n}", "slots": 1, "pod": f"pod-{n}"} for n in range(pods)]
    files = {
        paths.info: {
            "id": root.name,
            "cluster": str(root),
            "submitted_s": 5.0,
            "predicted_memory_gib": 0.75,
        },
        paths.spec: {
            "cluster": {"backend": {"kind": "local"}, "count": 3},
            "job": job,
            "pods": pods,
        },
        paths.result: {
            "state": "succeeded",
            "model": model,
            "technique": technique,
            "precision": "fp32",
            "launcher": "ssh",
            "hosts": hosts,
            "world_size": pods,
            "steps": 9,
            "epochs": 0.5,
            "global_batch_size": 24,
            "started_s": 8.0,
            "duration_s": 20.25,
            "train_samples_per_s": 99.5,
            "eval_loss": 0.5,
            "time_to_first_step_s": 2.5,
            "peak_memory_gib": {"10.0.0.0": 0.5},
            "versions": {"torch": "2.13.0"},
            "command": f"start {model}",
            **facts,
        },
    }
    for path, data in files.items():
        path.write_text(json.dumps(data))
    steps = [
        {"time_s": 10.0 + n, "rank": 0, "kind": "step", "step": n, "loss": 9.0 - n}
        for n in range(1, 10)
    ]
    paths.events.write_text("".join(json.dumps(event) + "\n" for event in steps))
    paths.profile.write_text(SAMPLE.read_text())
    answers = [
        {"source": f"q{n}", "expected": "SELECT a", "predicted": f"SELECT {model}"}
        for n in range(3)
    ]
    paths.predictions.write_text(
        "".join(json.dumps({**a, "exact_match": False}) + "\n" for a in answers)
    )
    paths.rank_log(0, 0, "stderr").parent.mkdir(parents=True)
    paths.rank_log(0, 0, "stderr").write_text(f"the last words of {model}\n")
    return root


def cells_of(page: Page, sheet: Sheet) -> dict[int, list[str]]:
    """By the number of a line, the cells with its figures, of the first and of the folded table."""
    who = 4 + sheet.several_models
    cells: dict[int, list[str]] = {}
    for row in page.rows:
        if row and row[0].isdigit():
            cells.setdefault(int(row[0]), []).extend(row[who:])
    return cells


class Page(HTMLParser):
    """A page: its tags, its text, and the cells of its tables by row, without the small print."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._parts: list[str] = []
        self._open: list[str] = []
        self._hidden = False  # a cell that stands in another table in a wide window
        self.feed(text.replace(SORT, ""))
        self.text = " ".join(" ".join(self._parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("style", "script", "small", "td", "th"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self._hidden = "display: none" in (dict(attrs).get("style") or "")
            if not self._hidden:
                self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            self._open.remove(tag)
        if tag in ("td", "th"):
            self._hidden = False

    def handle_data(self, data: str) -> None:
        if self._hidden or {"style", "script"} & {*self._open}:
            return
        self._parts.append(data)
        if self._open and "small" not in self._open and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data
