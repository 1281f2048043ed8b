"""Every call, member, view, command and handler that reads a run's or cluster's directory.

The lists come from the code: the public names, members of the public classes, the parser of the
command line, the list of the sidebar and the table of drawings. A new name is called as well. A new
parameter without a default needs a value in `GIVEN`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import workbench
import workbench.data
import workbench.results
from tests.fakes.hostile_folder import Reader
from tools.options import PUBLIC
from workbench import cli
from workbench.base import display_protocol
from workbench.base.table import as_grid
from workbench.benchmark.benchmark import Benchmark
from workbench.benchmark.cluster import Cluster
from workbench.benchmark.finished_rows import FinishedRows
from workbench.benchmark.result import BenchmarkResult, rows_below
from workbench.client.kinds import recipe_for
from workbench.client.result import card_of
from workbench.client.run import Run
from workbench.finetune.export.recipe import recipe_of
from workbench.handover.kubeflow.kinds import KINDS
from workbench.jobs.launcher import Launcher
from workbench.lab.listing import Listing
from workbench.rundir.spec import RunSpec
from workbench.rundir.status import cluster_status
from workbench.rundir.view import RunView

Look = tuple[str, Callable[[], object]]
DRAWN_BY = (
    display_protocol.as_text,
    display_protocol.as_html,
    display_protocol.as_page,
    display_protocol.as_bundle,
    as_grid,
)
"""Views that return text; `as_live` and `follow` draw the same records in a notebook."""

NOT_CALLED = {
    "run": "carries out the user's own function or benchmark on pods",
    "map": "carries out the user's own function on pods",
    "start": "starts the user's own pods",
    "submit": "starts the user's own job",
    "submit_prepared": "starts the user's own job",
    "doctor": "examines pods that the user started",
    "command": "needs pods that the user started",
    "forecast": "reads the grid of the user",
    "can_limit_memory": "reads the machine",
    "compose": "draws a form of the user's words",
    "fill_prompt": "joins texts of the user",
    "load_deepspeed_config": "reads a file that the user names; the user's links are followed",
    "delete": "removes the directory at the user's wish, and of a link the link alone",
    "log": "prints an event on a rank",
    "mini_rows": "generates rows",
    "nodes": "asks a cluster of Kubernetes",
    "parse_sql": "reads a text; the fuzz of parsers covers the function",
    "run_query": "reads a table in memory; the fuzz of parsers covers the function",
    "train_tokenizer": "reads texts in memory",
}
"""Names that read no given directory, with the reason."""

LOADERS = {
    "Benchmark",
    "from_specs",
    "chat",
    "compare_predictions",
    "evaluate",
    "export",
    "gpus_for",
    "merge",
    "plan",
    "predict",
    "preview",
    "push",
    "tensorboard",
    "open_board",
    "workbench plan",
    "workbench plan --gpus-for",
    "model",
}
"""Looks that may start a process of this package: to load a model, to draw, to read task names."""


def values(reader: Reader, run: Run) -> Mapping[str, Callable[[], object]]:
    """Return a value for each parameter without a default, by the name of the parameter."""
    given = reader.given.root
    return {
        "answers": lambda: ["a"],
        "changes": lambda: {"name": "a name", "tags": ["a tag"]},
        "beside": lambda: None,
        "dataset": lambda: workbench.data.dataset_from(run.spec.job.dataset),
        "folder": lambda: reader.out / "folder",
        "job": lambda: run.spec.job,
        "key": lambda: "0" * 20,
        "kind": lambda: sorted(KINDS)[0],
        "limit": lambda: 50,
        "name": lambda: str(run.path.relative_to(given)),
        "names": lambda: [str(run.path.relative_to(given))],
        "one": lambda: [run, run.path],
        "path": lambda: run.path,
        "raw": lambda: {**run.result.to_dict(), "path": str(run.path)},
        "repo_id": lambda: "me/model",
        "rows": lambda: [{"source": "q", "target": "a", "expected": "a"}],
        "runs": lambda: [run],
        "spec": lambda: run.spec.cluster,
        "specs": lambda: [run.paths.spec],
        "tasks": lambda: ["none"],
        "value": lambda: str(run.paths.inputs / "train.jsonl"),
    }


OTHERS: Mapping[tuple[str, str], Callable[[Reader, Run], object]] = {
    ("history", "folder"): lambda reader, _: reader.given.root,
    ("to_html", "path"): lambda reader, _: reader.out / "card.html",
    ("merge", "path"): lambda reader, _: reader.out / "merged",
    ("attach", "path"): lambda reader, _: reader.given.root,
    ("from_spec", "path"): lambda reader, _: reader.given.root,
    ("read_tables", "path"): lambda _, run: run.paths.tables,
    ("read_tables", "run"): lambda _, run: run.path,
    ("judge_answers", "tables"): lambda _, run: run.paths.tables,
    ("resolve_deepspeed_config", "gpus"): lambda *_: 1,
    ("look", "folder"): lambda *_: "",
    ("report", "folder"): lambda *_: "",
    ("compare", "names"): lambda reader, run: [
        str(path.relative_to(reader.given.root)) for path in run.path.parent.glob("*")
    ],
}
"""Values of parameters that mean something else in a single function."""


def called(name: str, function: Callable[..., object], reader: Reader, run: Run) -> object:
    """Call a function with a value for each parameter that has no default."""
    arguments = {}
    known = values(reader, run)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        other = OTHERS.get((name, parameter.name))
        if other is not None:
            arguments[parameter.name] = other(reader, run)
        elif parameter.default is parameter.empty:
            arguments[parameter.name] = known[parameter.name]()
    if name in ("wait", "as_completed"):
        arguments["timeout_s"] = 0.1
    return function(**arguments)


def members(owner: object, found: Callable[[], object], reader: Reader, run: Run) -> Iterator[Look]:
    """Yield a look at each public member of a class; `found` returns the object or raises."""
    kind = owner if isinstance(owner, type) else type(owner)
    for name in dir(kind):
        if name.startswith("_") or name in NOT_CALLED or _is_inherited(kind, name):
            continue
        if callable(inspect.getattr_static(kind, name, None)) or isinstance(
            inspect.getattr_static(kind, name), classmethod
        ):
            yield name, partial(_call_member, name, found, reader, run)
        else:
            yield name, partial(_read_member, name, found)


def _is_inherited(kind: type, name: str) -> bool:
    """Return whether another public class, with looks of its own, has the same member."""
    member = inspect.getattr_static(kind, name)
    return any(
        base is not kind
        and base in PUBLIC.values()
        and inspect.getattr_static(base, name, None) is member
        for base in kind.__mro__
    )


def _call_member(name: str, found: Callable[[], object], reader: Reader, run: Run) -> object:
    return called(name, getattr(found(), name), reader, run)


def _read_member(name: str, found: Callable[[], object]) -> object:
    return getattr(found(), name)


def public(reader: Reader, run: Run) -> Iterator[Look]:
    """Yield a look through each public name of the package."""
    objects: dict[str, Callable[[], object]] = {
        "Run": lambda: Run(run.path),
        "FineTuneRun": lambda: workbench.results.FineTuneRun(run.path),
        "RunResult": lambda: run.result,
        "FineTuneResult": lambda: workbench.results.FineTuneResult.load(run.path),
        "Cluster": lambda: Cluster.from_spec(run.spec.cluster, path=reader.given.root),
        "Benchmark": lambda: Benchmark.from_specs([run.paths.spec], path=reader.given.root),
        "Predictions": lambda: workbench.results.FineTuneResult.load(run.path).predictions,
    }
    for path, value in PUBLIC.items():
        name = path.rpartition(".")[2]
        if name in NOT_CALLED:
            continue
        if name in objects:
            yield name, objects[name]
            for member, look in members(value, objects[name], reader, run):
                yield f"{name}.{member}", look
        elif not inspect.isclass(value):
            yield name, partial(called, name, value, reader, run)


def handlers(reader: Reader, run: Run) -> Iterator[Look]:
    """Yield a look through each answer of the sidebar's server."""
    listing = Listing(reader.given.root)
    for name, look in members(listing, lambda: listing, reader, run):
        yield f"lab.{name}", look


