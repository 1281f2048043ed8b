"""What `Run.manifest` can be told: one record, checked when it is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from workbench.base.errors import ConfigError
from workbench.base.record import Allowed, Environment, Positive, Size, Unit, nested
from workbench.base.redact import is_secret, mask_secrets
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.pod_spec import PodSpec

_TOKEN = re.compile(r"[a-z0-9][a-z0-9.-]*(/[A-Za-z0-9._-]+)?")


def _check_token(secret: str) -> str:
    if secret and not _TOKEN.fullmatch(secret):
        # Not shown: somebody may have given the token itself.
        raise ConfigError("token_secret is not the name of a Secret; give 'hub', or 'hub/key'")
    return secret


def _check_plain(env: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in env.items():
        if is_secret(name, value) or mask_secrets(value) != value:
            raise ConfigError(
                f"env {name} looks like a secret, and a manifest is read by many: name the Secret that "
                f'holds it, secrets={{"{name}": "secret/key"}}'
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


JobName = Annotated[
    str,
    Field(
        pattern=r"^([a-z]([a-z0-9-]{0,38}[a-z0-9])?)?$"
    ),  # the operators add up to 24 letters, and 63 is the end
    Allowed("up to 40 lower-case letters, digits and -, a letter first"),
]
Nodes = Annotated[tuple[Size, Size], Field(strict=False)]


class HandoverOptions(KubernetesOptions):
    """What `Run.manifest` can be told: the options of `KubernetesPods`, and these."""

    label: ClassVar[str] = "manifest"

    name: JobName = ""
    """Name of the job, and of its folder on the claim. Default: made from the run's id."""
    token_secret: Annotated[str, AfterValidator(_check_token)] = ""
    """The Secret of the hub's token, `hub` or `hub/key`: HF_TOKEN is its key `token`, or that one. Default none."""
    pod: Annotated[PodSpec | None, nested(PodSpec.from_dict)] = None
    """What each node is. Default: as each pod of the run was; its `env` is the run's in any case."""
    inputs: Annotated[str, AfterValidator(_check_folder)] = ""
    """A folder on the claim that holds what is too large for a ConfigMap: `train.jsonl` and `eval.jsonl`, `model/`,
    `script/`. Default none: all travels in the ConfigMap."""
    script: str = ""
    """The script, with its folder, where the run directory does not hold it. Default: as it was submitted."""
    env: Annotated[Environment, AfterValidator(_check_plain)] = Field(default_factory=dict)
    """Plain values of variables of the run, such as NCCL_DEBUG; they stand in the manifest. Default none."""
    elastic: Annotated[
        Nodes | None,
        AfterValidator(_check_nodes),
        Allowed("the least and the most nodes, as in (2, 4), or None"),
    ] = None
    """Least and most nodes of a PyTorchJob that may grow and shrink. Default None: as many as the run had."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime of a TrainJob."""
    storage_gib: Annotated[Positive, Unit("GiB")] = 50.0
    """Size of the claim that is made where `pvc` names none. Default 50."""

    @property
    def sources(self) -> Mapping[str, tuple[str, str]]:
        """The Secret and its key that each variable is taken from, the hub's token among them."""
        secret, _, key = self.token_secret.partition("/")
        return {**({"HF_TOKEN": (secret, key or "token")} if secret else {}), **super().sources}
