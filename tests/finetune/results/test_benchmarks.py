"""A run's model evaluated by lm-eval on two pods, with task files of one's own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from workbench import Cluster, FineTune, LocalPods, PodSpec, Run, compare, history
from workbench.errors import ConfigError, RunFailed
from workbench.finetune.notebook.run import FineTuneRun

pytestmark = [pytest.mark.slow, pytest.mark.long]
CHOICE = """
task: mine_choice
dataset_path: json
dataset_kwargs: {data_files: {test: choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
WRITE = """
task: mine_write
dataset_path: json
dataset_kwargs: {data_files: {test: write.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["</s>"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
  - {metric: bleu, aggregation: bleu, higher_is_better: true}
"""
NAMES = ("red", "green", "blue", "black", "white")
# lm-eval alone, in one process, on the folder of the model.
DIRECTLY = """
import json, os, sys
folder, include, seed = json.loads(sys.argv[1])
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer
from workbench.finetune.model import load as model
tokenizer = AutoTokenizer.from_pretrained(folder)
base = model.load("tiny-llama", (), seed=seed, tokenizer=tokenizer).model
os.chdir(include)
tasks = TaskManager(include_path=include, include_defaults=False)
for which, model, words in (("base", base, tokenizer), ("trained", folder, folder)):
    lm = HFLM(pretrained=model, tokenizer=words, batch_size=1, device="cpu")
    found = simple_evaluate(model=lm, tasks=["mine_choice", "mine_write"], task_manager=tasks)
    print("RESULTS " + json.dumps([which, found["results"]], default=str))
"""


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two task files and their rows."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "choice.yaml").write_text(CHOICE)
    (folder / "write.yaml").write_text(WRITE)
    choices = []
    for number in range(20):
        right = number % len(NAMES)
        asked = f"Colour {number}?\n"
        choices.append({"question": asked, "choices": NAMES, "answer": right})
    written = []
    for number, row in enumerate(choices[:7]):
        written.append({"question": row["question"], "target": NAMES[number % len(NAMES)]})
    for name, rows in {"choice": choices, "write": written}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("benchmarks")
    spec = PodSpec(cpus=1, env={"HF_DATASETS_CACHE": str(folder / "cache")})
    # Models and task files are sent, as to pods that see no folder of this machine.
    options = {"count": 2, "path": folder / "c", "shared": False}
    with Cluster(LocalPods(), spec, **options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> FineTuneRun:
    """A run that learned half of the answers."""
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [
        {"source": f"Colour {number}?", "target": NAMES[number % 5]} for number in range(0, 20, 2)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = FineTune(
        model="tiny-llama",
        dataset=str(rows),
        technique="ddp",
        max_steps=40,
        learning_rate=5e-3,
        per_device_train_batch_size=4,
        eval_steps=None,
        seed=7,
    )
    made = cluster.submit(job)
    made.wait(300, progress=False).raise_for_status()
    assert isinstance(made, FineTuneRun)
    return made


def directly(run: Run, include: Path) -> Mapping[str, Any]:
    request = json.dumps([str(run.paths.model), str(include), 7])
    command = [sys.executable, "-c", DIRECTLY, request]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert len(lines) == 2, done.stderr[-3000:]
    return dict(json.loads(line.removeprefix("RESULTS ")) for line in lines)


def test_the_figures_on_two_pods_are_those_of_lm_eval_itself(
    cluster: Cluster, run: FineTuneRun, include: Path
) -> None:
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    scores = run.evaluate(["mine_choice", "mine_write"], include_path=include, progress=False)
    results = directly(run, include)
    found = {(score.task, score.metric): score for score in scores}
    assert set(found) == {
        ("mine_choice", "acc"),
        ("mine_choice", "acc_norm"),
        ("mine_write", "exact_match"),
        ("mine_write", "bleu"),
    }
    for (task, metric), score in found.items():
        assert score.base == pytest.approx(results["base"][task][f"{metric},none"])
        assert score.trained == pytest.approx(results["trained"][task][f"{metric},none"])
        if metric != "bleu":  # drawn at random
            expected = results["trained"][task][f"{metric}_stderr,none"]
            assert score.stderr == pytest.approx(expected)
    choice, write = found["mine_choice", "acc"], found["mine_write", "exact_match"]
    assert (choice.rows, write.rows, choice.better) == (20, 7, "greater")
    # It has learned, so both models were asked.
    assert write.base == 0.0
    assert write.trained > 0.4
    assert choice.difference == choice.trained - choice.base
    # The run is as before, but for the figures.
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert set(after) - set(before) == {run.paths.benchmarks}
    assert {path: after[path] for path in before} == before
    assert run.result.benchmarks == (scores,)
    for text in (str(scores), scores._repr_html_()):
        assert "mine_choice" in text
        assert "higher is better" in text
        assert scores.run_id in text
    row = history(cluster.path).to_dataframe().set_index("id").loc[run.id]
    assert row["metric.mine_write exact_match"] == write.trained
    assert row["metric.mine_write exact_match before"] == 0.0
    frame = scores.to_dataframe()
    assert list(frame["difference"]) == [score.difference for score in scores]
    # Another run beside it, without figures.
    assert "mine_choice acc" in str(compare([run.path, cluster.runs[-1].path]))


def test_adapters_are_evaluated_on_their_base(
    cluster: Cluster, run: FineTuneRun, include: Path
) -> None:
    job = FineTune(
        model=str(run.paths.model),
        dataset=run.spec.job.dataset,  # type: ignore[attr-defined]
        technique="single",
        peft="lora",
        lora={"target_modules": "all-linear"},
        max_steps=20,
        learning_rate=2e-2,
        eval_steps=None,
    )
    tuned = cluster.submit(job, pods=1)
    tuned.wait(300, progress=False).raise_for_status()
    assert isinstance(tuned, FineTuneRun)
    scores = tuned.evaluate(["mine_write"], include_path=include, limit=3, pods=1, progress=False)
    [match] = [score for score in scores if score.metric == "exact_match"]
    assert (match.name, match.rows) == ("mine_write exact_match, limit=3", 3)
    assert match.base == pytest.approx(2 / 3)
    assert match.trained == pytest.approx(2 / 3)


def test_a_failed_evaluation_leaves_the_run_as_it_is(
    cluster: Cluster, run: FineTuneRun, tmp_path: Path
) -> None:
    # The name is known, so only the ranks find out that the rows are missing.
    (tmp_path / "gone.yaml").write_text(CHOICE.replace("choice.jsonl", "gone.jsonl"))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(RunFailed, match=r"gone\.jsonl"):
        run.evaluate(["mine_choice"], include_path=tmp_path, before=False, pods=1, progress=False)
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    assert run.state == "succeeded"


def test_what_cannot_be_evaluated_is_refused_before_pods_are_asked(
    cluster: Cluster, run: FineTuneRun, include: Path, tmp_path: Path
) -> None:
    runs = len(cluster.runs)
    # lm-eval passes over a file that is no YAML, so its task stays unknown. All names in one call:
    # each looks for unknown names among thousands of lm-eval's own.
    shutil.copytree(include, tmp_path / "mixed")
    (tmp_path / "mixed" / "broken.yaml").write_text("task: [")
    with pytest.raises(ConfigError, match="does not know the tasks 'mine_choise'") as refused:
        run.evaluate(["mine_choise", "mine_broken", "mine_write"], include_path=tmp_path / "mixed")
    assert "nearest: mine_choice" in str(refused.value)
    assert "'mine_broken'" in str(refused.value)
    assert "'mine_write'" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"include_path '.*absent' does not exist"):
        run.evaluate(["mine_choice"], include_path=tmp_path / "absent")
    with pytest.raises(ConfigError, match="is no folder on this machine"):
        run.evaluate(["mine_choice"], include_path=tmp_path / "mixed" / "broken.yaml")
    with pytest.raises(ConfigError, match="tasks is a single name"):
        run.evaluate("mine_choice")
    with pytest.raises(ConfigError, match="limit"):
        run.evaluate(["mine_choice"], limit=0)
    with pytest.raises(ConfigError, match="limit is 1, and lm-eval needs a row for each"):
        run.evaluate(["mine_choice"], include_path=include, limit=1)
    assert len(cluster.runs) == runs


def test_a_pod_without_lm_eval_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.finetune.lm_eval import rank

    monkeypatch.setattr(rank, "find_spec", lambda name: None if name == "lm_eval" else 1)
    with pytest.raises(ConfigError, match=r"PodSpec\(pip=\['lm-eval'\]\)"):
        rank._run(Path("/"))


def test_figures_of_rows_travel_as_json() -> None:
    import numpy

    from workbench.finetune.lm_eval.rank import _figures, _listed, _number

    figures = {"a": {("acc", "none"): [numpy.float64(0.5), True], ("bleu", "x"): [("r", "p")]}}
    sent = json.dumps(_listed(figures), default=_number)
    expected = {"a": {("acc", "none"): [0.5, True], ("bleu", "x"): [["r", "p"]]}}
    assert _figures(json.loads(sent)) == expected
