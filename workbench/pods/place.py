"""`Place`: the origin of pods. Its abstract methods are all calls of the keeper and the client.

`PlaceOptions` is the part without methods: a record whose JSON form omits defaults. The guide is "A
place" in docs/extending.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from workbench.base.errors import ConfigError
from workbench.base.files import user_path
from workbench.base.machine.nvml import VISIBLE
from workbench.base.record import Allowed, PathText, Record, Text
from workbench.pods.pod import LaunchContext, Phase, Pod, interface_variables
from workbench.pods.pod_spec import PodSpec

CoreBinding = Literal["always", "cpuset", "never"]


def absolute(path: str) -> str:
    """Make a path of this machine absolute, as the keeper runs in another folder.

    Keep an empty path.
    """
    if not path:
        return ""
    own = user_path(path)
    return str(own.absolute())


LocalPath = Annotated[PathText, AfterValidator(absolute)]


def _check_setup(setup: Sequence[str]) -> tuple[str, ...]:
    """Return the lines unchanged if every command has a single line."""
    for line in setup:
        if not line.strip() or not line.isprintable():
            raise ConfigError(
                f"setup has {line!r}. Write each shell command as one text of one line, such as"
                ' "module load cuda"'
            )
    return tuple(setup)


SetupLines = Annotated[Sequence[Text], AfterValidator(_check_setup)]
Port = Annotated[int, Field(ge=1, le=65535), Allowed("a port, a whole number from 1 to 65535")]


class PlaceOptions(Record):
    """The options of a place; their JSON form and their repr hold no default and no secret."""

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form `{"kind": …, option: …}`; holds no secret."""
        return {
            "kind": self.kind,
            **self.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        }

    @classmethod
    def _by_name(cls, value: object) -> ConfigError:
        if isinstance(value, int):
            return ConfigError(
                f"the number of pods is an option of Cluster: write "
                f"Cluster({cls.__name__}(…), count={value})"
            )
        return super()._by_name(value)

    def __repr__(self) -> str:
        options = {name: value for name, value in self.to_dict().items() if name != "kind"}
        written = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"{type(self).__name__}({written})"


