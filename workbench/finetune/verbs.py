"""What the core asks of a fine-tuning job, one function for each verb of `Job`; imported when first used."""

from workbench.finetune.handover import handed_over
from workbench.finetune.origin import origin
from workbench.finetune.prediction import companion
from workbench.finetune.prepare import prepare
from workbench.finetune.resume import restarted_from
from workbench.finetune.resume import write_resumption as resumed
from workbench.finetune.stage import files_for

__all__ = [
    "companion",
    "files_for",
    "handed_over",
    "origin",
    "prepare",
    "restarted_from",
    "resumed",
]
