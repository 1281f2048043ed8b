"""What a script's Trainer and TensorBoard report of a run, with pretended modules. No process."""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from workbench.agent.rank import trainer_events
from workbench.agent.rank.trainer_events import changes, stop_callback
from workbench.rundir.events import MARK

Events = Callable[[], list[dict[str, Any]]]
Import = Callable[[Any], None]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(trainer_events, "time", made)
    monkeypatch.setattr(trainer_events, "_was_reported", [])
    monkeypatch.setattr(trainer_events, "_trainers", [])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORKBENCH_RUN", "r1")
    monkeypatch.delenv("WORKBENCH_RANK_DIR", raising=False)
    return made


@pytest.fixture
def events(capfd: pytest.CaptureFixture[str]) -> Events:
    """Return the events since the last call, without their times and ranks."""

    def read() -> list[dict[str, Any]]:
        lines = capfd.readouterr().out.splitlines()
        found = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
        return [
            {key: value for key, value in event.items() if key not in ("time_s", "rank")}
            for event in found
        ]

    return read


def trainer_module() -> Any:
    module = SimpleNamespace(TrainerCallback=object, DEFAULT_CALLBACKS=[])
    changes()["transformers.trainer"](module)
    return module


class Training:
    """A Trainer with the callback of rank 0, which takes steps of a second."""

    def __init__(self, clock: Clock, max_steps: int = 100) -> None:
        self.clock = clock
        self.callback = trainer_module().DEFAULT_CALLBACKS[-1]()
        self.args = SimpleNamespace(train_batch_size=6, gradient_accumulation_steps=2, world_size=3)
        self.state = SimpleNamespace(global_step=0, max_steps=max_steps, epoch=None)
        self.begin()

    def begin(self, step: int = 0) -> None:
        self.state.global_step = step
        self.callback.on_train_begin(self.args, self.state, None)

    def step(
        self, *, seconds: float = 1.0, stops: bool = False, logs: dict[str, Any] | None = None
    ) -> None:
        self.clock.pass_s(seconds)
        self.state.global_step += 1
        control = SimpleNamespace(should_log=logs is not None, should_training_stop=stops)
        self.callback.on_step_end(self.args, self.state, control)
        if logs is not None:
            self.log(logs)

    def log(self, logs: dict[str, Any] | None) -> None:
        self.callback.on_log(self.args, self.state, None, logs=logs)

    def evaluate(self, seconds: float) -> None:
        self.clock.pass_s(seconds)
        self.callback.on_evaluate(self.args, self.state, None)

    def end(self) -> None:
        self.callback.on_train_end(self.args, self.state, None)


@pytest.fixture
def training(clock: Clock) -> Training:
    return Training(clock)


def test_a_step_has_its_place_and_the_mean_rate(training: Training, events: Events) -> None:
    training.state.epoch = 0.123456
    training.step(seconds=2.0)
    # 6 rows of 3 ranks, twice a step
    assert events() == [
        {
            "kind": "step",
            "step": 1,
            "max_steps": 100,
            "epoch": 0.1235,
            "train_samples_per_s": 18.0,
        }
    ]
    training.state.epoch = None
    training.step(seconds=7.0)
    (event,) = events()
    assert event["epoch"] == 0.0 and event["train_samples_per_s"] == 8.0


def test_steps_are_reported_once_a_second(training: Training, events: Events) -> None:
    training.step(seconds=0.25)
    assert len(events()) == 1, "the first is reported at once"
    for _ in range(3):
        training.step(seconds=0.25)
    assert events() == []
    training.step(seconds=0.25)
    assert [event["step"] for event in events()] == [5]


def test_the_last_step_is_reported_at_once(clock: Clock, events: Events) -> None:
    training = Training(clock, max_steps=3)
    for _ in range(3):
        training.step(seconds=0.01)
    assert [event["step"] for event in events()] == [1, 3]
    training.end()
    assert events() == []
    training = Training(clock)
    training.step(seconds=0.01)
    training.step(seconds=0.01, stops=True)
    assert [event["step"] for event in events()] == [1, 2]


def test_a_training_that_an_evaluation_ended_reports_its_last_step(
    training: Training, events: Events
) -> None:
    for _ in range(3):
        training.step(seconds=0.01)
    training.end()
    assert [event["step"] for event in events()] == [1, 3]


