"""What the trainer takes of transformers' private parts: a release must not change it unseen."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass

import pytest
from transformers import Trainer

from workbench.finetune.train import trainer as ours
from workbench.finetune.train.trainer import WorkbenchTrainerMixin


@dataclass(frozen=True)
class Hook:
    """A method of transformers' Trainer that the mixin overrides."""

    parameters: tuple[str, ...]
    caller: str
    """The method of the library that calls it."""
    arguments: tuple[str, ...] = ()
    """Arguments of that call, as its source has them; keyword arguments by their names."""


PRIVATE = {
    "_move_model_to_device": Hook(("model", "device"), "__init__", ("model", "args.device")),
    "_init_training_state": Hook(
        (
            "max_steps",
            "num_update_steps_per_epoch",
            "num_train_epochs",
            "resume_from_checkpoint",
            "trial",
        ),
        "_inner_training_loop",
        ("max_steps", "num_update_steps_per_epoch"),
    ),
    "_run_epoch": Hook(
        (
            "model",
            "epoch",
            "train_dataloader",
            "steps_in_epoch",
            "num_update_steps_per_epoch",
            "trial",
            "ignore_keys_for_eval",
            "start_time",
            "resume_from_checkpoint",
            "epochs_trained",
            "steps_trained_in_current_epoch",
        ),
        "_inner_training_loop",
        ("resume_from_checkpoint=",),
    ),
    "_prepare_input": Hook(("data",), "_prepare_inputs", ("inputs",)),
    "_clip_grad_norm": Hook(("model",), "_run_epoch", ("model",)),
    "_get_grad_norm": Hook(("model", "grad_norm"), "_run_epoch", ("model", "grad_norm=")),
    "_maybe_log_save_evaluate": Hook(
        (
            "tr_loss",
            "grad_norm",
            "model",
            "trial",
            "epoch",
            "ignore_keys_for_eval",
            "start_time",
            "learning_rate",
        ),
        "_run_epoch",
        ("self._tr_loss", "grad_norm"),
    ),
    "_save_checkpoint": Hook(("model", "trial"), "_maybe_log_save_evaluate", ("model", "trial")),
}
PUBLIC = {
    "create_accelerator_and_postprocess": Hook((), "__init__"),
    "create_optimizer": Hook(("model",), "_prepare_for_training"),
    "get_train_dataloader": Hook((), "_inner_training_loop"),
    "get_batch_samples": Hook(
        ("epoch_iterator", "num_batches", "device"), "_run_epoch", ("epoch_iterator", "num_batches")
    ),
    "training_step": Hook(
        ("model", "inputs", "num_items_in_batch"),
        "_run_epoch",
        ("model", "inputs", "num_items_in_batch"),
    ),
    "compute_loss": Hook(
        ("model", "inputs", "return_outputs", "num_items_in_batch"),
        "training_step",
        ("model", "inputs", "num_items_in_batch="),
    ),
    "get_tp_size": Hook((), "compute_loss"),
    "evaluate": Hook(("eval_dataset", "ignore_keys", "metric_key_prefix"), "_evaluate"),
}


def calls_of(caller: str, name: str) -> list[tuple[str, ...]]:
    """Return the arguments of each call `self.name(…)` in the source of a method of the library."""
    source = textwrap.dedent(inspect.getsource(getattr(Trainer, caller)))
    return [
        (*map(ast.unparse, node.args), *(f"{word.arg}=" for word in node.keywords))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{name}"
    ]


@pytest.mark.parametrize(("name", "hook"), [*PRIVATE.items(), *PUBLIC.items()])
def test_transformers_has_a_hook_as_it_was_and_calls_it(name: str, hook: Hook) -> None:
    _, *parameters = inspect.signature(getattr(Trainer, name)).parameters
    assert tuple(parameters) == hook.parameters
    calls = calls_of(hook.caller, name)
    assert calls, f"transformers' {hook.caller} does not call {name}"
    for call in calls:
        begin = len([argument for argument in hook.arguments if not argument.endswith("=")])
        assert call[:begin] == hook.arguments[:begin]
        assert set(hook.arguments[begin:]) <= set(call)


def test_every_method_that_is_overridden_is_held_here_and_each_private_one_has_its_reason() -> None:
    overridden = {
        name
        for name, value in vars(WorkbenchTrainerMixin).items()
        if inspect.isfunction(value) and hasattr(Trainer, name) and not name.startswith("__")
    }
    assert overridden == {*PRIVATE, *PUBLIC}
    table = re.findall(r"^\| `(\w+)` \| \w.{20,} \|$", str(ours.__doc__), re.MULTILINE)
    assert table == list(PRIVATE)


def test_transformers_sums_the_losses_of_a_step_where_the_trainer_reads_them() -> None:
    """`_maybe_log_save_evaluate` zeroes its loss in place; `_total_loss_scalar` has the mean."""
    epoch = inspect.getsource(Trainer._run_epoch)
    assert epoch.count("self._tr_loss += tr_loss_step") == 1
    end = inspect.getsource(Trainer._finalize_training)
    assert "self._total_loss_scalar += self._tr_loss.item()" in end
    assert "train_loss = self._total_loss_scalar / max(num_steps_trained" in end


def test_transformers_skips_rows_by_the_path_of_a_checkpoint_and_reads_nothing_else_of_it() -> None:
    """`_run_epoch` gets a path that holds nothing; it looks there for random numbers alone."""
    epoch = inspect.getsource(Trainer._run_epoch)
    uses = [line.strip() for line in epoch.splitlines() if "resume_from_checkpoint" in line]
    assert uses == [
        "resume_from_checkpoint,",
        "if epoch == epochs_trained and resume_from_checkpoint is not None:",
        "self._load_rng_state(resume_from_checkpoint)",
        "self._load_rng_state(resume_from_checkpoint)",
    ]
    # Where the file is missing, it is left alone.
    assert inspect.getsource(Trainer._load_rng_state).count("if not os.path.isfile(rng_file):") == 2


def test_a_step_begins_with_its_callbacks_after_its_rows_were_read() -> None:
    """The random numbers of a run that continues within an epoch are restored between both."""
    epoch = inspect.getsource(Trainer._run_epoch)
    loop = inspect.getsource(Trainer._inner_training_loop)
    in_order = (
        "iter(train_dataloader)",
        "self.get_batch_samples(",
        "self.callback_handler.on_step_begin(",
        "self.training_step(",
        "self._clip_grad_norm(",
        "self._get_grad_norm(",
        "self.callback_handler.on_pre_optimizer_step(",
        "self.optimizer.step()",
        "self.callback_handler.on_step_end(",
        "self._maybe_log_save_evaluate(",
    )
    places = [epoch.index(part) for part in in_order]
    assert places == sorted(places)
    assert loop.index("self._prepare_for_training(") < loop.index(
        "callback_handler.on_train_begin("
    )
    assert loop.index("callback_handler.on_train_begin(") < loop.index("eval_on_start")
    assert loop.index("callback_handler.on_epoch_begin(") < loop.index("self._run_epoch(")
