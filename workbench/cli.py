"""The command line: `python -m workbench run SPEC.json [--out DIR]`, `… doctor`, `… plan` and `… report DIR…`.

Exit codes: 0 the run succeeded, the pods are well or the report is written; 1 not; 2 what was asked is refused and
nothing has started.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from workbench.base.errors import ConfigError, WorkbenchError
from workbench.base.files import write_json
from workbench.benchmark.report import write_report
from workbench.client.cluster import Cluster
from workbench.client.run import Run
from workbench.jobs.finetune import FineTune
from workbench.keeper.checkpoints.on_pods import held_checkpoint
from workbench.planner.plan import Fit, plan
from workbench.rundir.journal import fail_unstarted
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "doctor":
            return doctor_spec(Path(args.spec))
        if args.command == "plan":
            return plan_spec(Path(args.spec), args.gpu_memory_gib)
        if args.command == "report":
            return report_on([Path(folder) for folder in args.folders], Path(args.out))
        return run_spec(Path(args.spec), Path(args.out) if args.out else None)
    except ConfigError as error:
        _say(f"refused: {error}")
        return 2
    except WorkbenchError as error:
        _say(f"failed: {error}")
        return 1


def run_spec(spec_path: Path, out: Path | None) -> int:
    """Carry out a `SPEC.json` from pods to result."""
    spec = RunSpec.load(spec_path)
    prepared = prepare_run(spec, root=out, ask_pods=partial(held_checkpoint, Path()))
    cluster = Cluster.from_spec(spec.cluster, path=prepared.paths.root / "cluster")
    try:
        cluster.start()
    except ConfigError:
        shutil.rmtree(prepared.paths.root, ignore_errors=True)  # refused: nothing started, so nothing stays
        raise
    except WorkbenchError as error:
        write_json(prepared.paths.info, {"id": prepared.run_id, "cluster": str(cluster.path)})
        fail_unstarted(prepared.paths, prepared.spec, error)
        raise
    with cluster:
        _say(f"{cluster.message}\n{cluster.hostfile}".rstrip())
        return _follow(cluster.submit_prepared(prepared))


def doctor_spec(spec_path: Path) -> int:
    """Start the pods of a `SPEC.json`, examine them, print what is found, and stop them; nothing stays."""
    spec = RunSpec.load(spec_path).cluster.replace(warm=False)
    with TemporaryDirectory(prefix="workbench-doctor-") as folder:
        with Cluster.from_spec(spec, path=Path(folder) / "cluster") as cluster:
            diagnosis = cluster.doctor()
        _say(str(diagnosis))
    return 0 if diagnosis.ok else 1


def plan_spec(spec_path: Path, gpu_memory_gib: float | None) -> int:
    """Print what the job of a `SPEC.json` needs under every technique; nothing starts."""
    spec = RunSpec.load(spec_path)
    if not isinstance(spec.job, FineTune):
        raise ConfigError("a plan is made for a finetune job; what a script needs is not known")
    pods = spec.cluster.pods
    table = plan(
        spec.job,
        pods=spec.pods or spec.cluster.count,
        gpus=pods.slots,
        gpu_memory_gib=gpu_memory_gib,
        memory_gib=pods.memory_gib,
    )
    _say(str(table))
    return 1 if table.row(spec.job.technique).fit is Fit.NOT else 0


def report_on(folders: Sequence[Path], out: Path) -> int:
    """Write `report.html` and `report.md` on the runs below some folders; nothing starts."""
    html, md = write_report(folders, out)
    _say(f"{html}\n{md}")
    return 0


def _follow(run: Run) -> int:
    result = run.wait()
    _say(f"{result}\nrun directory: {run.path}")
    return 0 if result.state is RunState.SUCCEEDED else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workbench", description="Fine-tune over several pods.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="carry out a SPEC.json; exit 0 succeeded, 1 failed, 2 refused")
    run.add_argument("spec", metavar="SPEC.json")
    doctor = commands.add_parser("doctor", help="examine the pods of a SPEC.json; exit 0 well, 1 not, 2 refused")
    doctor.add_argument("spec", metavar="SPEC.json")
    planned = commands.add_parser("plan", help="print what a SPEC.json needs; exit 0 fits, 1 does not, 2 refused")
    planned.add_argument("spec", metavar="SPEC.json")
    planned.add_argument("--gpu-memory-gib", type=float, metavar="GIB", help="memory of one GPU; without, for CPUs")
    run.add_argument("--out", metavar="DIR", help="the run directory, new or empty")
    report = commands.add_parser("report", help="write report.html and report.md on runs; exit 0 written, 2 refused")
    report.add_argument("folders", metavar="DIR", nargs="+", help="run directories, clusters' or benchmarks' folders")
    report.add_argument("--out", metavar="DIR", default=".", help="where to; default: the current folder")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
