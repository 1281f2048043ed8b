"""Find the cause, the likely fixes and the missing memory of a fault, by rules on its words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workbench.finetune.advice.memory import MORE_MEMORY, OF_SCRIPTS, fit_gpu, fit_host
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.techniques.registry import YARDSTICK, runs_alone
from workbench.jobs.job import Job
from workbench.rundir.result import RunFault


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Explanation of a failure, for people."""

    title: str
    asked: str = ""
    """Requested memory, in the words of the error. Empty: memory is not the cause."""
    free: str = ""
    limit: str = ""
    fixes: tuple[str, ...] = ()
    """Likely fixes, the likeliest first; two or three."""
    lacked_memory: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    words: str
    """Regular expression over kind, message and traceback. Letter case is ignored."""
    title: str
    fixes: Sequence[str] | Callable[[FineTune | None], Sequence[str]]
    kinds: tuple[str, ...] = ()
    """Kinds of fault the rule applies to. Empty: all kinds."""
    script: Sequence[str] = ()
    """Fixes for a script and other kinds of jobs, without model, technique or batch size.

    Empty: `fixes`.
    """
    lacked_memory: bool = False


def advise(fault: RunFault, job: Job | None = None) -> Advice:
    """Return an explanation of a fault and fixes to try.

    Example:
        >>> advise(RunFault(kind="RunError", message="loss is nan at step 3")).title
        'The loss is no longer a number'
        >>> words = (
        ...     "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of "
        ...     "79.25 GiB of which 256.00 MiB is free."
        ... )
        >>> advice = advise(RunFault(kind="OutOfMemoryError", message=words))
        >>> advice.lacked_memory
        True
        >>> [gib_of(size) for size in (advice.asked, advice.free, advice.limit)]
        [0.5, 0.25, 79.25]
    """
    tuned = job if isinstance(job, FineTune) else None
    is_of_other_kind = job is not None and tuned is None
    # Every rule searches the whole text. Longer texts do not help to find the cause.
    message = fault.message[:_LONGEST]
    traceback = fault.traceback[-_LONGEST:]
    words = f"{fault.kind}: {message}\n{traceback}"
    # A traceback quotes source lines that only mention a cause, so use the traceback only for
    # faults with little else.
    texts = [
        f"{fault.kind}: {message}",
        words if fault.kind in ("exit", "signal", "launcher") else "",
    ]
    for text in filter(None, texts):
        for rule in _RULES:
            if (not rule.kinds or fault.kind in rule.kinds) and re.search(
                rule.words, text, re.IGNORECASE
            ):
                if rule.script and is_of_other_kind:
                    rule = replace(rule, fixes=rule.script)
                return _advice(rule, words, tuned)
    return Advice(title=_general_title(fault), fixes=_general_fixes(fault, job))


def _advice(rule: _Rule, words: str, job: FineTune | None) -> Advice:
    fixes = rule.fixes(job) if callable(rule.fixes) else rule.fixes
    memory = {}
    if "memory" in rule.title:
        for name, patterns in _MEMORY.items():
            memory[name] = _first(patterns, words)
    return Advice(
        title=rule.title,
        fixes=tuple(fixes)[:3],
        lacked_memory=rule.lacked_memory,
        **memory,
    )


# Characters of a message, and of the end of a traceback.
_LONGEST = 64 << 10
_SIZE = r"(\d[\d.,]{0,40}\s?(?:[KMGT]i?B|bytes))"
_MEMORY = {
    "asked": (
        rf"tried to allocate {_SIZE}",
        rf"unable to allocate {_SIZE}",
        rf"allocate an? .{{0,40}}?{_SIZE}",
    ),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "limit": (rf"total capacity of {_SIZE}", rf"memory limit of {_SIZE}"),
}


def _first(patterns: Sequence[str], text: str) -> str:
    matches = (re.search(pattern, text, re.IGNORECASE) for pattern in patterns)
    return next((match[1] for match in matches if match), "")


_BYTES = {"k": 1024.0, "m": 1024.0**2, "g": 1024.0**3, "t": 1024.0**4}


def gib_of(size: str) -> float | None:
    """Parse a size as allocators and the kernel write it. Both KB and KiB mean 1024 bytes.

    Example:
        >>> gib_of("1.50 GiB"), gib_of("268435456 bytes"), gib_of("much")
        (1.5, 0.25, None)
    """
    match = re.fullmatch(r"(\d[\d.,]*)\s?([kmgt]?)(?:i?b|bytes)", size.strip(), re.IGNORECASE)
    if not match:
        return None
    try:
        return float(match[1].replace(",", "")) * _BYTES.get(match[2].lower(), 1.0) / _BYTES["g"]
    except ValueError:
        return None


