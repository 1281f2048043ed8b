"""The facts of a run that has ended, for the eye."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.base.table import facts
from workbench.base.words import UNKNOWN, count, counted, duration, gib, number, percent, scaled, size
from workbench.client.result import RunResult
from workbench.display.failure import card_of, fault_doc
from workbench.display.kit.doc import Doc, Table
from workbench.rundir.catalog.label import read_label
from workbench.rundir.paths import RunPaths


def result_doc(result: RunResult) -> Doc:
    """State the facts of a run; of one that failed the card comes first, as in its panel."""
    card = list(fault_doc(card_of(result)).blocks) if result.error else []
    return Doc(blocks=[*card, facts_of_result(result)], state=result.state)


def facts_of_result(result: RunResult) -> Table:
    message = f": {result.message}" if result.message and not result.error else ""
    # A script, for one, reports no loss.
    pairs = [(name, text) for name, text in _pairs(result) if text not in ("", UNKNOWN)]
    return Table(facts(f"Run {result.state}{message}", pairs), width=100)


def _pairs(result: RunResult) -> list[tuple[str, str]]:
    label, predicted = read_label(RunPaths(result.path)), result.predicted_memory_gib
    return [
        ("name", label.name),
        ("note", label.note),
        ("trained", result.trained),
        ("adapters", _adapters(result)),
        ("peak learning rate", number(result.learning_rate)),
        ("hosts", _hosts(result)),
        ("launcher", result.launcher),
        ("optimizer steps", count(result.steps)),
        ("global batch size", count(result.global_batch_size)),
        ("whole run", duration(result.duration_s)),
        ("time to first step", duration(result.time_to_first_step_s)),
        ("training loop", duration(result.train_runtime_s)),
        ("samples/s", number(result.train_samples_per_s)),
        ("tokens/s", _tokens(result)),
        ("compute", _arithmetic(result)),
        ("sent per step and pod", scaled(result.sent_bytes_per_step, "B")),
        ("training loss, all steps", number(result.train_loss)),
        ("evaluation loss", _eval_loss(result)),
        ("perplexity", number(result.perplexity)),
        ("metrics", ", ".join(f"{name} {number(value)}" for name, value in result.metrics.items())),
        ("exact match", percent(result.exact_match)),
        (f"peak memory ({result.memory_kind})", _sizes(result, result.peak_memory_gib)),
        ("predicted for a pod", f"{gib(predicted)} at the longest rows that the job allows" if predicted else ""),
        ("pods' own memory", _sizes(result, result.host_memory_gib) if result.memory_kind == "cuda" else ""),
        ("files in outputs/", _outputs(result)),
        ("run directory", str(result.path)),
    ]


def _adapters(result: RunResult) -> str:
    if result.trainable_parameters is None or result.trainable_parameters == result.parameters:
        return ""
    return f"{count(result.trainable_parameters)} of {count(result.parameters)} parameters trained"


def _outputs(result: RunResult) -> str:
    if result.output_files is None:
        return ""
    return f"{counted(result.output_files, 'file')}, {size(result.output_bytes or 0)}, that the script wrote"


def _hosts(result: RunResult) -> str:
    hosts = ", ".join(f"{host.address} slots={host.slots}" for host in result.hosts)
    ranks = "1 rank" if result.world_size == 1 else f"{count(result.world_size)} ranks"
    return f"{hosts} ({ranks})" if hosts else ""


def _eval_loss(result: RunResult) -> str:
    parts = []
    if result.first_eval_loss is not None:
        parts.append(f"{number(result.first_eval_loss)} before the first step")
    if result.eval_loss is not None:
        when = "the last" if result.eval_step in (None, result.steps) else f"step {count(result.eval_step)}"
        parts.append(f"{number(result.eval_loss)} after {when}")
    elif parts:
        parts.append("not evaluated again")
    return ", ".join(parts)


def _tokens(result: RunResult) -> str:
    if result.useful_tokens_per_s is None:
        return ""
    return f"{number(result.useful_tokens_per_s)}, with padding {number(result.padded_tokens_per_s)}"


def _arithmetic(result: RunResult) -> str:
    rate = result.tflops_per_device
    if rate is None:
        return ""
    share = "" if result.mfu is None else f", {percent(result.mfu)} of its peak (MFU)"
    device = f" ({result.device})" if result.device else ""
    return f"{scaled(rate * 1e12, 'FLOP/s')} per rank{device}{share}"


def _sizes(result: RunResult, peaks: Mapping[str, float]) -> str:
    places = [host.address for host in result.hosts]
    order = sorted(peaks, key=lambda host: places.index(host) if host in places else len(places))
    return ", ".join(f"{host} {gib(peaks[host])}" for host in order)
