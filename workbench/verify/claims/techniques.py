"""Claims about techniques: the losses of `single` at equal global batches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from workbench.verify.claims.jobs import ROWS_A_RANK, llama, tiny
from workbench.verify.figures import Broken, Cannot, at_most, curve, difference, engine
from workbench.verify.pods import Pods
from workbench.verify.row import Row

if TYPE_CHECKING:
    from workbench.results import FineTuneRun

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


def on_device(pods: Pods, run: FineTuneRun) -> None:
    """Raise Broken if a run on GPUs has computed on the CPU."""
    wanted = "cuda" if pods.has_gpus else "cpu"
    kind = run.result.memory_kind
    if (kind == "cuda") != pods.has_gpus:
        raise Broken(f"the run was to compute on {wanted}, but its memory is {kind}")


def _single(pods: Pods) -> str:
    run = pods.train(tiny(pods, "single"))
    on_device(pods, run)
    losses = curve(run, "loss")
    if not losses[-1] < losses[0]:
        raise Broken(f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}")
    return f"loss from {losses[0]:.3g} to {losses[-1]:.3g}"


def _parity(technique: str, pods: Pods) -> str:
    if technique == "zero3-offload":
        pods.need_compiler()
    reference = pods.train(tiny(pods, "single"))
    run = pods.train(tiny(pods, technique))
    on_device(pods, run)
    words = follows(run, reference)
    if technique == "zero3-offload":
        words += _on_host(run)
    if pods.ranks == 1 and technique != "ddp":
        words += "; one rank, so nothing is sharded"
    return words


def _on_host(run: FineTuneRun) -> str:
    state = engine(run)
    devices = state["updated"]["devices"]
    if list(devices) != ["cpu"] or "optimizer" not in state["offload"]:
        raise Broken(f"the optimizer works on {devices}, and {state['offload']} is on the host")
    return f"; on the host: {', '.join(state['offload'])}"


def _hybrid(pods: Pods) -> str:
    pods.need_ranks(2)
    if pods.ranks % 2:
        raise Cannot(f"{pods.ranks} ranks form no groups of two")
    job = tiny(pods, "fsdp", fsdp={"shard": "hybrid", "group": 2})
    return follows(pods.train(job), pods.train(tiny(pods, "single")))


def _compiled(pods: Pods) -> str:
    if not pods.first.compiler:
        raise Cannot("the pods have no C++ compiler, and torch.compile needs one")
    run = pods.train(llama(pods, "fsdp", torch_compile=True))
    on_device(pods, run)
    return follows(run, pods.train(llama(pods, "single")))


def _reduced_once(pods: Pods) -> str:
    half = ROWS_A_RANK // 2
    batch = {"per_device_train_batch_size": half, "gradient_accumulation_steps": 2}
    run = pods.train(tiny(pods, "fsdp", fsdp={"reduce": "step"}, **batch))
    on_device(pods, run)
    return follows(run, pods.train(tiny(pods, "single")))


def _sequence_parallel(pods: Pods) -> str:
    pods.need_ranks(2)
    if pods.ranks % 2:
        raise Cannot(f"{pods.ranks} ranks form no groups of two")
    reference = pods.train(llama(pods, "single"))
    rows = reference.spec.job.to_dict()["per_device_train_batch_size"]
    words = []
    for technique in ("ddp", "zero3"):
        job = llama(
            pods,
            technique,
            sequence_parallel=2,
            per_device_train_batch_size=2 * int(str(rows)) // pods.ranks,
        )
        run = pods.train(job)
        on_device(pods, run)
        words.append(f"{technique}: {follows(run, reference)}")
    return "; ".join(words)


def _tensor_parallel(pods: Pods) -> str:
    pods.need_gpus("on CPUs a pod has one rank, and a group lies within a pod")
    crowded = pods.crowded
    on_pod = crowded.spec.pods.gpus
    if on_pod < 2:
        raise Cannot("one GPU on a pod only, and a group lies within a pod")
    reference = pods.train(llama(pods, "single"))
    groups = on_pod // 2
    if pods.ranks % groups or on_pod % 2:
        raise Cannot(f"{on_pod} GPUs of a pod form no groups of two for the same global batch")
    words = []
    for technique in ("ddp", "zero1"):
        rows = ROWS_A_RANK * pods.ranks // groups
        job = llama(pods, technique, tensor_parallel=2, per_device_train_batch_size=rows)
        run = pods.train(job, pods=1, cluster=crowded)
        words.append(f"{technique}: {follows(run, reference)}")
    return "; ".join(words)


def _async_save(pods: Pods) -> str:
    words = []
    for technique in ("ddp", "fsdp"):
        run = pods.train(tiny(pods, technique, async_save=True, save_steps=2))
        on_device(pods, run)
        words.append(f"{technique}: {follows(run, pods.train(tiny(pods, technique)))}")
    return "; ".join(words)


def _local_sgd(pods: Pods) -> str:
    pods.need_ranks(2)
    steps = {"max_steps": 24, "lr_scheduler_type": "constant"}
    apart = pods.train(tiny(pods, "local-sgd", local_sgd={"sync_steps": 6}, **steps)).result
    together = pods.train(tiny(pods, "ddp", **steps)).result
    if not (apart.eval_loss and together.eval_loss):
        raise Broken("a run has no evaluation loss")
    ratio = apart.eval_loss / together.eval_loss
    return at_most("evaluation loss relative to ddp", ratio, 1.1)


def _pipeline(pods: Pods) -> str:
    pod = pods.main.spec.pods
    if pods.has_gpus and pod.gpus < 2:
        raise Cannot("one GPU on a pod only")
    limits: dict[int, float] = {}
    if not pods.has_gpus:
        limits = {0: 1}  # uses the hooks of several GPUs on a CPU
    job = llama(pods, "single", device_map="auto", max_memory=limits)
    return follows(pods.train(job), pods.train(llama(pods, "single")))


def _resume(pods: Pods) -> str:
    job = tiny(pods, "ddp", max_steps=6, save_steps=4)
    first = pods.train(job)
    resumed = pods.train(job.replace(resume=str(first.path)))
    if resumed.result.resumed_step != 4:
        raise Broken(f"the run continued from step {resumed.result.resumed_step}, not 4")
    off = difference(curve(resumed, "loss"), curve(first, "loss")[4:])
    return at_most("losses after step 4 off by", off, 1e-3)


def _quantized(pods: Pods) -> str:
    pods.need_gpus("ZeRO++ quantizes on GPUs only")
    pods.need_ranks(2)
    if not pods.first.nvcc:
        raise Cannot("the pods have no nvcc, and DeepSpeed compiles its quantizer")
    zero = {
        "stage": 3,
        "zero_quantized_weights": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    job = llama(pods, "zero3", deepspeed={"zero_optimization": zero}, precision="bf16")
    return follows(pods.train(job), pods.train(llama(pods, "zero3", precision="bf16")), 0.1)


ROWS = (
    Row("techniques", "single", "one rank trains, the yardstick of the others", _single),
    *(
        Row(
            "techniques",
            technique,
            f"{technique} follows the losses of single",
            partial(_parity, technique),
        )
        for technique in _SHARDED
    ),
    Row(
        "techniques",
        "zero3-offload",
        "zero3-offload follows single, and updates on the host",
        partial(_parity, "zero3-offload"),
        300.0,
    ),  # the first run compiles the host's AdamW
    Row("techniques", "fsdp-hybrid", "fsdp with groups of two ranks follows single", _hybrid),
    Row(
        "techniques", "fsdp-compiled", "fsdp with compiled layers follows single", _compiled, 300.0
    ),
    Row(
        "techniques",
        "fsdp-reduced-once",
        "fsdp that sums gradients once a step follows single",
        _reduced_once,
    ),
    Row("techniques", "local-sgd", "local-sgd reaches about the loss of ddp", _local_sgd, 180.0),
    Row(
        "techniques",
        "sequence-parallel",
        "two ranks that share rows follow single",
        _sequence_parallel,
        180.0,
    ),
    Row(
        "techniques",
        "tensor-parallel",
        "two GPUs that share the weights of layers follow single",
        _tensor_parallel,
        180.0,
    ),
    Row(
        "techniques",
        "naive-pipeline",
        "layers spread over the GPUs of a pod follow single",
        _pipeline,
    ),
    Row("techniques", "zero-quantized", "ZeRO++ sends quantized weights", _quantized, 300.0),
    Row("techniques", "async-save", "writing checkpoints in a thread changes no loss", _async_save),
    Row("techniques", "resume", "a resumed run repeats the losses of the whole run", _resume),
)
