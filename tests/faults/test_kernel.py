"""The stop button and the death of a real Jupyter kernel that waits for a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jupyter_client.manager import KernelManager

from workbench import Run
from workbench.base.files import read_json
from workbench.rundir.state import RunState

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow
LIMIT_S = 300.0

START = """
from workbench import Cluster, LocalPods, Script
cluster = Cluster(LocalPods(), count=3, path={path!r}, warm=False, idle_timeout_s=12).start()
run = cluster.submit(Script(path={script!r}, args=["--until", {end!r}]))
print(run.path)
"""


class Kernel:
    """A kernel and what its cells print."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def begin(self, code: str) -> str:
        return str(self.client.execute(code))

    def shows(self, cell: str) -> None:
        """Wait for the first output of a cell: by then it is at work."""
        while True:
            message = self.client.get_iopub_msg(timeout=LIMIT_S)
            if message["parent_header"].get("msg_id") == cell and (
                message["msg_type"] in ("stream", "display_data")
            ):
                return

    def end_of(self, cell: str, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """Wait for the reply to a cell; `output` is all that it has printed."""
        text, deadline = "", time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=timeout_s)
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            text += content.get("text", "") + "\n".join(content.get("traceback", []))
            if content.get("execution_state") == "idle":
                return {**self.reply_to(cell, timeout_s), "output": text}
        raise TimeoutError(text)

    def reply_to(self, cell: str, timeout_s: float) -> dict[str, Any]:
        while True:
            reply = self.client.get_shell_msg(timeout=timeout_s)
            if reply["parent_header"].get("msg_id") == cell:
                return dict(reply["content"])


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    (tmp_path / "end").touch()  # whatever the test came to
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


@pytest.mark.long
def test_a_kernel_may_be_interrupted_and_killed(
    world: World, tmp_path: Path, kernel: Kernel
) -> None:
    """Rows 14, 15 and 16: Jupyter's interrupt goes to the kernel's whole process group."""
    end, root = tmp_path / "end", tmp_path / "c"
    script = str(Path(__file__).parent.parent / "scripts" / "beat.py")
    started = kernel.end_of(kernel.begin(START.format(path=str(root), script=script, end=str(end))))
    assert started["status"] == "ok", started
    run = Run.load(started["output"].strip().splitlines()[-1])
    for times in (1, 3):
        waiting = kernel.begin("run.wait()")
        world.until(lambda: " line 3" in world.log(run, 0), 120)
        kernel.shows(waiting)  # an interrupt that comes before is lost
        asked = time.monotonic()
        for _ in range(times):
            kernel.manager.interrupt_kernel()
            time.sleep(0.2)
        reply = kernel.end_of(waiting)
        world.measured("14/15", f"{times} interrupts -> prompt", time.monotonic() - asked, 5)
        assert reply["status"] == "error"
        assert (
            reply["ename"] in ("Detached", "KeyboardInterrupt")
            if times > 1
            else reply["ename"] == "Detached"
        )
        assert "the run continues" in reply["output"] or times > 1
        assert "run.py" not in reply["output"], "a storm of tracebacks:\n" + reply["output"]
        assert run.state is RunState.RUNNING
    kernel.manager.signal_kernel(9)
    seen = len(world.log(run, 1))
    world.until(lambda: len(world.log(run, 1)) > seen, 120)
    end.touch()
    world.ended(run).raise_for_status()
    went_s = world.until(lambda: read_json(root / "state.json").get("phase") == "closed", 120)
    world.measured("16", "run over, kernel dead, idle_timeout_s=12 -> pods gone", went_s, 15)
    world.until(
        lambda: not [p for p in world.processes() if any(str(root) in word for word in p.argv)],
        120,
        every_s=0.2,
    )
