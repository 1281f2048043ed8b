"""Rewards of a group of answers: groups without a difference, and means of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import torch

from workbench.agent.rank.notes import note
from workbench.base.words import pluralize

_EARLY_STEPS = 10
"""Steps of equal rewards after which a run does not wait for its end with the note."""
_APPLIES = "applies/"


class Groups:
    """Count groups of answers with equal rewards, and note many of them once."""

    def __init__(self) -> None:
        self._steps = 0
        self._groups = 0
        self._equal = 0
        self._told = False

    def see(self, rewards: torch.Tensor, answers: int) -> None:
        """Add the rewards of a step on all ranks, answers x functions; a group has `answers`."""
        scored = ~rewards.isnan().all(dim=1)
        total = rewards.nansum(dim=1)
        low = torch.where(scored, total, math.inf).view(-1, answers).amin(dim=1)
        high = torch.where(scored, total, -math.inf).view(-1, answers).amax(dim=1)
        self._steps += 1
        self._groups += len(low)
        self._equal += int((high <= low).sum())
        if self._steps == _EARLY_STEPS and self._equal == self._groups:
            self.tell()

    def tell(self) -> None:
        """Note groups of equal rewards, if half of the groups or more have equal rewards."""
        if self._told or not self._equal or 2 * self._equal < self._groups:
            return
        self._told = True
        note(
            f"in {self._equal} of {pluralize(self._groups, 'group')} of "
            f"{pluralize(self._steps, 'step')}, all answers to the prompt have the same reward, so "
            "the group teaches nothing. Check that the reward functions tell answers apart"
        )


def weighed_rewards(
    names: Sequence[str], judged: Sequence[Sequence[float]]
) -> Iterator[tuple[str, float, float]]:
    """Yield figures of a micro-batch of an evaluation: name, mean, and share of the answers.

    The figures are the mean of every function over the rows to which the function applies, and the
    mean of the sums. TRL's deviations depend on the size of a micro-batch: means of squares and
    shares of rows take their place until `with_deviations`.
    """
    by_name: dict[str, Sequence[float]] = {"reward": []}
    for name, values in zip(names, judged, strict=True):
        by_name[_mean(name)] = [value for value in values if not math.isnan(value)]
    sums = []
    for answer in zip(*judged, strict=True):
        applying = [value for value in answer if not math.isnan(value)]
        if applying:
            sums.append(sum(applying))
    by_name["reward"] = sums
    for name, values in by_name.items():
        share = len(values) / len(judged[0])
        yield f"{_APPLIES}{name}", share, 1.0
        if values:
            yield name, fmean(values), share
            yield _deviation(name), fmean(value**2 for value in values), share


def reward_names(names: Sequence[str]) -> set[str]:
    """Return the names of the figures of functions, as TRL names them."""
    means = ["reward", *map(_mean, names)]
    return {*means, *map(_deviation, means)}


def with_deviations(figures: Mapping[str, float], answers: int) -> dict[str, float]:
    """Return the figures of an evaluation with the standard deviations of the rewards."""
    made = {name: value for name, value in figures.items() if not name.startswith(_APPLIES)}
    for name, share in figures.items():
        mean = name.removeprefix(_APPLIES)
        if mean == name or not share:
            continue
        judged = round(share * answers)
        variance = max(0.0, figures[_deviation(mean)] - figures[mean] ** 2)
        made[_deviation(mean)] = math.sqrt(variance * judged / max(1, judged - 1))
    return made


def _mean(function: str) -> str:
    return f"rewards/{function}/mean"


def _deviation(mean: str) -> str:
    """Return TRL's name of the standard deviation beside a mean."""
    return "reward_std" if mean == "reward" else mean.replace("/mean", "/std")
