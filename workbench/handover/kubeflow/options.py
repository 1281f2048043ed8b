"""Options of `Run.manifest`, checked on creation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from workbench.base.errors import ConfigError
from workbench.base.record import Allowed, Count, Environment, Positive, Size, Unit, nested
from workbench.base.redact import is_secret, mask_secrets
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.pod_spec import PodSpec

_TOKEN = re.compile(r"[a-z0-9][a-z0-9.-]*(/[A-Za-z0-9._-]+)?")


def _check_token(secret: str) -> str:
    if secret and not _TOKEN.fullmatch(secret):
        # Do not print the value: a user may have passed the token itself.
        raise ConfigError("token_secret is not the name of a Secret; give 'hub', or 'hub/key'")
    return secret


def _check_plain(env: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in env.items():
        if is_secret(name, value) or mask_secrets(value) != value:
            raise ConfigError(
                f"env {name} looks like a secret, and a manifest is read by many: "
                f'name the Secret that holds it, secrets={{"{name}": "secret/key"}}'
            )
    return env


def _check_folder(inputs: str) -> str:
    if inputs.startswith("/") or ".." in PurePosixPath(inputs).parts:
        raise ConfigError(f"inputs is {inputs!r}; give a folder on the claim, as in 'data/wikisql'")
    return inputs


def _check_nodes(elastic: tuple[int, int] | None) -> tuple[int, int] | None:
    if elastic and elastic[0] > elastic[1]:
        raise ConfigError(
            f"elastic is {elastic!r}; give the least and the most nodes, as in (2, 4)"
        )
    return elastic


# Operators append up to 24 letters, and the limit is 63.
JobName = Annotated[
    str,
    Field(pattern=r"^([a-z]([a-z0-9-]{0,38}[a-z0-9])?)?$"),
    Allowed("up to 40 lower-case letters, digits and -, a letter first"),
]
Nodes = Annotated[tuple[Size, Size], Field(strict=False)]


class HandoverOptions(KubernetesOptions):
    """Options of `Run.manifest`: options of `KubernetesPods`, and the options below.

    A manifest refuses `connect_timeout_s` and `pull_timeout_s`, as nothing is sent, and
    `pod_template`, as Kubeflow makes the pods.
    """

    label: ClassVar[str] = "manifest"

    name: JobName = ""
    """Name of the job and of its folder on the claim. Default: derived from the run's id."""
    token_secret: Annotated[str, AfterValidator(_check_token)] = ""
    """Secret with the Hugging Face token, as `hub` or `hub/key`. The default key is `token`.

    The token is passed to the containers as HF_TOKEN. Default: none.
    """
    restarts: Count | None = None
    """Maximum restarts of a PyTorchJob, as `maxRestarts` or `backoffLimit`.

    Default: 3 for a job with checkpoints, otherwise 0. The runtime of a TrainJob decides on its
    restarts.
    """
    pod: Annotated[PodSpec | None, nested(PodSpec.from_dict)] = None
    """Description of a node. Default: the run's pods. `env` and `pip` always come from the run."""
    inputs: Annotated[str, AfterValidator(_check_folder)] = ""
    """Folder on the claim with inputs too large for a ConfigMap. Default: none.

    The folder has `train.jsonl` and `eval.jsonl`, `model/`, and the script's folder below
    `script/`. Without a folder, the ConfigMap has all inputs.
    """
    script: str = ""
    """Path of the script, if the run directory has no copy. The script's folder is included.

    Default: the script as submitted.
    """
    env: Annotated[Environment, AfterValidator(_check_plain)] = Field(default_factory=dict)
    """Plain values of environment variables for the run, such as NCCL_DEBUG. Default: none.

    The values are readable in the manifest.
    """
    elastic: Annotated[
        Nodes | None,
        AfterValidator(_check_nodes),
        Allowed("the least and the most nodes, as in (2, 4), or None"),
    ] = None
    """Minimum and maximum number of nodes of a PyTorchJob that may grow and shrink.

    Default: None, the number of nodes of the run.
    """
    runtime: str = "torch-distributed"
    """ClusterTrainingRuntime of a TrainJob. Default: torch-distributed."""
    storage_gib: Annotated[Positive, Unit("GiB")] = 50.0
    """Size of the new claim in GiB, used if `pvc` is empty. Default: 50."""

    @property
    def sources(self) -> Mapping[str, tuple[str, str]]:
        """Secret and key of every variable taken from a Secret, including HF_TOKEN."""
        secret, _, key = self.token_secret.partition("/")
        return {**({"HF_TOKEN": (secret, key or "token")} if secret else {}), **super().sources}
