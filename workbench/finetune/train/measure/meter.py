"""Measure the training steps of a rank: time, tokens and sent bytes."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Self, SupportsFloat

import torch
import torch.distributed as dist

from workbench.agent.rank import collectives as ranks
from workbench.finetune.recipe.order import IGNORED
from workbench.finetune.train.measure.traffic import Sent, Traffic, addresses, read_sent, unseen

_MOST_STEPS = 10_000  # newest steps that a median is taken of


def tokens_of(batch: Mapping[str, torch.Tensor], causal: bool) -> tuple[torch.Tensor, int]:
    """Count the tokens of a batch in the model.

    Source and target, or a causal model's one text.
    """
    mask = batch["attention_mask"]
    if causal:
        return mask.sum(), mask.numel()
    labels = batch["labels"]
    return mask.sum() + (labels != IGNORED).sum(), mask.numel() + labels.numel()


class Stopwatch:
    """Measure the seconds between `begin` and `end`. A GPU's own clock spares the host a wait."""

    def __init__(self, device: torch.device) -> None:
        self._events: Sequence[torch.cuda.Event] = ()
        if device.type == "cuda":
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._events = (begin, end)
        self._began = 0.0
        self._took = 0.0

    def begin(self) -> Self:
        if self._events:
            self._events[0].record()
        self._began = time.perf_counter()
        return self

    def end(self) -> Self:
        if self._events:
            self._events[1].record()
        self._took = time.perf_counter() - self._began
        return self

    def __float__(self) -> float:
        """Return the seconds; wait until a GPU has finished the work."""
        if not self._events:
            return self._took
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class _Step(NamedTuple):
    took_s: float
    tokens: int
    computing_s: float
    """Seconds of forward and backward passes for a token."""


class _Ended(NamedTuple):
    """Step with times to read in the next step, because a GPU may still be at work."""

    took_s: float
    tokens: Sequence[int]
    computing: Sequence[SupportsFloat]
    """Seconds of the forward and backward pass of every micro-batch."""


