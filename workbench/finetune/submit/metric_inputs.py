"""Collect the inputs of evaluations: custom metrics, which are read and not run, and tables."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from workbench.base.errors import ConfigError, one_of
from workbench.base.files import open_record, read_given, user_path
from workbench.finetune.data.sources.dataset import Prepared
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.evaluation import answered_rows, evaluates
from workbench.finetune.options.metrics import metric_function, own_metrics

_LARGEST = 1 << 20  # most bytes of a metric's file


def metric_inputs(job: FineTune, data: Prepared) -> Mapping[str, object]:
    """Return the inputs of evaluations for the ranks; raise ConfigError for unusable metrics."""
    needs_rows = job.load_best_model_at_end or job.early_stopping_patience
    if data.hub is None and not data.eval_rows and needs_rows:
        raise ConfigError(
            "the dataset has no evaluation rows to find the "
            "best model by; add some, or drop the option"
        )
    inputs: dict[str, object] = {}
    own = own_metrics(job.metrics)
    if own:
        inputs["metrics"] = [_metric(str(metric)) for metric in own]
    if "execution_match" in job.metrics:
        inputs["tables"] = _tables(data, answered_rows(job))
    return inputs if evaluates(job) else {}


def reward_inputs(job: FineTune) -> list[Mapping[str, str]]:
    """Return the functions that judge answers, for the ranks."""
    return [_function(str(reward), "reward") for reward in job.rewards]


def _metric(metric: str) -> Mapping[str, str]:
    sent = _function(metric, "metric")
    defined = dict(_defined(ast.parse(sent["source"])))
    match defined[sent["function"]]:
        case ast.FunctionDef(args=args) if not _takes_two(args):
            raise ConfigError(
                f"metric: {sent['function']} in {sent['path']} must take two lists, predictions "
                "and references"
            )
        case ast.AsyncFunctionDef():
            raise ConfigError(
                f"metric: {sent['function']} in {sent['path']} is an async function, and metrics "
                "are called without an event loop; write 'def' instead of 'async def'"
            )
    return sent


def _function(metric: str, what: str) -> Mapping[str, str]:
    name, function = metric_function(metric)
    path = user_path(name)
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(
                f"{what}: {path} is larger than 1 MiB; name a file with the function alone"
            )
        source = read_given(path)
        tree = ast.parse(source)
    except OSError as error:
        raise ConfigError(
            f"{what}: {path} cannot be read: {error.strerror}; paths count from {Path.cwd()}"
        ) from error
    except SyntaxError as error:
        raise ConfigError(
            f"{what}: {path} line {error.lineno} is not Python: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: {path} is not a Python file: {error}") from error
    defined = dict(_defined(tree))
    if function not in defined:
        raise one_of(f"{what}: in {path} the function", function, defined)
    return {"path": str(path), "function": function, "source": source}


def _defined(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name, node
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name, node) for alias in names)
            case ast.Assign(targets=[*targets]):
                yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
            case ast.If() | ast.Try() | ast.With() | ast.ExceptHandler():
                yield from _defined(node)


def _takes_two(args: ast.arguments) -> bool:
    positional = [*args.posonlyargs, *args.args]
    needed = len(positional) - len(args.defaults)
    needs_keywords = any(default is None for default in args.kw_defaults)
    most = len(positional) if args.vararg is None else 2
    return needed <= 2 <= most and not needs_keywords


def _tables(data: Prepared, rows: int) -> list[object]:
    if data.eval is None or data.tables is None:
        raise ConfigError(
            "metrics has execution_match, and the dataset has "
            "no tables to run queries on; take 'exact_match'"
        )
    with open_record(data.eval) as lines:
        asked = {json.loads(line).get("table_id") for line in itertools.islice(lines, rows)}
    with open_record(data.tables) as lines:
        return [table for table in map(json.loads, lines) if table["id"] in asked]