def commands(reader: Reader, run: Run) -> Iterator[Look]:
    """Yield a look through each command of the parser, with a path for every place in it."""
    root = reader.given.root
    paths = {"spec": run.paths.spec, "folders": root, "folder": root, "run": run.path}
    (verbs,) = [
        action
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    for verb, parser in verbs.choices.items():
        # Some start the pods of the user's SPEC.json, some wait for a run or end it, one deletes,
        # and one reads no file.
        if verb in ("run", "doctor", "verify", "attach", "stop", "rm", "completion", "mcp"):
            continue
        words = [verb]
        flags = []
        for action in parser._actions:
            if not action.option_strings:
                words.append(str(paths[action.dest]))
            elif action.dest == "out":
                words += ["--out", str(reader.out / "command")]
            elif action.nargs == 0 and action.dest != "help":
                flags.append(action.option_strings[0])
        for flag in ["", *flags]:
            line = [*words, *filter(None, [flag])]
            yield " ".join(filter(None, ["workbench", verb, flag])), partial(command, line)


def command(words: list[str]) -> str:
    """Return the exit code and the output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main(words)
    return f"{code}: {out.getvalue()}"


def records(reader: Reader, run: Run) -> Iterator[Look]:
    """Yield the looks at records that a public name returns only for a whole run."""
    root = reader.given.root

    def benchmark() -> BenchmarkResult:
        rows, _ = rows_below([root])
        return BenchmarkResult(name="given", folder=root, rows=tuple(rows))

    def recipe() -> object:
        made = recipe_for(run.path) or recipe_of
        return made(run.result)

    yield "cluster_status", lambda: cluster_status(root)
    yield "RunSpec", lambda: RunSpec.load(run.paths.spec, of_run=True)
    yield "card", lambda: card_of(run.result)
    yield "benchmark", benchmark
    yield "benchmark plots", lambda: benchmark().plots
    yield "finished rows", lambda: FinishedRows(root).rows()
    yield "recipe", recipe
    yield "view", lambda: [RunView(run.path).log(rank) for rank in range(3)]
    yield "launchers", lambda: [Launcher(run.spec.job.launcher)]
    for kind in sorted(KINDS):
        yield (
            f"manifest {kind}",
            partial(run.manifest, kind, image="x", secrets={"A": "s/k"}),
        )
    yield "logs", lambda: [run.logs(rank) for rank in range(3)]


def looks(reader: Reader) -> Iterator[Look]:
    """Yield all looks at a given directory."""
    run = Run(reader.run.root)
    yield from public(reader, run)
    yield from handlers(reader, run)
    yield from commands(reader, run)
    yield from records(reader, run)


def texts(value: object, drawn: set[tuple[object, ...]], deep: bool = True) -> Iterator[str]:
    """Yield a value in every form that a person or another program gets.

    A bundle has the text and the HTML of a record. A record whose drawing and `repr`, but for the
    name of its class, are in `drawn` is not drawn again.
    """
    if isinstance(value, str):
        yield value
        return
    kind = type(value)
    plain = repr(value)
    yield plain
    drawings = [view.dispatch(kind) for view in DRAWN_BY]
    drawing = (*drawings, plain.removeprefix(kind.__name__))
    if drawing in drawn:
        return
    drawn.add(drawing)
    if not isinstance(value, display_protocol.Displayable):
        yield str(value)
    if any(view.dispatch(kind) is not view.dispatch(object) for view in DRAWN_BY):
        yield str(display_protocol.as_bundle(value))
    for view in (display_protocol.as_page, as_grid):
        if view.dispatch(kind) is not view.dispatch(object):
            yield str(view(value))
    yield from _contents(value)
    if isinstance(value, (list, tuple)) and deep:
        for each in value[:20]:
            yield from texts(each, drawn, deep=False)


def _contents(value: object) -> Iterator[str]:
    """Yield the texts in files, streams and tables of a value."""
    if isinstance(value, Path) and value.is_file():
        yield value.read_text(errors="replace")
    if isinstance(value, Iterator):
        # A stream may be as long as a model.
        for piece in itertools.islice(value, 50):
            yield piece.decode(errors="replace") if isinstance(piece, bytes) else str(piece)
    frame: Any = getattr(value, "to_dataframe", None)
    if frame is not None and not isinstance(value, type):
        yield str(frame())
    files = getattr(value, "files", None)
    if isinstance(files, Mapping):
        for content in files.values():
            yield content.decode(errors="replace") if isinstance(content, bytes) else str(content)
