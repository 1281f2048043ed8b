"""`Place`: where pods come from. Its abstract methods are all that keeper and client ask of it.

`PlaceOptions` is the part without verbs: a record whose JSON form holds only what is not the
default. The guide "How to add a place" is in docs/structure.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from workbench.base.record import Allowed, PathText, Record
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec

CoreBinding = Literal["always", "cpuset", "never"]


def absolute(path: str) -> str:
    """Make a path of this machine absolute, as the keeper runs in another folder; an empty one stays."""
    return str(Path(path).expanduser().absolute()) if path else ""


LocalPath = Annotated[PathText, AfterValidator(absolute)]
Port = Annotated[int, Field(ge=1, le=65535), Allowed("a port, a whole number from 1 to 65535")]


class PlaceOptions(Record):
    """The options of a place; their JSON form and their repr hold no default and no secret."""

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form `{"kind": …, option: …}`; holds no secret."""
        return {
            "kind": self.kind,
            **self.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        }

    def __repr__(self) -> str:
        options = {name: value for name, value in self.to_dict().items() if name != "kind"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


class Place(PlaceOptions):
    """A place where pods come from.

    An instance is cheap, holds its options, and starts nothing when made. A subclass must set
    `kind` and define every abstract method; else the class statement raises a TypeError.

    The keeper owns one instance and calls it from several threads: `stop` may come while `launch`
    or `restore` runs. The client makes another instance of the same options, in another process,
    and calls `remove_left` on it.
    """

    on_this_machine: ClassVar[bool] = False
    """Whether the pods run on this machine. They then share its memory and disk, and a restart of
    the machine ends them. Default: no."""
    core_binding: ClassVar[CoreBinding] = "cpuset"
    """When agents bind ranks on CPUs to cores: `always`, where a pod has its machine for itself;
    `never`, where pods share cores; `cpuset`, where the pod has been given cores of its own."""
    observes_pods: ClassVar[bool] = False
    """Whether the platform watches pods by itself, so that the message of a pod explains why its
    agent fell silent, and `refresh` costs no call. Default: no."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: object) -> None:
        super().__pydantic_init_subclass__(**options)
        if not cls.kind:
            raise TypeError(f"{cls.__name__} needs a kind, the word for it in SPEC.json")
        if missing := sorted(cls.__abstractmethods__):
            raise TypeError(
                f"{cls.__name__} lacks {', '.join(missing)}; a place defines every verb of Place"
            )

    @abstractmethod
    def launch(self, spec: PodSpec, count: int, context: LaunchContext) -> Sequence[Pod]:
        """Start pods, wait until each can be reached over SSH, and return them in rank order.

        Blocks for at most `context.timeout_s`, apart from pulling an image. Nothing is left where
        it fails. The names are `pod-0`, `pod-1`, …; the parts of `Pod.root` before the name are
        equal. Each pod accepts `context.public_key`, and ends by itself once the keeper has been
        silent for `context.lease_s`. Before it returns, `launch` writes to `context.directory`
        what `adopt` and `remove_left` need to find the pods again.

        Raises:
            ConfigError: The options do not fit this machine or this spec.
            BackendError: The platform refused, or pods of this instance are up already.
            PodError: A pod ended during its start, or `stop` was called.
            PodTimeout: Pods are missing after the time-out; the message names each and why.
        """

    @abstractmethod
    def adopt(self, pods: Sequence[Pod], spec: PodSpec, context: LaunchContext, /) -> Sequence[Pod]:
        """Take over the running pods of a keeper that died, and return them in rank order.

        Finds the pods by what `launch` wrote to `context.directory`. From then on this keeper's
        silence counts for their lease, and `stop` ends them. A pod that has ended meanwhile is
        returned as failed. Removes nothing where it fails: another keeper may try again.

        Raises:
            WorkbenchError: The pods cannot be found.
        """

    @abstractmethod
    def refresh(self) -> Sequence[Pod]:
        """Return the pods as they are now, in rank order; none before `launch` and after `stop`.

        The keeper calls it every three seconds, so it may not block for more than about one.
        """

    @abstractmethod
    def logs(self, name: str, tail: int = 50) -> str:
        """Return the last lines of a pod's own log, also after `stop`.

        Raises:
            ConfigError: No pod of that name was launched.
        """

    @abstractmethod
    def stop(self) -> None:
        """End and remove all that `launch` made, also where `launch` failed half way. Idempotent.

        Blocks for some ten seconds at most. A `launch` or `restore` that is under way in another
        thread fails soon with a PodError or BackendError. A pod that cannot be reached ends by its
        lease.

        Raises:
            BackendError: The platform refused; the message says what is left and how to remove it.
        """

    @abstractmethod
    def remove_left(self, directory: Path) -> None:
        """Remove what a keeper of this cluster directory left on the platform. Idempotent.

        The client calls it on an instance that has launched nothing: after a keeper was killed,
        and again after every close. Does nothing where nothing is left.

        Raises:
            BackendError: The platform refused; the message says what is left and how to remove it.
        """

    def restore(
        self,
        lost: Collection[str],
        spec: PodSpec,  # noqa: ARG002 (for places that can make pods)
        context: LaunchContext,  # noqa: ARG002
        /,
    ) -> Sequence[Pod]:
        """Replace lost pods, by name, and return all pods in rank order.

        A pod that cannot be replaced is returned as failed, with the reason in its message; the
        run then continues without it or fails. Default: no pod is replaced.

        Raises:
            WorkbenchError: No pod could be replaced.
        """
        why = f"{type(self).__name__} has no other pod in its place"
        return [
            replace(pod, phase=Phase.FAILED, message=why) if pod.name in lost else pod
            for pod in self.refresh()
        ]
