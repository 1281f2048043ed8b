"""Which pairs of faults are made: a list that a seed decides, with every pair in it. Pure."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

from tools.chaos.faults import FAULTS
from tools.chaos.places import PLACES

WITHIN_S = 5.0
"""How long after the first fault the second may come; a halt of the first does not count."""


@dataclass(frozen=True)
class Strike:
    """A fault at a place."""

    fault: str
    place: str
    when: str = "before"
    nth: int = 1

    def __str__(self) -> str:
        """Return the form that `PAIR` takes."""
        nth = "" if self.nth == 1 else f":{self.nth}"
        return f"{self.fault}@{self.place}{'+' if self.when == 'after' else ''}{nth}"

    @classmethod
    def parse(cls, text: str) -> Strike:
        """Read the form of `PAIR`.

        >>> Strike.parse("kill-rank@follow:3")
        Strike(fault='kill-rank', place='follow', when='before', nth=3)
        >>> str(Strike.parse("full@result+"))
        'full@result+'
        """
        fault, _, rest = text.strip().partition("@")
        place, _, nth = rest.partition(":")
        when = "after" if place.endswith("+") else "before"
        place = place.removesuffix("+")
        for name, known in ((fault, FAULTS), (place, PLACES)):
            if name not in known:
                raise ValueError(f"{text!r}: no {name!r}; choose of {', '.join(known)}")
        return cls(fault, place, when, int(nth or 1))


@dataclass(frozen=True)
class Pair:
    """Two strikes in one run; the second comes within seconds of the first."""

    first: Strike
    second: Strike
    number: int = 0
    """Its own seed."""

    def __str__(self) -> str:
        """Return the form that `PAIR` takes."""
        return f"{self.first},{self.second}"

    @property
    def faults(self) -> list[str]:
        return [self.first.fault, self.second.fault]

    @property
    def needs(self) -> set[str]:
        """What must happen in the run besides: see `Place.needs`."""
        return {PLACES[strike.place].needs for strike in (self.first, self.second)} - {""}

    @property
    def launcher(self) -> str:
        return "pdsh" if "pdsh" in {FAULTS[name].launcher for name in self.faults} else "ssh"

    @classmethod
    def parse(cls, text: str, seed: int) -> Pair:
        """Read what `str` returns.

        >>> str(Pair.parse("full@result,kill-keeper@clear", 1))
        'full@result,kill-keeper@clear'
        """
        first, _, second = text.partition(",")
        return cls(Strike.parse(first), Strike.parse(second), seed)


def pairs(seed: int) -> list[Pair]:
    """Return every pair of faults once, at places and in an order that the seed decides.

    >>> once = pairs(1)
    >>> len(once) == len(FAULTS) * (len(FAULTS) + 1) // 2
    True
    >>> pairs(1) == once, pairs(2) == once
    (True, False)
    """
    chance = random.Random(seed)
    both = list(itertools.combinations_with_replacement(FAULTS, 2))
    chance.shuffle(both)
    return [_placed(names, chance) for names in both]


def _placed(names: tuple[str, str], chance: random.Random) -> Pair:
    order = list(PLACES)
    made = []
    for fault in chance.sample(names, 2):
        place = chance.choice(_fitting(fault))
        nth = chance.randint(1, PLACES[place].calls)
        made.append(Strike(fault, place, chance.choice(["before", "after"]), nth))
    # The place that a run comes to first has the first fault; the second counts from there.
    first, second = sorted(made, key=lambda strike: order.index(strike.place))
    if not {first.place, second.place} <= _near(first.place):
        second = replace(second, place=first.place)
    return Pair(first, replace(second, nth=min(second.nth, 3)), chance.getrandbits(32))


def _fitting(fault: str) -> list[str]:
    """Return the places of a fault: a rank or launcher is there only while ranks run."""
    ranks = ("follow", "agent-poll", "logs", "rejoin")
    if fault in ("kill-rank", "kill-launcher"):
        return list(ranks)
    inside = not FAULTS[fault].signal
    return [name for name, place in PLACES.items() if not inside or place.process == "keeper"]


def _near(place: str) -> set[str]:
    """Return the places that a run comes to within seconds of a place."""
    order = list(PLACES)
    at = order.index(place)
    near = set(order[at : at + 8]) | {"logs", "follow", "answer"}
    if at >= order.index("follow"):
        # A short run ends within seconds, so its end is near its ranks.
        return near | {"bring", "result", "clear"}
    # Ranks must have begun before a restart or a takeover, which takes seconds by itself.
    return {name for name in near if not PLACES[name].needs}
