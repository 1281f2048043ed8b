"""Checkpoints under every technique, on real ranks: what follows one is equal to the last digit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.fakes.smalldisk import small_disk
from tests.support.forkedruns import Plan, Ran
from tests.support.sentences import sentence
from workbench.base.errors import RunError
from workbench.finetune.checkpoint.tensor_tree import TENSORS, packed, read_tree, write_packed
from workbench.finetune.train.checkpoints import Checkpoints
from workbench.rundir.checkpoints import problem_of, write_manifest

pytestmark = pytest.mark.slow
# An epoch of these 20 rows has three steps, the last filled
# up: step 3 ends the first, step 4 is amid the second.
STEPS, ROWS, BOUNDARY, AMID = 5, 20, 3, 4
COMMON = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "predict_rows": 0,
    "profile_step": 0,
}
# name: ranks, step of the checkpoint, options; with dropout the random numbers must go on too
CASES: dict[str, tuple[int, int, dict[str, object]]] = {
    "single": (1, BOUNDARY, {"technique": "single", "per_device_train_batch_size": 4}),
    "single-lora": (1, AMID, {"technique": "single", "peft": "lora", "lora": {"dropout": 0.2}}),
    # Between two epochs, where random numbers are restored before rows are read.
    "single-lora-border": (
        1,
        BOUNDARY,
        {"technique": "single", "peft": "lora", "lora": {"dropout": 0.2}},
    ),
    "ddp": (2, AMID, {"technique": "ddp"}),
    "zero1": (2, BOUNDARY, {"technique": "zero1"}),
    "zero2-sgd": (2, AMID, {"technique": "zero2", "optimizer": "sgd"}),
    "zero3": (2, AMID, {"technique": "zero3"}),
    "offload": (2, AMID, {"technique": "zero3-offload"}),
    "fsdp": (2, AMID, {"technique": "fsdp"}),
    # Between two synchronisations, so that ranks differ.
    "local-sgd": (2, BOUNDARY, {"technique": "local-sgd", "local_sgd": {"sync_steps": 2}}),
    "local-sgd-lora": (
        2,
        AMID,
        {
            "technique": "local-sgd",
            "local_sgd": {"sync_steps": 3},
            "peft": "lora",
            "lora": {"dropout": 0.2},
        },
    ),
}
QUICK = ("single", "zero1", "fsdp")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES]


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Ran]]:
    selected = [item for item in request.session.items if item.path == request.path]
    # A test of the long half compares the parts of several techniques.
    all_of_them = any(item.get_closest_marker("long") for item in selected)
    plan = Plan(tmp_path_factory.mktemp("resume"))
    for name, rows in {"train": ROWS, "eval": 4}.items():
        path = plan.root / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    for name, (ranks, step, options) in CASES.items():
        if name not in QUICK and not all_of_them:
            continue
        plan.add(f"{name}-whole", ranks, save_steps=step, **{**COMMON, **options})  # type: ignore[arg-type]
        plan.add(f"{name}-on", ranks, resume="a run", **{**COMMON, **options})  # type: ignore[arg-type]
        plan.runs[-1]["checkpoint"] = str(
            plan.root / f"{name}-whole" / "checkpoints" / f"step-{step}"
        )
    with ExitStack() as mounted:
        if os.geteuid() == 0:
            plan.add("full", 1, save_steps=2, technique="single", **COMMON)  # type: ignore[arg-type]
            # Room for one checkpoint of the tiny model, and not for two.
            mounted.enter_context(small_disk(plan.root / "full" / "checkpoints", "16m"))
        yield plan.run()


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_follows_the_unbroken_one_to_the_last_digit(
    ran: dict[str, Ran], name: str
) -> None:
    whole, rest, step = ran[f"{name}-whole"], ran[f"{name}-on"], CASES[name][1]
    assert set(whole.exit_codes.values()) == {0}, whole.stderr()
    assert set(rest.exit_codes.values()) == {0}, rest.stderr()
    for figure in ("step", "loss", "grad_norm", "learning_rate", "epoch"):
        assert rest.curve(figure) == whole.curve(figure)[step:]
    assert len(rest.curve("loss")) == STEPS - step
    assert len(set(whole.curve("loss"))) == STEPS, "a curve of one value would show nothing"
    (end,), (reference,) = rest.data("end"), whole.data("end")
    assert [end[key] for key in ("steps", "eval_loss", "first_eval_loss")] == [
        reference[key] for key in ("steps", "eval_loss", "first_eval_loss")
    ]
    for rank in range(CASES[name][0]):
        assert len(rest.data("first_step", rank)) == 1
        assert len(rest.data("engine", rank)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_whole_and_told_once_and_the_sent_one_is_gone_after_use(
    ran: dict[str, Ran], name: str
) -> None:
    ranks, step, _ = CASES[name]
    (told,) = ran[f"{name}-whole"].data("checkpoint")[:1]
    assert told["step"] == step
    folder = ran[f"{name}-whole"].folder / "checkpoints" / f"step-{step}"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank-{rank}" for rank in range(ranks)
    ]
    assert {problem_of(folder / f"rank-{rank}") for rank in range(ranks)} == {""}
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert {path.name for path in files} == {"state.safetensors", "state.json"}
    assert told["bytes"] == sum(path.stat().st_size for path in files)
    assert not list((ran[f"{name}-on"].folder / "resume").iterdir())


@pytest.mark.long
def test_each_rank_keeps_its_part_and_nothing_of_the_others(ran: dict[str, Ran]) -> None:
    names = ("single", "single-lora", "ddp", "zero1", "zero3", "fsdp")
    sizes = {name: part_sizes(ran[f"{name}-whole"], CASES[name][1]) for name in names}
    one = sizes["single"][0]
    for name in ("zero1", "zero3", "fsdp"):
        assert sizes[name] == pytest.approx([one / 2] * 2, rel=0.01), name
    assert sizes["ddp"] == [pytest.approx(one, rel=0.01), pytest.approx(0, abs=20_000)]
    assert sizes["single-lora"][0] < one / 5, (
        "the model beneath the adapters comes from where it came from"
    )


def part_sizes(run: Ran, step: int) -> list[int]:
    parts = sorted((run.folder / "checkpoints" / f"step-{step}").iterdir())
    return [(part / TENSORS).stat().st_size for part in parts]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(ran: dict[str, Ran]) -> None:
    """Row 38 of the faults."""
    run = ran["full"]
    assert run.exit_codes == {0: 0}, run.stderr()
    assert [event["step"] for event in run.data("checkpoint")] == [2]
    (failed,) = run.data("checkpoint_failed")
    assert failed["step"] == 4
    assert re.fullmatch(
        r"the disk of \S.* is full: \S+ needs [\d,]+ bytes and has [\d,]+ free",
        str(failed["message"]),
    )
    disk = run.folder / "checkpoints"
    assert [path.parent.name for path in disk.glob("*/*")] == ["step-2"]
    assert problem_of(disk / "step-2" / "rank-0") == ""
    assert read_tree(disk / "step-2" / "rank-0")["step"] == 2


def part(folder: Path, tree: object) -> Path:
    made = folder / "resume" / "rank-0"
    made.mkdir(parents=True)
    write_packed(made, packed(tree))
    write_manifest(made, step=4, rank=0, world_size=1)
    return made


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    tree = {
        "numbers": (1, 0.1, float("inf"), None, True, "text"),
        3: [{"step": torch.tensor(4.0)}, torch.ones(2, 3, dtype=torch.bfloat16), torch.empty(0)],
        "view": shared[2:4],
        "twice": [shared, shared],
    }
    back = read_tree(part(tmp_path, tree))
    assert back["numbers"] == tree["numbers"]
    assert back[3][0]["step"].shape == ()
    assert back[3][1].dtype is torch.bfloat16
    assert (back["view"].tolist(), back["twice"][0].tolist()) == ([2.0, 3.0], shared.tolist())
    assert back["twice"][0] is back["twice"][1]
    with pytest.raises(RunError, match=sentence("give this job save_steps=0", "PosixPath")):
        write_packed(tmp_path, packed({"path": tmp_path}))


@pytest.mark.parametrize("name", ["", ".", "..", "../state.json", "/etc/passwd", "a\0b"])
def test_a_name_that_is_no_file_of_the_part_makes_the_manifest_unreadable(
    tmp_path: Path, name: str
) -> None:
    files = {"files": {name: {"bytes": 1, "sha256": "0"}}}
    (tmp_path / "manifest.json").write_text(json.dumps(files))
    assert "no manifest that can be read" in problem_of(tmp_path)


class Canary:
    """Leave a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_no_checkpoint(tmp_path: Path) -> None:
    """Row 42 of the faults, with a manifest to match."""
    made = part(tmp_path, {"step": 4})
    canary = tmp_path / "canary"
    for name in (TENSORS, "state.json"):
        kept = (made / name).read_bytes()
        torch.save(Canary(canary), made / name)
        write_manifest(made, step=4, rank=0, world_size=1)
        with pytest.raises(RunError, match=sentence("holds no checkpoint that can be read")):
            read_tree(made)
        (made / name).write_bytes(kept)
    assert not canary.exists()


