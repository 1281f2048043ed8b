"""A value of the wrong kind under a DeepSpeed key is refused with key, value and allowed kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.counted import calls_of
from tests.support.examples import tries
from tests.support.sentences import sentence
from tests.support.wrong import WRONG, inner, replaced
from workbench.base.errors import ConfigError
from workbench.finetune.deepspeed.files import load
from workbench.finetune.deepspeed.keys import TOP_LEVEL
from workbench.finetune.deepspeed.kinds import Kind, Table, check_kinds
from workbench.finetune.job.deepspeed_config import resolve
from workbench.finetune.job.finetune import FineTune

RIGHT = {
    "a whole number": 3,
    "a whole number, 0 or more": 3,
    "a whole number, 1 or more": 3,
    "a number": 0.5,
    "a number, 0 or more": 0.5,
    "a number from 0 to 1": 0.5,
    "text": "a",
    "a list of texts": ["a"],
    "a list of numbers": [0.9, 0.99],
    "true or false": True,
    "an object": {},
}


def keys(table: Table, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Kind]]:
    for key, kind in table.items():
        if isinstance(kind, Kind):
            yield (*at, key), kind
        else:
            yield from keys(kind, (*at, key))


KEYS = list(keys(TOP_LEVEL))


def right(kind: Kind) -> object:
    return (
        re.findall("'([^']+)'", kind.words)[0]
        if kind.words.startswith("one of")
        else RIGHT[kind.words]
    )


def filled(at: tuple[str, ...], value: object) -> dict[str, Any]:
    for key in reversed(at):
        value = {key: value}
    return value  # type: ignore[return-value]


def belongs(value: object, kind: Kind) -> bool:
    if (kind.auto and value == "auto") or (kind.null and value is None):
        return True
    if kind.words == "true or false":
        return isinstance(value, bool)
    if kind.words.startswith("one of"):
        return isinstance(value, str) and repr(value) in kind.words
    if kind.words == "text":
        return isinstance(value, str)
    if kind.words == "an object":
        return isinstance(value, dict)
    if kind.words.startswith("a list"):
        each = str if "texts" in kind.words else (int, float)
        return isinstance(value, list) and all(
            isinstance(v, each) and not isinstance(v, bool) for v in value
        )
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != value
        or abs(value) == float("inf")
    ):
        return False
    least = {"1 or more": 1, "0 or more": 0, "from 0 to 1": 0}
    return (
        abs(value) < 2**63
        and ("whole" not in kind.words or value == int(value))
        and all(value >= bound for words, bound in least.items() if words in kind.words)
        and ("from 0 to 1" not in kind.words or value <= 1)
    ) or (
        isinstance(value, float)
        and "whole" not in kind.words
        and "from" not in kind.words
        and value > 0
    )


def test_every_key_takes_what_belongs_there() -> None:
    assert len(KEYS) > 240
    for at, kind in KEYS:
        check_kinds(filled(at, right(kind)), TOP_LEVEL, "deepspeed")


def test_every_key_refuses_what_does_not() -> None:
    for at, kind in KEYS:
        for value in WRONG:
            if belongs(value, kind):
                continue
            with pytest.raises(ConfigError) as refused:
                check_kinds(filled(at, value), TOP_LEVEL, "own.json")
            assert str(refused.value).startswith(f"own.json: {'.'.join(at)} is ")
            assert str(refused.value).endswith(f"; it must be {kind}")


BASE = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "overlap_comm": True,
        "stage3_param_persistence_threshold": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": False, "buffer_count": 4},
        "offload_param": {"device": "cpu"},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 10}},
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "flops_profiler": {"enabled": True, "module_depth": -1, "detailed": True},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "tensorboard": {"enabled": False, "output_path": "", "job_name": "x"},
}


def tried(folder: Path, examples: int) -> tuple[int, int]:
    file, counts = folder / "own.json", [0, 0]
    file.write_text(json.dumps(BASE))
    job = FineTune(technique="zero3-offload", deepspeed=str(file))
    assert resolve(job, gpus=0) is not None
    known = [(at, kind) for at, kind in KEYS if _is_there(at)]

    @tries(examples)
    @given(st.sampled_from(known), st.sampled_from(WRONG), st.integers(0, 400))
    def each(key: tuple[tuple[str, ...], Kind], value: Any, deep: int) -> None:
        at, kind = key
        for _ in range(deep if deep > 350 else 0):
            value = [value]
        file.write_text(json.dumps(replaced(BASE, at, value)))
        counts[0] += 1
        try:
            resolve(job, gpus=0)
        except ConfigError as error:
            counts[1] += 1
            assert str(error).startswith(str(file))
        else:
            assert belongs(value, kind), (at, value)

    each()
    return counts[0], counts[1]


def _is_there(at: tuple[str, ...]) -> bool:
    try:
        inner(BASE, at)
    except KeyError:
        return False
    return True


def test_what_stands_in_a_file_is_refused_or_belongs(tmp_path: Path) -> None:
    seen, refused = tried(tmp_path, 300)
    assert seen >= 300
    assert refused > 150


MANY = {f"key_{n}": n for n in range(20_000)}


@pytest.mark.parametrize(
    ("section", "refused"),
    [
        ("", "key_0"),
        ("zero_optimization", "zero_optimization.key_0"),
        ("autotuning", "autotuning.key_0"),
    ],
)
def test_twenty_thousand_keys_are_refused_as_fast_as_a_few(
    tmp_path: Path, section: str, refused: str
) -> None:
    file = tmp_path / "own.json"
    base: dict[str, Any] = {"zero_optimization": {"stage": 1}}

    def refuse(keys: dict[str, int]) -> None:
        own = {**base, **(keys if not section else {section: {**base.get(section, {}), **keys}})}
        file.write_text(json.dumps(own))
        with pytest.raises(ConfigError, match=sentence("is not known", "key", refused)):
            resolve(FineTune(deepspeed=str(file)), gpus=0)

    few = dict(list(MANY.items())[:20])
    refuse(few)  # what is imported and kept at first is no cost of keys
    assert calls_of(lambda: refuse(MANY)) < calls_of(lambda: refuse(few)) + 10 * len(MANY)


def test_a_deep_configuration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    for text in ("[" * 100_000, '{"compile": ' + '{"a": ' * 500 + "1" + "}" * 501):
        file.write_text(text)
        with pytest.raises(
            ConfigError,
            match=sentence("cannot be read: {}; correct it", "own.json")
            + sentence("it is nested too deeply"),
        ):
            resolve(FineTune(deepspeed=str(file)), gpus=0)


def test_a_device_is_no_deepspeed_file_and_a_link_to_one_is(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=sentence("deepspeed file {} cannot be read", "/dev/zero")
        + sentence("it is not a regular file"),
    ):
        load(FineTune(deepspeed="/dev/zero", technique="zero1"))
    (tmp_path / "real.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    (tmp_path / "link.json").symlink_to("real.json")
    assert load(FineTune(deepspeed=str(tmp_path / "link.json")))[0] == {
        "zero_optimization": {"stage": 1}
    }
