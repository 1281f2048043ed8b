"""A container for each pod of a Slurm job: by pyxis where `srun` has the plugin, else Apptainer."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.pods.slurm import commands

_OF_PYXIS = "--container-image"
_OF_NODE = "LD_LIBRARY_PATH CUDA_HOME CUDA_PATH CPATH CC CXX"
"""Variables with paths of the node's software, which a container does not have."""

_APPTAINER = """\
for each in apptainer singularity; do
    if command -v "$each" >/dev/null; then
        exec "$each" exec {options} {image} {command}
    fi
done
echo "PodSpec.image needs pyxis, or apptainer or singularity in PATH; this node has none" >&2
exit 127
"""


class Runner(StrEnum):
    """Program that starts the container of a pod."""

    PYXIS = "pyxis"
    APPTAINER = "apptainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """Image of the pods, with the folders that are the same inside."""

    image: str
    runner: Runner
    mounts: Sequence[Path]
    gpus: bool

    def check(self) -> None:
        """Refuse an image or a folder that the runner would read as something else."""
        if not self.image.isprintable() or not self.image.strip() or self.image.startswith("-"):
            raise ConfigError(
                f"PodSpec.image is {self.image!r}; it must be the name of an image, or the path of"
                " an image file that the nodes share"
            )
        for folder in self.mounts:
            if set(":,") & set(str(folder)):
                raise ConfigError(
                    f"the folder {folder} has a colon or a comma, and cannot be mounted into a"
                    " container. Choose another folder"
                )

    @property
    def srun_words(self) -> list[str]:
        """Return the options of `srun`; none where a program of the step starts the container."""
        if self.runner is not Runner.PYXIS:
            return []
        mounts = ",".join(f"{folder}:{folder}" for folder in self.mounts)
        # A site may make each user root in containers, and sshd cannot be a root without other ids.
        image = f"{_OF_PYXIS}={_pyxis_name(self.image)}"
        return [image, f"--container-mounts={mounts}", "--no-container-remap-root"]

    @property
    def before(self) -> str:
        """Return the line of the batch script before the steps."""
        return f"unset {_OF_NODE}"

    def around(self, command: str) -> str:
        """Return the shell program of a step with Apptainer around the pod's command."""
        bind = ",".join(str(folder) for folder in self.mounts)
        options = [*(["--nv"] if self.gpus else []), "--bind", bind]
        return _APPTAINER.format(
            options=shlex.join(options),
            image=shlex.quote(_apptainer_name(self.image)),
            command=command,
        )


def runner_here() -> Runner:
    """Return pyxis if `srun` lists its option on this machine; else Apptainer, on the nodes."""
    return Runner.PYXIS if _OF_PYXIS in commands.call("srun", "--help") else Runner.APPTAINER


def _is_plain(image: str) -> bool:
    """Return whether an image is a name as for Docker: no path, no scheme."""
    return "://" not in image and not image.startswith(("/", "./"))


def _pyxis_name(image: str) -> str:
    """Return an image's name for pyxis, which separates the registry by `#`."""
    registry, slash, rest = image.partition("/")
    is_registry = "." in registry or ":" in registry or registry == "localhost"
    if _is_plain(image) and slash and is_registry and "#" not in image:
        return f"{registry}#{rest}"
    return image


def _apptainer_name(image: str) -> str:
    """Return an image's name for Apptainer."""
    return f"docker://{image.replace('#', '/')}" if _is_plain(image) else image
