"""Pods whose libraries differ, and a build that was killed and left its lock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.sshhosts import HostsPlace
from tests.support.poll import until
from tests.support.smalljobs import small_job
from workbench import Cluster, PodSpec
from workbench.base.errors import PodError
from workbench.base.versions import installed_versions

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow

# A second installation, as far as versions go: on the
# second host another torch comes first on the path.
PYTHON = """#!/bin/sh
case "$SSH_CONNECTION" in *" 127.0.0.3 "*) export PYTHONPATH={fake};; esac
exec "{real}" "$@"
"""


@pytest.mark.long
def test_libraries_that_differ_are_refused_with_a_table_before_anything_starts(
    world: World, tmp_path: Path
) -> None:
    """Row 36."""
    fake = tmp_path / "fake"
    for name, version in (("torch", "2.9.9"), ("deepspeed", "0.15.1")):
        record = fake / f"{name}-{version}.dist-info" / "METADATA"
        record.parent.mkdir(parents=True)
        record.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = tmp_path / "python"
    here = installed_versions()
    with HostsPlace(tmp_path / "hosts") as place:
        python.write_text(PYTHON.format(fake=fake, real=place.python))
        python.chmod(0o755)
        cluster = Cluster(
            place.backend(python=str(python)), PodSpec(), count=3, path=tmp_path / "c", warm=False
        )
        with pytest.raises(PodError) as refused:
            cluster.start()
        lines = str(refused.value).splitlines()
        assert lines[0] == "the pods have different versions; make them equal first:"
        for name, other in (("deepspeed", "0.15.1"), ("torch", "2.9.9")):
            mine = here[name]
            assert f"{name}: pod-0 {mine}, pod-1 {other}, pod-2 {mine}" in lines
        assert not [line for line in lines if line.startswith("transformers: ")], (
            "what agrees is not in the table"
        )
        assert cluster.phase == "failed"
        assert list(place.root.glob("*")) == [], "nothing stays on the hosts"

    def left() -> list[list[str]]:
        return [p.argv for p in world.processes() if any(str(tmp_path) in word for word in p.argv)]

    until(lambda: not left(), 20, why=left)


@pytest.mark.long
def test_the_lock_of_a_killed_build_is_removed_and_told(world: World, tmp_path: Path) -> None:
    """Row 37: whoever wants to build an op waits, without a word, for as long as its lock is there.

    Training on CPUs builds none, so the test takes the
    lock as torch does. The killed holder is a real one.
    """
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    code = (
        "from torch.utils.file_baton import FileBaton; "
        f"assert FileBaton({str(lock)!r}).try_acquire()"
    )
    holder = subprocess.run(
        [sys.executable, "-c", f"{code}; import os; os.kill(os.getpid(), 9)"],
        check=False,
        timeout=300,
    )
    assert holder.returncode == -9
    old_s = time.time() - 25  # a run waits for the rest of half a minute
    os.utime(lock, (old_s, old_s))
    job = small_job(
        20, 2, technique="zero1", max_steps=2, env={"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    )
    run = world.cluster.submit(job, pods=1)
    submitted = time.monotonic()
    until(
        lambda: (
            "waiting for the build that holds" in world.log(run, 0, "stderr") or not lock.exists()
        ),
        120,
    )
    world.ended(run, 180).raise_for_status()
    world.measured(
        "37", "run with a stale lock submitted -> done", time.monotonic() - submitted, 60
    )
    assert f"removed the stale build lock {lock}: no build works there" in run.logs(0, "stderr")
    assert not lock.exists()
