"""What a script writes for TensorBoard, by torch or tensorboardX, stands in the panel too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.agent.rank import trainer_events
from workbench.agent.rank.trainer_events import _evaluated, _figure, _Figures, stop_callback
from workbench.base import entries
from workbench.rundir.events import MARK

ROOT = Path(__file__).parent.parent.parent
LOOP = """
from WRITER import SummaryWriter

writer, valid = SummaryWriter("logs"), SummaryWriter("logs/valid")
for step in range(1, 2001):
    writer.add_scalar("Loss/train", 8 / step, step)
    writer.add_scalar("lr", 1e-3, step)
    writer.add_scalar("weights/std", 0.5, step)
    if step % 1000 == 0:
        valid.add_scalar("loss", 16 / step, step)
        writer.add_scalars("accuracy", {"val": step / 4000, "best": 1}, step)
"""


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("Loss/train", "loss"),
        ("train_loss", "loss"),
        ("lr", "learning_rate"),
        ("train/grad_norm", "grad_norm"),
        ("val_loss", "eval_loss"),
        ("Loss/test", "eval_loss"),
        ("eval/accuracy", "eval_accuracy"),
        ("eval", ""),
        ("val/准确率", "eval_准确率"),
        ("召回率/val", "eval_召回率"),
        ("Test/точность", "eval_точность"),
        ("val/größe", "eval_größe"),
        ("dev/हिन्दी", "eval_हिन्दी"),
        ("layer1/std", ""),
        ("loss/layer1", ""),
    ],
)
def test_a_tag_has_a_name_in_the_panel_or_is_tensorboards_alone(tag: str, name: str) -> None:
    assert _figure(tag) == name


@contextmanager
def logged() -> Iterator[dict[str, float]]:
    """Yield the last values of the figures that are reported inside."""
    last: dict[str, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.rundir.events.log", lambda _step, **values: last.update(values))
        yield last


def reported(*steps: dict[str, float]) -> dict[str, float]:
    """Return the last values of the figures that scalars of several steps become."""
    figures = _Figures()
    with logged() as last:
        for step, scalars in enumerate(steps):
            for tag, value in scalars.items():
                figures.take(tag, value, step)
        figures.report(True)
    return last


@pytest.mark.parametrize("order", [("val/loss", "test/loss"), ("test/loss", "val/loss")])
def test_a_validation_and_a_test_of_one_step_are_two_figures(order: tuple[str, str]) -> None:
    values = {"val/loss": 0.33, "test/loss": 12.0}
    assert reported({tag: values[tag] for tag in order}) == {
        "eval_loss": 0.33,
        "eval_test_loss": 12.0,
    }
    assert reported({"Loss/test": 2.0}) == {"eval_loss": 2.0}, "a loop without a validation"


WORDS = st.sampled_from(["val", "test", "loss", "Loss", "acc", "准确率", "größe", "train", "lr"])
TAGS = st.lists(WORDS, min_size=1, max_size=3).flatmap(
    lambda words: st.sampled_from(["/", "_", ".", " "]).map(lambda between: between.join(words))
)


@given(st.lists(st.lists(TAGS, min_size=1, max_size=5), min_size=1, max_size=3))
def test_distinct_tags_have_distinct_names(steps: list[list[str]]) -> None:
    tags = sorted({tag for step in steps for tag in step})
    numbers = {tag: float(n) for n, tag in enumerate(tags)}
    seen: set[float] = set()
    figures = _Figures()
    shown = {tag for tag in numbers if _figure(tag)}
    for step in steps:
        for tag in step:
            figures.take(tag, numbers[tag], 1)
        with logged() as values:
            figures.report(True)
        seen.update(values.values())
    assert seen == {numbers[tag] for tag in shown}
    names = [figures._names[tag] for tag in shown]
    assert len({*names}) == len(names)


def test_a_trainer_s_evaluation_of_any_prefix_is_reported() -> None:
    logs = {"test_loss": 1.0, "test_runtime": 3.0, "test_samples_per_second": 2.0, "epoch": 1.0}
    assert _evaluated(logs) == {"eval_test_loss": 1.0}
    assert _evaluated({"eval_news_loss": 1.0, "eval_news_runtime": 3.0}) == {"eval_news_loss": 1.0}
    assert _evaluated({"lr": 1.0}) == {}


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["torch.utils.tensorboard", "tensorboardX"])
def test_losses_and_evaluations_of_a_loop_are_reported_by_step_and_not_every_one(
    writer: str, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(LOOP.replace("WRITER", writer))
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / entries.SCRIPT_SITE}:{ROOT}",
        "RANK": "0",
        "WORKBENCH_RUN": "r",
    }
    command = [sys.executable, "-u", "loop.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=True
    )
    events = [
        json.loads(line.removeprefix(MARK))
        for line in ended.stdout.splitlines()
        if line.startswith(MARK)
    ]
    steps = [event for event in events if event["kind"] == "step"]
    assert steps[-1] | {"time_s": 0} == {
        "time_s": 0,
        "rank": 0,
        "kind": "step",
        "step": 2000,
        "loss": 0.004,
        "learning_rate": 0.001,
    }
    assert all(event["loss"] == 8 / int(str(event["step"])) for event in steps)
    assert len(steps) < 500
    assert [
        (event["step"], event["eval_loss"], event["metrics"])
        for event in events
        if event["kind"] == "eval"
    ] == [
        (1000, 0.016, {"accuracy": 0.25}),
        (2000, 0.008, {"accuracy": 0.5}),
    ]
    files = sorted(
        str(file.parent.relative_to(tmp_path)) for file in tmp_path.rglob("events.out.*")
    )
    of_several = (
        ["logs/accuracy_best", "logs/accuracy_val"]
        if writer != "tensorboardX"
        else ["logs/accuracy/best", "logs/accuracy/val"]
    )
    assert files == ["logs", *of_several, "logs/valid"]


class Torch(SimpleNamespace):
    """torch.distributed of several ranks, as far as they agree by its store."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        store = SimpleNamespace(
            set=self.kept.__setitem__,
            get=lambda key: self.kept[key].encode(),
            check=lambda keys: keys[0] in self.kept,
        )
        c10d = SimpleNamespace(_get_default_store=lambda: store)
        super().__init__(
            distributed=SimpleNamespace(
                is_initialized=lambda: True, get_world_size=lambda: 2, distributed_c10d=c10d
            )
        )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_ranks_of_a_trainer_end_after_the_same_step(
    order: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch())
    folders = [tmp_path / str(rank) for rank in range(2)]
    ranks = []
    for folder in folders:
        folder.mkdir()
        ranks.append(stop_callback(object, folder)())
        ranks[-1].on_train_begin()
        assert (folder / "trainer-listens").exists()
    ended: dict[int, int] = {}
    for step in range(1, 6):
        if step == 3:
            for folder in folders:
                (folder / "trainer-asked").touch()
        for rank in order:
            monkeypatch.setenv("RANK", str(rank))
            control = SimpleNamespace(should_training_stop=False)
            ranks[rank].on_step_end(None, SimpleNamespace(global_step=step), control)
            if control.should_training_stop:
                ended.setdefault(rank, step)
    assert ended == {0: 4, 1: 4}
    for each, folder in zip(ranks, folders, strict=True):
        each.on_train_end()
        # An agent that hears of the stop only now must
        # not signal a rank that saves its model already.
        assert (folder / "trainer-listens").exists()


