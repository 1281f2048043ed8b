"""Create the run directory, collect outputs and write the result, on rank 0 beside training."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from workbench.agent.ranks.output import OutputStream, read_chunks
from workbench.base.clock import now_s
from workbench.base.errors import ConfigError
from workbench.base.files import read_json, write_bytes, write_json
from workbench.base.package import file_digest
from workbench.base.redact import Redactor
from workbench.handover.unattended.rank import JOB, STATUS
from workbench.pods.pod import Pod
from workbench.rundir.checkpoints import keep_newest
from workbench.rundir.events import Event
from workbench.rundir.format import FORMAT
from workbench.rundir.journal import Journal
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.outcome import MemoryPeaks, RankStatus, first_cause, rank_statuses
from workbench.rundir.output.collect import Collector
from workbench.rundir.paths import RunPaths, is_output_name
from workbench.rundir.result import RunFault
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.totals import RunTotals

_BLOCK_BYTES = 4 << 20
_LOOK_S = 0.3
_BEAT_S = 5.0


class RankFollower:
    """Copy logs, forward events while ranks run, and decide the outcome."""

    def __init__(
        self,
        paths: RunPaths,
        work: Path,
        world_size: int,
        journal: Journal,
        redact: Redactor,
        states: Collection[str],
    ):
        self._work = work
        self._world_size = world_size
        self._journal = journal
        self._collector = Collector(paths, list(range(world_size)), redact, states=states)
        self.peaks = MemoryPeaks()
        """Peak memory by address: sum of the ranks' own peaks, possibly at different times."""
        self._totals = RunTotals()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, patience_s: float) -> None:
        """Wait up to `patience_s` for the final records of all ranks, then read the rest."""
        deadline = time.monotonic() + patience_s
        while len(self.ended) < self._world_size and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self._end.set()
        self._thread.join(timeout=30)
        self._collect()
        self.peaks.record(self.ended)

    @property
    def ended(self) -> list[RankStatus]:
        statuses = [status for rank in range(self._world_size) for status in self._status(rank)]
        return [status for status in statuses if status.phase == "exited"]

    @property
    def pods(self) -> list[Pod]:
        """Pods of the ranks in rank order, with a slot per rank."""
        hosts = [(status.pod.name, status.pod.address) for status in self.ended]
        return [
            Pod(name=host[0], address=host[1], slots=hosts.count(host))
            for host in dict.fromkeys(hosts)
        ]

    def verdict(self) -> tuple[RunState, str, RunFault | None]:
        ended = self.ended
        if len(ended) == self._world_size and all(status.done for status in ended):
            return RunState.SUCCEEDED, "; ".join(["all ranks finished", *self._totals.notes]), None
        fault = first_cause(ended)
        if fault is not None:
            return (
                RunState.FAILED,
                f"rank {fault.rank} on {fault.pod}: {fault.kind}: {fault.message}",
                fault,
            )
        if any(status.stopped for status in ended):
            return RunState.CANCELLED, "stopped by the platform (SIGTERM)", None
        absent = sorted(set(range(self._world_size)) - {status.rank for status in ended})
        message = f"ranks {absent} left no word of how they ended"
        return RunState.FAILED, message, RunFault(kind="pod", message=message)

    def _loop(self) -> None:
        beat_s = time.monotonic()
        while not self._end.wait(_LOOK_S):
            self._collect()
            if time.monotonic() > beat_s:
                self._journal.keep(beat=True)
                beat_s = time.monotonic() + _BEAT_S

    def _collect(self) -> None:
        offsets = self._collector.offsets
        streams = {name: OutputStream(self._work / name) for name in offsets}
        while chunks := read_chunks(streams, offsets, _BLOCK_BYTES):
            for event in self._collector.take(chunks):
                self._record(event)

    def _record(self, printed: Event) -> None:
        event = self._journal.event(printed)
        if event is None:  # recorded before
            return
        for status in self._status(event.rank or 0):
            self.peaks.record_event(event, status.pod.address)
        if (news := self._totals.take(event)) is not None:
            self._journal.state(*news)

    def _status(self, rank: int) -> list[RankStatus]:
        record = read_json(self._work / f"rank-{rank}" / STATUS)
        pod = Pod(name=str(record.get("host", "")), address=str(record.get("address", "")))
        return rank_statuses(pod, {"ranks": [record] if record else []}, clock_offset_s=0.0)


