"""A run that has ended, for the eye: its facts.

Its FLOPS profile, the modules as a tree to fold or as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workbench.base.json_values import as_float as json_number
from workbench.base.table import facts, text_table
from workbench.base.words import (
    UNKNOWN,
    count,
    duration,
    gib,
    number,
    percent,
    pluralize,
    rate,
    scaled,
    short_list,
    size,
    strip_controls,
)
from workbench.client.result import RunResult
from workbench.display.failure import card_of, fault_doc
from workbench.display.kit.doc import Block, Doc, Note, Raw, Table
from workbench.display.kit.lengths import length_facts
from workbench.display.kit.live import is_on_show
from workbench.display.kit.outliers import MOST, between, split
from workbench.display.kit.templates import render
from workbench.finetune.notebook.result import FineTuneResult
from workbench.finetune.options.model.models import toy_remark
from workbench.finetune.profile.compare import ProfileComparison
from workbench.finetune.profile.parse import ModuleProfile, Profile
from workbench.rundir.catalog.label import read_label
from workbench.rundir.figures.metrics import columns_of
from workbench.rundir.paths import RunPaths

_IN_PANEL = (
    "name",
    "note",
    "trained",
    "hosts",
    "optimizer steps",
    "global batch size",
    "not read",
    "rows with an empty answer",
    "tokens of the longest texts",
    "cut ",
    "evaluation rows that are training rows too",
    "whole run",
    "time to first step",
    "samples/s",
    "evaluation loss",
    "perplexity",
    "metrics",
    "figures of the last step",
    "exact match",
    "peak memory",
    "slow rank",
    "run directory",
)
"""Beginnings of the titles of facts that the panel of an ended run states too."""
_OPEN = 2  # levels that are open, and shown as text
_DEEPEST = 20  # levels
_MODULES = 600  # modules in a tree, so that a deep model's page stays below some 300 kB


def result_doc(result: RunResult) -> Doc:
    """State the facts of a run; for a failed run the card comes first, as in the run's panel."""
    card = list(fault_doc(card_of(result)).blocks) if result.error else []
    return Doc(blocks=[*card, facts_of_result(result)], state=result.state)


def shown_result_doc(result: RunResult) -> Doc:
    """State a result in a notebook. Beside the panel of the run, state what the panel lacks."""
    if not is_on_show(result.path):
        return result_doc(result)
    table = facts_of_result(result)
    rows = [row for row in table.grid.rows if not str(row[0]).startswith(_IN_PANEL)]
    short = replace(table, grid=replace(table.grid, rows=rows))
    what = "the error and the other facts" if result.error else "the other facts"
    note = Note(f"The panel of the run has {what}. print(result) writes all facts.")
    return Doc(blocks=[short, note], state=result.state)


def facts_of_result(result: RunResult) -> Table:
    message = f": {result.message}" if result.message and not result.error else ""
    # A script, for example, reports no loss.
    pairs = [(name, text) for name, text in _pairs(result) if text not in ("", UNKNOWN)]
    return Table(facts(f"Run {result.state}{message}", pairs), width=100)


def _pairs(result: RunResult) -> list[tuple[str, str]]:
    label = read_label(RunPaths(result.path))
    return [
        ("name", label.name),
        ("note", label.note),
        ("trained", result.trained),
        ("adapters", _adapters(result)),
        ("peak learning rate", rate(result.learning_rate)),
        ("hosts", _hosts(result)),
        ("launcher", result.launcher),
        ("optimizer steps", count(result.steps)),
        ("global batch size", count(result.global_batch_size)),
        *_rows(result),
        ("whole run", duration(result.duration_s)),
        ("time to first step", duration(result.time_to_first_step_s)),
        ("training loop", duration(result.train_runtime_s)),
        ("samples/s", number(result.train_samples_per_s)),
        ("tokens/s", _tokens(result)),
        ("compute", _arithmetic(result)),
        ("sent per step and pod", scaled(result.sent_bytes_per_step, "B")),
        ("training loss, all steps", number(result.train_loss)),
        ("evaluation loss", _eval_loss(result)),
        ("perplexity", number(json_number(result.of_kind.get("perplexity")))),
        ("metrics", ", ".join(f"{name} {number(value)}" for name, value in result.metrics.items())),
        ("figures of the last step", _step_figures(result)),
        ("exact match", percent(json_number(result.of_kind.get("exact_match")))),
        (f"peak memory ({result.memory_kind})", _sizes(result, result.peak_memory_gib)),
        (
            "pods' own memory",
            _sizes(result, result.host_memory_gib) if result.memory_kind == "cuda" else "",
        ),
        ("slow rank", strip_controls(result.slow_rank)),
        ("files in outputs/", _outputs(result)),
        ("run directory", str(result.path)),
    ]


def _rows(result: RunResult) -> Sequence[tuple[str, str]]:
    """Return the facts on the rows of a fine-tuning run."""
    if not isinstance(result, FineTuneResult):
        return ()
    return [
        ("model", toy_remark(result.model)),
        ("not read", strip_controls(short_list(result.not_read, 20)) if result.not_read else ""),
        ("rows with an empty answer", count(result.empty_answers) if result.empty_answers else ""),
        *length_facts(result.text_lengths),
        (
            "evaluation rows that are training rows too",
            count(result.overlap) if result.overlap else "",
        ),
    ]


