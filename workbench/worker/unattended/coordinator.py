"""What the first of the ranks that nobody looks after does beside training: it makes the run directory and judges."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

from workbench.base.clock import now_s
from workbench.base.errors import ConfigError
from workbench.base.files import read_json, write_json
from workbench.base.json_values import part
from workbench.base.package import file_digest
from workbench.base.redact import Redactor
from workbench.jobs.finetune import FineTune
from workbench.rundir.checkpoints import Checkpoint, keep_newest, newest_good, remove_after
from workbench.rundir.journal import Journal
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.make.resume import bound_to_ranks
from workbench.rundir.paths import RunPaths, is_left
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.worker.unattended.journal import RankFollower


class Coordinator:
    """The keeper's part of a run that has none."""

    def __init__(self, spec_file: Path, out: Path, *, world_size: int, started_by: str):
        self._spec_file, self._paths = spec_file, RunPaths(out)
        self._world_size, self._started_by = world_size, started_by
        self._work = out / "work"
        """What the trainer takes for the folder of its run on a pod."""
        self._began_s = now_s()

    def prepare(self, scratch: Path) -> Mapping[str, object]:
        if read_json(self._paths.result).get("state") == RunState.SUCCEEDED:
            return {"finished": True}
        spec_file = _unpacked(self._spec_file, scratch)
        again = self._put_aside()
        spec = RunSpec.load(spec_file).resolved()
        # An elastic job may have fewer pods than were asked for.
        asked, slots = spec.cluster.count or 1, spec.cluster.pods.slots
        pods = max(1, self._world_size // slots)
        match spec.job:
            case FineTune() as job if pods != asked:
                spec = spec.replace(job=job.on_ranks(self._world_size, before=asked * slots))
        spec = spec.replace(cluster=spec.cluster.replace(count=pods), pods=None)
        # Elsewhere first: a run directory is made new, and this one may hold earlier attempts.
        shutil.rmtree(scratch / "new", ignore_errors=True)  # of a start that was killed
        prepared = prepare_run(spec, root=scratch / "new")
        self._paths.root.mkdir(parents=True, exist_ok=True)
        for path in list(prepared.paths.root.iterdir()):
            path.rename(self._paths.root / path.name)
        self._spec = prepared.spec
        info = {"id": prepared.run_id, "cluster": str(self._paths.root), "submitted_s": self._began_s}
        write_json(self._paths.info, {**info, "unattended": self._started_by})
        self._work.mkdir()
        match spec.job:
            case FineTune() as job:
                self._write_job(spec, self._checkpoint(job) if again else None)
        return {"spec": str(spec_file)}

    def begin(self) -> None:
        redact = Redactor(self._spec.cluster.pods.env, self._spec.job.env)
        self._journal = Journal(self._paths, redact)
        self._journal.state(RunState.STARTING, "starting ranks")
        self._ranks = RankFollower(self._paths, self._work, self._world_size, self._journal, redact)
        self._ranks.start()

    def finish(self, patience_s: float) -> RunState:
        """Wait for the records of all ranks, take over what the first one left, and write the result."""
        self._ranks.finish(patience_s)
        self._take_over()
        state, message, fault = self._ranks.verdict()
        steps = self._keep_checkpoints()
        if steps and state is not RunState.SUCCEEDED:
            message += f"; started again, it goes on from step {steps[0]}"
        self._journal.finish(
            state,
            message=message,
            fault=fault,
            facts={
                "launcher": self._started_by,
                "started_s": self._began_s,
                "peak_memory_gib": self._ranks.peak_memory_gib,
                "command": f"python -m workbench.worker.unattended {self._spec_file} {self._paths.root}",
            },
            spec=self._spec,
            pods=self._ranks.pods,
            world_size=self._world_size,
        )
        if state is RunState.SUCCEEDED:
            shutil.rmtree(self._work, ignore_errors=True)
        return state

    def _put_aside(self) -> bool:
        root = self._paths.root
        if not root.is_dir() or not any(root.iterdir()):
            return False
        if "unattended" not in read_json(self._paths.info):
            raise ConfigError(f"{root} holds something else than an unattended run; choose another folder")
        self._keep_checkpoints()
        aside = root / f"attempt-{1 + sum(1 for _ in root.glob('attempt-*'))}"
        aside.mkdir()
        for path in list(root.iterdir()):
            if path.name in ("inputs", "work"):
                shutil.rmtree(path)
            elif path.name != "checkpoints" and not path.name.startswith("attempt-"):
                path.rename(aside / path.name)
        return True

    def _checkpoint(self, job: FineTune) -> Checkpoint | None:
        if job.save_steps is None:
            return None
        try:
            newest = newest_good(self._paths.root, last_step=job.max_steps)
        except ConfigError:
            return None  # from the beginning, then
        if newest.world_size != self._world_size and bound_to_ranks(job, part(read_json(self._paths.job), "deepspeed")):
            return None
        remove_after(self._paths.checkpoints, newest.step)  # parts of another number of ranks must not mix
        return newest

    def _write_job(self, spec: RunSpec, checkpoint: Checkpoint | None) -> None:
        resolved = json.loads(self._paths.job.read_text(encoding="utf-8"))
        for rows in ("train", "eval"):
            resolved[rows] = str(self._paths.inputs / resolved[rows]) if resolved[rows] else None
        resolved["gpus"] = spec.cluster.pods.gpus
        if checkpoint is not None:
            resolved["job"]["resume"] = str(self._paths.root)
            for rank, saved in checkpoint.parts.items():
                shutil.copytree(saved, self._work / "resume" / f"rank-{rank}")
        write_json(self._work / "job.json", resolved)

    def _take_over(self) -> None:
        """Move the model and the other results to their places in the run directory; their digests are listed last."""
        out = self._work / "out"
        digests: dict[str, str] = {}
        for source in sorted(path for path in out.rglob("*") if path.is_file() and not path.is_symlink()):
            name = source.relative_to(out)
            if not is_left(name):
                continue
            target = self._paths.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            digests[str(name)] = file_digest(source)
            source.replace(target)
        if digests:
            write_json(self._paths.manifest, digests)

    def _keep_checkpoints(self) -> list[int]:
        for saved in self._work.glob("checkpoints/step-*/rank-*"):
            if saved.suffix != ".part":
                target = self._paths.checkpoints / saved.parent.name / "pods" / saved.name
                target.parent.mkdir(parents=True, exist_ok=True)
                saved.replace(target)
        return keep_newest(self._paths.checkpoints)


def _unpacked(spec_file: Path, scratch: Path) -> Path:
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
