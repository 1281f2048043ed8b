"""`Function`: a function of the notebook as a job; it travels as a script that calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from workbench.base.errors import suggests


@dataclass(frozen=True, slots=True)
class Function:
    """Run a function of the notebook as one process per slot, with `Cluster.submit`.

    It travels by value, with the functions and variables of the notebook that it uses; what it imports must be on the
    pods. It finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun, and
    starts in an empty folder, of which new files come back as those of a `Script`.

    Example:
        run = cluster.submit(Function(train, args=(3,), env={"NCCL_DEBUG": "INFO"}))
        run.wait().raise_for_status()
        run.returned
    """

    function: Callable[..., object]
    """What every rank calls."""
    args: Sequence[object] = ()
    """Its arguments by place."""
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Its arguments by name."""
    launcher: str = "ssh"
    """One of `Launcher`."""
    stall_timeout_s: float | None = None
    """As of a `Script`."""
    restarts: int = 0
    """As of a `Script`."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed or written down."""

    @property
    def name(self) -> str:
        """The function's own name."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))


Function.__init__ = suggests("Function")(Function.__init__)  # type: ignore[method-assign]