class StepMeter:
    """Time the training steps and count their tokens, without evaluations and checkpoints."""

    def __init__(self, *, causal: bool, period: int = 1, sharers: int = 1) -> None:
        """Start without measurements.

        Ranks that train apart synchronise in every `period`-th step. `sharers` ranks count the same
        rows.
        """
        self.runtime_s = self.samples = 0.0
        """Seconds of all steps so far, and their samples."""
        self.profiled_tokens: int | None = None
        """Tokens, padding included, of the micro-batch under the FLOPS profiler.

        None without a profile.
        """
        self._causal = causal
        self._period = period
        self._sharers = sharers
        self._since: float | None = None
        self._steps = 0
        # Measurements of the step in progress.
        self._useful: Any = 0
        self._tokens: list[int] = []
        self._computing: list[SupportsFloat] = []
        # Sums over all steps except profiled ones.
        self._fair_s = self._fair_samples = 0.0
        self._fair_useful: Any = 0
        self._fair_padded = 0
        # Steps after the first: the newest, and sums of all.
        self._warm: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self._warm_steps = self._warm_tokens = self._warm_micro_batches = 0
        self._ended: _Ended | None = None
        self._unseen = unseen(str(dist.get_backend())) if ranks.connected() else ""
        # Every rank takes part, because pods may differ and the exchange is a collective.
        self._peers = _everyone() if ranks.connected() else frozenset()
        if ranks.world_size() > 1 and not self._unseen and not self._peers:
            self._unseen = "no connection to another rank was found"
        self._traffic = Traffic(self._sent)

    def see(self, batch: Mapping[str, torch.Tensor], *, profiled: bool) -> None:
        """Count a micro-batch before its training."""
        useful, padded = tokens_of(batch, self._causal)
        self._useful = self._useful + useful
        self._tokens.append(padded)
        if profiled:
            self.profiled_tokens = padded

    def computed(self, seconds: SupportsFloat) -> None:
        """Store the time of a micro-batch's forward and backward pass.

        The next step's end reads it.
        """
        self._computing.append(seconds)

    def step(self, samples: float, *, profiled: bool) -> None:
        step_s = self._lap_s()
        self.samples += samples
        if not profiled:
            self._fair_s += step_s
            self._fair_samples += samples
            self._fair_useful = self._fair_useful + self._useful
            self._fair_padded += sum(self._tokens)
            self._read_ended()
            if self._steps and self._computing:  # the first one warms up
                self._ended = _Ended(step_s, self._tokens, self._computing)
        self._steps = self._steps + 1
        self._useful = 0
        self._tokens = []
        self._computing = []
        self._traffic.step()

    def resume(self) -> None:
        self._traffic.resume()
        self._since = time.monotonic()

    def pause(self) -> None:
        """Exclude the time until `resume`."""
        self._lap_s()
        self._since = None
        self._traffic.pause()

    @property
    def samples_per_s(self) -> float:
        """Throughput of the steps so far, without profiled steps unless all are profiled."""
        if self._fair_s > 0:
            return self._fair_samples / self._fair_s
        return self.samples / self.runtime_s if self.runtime_s > 0 else 0.0

    def totals(self) -> dict[str, float | int | None]:
        """Emit the rank's traffic, and return tokens a second and times of all ranks.

        A collective.
        """
        self._traffic.tell(self._unseen)
        self._read_ended()
        own = [float(self._fair_useful), float(self._fair_padded), self._micro_batch_s()]
        useful, padded, computing_s = ranks.sums(own)
        useful /= self._sharers
        padded /= self._sharers
        micro_batch_s = None
        if self._warm:
            micro_batch_s = computing_s / ranks.world_size()
        useful_per_s = None
        padded_per_s = None
        if self._fair_s > 0:
            useful_per_s = round(useful / self._fair_s, 3)
            padded_per_s = round(padded / self._fair_s, 3)
        return {
            "step_s": self._step_s(),
            "micro_batch_s": micro_batch_s,
            "useful_tokens_per_s": useful_per_s,
            "padded_tokens_per_s": padded_per_s,
            "profiled_tokens": self.profiled_tokens,
        }

    def _read_ended(self) -> None:
        if self._ended is None:
            return
        step = self._ended
        self._ended = None
        # The last of several micro-batches may include the optimizer step and its messages.
        took_s = [float(seconds) for seconds in step.computing]
        took_s = took_s[:-1] or took_s
        computing_s = sum(took_s) / sum(step.tokens[: len(took_s)])
        tokens = sum(step.tokens)
        self._warm.append(_Step(took_s=step.took_s, tokens=tokens, computing_s=computing_s))
        self._warm_steps += 1
        self._warm_tokens += tokens
        self._warm_micro_batches += len(step.tokens)

    def _lap_s(self) -> float:
        """Return the seconds since the last reading of the clock; 0 during a pause."""
        now = time.monotonic()
        took_s = 0.0 if self._since is None else now - self._since
        self.runtime_s = self.runtime_s + took_s
        self._since = now
        return took_s

    # Steps may have rows of any length, so a few must not represent all: medians are per token.
    def _step_s(self) -> float | None:
        """Return the seconds of a step of mean length, at the pace of the newest steps.

        A disturbance of a few periods has no effect.
        """
        if not self._warm:
            return None
        # Steps of whole periods; all steps if not even one period is whole.
        newest = list(self._warm)
        whole = len(newest) // self._period * self._period or len(newest)
        token_s = []
        for at in range(0, whole, self._period):
            steps = newest[at : at + self._period]
            took_s = sum(step.took_s for step in steps)
            tokens = sum(step.tokens for step in steps)
            token_s.append(took_s / tokens)
        return median(token_s) * self._warm_tokens / self._warm_steps

    def _micro_batch_s(self) -> float:
        if not self._warm:
            return 0.0
        token_s = median(step.computing_s for step in self._warm)
        return token_s * self._warm_tokens / self._warm_micro_batches

    def _sent(self) -> Sent | None:
        return read_sent(self._peers, alone=os.environ.get("LOCAL_WORLD_SIZE", "1") == "1")


def _everyone() -> frozenset[str]:
    ranks.barrier()  # NCCL opens its connections with the first collective
    own = json.dumps(sorted(addresses())).encode()
    everyone: set[str] = set()
    for answer in ranks.gather_bytes(own):
        everyone.update(json.loads(answer))
    return frozenset(everyone)
