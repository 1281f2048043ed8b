"""The power goes: what was said to be finished is on the disk, and every cluster is usable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.powercut import isolated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system"),
]


def formatted(kind: str, folder: Path) -> Sequence[Path]:
    """Return the paths of a new file system, of its later copy, and of the folder to mount it."""
    make = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if make is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    image, cut, disk = (folder / name for name in ("image", "cut", "disk"))
    disk.mkdir()
    image.touch()
    os.truncate(image, 1 << 30)
    subprocess.run([make, "-q", image], check=True)
    return image, cut, disk


@pytest.mark.parametrize(
    ("kind", "moment"),
    [("ext4", "ended"), ("xfs", "ended"), ("ext4", "training")],
)
def test_a_power_cut_loses_nothing_that_was_said_to_be_finished(
    kind: str, moment: str, tmp_path: Path
) -> None:
    image, cut, disk = formatted(kind, tmp_path)
    asked = isolated("before", str(image), str(disk), str(cut), moment)
    told = isolated("after", str(cut), str(disk), str(asked["run"]), moment)
    assert told["next"] == "succeeded"
    if moment == "ended":
        assert asked["state"] == told["state"] == "succeeded"
        assert (told["steps"], told["lines"], told["bytes"]) == (99, 100, 3_000_000)
        assert asked["samples"]
        assert told["samples"] == asked["samples"]
    else:
        assert told["state"] == "failed"
        assert "rebooted" in str(told["message"])
        checkpoint = told["checkpoint"]
        assert isinstance(checkpoint, int)
        assert checkpoint >= 10
        assert told["resumed"] == checkpoint + 3


@pytest.mark.parametrize("seed", range(int(os.environ.get("POWER_CUTS", "1"))))
def test_a_power_cut_at_any_moment_loses_no_run_and_no_cluster(seed: int, tmp_path: Path) -> None:
    """`POWER_CUTS=20 pytest tests/faults/test_power.py` tries twenty moments."""
    image, cut, disk = formatted(("ext4", "xfs")[seed % 2], tmp_path)
    asked = isolated("at_random", str(image), str(disk), str(cut), str(seed))
    said = asked["said"]
    assert isinstance(said, dict)
    told = isolated("after_random", str(cut), str(disk), *said)
    assert told["next"] == "succeeded", told
    runs = told["runs"]
    assert isinstance(runs, dict)
    for path, state in said.items():
        found = runs[path]
        if state == "succeeded" or found["state"] == "succeeded":
            assert found["state"] == "succeeded", (said, told)
            assert (found["steps"], found["lines"], found["bytes"]) == (
                99,
                100,
                3_000_000,
            ), json.dumps((said, told), indent=1)
        else:
            assert found["state"] == "failed", (said, told)
            assert "rebooted" in found["message"], told
