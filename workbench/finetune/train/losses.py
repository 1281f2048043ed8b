"""Read the loss of a step in the next step, so no rank waits for its device or other ranks.

A loss stays on the device when its step ends. The next step begins with one sum over the ranks, of
the tokens of the step. The same tensor carries the loss of the previous step and the wish to stop.
The host reads the tensor after the next step has been launched. Ranks that train apart also read
their own losses late, and add up losses only when all ranks synchronise.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.records import EndedWithAnother
from workbench.base.errors import RunError
from workbench.finetune.recipe.lean_loss import sent
from workbench.finetune.train.measure.pace import Pace

_TOKENS, _STOP, _LEAVE, _TIMED, _WRITTEN, _BALANCE, _BALANCED, _FIRST_LOSS = range(8)
"""Indices in the tensor that ranks add up.

At the end, every rank has an index of its own for its loss, and then for the time of its own work.
"""

_CAUSE_FIRST_S = 1.0
"""Head start of the rank with a bad loss: its error is written before other ranks end."""


class HostCopy:
    """Copy of a tensor's current values on the host. Reading waits for no later work of a GPU."""

    def __init__(self, values: torch.Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        if not values.is_cuda:
            self._values = values.detach().clone()
            return
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values.detach(), non_blocking=True)
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record()

    def read(self) -> list[float]:
        if self._ready is not None:
            self._ready.synchronize()
        return [float(value) for value in self._values.reshape(-1).tolist()]


@dataclass(kw_only=True, slots=True)
class EndedStep:
    """Optimizer step with an unread loss."""

    step: int
    epoch: float | None
    loss: torch.Tensor
    """Sum over the micro-batches of the rank, on the device."""
    grad_norm: HostCopy | None
    due: bool
    """Whether to log the step's figures."""
    balance: torch.Tensor | None = None
    """Load-balancing loss times tokens, and the tokens, of the rank; on the device.

    None for models without a mixture of experts.
    """


class ReadStep(NamedTuple):
    ended: EndedStep
    loss: float
    """Mean over the ranks."""
    balance: float = 0.0
    """Load-balancing loss times the tokens, of all ranks."""
    balanced: float = 0.0
    """Tokens of the load-balancing loss; 0 for models without a mixture of experts."""


class StepSums:
    """Figures of the steps between reading and logging."""

    def __init__(self) -> None:
        self._steps = 0
        self._loss = 0.0
        # Load-balancing loss times tokens, and tokens.
        self._balance = self._balanced = 0.0

    def add(self, read: ReadStep) -> None:
        self._steps += 1
        self._loss += read.loss
        self._balance += read.balance
        self._balanced += read.balanced

    def take(self, ended: EndedStep) -> dict[str, float]:
        """Return the means over the steps since the last log, and reset the sums."""
        logs = {"loss": self._loss / self._steps}
        if self._balanced:
            logs["aux_loss"] = self._balance / self._balanced
        if ended.grad_norm is not None:
            (logs["grad_norm"],) = ended.grad_norm.read()
        self._steps = 0
        self._loss = 0.0
        self._balance = self._balanced = 0.0
        return logs


class Asked(Protocol):
    """A request of a user or of a pod, for this rank."""

    def is_there(self) -> bool: ...


