"""Every technique with four micro-batches a step, which cost ZeRO-3 four times its hooks: models of few modules."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

# deepspeed first: without it nothing runs
from forkedruns import LENGTH, TECHNIQUES, Plan, Ran, follows

# Micro-batches are added up before an optimizer sees them: AdamW where its states are shards, or on the host.
TRAINED = {"adamw": ("zero1", "zero3-offload"), "sgd": TECHNIQUES}
PAIRS = [
    (technique, optimizer) for optimizer, techniques in TRAINED.items() for technique in techniques
]
PATIENCE_S = 900
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(PATIENCE_S + 60)]


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("accumulated"))
    whole, shallow = plan.root / "whole", plan.root / "shallow-t5"
    plan.add(
        "whole",
        1,
        technique="single",
        max_steps=1,
        per_device_train_batch_size=4,
        profile_step=0,
        **LENGTH,
    )
    cut = {"shallow": [str(whole / "out" / "model"), str(shallow)]}
    for optimizer, model in (("adamw", "tiny-llama"), ("sgd", str(shallow))):
        how = {
            "optimizer": optimizer,
            "gradient_accumulation_steps": 4,
            "model": model,
            "profile_step": 0,
            **LENGTH,
        }
        more = cut if optimizer == "sgd" else None
        plan.add(
            f"single-{optimizer}",
            1,
            more=more,
            technique="single",
            per_device_train_batch_size=3,
            **how,
        )
        for technique in TRAINED[optimizer]:
            plan.add(
                f"{technique}-{optimizer}",
                3,
                technique=technique,
                per_device_train_batch_size=1,
                **how,
            )
    return plan.run(timeout_s=PATIENCE_S)


@pytest.mark.parametrize(("technique", "optimizer"), PAIRS)
def test_every_technique_follows_the_curve_of_one_process_when_it_adds_four_micro_batches_up(
    accumulated: dict[str, Ran], technique: str, optimizer: str
) -> None:
    what = f"{technique}, {optimizer}, 4 micro-batches"
    follows(accumulated[f"{technique}-{optimizer}"], accumulated[f"single-{optimizer}"], what)
