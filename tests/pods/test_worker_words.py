"""The words about an ended worker say only what its keeper knows."""

from __future__ import annotations

import json
from pathlib import Path

from workbench.pods.bootstrap.process import NOTE, LocalWorker


def test_an_adopted_pod_ended_without_a_known_cause(tmp_path: Path) -> None:
    root = tmp_path / "pod-0"
    root.mkdir()
    (tmp_path / "pod-0.log").write_text("last words\n")
    (root / NOTE).write_text(json.dumps({"pid": 1, "start_time": 0}))
    words = LocalWorker.adopted(root).exit_message()
    # The pod may have ended before the keeper: no order of the two is known.
    assert "died" not in words
    assert words.startswith("pod-0 has ended without a known cause, as an earlier keeper had")
    assert words.endswith("last words")
