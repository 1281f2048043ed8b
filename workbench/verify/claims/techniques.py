"""Claims about techniques: the losses of `single` at equal global batches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from workbench.verify.claims.jobs import ROWS_A_RANK, llama, tiny
from workbench.verify.outcome import Broken, Cannot
from workbench.verify.row import Row
from workbench.verify.turn import Turn, at_most, curve, difference, engine

if TYPE_CHECKING:
    from workbench.results import FineTuneRun

SUBJECT = "techniques"
OFF = 0.01
"""Largest relative difference of losses and gradient norms, as in the trainer's tests."""
_SHARDED = ("ddp", "zero1", "zero2", "zero3", "fsdp")


def follows(run: FineTuneRun, reference: FineTuneRun, limit: float = OFF) -> str:
    """Compare the curves of two runs, and return the differences in words."""
    words = []
    for name, what in (("loss", "loss off by"), ("grad_norm", "gradient norm by")):
        off = difference(curve(run, name), curve(reference, name))
        words.append(at_most(what, off, limit))
    return ", ".join(words)


def on_device(turn: Turn, run: FineTuneRun) -> None:
    """Raise Broken if a run on GPUs has computed on the CPU."""
    wanted = "cuda" if turn.has_gpus else "cpu"
    kind = run.result.memory_kind
    if (kind == "cuda") != turn.has_gpus:
        raise Broken(f"the run was to compute on {wanted}, but its memory is {kind}")


def _single(turn: Turn) -> str:
    run = turn.train(tiny(turn, "single"))
    on_device(turn, run)
    losses = curve(run, "loss")
    if not losses[-1] < losses[0]:
        raise Broken(f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}")
    return f"loss from {losses[0]:.3g} to {losses[-1]:.3g}"


def _parity(technique: str, turn: Turn) -> str:
    if technique == "zero3-offload":
        turn.need_compiler()
    reference = turn.train(tiny(turn, "single"))
    run = turn.train(tiny(turn, technique))
    on_device(turn, run)
    words = follows(run, reference)
    if technique == "zero3-offload":
        words += _on_host(run)
    if turn.ranks == 1 and technique != "ddp":
        words += "; one rank, so nothing is sharded"
    return words


def _on_host(run: FineTuneRun) -> str:
    state = engine(run)
    devices = state["updated"]["devices"]
    if list(devices) != ["cpu"] or "optimizer" not in state["offload"]:
        raise Broken(f"the optimizer works on {devices}, and {state['offload']} is on the host")
    return f"; on the host: {', '.join(state['offload'])}"


def _hybrid(turn: Turn) -> str:
    turn.need_ranks(2)
    if turn.ranks % 2:
        raise Cannot(f"{turn.ranks} ranks form no groups of two")
    job = tiny(turn, "fsdp", fsdp={"shard": "hybrid", "group": 2})
    return follows(turn.train(job), turn.train(tiny(turn, "single")))


def _sequence_parallel(turn: Turn) -> str:
    turn.need_ranks(2)
    if turn.ranks % 2:
        raise Cannot(f"{turn.ranks} ranks form no groups of two")
    reference = turn.train(llama(turn, "single"))
    rows = reference.spec.job.to_dict()["per_device_train_batch_size"]
    words = []
    for technique in ("ddp", "zero3"):
        job = llama(
            turn,
            technique,
            sequence_parallel=2,
            per_device_train_batch_size=2 * int(str(rows)) // turn.ranks,
        )
        run = turn.train(job)
        on_device(turn, run)
        words.append(f"{technique}: {follows(run, reference)}")
    return "; ".join(words)


def _tensor_parallel(turn: Turn) -> str:
    turn.need_gpus("on CPUs a pod has one rank, and a group lies within a pod")
    crowded = turn.bench.crowded
    on_pod = crowded.spec.pods.gpus
    if on_pod < 2:
        raise Cannot("one GPU on a pod only, and a group lies within a pod")
    reference = turn.train(llama(turn, "single"))
    groups = on_pod // 2
    if turn.ranks % groups or on_pod % 2:
        raise Cannot(f"{on_pod} GPUs of a pod form no groups of two for the same global batch")
    words = []
    for technique in ("ddp", "zero1"):
        rows = ROWS_A_RANK * turn.ranks // groups
        job = llama(turn, technique, tensor_parallel=2, per_device_train_batch_size=rows)
        run = turn.train(job, pods=1, cluster=crowded)
        words.append(f"{technique}: {follows(run, reference)}")
    return "; ".join(words)


