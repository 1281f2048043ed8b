"""Main program of every rank of an `Evaluation`: lm-eval on the base and on the trained model.

Every rank holds the whole model and answers its share of the rows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank import records, store
from workbench.agent.rank.phases import phase
from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.lm_eval.job import REPORT, Evaluation
from workbench.finetune.lm_eval.names import refusal, task_manager, unknown_tasks
from workbench.finetune.model import adapters
from workbench.finetune.model import load as model
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.options.model.models import model_kind
from workbench.jobs.registry import job_from_dict

_LIMIT = timedelta(hours=6)
"""Longest wait of a rank for the slowest one."""
_NO_ROWS = "did not find any docs"
_RESULTS = ("results", "higher_is_better", "n-samples", "n-shot")


def main() -> None:
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(os.environ["WORKBENCH_RUN_DIR"])
    rank_folder = Path(os.environ.get("WORKBENCH_RANK_DIR", str(folder / f"rank-{rank}")))
    try:
        _run(folder)
    except Exception as error:
        records.write_error(rank_folder, rank, error)
        raise
    records.write_done(rank_folder, rank)


def _run(folder: Path) -> None:
    # The packages come last, so that they shadow none of the pod's packages.
    sys.path.extend(filter(None, [os.environ.get("WORKBENCH_PACKAGES")]))
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "lm-eval is missing on the pod. Start the cluster with PodSpec(pip=['lm-eval']), "
            "or add lm-eval to the image"
        )
    asked = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    job = job_from_dict(asked["job"])
    trained = job_from_dict(asked["finetune"])
    assert isinstance(job, Evaluation) and isinstance(trained, FineTune)
    include = asked.get("include")
    if include:
        # A task file names its data by a path that starts at the file's folder.
        os.chdir(include)
    manager = task_manager(job.tasks, include)
    unknown = unknown_tasks(job.tasks, manager)
    if unknown:
        raise ConfigError(refusal(unknown))
    phase("joining the other ranks")
    device = _join(gpus=int(asked["gpus"]))
    scores: dict[str, object] = {"lm_eval": version("lm_eval")}
    for which in ("base", "trained") if job.before else ("trained",):
        phase(f"loading the {which} model")
        loaded = _loaded(which, trained, asked["model"])
        # bitsandbytes has placed weights of 4 bits, and refuses to move them.
        if not getattr(loaded.model, "is_loaded_in_4bit", False):
            loaded.model.to(device)
        phase(f"evaluating the {which} model")
        scores[which] = _evaluated(loaded, job, manager)
        del loaded
    if ranks.rank() == 0:
        # The keeper copies the file into the run directory.
        file = folder / "out" / REPORT
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(scores), encoding="utf-8")
    ranks.close()


def _join(*, gpus: int) -> torch.device:
    """Open the process group of several ranks, and return this rank's device."""
    device = torch.device("cpu")
    if gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        store.install()
        dist.init_process_group("nccl" if gpus else "gloo", timeout=_LIMIT)
    return device


def _loaded(which: str, job: FineTune, folder: str) -> model.Loaded:
    """Load the base or the trained model in the number format of its files."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if which == "trained" and job.peft == "none":
        loaded = model.load(folder, (), seed=0, options={"dtype": "auto"})
    else:
        options = dict(adapters.load_options(job.peft, job.number_format))
        if not options and model_kind(job.model) != "builtin":
            options = {"dtype": "auto"}
        loaded = model.load(job.model, (), seed=job.seed, options=options, tokenizer=tokenizer)
        if which == "trained":
            loaded = replace(loaded, model=adapters.with_saved(loaded.model, folder))
    # The encoder gives the tokenizer the chat template of the job.
    Encoder(loaded, job)
    return loaded


def _evaluated(loaded: model.Loaded, job: Evaluation, manager: Any) -> object:
    """Return lm-eval's figures of a model; on rank 0 alone."""
    lm_eval = import_module("lm_eval")
    try:
        results = lm_eval.simple_evaluate(
            model=_harness_model(loaded, job.batch_size),
            tasks=list(job.tasks),
            num_fewshot=job.num_fewshot,
            limit=job.limit,
            batch_size=job.batch_size,
            task_manager=manager,
            apply_chat_template=job.apply_chat_template,
            log_samples=False,
        )
    except ValueError as error:
        if _NO_ROWS not in str(error):
            raise
        raise ConfigError(
            f"a task has fewer rows than the {ranks.world_size()} ranks, and lm-eval needs a row "
            "for each. Evaluate this task with pods=1"
        ) from error
    if results is None:
        return None
    return json.loads(json.dumps({name: results.get(name) for name in _RESULTS}, default=str))


def _harness_model(loaded: model.Loaded, batch_size: int) -> Any:
    """Return lm-eval's model for this rank."""
    base: Any = import_module("lm_eval.models.huggingface").HFLM

    class RankModel(base):  # type: ignore[misc]  # loaded on pods alone
        """A loaded model whose rows are shared by the ranks of the run.

        lm-eval shares rows only on GPUs, by accelerate, and sends pickled results.
        """

        def __init__(self) -> None:
            super().__init__(
                pretrained=loaded.model,
                tokenizer=loaded.tokenizer,
                batch_size=batch_size,
            )
            self._rank = ranks.rank()
            self._world_size = ranks.world_size()

        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            if self.world_size == 1:
                return tensor
            parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
            dist.all_gather(parts, tensor)
            return torch.cat([part.reshape(-1) for part in parts])

        def gather_object(self, obj: Any, dst: int = 0) -> Any:
            parts = ranks.gather_bytes(json.dumps(_listed(obj), default=_number).encode())
            if self.rank != dst:
                return None
            return [_figures(json.loads(part)) for part in parts]

        def barrier(self) -> None:
            ranks.barrier()

        def get_model_info(self) -> Mapping[str, object]:
            return {}

    return RankModel()


def _listed(figures: Mapping[str, Mapping[tuple[str, str], Sequence[Any]]]) -> object:
    """Return the figures of each row by task, metric and filter, as lists for JSON."""
    return {
        task: [[*key, list(values)] for key, values in metrics.items()]
        for task, metrics in figures.items()
    }


def _figures(listed: Mapping[str, Sequence[Any]]) -> dict[str, dict[tuple[str, str], list[Any]]]:
    return {
        task: {(name, key): values for name, key, values in metrics}
        for task, metrics in listed.items()
    }


def _number(value: Any) -> object:
    """Return a number of numpy or torch as Python's own."""
    return value.item()


if __name__ == "__main__":
    main()