class StepLosses:
    """Losses of the last steps, on their way from the device and from the other ranks."""

    def __init__(
        self,
        *,
        device: torch.device,
        apart: bool,
        pace: Pace,
        stop: Asked,
        leave: Asked | None = None,
        timer: Asked | None = None,
        written: Asked | None = None,
    ) -> None:
        """Set up with the losses' device, whether ranks train apart, and the four requests.

        `pace` receives the times of all ranks, which travel with the losses.
        """
        self.stop = False
        """Whether a rank was asked to stop. All ranks know after the same step."""
        self.save = False
        """Whether the pod of a rank is ending. All ranks know after the same step."""
        self.timed = False
        """Whether a checkpoint by time is due. All ranks know after the same step."""
        self.written = False
        """Whether all ranks have written their parts. All ranks know after the same step."""
        self._device = device
        self._apart = apart
        self._pace = pace
        self._requests = (stop, leave, timer, written)
        self._ended: EndedStep | None = None
        # Sent to the other ranks, or copied to the host if ranks train apart.
        self._sent: deque[tuple[EndedStep | None, HostCopy]] = deque()
        # Read on this rank, while ranks train apart.
        self._own: list[ReadStep] = []
        self._own_s: list[float] = []

    def _asked(self) -> list[float]:
        """Return 1 for each request of this rank.

        To stop, to save at the pod's end, to save by time, and to name a written checkpoint.
        """
        return [float(each is not None and each.is_there()) for each in self._requests]

    def _hear(self, asked: Sequence[float]) -> None:
        """Note the requests of all ranks."""
        stop, save, timed, written = asked
        self.stop = self.stop or stop > 0
        self.save = self.save or save > 0
        self.timed = self.timed or timed > 0
        self.written = self.written or written == ranks.world_size()

    def count(self, tokens: int) -> torch.Tensor:
        """Return the tokens of the new step, of all ranks unless ranks train apart.

        A collective.
        """
        if self._apart:
            self._own_s += filter(None, [self._pace.take()])
            return torch.full((), tokens, device=self._device)
        return self._add_up(tokens)[_TOKENS].to(torch.int64)

    def keep(self, ended: EndedStep) -> None:
        """Store a finished step."""
        if not self._apart:
            self._ended = ended
            return
        balance, balanced = self._balance(ended)
        figures = torch.stack([ended.loss.double(), balance, balanced])
        self._sent.append((ended, HostCopy(figures)))

    def read(self) -> list[ReadStep]:
        """Return the steps whose losses have arrived, oldest first.

        The last step is not included.
        """
        if self._apart:
            # Do not read the copy of the last step: the host would wait for that step.
            self._read_own(but=1)
            return []
        return self._read_sums()

    def meet(self) -> list[ReadStep]:
        """Return all remaining steps; every rank must call the method."""
        if self._apart:
            self._read_own(but=0)
            return self._sum_of_own()
        if self._ended is not None:
            self._add_up(0)
        return self._read_sums()

    def _add_up(self, tokens: int) -> torch.Tensor:
        count = ranks.world_size()
        values = torch.zeros(_FIRST_LOSS + 2 * count, dtype=torch.float64)
        values[_TOKENS] = tokens
        values[_STOP : _WRITTEN + 1] = torch.tensor(self._asked(), dtype=torch.float64)
        values[_FIRST_LOSS + count + ranks.rank()] = self._pace.take()
        values = sent(values, self._device)
        if self._ended is not None:
            values[_FIRST_LOSS + ranks.rank()] = self._ended.loss
            values[_BALANCE], values[_BALANCED] = self._balance(self._ended)
        ranks.add_up(values)
        self._sent.append((self._ended, HostCopy(values)))
        self._ended = None
        return values

    def _balance(self, ended: EndedStep) -> torch.Tensor:
        """Return the two numbers of a step's load balance; zeros for other models."""
        if ended.balance is None:
            return torch.zeros(2, dtype=torch.float64, device=self._device)
        return ended.balance.double()

    def _read_sums(self) -> list[ReadStep]:
        done: list[ReadStep] = []
        while self._sent:
            ended, copy = self._sent.popleft()
            values = copy.read()
            self._hear(values[_STOP : _WRITTEN + 1])
            first_time = _FIRST_LOSS + ranks.world_size()
            self._pace.add(values[first_time:])
            if ended is not None:
                losses = values[_FIRST_LOSS:first_time]
                _check(losses, ended.step)
                read = ReadStep(
                    ended=ended,
                    loss=sum(losses) / len(losses),
                    balance=values[_BALANCE],
                    balanced=values[_BALANCED],
                )
                done.append(read)
        return done

    def _read_own(self, *, but: int) -> None:
        while len(self._sent) > but:
            ended, copy = self._sent.popleft()
            assert ended is not None
            own = ReadStep(ended, *copy.read())
            if not math.isfinite(own.loss):
                raise _not_finite(own.loss, ranks.rank(), ended.step)
            self._own.append(own)

    def _sum_of_own(self) -> list[ReadStep]:
        # One message for all steps: three figures a step.
        figures = []
        for own in self._own:
            figures += [own.loss, own.balance, own.balanced]
        own_s = [0.0] * ranks.world_size()
        own_s[ranks.rank()] = sum(self._own_s)
        asked = self._asked()
        heard = ranks.sums([*asked, *figures, *own_s])
        sums = heard[len(asked) :]
        self._pace.add(sums[len(figures) :], len(self._own_s))
        self._own_s = []
        self._hear(heard[: len(asked)])
        read = []
        for number, own in enumerate(self._own):
            loss, balance, balanced = sums[3 * number : 3 * number + 3]
            mean = loss / ranks.world_size()
            read.append(ReadStep(own.ended, mean, balance, balanced))
        self._own = []
        return read


def _check(losses: Sequence[float], step: int) -> None:
    """End the run at a non-finite loss.

    The rank of the loss raises the cause; other ranks raise an error with that rank's number.
    """
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if ranks.rank() in bad:
        raise _not_finite(losses[ranks.rank()], ranks.rank(), step)
    if bad:
        time.sleep(_CAUSE_FIRST_S)
        raise EndedWithAnother(
            f"loss is {losses[bad[0]]} on rank {bad[0]} at step {step}; this rank ends with it"
        )


def _not_finite(loss: float, rank: int, step: int) -> RunError:
    return RunError(
        f"loss is {loss} on rank {rank} at step {step}; "
        "try a lower learning rate, or precision fp32"
    )
