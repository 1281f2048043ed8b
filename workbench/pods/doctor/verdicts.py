"""Judge the facts of a pod: the state of every check, and the remedy for every failed check.

Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ValidationError

from workbench.pods.pod import Pod, interface_variables
from workbench.pods.pod_spec import LEAST_CORES_PER_GPU, PodSpec


class DiskSpace(BaseModel):
    free_gib: float
    total_gib: float


class GpuMemory(BaseModel):
    index: int
    used_gib: float
    total_gib: float


class CompileLock(BaseModel):
    """A lock file of an op that is compiled on first use."""

    path: str
    age_s: float
    busy: bool


class PodFacts(BaseModel):
    """Facts that a pod reports about itself."""

    time_s: float
    """The pod's clock, in seconds since the epoch."""
    interface: str = ""
    """Interface of the pod's address."""
    interfaces: Sequence[str] = ()
    """All network interfaces of the pod; empty: unknown."""
    own_interfaces: Mapping[str, str] = {}
    """Values of the image or the site, by variable of NCCL and gloo."""
    address: str = ""
    """The address or name by which the pod was asked."""
    own_addresses: Sequence[str] = ()
    """What that name stands for on the pod itself; empty if the pod does not know the name."""
    address_for_others: str = ""
    """The address that the ranks of other pods are given."""
    versions: Mapping[str, str] = {}
    gpus: Sequence[GpuMemory] = ()
    gpu_gib: float | None = None
    cores: float | None = None
    """Processor cores that the pod may use."""
    memory_gib: float | None = None
    """Free memory of the pod's machine in GiB, regardless of the pod's own limit."""
    memory_limit_gib: float | None = None
    """The limit of its cgroup, or all that the machine has, whichever is less."""
    process_gib: float | None = None
    disk: DiskSpace | None = None
    shm: DiskSpace | None = None
    locks: Sequence[CompileLock] = ()
    torch_build: str = ""
    """`CUDA 12.9`, `ROCm 6.4` or `CPUs`. Empty: unknown."""
    nvcc: str = ""
    """Version of the compiler for CUDA. Empty: none."""
    ops: Mapping[str, Sequence[str]] = {}
    """Names of DeepSpeed's ops: `prebuilt`, `compiled` here on first use, or `missing` yet."""


def find_facts(output: str) -> PodFacts | None:
    """Extract the facts from the output of a command.

    A login shell may print lines before the facts.
    """
    for line in reversed(output.splitlines()):
        try:
            return PodFacts.model_validate_json(line)
        except ValidationError:
            continue
    return None


CHECKS = (
    "ssh",
    "host key",
    "address",
    "interfaces",
    "clock",
    "python",
    "torch",
    "deepspeed",
    "transformers",
    "workbench",
    "GPUs",
    "GPU memory",
    "CUDA",
    "cores",
    "memory",
    "disk",
    "/dev/shm",
    "compiled ops",
)
"""Names of the checks in display order."""
MEMORY_OF_JOB = "the job's memory"

_SKEW_S = 1.0
_DISK_GIB = 10.0
_DISK_LEAST_GIB = 2.0
_SHM_GIB = 1.0  # NCCL's and DataLoader's need; a container's own default is 64 MiB
_SHM_LEAST_GIB = 0.25
_MEMORY_LEAST_GIB = 1.0
_GPU_TAKEN_GIB = 1.0
_LOCK_S = 60.0


