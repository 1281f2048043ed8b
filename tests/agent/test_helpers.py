"""A helper of the warm server: what lies in the place of its answer holds no agent. No process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.agent.ranks.launcher import Helpers


def _write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize(
    ("put", "answer"),
    [
        (
            lambda path: _write(path, '{"prediction": 2}'),
            {"state": "done", "answer": {"prediction": 2}},
        ),
        (os.mkfifo, {"state": "none"}),
        (lambda path: path.symlink_to("/dev/zero"), {"state": "none"}),
        (lambda path: _write(path, "[" * 100_000), {"state": "none"}),
    ],
    ids=["an answer", "a pipe", "a device", "deep brackets"],
)
def test_an_answer_is_a_regular_file(
    tmp_path: Path, put: Callable[[Path], None], answer: dict[str, object]
) -> None:
    warm: Any = SimpleNamespace(serves=lambda _: True)
    (tmp_path / "plan").mkdir()
    put(tmp_path / "plan" / "answer.json")
    assert Helpers(tmp_path, warm).ask("plan", {}) == answer
    assert not (tmp_path / "plan").exists()
