"""The power goes: what was said to be finished is on the disk, and every cluster is usable."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.powercut import isolated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system"),
]


@pytest.mark.parametrize(
    ("kind", "moment"),
    [("ext4", "ended"), ("xfs", "ended"), ("ext4", "training")],
)
def test_a_power_cut_loses_nothing_that_was_said_to_be_finished(
    kind: str, moment: str, tmp_path: Path
) -> None:
    make = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if make is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    image, cut, disk = (tmp_path / name for name in ("image", "cut", "disk"))
    disk.mkdir()
    image.touch()
    os.truncate(image, 1 << 30)
    subprocess.run([make, "-q", image], check=True)
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