def test_a_rank_refuses_what_arrived_damaged_or_is_another_s(tmp_path: Path) -> None:
    made = part(tmp_path, {"step": 4})
    options = {"every": None, "resumes": True}
    assert Checkpoints(tmp_path, **options).first_step == 4  # type: ignore[arg-type]
    content = bytearray((made / TENSORS).read_bytes())
    (made / TENSORS).write_bytes(bytes([content[0] ^ 1, *content[1:]]))
    with pytest.raises(
        RunError,
        match=sentence(
            "the checkpoint to resume from arrived damaged",
            "rank-0",
            "state.safetensors",
        )
        + sentence("the checksum of {}/{} is wrong"),
    ):
        Checkpoints(tmp_path, **options)  # type: ignore[arg-type]
    write_manifest(made, step=4, rank=1, world_size=2)
    with pytest.raises(
        RunError,
        match=sentence("the checkpoint to resume from arrived wrong", "rank-0", 1),
    ):
        Checkpoints(tmp_path, **options)  # type: ignore[arg-type]
    write_manifest(made, step=4, rank=0, world_size=2)
    with pytest.raises(
        RunError,
        match=sentence("the checkpoint to resume from arrived damaged", "rank-1")
        + sentence("has no manifest that can be read"),
    ):
        Checkpoints(tmp_path, **options)  # type: ignore[arg-type]
