"""Find names of tasks that lm-eval does not know, in a child of the notebook's process."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

_NEAR = 3
_SIMILAR = 0.5


def unknown_tasks(tasks: Sequence[str], include: str | None) -> dict[str, list[str]]:
    """Return the names unknown to lm-eval, with the nearest names."""
    manager = import_module("lm_eval.tasks").TaskManager(include_path=include)
    known = list(manager.all_tasks)
    return {
        name: difflib.get_close_matches(name, known, n=_NEAR, cutoff=_SIMILAR)
        for name in tasks
        if name not in known
    }


def refusal(unknown: Mapping[str, Sequence[str]]) -> str:
    """Return the message about unknown tasks."""
    named = []
    for name, near in unknown.items():
        nearest = f" (nearest: {', '.join(near)})" if near else ""
        named.append(f"{name!r}{nearest}")
    return (
        f"lm-eval does not know the tasks {', '.join(named)}. Correct the names; "
        "`lm-eval ls tasks` lists all. Give the folder of a task file of yours as include_path="
    )


def main() -> None:
    """Answer the request on standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request: Mapping[str, Any] = json.load(sys.stdin)
    reply = unknown_tasks(request["tasks"], request["include"])
    out.write(json.dumps(reply) + "\n")
    out.close()