class Coordinator:
    """Do the keeper's work for a run without a keeper."""

    def __init__(self, spec_file: Path, out: Path, *, world_size: int, started_by: str):
        self._spec_file = spec_file
        self._paths = RunPaths(out)
        self._world_size = world_size
        self._started_by = started_by
        self._work = out / "work" / "runs" / JOB
        """Folder that the trainer uses as the run's folder on a pod."""
        self._began_s = now_s()

    def prepare(self, scratch: Path) -> Mapping[str, object]:
        if read_json(self._paths.result).get("state") == RunState.SUCCEEDED:
            return {"finished": True}
        spec_file = _unpacked(self._spec_file, scratch)
        again = self._put_aside()
        spec = RunSpec.load(spec_file).resolved()
        # An elastic job may have fewer pods than requested.
        asked = spec.cluster.count or 1
        slots = spec.cluster.pods.slots
        pods = max(1, self._world_size // slots)
        if pods != asked:
            job = spec.job.on_ranks(self._world_size, before=asked * slots)
            spec = spec.replace(job=job)
        spec = spec.replace(cluster=spec.cluster.replace(count=pods), pods=None)
        # Prepare in a new folder, as the run directory may have earlier attempts.
        shutil.rmtree(scratch / "new", ignore_errors=True)  # Left by a killed start.
        prepared = prepare_run(spec, root=scratch / "new")
        self._paths.root.mkdir(parents=True, exist_ok=True)
        for path in list(prepared.paths.root.iterdir()):
            path.rename(self._paths.root / path.name)
        self._spec = prepared.spec
        info = {
            "format": FORMAT,
            "id": prepared.run_id,
            "cluster": str(self._paths.root),
            "submitted_s": self._began_s,
        }
        number = os.environ.get("SLURM_JOB_ID", "")
        write_json(self._paths.info, {**info, "unattended": self._started_by, "job": number})
        self._work.mkdir(parents=True)
        self._stage(spec, again=again)
        return {"spec": str(spec_file)}

    def begin(self) -> None:
        redact = Redactor(self._spec.cluster.pods.env, self._spec.job.env)
        self._journal = Journal(self._paths, redact)
        self._journal.state(RunState.STARTING, "starting ranks")
        self._ranks = RankFollower(
            self._paths,
            self._work,
            self._world_size,
            self._journal,
            redact,
            self._spec.job.traits.events,
        )
        self._ranks.start()

    def finish(self, patience_s: float) -> RunState:
        """Wait for the records of all ranks, move the outputs of rank 0, and write the result."""
        self._ranks.finish(patience_s)
        self._take_over()
        state, message, fault = self._ranks.verdict()
        steps = self._keep_checkpoints()
        if steps and state is not RunState.SUCCEEDED:
            message += f"; a new start continues from step {steps[0]}"
        self._journal.finish(
            state,
            message=message,
            fault=fault,
            facts={
                "launcher": self._started_by,
                "started_s": self._began_s,
                "peak_memory_gib": self._ranks.peaks.gib,
                "command": (
                    f"python -m workbench.handover.unattended {self._spec_file} {self._paths.root}"
                ),
            },
            spec=self._spec,
            pods=self._ranks.pods,
            world_size=self._world_size,
        )
        if state is RunState.SUCCEEDED:
            shutil.rmtree(self._paths.root / "work", ignore_errors=True)
        return state

    def _put_aside(self) -> bool:
        root = self._paths.root
        if not root.is_dir() or not any(root.iterdir()):
            return False
        if "unattended" not in read_json(self._paths.info):
            raise ConfigError(
                f"{root} holds something else than an unattended run; choose another folder"
            )
        self._keep_checkpoints()
        aside = root / f"attempt-{1 + sum(1 for _ in root.glob('attempt-*'))}"
        aside.mkdir()
        for path in list(root.iterdir()):
            if path.name in ("inputs", "work"):
                shutil.rmtree(path)
            elif path.name != "checkpoints" and not path.name.startswith("attempt-"):
                path.rename(aside / path.name)
        return True

    def _stage(self, spec: RunSpec, *, again: bool) -> None:
        """Write the ranks' inputs into the run's folder, with checkpoint parts to resume from."""
        parts = spec.job.restarted_from(self._paths.root, self._world_size) if again else {}
        for rank, saved in parts.items():
            shutil.copytree(saved, self._work / "resume" / f"rank-{rank}")
        here = _Here(self._work / "store")
        files = spec.job.files_for(here, self._paths.root, spec.cluster.pods.gpus)
        for name, content in files.items():
            (self._work / name).write_text(content, encoding="utf-8")

    def _take_over(self) -> None:
        """Move the model and other results into the run directory, then write their digests."""
        out = self._work / "out"
        digests: dict[str, str] = {}
        for source in sorted(
            path for path in out.rglob("*") if path.is_file() and not path.is_symlink()
        ):
            name = source.relative_to(out)
            if not is_output_name(name):
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


class _Here:
    """Stand-in for a pod with ranks beside the run directory, so no file is sent."""

    name = "here"

    def __init__(self, store: Path):
        self.store = PurePosixPath(store)

    def sees(self, path: Path) -> bool:  # noqa: ARG002
        return True

    def put(self, data: bytes, suffix: str = "") -> str:
        path = Path(self.store) / f"{hashlib.sha256(data).hexdigest()[:32]}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data)
        return str(path)

    def put_once(self, local: Path, digest: str) -> str:  # noqa: ARG002
        return str(local)

    def run(self, argv: Sequence[str]) -> str:
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def _unpacked(spec_file: Path, scratch: Path) -> Path:
    folder = scratch / "inputs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = spec_file.with_name("inputs.zip")
    if archive.is_file():
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder / RunSpec.load(spec_file).job.folder_name)
    # A script's folder may have its own spec.json.
    target = folder / ".handed-over.json"
    target.write_bytes(spec_file.read_bytes())
    return target