class Verdict(StrEnum):
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    UNKNOWN = "unknown"
    ABSENT = "absent"
    """There is none, and none was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    check: str
    verdict: Verdict
    detail: str
    fix: str = ""


def judge_facts(
    facts: PodFacts, pod: Pod, spec: PodSpec, here: Mapping[str, str], skew_s: float
) -> Iterator[Finding]:
    """Judge what `agent/probe/examine.py` printed on a pod."""
    if facts.address:
        yield _address(facts)
    yield _interfaces(facts, spec)
    yield _clock(skew_s)
    for package in ("python", "torch", "deepspeed", "transformers", "workbench"):
        yield _version(package, facts.versions.get(package, ""), here.get(package, ""))
    yield from _gpus(facts.gpus, pod, spec)
    if facts.gpus and facts.torch_build:
        yield _cuda(facts)
    yield _cores(facts.cores, spec)
    yield _memory(facts, spec)
    yield _disk(facts.disk, pod)
    yield _shm(facts.shm, bool(spec.gpus))
    yield _ops(facts)


def _address(facts: PodFacts) -> Finding:
    """Judge the address for other pods: on Debian a host's own name is a loopback address there."""
    name = facts.address
    others = facts.address_for_others or name
    own = facts.own_addresses[0] if facts.own_addresses else ""
    if own == name or (own and others == name and not own.startswith("127.") and own != "::1"):
        return Finding(check="address", verdict=Verdict.GOOD, detail=others)
    known = f"{name} is {own} there" if own else f"{name} is unknown there"
    if others != name:
        source = "the name" if others in facts.own_addresses else "the SSH connection"
        detail = f"{known}; others get {others}, from {source}"
        return Finding(check="address", verdict=Verdict.GOOD, detail=detail)
    return Finding(
        check="address",
        verdict=Verdict.WARNING,
        detail=f"{known}, and no other address is known",
        fix=f"pods on other machines cannot reach it: correct {name} in /etc/hosts there, or give"
        ' the host as {"address": …, "internal_address": …}',
    )


def _interfaces(facts: PodFacts, spec: PodSpec) -> Finding:
    """Tell the interfaces of NCCL and gloo, and who names the interfaces."""
    missing = [name for name in spec.interfaces if name not in facts.interfaces]
    used = []
    # The first of spec, environment, pod and address decides, as on the ranks.
    for library, name in (("NCCL", "NCCL_SOCKET_IFNAME"), ("gloo", "GLOO_SOCKET_IFNAME")):
        own = facts.own_interfaces.get(name, "")
        if spec.interfaces:
            words = f"{library} {interface_variables(spec.interfaces)[name]}, by PodSpec.interfaces"
            words += f", not {own} of the pod" if own else ""
        elif name in spec.env:
            words = f"{library} {spec.env[name]}, by PodSpec.env"
        elif own:
            words = f"{library} {own}, by the pod" if own != "…" else f"{library} by nccl.conf"
        elif facts.interface:
            words = f"{library} {facts.interface}, of the pod's address"
        else:
            words = f"{library} chooses"
        used.append(words)
    # Without a list of interfaces, a missing name cannot be told.
    is_bad = bool(missing and facts.interfaces)
    return Finding(
        check="interfaces",
        verdict=Verdict.BAD if is_bad else Verdict.GOOD,
        detail="; ".join(used),
        fix=f"{', '.join(missing)} is not there; there are {', '.join(facts.interfaces)}"
        if is_bad
        else "",
    )


def _clock(skew_s: float) -> Finding:
    if abs(skew_s) <= _SKEW_S:
        return Finding(
            check="clock",
            verdict=Verdict.GOOD,
            detail="agrees" if not skew_s else f"{skew_s:+.2f} s",
        )
    fix = "set the pod's clock (chrony or systemd-timesyncd): times in its logs are not comparable"
    return Finding(check="clock", verdict=Verdict.WARNING, detail=f"{skew_s:+.1f} s", fix=fix)


