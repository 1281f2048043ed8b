"""Assignment of a rank, and the Trainer's options made from it."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Seq2SeqTrainingArguments
from transformers.utils.logging import disable_progress_bar

from workbench.agent.probe.examine import clear_stale_locks
from workbench.agent.rank import collectives as ranks
from workbench.agent.rank import flight, store
from workbench.agent.ranks import stacks
from workbench.base.errors import ConfigError, RunError
from workbench.base.files import read_json
from workbench.base.json_values import as_int
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import Facts, check
from workbench.finetune.methods.method import Method
from workbench.finetune.methods.registry import method_of
from workbench.finetune.options.trackers import TRACKERS
from workbench.finetune.recipe.standalone import CHECKPOINTING, prepare, training_options
from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.techniques.technique import Technique
from workbench.jobs.registry import job_from_dict

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables of a user with settings of torch's allocator; two are older names."""
_GROWS = "expandable_segments:True"
_LOWEST_BYTES_PER_S = 10**9  # of a file server, for all pods in sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    job: FineTune
    """The job; a model folder has its path on this pod."""
    base: str
    """Model as the user named it."""
    train: str | None
    """Training file; None for a hub dataset."""
    evaluation: str | None
    """Evaluation file; None for no evaluation."""
    hub: Mapping[str, object] | None
    deepspeed: Mapping[str, Any] | None
    """Resolved DeepSpeed configuration; None without DeepSpeed."""
    gpus: int
    """GPUs of a pod; 0 trains on the CPU."""
    folder: Path
    rank_folder: Path
    rank: int
    world_size: int
    revision: str | None = None
    """Revision of the model as the user named it."""
    chosen: tuple[str, ...] = ()
    """Options that the user left open, chosen for the model and the pods."""
    json_keys: tuple[str, ...] = ()
    """Keys of the user's own DeepSpeed JSON, as `section.key`.

    Empty for a shipped configuration.
    """
    metric_inputs: Mapping[str, object] = field(default_factory=dict)
    """Inputs of the job's metrics: the user's function, tables."""
    resumed_step: int = 0
    """Step of the checkpoint to resume from; 0 from the beginning."""
    shared: Path | None = None
    """The run's folder in a folder that all pods share. None: checkpoints stay on the pod, and the
    model is copied back."""
    token_files: Path | None = None
    """Folder of the pod's tokenized rows; None for a run without a keeper's pods."""
    not_read: tuple[str, ...] = ()
    """Unread columns of the rows, if the rows are files."""
    empty_answers: int = 0
    """Rows of the files with an empty answer."""
    overlap: int | None = None
    """Evaluation rows of the files that are training rows too; None for a hub dataset."""
    unasked: str = ""
    """Reason why the columns of a hub dataset were not checked at submission; empty if checked."""
    remarks: Mapping[str, int] = field(default_factory=dict)
    """Numbers of rows of the files by what is odd about the rows."""
    notes: tuple[str, ...] = ()
    """Notes from the submission, on the model's files."""
    rewards: tuple[Mapping[str, object], ...] = ()
    """Functions of the user that judge answers."""

    @classmethod
    def read(cls) -> Assignment:
        """Read `job.json` in the run's folder, and the rank's environment."""
        try:
            folder = Path(os.environ["WORKBENCH_RUN_DIR"])
            raw = json.loads((folder / "job.json").read_text(encoding="utf-8"))
            job = job_from_dict(raw["job"])
            gpus = int(raw.get("gpus", 0))
        except (KeyError, OSError, ValueError) as error:
            raise RunError(
                f"this rank has no job it can read ({error!r}); it is started by an agent"
            ) from error
        if not isinstance(job, FineTune):
            raise RunError(f"the trainer runs finetune jobs, and was given a {job.kind} job")
        revision = job.model_revision
        fetched = read_json(folder / "fetched.json").get("folder")
        if fetched:
            # The files of one commit, which another pod may have passed on.
            raw["base"] = job.model
            job = job.replace(model=fetched, model_revision=None)
        # What the user left open is decided by the GPUs that the rank sees.
        chosen = tuple(raw.get("chosen", ()))
        job = choose(job, gpus=gpus)
        left_open = "precision" in chosen and job.precision == "bf16" and gpus > 0
        # torch computes bf16 on any GPU, but slowly before Ampere, the first with hardware support.
        if left_open and not (
            torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            job = job.replace(precision="fp32")
        rank = int(os.environ.get("RANK", "0"))
        technique = technique_of(job.technique)
        return cls(
            job=job,
            base=str(raw.get("base") or job.model),
            revision=revision,
            train=raw.get("train"),
            evaluation=raw.get("eval"),
            hub=raw.get("hub"),
            deepspeed=technique.config_of_run(raw.get("deepspeed"), folder.name),
            json_keys=tuple(raw.get("json_keys", ())),
            gpus=gpus,
            chosen=chosen,
            folder=folder,
            rank_folder=Path(os.environ.get("WORKBENCH_RANK_DIR", str(folder / f"rank-{rank}"))),
            rank=rank,
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            metric_inputs=raw.get("metric_inputs") or {},
            resumed_step=int((raw.get("resume") or {}).get("step", 0)),
            shared=Path(raw["shared"]) if raw.get("shared") else None,
            token_files=Path(raw["token_files"]) if raw.get("token_files") else None,
            not_read=tuple(raw.get("not_read") or ()),
            empty_answers=int(raw.get("empty_answers") or 0),
            overlap=as_int(raw.get("overlap")),
            unasked=str(raw.get("unasked") or ""),
            remarks=raw.get("remarks") or {},
            notes=tuple(raw.get("notes") or ()),
            rewards=tuple(raw.get("rewards") or ()),
        )

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def model_folder(self) -> Path:
        return (self.shared or self.out) / "model"

    @property
    def stop(self) -> Path:
        """Empty file whose presence asks the ranks to stop at their next check."""
        return self.folder / "stop"

    @property
    def technique(self) -> Technique:
        return technique_of(self.job.technique)

    @property
    def method(self) -> Method:
        return method_of(self.job.method)

    @property
    def global_batch(self) -> int:
        return self.job.global_batch(self.world_size)


def hold_fp32(job: FineTune) -> None:
    """Multiply FP32 in full: accelerate turns TF32 on for a compiled model in FP32."""
    if job.precision == "fp32":
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def prepare_process(work: Assignment) -> None:
    """Prepare this process before torch and DeepSpeed inspect the process."""
    _check_trackers(work)
    disable_progress_bar()
    # torch 2.13 has renamed collectives that DeepSpeed calls; every call would warn.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    # T5's blocks return their position bias as a view, and never change it in place.
    warnings.filterwarnings(
        "ignore",
        message=r"FSDP2-wrapped module \(FSDPT5Block\) returned a view",
        category=UserWarning,
    )
    if work.gpus and not torch.cuda.is_available():
        raise ConfigError(f"the job counts on {work.gpus} GPU(s), but torch finds none on this pod")
    on_pod = _ranks_on_pod()
    check(work.job, Facts(gpus=work.gpus, on_pod=on_pod, ranks=work.world_size))
    deepspeed = work.technique.uses_deepspeed
    if deepspeed:
        clear_stale_locks()
    store.install()
    stacks.write_on_signal(work.rank_folder)
    flight.record(work.rank_folder)
    prepare(
        single=work.technique.alone,
        gpus=bool(work.gpus),
        with_deepspeed=deepspeed,
        limit_s=_limit_s(work),
    )
    work.technique.prepare_pod(work.deepspeed)
    if work.gpus:
        grow_segments()


def grow_segments() -> None:
    """Let torch's allocator grow its blocks: batches of many sizes leave fewer gaps.

    A user's own setting of the allocator stays. The call must precede the first tensor on a GPU.
    """
    # A forked rank has loaded torch, which reads the variables only then.
    if not any(os.environ.get(name) for name in _ALLOCATOR):
        set_allocator: Any = torch._C._accelerator_setAllocatorSettings
        set_allocator(_GROWS)


def _ranks_on_pod() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _limit_s(work: Assignment) -> int:
    return collective_limit_s(work.job, work.world_size // _ranks_on_pod())


def collective_limit_s(job: FineTune, pods: int) -> int:
    """Return the limit of a collective operation: ranks also wait for a pod that reads the model.

    A single file server may serve the model's folder to all pods.
    """
    folder = Path(job.model)
    files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    read_bytes = pods * sum(file.stat().st_size for file in files)
    return job.ddp_timeout + read_bytes // _LOWEST_BYTES_PER_S


def training_arguments(work: Assignment) -> Any:
    """Translate the job into the Trainer's options, and open the process group of the ranks."""
    given = {**work.job.to_dict(), "ddp_timeout": _limit_s(work)}
    options = training_options(given, work.deepspeed, gpus=bool(work.gpus))
    made: Any = Seq2SeqTrainingArguments
    if work.method.uses_trl:
        module = work.method.on_pods()
        made = module.Arguments
        # TRL recomputes activations unless told otherwise.
        options = {CHECKPOINTING: False, "gradient_checkpointing": False, **options}
        # Evaluations read rows in order, and the trainer's hooks know the order of training rows.
        options |= {
            "train_sampling_strategy": "sequential",
            **module.UNCUT,
            **work.method.arguments(work.job),
        }
    arguments = made(
        output_dir=str(work.folder / "trainer"),
        run_name=work.folder.name,
        # Only rank 0 reports, as with the project's own metrics. If KUBEFLOW_TRAINER_SERVER_URL is
        # set, transformers adds its KubeflowCallback itself, and only rank 0's sends data.
        report_to=list(work.job.report_to) if work.rank == 0 and work.job.report_to else "none",
        # Ranks that train apart take the mean over their own tokens.
        average_tokens_across_devices=not work.technique.apart,
        **work.technique.training_options(work.job, options),
    )
    if arguments.use_liger_kernel:
        # The loss stays that of the workbench.
        losses = ("fused_linear_cross_entropy", "cross_entropy")
        arguments.liger_kernel_config = dict.fromkeys(losses, False)
    # Otherwise the Trainer splits batches over all visible GPUs.
    arguments._n_gpu = min(1, arguments.n_gpu)
    half = work.job.precision == "bf16"
    if "precision" in work.chosen and ranks.sums([float(half)])[0] != half * work.world_size:
        raise ConfigError(
            "some GPUs of these pods have bf16 and others have not: give the job a precision"
        )
    return arguments


def _check_trackers(work: Assignment) -> None:
    # Only rank 0 reports metrics, so only its pod needs the package.
    for name in work.job.report_to if work.rank == 0 else ():
        tracker = TRACKERS[name]
        missing = [pip for module, pip in tracker.packages.items() if not _is_there(module)]
        if missing:
            raise ConfigError(
                f"report_to names '{name}', and the pod of rank 0 has no package "
                f"{' and no '.join(missing)}; ask for it by PodSpec(pip={missing!r}), "
                "or drop it: TensorBoard has the metrics anyway"
            )
        for variable, value in tracker.settings.items():
            os.environ.setdefault(variable, value)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    # A package around the module is missing.
    except ModuleNotFoundError:
        return False
