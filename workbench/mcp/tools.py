"""The tools of the server. Agents read the docstrings.

Every tool returns text as in a terminal, and the same facts as JSON. Tools of long work return
after a bounded wait. Pods and runs outlive the server. Pods stop after their idle time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from pydantic.fields import FieldInfo

from workbench.base.errors import ConfigError, RunError
from workbench.base.table import as_grid
from workbench.benchmark.cluster import Cluster
from workbench.client.run import Run
from workbench.finetune.export.folder import Dtype
from workbench.finetune.export.gguf import GgufType
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.notebook.comparison import compare as compare_runs
from workbench.finetune.notebook.history import history
from workbench.finetune.notebook.run import FineTuneRun
from workbench.finetune.plan.reading import preview as preview_rows
from workbench.jobs.registry import job_class, job_from_dict
from workbench.mcp.bounds import Bounds
from workbench.pods.backends import KINDS, backend_class
from workbench.rundir.catalog.find import find_all
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.state import StateName
from workbench.rundir.status import cluster_status

_LONGEST_S = 600.0
_SHOWN_ROWS = 4
_TAIL = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer of a tool."""

    text: str
    """The words of a terminal."""
    facts: Mapping[str, object]
    """The same facts as JSON."""


class Tools:
    """The verbs of an agent, on the runs and clusters of a folder."""

    def __init__(self, bounds: Bounds):
        self.bounds = bounds

    def places(self) -> Answer:
        """List the kinds of places for pods, with the options of each kind."""
        places = {
            kind: {
                name: _described(field) for name, field in backend_class(kind).model_fields.items()
            }
            for kind in KINDS
        }
        text = "\n".join(f"{kind}: {', '.join(options)}" for kind, options in places.items())
        return Answer(text=text, facts={"places": places})

    def clusters(self) -> Answer:
        """List the clusters of the folder whose pods are up or starting."""
        found = []
        for paths in find_all(self.bounds.root):
            status = cluster_status(paths.root)
            if isinstance(paths, ClusterPaths) and status.alive:
                found.append(
                    {
                        "path": str(paths.root.relative_to(self.bounds.root)),
                        "phase": str(status.phase),
                        "message": status.message,
                        "pods": [pod.name for pod in status.pods],
                    }
                )
        lines = [f"{each['path']}: {each['phase']}. {each['message']}" for each in found]
        return Answer(text="\n".join(lines) or "No pods are up.", facts={"clusters": found})

    def runs(
        self,
        name: str = "",
        state: Sequence[StateName] = (),
        sort: str = "-submitted_s",
        limit: int = 20,
    ) -> Answer:
        """List the runs of the folder, newest first. `sort` is a column; a minus is descending."""
        found = history(self.bounds.root, name=name, state=state, sort=sort)
        return Answer(text=str(as_grid(found, limit)), facts={"runs": found.rows()[:limit]})

    def preview(self, job: dict[str, Any], rows: int = _SHOWN_ROWS) -> Answer:
        """Show rows of a fine-tuning job as the model reads them. Start nothing.

        `job` holds the options of a job, as under `job` in a SPEC.json.
        """
        self.bounds.check(job)
        shown = preview_rows(cast(FineTune, job_from_dict(job)), rows=rows)
        facts = {
            "train_rows": shown.train_rows,
            "eval_rows": shown.eval_rows,
            "duplicates": shown.duplicates,
            "overlap": shown.overlap,
            "not_read": list(shown.not_read),
            "empty_answers": shown.empty_answers,
            "remarks": dict(shown.remarks),
        }
        return Answer(text=str(shown), facts=facts)

    def plan(
        self,
        job: dict[str, Any],
        cluster: dict[str, Any] | None = None,
        pods: int | None = None,
        gpu_memory_gib: float | None = None,
    ) -> Answer:
        """Predict memory and disk of a job on pods, by technique. Start nothing.

        `cluster` has the form under `cluster` in a SPEC.json; `gpu_memory_gib` is the memory of one
        GPU, to plan for other hardware.
        """
        spec = self._spec(job, cluster, pods)
        pod = spec.cluster.pods
        forecast = spec.job.views.forecast(
            pods=spec.pods or spec.cluster.count, gpus=pod.gpus, ranks=pod.ranks
        )
        if forecast is None:
            raise ConfigError(f"the needs of a {spec.job.kind} job are unknown, so it has no plan")
        plan = forecast.plan(gpu_memory_gib=gpu_memory_gib, memory_gib=pod.memory_gib)
        return Answer(text=plan.text, facts={"fits": plan.fits, **plan.facts})

    def submit(
        self,
        job: dict[str, Any],
        cluster: dict[str, Any] | None = None,
        attach: str | None = None,
        pods: int | None = None,
    ) -> Answer:
        """Check a job, start pods unless `attach` names a cluster's directory, and submit the job.

        Return at once: `follow` waits for the run. New pods stop after their idle time.
        """
        spec = self._spec(job, cluster, pods)
        if attach is not None:
            if cluster is not None:
                raise ConfigError("give cluster to start pods, or attach to use pods, not both")
            target = Cluster.attach(self.bounds.path(attach, "attach"))
            run = target.submit(spec.job, pods=pods)
        else:
            target = Cluster.from_spec(spec.cluster).start(wait=False)
            try:
                run = target.submit(spec.job, pods=pods)
            except BaseException:
                # Refused: pods without a run must not stay.
                target.close()
                raise
        facts = {"run": run.id, "path": str(run.path), "cluster": str(target.path)}
        return Answer(text=f"Run {run.id} is submitted to {target.path}.", facts=facts)

    def follow(self, run: str, timeout_s: float = 60.0) -> Answer:
        """Wait for the end of a run, at most `timeout_s` seconds, and return progress and log."""
        if not 0 <= timeout_s <= _LONGEST_S:
            raise ConfigError(f"timeout_s is {timeout_s}; give 0 to {_LONGEST_S:g} seconds")
        found = self._run(run)
        with suppress(TimeoutError):  # the answer is the progress so far
            found.wait(timeout_s, progress=False)
        progress = found.progress
        try:
            tail = found.logs(tail=_TAIL)
        except RunError:  # no rank has written yet
            tail = ""
        facts = {"run": found.id, "ended": found.state.is_terminal, **asdict(progress), "log": tail}
        words = f"{found.id}: {progress.state}. {progress.message}".rstrip()
        return Answer(text="\n".join(filter(None, [words, tail])), facts=facts)

    def logs(self, run: str, rank: int = 0, tail: int = 200) -> Answer:
        """Return the last lines of a rank's output."""
        text = self._run(run).logs(rank, tail=tail)
        return Answer(text=text or f"Rank {rank} printed nothing.", facts={"log": text})

    def stacks(self, run: str) -> Answer:
        """Return the Python stacks of every rank of a run, to see where the run is stuck."""
        found = self._run(run).stacks()
        texts = {str(rank): text for rank, text in found.items()}
        text = "\n".join(f"rank {rank}\n{stack or 'no answer'}" for rank, stack in texts.items())
        return Answer(text=text, facts={"stacks": texts})

    def doctor(self, cluster: str) -> Answer:
        """Examine the pods of a cluster of the folder, and name problems with their remedies."""
        diagnosis = Cluster.attach(self.bounds.path(cluster, "cluster")).doctor()
        return Answer(text=str(diagnosis), facts=diagnosis.to_dict())

    def result(self, run: str) -> Answer:
        """Return the result of an ended run: figures, or the error with its remedies."""
        found = self._run(run)
        result = found.result
        return Answer(text=str(result), facts={"run": found.id, **result.to_dict()})

    def compare(self, runs: list[str]) -> Answer:
        """Compare runs: different options, figures, and reasons against a comparison."""
        comparison = compare_runs([self._run(name) for name in runs])
        facts = {"runs": comparison.to_dataframe().to_dict("records"), "notes": comparison.notes}
        return Answer(text=str(comparison), facts=facts)

    def export(
        self,
        run: str,
        folder: str,
        dtype: Dtype | None = "bf16",
        merged: bool = True,
        gguf: GgufType | None = None,
    ) -> Answer:
        """Write the model of a run into a new folder, for transformers and vLLM, or as a GGUF."""
        found = self._run(run)
        if not isinstance(found, FineTuneRun):
            raise ConfigError(f"run {found.id} is no fine-tuning run, so there is no model")
        target = self.bounds.path(folder, "folder")
        export = found.export(target, dtype=dtype, merged=merged, gguf=gguf)
        return Answer(text=str(export), facts={"folder": str(target), "files": dict(export.files)})

    def stop(self, run: str, confirm: str = "", kill: bool = False) -> Answer:
        """Stop a run after a checkpoint, or with `kill` at once. `confirm` is the id of the run."""
        found = self._run(run)
        _confirmed(found.id, confirm, f"stop run {found.id}, which is {found.state}")
        if kill:
            found.cancel()
        else:
            found.stop()
        return Answer(text=f"Run {found.id} was asked to stop.", facts={"run": found.id})

    def close(self, cluster: str, confirm: str = "") -> Answer:
        """Stop the pods of a cluster and end its runs. `confirm` is the name of its directory."""
        path = self.bounds.path(cluster, "cluster")
        _confirmed(path.name, confirm, f"stop the pods and runs of {path}")
        Cluster.attach(path).close()
        return Answer(text=f"The pods of {path} are stopped.", facts={"cluster": str(path)})

    def delete(self, run: str, confirm: str = "") -> Answer:
        """Delete an ended run with logs, checkpoints and model. `confirm` is the id of the run."""
        found = self._run(run)
        _confirmed(found.id, confirm, f"delete {found.path} with logs, checkpoints and model")
        notes = found.delete()
        text = "; ".join([f"{found.path} is deleted", *notes])
        return Answer(text=text, facts={"path": str(found.path), "notes": notes})

    def card(self, run: str) -> str:
        """Return the result of an ended run, or the progress of another run."""
        found = self._run(run)
        return str(found.result if found.state.is_terminal else found)

    def _run(self, name: str) -> Run:
        """Return the run with an id, a name or a directory in the folder."""
        found = [each for each in history(self.bounds.root) if name in (each.id, each.name)]
        if len(found) > 1:
            paths = ", ".join(str(each.path) for each in found)
            raise ConfigError(f"{len(found)} runs have the name {name!r}: {paths}. Give a path")
        # A directory below the folder may be a link out of it.
        return Run.load(self.bounds.path(str(found[0].path) if found else name, "run"))

    def _spec(
        self, job: Mapping[str, object], cluster: Mapping[str, object] | None, pods: int | None
    ) -> RunSpec:
        self.bounds.check(job)
        given = ClusterSpec() if cluster is None else ClusterSpec.from_dict(cluster)
        return RunSpec(cluster=given, job=job_from_dict(job), pods=pods)


def _confirmed(name: str, confirm: str, what: str) -> None:
    if confirm != name:
        raise ConfigError(f"this would {what}. Ask the user, then repeat with confirm={name!r}")


def options_text(kind: str) -> str:
    """Return the options of a kind of job, with defaults and descriptions."""
    lines = []
    for name, field in job_class(kind).model_fields.items():
        default = "required"
        if not field.is_required():
            default = f"default {field.get_default(call_default_factory=True)!r}"
        lines.append(f"{name} ({default}): {_described(field)}".rstrip())
    return "\n".join(lines)


def _described(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


TOOLS: Mapping[str, Literal["reads", "adds", "destroys"]] = {
    "places": "reads",
    "clusters": "reads",
    "runs": "reads",
    "preview": "reads",
    "plan": "reads",
    "submit": "adds",
    "follow": "reads",
    "logs": "reads",
    "stacks": "reads",
    "doctor": "reads",
    "result": "reads",
    "compare": "reads",
    "export": "adds",
    "stop": "destroys",
    "close": "destroys",
    "delete": "destroys",
}
"""Every tool, and its effect on files and processes."""
