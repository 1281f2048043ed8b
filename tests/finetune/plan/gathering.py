"""Memory of a T5's weights while DeepSpeed's stage 3 gathers them, as torch's allocator holds it.

DeepSpeed gathers on a CUDA stream of its own, and torch never gives memory of a stream to another
stream. The gathering follows `partitioned_param_coordinator.py` and `partition_parameters.py` of
DeepSpeed 0.12.6, the allocator `CUDACachingAllocator.cpp` of torch 2.1: no GPU is needed.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MIB = 2**20
FP32 = 4
# Submodules of a layer without weights of their own start a gathering ahead too.
CALLS = 4


class Piece(NamedTuple):
    """Bytes of a segment, which torch asked the driver for."""

    size: int
    segment: int
    offset: int


class Stream:
    """Memory of a stream: tensors in use, and everything that the allocator asked for."""

    def __init__(self) -> None:
        self.free: list[Piece] = []
        self.segments = 0
        self.held = 0
        self.used = 0
        self.most_used = 0

    def take(self, elements: int) -> Piece:
        size = math.ceil(FP32 * elements / 512) * 512
        # The smallest free piece that is large enough, else a new segment.
        at = bisect.bisect_left(self.free, Piece(size, -1, 0))
        if at < len(self.free):
            piece = self.free.pop(at)
        else:
            segment = 20 * MIB if size < 10 * MIB else math.ceil(size / (2 * MIB)) * 2 * MIB
            piece = Piece(segment, self.segments, 0)
            self.segments += 1
            self.held += segment
        # The rest of a large piece stays free.
        if piece.size - size > MIB:
            rest = Piece(piece.size - size, piece.segment, piece.offset + size)
            bisect.insort(self.free, rest)
            piece = piece._replace(size=size)
        self.used += piece.size
        self.most_used = max(self.most_used, self.used)
        return piece

    def give(self, piece: Piece) -> None:
        self.used -= piece.size
        # Free neighbours of a segment become one piece.
        for other in [each for each in self.free if each.segment == piece.segment]:
            if other.offset + other.size == piece.offset:
                piece = other._replace(size=other.size + piece.size)
            elif piece.offset + piece.size == other.offset:
                piece = piece._replace(size=piece.size + other.size)
            else:
                continue
            self.free.remove(other)
        bisect.insort(self.free, piece)


def weights_of_t5(config: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return the elements of the large weights, and their order in a recomputed step."""
    width = config["num_heads"] * config["d_kv"]
    sizes = {"shared": config["vocab_size"] * config["d_model"]}

    def layers(part: str, attentions: str) -> list[list[str]]:
        made = []
        for number in range(config["num_layers"]):
            own = {f"{a}.{name}": config["d_model"] * width for a in attentions for name in "qkvo"}
            own |= dict.fromkeys(("wi", "wo"), config["d_model"] * config["d_ff"])
            named = {f"{part}.{number}.{name}": size for name, size in own.items()}
            sizes.update(named)
            made.append(list(named))
        return made

    forward: list[str] = []
    backward: list[str] = []
    for stack in (layers("encoder", "s"), layers("decoder", "sc")):
        again = [name for layer in reversed(stack) for name in (*layer, *reversed(layer))]
        forward += ["shared", *(name for layer in stack for name in layer)]
        backward = ["shared", *again, *backward]
    return sizes, [*forward, "shared", *backward, "shared"]


class Gathering:
    """Stage 3 of a rank, on the stream that gathers."""

    def __init__(self, sizes: Mapping[str, int], *, ranks: int, live: float, ahead: float) -> None:
        self.sizes = sizes
        self.ranks = ranks
        self.live = live
        self.ahead = ahead
        self.stream = Stream()
        self.whole: dict[str, Piece] = {}
        self.coming: dict[str, tuple[str, ...]] = {}
        """Weights that are on their way, each with all weights of its message."""
        self.messages: dict[str, Piece] = {}
        """Memory of a message, by the first of its weights."""

    @property
    def gathered(self) -> int:
        return sum(self.sizes[name] for name in {*self.whole, *self.coming})

    def ask(self, names: Sequence[str]) -> None:
        shards = [math.ceil(self.sizes[name] / self.ranks) for name in names]
        piece = self.stream.take(self.ranks * sum(shards))
        if len(names) == 1:
            self.whole[names[0]] = piece
            return
        self.messages[names[0]] = piece
        self.coming |= {name: tuple(names) for name in names}

    def wait(self, name: str) -> None:
        group = self.coming.pop(name)
        # The first weight that is used copies all weights of the message.
        for each in group:
            if each not in self.whole:
                self.whole[each] = self.stream.take(self.sizes[each])
        if not any(each in self.coming for each in group):
            self.stream.give(self.messages.pop(group[0]))

    def step(self, order: Sequence[str], *, reuse: float, known: bool) -> None:
        """Run a step. Only if the order is `known`, weights are gathered ahead and kept."""
        queue = deque(enumerate(order))
        for now, name in enumerate(order):
            if name not in self.whole and name not in self.coming:
                self.ask([name])
            if name in self.coming:
                self.wait(name)
            while queue and queue[0][0] <= now:
                queue.popleft()
            for _ in range(CALLS if known else 0):
                self._ask_ahead(queue)
            if not known or not self._is_soon(name, order[now + 1 :], reuse):
                self.stream.give(self.whole.pop(name))
        for name in list(self.coming):
            self.wait(name)
        for name in list(self.whole):
            self.stream.give(self.whole.pop(name))

    def _ask_ahead(self, queue: deque[tuple[int, str]]) -> None:
        room = min(self.live - self.gathered, self.ahead)
        names: list[str] = []
        while queue and sum(self.sizes[name] for name in names) < room:
            name = queue.popleft()[1]
            if name not in self.whole and name not in self.coming and name not in names:
                names.append(name)
        if names:
            self.ask(names)

    def _is_soon(self, name: str, later: Sequence[str], reuse: float) -> bool:
        distance = 0
        for other in later:
            if distance >= reuse:
                return False
            if other == name:
                return True
            distance += self.sizes[other]
        return False