class Place(PlaceOptions):
    """An origin of pods.

    An instance is cheap, holds options, and starts nothing when made. A subclass must set `kind`
    and define every abstract method; else the class statement raises a TypeError.

    The keeper owns an instance and calls it from several threads: `stop` may come while `launch` or
    `restore` runs. The client, another process, makes an instance of the same options and calls
    `remove_left`.
    """

    on_this_machine: ClassVar[bool] = False
    """Whether the pods run on this machine. Pods then share the machine's memory and disk, and end
    with its restart. Default: no."""
    core_binding: ClassVar[CoreBinding] = "cpuset"
    """When agents bind ranks on CPUs to cores: `always`, where a pod has its machine for itself;
    `never`, where pods share cores; `cpuset`, where the pod has been given cores of its own."""
    takes_seats: ClassVar[bool] = False
    """Whether a pod takes free GPUs of a shared machine. `CUDA_VISIBLE_DEVICES` of the `PodSpec`
    then only names the GPUs to choose from. Default: no."""
    observes_pods: ClassVar[bool] = False
    """Whether the platform watches pods by itself, so that the message of a pod explains why its
    agent fell silent, and `refresh` costs no call. Default: no."""

    @property
    def has_queue(self) -> bool:
        """Whether the platform's queue may keep the pods waiting for hours. Default: no.

        A start then has no time limit unless the user gives one. An interrupt keeps the request.
        """
        return False

    @classmethod
    def rank_variables(cls, spec: PodSpec) -> dict[str, str]:
        """Return the variables of a `PodSpec` for ranks, with its interfaces.

        `CUDA_VISIBLE_DEVICES` is left out where each pod has taken some of the named GPUs.
        """
        variables = {**interface_variables(spec.interfaces), **spec.env}
        if cls.takes_seats and spec.gpus:
            variables.pop(VISIBLE, None)
        return variables

    @classmethod
    def __pydantic_init_subclass__(cls, **options: object) -> None:
        super().__pydantic_init_subclass__(**options)
        if not cls.kind:
            raise TypeError(f"{cls.__name__} needs a kind, the word for it in SPEC.json")
        missing = sorted(cls.__abstractmethods__)
        if missing:
            raise TypeError(
                f"{cls.__name__} lacks {', '.join(missing)}; a place defines every verb of Place"
            )

    @abstractmethod
    def launch(self, spec: PodSpec, count: int, context: LaunchContext) -> Sequence[Pod]:
        """Start pods, wait until all can be reached over SSH, and return the pods in rank order.

        Blocks for at most `context.timeout_s`, apart from pulling an image. Nothing is left after a
        failure. The names are `pod-0`, `pod-1`, …; the parts of `Pod.root` before the name are
        equal. A pod accepts `context.public_key`, and ends by itself after `context.lease_s`
        without its keeper. `launch` notes with `workbench.pods.notes` what `adopt` and
        `remove_left` need to find the pods again: pods may change a file in `context.directory`.

        Raises:
            ConfigError: The options do not fit the machine or the spec.
            BackendError: The platform refused, or pods of this instance are up already.
            PodError: A pod ended during its start, or `stop` was called.
            PodTimeout: Pods are missing after the time-out; the message names every pod and its
                reason.
        """

    @abstractmethod
    def adopt(self, pods: Sequence[Pod], spec: PodSpec, context: LaunchContext, /) -> Sequence[Pod]:
        """Take over the running pods of a keeper that died, and return the pods in rank order.

        Finds the pods by the notes of `launch`. From then on, the lease counts from the new
        keeper, and `stop` ends the pods. A pod that has ended meanwhile is returned as failed.
        Removes nothing after a failure: another keeper may try again.

        Raises:
            WorkbenchError: The pods cannot be found.
        """

    @abstractmethod
    def refresh(self) -> Sequence[Pod]:
        """Return the current pods in rank order; none before `launch` and after `stop`.

        The keeper calls `refresh` every three seconds. A call should not block for more than a
        second.
        """

    @abstractmethod
    def logs(self, name: str, tail: int = 50) -> str:
        """Return the last lines of a pod's own log, also after `stop`.

        Raises:
            ConfigError: No pod of that name was launched.
        """

    @abstractmethod
    def stop(self) -> None:
        """End and remove all that `launch` made, also after a partial failure. Idempotent.

        Blocks for some ten seconds at most. A `launch` or `restore` in another thread fails soon
        with a PodError or BackendError. An unreachable pod ends by its lease.

        Raises:
            BackendError: The platform refused; the message names the remains and their removal.
        """

    @abstractmethod
    def remove_left(self, directory: Path) -> None:
        """Remove the remains of a cluster directory's keeper on the platform. Idempotent.

        The client calls the method on an instance without pods: after a keeper was killed, and
        after every close. Does nothing where nothing is left.

        Raises:
            BackendError: The platform refused; the message names the remains and their removal.
        """

    def restore(
        self,
        lost: Collection[str],
        spec: PodSpec,  # noqa: ARG002 (for places that can make pods)
        context: LaunchContext,  # noqa: ARG002
        /,
    ) -> Sequence[Pod]:
        """Replace lost pods, by name, and return all pods in rank order.

        A pod without a replacement is returned as failed, with the reason in its message. The run
        then continues without the pod or fails. Default: no pod is replaced.

        Raises:
            WorkbenchError: No pod could be replaced.
        """
        why = f"{type(self).__name__} has no other pod in its place"
        pods = []
        for pod in self.refresh():
            if pod.name in lost:
                pods.append(replace(pod, phase=Phase.FAILED, message=why))
            else:
                pods.append(pod)
        return pods
