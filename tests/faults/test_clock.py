"""A clock that jumps, an hour ahead and two back, under notebook and keeper while a run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BEAT = Path(__file__).parent.parent / "scripts" / "beat.py"

# Every Python that is started with this on its path has
# the wall clock that a file says; monotonic ones go on.
JUMPING = """
import os, time
_real = time.time
def _time():
    try:
        with open(os.environ["CLOCK"]) as file:
            return _real() + float(file.read() or 0)
    except (KeyError, OSError):
        return _real()
time.time = _time
"""
DRIVER = """
import json, os, sys, time
from pathlib import Path
from tests.support.poll import until
from workbench import Cluster, LocalPods, Script

clock, end = Path(os.environ["CLOCK"]), Path(sys.argv[3])
options = {"warm": False, "lease_s": 60, "idle_timeout_s": 300}
with Cluster(LocalPods(), count=2, path=sys.argv[1], **options) as cluster:
    began_s = time.monotonic()
    run = cluster.submit(Script(path=sys.argv[2], args=["--until", str(end)]))
    until(lambda: run.paths.rank_log(0, 1, "stdout").exists(), 60)
    messages = []
    for offset_s in (3600, -3600, 90, -90):
        clock.write_text(str(offset_s))
        seen = len(run.logs(1, "stdout", None))
        until(lambda: len(run.logs(1, "stdout", None)) > seen + 500, 60)
        messages.append(run.message)
    end.touch()
    result = run.wait(300, progress=False)
    whole_s = time.monotonic() - began_s
    lines = run.logs(1, "stdout", None).splitlines()
    whole = lines == [f"rank 1 line {n}" for n in range(len(lines))]
    again = cluster.submit(Script(path=sys.argv[2], args=["--lines", "3"])).wait(300, False)
print(json.dumps({"state": result.state, "again": again.state, "whole": whole, "lines": len(lines),
                  "duration_s": result.duration_s, "whole_s": whole_s, "messages": messages}))
"""


@pytest.mark.long
def test_a_clock_that_jumps_ends_nothing_and_spoils_no_figure(tmp_path: Path) -> None:
    """Row 50."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "CLOCK": str(tmp_path / "clock"),
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}",
    }
    words = [str(tmp_path / "c"), str(BEAT), str(tmp_path / "end")]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *words], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["state"], seen["again"], seen["whole"]) == ("succeeded", "succeeded", True)
    assert not [
        message for message in seen["messages"] if "no sign" in message or "no step" in message
    ]
    assert 1 < seen["duration_s"] < seen["whole_s"] + 1