def test_a_trainer_that_ended_by_itself_leaves_a_later_stop_to_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch())
    callback = stop_callback(object, tmp_path)()
    callback.on_train_begin()
    callback.on_step_end(
        None, SimpleNamespace(global_step=1), SimpleNamespace(should_training_stop=False)
    )
    callback.on_train_end()
    assert not (tmp_path / "trainer-listens").exists()


def test_a_trainer_that_cannot_ask_the_others_leaves_it_to_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    callback = stop_callback(object, tmp_path)()
    callback.on_train_begin()
    callback.on_step_end(None, SimpleNamespace(global_step=1), SimpleNamespace())
    assert not (tmp_path / "trainer-listens").exists()


def test_steps_that_are_not_logged_are_reported_once_a_second_and_the_last_one_always(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(trainer_events.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORKBENCH_RUN", "r")
    monkeypatch.delenv("WORKBENCH_RANK_DIR", raising=False)
    trainer = SimpleNamespace(TrainerCallback=object, DEFAULT_CALLBACKS=[])
    trainer_events._add(trainer)
    callback = trainer.DEFAULT_CALLBACKS[-1]()
    args = SimpleNamespace(train_batch_size=6, gradient_accumulation_steps=1, world_size=1)
    state = SimpleNamespace(global_step=0, max_steps=12, epoch=0.0)
    callback.on_train_begin(args, state, SimpleNamespace())
    for step in range(1, 13):
        now[0] += 0.3
        state.global_step = step
        callback.on_step_end(
            args, state, SimpleNamespace(should_log=step == 6, should_training_stop=False)
        )
        if step == 6:
            callback.on_log(args, state, SimpleNamespace(), logs={"loss": 2.0})
    callback.on_train_end(args, state, SimpleNamespace())
    lines = capfd.readouterr().out.splitlines()
    events = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    assert [(event["step"], event.get("loss")) for event in events] == [
        (1, None),
        (5, None),
        (6, 2.0),
        (10, None),
        (12, None),
    ]
    assert {event["max_steps"] for event in events} == {12}
    assert {event["train_samples_per_s"] for event in events} == {20.0}
