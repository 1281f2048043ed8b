"""Claims about adapters beside weights in 4 bits."""

from __future__ import annotations

from functools import partial

from workbench.verify.claims.jobs import llama
from workbench.verify.claims.techniques import on_device
from workbench.verify.outcome import Broken
from workbench.verify.row import Row
from workbench.verify.turn import Turn, at_most, curve, difference, engine

SUBJECT = "adapters"
_OFF = 0.03


def _qlora(technique: str, turn: Turn) -> str:
    turn.need_package("bitsandbytes", "bitsandbytes")
    # `ddp` is compared with a single rank, the others too: the batch is the same.
    precision = "bf16" if turn.has_gpus and turn.first.bf16 else "fp32"
    how = {"peft": "qlora", "precision": precision}
    run = turn.train(llama(turn, technique, **how))
    on_device(turn, run)
    if not engine(run)["packed"]:
        raise Broken("no weight is in 4 bits")
    reference = turn.train(llama(turn, "single", **how))
    off = difference(curve(run, "loss"), curve(reference, "loss"))
    return f"4 bits, {precision}, {at_most('loss off single by', off, _OFF)}"


ROWS = tuple(
    Row(
        name=f"qlora-{technique}",
        subject=SUBJECT,
        claim=f"qlora under {technique} follows single",
        check=partial(_qlora, technique),
        limit_s=180.0,
    )
    for technique in ("ddp", "zero2", "fsdp")
)
