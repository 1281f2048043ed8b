"""The content of a run's panel, computed from the run's view; text and HTML use the content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.base.json_values import as_float as json_number
from workbench.base.json_values import as_int, as_list, as_str, get_object
from workbench.base.words import (
    UNKNOWN,
    count,
    duration,
    gib,
    middle_cut,
    number,
    percent,
    pluralize,
    short_list,
    strip_controls,
)
from workbench.display.failure import fault_card
from workbench.display.kit.downloads import run_links
from workbench.display.kit.lengths import length_facts
from workbench.display.kit.outliers import between, split
from workbench.display.kit.plots.runs import plot_title
from workbench.rundir.catalog.label import read_label
from workbench.rundir.checkpoints import model_folder, shared_run
from workbench.rundir.events import EventKind
from workbench.rundir.figures import metrics
from workbench.rundir.figures.metric import Metric
from workbench.rundir.state import RunState
from workbench.rundir.totals import Progress
from workbench.rundir.view import RunView

_NAMED_PODS = 8
_ENDED_WHEN_ASKED = (RunState.STOPPED, RunState.CANCELLED)
_MOST_OWN = 12  # figures of steps without a row in the table of metrics
_NAMED_COLUMNS = 20
TIPS: Mapping[str, str] = {
    "epoch": "Passes over the training rows so far",
    "exact match": "Share of answered evaluation rows with exactly the expected text",
    "time to first step": "Time from the start of the first rank to the end of the first optimizer "
    "step: imports, model, data and the first evaluation",
    "samples/s": "Training rows per second, over all ranks",
    "gradient norm": "L2 norm of the gradients",
    "perplexity": "e to the power of the evaluation loss",
    "GPUs busy": "Mean share of the time in which the GPUs computed, by their driver",
}
"""Explanations of figures in the panel, by title."""
OFFERS = ("Continue", "Ask", "Export")
"""Names of what can be done with an ended run."""
_OPEN = 2  # plots of a job's own metrics


class RunFacts:
    """All facts of a panel. Foreign text is on a single line but not escaped."""

    def __init__(self, view: RunView, *, alone: bool = False):
        """Compute the current facts of a run. `alone`: for a page without notebook or cluster."""
        job = view.spec.job if view.spec else None
        fault = view.result.error if view.result else None
        label = read_label(view.paths)
        ended = view.state.is_terminal
        # Texts of files may come from a stranger: they are made fit for a line.
        self.run_id = strip_controls(view.id)
        self.name = strip_controls(label.name)
        self.note = strip_controls(label.note)
        self.state = view.state
        self.how = strip_controls(_clauses(view)[0])
        """The message; after the end its first clause, and the receipt has the others."""
        self.hint = strip_controls(view.hint)
        """A passing remark: silence of a pod, no step for a while; empty where all is well."""
        self.head = _head(view)
        """Names and values of model, technique, hosts, global batch and time."""
        self.progress = view.progress
        self.share = _share(view, self.progress)
        """Share of the run, or during the start of the start, from 0 to 1."""
        self.bar = _bar(view, self.progress)
        self.figures = _figures(view, self.progress)
        self.memory = _memory(view)
        """Pod with its current and peak memory."""
        self.card = fault_card(fault, job) if fault else None
        self.receipt = _receipt(view, alone=alone) if ended else []
        """How a user ended the run, and what is left after the end, a line per fact; empty before
        the end."""
        self.offers = _offers(view) if ended and not alone else {}
        """What can be done with an ended run: a line of code, and the code of a cell, by name."""
        self.links = run_links(view.paths) if ended and not alone else []
        """Links to card and model after the end, if a Jupyter server has the files."""
        self.stop_grace_s = job.rules.stop.grace_s if job else None
        """Seconds from the request to stop until ranks are killed. None: the ranks end after a
        step, without a kill."""
        self.panel_metrics = job.views.panel_metrics if job else ()
        """Names of the job's own metrics."""
        self.open_plots = [strip_controls(plot_title(name)) for name in self.panel_metrics[:_OPEN]]
        """Titles of unfolded plots besides the first."""
        self.has_only_log = job is not None and not job.traits.events
        """Whether the ranks send no state events, so that the log is the only news of the run."""


