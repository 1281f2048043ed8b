"""No text of a rank, a pod or a stranger keeps a process busy in masking, parsing or a pattern."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.base.redact import mask_secrets

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("slowpatterns.py")
GUARD_S = 500.0  # of a loaded machine; the limits are of processor time, in the child


@pytest.mark.long
@pytest.mark.parametrize("part", ["patterns", "uses"])
def test_any_text_is_searched_masked_and_parsed_soon(part: str) -> None:
    argv = [sys.executable, "-W", "error", str(PROGRAM), part]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=GUARD_S)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines and lines[-1] == "done", done.stderr
    counts = [line["patterns"] for line in lines[:-1] if "patterns" in line]
    assert all(count > 120 for count in counts), "the program still finds the patterns"
    assert [line for line in lines[:-1] if "what" in line] == []


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "a1B2" * 8,
        "token=" + "a1b2" * 8,
        "eyJhbGciOiJI." + "e30x" * 300 + ".c2ln",
        "https://me:s3cr3tpw@host/",
    ],
)
def test_a_secret_anywhere_in_a_long_line_is_masked(secret: str) -> None:
    """Such a line is masked in pieces; a secret on a seam stands in two."""
    hidden = secret.removeprefix("token=").removeprefix("https://me:").partition("@")[0]
    for before in (
        *range(8192 - len(secret) - 3, 8192 + 3, max(1, len(secret) // 12)),
        0,
        20_000,
        30_000,
    ):
        line = "x" * (before - 1) + " " * (before > 0) + secret + " " + "y" * 9000
        masked = mask_secrets(line)
        assert len(masked) == len(line)
        assert hidden not in masked, before
        assert masked.replace("*", "") == line.replace(hidden, "")
