"""What a trial came to, and the table of all of them."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class Outcome:
    """One trial."""

    kind: str
    """kill, keeper, cut, disk, checkpoint, soak or pair; `close` for the last end of the pods."""
    victim: str
    launcher: str = "ssh"
    phase: str = ""
    signal: str = ""
    state: str = ""
    """How the run ended."""
    shown_s: float | None = None
    """From the fault to a state that says so; None where the run outlived it."""
    false_success: bool = False
    """Whether it succeeded though a rank had not come to its end."""
    cause: str = "none due"
    """named, wrong, missing; or `none due` where the run was to succeed and did."""
    lost_lines: int = 0
    """Lines that a rank printed on a pod that lived on and that are not here, or are here twice."""
    left_on_the_dead: int = 0
    """Lines that a rank printed on a pod or under an agent that died, and that are not here."""
    orphans: list[str] = field(default_factory=list)
    unusable: bool = False
    """Whether a checkpoint had been saved and the next run could not go on from it."""
    taken_over: bool = False
    """Whether a new keeper finished the run."""
    not_outlived: bool = False
    """Whether a run that was to go on in spite of the fault ended of it."""
    missed: bool = False
    """Whether no process of the kind was left to be signalled, or a place was not reached."""
    fired: int = 0
    """Faults of a pair that were caused."""
    events_twice: int = 0
    """Events of a rank that the run has more than once."""
    events_missing: int = 0
    """Events of a rank that the run lacks though it has later ones, or though it succeeded."""
    trained_twice: int = 0
    """Starts of a rank beyond the first of an attempt, and all starts of a refused run."""
    restarts_claimed: int = 0
    """Restarts that a succeeded run reports and that no rank made."""
    repeat: str = ""
    """The command that makes a pair again."""
    message: str = ""
    trouble: str = ""
    """A traceback where the trial itself came to grief; it is judged as nothing."""

    @property
    def is_bad(self) -> bool:
        """Whether the trial makes the program fail."""
        counts = (
            self.lost_lines,
            self.events_twice,
            self.events_missing,
            self.trained_twice,
            self.restarts_claimed,
        )
        of_a_pair = self.kind == "pair" and (self.cause == "wrong" or self.state == "hung")
        return bool(self.false_success or self.orphans or self.unusable or any(counts) or of_a_pair)


@dataclass
class Tally:
    """All trials of one program run."""

    seed: int
    minutes: float
    outcomes: list[Outcome] = field(default_factory=list)
    growth: dict[str, float] = field(default_factory=dict)
    """Of the keeper over the soak: MiB, file descriptors, threads, and the number of runs."""
    not_reached: int = 0
    """Trials of the plan for which there was no time."""
    took_s: float = 0.0

    @property
    def broken(self) -> list[Outcome]:
        """The trials that make the program fail."""
        return [outcome for outcome in self.outcomes if outcome.is_bad]

    @property
    def trials(self) -> list[Outcome]:
        """All but the last closing."""
        return [o for o in self.outcomes if o.kind != "close"]

    @property
    def flat(self) -> bool:
        """Whether the keeper did not grow; true where it was not measured."""
        limits = {"rss_mib": 8.0, "fds": 3.0, "threads": 3.0}
        return all(self.growth.get(name, 0.0) <= limit for name, limit in limits.items())

    def rows(self) -> list[tuple[str, ...]]:
        """The table, its heading first."""
        heading = (
            "what",
            "injected",
            "shown s: median",
            "p95",
            "max",
            "false successes",
            "wrong cause",
        )
        heading += (
            "missing cause",
            "orphans",
            "lost lines",
            "unusable checkpoints",
            "ended by a new keeper",
        )
        heading += ("events twice", "events missing", "trained twice", "restarts claimed")
        heading += ("not outlived", "missed", "unjudged")
        groups: dict[str, list[Outcome]] = {}
        for outcome in self.trials + [o for o in self.outcomes if o.orphans and o.kind == "close"]:
            groups.setdefault(_group(outcome), []).append(outcome)
        body = [_row(name, groups[name]) for name in sorted(groups)]
        return [heading, *body, _row("all", self.trials)]

    def text(self) -> str:
        """Return the table for a terminal, and what it needs to be read."""
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join([*lines, *self._notes()])

    def markdown(self) -> str:
        """Return the same as Markdown."""
        heading, *body = self.rows()
        lines = [_line(heading), _line(["---"] * len(heading)), *map(_line, body)]
        return "\n".join(["# Chaos", "", *lines, "", *(f"- {note}" for note in self._notes()), ""])

    def save(self, folder: Path) -> None:
        """Write chaos.json, every trial in it, and chaos.md."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chaos.json").write_text(json.dumps(asdict(self), indent=1))
        (folder / "chaos.md").write_text(self.markdown())

    def _notes(self) -> list[str]:
        dead = sum(o.left_on_the_dead for o in self.outcomes)
        notes = [f"seed {self.seed}; {len(self.trials)} trials in {self.took_s / 60:.1f} minutes"]
        ends = Counter(o.state or "unjudged" for o in self.trials)
        notes.append(
            "ends: " + ", ".join(f"{count} {state}" for state, count in ends.most_common())
        )
        if self.not_reached:
            notes.append(f"{self.not_reached} planned trials were not reached in time")
        notes.append(f"lines left on pods or under agents that died: {dead}")
        pairs = [o for o in self.trials if o.kind == "pair"]
        if pairs:
            both = sum(o.fired == 2 for o in pairs)
            notes.append(f"pairs: {len(pairs)}, of which {both} had both faults")
        notes += [f"to repeat: {o.repeat}" for o in self.broken if o.repeat]
        if self.growth:
            grown = ", ".join(
                f"{name} {value:+.1f}" for name, value in self.growth.items() if name != "runs"
            )
            notes.append(f"the keeper over {self.growth['runs']:.0f} runs: {grown}")
        return notes


def _group(outcome: Outcome) -> str:
    victim = (
        outcome.victim if outcome.launcher == "ssh" else f"{outcome.victim} ({outcome.launcher})"
    )
    if outcome.kind == "pair":
        # A row for each first fault: a row for each pair would be a hundred rows.
        return f"pair: {victim.partition(' and ')[0]}"
    return f"{outcome.kind}: {victim}"


def _row(name: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    shown = sorted(o.shown_s for o in outcomes if o.shown_s is not None)
    times = (
        (statistics.median(shown), shown[min(len(shown) - 1, int(len(shown) * 0.95))], shown[-1])
        if shown
        else ()
    )
    counts = (
        sum(o.false_success for o in outcomes),
        sum(o.cause == "wrong" for o in outcomes),
        sum(o.cause == "missing" for o in outcomes),
        sum(len(o.orphans) for o in outcomes),
        sum(o.lost_lines for o in outcomes),
        sum(o.unusable for o in outcomes),
        sum(o.taken_over for o in outcomes),
        sum(o.events_twice for o in outcomes),
        sum(o.events_missing for o in outcomes),
        sum(o.trained_twice for o in outcomes),
        sum(o.restarts_claimed for o in outcomes),
        sum(o.not_outlived for o in outcomes),
        sum(o.missed for o in outcomes),
        sum(bool(o.trouble) for o in outcomes),
    )
    seconds = [f"{value:.1f}" for value in times] or ["-"] * 3
    return (name, str(len(outcomes)), *seconds, *map(str, counts))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