def _share(view: RunView, progress: Progress) -> float:
    if view.state is RunState.SUCCEEDED:
        return 1.0
    if view.state is RunState.STARTING:
        finished_phases = max(0, _stage(view) - 1)
        return finished_phases / max(1, len(_phases(view)))
    if progress.step and progress.max_steps:
        return min(1.0, progress.step / progress.max_steps)
    return 0.0


def _head(view: RunView) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    # A run with a damaged specification shows what its result says.
    if view.spec:
        pairs += view.spec.job.views.panel_facts(view.start)
    elif view.result:
        pairs.append(("model", middle_cut(view.result.model, 40)))
        pairs.append(("technique", view.result.technique))
    pairs.append(("hosts", _hosts(view)))
    rows_per_step = as_int(view.start.get("global_batch_size"))
    if view.batch:
        pairs.append(("global batch size", f"{view.batch} (per device x accumulation x ranks)"))
    elif rows_per_step is not None:
        pairs.append(("global batch size", count(rows_per_step)))
    # Findings on the rows stand here only if there are any.
    not_read, empty, overlap = _of_rows(view)
    if not_read:
        pairs.append(("not read", short_list(not_read, _NAMED_COLUMNS)))
    if empty:
        pairs.append(("rows with an empty answer", count(empty)))
    if overlap:
        pairs.append(("evaluation rows that are training rows too", count(overlap)))
    # During the run the hint has the slow rank.
    if view.state.is_terminal:
        pairs.append(("slow rank", view.totals.book.slow_rank))
    pairs += length_facts(get_object(view.start, "text_lengths"))
    if view.elapsed_s is not None:
        is_over = view.state.is_terminal
        time = duration(view.elapsed_s) if is_over else _ticking(view.elapsed_s)
        pairs.append(("time", time))
    return [(name, strip_controls(text)) for name, text in pairs if text]


def _of_rows(view: RunView) -> tuple[list[str], int, int]:
    """Return the columns that are not read, and the numbers of empty answers and repeated rows.

    Before the ranks report, as submitted.
    """
    known = view.start if "not_read" in view.start else view.submitted_rows
    not_read = [as_str(name) for name in as_list(known.get("not_read"))]
    empty = as_int(known.get("empty_answers"))
    overlap = as_int(known.get("overlap"))
    return not_read, empty or 0, overlap or 0


def _ticking(seconds: float) -> str:
    # A live duration has no fractions.
    return f"{int(seconds)} s" if seconds < 60 else duration(seconds)


def _hosts(view: RunView) -> str:
    shown = []
    for host in view.hosts[:_NAMED_PODS]:
        slots = f" slots={host.slots}" if host.slots > 1 else ""
        shown.append(f"{host.pod} {host.address}".strip() + slots)
    if not shown:
        return ""
    more = f", … {len(view.hosts)} in all" if len(view.hosts) > _NAMED_PODS else ""
    ranks = ""
    if view.world_size:
        word = "rank" if view.world_size == 1 else "ranks"
        ranks = f" ({view.world_size} {word})"
    return f"{', '.join(shown)}{more}{ranks}"


def _bar(view: RunView, progress: Progress) -> str:
    parts = []
    if progress.step is not None and progress.max_steps:
        share = percent(progress.step / progress.max_steps)
        parts.append(f"{count(progress.step)} of {count(progress.max_steps)} steps, {share}")
    elif progress.step is not None:
        parts.append(f"{count(progress.step)} steps")
    if progress.eta_s is not None:
        parts.append(f"{_ticking(progress.eta_s)} left")
    stopped_step = view.totals.stopped_step
    if stopped_step is not None and not view.state.is_terminal:
        parts.append(f"stopping after step {count(stopped_step)}")
    doing = view.totals.doing
    stage = _stage(view) if view.state is RunState.STARTING else 0
    if stage:
        stages = len(_phases(view))
        words = {"starting ranks": "every rank loads torch and transformers"}
        if view.elapsed_s is not None:
            words["starting ranks"] += f", {_ticking(view.elapsed_s)}"
        words["training"] = "the first step" if stage == stages else "setting up the optimizer"
        phase = doing or view.message
        return strip_controls(f"start, {stage} of {stages}: {words.get(phase, phase)}")
    if view.state.is_terminal:
        parts.append(str(view.state))
    elif doing and doing != "training":
        parts.append(doing)
    if not parts:
        parts.append(view.message or str(view.state))
    return strip_controls(" · ".join(parts))