def _version(package: str, there: str, here: str) -> Finding:
    def finding(verdict: Verdict, fix: str = "") -> Finding:
        return Finding(check=package, verdict=verdict, detail=there or "not installed", fix=fix)

    if not there:
        wanted = f"{package}=={here}" if here else package
        return finding(Verdict.BAD, f"install it for the pod's Python: pip install {wanted}")
    if not here or _public(there) == _public(here):
        return finding(Verdict.GOOD)
    if package == "workbench":
        return finding(
            Verdict.BAD, f"the notebook has {here}: close the cluster and start it again"
        )
    if package == "python":
        close = there.split(".")[:2] == here.split(".")[:2]
        fix = f"the notebook has {here}: use the same Python in the image"
        return finding(Verdict.WARNING if close else Verdict.BAD, fix)
    return finding(
        Verdict.BAD, f"the notebook has {here}: pip install {package}=={_public(here)} on the pod"
    )


def _public(version: str) -> str:
    """Leave out the part that names a build: 2.13.0+cpu and 2.13.0+cu129 are the same code."""
    return version.partition("+")[0]


def _gpus(gpus: Sequence[GpuMemory], pod: Pod, spec: PodSpec) -> Iterator[Finding]:
    wanted = spec.gpus
    verdict = Verdict.GOOD if gpus else Verdict.ABSENT
    fix = ""
    if len(gpus) < wanted:
        verdict = Verdict.BAD
        fix = (
            f"{wanted} were asked for: look at nvidia-smi on "
            f"{pod.name}, its driver and CUDA_VISIBLE_DEVICES"
        )
    yield Finding(
        check="GPUs", verdict=verdict, detail=str(len(gpus)) if gpus or wanted else "none", fix=fix
    )
    if not gpus:
        return
    # Memory in use before the first run belongs to another process.
    whole = sum(gpu.total_gib for gpu in gpus)
    used = sum(gpu.used_gib for gpu in gpus)
    taken = [f"GPU {gpu.index}" for gpu in gpus if gpu.used_gib > _GPU_TAKEN_GIB]
    yield Finding(
        check="GPU memory",
        verdict=Verdict.WARNING if taken else Verdict.GOOD,
        detail=f"{whole - used:.1f} of {whole:.1f} GiB free",
        fix=f"something holds memory of {', '.join(taken)}: nvidia-smi on {pod.name} names it"
        if taken
        else "",
    )


def _cuda(facts: PodFacts) -> Finding:
    """Compare the CUDA of torch with the compiler's, as DeepSpeed does before it compiles an op.

    Source: `assert_no_cuda_mismatch` of DeepSpeed 0.19, `op_builder/builder.py`.
    """
    kind, _, version = facts.torch_build.partition(" ")
    if kind == "CPUs":
        return Finding(
            check="CUDA",
            verdict=Verdict.BAD,
            detail="torch is built for CPUs",
            fix="ranks would not use the GPUs: install a torch with CUDA for the pod's Python",
        )
    detail = f"torch {facts.torch_build}"
    if kind != "CUDA":
        return Finding(check="CUDA", verdict=Verdict.GOOD, detail=detail)
    if not facts.nvcc:
        detail += ", no nvcc: ops that are not built cannot be compiled"
        return Finding(check="CUDA", verdict=Verdict.GOOD, detail=detail)
    differs = facts.nvcc.partition(".")[0] != version.partition(".")[0]
    return Finding(
        check="CUDA",
        verdict=Verdict.WARNING if differs else Verdict.GOOD,
        detail=f"{detail}, nvcc {facts.nvcc}",
        fix=f"DeepSpeed compiles no op with another CUDA than torch's: install the toolkit of CUDA"
        f" {version} and name its folder, PodSpec(env={{'CUDA_HOME': …}})"
        if differs
        else "",
    )


def _cores(cores: float | None, spec: PodSpec) -> Finding:
    if cores is None:
        return Finding(check="cores", verdict=Verdict.UNKNOWN, detail="unknown")
    if not spec.gpus:
        return Finding(check="cores", verdict=Verdict.GOOD, detail=f"{cores:g}")
    each = cores / spec.gpus
    few = each < LEAST_CORES_PER_GPU
    return Finding(
        check="cores",
        verdict=Verdict.WARNING if few else Verdict.GOOD,
        detail=f"{cores:g}, {each:.3g} for each GPU",
        fix=f"a rank needs {LEAST_CORES_PER_GPU} cores or more for NCCL and the loading of data:"
        " give PodSpec(cpus=…), or a pod with fewer GPUs"
        if few
        else "",
    )


