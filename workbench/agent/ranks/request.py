"""The keeper's request to run ranks on a pod.

The environment may hold secrets: it stays in memory, and its values are never shown. A wrong field
of a message raises a ValueError with the field's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workbench.agent.site.nccl import left_open
from workbench.base.process import POD_MARK, POD_NAME, RANK_MARK, RUN_MARK, RankPlace

Message = Mapping[str, object]
_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def object_in(message: Message, name: str) -> Message:
    """Return a field that must be an object; an empty object for a missing field."""
    value = message.get(name)
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{name} must be an object")
    return value or {}


def texts_in(message: Message, name: str) -> dict[str, str]:
    """Return a field that must map strings to strings. Errors never show a value."""
    values = object_in(message, name)
    if {type(text) for text in values.values()} - {str}:
        raise ValueError(f"{name} must map strings to strings")
    return {key: str(text) for key, text in values.items()}


def whole_in(message: Message, name: str, default: int | None = None) -> int:
    """Return a field that is a whole number, 0 or more."""
    value = message.get(name, default)
    if not isinstance(value, int) or value is True or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 0 or more")
    return value


def number_in(message: Message, name: str, default: float) -> float:
    value = message.get(name, default)
    if not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    return float(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    run: str
    success: str = "exit code"
    """Proof of success of a rank: its own `record`, or its `exit code` 0."""
    ranks: tuple[RankPlace, ...]
    """All ranks of the run, on all pods."""
    argv: tuple[str, ...]
    """Command that a cold start executes."""
    entry: str | None = None
    """`module:function` that a warm start calls; None: only a cold start is possible."""
    world_size: int
    master_addr: str = ""
    """Address of rank 0's store."""
    master_port: int = 0
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    defaults: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the ranks that the pod's own variables and NCCL's files replace."""
    cwd: str | None = None
    """Folder to start in; None: the run's folder."""
    environment: str = ""
    """Folder of the ranks' virtual environment. Empty: the pod's own Python."""
    threads: int = 1
    binding: str = ""
    """Whether ranks get their own cores: `always`, `cpuset` (if the pod has a cpuset), `gpu` (the
    cores near the rank's GPU), or ""."""
    restart: int = 0
    """Number of restarts of the run so far."""
    max_restarts: int = 0
    """Number of restarts that the job allows."""
    attempt: int = 0
    """Number of the attempt, from 1. 0: the keeper counts no attempts."""
    alone: bool = False
    """Whether other agents have ranks of the run in the same folder, each with one rank."""

    @classmethod
    def from_dict(cls, raw: Message) -> RunRequest:
        """Read the JSON form. Unknown keys of a newer keeper are ignored."""
        ranks = []
        for item in _list(raw, "ranks"):
            fields = object_in({"ranks": item}, "ranks")
            ranks.append(_place(fields))
        cwd = raw.get("cwd")
        entry = raw.get("entry")
        return cls(
            run=check_run_id(raw.get("run")),
            success=str(raw.get("success", "exit code")),
            ranks=tuple(ranks),
            argv=tuple(str(item) for item in _list(raw, "argv")),
            entry=None if entry is None else str(entry),
            world_size=whole_in(raw, "world_size", len(ranks)),
            master_addr=str(raw.get("master_addr") or ""),
            master_port=whole_in(raw, "master_port", 0),
            env=texts_in(raw, "env"),
            defaults=texts_in(raw, "defaults"),
            cwd=None if cwd is None else str(cwd),
            environment=str(raw.get("environment") or ""),
            threads=max(1, whole_in(raw, "threads", 1)),
            binding=str(raw.get("binding") or ""),
            restart=whole_in(raw, "restart", 0),
            max_restarts=whole_in(raw, "max_restarts", 0),
            attempt=whole_in(raw, "attempt", 0),
            alone=raw.get("alone") is True,
        )

    def on(self, pod: str) -> tuple[RankPlace, ...]:
        return tuple(place for place in self.ranks if place.pod == pod)


def check_run_id(value: object) -> str:
    """Return a run id. Raise ValueError unless it is a plain folder name."""
    name = str(value)
    if name is not value or not _RUN_ID.fullmatch(name):
        raise ValueError(f"run id {value!r} must be letters, digits, dots, dashes and underscores")
    return name


def torchrun_variables(
    *,
    run: str,
    rank: int,
    world_size: int,
    node: int,
    nodes: int,
    restart: int = 0,
    max_restarts: int = 0,
) -> dict[str, str]:
    """Return torchrun's variables besides the rank's place. Lightning and others read them.

    TORCHELASTIC_USE_AGENT_STORE is False: rank 0 hosts the store itself. With True every rank would
    wait for a store of torchrun's agent. NODE_RANK is for Composer and Lightning, not torchrun's.
    """
    return {
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "NODE_RANK": str(node),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def rank_environment(
    request: RunRequest,
    place: RankPlace,
    root: Path,
    base: Mapping[str, str],
    overrides: Mapping[str, str],
) -> dict[str, str]:
    folder = root / "runs" / request.run
    pods: list[str] = []
    for each in sorted(request.ranks, key=lambda each: each.rank):
        if each.pod not in pods:
            pods.append(each.pod)
    elastic = torchrun_variables(
        run=request.run,
        rank=place.rank,
        world_size=request.world_size,
        node=pods.index(place.pod),
        nodes=len(pods),
        restart=request.restart,
        max_restarts=request.max_restarts,
    )
    defaults = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": str(request.threads),
        **left_open(request.defaults, {**base, **request.env}),
    }
    variables = {
        # As with torchrun, the pod's own values win. NCCL takes an empty variable for none.
        **base,
        **{name: value for name, value in defaults.items() if not base.get(name)},
        **elastic,
        "PYTHONUNBUFFERED": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",  # number of collectives in torch's flight recorder
        **request.env,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_WORLD_SIZE": str(len(request.on(place.pod))),
        "MASTER_ADDR": request.master_addr,
        "MASTER_PORT": str(request.master_port),
        POD_NAME: place.pod,
        **overrides,
        RUN_MARK: request.run,
        POD_MARK: str(root),
        "WORKBENCH_RUN_DIR": str(folder),
        RANK_MARK: str(folder / f"rank-{place.rank}"),
    }
    if request.environment:
        # As after `source bin/activate`: commands of the packages are found first.
        path = variables.get("PATH", os.defpath)
        variables["PATH"] = f"{request.environment}/bin{os.pathsep}{path}"
        variables["VIRTUAL_ENV"] = request.environment
        variables.pop("PYTHONHOME", None)
    return variables


def _place(item: Message) -> RankPlace:
    return RankPlace(
        rank=whole_in(item, "rank"),
        local_rank=whole_in(item, "local_rank", 0),
        pod=str(item.get("pod", "")),
    )


def _list(raw: Message, key: str) -> list[object]:
    value = raw.get(key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} of the request must be a list with something in it")
    return value