def _local_sgd(turn: Turn) -> str:
    turn.need_ranks(2)
    steps = {"max_steps": 24, "lr_scheduler_type": "constant"}
    apart = turn.train(tiny(turn, "local-sgd", local_sgd={"sync_steps": 6}, **steps)).result
    together = turn.train(tiny(turn, "ddp", **steps)).result
    if not (apart.eval_loss and together.eval_loss):
        raise Broken("a run has no evaluation loss")
    ratio = apart.eval_loss / together.eval_loss
    return at_most("evaluation loss relative to ddp", ratio, 1.1)


def _pipeline(turn: Turn) -> str:
    pod = turn.bench.main.spec.pods
    if turn.has_gpus and pod.gpus < 2:
        raise Cannot("one GPU on a pod only")
    limits: dict[int, float] = {}
    if not turn.has_gpus:
        limits = {0: 1}  # uses the hooks of several GPUs on a CPU
    job = llama(turn, "single", device_map="auto", max_memory=limits)
    return follows(turn.train(job), turn.train(llama(turn, "single")))


def _resume(turn: Turn) -> str:
    job = tiny(turn, "ddp", max_steps=6, save_steps=4)
    first = turn.train(job)
    resumed = turn.train(job.replace(resume=str(first.path)))
    if resumed.result.resumed_step != 4:
        raise Broken(f"the run continued from step {resumed.result.resumed_step}, not 4")
    off = difference(curve(resumed, "loss"), curve(first, "loss")[4:])
    return at_most("losses after step 4 off by", off, 1e-3)


def _quantized(turn: Turn) -> str:
    turn.need_gpus("ZeRO++ quantizes on GPUs only")
    turn.need_ranks(2)
    if not turn.first.nvcc:
        raise Cannot("the pods have no nvcc, and DeepSpeed compiles its quantizer")
    zero = {
        "stage": 3,
        "zero_quantized_weights": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    job = llama(turn, "zero3", deepspeed={"zero_optimization": zero}, precision="bf16")
    return follows(turn.train(job), turn.train(llama(turn, "zero3", precision="bf16")), 0.1)


ROWS = (
    Row(
        name="single",
        subject=SUBJECT,
        claim="one rank trains, the yardstick of the others",
        check=_single,
    ),
    *(
        Row(
            name=technique,
            subject=SUBJECT,
            claim=f"{technique} follows the losses of single",
            check=partial(_parity, technique),
        )
        for technique in _SHARDED
    ),
    Row(
        name="zero3-offload",
        subject=SUBJECT,
        claim="zero3-offload follows single, and updates on the host",
        check=partial(_parity, "zero3-offload"),
        limit_s=300.0,  # the first run compiles the host's AdamW
    ),
    Row(
        name="fsdp-hybrid",
        subject=SUBJECT,
        claim="fsdp with groups of two ranks follows single",
        check=_hybrid,
    ),
    Row(
        name="local-sgd",
        subject=SUBJECT,
        claim="local-sgd reaches about the loss of ddp",
        check=_local_sgd,
        limit_s=180.0,
    ),
    Row(
        name="sequence-parallel",
        subject=SUBJECT,
        claim="two ranks that share rows follow single",
        check=_sequence_parallel,
        limit_s=180.0,
    ),
    Row(
        name="tensor-parallel",
        subject=SUBJECT,
        claim="two GPUs that share the weights of layers follow single",
        check=_tensor_parallel,
        limit_s=180.0,
    ),
    Row(
        name="naive-pipeline",
        subject=SUBJECT,
        claim="layers spread over the GPUs of a pod follow single",
        check=_pipeline,
    ),
    Row(
        name="zero-quantized",
        subject=SUBJECT,
        claim="ZeRO++ sends quantized weights",
        check=_quantized,
        limit_s=300.0,
    ),
    Row(
        name="resume",
        subject=SUBJECT,
        claim="a resumed run repeats the losses of the whole run",
        check=_resume,
    ),
)
