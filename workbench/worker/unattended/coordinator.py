"""What the first of the ranks that nobody looks after does beside training: it makes the run directory and judges.

It does for OUT what a keeper does for a run of its cluster: the rows are prepared once, what the ranks print becomes
logs, events and curves, and the result is written last. An attempt that was cut short is put aside, and the next one
goes on from its newest checkpoint where it left one.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.files import read_json, write_json
from workbench.base.package import file_digest
from workbench.jobs.finetune import FineTune
from workbench.rundir.checkpoints.choose import Checkpoint, newest_good
from workbench.rundir.journal import Journal
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.worker.unattended.journal import Scribe

__all__ = ["Head"]

_KEPT = 2


class Head:
    """The keeper's part of a run that has none."""

    def __init__(self, spec_file: Path, out: Path, *, world_size: int, started_by: str):
        self._spec_file, self._paths = spec_file, RunPaths(out)
        self._world_size, self._started_by = world_size, started_by
        self._spec: RunSpec | None = None
        self._journal: Journal | None = None
        self._began_s = time.time()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._scribe: Scribe | None = None

    @property
    def work(self) -> Path:
        """The folder that the trainer takes for that of its run on a pod."""
        return self._paths.root / "work"

    def prepare(self, scratch: Path) -> Mapping[str, object]:
        """Make the run directory."""
        if read_json(self._paths.result).get("state") == RunState.SUCCEEDED:
            return {"finished": True}
        spec_file = _unpacked(self._spec_file, scratch)
        again = self._put_aside()
        spec = RunSpec.load(spec_file)
        pods = max(1, self._world_size // spec.cluster.pods.slots)  # an elastic job may have fewer than were asked for
        spec = spec.replace(cluster=spec.cluster.replace(count=pods), pods=None)
        found = self._checkpoint(spec) if again else None
        hidden = _hide(self._paths.root, scratch)
        try:
            prepared = prepare_run(spec, root=self._paths.root)
        finally:
            _show(hidden, self._paths.root)
        self._spec = prepared.spec
        info = {"id": prepared.run_id, "cluster": str(self._paths.root), "submitted_s": self._began_s}
        write_json(self._paths.info, {**info, "unattended": self._started_by})
        self.work.mkdir()
        if isinstance(spec.job, FineTune):
            self._write_job(spec, found)
        return {"spec": str(spec_file)}

    def begin(self) -> None:
        """Start to write down what the ranks print."""
        self._journal = Journal(self._paths)
        self._journal.state(RunState.STARTING, "starting ranks")
        self._scribe = Scribe(self._paths, self.work, self._world_size, self._journal)
        self._thread = threading.Thread(target=self._follow, name="scribe", daemon=True)
        self._thread.start()

    def finish(self, patience_s: float) -> RunState:
        """Wait for the records of all ranks, take over what the first one left, and write the result."""
        assert self._scribe is not None
        assert self._journal is not None
        assert self._spec is not None
        self._scribe.await_ends(patience_s)
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=30)
        self._scribe.look()
        self._take_over()
        state, message, fault = self._scribe.verdict()
        steps = [path.name.removeprefix("step-") for path in self._keep_checkpoints()]
        if steps and state is not RunState.SUCCEEDED:
            message += f"; started again, it goes on from step {steps[0]}"
        facts: Mapping[str, object] = {
            "launcher": self._started_by,
            "started_s": self._began_s,
            "peak_memory_gib": self._scribe.peak_memory_gib,
            "command": f"python -m workbench.worker.unattended {self._spec_file} {self._paths.root}",
        }
        self._journal.finish(
            state,
            message=message,
            fault=fault,
            facts=facts,
            spec=self._spec,
            pods=self._scribe.pods,
            world_size=self._world_size,
        )
        if state is RunState.SUCCEEDED:
            shutil.rmtree(self.work, ignore_errors=True)
        return state

    def _follow(self) -> None:
        assert self._scribe is not None
        while not self._end.wait(0.3):
            self._scribe.look()

    def _put_aside(self) -> bool:
        """Move what an earlier attempt wrote into a folder of its own; tell whether there was one."""
        root = self._paths.root
        if not root.is_dir() or not any(root.iterdir()):
            return False
        if "unattended" not in read_json(self._paths.info):
            raise ConfigError(f"{root} holds something else than an unattended run; choose another folder")
        self._keep_checkpoints()
        number = 1 + sum(1 for _ in root.glob("attempt-*"))
        aside = root / f"attempt-{number}"
        aside.mkdir()
        for path in list(root.iterdir()):
            if path.name in ("inputs", "work"):
                shutil.rmtree(path)
            elif path.name != "checkpoints" and not path.name.startswith("attempt-"):
                path.rename(aside / path.name)
        return True

    def _checkpoint(self, spec: RunSpec) -> Checkpoint | None:
        if not isinstance(spec.job, FineTune) or spec.job.save_steps is None:
            return None
        try:
            found = newest_good(self._paths.root, last_step=spec.job.max_steps)
        except ConfigError:
            return None  # from the beginning, then
        return found if found.world_size == self._world_size else None

    def _write_job(self, spec: RunSpec, found: Checkpoint | None) -> None:
        """Write the job as the trainer reads it: paths of this folder, GPUs of a pod."""
        told = json.loads(self._paths.job.read_text(encoding="utf-8"))
        for part in ("train", "eval"):
            told[part] = str(self._paths.inputs / told[part]) if told[part] else None
        told["gpus"] = spec.cluster.pods.gpus
        if found is not None:
            told["job"]["resume"] = str(self._paths.root)
            for rank, saved in found.parts.items():
                shutil.copytree(saved, self.work / "resume" / f"rank-{rank}")
        write_json(self.work / "job.json", told)

    def _take_over(self) -> None:
        """Return the model and the other results their places in the run directory, the list of them last."""
        out = self.work / "out"
        sums: dict[str, str] = {}
        for source in sorted(out.rglob("*")):
            if not source.is_file():
                continue
            name = source.relative_to(out)
            target = self._paths.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            sums[str(name)] = file_digest(source)
            source.replace(target)
        if sums:
            write_json(self._paths.manifest, sums)

    def _keep_checkpoints(self) -> list[Path]:
        """Move checkpoints to where a run directory has them, and give the last two, newest first."""
        for part in self.work.glob("checkpoints/step-*/rank-*"):
            if part.suffix != ".part":
                target = self._paths.checkpoints / part.parent.name / "pods" / part.name
                target.parent.mkdir(parents=True, exist_ok=True)
                part.replace(target)
        steps = self._paths.checkpoints.glob("step-*")
        ordered = sorted(steps, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
        for old in ordered[_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
        return ordered[:_KEPT]


def _unpacked(spec_file: Path, scratch: Path) -> Path:
    """Put the specification beside the files that it names."""
    folder = scratch / "inputs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = spec_file.with_name("inputs.zip")
    if archive.is_file():
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)
    target = folder / ".handed-over.json"  # a script's folder may hold a spec.json of its own
    target.write_bytes(spec_file.read_bytes())
    return target


def _hide(root: Path, scratch: Path) -> list[Path]:
    """Take what an earlier attempt left out of the way: a run directory is made new."""
    hidden = []
    for path in list(root.iterdir()) if root.is_dir() else []:
        path.rename(scratch / path.name)
        hidden.append(scratch / path.name)
    return hidden


def _show(hidden: list[Path], root: Path) -> None:
    root.mkdir(exist_ok=True)
    for path in hidden:
        path.rename(root / path.name)
