"""The real child process, with a model of random weights in the place of a trained one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.poll import until
from tests.support.sentences import sentence
from workbench.base.errors import RunError
from workbench.base.files import read_json, write_json
from workbench.base.package import file_digest
from workbench.base.process import activity, is_alive, process_start_time
from workbench.finetune.answers.ask import chat, compare_predictions, predict
from workbench.finetune.answers.questions import Question
from workbench.finetune.answers.server import ModelServer, check_model, close_all, server_of
from workbench.finetune.data.sources.dataset import prepare
from workbench.finetune.data.wikisql.datasets import Mini
from workbench.finetune.export.folder import SHARD, export, merge
from workbench.finetune.export.gguf import check_gguf
from workbench.finetune.export.push import push
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.lm_eval.evaluate import evaluate
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord

A = [Question(source="a")]
MAKE = """
import sys, torch
from workbench.finetune.model import load as model
from workbench.finetune.data.training.rows import load
train = load(sys.argv[1] + "/inputs/train.jsonl", None, None).train
for number, folder in enumerate(sys.argv[1:]):
    made = model.load(("tiny-t5", "tiny-llama")[number], train, seed=0)
    torch.manual_seed(number)
    # A model as it was initialised answers nothing but padding.
    for weights in made.model.parameters():
        weights.data += torch.randn_like(weights)
    made.model.save_pretrained(folder + "/model")
    made.tokenizer.save_pretrained(folder + "/model")
"""


def make_run(root: Path, technique: str, **options: object) -> RunPaths:
    """A run directory without its model; the job's seed is 0."""
    paths = RunPaths(root)
    paths.inputs.mkdir(parents=True)
    prepare(Mini(train_rows=60, eval_rows=6), paths.inputs)
    job = FineTune(
        technique=technique, max_target_length=6, per_device_eval_batch_size=4, **options
    )
    paths.job.write_text(json.dumps({"job": job.to_dict()}))
    return paths


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, make_models: Callable[..., None]
) -> tuple[RunPaths, RunPaths]:
    folder = tmp_path_factory.mktemp("runs")
    one, other = (
        make_run(folder / "a", "zero1"),
        make_run(folder / "b", "fsdp", model="tiny-llama", prompt="alpaca"),
    )
    make_models(MAKE, str(one.root), str(other.root))
    return one, other


@pytest.fixture(scope="module", autouse=True)
def nothing_kept() -> Iterator[None]:
    """Close at the end: the tests that only ask share a process for each run."""
    yield
    close_all()


def as_run(paths: RunPaths) -> SimpleNamespace:
    return SimpleNamespace(id=paths.root.name, paths=paths)


def wait_gone(pid: int, start: int | None, timeout_s: float = 10.0) -> None:
    until(lambda: not is_alive(pid, start), timeout_s)


def killed(pid: int) -> tuple[int, int | None]:
    start = process_start_time(pid)
    os.kill(pid, signal.SIGKILL)
    return pid, start


def test_a_run_without_a_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=sentence("the run in {} left no model: the run has not ended, or failed")
    ):
        ModelServer(RunPaths(tmp_path))
    with pytest.raises(RunError, match=sentence("not a run directory")):
        server_of(RunPaths(tmp_path / "nowhere"))


def test_weights_that_are_not_those_of_the_manifest_are_refused(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "zero1")
    paths.model.mkdir()
    (paths.model / "config.json").write_text("{}")
    weights = paths.model / "model.safetensors"
    weights.write_bytes(b"weights")
    digests = {"model/model.safetensors": file_digest(weights), "model/../../x.safetensors": ""}
    write_json(paths.manifest, digests)
    check_model(paths)
    weights.write_bytes(b"weightz")
    damaged = sentence("has another SHA-256 of the weights")
    with pytest.raises(RunError, match=damaged):
        check_model(paths)
    weights.unlink()
    with pytest.raises(RunError, match="cannot be read"):
        check_model(paths)


def test_a_model_in_a_shared_folder_is_read_in_place(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "zero1")
    shared = RunPaths(tmp_path / "lustre" / paths.root.name)
    shared.model.mkdir(parents=True)
    write_json(paths.job, {**read_json(paths.job), "shared": str(shared.root)})
    paths.model.symlink_to(shared.model)
    (shared.model / "config.json").write_text("{}")
    weights = shared.model / "model.safetensors"
    weights.write_bytes(b"weights")
    write_json(paths.manifest, {"model/model.safetensors": file_digest(weights)})
    check_model(paths)
    weights.write_bytes(b"weightz")
    with pytest.raises(RunError, match=sentence("{} is damaged", weights)):
        check_model(paths)
    shared.root.parent.rename(tmp_path / "unmounted")
    with pytest.raises(RunError, match=sentence("stays in {}, and this machine", shared.model)):
        check_model(paths)


USES: dict[str, Callable[[RunPaths, Path], object]] = {
    "predict": lambda paths, _: predict(as_run(paths), [{"source": "a"}]),
    "compare": lambda paths, _: compare_predictions([as_run(paths), as_run(paths)]),
    "chat": lambda paths, _: chat(as_run(paths)),
    "export": lambda paths, to: export(paths, to, dtype=None, merged=True, max_shard_size="5GB"),
    "gguf": lambda paths, _: check_gguf(
        paths, "f16", dtype="bf16", merged=True, max_shard_size=SHARD
    ),
    "merge": merge,
    "push": lambda paths, _: push(
        ResultRecord.at(paths.root, {"state": "succeeded"}),
        "me/model",
        private=True,
        token=None,
        dtype=None,
        merged=True,
    ),
    "evaluate": lambda paths, _: evaluate(
        paths, ["arc_easy"], cluster=None, pods=None, progress=False
    ),
}


