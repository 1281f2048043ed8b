from __future__ import annotations

import html
import io
import json
import os
import re
import subprocess
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import escape

from tests.support.sentences import says, sentence
from workbench.base.errors import RunError
from workbench.client.result import RunResult
from workbench.finetune.data.sources.dataset import prepare
from workbench.finetune.data.wikisql.datasets import Mini
from workbench.finetune.job.finetune import FineTune
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import HostSlots, RunFault
from workbench.rundir.state import RunState

EVIL = '<img src=x onerror="alert(1)"> </pre><script>alert(2)</script>'
SAMPLE = Path(__file__).resolve().parent.parent.parent / "samples" / "flops_profile.txt"


def make_run(
    root: Path, *, evil: str = "tiny-t5", state: RunState = RunState.SUCCEEDED
) -> RunResult:
    paths = RunPaths(root)
    paths.logs.mkdir(parents=True)
    paths.inputs.mkdir()
    made = prepare(Mini(train_rows=30, eval_rows=20), paths.inputs)
    assert made.eval is not None
    rows = [json.loads(line) for line in made.eval.read_text().splitlines()]
    answers = [
        {"source": r["source"], "expected": r["target"], "predicted": evil, "exact_match": False}
        for r in rows
    ]
    paths.predictions.write_text("".join(json.dumps(a) + "\n" for a in answers))
    paths.profile.write_text(
        SAMPLE.read_text().replace("T5Stack", "T5<b>") if evil != "tiny-t5" else SAMPLE.read_text()
    )
    job = FineTune(model=evil)
    paths.info.write_text(json.dumps({"id": root.name, "cluster": str(root), "submitted_s": 5.0}))
    paths.spec.write_text(json.dumps({"cluster": {"count": 1}, "job": job.to_dict()}))
    paths.job.write_text(json.dumps({"job": job.to_dict(), "deepspeed": {"steps_per_print": 7}}))
    paths.deepspeed.write_text('{"steps_per_print": 7}')
    paths.hostfile.write_text("10.0.0.1 slots=1\n")
    events = [
        {"time_s": 10.0 + n, "rank": 0, "kind": "step", "step": n, "max_steps": 9, "loss": 9.0 - n}
        for n in range(9)
    ]
    memory = [
        {
            "time_s": 11.0,
            "rank": 0,
            "kind": "memory",
            "step": 1,
            "rss_gib": 0.5,
            "peak_rss_gib": 0.6,
        }
    ]
    paths.events.write_text("".join(json.dumps(e) + "\n" for e in [*events, *memory]))
    paths.rank_log(0, 0, "stderr").parent.mkdir(parents=True)
    paths.rank_log(0, 0, "stderr").write_text(f"the last words {evil}\n")
    paths.rank_log(0, 0, "stdout").write_text("")
    error = RunFault(
        pod="pod-0", rank=0, kind="ValueError", message=evil, traceback=f"Traceback\n{evil}"
    )
    result = RunResult(
        path=root,
        state=state,
        model=evil,
        technique="zero1",
        world_size=1,
        eval_loss=0.5,
        train_samples_per_s=99.0,
        hosts=(HostSlots(address="10.0.0.1", slots=1, pod="pod-0"),),
        versions={"torch": "2.13.0", "python": evil},
        command=f"sh -c {evil}",
        started_s=10.0,
        ended_s=20.0,
        error=error if state is RunState.FAILED else None,
    )
    paths.result.write_text(json.dumps(result.to_dict(), default=str))
    return RunResult.load(root)


class Page(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_card_holds_everything(tmp_path: Path) -> None:
    result = make_run(tmp_path / "run-1")
    written = result.to_html(tmp_path / "card.html")
    assert written == tmp_path / "card.html"
    text = html.unescape(re.sub(r"<[^>]+>", " ", written.read_text()))
    for fact in (
        "Run run-1: tiny-t5 zero1, succeeded",
        "training loss",
        "the last words",
        "20 answers, 0.0 % exactly right",
        "FLOPS profile, step 5",
        "than the trainer's 99",
        "encoder",
        "10.0.0.1 slots=1",
        '"steps_per_print": 7',
        "2.13.0",
        "1970-01-01 00:00:10 UTC",
        '"kind": "finetune"',
        ".venv/bin/python train.py",
        "Repetition(TokenTrainer)",
    ):
        assert fact in text, fact
    assert "<svg" in written.read_text()


def test_the_card_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = make_run(tmp_path / "run-1").to_html(tmp_path / "card.html").read_text()
    for tag, attributes in Page(page).tags:
        assert tag not in ("script", "link", "iframe", "object", "img", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert value is not None and value.startswith(("data:", "#"))
    assert "default-src 'none'" in page
    assert "@import" not in page


@pytest.mark.parametrize("state", [RunState.SUCCEEDED, RunState.FAILED])
def test_foreign_text_stays_text(tmp_path: Path, state: RunState) -> None:
    page = (
        make_run(tmp_path / "run-1", evil=EVIL, state=state)
        .to_html(tmp_path / "card.html")
        .read_text()
    )
    tags = Page(page).tags
    assert not [tag for tag, _ in tags if tag in ("script", "img")]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert str(escape(EVIL)) in page


def test_the_files_come_out_by_the_line_that_the_card_shows(tmp_path: Path) -> None:
    forged = '<a id="files" href="data:application/zip;base64,AAAA"'
    written = make_run(tmp_path / "run-1", evil=f"x\n{forged}\n").to_html(tmp_path / "my card.html")
    shown = re.findall(r"<pre[^>]*>(sed .*?)</pre>", written.read_text(), re.DOTALL)
    (commands,) = map(html.unescape, shown)
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, check=True)
    with zipfile.ZipFile(io.BytesIO((tmp_path / "repeat.zip").read_bytes())) as archive:
        assert {"train.py", "job.json", "train.jsonl"} <= set(archive.namelist())
    assert (tmp_path / "repeat" / "train.py").exists()


def test_a_run_of_which_little_is_left_has_a_card_too(tmp_path: Path) -> None:
    result = make_run(tmp_path / "run-1")
    paths = RunPaths(result.path)
    paths.profile.write_text("no report")
    paths.predictions.write_text("{")
    for path in (paths.info, paths.spec, paths.job, paths.deepspeed, paths.hostfile, paths.events):
        path.unlink()
    text = html.unescape(result.to_html(tmp_path / "card.html").read_text())
    assert "no FLOPS profile:" in text
    assert "no answers:" in text
    assert says(text, "curves and logs")
    assert "evaluation loss" in text


def test_a_card_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    result = make_run(tmp_path / "run-1")
    with pytest.raises(RunError, match=sentence("cannot be written to")):
        result.to_html(tmp_path / "none" / "card.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match=sentence("cannot be written to")):
        result.to_html(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match=sentence("is a device or a pipe; name a file")):
        result.to_html(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo(), "the device /dev/null was replaced by a file"
    (tmp_path / "pipe").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run-1"]
    (tmp_path / "card.html").write_text("old")
    assert result.to_html(tmp_path / "card.html").read_text() != "old"
    with pytest.raises(RunError, match=sentence("not a run directory")):
        RunResult(path=tmp_path / "gone", state=RunState.LOST).to_html(tmp_path / "card.html")
