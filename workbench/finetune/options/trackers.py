"""Trackers of transformers, by the name in `report_to`: packages, and variables with secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracker:
    packages: Mapping[str, str]
    """Name for pip of every package that rank 0 needs, by the name to import."""
    secrets: tuple[str, ...]
    """Environment variables with the tracker's secrets; their values are masked everywhere."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for rank 0, unless the job sets them."""


TrackerName = Literal[
    "azure_ml",
    "clearml",
    "comet_ml",
    "dagshub",
    "dvclive",
    "mlflow",
    "neptune",
    "swanlab",
    "trackio",
    "wandb",
]
TRACKERS: Mapping[TrackerName, Tracker] = {
    "azure_ml": Tracker(
        packages={"azureml.core": "azureml-core"}, secrets=("AZUREML_SERVICE_PRINCIPAL_PASSWORD",)
    ),
    "clearml": Tracker(
        packages={"clearml": "clearml"},
        secrets=("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"),
        # The tracker would look for a checkpoint of transformers after every save.
        settings={"CLEARML_LOG_MODEL": "FALSE"},
    ),
    "comet_ml": Tracker(packages={"comet_ml": "comet_ml"}, secrets=("COMET_API_KEY",)),
    "dagshub": Tracker(
        packages={"dagshub": "dagshub", "mlflow": "mlflow"}, secrets=("DAGSHUB_USER_TOKEN",)
    ),
    "dvclive": Tracker(packages={"dvclive": "dvclive"}, secrets=("DVC_STUDIO_TOKEN",)),
    "mlflow": Tracker(
        packages={"mlflow": "mlflow"},
        secrets=("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_URI"),
        # By default, a call to a server that is down waits for four minutes, and to a server that
        # hangs for sixteen.
        settings={"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"},
    ),
    "neptune": Tracker(packages={"neptune": "neptune"}, secrets=("NEPTUNE_API_TOKEN",)),
    "swanlab": Tracker(packages={"swanlab": "swanlab"}, secrets=("SWANLAB_API_KEY",)),
    "trackio": Tracker(packages={"trackio": "trackio"}, secrets=("HF_TOKEN",)),
    "wandb": Tracker(packages={"wandb": "wandb"}, secrets=("WANDB_API_KEY",)),
}
"""Trackers of transformers 5.23. A test compares the names with transformers' own."""