@pytest.mark.parametrize("use", USES)
def test_damaged_weights_are_used_by_nothing(use: str, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "zero1", peft="lora")
    paths.model.mkdir()
    (paths.model / "adapter_config.json").write_text("{}")
    weights = paths.model / "adapter_model.safetensors"
    weights.write_bytes(b"weightz")
    # Of the same size: only the digest tells.
    digest = hashlib.sha256(b"weights").hexdigest()
    write_json(paths.manifest, {"model/adapter_model.safetensors": digest})
    with pytest.raises(RunError, match=sentence("has another SHA-256 of the weights")):
        USES[use](paths, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_model_with_more_layers_than_any_other_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path)
    paths.model.mkdir()
    paths.inputs.mkdir()
    paths.job.write_text("{}")
    (paths.model / "config.json").write_text(json.dumps({"num_hidden_layers": 10**7}))
    with pytest.raises(RunError, match="num_hidden_layers = 10000000"):
        ModelServer(paths)


@pytest.mark.long
@pytest.mark.slow
def test_two_runs_and_the_untrained_model_answer(runs: tuple[RunPaths, RunPaths]) -> None:
    one, other = map(as_run, runs)
    answers = compare_predictions([one, other], before=True)
    assert list(answers.names) == ["before training", "zero1", "fsdp"]
    assert len(answers) == 6
    assert answers.texts("before training") == [""] * 6
    assert all(answers.texts("zero1"))
    assert answers.texts("zero1") != answers.texts("fsdp")
    assert all(row.table_id and row.answers[0].execution_match is not None for row in answers)
    assert answers.load_s > 0
    pid = server_of(runs[0]).pid
    rows = [row.source for row in reversed(answers.rows)]
    alone = [predict(one, [source]).texts()[0] for source in rows]
    # The same process, whose model is loaded, and answers that depend on no neighbour and no order.
    assert alone == list(reversed(answers.texts("zero1"))) == predict(one, rows).texts()
    assert server_of(runs[0]).pid == pid
    assert predict(one).load_s < answers.load_s
    assert predict(one, []).rows == ()


@pytest.mark.long
@pytest.mark.slow
def test_a_causal_model_answers_the_input_and_goes_on_with_an_opening(
    runs: tuple[RunPaths, RunPaths],
) -> None:
    llama = as_run(runs[1])
    asked = [{"instruction": "Which city?", "input": text} for text in ("", "a", "b c")]
    answers = predict(llama, asked, before=True)
    assert list(answers.names) == ["before training", "after training"]
    trained = answers.texts("after training")
    assert len(set(trained)) > 1
    assert not any("Response" in text for text in trained)
    opened = (
        server_of(runs[1])
        .answer([Question(source="", opening=text) for text in ("SELECT city", "SELECT")])
        .texts
    )
    assert all(opened)
    assert not any(text.startswith("SELECT city") for text in opened)


@pytest.mark.long
@pytest.mark.slow
def test_a_child_that_dies_is_told_with_its_last_words_and_replaced(
    runs: tuple[RunPaths, RunPaths],
) -> None:
    server = server_of(runs[0])
    first = server.answer(A)
    assert server.pid is not None
    threading.Timer(0.05, killed, [server.pid]).start()
    with pytest.raises(RunError, match=sentence("killed by signal", 9)):
        server.answer([Question(source="a b c d")] * 3000)
    with pytest.raises(
        RunError,
        match=sentence("the model of {} did not answer", "TypeError: sequence item"),
    ):
        server.answer([Question(source=5)])  # type: ignore[list-item]
    assert server.answer(A).texts == first.texts  # an error does not end it


@pytest.mark.long
@pytest.mark.slow
def test_a_broken_model_carries_the_childs_words_and_the_idle_child_ends(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.model.mkdir()
    paths.inputs.mkdir()
    (paths.model / "config.json").write_text('{"model_type": "t5"}')
    paths.job.write_text(json.dumps({"job": FineTune().to_dict()}))
    server = ModelServer(paths, idle_s=1.0)
    with pytest.raises(RunError, match=sentence("the model of {} did not answer", "OSError")):
        server.answer(A)
    assert server.pid is not None
    until(lambda: server.pid is None)
    server.close()
    paths.job.write_text("{}")
    with pytest.raises(RunError, match=r"exit code 1\)\n(.*\n)*KeyError: 'job'"):
        server.answer(A)


@pytest.mark.long
@pytest.mark.slow
def test_the_child_dies_with_a_killed_kernel(runs: tuple[RunPaths, RunPaths]) -> None:
    kernel = """
        import sys, time
        from pathlib import Path
        from workbench.finetune.answers.server import server_of
        from workbench.finetune.answers.questions import Question
        from workbench.rundir.paths import RunPaths
        server = server_of(RunPaths(Path(sys.argv[1])))
        server.answer([Question(source="a")])
        print(server.pid, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(kernel), str(runs[0].root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        start = process_start_time(pid)
        process.kill()
    wait_gone(pid, start)


@pytest.mark.long
@pytest.mark.slow
def test_an_interrupt_leaves_the_child_fit(runs: tuple[RunPaths, RunPaths]) -> None:
    server = server_of(runs[0])
    expected = server.answer(A).texts
    pid = server.pid
    main = threading.main_thread().ident
    assert pid is not None and main is not None

    def interrupt() -> None:
        """Interrupt once the child answers: this process waits then, and does nothing else."""
        until(lambda: activity(pid)[0] > before_s + 0.5, 180.0)
        signal.pthread_kill(main, signal.SIGINT)

    before_s, _ = activity(pid)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        server.answer([Question(source="What is the question?")] * 6000)
    assert server.answer(A).texts == expected  # not the late answer to the 6,000
    assert server.pid == pid
    server.close()
    assert server.pid is None