def _memory(facts: PodFacts, spec: PodSpec) -> Finding:
    limits = [size for size in (spec.memory_gib, facts.memory_limit_gib) if size is not None]
    sizes = (
        (facts.memory_gib, "free on its machine"),
        (min(limits, default=None), "the pod's limit"),
    )
    gib, of = min(((size, of) for size, of in sizes if size is not None), default=(None, ""))
    if gib is None:
        return Finding(check="memory", verdict=Verdict.UNKNOWN, detail="unknown")
    tight = gib < _MEMORY_LEAST_GIB
    return Finding(
        check="memory",
        verdict=Verdict.BAD if tight else Verdict.GOOD,
        detail=f"{gib:.1f} GiB, {of}",
        fix="less than a rank needs to start: end what else runs there, or take a larger pod"
        if tight
        else "",
    )


def _disk(disk: DiskSpace | None, pod: Pod) -> Finding:
    if disk is None:
        fix = f"the pod's folder {pod.root} is gone: close the cluster and start it again"
        return Finding(check="disk", verdict=Verdict.BAD, detail="no folder", fix=fix)
    free = disk.free_gib
    verdict = (
        Verdict.BAD
        if free < _DISK_LEAST_GIB
        else Verdict.WARNING
        if free < _DISK_GIB
        else Verdict.GOOD
    )
    fix = (
        f"make room where {pod.root} lies: a checkpoint "
        "needs some 16 bytes a parameter (AdamW, FP32)"
    )
    return Finding(
        check="disk",
        verdict=verdict,
        detail=_free(free),
        fix="" if verdict is Verdict.GOOD else fix,
    )


def _shm(shm: DiskSpace | None, gpus: bool) -> Finding:
    if shm is None:
        fix = (
            "mount a memory file system at /dev/shm: NCCL "
            "and the DataLoader's workers share memory there"
        )
        return Finding(check="/dev/shm", verdict=Verdict.BAD, detail="missing", fix=fix)
    free = shm.free_gib
    verdict = Verdict.GOOD
    if free < _SHM_GIB:
        verdict = Verdict.BAD if gpus or free < _SHM_LEAST_GIB else Verdict.WARNING
    fix = (
        "make it larger: a volume of medium Memory at "
        "/dev/shm on Kubernetes, --shm-size=8g with docker"
    )
    room = f"{_free(free)} of {shm.total_gib:.1f}"
    return Finding(
        check="/dev/shm", verdict=verdict, detail=room, fix="" if verdict is Verdict.GOOD else fix
    )


def _ops(facts: PodFacts) -> Finding:
    """Tell which ops are there, and find locks that a build would wait for."""
    stale = [lock.path for lock in facts.locks if not lock.busy and lock.age_s > _LOCK_S]
    if stale:
        fix = "the next run that compiles waits for it without a word; on the pod: rm "
        state = f"{len(stale)} stale lock{'s' if len(stale) > 1 else ''}"
        return Finding(
            check="compiled ops", verdict=Verdict.BAD, detail=state, fix=fix + shlex.join(stale)
        )
    words = ["one is being compiled" if facts.locks else "no locks"]
    for state, title in (
        ("prebuilt", "built with DeepSpeed"),
        ("compiled", "compiled"),
        ("missing", "compiled on first use"),
    ):
        if names := facts.ops.get(state):
            words.append(f"{title}: {', '.join(names)}")
    return Finding(check="compiled ops", verdict=Verdict.GOOD, detail="; ".join(words))


def _free(gib: float) -> str:
    return f"{gib:.1f} GiB free" if gib >= 0.1 else f"{gib * 1024:.0f} MiB free"
