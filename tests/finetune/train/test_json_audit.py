"""What became of a user's DeepSpeed JSON is read from the engine after the first step, and told."""

from __future__ import annotations

import pytest

from tests.support.forkedruns import LENGTH, Plan, Ran

pytestmark = [pytest.mark.slow, pytest.mark.long]
BUCKETS = {"reduce_bucket_size": 70_000, "allgather_bucket_size": 80_000, "overlap_comm": False}
STAGE_3 = {"stage3_prefetch_bucket_size": 90_000, "sub_group_size": 100_000}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("json"))
    how = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "model": "tiny-llama",
        "profile_step": 0,
        **LENGTH,
    }
    for stage in (1, 3):
        config = {
            "zero_optimization": {"stage": stage, **BUCKETS, **STAGE_3},
            "gradient_clipping": 0.5,
        }
        plan.add(
            f"zero{stage}", 2, technique=f"zero{stage}", deepspeed=config, max_grad_norm=0.5, **how
        )
    plan.add("shipped", 2, technique="zero1", **how)
    return plan.run()


def test_the_engine_event_holds_what_the_engine_uses(ran: dict[str, Ran]) -> None:
    for rank in (0, 1):
        (event,) = ran["zero1"].data("engine", rank)
        held = event["deepspeed_json"]
        assert isinstance(held, dict)
        assert held["zero_optimization.stage"] == 1
        assert held["zero_optimization.reduce_bucket_size"] == 70_000
        assert held["zero_optimization.allgather_bucket_size"] == 80_000
        assert held["zero_optimization.overlap_comm"] is False
        assert held["gradient_clipping"] == 0.5
    (event,) = ran["zero3"].data("engine")
    held = event["deepspeed_json"]
    assert isinstance(held, dict)
    assert held["zero_optimization.sub_group_size"] == 100_000
    assert held["zero_optimization.stage3_prefetch_bucket_size"] == 90_000


def test_keys_of_another_stage_are_named_once(ran: dict[str, Ran]) -> None:
    (note,) = ran["zero1"].notes()
    assert note == (
        "without effect under ZeRO stage 1, of the DeepSpeed JSON: "
        "zero_optimization.stage3_prefetch_bucket_size, zero_optimization.sub_group_size"
    )
    (note,) = ran["zero3"].notes()
    assert note == (
        "without effect under ZeRO stage 3, of the DeepSpeed "
        "JSON: zero_optimization.allgather_bucket_size"
    )
    assert ran["zero1"].data("note", 1) == ran["zero3"].data("note", 1) == []


def test_a_shipped_configuration_is_not_named(ran: dict[str, Ran]) -> None:
    (event,) = ran["shipped"].data("engine")
    assert "deepspeed_json" not in event
    assert ran["shipped"].notes() == []
