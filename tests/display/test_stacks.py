"""Positions of ranks: a line per rank in words of a training step, and all frames in a fold."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

import pytest

from workbench.display.kit.doc import Fold, Note, Table, blocks_html
from workbench.display.run.stacks import position, readable, stacks_blocks

LIBRARIES = "/v/lib/python3.11/site-packages/"
CALL = [("torch/nn/modules/module.py", "_call_impl"), ("torch/nn/modules/module.py", "_wrapped")]
# The way from the worker's own start to a step, innermost first.
START = [
    ("transformers/trainer.py", "training_step"),
    ("workbench/finetune/recipe/standalone.py", "training_step"),
    ("transformers/trainer.py", "_run_epoch"),
    ("workbench/finetune/train/main.py", "main"),
    ("workbench/agent/warm.py", "_run_rank"),
]
BACKWARD = [
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/_tensor.py", "backward"),
    ("accelerate/accelerator.py", "backward"),
]


def stack(*frames: tuple[str, str]) -> str:
    """Write frames as faulthandler does, below another thread."""
    lines = [
        "Thread 0x1 (most recent call first):",
        '  File "/usr/lib/python3.11/t.py", line 1 in w',
    ]
    lines += ["", "Current thread 0x2 (most recent call first):"]
    for place, (file, function) in enumerate(frames, 1):
        # On a pod the package stands in a zip, or in a relative path.
        whole = file if file.startswith(("workbench/", "/")) else LIBRARIES + file
        lines.append(f'  File "{whole}", line {place} in {function}')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("inner", "doing", "collective", "at"),
    [
        (
            [
                ("torch/nn/modules/linear.py", "forward"),
                *CALL,
                ("transformers/models/t5/modeling_t5.py", "forward"),
                *CALL,
            ],
            "forward",
            "",
            "transformers/models/t5/modeling_t5.py:4  forward",
        ),
        (BACKWARD, "backward", "", "workbench/finetune/recipe/standalone.py:5  training_step"),
        (
            [("transformers/models/t5/modeling_t5.py", "forward"), *CALL, *BACKWARD],
            "backward",
            "",
            "transformers/models/t5/modeling_t5.py:1  forward",
        ),
        (
            [
                ("torch/distributed/distributed_c10d.py", "all_reduce"),
                ("torch/distributed/c10d_logger.py", "wrapper"),
                ("deepspeed/comm/torch.py", "all_reduce"),
                ("deepspeed/utils/nvtx.py", "wrapped_fn"),
                ("deepspeed/runtime/zero/stage_1_and_2.py", "allreduce_bucket"),
                *BACKWARD,
            ],
            "backward",
            "all_reduce",
            "deepspeed/runtime/zero/stage_1_and_2.py:5  allreduce_bucket",
        ),
        (
            # DeepSpeed's engine steps within Accelerate's backward.
            [
                ("deepspeed/runtime/zero/stage_1_and_2.py", "step"),
                ("deepspeed/runtime/engine.py", "step"),
                ("accelerate/utils/deepspeed.py", "backward"),
            ],
            "optimizer",
            "",
            "deepspeed/runtime/zero/stage_1_and_2.py:1  step",
        ),
        ([("torch/optim/adamw.py", "step")], "optimizer", "", None),
        ([("torch/utils/data/dataloader.py", "__next__")], "data", "", None),
    ],
)
def test_a_rank_is_one_line_in_words_of_a_training_step(
    inner: Sequence[tuple[str, str]], doing: str, collective: str, at: str | None
) -> None:
    it = position(stack(*inner, *START))
    assert (it.doing, it.collective, it.own) == (doing, collective, "")
    standalone = f"workbench/finetune/recipe/standalone.py:{len(inner) + 2}  training_step"
    assert it.at == (at or standalone)


def test_evaluation_and_generation_are_named() -> None:
    forward = ("transformers/models/t5/modeling_t5.py", "forward")
    evaluation = stack(forward, ("transformers/trainer.py", "evaluate"), *START)
    assert position(evaluation).doing == "evaluation, forward"
    sample = ("transformers/generation/utils.py", "_sample")
    generation = stack(sample, ("transformers/generation/utils.py", "generate"), *START)
    assert position(generation).doing == "generation"


def test_the_users_own_line_stands_beside_the_innermost() -> None:
    own = ("/pods/pod-0/runs/r1/script/own/train.py", "train")
    library = stack(("torchvision/ops.py", "nms"), own)
    assert (position(library).at, position(library).own) == (
        "torchvision/ops.py:1  nms",
        "train.py:2  train",
    )
    assert (position(stack(own)).at, position(stack(own)).own) == ("train.py:1  train", "")


def test_lines_are_few_and_all_frames_are_folded() -> None:
    same = stack(*BACKWARD, *START)
    stacks = dict.fromkeys(range(3), same)
    table, *_, frames = stacks_blocks(stacks)
    assert isinstance(table, Table)
    assert [row[:2] for row in table.grid.rows] == [["0-2", "backward"]]
    assert isinstance(frames, Fold) and not frames.open
    page = html.unescape(blocks_html([frames]))
    assert "torch/autograd/graph.py:1  _engine_run_backward" in page and "rank all" in page
    many = {rank: stack((f"library{rank}/a.py", "f")) for rank in range(40)}
    table, more, _ = stacks_blocks(many)
    assert isinstance(table, Table) and len(table.grid.rows) == 12
    assert isinstance(more, Fold) and not more.open and more.title == "28 more lines"


def test_ranks_in_a_collective_are_told_from_the_others() -> None:
    collective = stack(("torch/distributed/distributed_c10d.py", "barrier"), *START)
    note = next(
        block
        for block in stacks_blocks({0: collective, 1: stack(*BACKWARD), 2: collective})
        if isinstance(block, Note)
    )
    assert "In a collective: rank 0,2. Not in one: rank 1." in note.text
    assert not any(isinstance(block, Note) for block in stacks_blocks({0: collective}))


def test_a_rank_without_a_stack_says_so_and_ranks_at_a_place_share_a_line() -> None:
    blocks = stacks_blocks({0: "in barrier", 1: "in forward", 2: "in barrier\n", 3: ""})
    page = " ".join(re.sub(r"<[^>]+>", " ", blocks_html(blocks[:1])).split())
    assert page.endswith("0,2 – in barrier 1 – in forward 3 – it did not answer")
    assert stacks_blocks({}) == [Note("no rank answered")]


@pytest.mark.parametrize("package", ["workbench", "/pods/pod-0/store/workbench-1.zip/workbench"])
def test_all_frames_begin_with_those_of_the_users_own_script(package: str) -> None:
    text = (
        "Current thread 0x00007f32 (most recent call first):\n"
        f'  File "{package}/finetune/train/trainer.py", line 9 in training_step\n'
        '  File "/pods/pod-0/runs/r1/script/own/train.py", line 40 in train\n'
        f'  File "{package}/agent/rank/run.py", line 7 in main\n'
    )
    own, libraries = readable(text).split("in libraries:")
    assert own.split() == ["main", "thread", "train.py:40", "train"]
    assert "workbench/finetune/train/trainer.py:9  training_step" in libraries
    assert "workbench/agent/rank/run.py:7  main" in libraries