def test_a_training_without_a_step_has_no_rate(training: Training, events: Events) -> None:
    training.end()
    assert events() == [{"kind": "step", "step": 0, "max_steps": 100, "epoch": 0.0}]


def test_a_logged_step_has_its_loss_and_the_rates(training: Training, events: Events) -> None:
    training.step(seconds=2.0, logs={"loss": 3.0, "learning_rate": 0.5, "epoch": 0.5})
    assert events() == [
        {
            "kind": "step",
            "step": 1,
            "max_steps": 100,
            "samples_per_s": 18.0,
            "train_samples_per_s": 18.0,
            "loss": 3.0,
            "learning_rate": 0.5,
            "epoch": 0.5,
        }
    ]
    training.step(seconds=0.5)
    assert events() == [], "a logged step is a report, too"
    training.step(seconds=0.5, logs={"loss": 2.0})
    (event,) = events()
    assert event["samples_per_s"] == 72.0, "of the two steps since the last"
    assert event["train_samples_per_s"] == 36.0, "of all three"
    training.step(seconds=0.6)
    training.step(seconds=0.6)
    (event,) = events()
    assert event["step"] == 5 and event["train_samples_per_s"] == pytest.approx(5 * 36 / 4.2, 1e-4)
    training.step(seconds=0.1, logs={"loss": 1.0})
    events()
    training.end()
    assert events() == [], "the last step was reported with its loss"


def test_a_continued_training_counts_its_own_steps(training: Training, events: Events) -> None:
    training.begin(50)
    training.step(seconds=2.0, logs={"loss": 3.0})
    (event,) = events()
    assert event["step"] == 51 and event["samples_per_s"] == 18.0
    training.begin(80)
    training.step(seconds=1.0)
    (event,) = events()
    assert event["train_samples_per_s"] == 24.0, "the steps of both trainings"


def test_a_second_training_reports_its_first_step_at_once(
    training: Training, events: Events
) -> None:
    training.step()
    events()
    training.begin()
    training.step(seconds=0.01)
    assert [event["step"] for event in events()] == [1]
    # Not even a step of the same number was reported in this training.
    training.begin(1)
    training.end()
    assert [event["step"] for event in events()] == [1]


def test_an_evaluation_is_no_time_of_steps(training: Training, events: Events) -> None:
    training.step(seconds=1.0, logs={"loss": 3.0})
    training.evaluate(50.0)
    training.step(seconds=2.0, logs={"loss": 2.0})
    first, second = events()
    assert (first["samples_per_s"], second["samples_per_s"]) == (36.0, 18.0)
    assert second["train_samples_per_s"] == 24.0


def test_a_loss_before_the_training_has_no_steps(
    training: Training, events: Events, clock: Clock
) -> None:
    training.callback = trainer_module().DEFAULT_CALLBACKS[-1]()
    clock.pass_s(1.0)
    training.log({"loss": 3.0})
    (event,) = events()
    assert (event["step"], event["samples_per_s"]) == (0, 0.0)


def test_a_rate_has_three_digits(training: Training, events: Events) -> None:
    training.step(seconds=0.7)
    (event,) = events()
    assert event["train_samples_per_s"] == 51.429


def test_a_step_in_no_time_has_a_rate(training: Training, events: Events) -> None:
    training.step(seconds=0.0)
    (event,) = events()
    assert event["train_samples_per_s"] == pytest.approx(36e9)


def test_an_evaluation_is_reported_without_its_speed(training: Training, events: Events) -> None:
    training.step()
    events()
    training.log({"eval_loss": 2.5, "eval_f1": 0.5, "eval_runtime": 9.0, "epoch": 1.0})
    assert events() == [{"kind": "eval", "step": 1, "eval_loss": 2.5, "metrics": {"f1": 0.5}}]
    for logs in ({"eval_samples_per_second": 3.0, "eval_jit_compilation_time": 1}, {}, None):
        training.log(logs)
    training.log({"epoch": 1.0, "other": 2.0})
    assert events() == []


def test_the_end_has_the_trainings_own_mean_rate(training: Training, events: Events) -> None:
    training.step(seconds=2.0, logs={"loss": 3.0})
    training.evaluate(50.0)
    events()
    training.log({"train_runtime": 52.0, "train_loss": 3.0, "epoch": 0.5, "train_steps": 9})
    assert events() == [
        {
            "kind": "end",
            "steps": 1,
            "epochs": 0.5,
            "train_loss": 3.0,
            "train_runtime_s": 52.0,
            "train_samples_per_s": 18.0,
        }
    ]


