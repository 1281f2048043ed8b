"""The command line: `workbench run SPEC.json`, `run train.py`, `ls`, `logs`, `stop` and more.

Exit codes: 0 the run succeeded, the pods passed all checks, no claim failed or the text is
written; 1 failure; 2 the request is refused and nothing has started. With `--json -` standard
output has the JSON alone; progress, refusals and failures go to standard error. A verb imports only
its own modules, so `--help` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from workbench.base.errors import (
    ConfigError,
    DiskFull,
    RunError,
    WorkbenchError,
    require_package,
)
from workbench.base.files.disk import full_disk_named
from workbench.base.files.folders import remove_folder
from workbench.base.table import coloured
from workbench.base.versions import VERSION
from workbench.base.words import pluralize, printable, scaled

if TYPE_CHECKING:
    from workbench.client.result import RunResult
    from workbench.client.run import Run
    from workbench.rundir.spec import RunSpec

_STDOUT = Path("-")
_WATCH_S = 2.0
_SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")


EXAMPLES: Mapping[str, Sequence[str]] = {
    "run": ("run SPEC.json --out runs/first", "run train.py --pods 2 -- --epochs 3"),
    "doctor": ("doctor SPEC.json",),
    "plan": ("plan SPEC.json --gpu-memory-gib 24", "plan SPEC.json --gpus-for"),
    "ls": ("ls", "ls runs --state failed --sort=-eval_loss", "ls --watch"),
    "logs": ("logs runs/first --rank 1 --tail 50",),
    "stop": ("stop runs/first", "stop runs/first --kill"),
    "attach": ("attach runs/first",),
    "rm": ("rm runs/first", "rm --keep-best 3 runs --yes"),
    "verify": ("verify --list", "verify --only 'bf16-*' --minutes 10"),
    "report": ("report runs --out report",),
    "mcp": ("mcp",),
    "completion": ("completion bash",),
}
"""Command lines of every command, for its help."""


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    # Words behind `--` belong to the script of `run`.
    own, script_words = words, []
    if "--" in words and words[:1] == ["run"]:
        at = words.index("--")
        own, script_words = words[:at], words[at + 1 :]
    args = _parser().parse_args(own)
    args.script_words = script_words
    args.stdout = sys.stdout
    with redirect_stdout(sys.stderr if args.json == _STDOUT else sys.stdout):
        return _carry_out(args)


def _carry_out(args: argparse.Namespace) -> int:
    try:
        _check_json(args.json)
        with full_disk_named(getattr(args, "out", None) or Path.cwd()):
            done: bool = args.verb(args)
        return 0 if done else int(args.failed)
    except (ConfigError, DiskFull) as error:
        _say(printable(f"refused: {error}"))
        return 2
    except WorkbenchError as error:
        _say(printable(f"failed: {error}"))
        return 1
    except OSError as error:  # of a file that the command names
        _say(printable(f"refused: {error.filename or 'a file'}: {error.strerror or error}"))
        return 2


def _run(args: argparse.Namespace) -> bool:
    from workbench.base.files import write_json
    from workbench.client.cluster import Cluster
    from workbench.client.run import Detached
    from workbench.jobs.job import PodView
    from workbench.rundir.format import FORMAT
    from workbench.rundir.make.prepare import prepare_run
    from workbench.rundir.make.unstarted import keep_reason
    from workbench.rundir.state import RunState

    is_script = args.spec.suffix == ".py"
    spec = _script_spec(args) if is_script else _spec_of(args)
    prepared = prepare_run(spec, root=args.out, cluster=Path())
    folder = prepared.paths.root / "cluster"
    # Warm processes serve jobs that have an entry, and this cluster has one job.
    starts_warm = prepared.spec.job.program_on(PodView(package="", folder=None)).entry is not None
    pods = spec.cluster.replace(warm=spec.cluster.warm and starts_warm)
    with ExitStack() as stack:
        try:
            cluster = Cluster.from_spec(pods, path=folder)
            # An interrupt of the command also ends a request for pods in a queue.
            stack.enter_context(cluster)
        except (ConfigError, DiskFull):
            # Refused: nothing started, so nothing stays.
            remove_folder(prepared.paths.root)
            raise
        except WorkbenchError as error:
            info = {"format": FORMAT, "id": prepared.run_id, "cluster": str(cluster.path)}
            write_json(prepared.paths.info, info)
            keep_reason(prepared.paths, prepared.spec, error)
            raise
        _say(f"{cluster.message}\n{cluster.hostfile}".rstrip())
        run = cluster.submit_prepared(prepared)
        try:
            result = run.wait()
        except Detached:
            _say(f"Interrupted: the pods are stopped, and run {run.id} is cancelled.")
            return False
        if is_script:
            _say(run.logs(0).rstrip("\n"))
            args.failed = _exit_code(result)
        _answer_result(args, run, result)
        return result.state is RunState.SUCCEEDED


def _script_spec(args: argparse.Namespace) -> RunSpec:
    """Return the run of a script on pods of this machine, with the GPUs of the machine, if any."""
    from workbench.jobs.script import Script
    from workbench.rundir.spec import ClusterSpec, RunSpec

    script = Script(str(args.spec), args=args.script_words).found_in(Path())
    return RunSpec(cluster=ClusterSpec(count=args.pods or 1, warm=False), job=script)


def _spec_of(args: argparse.Namespace) -> RunSpec:
    from workbench.rundir.spec import RunSpec

    if args.pods is not None or args.script_words:
        raise ConfigError(
            f"--pods and words behind -- belong to a script, as in `workbench run train.py --pods "
            f"2`. {args.spec} has the number of its pods"
        )
    return RunSpec.load(args.spec)


def _exit_code(result: RunResult) -> int:
    """Return the exit code of a failed script; 1 if the script has none."""
    code = result.error.exit_code if result.error else None
    return code if code and code > 0 else 1


def _answer_result(args: argparse.Namespace, run: Run, result: RunResult) -> None:
    facts = {"id": run.id, "path": str(run.path), **result.to_dict()}
    _answer(args, f"{result}\nrun directory: {run.path}", facts)


def _ls(args: argparse.Namespace) -> bool:
    from workbench.finetune.notebook.history import history

    if args.watch:
        return _watch(args)
    found = history(args.folder, name=args.name, state=args.state, sort=args.sort)
    where = "`workbench ls --json -` has the directory of each run, as `path`."
    lines = [str(found), *([where] if len(found) else [])]
    clusters = _live_clusters(found.folder)
    for path in clusters:
        lines.append(f"Pods are up: `workbench stop {quote(str(path))}` stops them.")
    answer = {
        "folder": str(found.folder),
        "runs": found.rows(),
        "clusters": [str(path) for path in clusters],
    }
    _answer(args, "\n".join(lines), answer)
    return True


def _watch(args: argparse.Namespace) -> bool:
    """Draw the table anew until all its runs have ended; in a file, write the lines that change."""
    from workbench.finetune.notebook.history import history
    from workbench.rundir.state import RunState

    if args.json is not None:
        raise ConfigError("--watch draws a table; leave out --watch for the JSON of now")
    ended = {RunState.LOST, *(state for state in RunState if state.is_terminal)}
    shown: list[str] = []
    is_live = True
    with suppress(KeyboardInterrupt):
        while is_live:
            time.sleep(_WATCH_S if shown else 0)
            found = history(args.folder, name=args.name, state=args.state, sort=args.sort)
            is_live = any(record.state not in ended for record in found)
            lines = str(found).splitlines()
            if sys.stdout.isatty():
                # A line that leaves the screen cannot be drawn again.
                lines = lines[: shutil.get_terminal_size().lines - 1]
                sys.stdout.write(f"\x1b[{len(shown)}F\x1b[J" if shown else "")
            new = lines if sys.stdout.isatty() else [line for line in lines if line not in shown]
            if new:
                _say("\n".join(new))
            shown = lines
    return True


def _live_clusters(folder: Path) -> list[Path]:
    """Return the directories of the clusters below a folder whose keeper is alive."""
    from workbench.rundir.catalog.find import find_all
    from workbench.rundir.paths import ClusterPaths
    from workbench.rundir.status import cluster_status

    found = [paths.root for paths in find_all(folder) if isinstance(paths, ClusterPaths)]
    return [root for root in found if cluster_status(root).alive]


def _named_run(name: str) -> Run:
    """Return the run with an id or a name below the current folder, or in a run directory."""
    from workbench.base.files import is_there
    from workbench.client.run import Run
    from workbench.finetune.notebook.history import history

    found = [record for record in history(Path()) if name in (record.id, record.name)]
    if len(found) > 1:
        paths = ", ".join(str(record.path) for record in found)
        raise ConfigError(f"{len(found)} runs have the name {name!r}: {paths}. Give a directory.")
    if not found and not is_there(Path(name)):
        raise RunError(f"no run below {Path.cwd()} has the id or name {name!r}{_nearest(name)}")
    return Run.load(found[0].path if found else name)


def _nearest(name: str) -> str:
    """Return the names of the runs that may be meant; empty without runs."""
    from workbench.finetune.notebook.history import history

    # A run without a name has its id.
    names = [record.name or record.id for record in history(Path())]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
    return (
        f". The nearest: {', '.join(dict.fromkeys(near))}. `workbench ls` lists all" if near else ""
    )


def _logs(args: argparse.Namespace) -> bool:
    if args.tail < 0:
        raise ConfigError(f"--tail is {args.tail}; give a number of lines, or 0 for all lines.")
    run = _named_run(args.run)
    text = run.logs(args.rank, tail=args.tail or None)
    if not text:
        text = (
            f"Rank {args.rank} of run {run.id} printed nothing. Losses and other figures are no "
            "part of the log; `workbench attach` shows them."
        )
    _say(text)
    return True


def _stop(args: argparse.Namespace) -> bool:
    from workbench.client.cluster import Cluster
    from workbench.rundir.catalog.find import find_all
    from workbench.rundir.paths import ClusterPaths

    here = next(find_all(Path(args.run), depth=0), None)
    if isinstance(here, ClusterPaths):
        if args.kill:
            raise ConfigError(
                f"--kill ends a run, and {here.root} is a cluster; leave --kill out to stop its "
                "pods, or name a run"
            )
        Cluster.attach(here.root).close()
        _say(f"The pods of the cluster in {here.root} are stopped.")
        return True
    run = _named_run(args.run)
    if run.state.is_terminal:
        _say(f"Run {run.id} has already ended: {run.state}.")
        return True
    if args.kill:
        run.cancel()
        _say(f"Run {run.id} was asked to end at once.")
    else:
        run.stop()
        _say(f"Run {run.id} was asked to stop after a checkpoint.")
    return True


def _rm(args: argparse.Namespace) -> bool:
    """Delete the named runs; with `--keep-best`, the runs of a folder that are not the best."""
    from workbench.client.deletion import all_but_best
    from workbench.client.tables.run_rows import figure_of
    from workbench.finetune.notebook.history import history

    if args.keep_best is None:
        if not args.runs:
            raise ConfigError("name a run, or give --keep-best 3")
        runs = [_named_run(name) for name in args.runs]
        if not _confirmed(args, [run.path for run in runs]):
            return False
        for run in runs:
            notes = run.delete()
            _say("; ".join([f"{run.path} is deleted", *notes]))
        return True
    if len(args.runs) > 1:
        raise ConfigError("--keep-best takes a single folder of runs; default: the current folder")
    before = history(*args.runs)
    figures = [figure_of(record, args.by) for record in before.records]
    if not _confirmed(args, all_but_best(before.records, figures, args.keep_best, args.by)):
        return False
    kept = before.keep_best(args.keep_best, by=args.by)
    _say(f"{len(before) - len(kept)} runs are deleted, and {len(kept)} are kept.\n{kept}")
    return True


def _confirmed(args: argparse.Namespace, folders: Sequence[Path]) -> bool:
    """Show the directories to delete with their sizes, and ask unless `--yes`."""
    from workbench.client.deletion import bytes_of_run

    sizes = [bytes_of_run(folder) for folder in folders]
    for folder, size in zip(folders, sizes, strict=True):
        _say(f"{folder}  {scaled(size, 'B')}")
    what = f"{pluralize(len(folders), 'run')}, {scaled(sum(sizes), 'B')}"
    if args.yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"{what} would be deleted, and no terminal can be asked; add --yes")
    _say(f"Delete {what}? Type y to delete.")
    if sys.stdin.readline().strip().casefold() in ("y", "yes"):
        return True
    _say("Nothing is deleted.")
    return False


def _attach(args: argparse.Namespace) -> bool:
    """Follow a run to its end with a line of progress, and print the result."""
    from workbench.client.run import Detached
    from workbench.rundir.state import RunState

    run = _named_run(args.run)
    try:
        result = run.wait()
    except Detached as detached:
        _say(str(detached))
        return False
    _answer_result(args, run, result)
    return result.state is RunState.SUCCEEDED


def _doctor(args: argparse.Namespace) -> bool:
    """Start the pods of a `SPEC.json`, examine them, print the findings, and stop the pods."""
    from workbench.client.cluster import Cluster
    from workbench.rundir.spec import RunSpec

    spec = RunSpec.load(args.spec).cluster.replace(warm=False)
    with TemporaryDirectory(prefix="workbench-doctor-") as folder:
        with Cluster.from_spec(spec, path=Path(folder) / "cluster") as cluster:
            diagnosis = cluster.doctor()
        _answer(args, str(diagnosis), diagnosis.to_dict())
    return diagnosis.ok


def _plan(args: argparse.Namespace) -> bool:
    from workbench.rundir.spec import RunSpec

    spec = RunSpec.load(args.spec)
    pod = spec.cluster.pods
    pods = spec.pods or spec.cluster.count
    forecast = spec.job.views.forecast(pods=pods, gpus=pod.gpus, ranks=pod.ranks)
    if forecast is None:
        raise ConfigError(
            f"{args.spec}: the needs of a {spec.job.kind} job are unknown, so there is no plan. "
            "Give the SPEC.json of a finetune job"
        )
    if args.gpus_for:
        plan = forecast.plan_gpus(memory_gib=pod.memory_gib)
    else:
        plan = forecast.plan(gpu_memory_gib=args.gpu_memory_gib, memory_gib=pod.memory_gib)
    _answer(args, plan.text, {"fits": plan.fits, **plan.facts})
    return plan.fits


def _verify(args: argparse.Namespace) -> bool:
    """Try the claims that depend on the machine, on local pods or on the pods of a `SPEC.json`."""
    from workbench.benchmark.cluster import Cluster
    from workbench.rundir.spec import RunSpec
    from workbench.verify.claims.registry import chosen
    from workbench.verify.command import list_text, verify

    rows = chosen(args.only)
    if args.list:
        listed = [{"name": row.name, "subject": row.subject, "claim": row.claim} for row in rows]
        _answer(args, list_text(rows), {"rows": listed})
        return True
    folder = args.out or Path("runs") / time.strftime("verify-%Y%m%d-%H%M%S")
    cluster = None
    if args.spec is not None:
        cluster = Cluster.from_spec(RunSpec.load(args.spec).cluster, folder / "main")
    report = verify(rows, folder, cluster=cluster, minutes=args.minutes)
    _answer(args, report.text, report.to_dict())
    return not report.counts["failed"]


def _report(args: argparse.Namespace) -> bool:
    from workbench.benchmark.result import rows_below, write_report

    rows, problems = rows_below(args.folders)
    html = write_report(rows, args.out, problems=problems)
    _say(str(html))
    return True


def _mcp(_args: argparse.Namespace) -> bool:
    """Serve a coding agent on standard input and output, within the current folder."""
    require_package("mcp", "`workbench mcp`", extra="mcp")
    from workbench.mcp.server import serve

    serve(Path.cwd())
    return True


def _completion(args: argparse.Namespace) -> bool:
    """Write the script that completes the commands of a shell."""
    import shtab

    parser = _parser()
    _complete_files(parser)
    _say(shtab.complete(parser, args.shell))
    return True


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Mark all paths of a parser and of the commands, for completion of files in a shell."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command)
        elif action.type is Path:
            wanted = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
            action.complete = wanted  # type: ignore[attr-defined]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="workbench", description="Fine-tune over several pods.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    parser.set_defaults(json=None, failed=1)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="carry out a SPEC.json, or a script on pods of this machine; exit 0 succeeded, 1 "
        "failed, 2 refused; of a script: its exit code",
    )
    run.add_argument("--out", type=Path, metavar="DIR", help="the run directory, new or empty")
    run.add_argument(
        "--pods", type=int, metavar="NUMBER", help="pods of this machine for a script; default: 1"
    )
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
    # These verbs take a specification, and print JSON on request.
    for parser_of_spec, verb in ((run, _run), (doctor, _doctor), (plan, _plan)):
        metavar = "SPEC.json|train.py" if verb is _run else "SPEC.json"
        parser_of_spec.add_argument("spec", type=Path, metavar=metavar)
        _add_json(parser_of_spec)
        parser_of_spec.set_defaults(verb=verb)
    _add_ls(commands)
    _add_verbs_of_runs(commands)
    _add_rm(commands)
    _add_verify(commands)
    report = commands.add_parser(
        "report", help="write report.html on runs; exit 0 written, 2 refused"
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
    mcp = commands.add_parser(
        "mcp", help="serve a coding agent over the Model Context Protocol, in the current folder"
    )
    mcp.set_defaults(verb=_mcp)
    completion = commands.add_parser(
        "completion", help="print the script that completes these commands in a shell"
    )
    completion.add_argument("shell", choices=_SHELLS)
    completion.set_defaults(verb=_completion)
    for name, command in commands.choices.items():
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.epilog = "\n".join(
            ["examples:", *(f"  workbench {each}" for each in EXAMPLES[name])]
        )
    return parser


def _add_ls(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ls = commands.add_parser(
        "ls", help="list the runs below a folder; exit 0 listed, 1 no such folder, 2 refused"
    )
    ls.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        nargs="?",
        default=Path(),
        help="folder to search; default: the current folder",
    )
    ls.add_argument(
        "--name", metavar="TEXT", default="", help="text in the name, note or id of the runs"
    )
    ls.add_argument(
        "--state", action="append", default=[], help="state of the runs; may be repeated"
    )
    ls.add_argument(
        "--sort",
        metavar="COLUMN",
        default="-submitted_s",
        help="column to sort by, a minus for the largest first, as in --sort=-eval_loss; "
        "default: the newest run first",
    )
    ls.add_argument(
        "--watch", action="store_true", help="draw the table anew until all its runs have ended"
    )
    _add_json(ls)
    ls.set_defaults(verb=_ls)


def _add_verbs_of_runs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    logs = commands.add_parser(
        "logs", help="print the output of a rank; exit 0 printed, 1 no such run or rank, 2 refused"
    )
    logs.add_argument("--rank", type=int, default=0, help="number of the rank; default: 0")
    logs.add_argument(
        "--tail", type=int, metavar="LINES", default=200, help="last lines; 0: all; default: 200"
    )
    stop = commands.add_parser(
        "stop",
        help="stop a run after a checkpoint, or the pods of a cluster; exit 0 asked or ended, 1 no "
        "answer",
    )
    stop.add_argument("--kill", action="store_true", help="end the run at once instead")
    attach = commands.add_parser(
        "attach",
        help="follow a run until it ends; exit 0 succeeded, 1 failed, stopped or interrupted",
    )
    _add_json(attach)
    for parser_of_run, verb in ((logs, _logs), (stop, _stop), (attach, _attach)):
        help_of_run = "a run directory, or the id or name of a run below the current folder"
        if verb is _stop:
            help_of_run += "; or the directory of a cluster, whose pods are then stopped"
        parser_of_run.add_argument("run", metavar="RUN", help=help_of_run)
        parser_of_run.set_defaults(verb=verb)


def _add_rm(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    rm = commands.add_parser(
        "rm",
        help="delete ended runs with logs, checkpoints and models; exit 0 deleted, 1 failed, 2 "
        "refused",
    )
    rm.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help="a run directory, or the id or name of a run below the current folder; with "
        "--keep-best a folder of runs",
    )
    rm.add_argument(
        "--keep-best",
        type=int,
        metavar="NUMBER",
        help="delete all ended runs with the figure but the best",
    )
    rm.add_argument(
        "--by",
        metavar="COLUMN",
        default="eval_loss",
        help="figure of the best runs; default: eval_loss",
    )
    rm.add_argument("--yes", action="store_true", help="delete without a question")
    rm.set_defaults(verb=_rm)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the answer as JSON; -: print the JSON instead of the text",
    )


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
    _add_json(verify)
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


def _check_json(path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything starts."""
    from workbench.base.files import is_folder

    if path is not None and path != _STDOUT and is_folder(path):
        raise ConfigError(f"--json {path} is a folder; name a file in the folder")
    if path is not None and not is_folder(path.absolute().parent):
        raise ConfigError(f"--json {path}: its folder does not exist; make the folder first")


def _answer(args: argparse.Namespace, text: str, facts: Mapping[str, object]) -> None:
    """Print the answer of a command, or its JSON; also write the JSON to the file of `--json`."""
    from workbench.base.files import write_json
    from workbench.base.json_values import json_text

    if args.json == _STDOUT:
        args.stdout.write(json_text(facts) + "\n")
        args.stdout.flush()
        return
    _say(text)
    if args.json is not None:
        write_json(args.json, facts)


def _say(text: str) -> None:
    # A name of a file may have bytes that are no text.
    text = text.encode(errors="backslashreplace").decode()
    sys.stdout.write(coloured(text, sys.stdout) + "\n")
    sys.stdout.flush()
