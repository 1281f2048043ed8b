"""Where ranks are, as people read it: each thread's own lines first, libraries after them, no addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from workbench.display.kit.doc import Block, Code, Fold, Note
from workbench.display.kit.logs import clean, ranks_word

_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LIBRARY = re.compile(
    r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+)/|^.*/(?=workbench/(?:base|rundir|worker)/)|^(?=<frozen )"
)
_COPY = re.compile(r"^.*/runs/[^/]+/script/")  # of a script's folder


def stacks_blocks(stacks: Mapping[int, str]) -> list[Block]:
    """State where ranks are; those that are at the same place share one block."""
    places: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        places.setdefault(readable(clean(text)) or "it did not answer", []).append(rank)
    blocks: list[Block] = [
        Fold(f"rank {ranks_word(ranks, 0)}", [Code(text)], open=True) for text, ranks in places.items()
    ]
    return blocks or [Note("no rank answered")]


def readable(text: str) -> str:
    r"""Turn what faulthandler writes into a block for each thread, the main one first, its newest frame on top.

    Example:
        >>> print(readable('''Thread 0x00007f31 (most recent call first):
        ...   File "/usr/lib/python3.11/threading.py", line 331 in wait
        ...
        ... Current thread 0x00007f32 (most recent call first):
        ...   File "/v/lib/python3.11/site-packages/torch/distributed.py", line 9 in all_reduce
        ...   File "/pods/pod-0/runs/r1/script/train.py", line 40 in train
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
    threads = [list(_frames(part)) for part in _THREAD.split(text)[1:]]
    blocks = []
    for number, frames in enumerate(filter(None, reversed(threads))):
        own = [f"  {line}" for is_library, line in frames if not is_library]
        below = [f"  {line}" for is_library, line in frames if is_library]
        name = f"thread {number}" if number else "main thread"
        blocks.append("\n".join([name, *own, *(["  in libraries:"] if below else []), *below]))
    return "\n\n".join(blocks) or text.strip()


def _frames(text: str) -> Iterator[tuple[bool, str]]:
    for file, line, function in _FRAME.findall(text):
        short, is_library = _LIBRARY.subn("", file)
        yield bool(is_library), f"{_COPY.sub('', short)}:{line}  {function}"
