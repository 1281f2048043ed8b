"""The command line: `workbench run SPEC.json [--out DIR]`, `doctor`, `plan`, `verify` and `report`.

Exit codes: 0 the run succeeded, the pods passed all checks, no claim failed or the report is
written; 1 failure; 2 the request is refused and nothing has started. A verb imports only its own
modules, so `--help` is fast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from workbench.base.errors import ConfigError, DiskFull, WorkbenchError
from workbench.base.files import gate
from workbench.base.files.disk import full_disk_named


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        with full_disk_named(getattr(args, "out", None) or Path.cwd()):
            done: bool = args.verb(args)
        return 0 if done else 1
    except (ConfigError, DiskFull) as error:
        _say(f"refused: {error}")
        return 2
    except WorkbenchError as error:
        _say(f"failed: {error}")
        return 1


def _run(args: argparse.Namespace) -> bool:
    from workbench.base.files import write_json
    from workbench.client.cluster import Cluster
    from workbench.keeper.checkpoints import held_checkpoint
    from workbench.rundir.journal import fail_unstarted
    from workbench.rundir.make.prepare import prepare_run
    from workbench.rundir.spec import RunSpec
    from workbench.rundir.state import RunState

    spec = RunSpec.load(args.spec)
    prepared = prepare_run(spec, root=args.out, ask_pods=partial(held_checkpoint, Path()))
    folder = prepared.paths.root / "cluster"
    try:
        cluster = Cluster.from_spec(spec.cluster, path=folder)
        cluster.start()
    except (ConfigError, DiskFull):
        # Refused: nothing started, so nothing stays.
        gate.remove_tree(prepared.paths.root)
        raise
    except WorkbenchError as error:
        write_json(prepared.paths.info, {"id": prepared.run_id, "cluster": str(cluster.path)})
        fail_unstarted(prepared.paths, prepared.spec, error)
        raise
    with cluster:
        _say(f"{cluster.message}\n{cluster.hostfile}".rstrip())
        run = cluster.submit_prepared(prepared)
        result = run.wait()
        _say(f"{result}\nrun directory: {run.path}")
        return result.state is RunState.SUCCEEDED


def _doctor(args: argparse.Namespace) -> bool:
    """Start the pods of a `SPEC.json`, examine them, print the findings, and stop the pods."""
    from workbench.client.cluster import Cluster
    from workbench.rundir.spec import RunSpec

    spec = RunSpec.load(args.spec).cluster.replace(warm=False)
    with TemporaryDirectory(prefix="workbench-doctor-") as folder:
        with Cluster.from_spec(spec, path=Path(folder) / "cluster") as cluster:
            diagnosis = cluster.doctor()
        _say(str(diagnosis))
    return diagnosis.ok


def _plan(args: argparse.Namespace) -> bool:
    from workbench.rundir.spec import RunSpec

    spec = RunSpec.load(args.spec)
    pod = spec.cluster.pods
    pods = spec.pods or spec.cluster.count
    forecast = spec.job.views.forecast(pods=pods, gpus=pod.gpus)
    if forecast is None:
        raise ConfigError(
            f"{args.spec}: the needs of a {spec.job.kind} job are unknown, so there is no plan. "
            "Give the SPEC.json of a finetune job"
        )
    if args.gpus_for:
        plan = forecast.plan_gpus(memory_gib=pod.memory_gib)
    else:
        plan = forecast.plan(gpu_memory_gib=args.gpu_memory_gib, memory_gib=pod.memory_gib)
    _say(plan.text)
    return plan.fits


def _verify(args: argparse.Namespace) -> bool:
    """Try the claims that depend on the machine, on local pods or on the pods of a `SPEC.json`."""
    from workbench.base.files import is_folder, write_json
    from workbench.finetune.notebook.cluster import Cluster
    from workbench.rundir.spec import RunSpec
    from workbench.verify.claims.registry import chosen
    from workbench.verify.command import verify
    from workbench.verify.report import list_text

    rows = chosen(args.only)
    if args.list:
        _say(list_text(rows))
        return True
    if args.json is not None and not is_folder(args.json.absolute().parent):
        raise ConfigError(f"--json {args.json}: its folder does not exist; make the folder first")
    make = None
    if args.spec is not None:
        make = partial(Cluster.from_spec, RunSpec.load(args.spec).cluster)
    report = verify(rows, make=make, minutes=args.minutes, out=args.out)
    _say(report.text)
    if args.json is not None:
        write_json(args.json, report.to_dict())
    return report.ok


def _report(args: argparse.Namespace) -> bool:
    from workbench.benchmark.result import rows_below, write_report

    rows, problems = rows_below(args.folders)
    html, md = write_report(rows, args.out, problems=problems)
    _say(f"{html}\n{md}")
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="workbench", description="Fine-tune over several pods.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run", help="carry out a SPEC.json; exit 0 succeeded, 1 failed, 2 refused"
    )
    run.add_argument("--out", type=Path, metavar="DIR", help="the run directory, new or empty")
    doctor = commands.add_parser(
        "doctor", help="examine the pods of a SPEC.json; exit 0 all checks passed, 1 not, 2 refused"
    )
    plan = commands.add_parser(
        "plan", help="print what a SPEC.json needs; exit 0 fits, 1 does not, 2 refused"
    )
    plan.add_argument(
        "--gpu-memory-gib", type=float, metavar="GIB", help="memory of one GPU; without, for CPUs"
    )
    plan.add_argument(
        "--gpus-for", action="store_true", help="print the least GPUs of every kind for the job"
    )
    for parser_of_spec, verb in ((run, _run), (doctor, _doctor), (plan, _plan)):
        parser_of_spec.add_argument("spec", type=Path, metavar="SPEC.json")
        parser_of_spec.set_defaults(verb=verb)
    _add_verify(commands)
    report = commands.add_parser(
        "report", help="write report.html and report.md on runs; exit 0 written, 2 refused"
    )
    folders = "run directories, clusters' or benchmarks' folders"
    report.add_argument("folders", type=Path, metavar="DIR", nargs="+", help=folders)
    report.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path(),
        help="where to; default: the current folder",
    )
    report.set_defaults(verb=_report)
    return parser


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = commands.add_parser(
        "verify",
        help="try all claims on this machine or on the pods of a SPEC.json; exit 0 none failed, 1 "
        "failed, 2 refused",
    )
    verify.add_argument(
        "spec",
        type=Path,
        metavar="SPEC.json",
        nargs="?",
        help="the pods to use; default: local pods, on the GPUs of this machine if any",
    )
    verify.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        default=[],
        help="try the rows of a name, a pattern such as 'bf16-*', or a subject; may be repeated",
    )
    verify.add_argument("--list", action="store_true", help="print the rows and start nothing")
    verify.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    verify.add_argument(
        "--minutes", type=float, default=20.0, help="time limit of all rows; default: 20"
    )
    verify.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for runs and logs, new or empty; default: a new folder below runs/",
    )
    verify.set_defaults(verb=_verify)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