def _phases(view: RunView) -> Sequence[str]:
    """Return the phases of the start, in order; empty if the job's kind names none."""
    return view.spec.job.traits.start_phases if view.spec else ()


def _stage(view: RunView) -> int:
    """Return the number of the start's phase, from 1; 0 if unknown."""
    now = view.totals.phases.get(0, view.message)
    stage = 0
    for place, name in enumerate(_phases(view), 1):
        if now.startswith(name):
            stage = place
            break
    # The phase is named training before the first evaluation.
    if now == "training" and view.totals.eval_loss is None:
        return stage - 1
    return stage


def _figures(view: RunView, progress: Progress) -> list[tuple[str, str]]:
    result = view.result
    evaluated = view.totals.metrics if result is None else result.metrics
    pairs = [("epoch", number(progress.epoch))]
    for metric in metrics.rows():
        pairs.append((metric.title, _last(view, progress, metric)))
        if metric.name != "perplexity":
            continue
        # Figures of the evaluation without a row follow the figures with a row.
        for name, value in evaluated.items():
            curve = metrics.curve_name(name, EventKind.EVAL)
            if metrics.known(curve) is None:
                row = metrics.known(name)
                title = f"evaluation {row.title}" if row else name
                pairs.append((title, number(value)))
    own = {
        name: value
        for name, value in view.totals.step_figures.items()
        if metrics.known(name) is None
    }
    pairs += [(name, number(value)) for name, value in list(own.items())[:_MOST_OWN]]
    if len(own) > _MOST_OWN:
        pairs.append(("more figures", count(len(own) - _MOST_OWN)))
    if result is not None:
        pairs.append(("exact match", percent(json_number(result.of_kind.get("exact_match")))))
        pairs.append(("time to first step", duration(result.time_to_first_step_s)))
    busy = [host.gpu_percent for host in view.memory.values() if host.gpu_percent is not None]
    if busy:
        mean = sum(busy) / len(busy)
        pairs.append(("GPUs busy", percent(mean / 100)))
    return [(name, text) for name, text in pairs if text != UNKNOWN]


def _last(view: RunView, progress: Progress, metric: Metric) -> str:
    """Return the last value of a known metric in words. The result's own figures come first."""
    result = view.result
    curve = view.curves[metric.name]
    value = curve.last
    match metric.name:
        case "loss":
            value = progress.loss
        case "eval_loss":
            value = progress.eval_loss
            first = next((loss for _, loss in curve), None)
            if first is not None and value is not None and len(curve) > 1:
                return f"{number(first)} → {number(value)}"
        case "samples_per_s":
            value = progress.samples_per_s if result is None else result.train_samples_per_s
        case "perplexity" if result is not None:
            value = json_number(result.of_kind.get("perplexity"))
    if result is not None and metric.event == EventKind.EVAL:
        value = result.metrics.get(metric.name, value)
    return metric.write(value)


def _memory(view: RunView) -> list[tuple[str, str]]:
    peaks = view.result.peak_memory_gib if view.result else {}
    addresses = sorted({*view.memory, *peaks})
    pairs = []
    sizes_gib: list[float | None] = []
    for address in addresses:
        host = view.memory.get(address)
        now = f"now {gib(host.gib.last)}" if host and not view.state.is_terminal else ""
        # Ranks report their peak only at evaluations: later samples may be higher.
        measured = [host.peak_gib, host.gib.highest] if host else []
        known = [size for size in measured if size is not None]
        highest = peaks.get(address) or max(known, default=None)
        peak = f"peak {gib(highest)}" if highest is not None else ""
        sizes = ", ".join(part for part in (now, peak) if part)
        pairs.append((strip_controls(view.pod_name(address)), sizes or UNKNOWN))
        sizes_gib.append(highest)
    order, left_out = split([sizes_gib])
    shown = [pairs[place] for place in order]
    if left_out:
        rest = order[left_out.start :]
        peaks_between = between(sizes_gib, rest, [gib(size) for size in sizes_gib])
        shown[left_out.start :] = [(f"{len(rest)} more pods", f"peak {peaks_between}")]
    return shown