def _step_figures(result: RunResult) -> str:
    figures = []
    for column in columns_of([result.metrics], [result.step_figures]):
        if column.in_tables and column.key.startswith("step."):
            figures.append(f"{column.title} {column.write(column.values[0])}")
    return strip_controls(", ".join(figures))


def _adapters(result: RunResult) -> str:
    if result.trainable_parameters is None or result.trainable_parameters == result.parameters:
        return ""
    return f"{count(result.trainable_parameters)} of {count(result.parameters)} parameters trained"


def _outputs(result: RunResult) -> str:
    if result.output_files is None:
        return ""
    return (
        f"{pluralize(result.output_files, 'file')}, "
        f"{size(result.output_bytes or 0)}, that the script wrote"
    )


def _hosts(result: RunResult) -> str:
    hosts = short_list([f"{host.address} slots={host.slots}" for host in result.hosts], MOST)
    ranks = "1 rank" if result.world_size == 1 else f"{count(result.world_size)} ranks"
    return f"{hosts} ({ranks})" if hosts else ""


def _eval_loss(result: RunResult) -> str:
    parts = []
    if result.first_eval_loss is not None:
        parts.append(f"{number(result.first_eval_loss)} before the first step")
    if result.eval_loss is not None:
        when = "the last"
        if result.eval_step not in (None, result.steps):
            when = f"step {count(result.eval_step)}"
        parts.append(f"{number(result.eval_loss)} after {when}")
    elif parts:
        parts.append("not evaluated again")
    return ", ".join(parts)


def _tokens(result: RunResult) -> str:
    if not isinstance(result, FineTuneResult) or result.useful_tokens_per_s is None:
        return ""
    return (
        f"{number(result.useful_tokens_per_s)}, with padding {number(result.padded_tokens_per_s)}"
    )


def _arithmetic(result: RunResult) -> str:
    figures = result.derived
    rate = figures.get("tflops_per_device")
    mfu = figures.get("mfu")
    if rate is None:
        return ""
    share = "" if mfu is None else f", {percent(mfu)} of its peak (MFU)"
    device = f" ({result.device})" if result.device else ""
    return f"{scaled(rate * 1e12, 'FLOP/s')} per rank{device}{share}"


def _sizes(result: RunResult, peaks: Mapping[str, float]) -> str:
    places = [host.address for host in result.hosts]

    def place_of(address: str) -> int:
        return places.index(address) if address in places else len(places)

    addresses = sorted(peaks, key=place_of)
    values = [peaks[address] for address in addresses]
    texts = [gib(value) for value in values]
    order, left_out = split([values])
    rest = order[left_out.start :] if left_out else []
    shown = [f"{addresses[place]} {texts[place]}" for place in order if place not in rest]
    if rest:
        shown.append(f"and {len(rest)} more, {between(values, rest, texts)}")
    return ", ".join(shown)


def profile_doc(profile: Profile) -> Doc:
    """State the figures, and all modules as a tree in a fold; text has the first levels."""
    blocks: list[Block] = [Table(profile.summary())]
    if profile.note:
        blocks.append(Note(profile.note))
    if profile.root:
        text = _first_levels(profile, profile.root)
        blocks.append(Raw(html=_tree(profile.root), text=text))
    return Doc(blocks=blocks)


def comparison_doc(two: ProfileComparison) -> Doc:
    blocks: list[Block] = []
    if two.note:
        blocks.append(Note(two.note, "caution"))
    blocks.append(Table(two.summary()))
    if two.one.root or two.other.root:
        blocks.append(Table(two.table()))
    return Doc(blocks=blocks)


def _first_levels(profile: Profile, root: ModuleProfile) -> str:
    table = text_table(profile.table(_OPEN))
    deeper = _count(root) - sum(1 for _ in root.walk(_OPEN))
    if not deeper:
        return table
    more = (
        f"{count(deeper)} modules lie deeper; .table(depth=…, "
        "sort='latency') shows those of a level."
    )
    return f"{table}\n\n{more}"


def _tree(root: ModuleProfile) -> str:
    depth = _depth_of(root)
    left_out = _count(root) - sum(1 for _ in root.walk(depth))
    cut = f"; {count(left_out)} modules deeper than level {depth} are left out" if left_out else ""
    return render(
        "profile.html",
        root=root,
        title=f"Modules{cut}",
        depth=depth,
        open=_OPEN,
        scaled=scaled,
        duration=duration,
        percent=percent,
    )


def _depth_of(root: ModuleProfile) -> int:
    most = min(_count(root), _MODULES)
    deepest = _OPEN
    for depth in range(_DEEPEST):
        modules = sum(1 for _ in root.walk(depth))
        if modules <= most:
            deepest = max(deepest, depth)
    return deepest


def _count(root: ModuleProfile) -> int:
    return 1 + sum(_count(child) for child in root.children)
