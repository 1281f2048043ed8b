"""Positions of ranks: one line per rank by default, and all frames of all threads in a fold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from workbench.base.table import Grid
from workbench.base.words import UNKNOWN, pluralize
from workbench.display.kit.doc import Block, Code, Fold, Note, Table
from workbench.display.kit.logs import clean, ranks_word

_MOST_LINES = 12
_SILENT = "it did not answer"
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# The rooms of this package whose code ranks run.
_LIBRARY = re.compile(
    r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+)/"
    r"|^(?:.*/)?(?=workbench/(?:agent|base|finetune|jobs|rundir)/)"
    r"|^(?=<frozen )"
)
_COPY = re.compile(r"^.*/runs/[^/]+/script/[^/]+/")  # a script's folder on a pod
# Frames of libraries that do not say what a rank works on.
_PLUMBING = re.compile(
    r"^(?:[^/]*|torch/.*|accelerate/.*|deepspeed/(?:utils|comm)/.*"
    r"|transformers/(?:trainer\.py|utils/.*)|workbench/agent/.*)$"
)
_COLLECTIVES = re.compile(
    r"^torch/distributed/(?:distributed_c10d|c10d_logger|_functional_collectives)\.py$"
)
_OPTIMIZERS = re.compile(r"^torch/optim/|^deepspeed/.*(?:zero/stage|optimizer|engine)|/optimizer")
_WAITING = ("torch/", "deepspeed/")
_LOADERS = re.compile(r"^(?:torch/utils/data|datasets)/")
_MODELS = "/models/"
_FORWARD = "forward"
_EVALUATIONS = ("evaluate", "evaluation_loop")


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    """Path within its library, or within the user's folder."""
    line: int
    function: str
    is_library: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.function}"


@dataclass(frozen=True, slots=True)
class Position:
    """What a rank does now."""

    doing: str
    """Forward, backward, optimizer, data or a collective, as far as the frames tell; or empty."""
    collective: str
    """Name of the collective that the rank is in; empty outside of collectives."""
    at: str
    """Innermost frame that is not plumbing of a library."""
    own: str
    """Innermost frame of the user's own code; empty without one, or if `at` has the frame."""


def stacks_blocks(stacks: Mapping[int, str]) -> list[Block]:
    """State a line per rank; ranks at the same position share a line. All frames are in a fold."""
    if not stacks:
        return [Note("no rank answered")]
    ranks_at: dict[Position, list[int]] = {}
    ranks_with: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        cleaned = clean(text)
        ranks_at.setdefault(position(cleaned), []).append(rank)
        ranks_with.setdefault(readable(cleaned) or _SILENT, []).append(rank)
    lines = list(ranks_at.items())
    blocks: list[Block] = [Table(_grid(lines[:_MOST_LINES]))]
    waiting = _waiting(ranks_at)
    if waiting:
        blocks.append(Note(waiting, "caution"))
    more = lines[_MOST_LINES:]
    if more:
        blocks.append(Fold(pluralize(len(more), "more line"), [Table(_grid(more))]))
    frames = [
        Code(text, f"rank {ranks_word(ranks, len(stacks))}") for text, ranks in ranks_with.items()
    ]
    blocks.append(Fold("all frames", frames))
    return blocks


def _grid(lines: Sequence[tuple[Position, list[int]]]) -> Grid:
    columns = ["rank", "doing", "at"]
    has_own = any(it.own for it, _ in lines)
    if has_own:
        columns.append("your code")
    rows = []
    for it, ranks in lines:
        row = [ranks_word(ranks, 0), _doing(it), it.at]
        rows.append([*row, it.own] if has_own else row)
    return Grid(columns=columns, rows=rows, whole=columns[:2], caption="Position of every rank")


def _doing(it: Position) -> str:
    if it.collective and it.doing:
        return f"{it.collective} (collective) in {it.doing}"
    if it.collective:
        return f"{it.collective} (collective)"
    return it.doing or UNKNOWN


def _waiting(ranks_at: Mapping[Position, Sequence[int]]) -> str:
    """Say which ranks are in a collective, where others are not."""
    waiting = [rank for it, ranks in ranks_at.items() if it.collective for rank in ranks]
    others = [rank for it, ranks in ranks_at.items() if not it.collective for rank in ranks]
    if not waiting or not others:
        return ""
    who = ranks_word(sorted(waiting), 0)
    not_there = ranks_word(sorted(others), 0)
    return (
        f"In a collective: rank {who}. Not in one: rank {not_there}. "
        "A collective waits for every rank."
    )


