"""A metric of the user's own that its file shows to be wrong is refused before pods start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec

GOOD = """
raise SystemExit("it was run")
if True:
    import json as loaded
def score(predictions, references, *, scale=1): return {}
def one(predictions): return {}
def three(a, b, c): return {}
"""
ROWS = {"kind": "wikisql-mini", "train_rows": 8, "eval_rows": 4}


def prepared(tmp_path: Path, **job: object) -> dict[str, object]:
    options = {"dataset": ROWS, **job}
    run = prepare_run(
        RunSpec(job=FineTune(**options), cluster=ClusterSpec()), root=tmp_path / "run"
    )  # type: ignore[arg-type]
    return dict(json.loads(run.paths.job.read_text()))


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("absent.py:score", "cannot be read: No such file or directory; paths count from"),
        (
            "good.py:scor",
            "the function 'scor' is not known: did you mean "
            "'score'? Allowed: loaded, score, one, three",
        ),
        ("good.py:one", "one in {} must take two lists, predictions and references"),
        ("good.py:three", "three in {} must take two lists, predictions and references"),
        ("broken.py:score", "line 1 is not Python"),
        ("binary.py:score", "is not a Python file"),
        ("large.py:score", "is larger than 1 MiB"),
    ],
)
def test_a_metric_that_cannot_work_is_refused_and_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "broken.py").write_text("def score(:\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    (tmp_path / "large.py").write_text("#" * (1 << 21))
    with pytest.raises(ConfigError, match=re.escape(words.format(tmp_path / "good.py"))):
        prepared(tmp_path, metrics=[metric])
    assert not (tmp_path / "run").exists()


def test_the_source_of_a_metric_and_the_tables_of_the_rows_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text(GOOD)
    resolved = prepared(tmp_path, metrics=["good.py:score", "execution_match"], metric_rows=1)
    assert resolved["job"]["metrics"] == [f"{tmp_path}/good.py:score", "execution_match"]  # type: ignore[index]
    sent = dict(resolved["metric_inputs"])  # type: ignore[call-overload]
    assert sent["metrics"] == [{"path": f"{tmp_path}/good.py", "function": "score", "source": GOOD}]
    (row, *_) = (tmp_path / "run" / "inputs" / "eval.jsonl").read_text().splitlines()
    assert [table["id"] for table in sent["tables"]] == [json.loads(row)["table_id"]]


def test_execution_match_needs_tables(tmp_path: Path) -> None:
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text('{"source": "a", "target": "b"}\n')
    with pytest.raises(
        ConfigError, match=sentence("and the dataset has no tables to run queries on")
    ):
        prepared(tmp_path, dataset=str(tmp_path), metrics=["execution_match"])
