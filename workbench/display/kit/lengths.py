"""Facts about the lengths of a run's texts: the longest ones, and how many were cut."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.base.json_values import as_int
from workbench.base.words import count


def length_facts(lengths: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the facts with their names; a text that is empty has nothing to state.

    Example:
        >>> length_facts({"answers": 24, "cut_answers": 8, "longest_answer": 128})
        [('tokens of the longest texts', 'answer 128'), ('cut answers', '8 of 24, at 128 tokens')]
    """
    longest = []
    facts = []
    for part in ("question", "answer"):
        tokens = as_int(lengths.get(f"longest_{part}"))
        if not tokens:
            continue
        longest.append(f"{part} {count(tokens)}")
        cut = as_int(lengths.get(f"cut_{part}s"))
        if cut:
            of = count(as_int(lengths.get(f"{part}s")))
            facts.append((f"cut {part}s", f"{count(cut)} of {of}, at {count(tokens)} tokens"))
    return [("tokens of the longest texts", ", ".join(longest)), *facts]
