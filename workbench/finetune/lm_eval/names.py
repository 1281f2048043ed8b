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


def task_manager(tasks: Sequence[str], include: str | None) -> Any:
    """Return lm-eval's index of tasks, without lm-eval's own tasks where none of them is asked for.

    To read lm-eval's own files takes 5 s of CPU. A group of an own file may name lm-eval's tasks.
    """
    make = import_module("lm_eval.tasks").TaskManager
    if include is not None:
        own = make(include_path=include, include_defaults=False)
        if set(tasks) <= set(own.all_subtasks):
            return own
    return make(include_path=include)


def unknown_tasks(tasks: Sequence[str], manager: Any) -> dict[str, list[str]]:
    """Return the names unknown to lm-eval, with the nearest names."""
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
    tasks = request["tasks"]
    reply = unknown_tasks(tasks, task_manager(tasks, request["include"]))
    out.write(json.dumps(reply) + "\n")
    out.close()
