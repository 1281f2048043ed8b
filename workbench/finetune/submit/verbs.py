"""Verbs of `Job` for a fine-tuning job, with a function per verb. Imported on first use."""

from workbench.finetune.submit.forecast import checkpoint_bytes, forecast
from workbench.finetune.submit.handover import handed_over
from workbench.finetune.submit.prepare import check_early, prepare
from workbench.finetune.submit.resume import restarted_from
from workbench.finetune.submit.resume import write_resumption as resumed
from workbench.finetune.submit.stage import files_for

__all__ = [
    "check_early",
    "checkpoint_bytes",
    "files_for",
    "forecast",
    "handed_over",
    "prepare",
    "restarted_from",
    "resumed",
]
