"""Technique `single`."""

from __future__ import annotations

from typing import Any

from workbench.base.errors import ConfigError
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.plain import Plain
from workbench.jobs.launcher import Launcher


class Single(Plain):
    """One rank on the first pod, no DeepSpeed: the yardstick of all others."""

    name = "single"
    engine = "none"
    words = "no DeepSpeed"
    alone = True
    preference = 70  # every other pod is idle

    def refuse(self, job: FineTuneOptions) -> None:
        if job.launcher != Launcher.SSH.value:
            raise ConfigError(
                f"technique 'single' runs one process, so launcher {job.launcher!r} "
                "does nothing. Use 'ssh'."
            )
        super().refuse(job)

    def refuse_ranks(self, job: FineTuneOptions, ranks: int) -> None:
        del job
        if ranks > 1:
            raise ConfigError(
                f"technique 'single' is one rank on one pod, and {ranks} are asked for; use 'ddp'"
            )

    def runs(self, trainer: Any) -> bool:
        del trainer
        # No object reveals this technique: the audit names an unwrapped model `none`.
        return False
