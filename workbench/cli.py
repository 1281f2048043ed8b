"""The command line: `python -m workbench run SPEC.json [--out DIR]` and `python -m workbench doctor SPEC.json`.

Exit codes: 0 the run succeeded or the pods are well, 1 not, 2 what was asked is refused and nothing has started.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from workbench.cluster import Cluster
from workbench.errors import ConfigError, WorkbenchError
from workbench.runs.journal import fail_unstarted
from workbench.runs.prepare import prepare_run
from workbench.runs.run import Run
from workbench.runs.specfile import RunSpec
from workbench.runs.state import RunState, write_json

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments. Default: those of the process.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    try:
        if args.command == "doctor":
            return doctor_spec(Path(args.spec))
        return run_spec(Path(args.spec), Path(args.out) if args.out else None)
    except ConfigError as error:
        _say(f"refused: {error}")
        return 2
    except WorkbenchError as error:
        _say(f"failed: {error}")
        return 1


def run_spec(spec_path: Path, out: Path | None) -> int:
    """Carry out a `SPEC.json` from pods to result.

    Args:
        spec_path: The file.
        out: The run directory, new or empty. Default: a new one below `runs` in the current folder.

    Returns:
        0 where the run succeeded, 1 where it did not.

    Raises:
        ConfigError: Something asked for is refused; nothing has started.
        WorkbenchError: The pods did not start.
    """
    spec = RunSpec.load(spec_path)
    prepared = prepare_run(spec, root=out)
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
    """Start the pods of a `SPEC.json`, examine them, print what is found, and stop them; nothing stays.

    Args:
        spec_path: The file; its job is not looked at.

    Returns:
        0 where all is well, 1 where something is bad.

    Raises:
        ConfigError: Something asked for is refused.
        WorkbenchError: The pods did not start.
    """
    spec = replace(RunSpec.load(spec_path).cluster, warm=False)
    with TemporaryDirectory(prefix="workbench-doctor-") as folder:
        with Cluster.from_spec(spec, path=Path(folder) / "cluster") as cluster:
            diagnosis = cluster.doctor()
        _say(str(diagnosis))
    return 0 if diagnosis.ok else 1


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
    run.add_argument("--out", metavar="DIR", help="the run directory, new or empty")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