def position(text: str) -> Position:
    r"""Read the position of a rank from the stack of its main thread.

    Example:
        >>> text = '''Current thread 0x00007f32 (most recent call first):
        ...   File "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 1 in forward
        ...   File "/v/lib/python3.11/site-packages/transformers/modeling_t5.py", line 2 in forward
        ...   File "/pods/pod-0/runs/r1/script/own/train.py", line 40 in train
        ... '''
        >>> it = position(text)
        >>> it.doing, it.at, it.own
        ('forward', 'transformers/modeling_t5.py:2  forward', 'train.py:40  train')
    """
    threads = [frames for frames in _threads(text) if frames]
    if not threads:
        return Position("", "", text.strip().partition("\n")[0] or _SILENT, "")
    frames = threads[0]
    part = _part(frames)
    own = [frame for frame in frames if not frame.is_library]
    telling = [frame for frame in frames if not _is_plumbing(frame)]
    if part.endswith(_FORWARD):
        # The model's own file says more than a layer of a library.
        forwards = [frame for frame in frames if frame.function == _FORWARD]
        models = [f for f in forwards if not f.is_library or _MODELS in f.file]
        telling = [*models[:1], *telling]
    at = str(telling[0] if telling else frames[0])
    mine = str(own[0]) if own else ""
    return Position(part, _collective(frames), at, "" if mine == at else mine)


def _is_plumbing(frame: Frame) -> bool:
    return frame.is_library and _PLUMBING.match(frame.file) is not None


def _collective(frames: Sequence[Frame]) -> str:
    """Return the outermost function of the innermost frames that communicate."""
    name = ""
    for frame in frames:
        if not _COLLECTIVES.match(frame.file):
            break
        if frame.file.endswith("c10d_logger.py"):  # a decorator of every collective
            continue
        name = frame.function
    if not name and frames[0].function == "wait" and frames[0].file.startswith(_WAITING):
        return "wait"
    return name


def _part(frames: Sequence[Frame]) -> str:
    """Return the part of a training step that the frames are in."""
    functions = [frame.function for frame in frames]
    # A backward pass may recompute a forward pass: the innermost of the other parts wins.
    part = _FORWARD if _FORWARD in functions else ""
    for frame in frames:
        if frame.function in ("_engine_run_backward", "backward"):
            part = "backward"
        elif frame.function == "step" and _OPTIMIZERS.search(frame.file):
            part = "optimizer"
        elif _LOADERS.match(frame.file):
            part = "data"
        else:
            continue
        break
    outer = ""
    if "generate" in functions:
        outer = "generation"
    elif any(name in functions for name in _EVALUATIONS):
        outer = "evaluation"
    return ", ".join(filter(None, (outer, part)))


def readable(text: str) -> str:
    r"""Format faulthandler's output as a block per thread, main thread and newest frame first.

    Example:
        >>> print(readable('''Thread 0x00007f31 (most recent call first):
        ...   File "/usr/lib/python3.11/threading.py", line 331 in wait
        ...
        ... Current thread 0x00007f32 (most recent call first):
        ...   File "/v/lib/python3.11/site-packages/torch/distributed.py", line 9 in all_reduce
        ...   File "/pods/pod-0/runs/r1/script/own/train.py", line 40 in train
        ... '''))
        main thread
          train.py:40  train
          in libraries:
          torch/distributed.py:9  all_reduce
        <BLANKLINE>
        thread 1
          in libraries:
          threading.py:331  wait
    """
    blocks = []
    for number, frames in enumerate(filter(None, _threads(text))):
        lines = [f"thread {number}" if number else "main thread"]
        lines += [f"  {frame}" for frame in frames if not frame.is_library]
        below = [f"  {frame}" for frame in frames if frame.is_library]
        if below:
            lines.append("  in libraries:")
            lines += below
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or text.strip()


def _threads(text: str) -> Iterator[list[Frame]]:
    """Return the frames of every thread, those of the main thread first."""
    for part in reversed(_THREAD.split(text)[1:]):
        frames = []
        for file, line, function in _FRAME.findall(part):
            short, is_library = _LIBRARY.subn("", file)
            name = _COPY.sub("", short)
            frames.append(Frame(name, int(line), function, bool(is_library)))
        yield frames
