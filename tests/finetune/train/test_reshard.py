"""Real runs that continue with another number of ranks: at equal batches, one process's curve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.forkedruns import LENGTH, Plan, Ran
from tests.support.measured import MEASURED
from workbench.finetune.techniques.on_pods.cutting import span
from workbench.rundir.checkpoints import problem_of, read_manifest

STEPS, GLOBAL_BATCH = 6, 12
RANKS = (2, 3, 2)
SAVED = (2, 4)  # by the first two of them; an epoch of these rows has three steps


def small_groups(config: dict[str, dict[str, object]]) -> None:
    """Have stage 3 cut its flat buffer into several, elsewhere for each number of ranks."""
    config["zero_optimization"]["sub_group_size"] = 20_000


CASES: dict[str, dict[str, object]] = {
    "ddp": {"technique": "ddp"},
    "zero1": {"technique": "zero1", "load_best_model_at_end": True, "eval_steps": 2},
    "zero2": {"technique": "zero2"},
    "zero3": {"technique": "zero3", "patch": small_groups},
    "fsdp": {"technique": "fsdp"},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("ranks"))
    for name, rows in {"train": 3 * GLOBAL_BATCH, "eval": 4}.items():
        path = plan.root / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    common = {"max_steps": STEPS, "profile_step": 0, **LENGTH}
    plan.add("single", 1, technique="single", per_device_train_batch_size=GLOBAL_BATCH, **common)
    for name, options in CASES.items():
        saved = 0
        for number, ranks in enumerate(RANKS):
            how = {
                "per_device_train_batch_size": GLOBAL_BATCH // ranks,
                "save_steps": 2,
                **common,
                **options,
            }
            if number == 2:  # micro-batches of another number too
                how |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
            plan.add(
                f"{name}-{number}",
                ranks,
                resume="a run" if saved else None,
                save_total_limit=3,
                **how,
            )
            if saved:
                folder = plan.root / f"{name}-{number - 1}" / "checkpoints" / f"step-{saved}"
                plan.runs[-1]["checkpoint"] = str(folder)
            saved = SAVED[number] if number < len(SAVED) else 0
    return plan.run()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_with_more_and_with_fewer_ranks_as_one_process_does(
    ran: dict[str, Ran], name: str, number: int
) -> None:
    run, alone, step = ran[f"{name}-{number}"], ran["single"], SAVED[number - 1]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.data("start")[0]["world_size"] == RANKS[number]
    off = {}
    for figure in ("step", "loss", "grad_norm", "learning_rate", "epoch"):
        expected = alone.curve(figure)[step:]
        assert run.curve(figure) == pytest.approx(expected, rel=1e-4), figure
        off[figure] = max(
            abs(a - b) / b for a, b in zip(run.curve(figure), expected, strict=True) if b
        )
    assert run.data("end")[0]["eval_loss"] == pytest.approx(
        alone.data("end")[0]["eval_loss"], rel=1e-4
    )
    assert not list((run.folder / "resume").iterdir())
    before, now = RANKS[number - 1], RANKS[number]
    MEASURED.append(f"{name}, {before} to {now} ranks: loss within {off['loss']:.1e} of single")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("name", "step"), [("zero3-1", 4), ("zero1-1", 2)])
def test_its_own_checkpoints_are_of_its_own_ranks_and_so_is_the_best_it_goes_on_from(
    ran: dict[str, Ran], name: str, step: int
) -> None:
    parts = sorted((ran[name].folder / "checkpoints" / f"step-{step}").iterdir())
    assert [problem_of(part) for part in parts] == ["", "", ""]
    assert [(read_manifest(part)["rank"], read_manifest(part)["world_size"]) for part in parts] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 12])
def test_a_span_is_that_of_all_parts_together(parts: int) -> None:
    whole = torch.arange(24.0).view(12, 2)
    cut = torch.chunk(whole, parts)
    for start in range(12):
        for stop in range(start, 15):
            got = span(cut, start, stop)
            assert got.shape == (stop - start, 2)
            assert torch.equal(got[: 12 - start], whole[start:stop])
            assert not got[12 - start :].any()


def test_a_part_of_a_mapped_file_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(bytes(80))
    part = torch.from_file(str(path), size=20)
    assert span([part, part], 5, 15).data_ptr() == part[5:].data_ptr()