def _receipt(view: RunView, *, alone: bool) -> list[str]:
    lines = []
    how, *others = _clauses(view)
    if view.state in _ENDED_WHEN_ASKED and how:
        lines.append(f"Stop: {how}")
    lines.append(_ranks_left(view))
    if not alone:
        lines.append(_pods_left(view))
    lines.append(_files_left(view))
    # A button, or its line, has the code to continue.
    notes = [clause for clause in others if not clause.startswith("resume=run.path ")]
    if notes:
        lines.append(f"Notes: {'; '.join(notes)}")
    if alone:
        return [strip_controls(line) for line in lines]
    if _is_there(view.paths.tensorboard):
        lines.append("TensorBoard: run.tensorboard() opens it below a cell")
    return [strip_controls(line) for line in lines]


def _clauses(view: RunView) -> list[str]:
    """Return how a run ended, and the notes. A failure has a card, and its message is whole."""
    if not view.state.is_terminal or view.state is RunState.FAILED:
        return [view.message]
    return view.message.split("; ")


def _offers(view: RunView) -> dict[str, tuple[str, str]]:
    here = _is_there(view.paths.checkpoints) or view.paths.held.exists()
    in_place = shared_run(view.paths) is not None and view.totals.saved_step > 0
    lines = {}
    if view.state is not RunState.SUCCEEDED and (here or in_place):
        lines["Continue"] = "cluster.submit(run.spec.job.replace(resume=str(run.path)))"
    if _is_there(view.paths.model):
        lines["Ask"] = 'run.predict(["Write a question here"])'
        lines["Export"] = 'run.export("my-model")'
    load = f"from workbench import Run\n\nrun = Run.load({str(view.paths.root)!r})\n"
    offers = {}
    for name, line in lines.items():
        # The panel of the new run follows its submission.
        call = f"run = {line}\nrun" if name == "Continue" else line
        offers[name] = (line, load + call)
    return offers


def _ranks_left(view: RunView) -> str:
    left = view.result.left_processes if view.result else None
    if left is None:
        return (
            "Processes: unknown. Any left over will be stopped when the lease of their pod expires"
        )
    if left:
        return f"Processes: {left} are still running on the pods"
    back = ", and their GPU memory is free" if view.memory_kind == "cuda" else ""
    return f"Processes: all exited{back}; nothing is still running on the pods"


def _pods_left(view: RunView) -> str:
    pods = pluralize(len(view.hosts), "pod")
    if view.cluster_phase in ("ready", "starting"):
        return f"Pods: {pods} kept; the cluster is {view.cluster_phase} for the next run"
    state = "being stopped" if view.cluster_phase == "closing" else "stopped"
    return f"Pods: {state}; the cluster is " + (view.cluster_phase or "closed")


def _files_left(view: RunView) -> str:
    paths = view.paths
    # The files stay in the shared folder, which this machine may not see.
    model = f"model ({model_folder(paths)})" if paths.model.is_symlink() else "model"
    named = (
        (model, paths.model),
        ("outputs", paths.outputs),
        ("predictions", paths.predictions),
        ("profile", paths.profile),
        ("trace", paths.trace),
        ("logs", paths.logs),
        ("TensorBoard files", paths.tensorboard),
    )
    there = [name for name, path in named if _is_there(path)]
    if not there:
        return f"Files: in {paths.root}"
    return f"Files: {', '.join(there)} in {paths.root}"


def _is_there(path: Path) -> bool:
    if path.is_symlink():
        return True
    if path.is_dir():
        try:
            return any(path.iterdir())
        except OSError:  # not readable
            return True
    return path.exists()
