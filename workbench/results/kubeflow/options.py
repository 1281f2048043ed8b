"""What `Run.manifest` can be told: one record, checked when it is made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.pod_spec import PodSpec

__all__ = ["HandoverOptions"]

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # the operators add up to 24 letters, and 63 is the end
_TOKEN = re.compile(r"[a-z0-9][a-z0-9.-]*")


@dataclass(kw_only=True, eq=False)
class HandoverOptions(KubernetesOptions):
    """What `Run.manifest` can be told: the options of `KubernetesPods`, and these."""

    name: str = ""
    """Name of the job, and of its folder on the claim. Default: made from the run's id."""
    token_secret: str = ""
    """The Secret of the hub's token, `hub` or `hub/key`: HF_TOKEN is its key `token`, or that one. Default none."""
    pod: PodSpec | None = None
    """What each node is. Default: as each pod of the run was; its `env` is the run's in any case."""
    inputs: str = ""
    """A folder on the claim that holds what is too large for a ConfigMap: `train.jsonl` and `eval.jsonl`, `model/`,
    `script/`. Default none: all travels in the ConfigMap."""
    elastic: tuple[int, int] | None = None
    """Least and most nodes of a PyTorchJob that may grow and shrink. Default None: as many as the run had."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime of a TrainJob."""
    storage_gib: float = 50.0
    """Size of the claim that is made where `pvc` names none. Default 50."""

    def __post_init__(self) -> None:
        """Refuse what no API server would take."""
        super().__post_init__()
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigError(f"name is {self.name!r}; give up to 40 lower-case letters, digits and -, a letter first")
        if not self.storage_gib > 0:
            raise ConfigError(f"storage_gib is {self.storage_gib!r}; it must be more than 0")
        if self.inputs.startswith("/") or ".." in Path(self.inputs).parts:
            raise ConfigError(f"inputs is {self.inputs!r}; give a folder on the claim, as in 'data/wikisql'")
        if self.token_secret:
            secret, _, key = self.token_secret.partition("/")
            if not _TOKEN.fullmatch(secret):
                # Not shown: somebody may have given the token itself.
                raise ConfigError("token_secret is not the name of a Secret; give 'hub', or 'hub/key'")
            self.secrets = {"HF_TOKEN": f"{secret}/{key or 'token'}", **self.secrets}
        if self.elastic is not None:
            match self.elastic:
                case [int(least), int(most)] if 1 <= least <= most:
                    self.elastic = (least, most)
                case _:
                    raise ConfigError(f"elastic is {self.elastic!r}; give the least and the most nodes, as in (2, 4)")