# Highest rate of `choose`. A higher rate is replaced by the rate of `choose`, not by its tenth.
_HIGHEST_RATE = 1e-3


def _slower(job: FineTune | None) -> Sequence[str]:
    now = job.learning_rate if job else None
    lower = now / 10 if now and now <= _HIGHEST_RATE else None
    if job and now and lower is None:
        lower = choose(job.replace(learning_rate=None), gpus=0, looks=False).learning_rate
    fixes = [
        "a lower learning rate: "
        f"{f'learning_rate={lower:g} instead of {now:g}' if lower else 'a tenth of it'}"
    ]
    if job is None or job.precision != "fp32":
        fixes.append('precision="fp32", to see whether the number format is the cause')
    return [
        *fixes,
        "look for rows with an empty target, or with a target far longer than the others",
    ]


def _wider(job: FineTune | None) -> Sequence[str]:
    fixes = ['precision="bf16": it has the range of fp32']
    if job and job.learning_rate:
        fixes.append(f"a lower learning rate than {job.learning_rate:g}")
    return [*fixes, 'precision="fp32", if the GPU has no bf16']


_NETWORK = (
    "run cluster.doctor(bandwidth=True): it measures the network "
    "between every two pods and names the blocked connection",
    "name the interface between the pods: PodSpec(interfaces=…)",
    "allow all ports between the pods: a network policy or firewall often allows SSH only",
)
_HUB = (
    "check the spelling of the model's name; a folder "
    "must exist on the machine that submitted the run",
    'for a gated or private model give a token: env={"HF_TOKEN": os.environ["HF_TOKEN"]}',
    "if the pods cannot reach the hub, download the model first and give its folder as `model`",
)
_SCRIPT_RATE = (
    "a lower learning rate: a tenth of it",
    "fp32, to see whether the number format is the cause",
)
_COMPILER = "the pods need ninja and a compiler (gcc; nvcc for GPU ops) in their image"
_STALE = "a stale lock of an earlier build blocks the build: cluster.doctor() finds the lock"
_RULES: tuple[_Rule, ...] = (
    _Rule(
        r"cuda out of memory|outofmemoryerror|hip out of memory|cublas_status_alloc_failed",
        "Out of GPU memory",
        fit_gpu,
        script=OF_SCRIPTS,
        lacked_memory=True,
    ),
    _Rule(
        r"out of memory|memoryerror|cannot allocate memory|can't allocate memory"
        r"|unable to allocate|std::bad_alloc",
        "Out of memory on the pod",
        fit_host,
        script=(MORE_MEMORY, *OF_SCRIPTS),
        lacked_memory=True,
    ),
    _Rule(
        r"invalid device ordinal|no cuda gpus are available|found no nvidia driver"
        r"|duplicate gpu detected|cuda-capable devices? (is|are) (busy|detected)"
        r"|driver version is insufficient|driver on your system is too old|ecc error",
        "A rank cannot use its GPU",
        (
            "cluster.doctor() shows the GPUs of every pod beside the number that was asked for",
            "a pod needs a whole GPU for each rank: check CUDA_VISIBLE_DEVICES of the pod and of"
            " env, and that no slices (MIG) stand in for GPUs",
            "nvidia-smi and the kernel's log on the pod's machine show the driver's version and"
            " broken GPUs",
        ),
    ),
    _Rule(
        r"too many open files|errno 24\b|no free file descriptor",
        "Too few file descriptors",
        (
            "raise the limit where JupyterLab or the pod starts: `ulimit -n 4096`, or "
            "--ulimit nofile=4096 for containers",
            "fewer files at a time: fewer workers of data loaders, fewer ranks on a pod",
        ),
    ),
    _Rule(
        r"can't start new thread|cannot start a thread|pthread_create|cannot fork"
        r"|resource temporarily unavailable|sshd starts no process",
        "Too few processes or threads",
        (
            "raise the limit where JupyterLab or the pod starts: `ulimit -u`, --pids-limit for "
            "containers, podPidsLimit of the kubelet on Kubernetes",
            'fewer threads: env={"OMP_NUM_THREADS": "1"}, and fewer workers of data loaders',
        ),
    ),
    _Rule(
        r"sigbus|/dev/shm|shared memory",
        "Shared memory is too small",
        (
            "give the pod a larger /dev/shm (an emptyDir of medium "
            "Memory on Kubernetes, --shm-size for containers)",
            "cluster.doctor() shows how large it is on every pod",
        ),
    ),
    _Rule(
        r"killed by sigkill",
        "Killed from outside",
        (
            "usually the kernel's out-of-memory killer: check `dmesg` on "
            "the host, and ask for more PodSpec(memory_gib=…)",
            "a preempted or evicted pod looks the same: "
            "`cluster` shows what the platform reports about the pod",
        ),
    ),
    _Rule(
        r"killed by sig(segv|ill|abrt|fpe)|illegal instruction|segmentation fault",
        "Crashed in native code",
        (
            "remove the compiled ops, to build them again for "
            "this machine: rm -r ~/.cache/torch_extensions on the pod",
            "cluster.doctor() compares the versions of torch and DeepSpeed on all pods",
            'env={"PYTHONFAULTHANDLER": "1"} makes the next crash print the line',
        ),
    ),
    _Rule(
        r"killed by sig(term|int|hup)",
        "Stopped by a signal from outside",
        (
            "a person or the scheduler ended the process: "
            "`cluster` shows what the platform reports about the pod",
            "submit the job again: no fault of the job is known",
        ),
    ),
    _Rule(
        r"(loss|gradient norm|grad_norm) is (nan|-?inf)",
        "The loss is no longer a number",
        _slower,
        script=_SCRIPT_RATE,
    ),
    _Rule(
        r"loss scale already at minimum|overflow encountered",
        "Numbers left the range of fp16",
        _wider,
        script=("bf16, which has the range of fp32", *_SCRIPT_RATE[:1]),
    ),
    _Rule(
        r"eaddrinuse|address already in use",
        "A port was taken",
        (
            "submit the job again: every run gets another port",
            "a script must read its port from MASTER_PORT instead of naming a port",
        ),
    ),
    _Rule(
        r"ended early with 0",
        "One rank ended before the others",
        (
            "let every rank take the same number of steps and "
            "collectives: no early `return` or `sys.exit` on one of them",
            "the other ranks wait in a collective: run.stacks() of a live run shows which",
        ),
    ),
    _Rule(
        r"unable to find (address|interface) for|no socket interface found",
        "A network interface is not on the pod",
        (
            "correct GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, or leave both out: the pods then use"
            " the interface of their address. gloo reads whole names, without = and ^",
            "PodSpec(interfaces=…) is checked on every pod before a run",
        ),
    ),
    _Rule(
        r"timed out|timeout|ncclremoteerror|nccl error|no route to host|connection refused"
        r"|closed by peer",
        "The ranks lost touch with each other",
        _NETWORK,
    ),
    _Rule(
        r"attempted relative import",
        "A module was started as a file",
        ("start the module by its name: Script(module='pkg.train', folder='src')",),
    ),
    _Rule(
        r"cannot import name|module '[\w.]+' has no attribute|partially initialized module",
        "A module lacks a name",
        (
            "rename a file of yours with the name of a package or of a module of Python, for "
            "example token.py: Python imports the file in place of the module",
            "use a version of the package with the name: cluster.doctor() shows the versions on "
            "the pods",
        ),
    ),
    _Rule(
        r"'get_ipython' is not defined",
        "The script has lines of a notebook",
        (
            "remove the lines with get_ipython: lines with % or ! in the notebook",
            'name the packages of `!pip install` in Script(requirements=["…"])',
        ),
    ),
    _Rule(
        r"eof when reading a line",
        "The program asks a question, and ranks have no keyboard",
        (
            "give the answer as an argument or as a variable: Script(args=[…], env={…})",
            'answer for a tracker with its key in env, or turn the tracker off: report_to="none"',
        ),
    ),
    _Rule(
        r"no module named '?encodings",
        "Python cannot start on the pod",
        ("leave PYTHONHOME and PYTHONPLATLIBDIR out of env: no folder of Python is at that place",),
    ),
    _Rule(
        r"no module named|modulenotfounderror|importerror",
        "A package is missing on the pods",
        (
            "install the package into the Python of every pod, or into the pods' image",
            "put your own module beside the script: only the script's folder is copied to the pods",
        ),
        script=(
            "install the package into the Python of every pod, or name it in "
            'Script(requirements=["…"]) or PodSpec(pip=["…"])',
            "send the folder above your own module: Script('scripts/train.py', folder='.',"
            " env={'PYTHONPATH': '.'}), or Script(module='pkg.train', folder='src')",
        ),
    ),
    _Rule(
        r"gated repo|401 client error|403 client error|is not a valid model identifier"
        r"|is not a local folder|couldn't connect to|can't load (the )?(tokenizer|model|config)"
        r"|localentrynotfound|hfvalidationerror",
        "The model could not be loaded",
        _HUB,
        script=(
            *_HUB[:2],
            "if the pods cannot reach the hub, load the model from a folder beside the script",
        ),
    ),
    _Rule(
        r"no space left|errno 28|disk quota|the disk of .{0,300}? is full",
        "The disk is full",
        (
            "cluster.doctor() shows the free disk of every pod",
            "use a smaller model or keep fewer checkpoints; delete old folders in runs/",
        ),
    ),
    _Rule(
        r"error building extension|ninja|nvcc|cuda_home",
        "A compiled op of DeepSpeed could not be built",
        (_COMPILER, 'zero3-offload builds cpu_adam; technique="zero3" needs no compiler', _STALE),
        script=(_COMPILER, _STALE),
    ),
    _Rule(
        r"technique .{0,200} was asked for",
        "Another technique ran than was asked for",
        (
            "the job's DeepSpeed JSON contradicts the technique: "
            "remove `deepspeed`, or change the stage in the JSON",
        ),
    ),
    _Rule(
        r"train_batch_size is not equal|batch.{0,400}micro_batch",
        "The batch sizes of the DeepSpeed JSON disagree",
        ('write "auto" for all three batch sizes in the JSON; the sizes of the job then apply',),
        script=(
            "train_batch_size is micro-batch x gradient "
            "accumulation x ranks: leave out one of the three",
        ),
    ),
    _Rule(
        r"index out of range in self|device-side assert|srcselectdimsize",
        "A token beyond the vocabulary",
        (
            "the tokenizer is not that of the model: load both from the same folder or hub id",
            "added tokens need larger embeddings: model.resize_token_embeddings(len(tokenizer))",
        ),
    ),
    _Rule(
        r"size mismatch|shapes? .{0,40}(invalid|mismatch|cannot be multiplied)"
        r"|error\(s\) in loading state_dict",
        "Shapes do not fit",
        ("the checkpoint belongs to another model or size: check `model`",),
        script=(
            "the traceback names the line: print the shapes of its tensors just before the line",
            "a checkpoint of another model, or a smaller last batch "
            "(drop_last=True), causes the same error",
        ),
    ),
    _Rule(
        r"host key|permission denied \(publickey|no (ssh )?banner|ssh:|ssh_",
        "A pod could not be reached over SSH",
        (
            "cluster.doctor() tries every pod and shows the messages of ssh",
            "start another cluster: its keys and pods are new",
        ),
    ),
    _Rule(
        r".",
        "A pod was lost",
        (
            "`cluster` shows the state of each pod: evicted, out of memory, node lost",
            "start another cluster and submit the job again",
            "if the network is down for longer than lease_s, the "
            "ranks end: raise Cluster(lease_s=…)",
        ),
        kinds=("pod", "network"),
    ),
    _Rule(
        r".",
        "The launcher gave up",
        (
            'launcher="ssh" starts the ranks without pdsh or mpirun',
            "logs/launcher.log in the run directory has the output of the launcher",
        ),
        kinds=("launcher",),
    ),
    _Rule(
        r"filenotfounderror|no such file",
        "A file is missing on the pod",
        (
            "send a folder that has the file: Script('scripts/train.py', folder='.'). A file that "
            ".gitignore names travels if .workbenchignore includes it, as in !data/",
            "other paths are those of the pod; print(cluster.command(job)) shows the folder there",
        ),
    ),
)


def _general_title(fault: RunFault) -> str:
    if fault.rank is None:
        return "The run could not be carried out"
    if fault.kind == "exit":
        return "The program ended with an error"
    return f"The program raised {fault.kind or 'an error'}"


def _general_fixes(fault: RunFault, job: Job | None) -> tuple[str, ...]:
    if fault.rank is None:
        return (
            "cluster.doctor() checks every pod",
            "the keeper's log is keeper.log in the cluster's directory",
        )
    fixes = [f"run.logs(rank={fault.rank}, tail=None) gives all that the rank printed before"]
    if isinstance(job, FineTune):
        if not runs_alone(job.technique):
            fixes.append(
                f'technique="{YARDSTICK}", max_steps=2 tells in '
                "seconds whether one process alone fails too"
            )
    elif job is not None:
        fixes.append("cluster.submit(job, pods=1) tells whether one pod alone fails too")
    return tuple(fixes)