def test_an_error_of_a_report_is_printed_once_and_stops_no_training(
    training: Training, capfd: pytest.CaptureFixture[str]
) -> None:
    del training.args.world_size
    for _ in range(3):
        training.step()
    assert capfd.readouterr().err.count("AttributeError") == 1


@pytest.mark.parametrize(
    ("rank", "folder", "callbacks"),
    [("0", True, 2), ("1", True, 1), ("0", False, 1), ("1", False, 0), ("", False, 0)],
)
def test_every_rank_may_be_stopped_and_rank_0_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str, folder: bool, callbacks: int
) -> None:
    monkeypatch.setenv("RANK", rank)
    if folder:
        monkeypatch.setenv("WORKBENCH_RANK_DIR", str(tmp_path))
    assert len(trainer_module().DEFAULT_CALLBACKS) == callbacks


def test_rank_0_alone_reports_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    writers = {"torch.utils.tensorboard.writer", "tensorboardX.writer"}
    assert changes().keys() == {"transformers.trainer", *writers}
    monkeypatch.setenv("RANK", "1")
    assert changes().keys() == {"transformers.trainer"}
    monkeypatch.delenv("RANK")
    assert changes().keys() == {"transformers.trainer"}


class SummaryWriter:
    """torch's writer, or tensorboardX's, which has another name for its folder."""

    kept: ClassVar[list[tuple[Any, ...]]]

    def __init__(self, folder: str, name: str = "log_dir") -> None:
        setattr(self, name, folder)

    def add_scalar(self, *args: Any, **options: Any) -> str:
        self.kept.append((*args, *options.values()))
        return "kept"

    def add_scalars(self, *args: Any) -> None:
        self.kept.append(args)


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What the process is to do at its end."""
    ends: list[Callable[[], None]] = []

    def register(action: Callable[..., None], *args: Any) -> None:
        ends.append(lambda: action(*args))

    monkeypatch.setattr(atexit, "register", register)
    return ends


@pytest.fixture
def writer(at_exit: list[Callable[[], None]]) -> type[SummaryWriter]:
    class Changed(SummaryWriter):
        kept: ClassVar[list[tuple[Any, ...]]] = []

        def add_scalar(self, *args: Any, **options: Any) -> str:
            return super().add_scalar(*args, **options)

        def add_scalars(self, *args: Any) -> None:
            super().add_scalars(*args)

    changes()["tensorboardX.writer"](SimpleNamespace(SummaryWriter=Changed))
    return Changed


def test_scalars_of_a_step_are_reported_together_at_the_next(
    writer: type[SummaryWriter], events: Events, at_exit: list[Callable[[], None]]
) -> None:
    train = writer("logs")
    assert train.add_scalar("Loss/train", 3.0, 1) == "kept"
    train.add_scalar("lr", 0.5, global_step=1)
    assert events() == []
    train.add_scalar("Loss/train", 2.0, 2)
    assert events() == [{"kind": "step", "step": 1, "loss": 3.0, "learning_rate": 0.5}]
    (end,) = at_exit
    end()
    assert events() == [{"kind": "step", "step": 2, "loss": 2.0}]
    end()
    assert events() == []
    assert train.kept == [("Loss/train", 3.0, 1), ("lr", 0.5, 1), ("Loss/train", 2.0, 2)]


def test_steps_in_quick_succession_are_not_all_reported(
    writer: type[SummaryWriter], events: Events, clock: Clock
) -> None:
    train = writer("logs")
    for step in range(10):
        train.add_scalar("loss", float(step), step)
        clock.pass_s(0.125)
    assert [event["step"] for event in events()] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("folder", "name", "tag", "value"),
    [
        ("logs/valid", "log_dir", "loss", {"eval_loss": 2.0, "metrics": {}}),
        ("logs/eval", "logdir", "accuracy", {"eval_loss": None, "metrics": {"accuracy": 2.0}}),
        ("logs", "log_dir", "val/f1", {"eval_loss": None, "metrics": {"f1": 2.0}}),
    ],
)
def test_evaluations_are_known_by_folder_or_tag_and_never_left_out(
    writer: type[SummaryWriter],
    events: Events,
    folder: str,
    name: str,
    tag: str,
    value: dict[str, Any],
) -> None:
    train = writer("logs")
    train.add_scalar("loss", 3.0, 1)
    writer(folder, name).add_scalar(tag, 2.0, 2)
    train.add_scalar("loss", 3.0, 3)
    assert events()[1:] == [{"kind": "eval", "step": 2, **value}]


def test_several_scalars_have_the_name_of_the_group(
    writer: type[SummaryWriter], events: Events, at_exit: list[Callable[[], None]]
) -> None:
    writer("logs").add_scalars("accuracy", {"val": 0.5, "best": 1.0}, 4)
    at_exit[0]()
    assert events() == [
        {"kind": "eval", "step": 4, "eval_loss": None, "metrics": {"accuracy": 0.5}}
    ]


def test_other_scalars_and_scalars_without_a_step_are_tensorboards_alone(
    writer: type[SummaryWriter], events: Events, at_exit: list[Callable[[], None]]
) -> None:
    train = writer("logs")
    train.add_scalar("weights/std", 0.5, 1)
    train.add_scalar("loss", 0.5)
    at_exit[0]()
    assert events() == [] and len(train.kept) == 2


def test_a_trainers_scalars_are_reported_by_its_callback(
    writer: type[SummaryWriter], clock: Clock, events: Events, at_exit: list[Callable[[], None]]
) -> None:
    Training(clock)
    writer("logs").add_scalar("loss", 3.0, 1)
    at_exit[0]()
    assert events() == []


def test_a_scalar_that_cannot_be_read_costs_no_training(
    writer: type[SummaryWriter], capfd: pytest.CaptureFixture[str]
) -> None:
    train = writer("logs")
    for _ in range(2):
        assert train.add_scalar("loss", 3.0, "no step") == "kept"
    assert capfd.readouterr().err.count("ValueError") == 1


class Distributed(SimpleNamespace):
    """torch.distributed of a world of some ranks, or none."""

    def __init__(self, world: int) -> None:
        self.kept: dict[str, str] = {}
        store = SimpleNamespace(
            set=self.kept.__setitem__,
            get=lambda key: self.kept[key].encode(),
            check=lambda keys: keys[0] in self.kept,
        )
        super().__init__(
            is_initialized=lambda: world > 0,
            get_world_size=lambda: world,
            distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
        )


def stopping(
    monkeypatch: pytest.MonkeyPatch, folder: Path, world: int, rank: str | None = "0"
) -> Callable[[int], bool]:
    """Return whether the training of a rank ends after a step."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=Distributed(world)))
    if rank is None:
        monkeypatch.delenv("RANK")
    else:
        monkeypatch.setenv("RANK", rank)
    callback = stop_callback(object, folder)()
    callback.on_train_begin()

    def ends(step: int) -> bool:
        control = SimpleNamespace(should_training_stop=False)
        callback.on_step_end(None, SimpleNamespace(global_step=step), control)
        return control.should_training_stop is True

    return ends


def test_an_agent_may_have_taken_the_mark_of_a_trainer_away(tmp_path: Path) -> None:
    callback = stop_callback(object, tmp_path)()
    callback.on_train_begin()
    (tmp_path / "trainer-listens").unlink()
    callback.on_train_end()


@pytest.mark.parametrize("world", [0, 1])
@pytest.mark.parametrize("rank", ["0", None])
def test_a_rank_alone_ends_after_the_step_in_which_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: int, rank: str | None
) -> None:
    ends = stopping(monkeypatch, tmp_path, world, rank)
    assert not ends(1)
    (tmp_path / "trainer-asked").touch()
    assert ends(2) and ends(3)


def test_ranks_end_one_step_after_rank_0_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = stopping(monkeypatch, tmp_path, 2)
    assert not ends(1)
    (tmp_path / "trainer-asked").touch()
    assert [ends(step) for step in (2, 3, 4)] == [False, True, True]


def test_another_rank_ends_by_the_word_of_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = stopping(monkeypatch, tmp_path, 2, "1")
    (tmp_path / "trainer-asked").touch()
    assert not ends(1) and not ends(2)
    sys.modules["torch"].distributed.kept["workbench/stop-after"] = "4"
    assert [ends(step) for step in (3, 4)] == [False, True]
