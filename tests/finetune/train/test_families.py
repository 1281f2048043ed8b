"""Each family trains as plain transformers and torch train it, under three techniques.

The saved and the exported folders are read by plain transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import tests.support.tinyfamilies as families
from tests.support.forkedruns import Plan, Ran
from tests.support.sentences import sentence
from tests.support.tinyfamilies import FAMILIES, RATE, STEPS, Trained
from workbench.base.errors import ConfigError
from workbench.finetune.answers.serving.export import export_model
from workbench.finetune.export.folder import SHARD
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import load
from workbench.finetune.submit.prepare import check_early

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1200),  # the first test runs every family
    pytest.mark.usefixtures("one_thread"),
]

# Technique: its ranks.
TECHNIQUES = {"single": 1, "zero3": 2, "fsdp": 2}
REFUSED = [("pegasus", "zero3")]
PAIRS = [pair for pair in product(FAMILIES, TECHNIQUES) if pair not in REFUSED]
TRAIN = range(8)
EVALUATION = range(20, 25)
CLOSE = 1e-5


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, str]]:
    """Folder and module of each family."""
    root = tmp_path_factory.mktemp("families")
    return {name: (root / name, families.build(name, root / name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def folders(built: Mapping[str, tuple[Path, str]]) -> Mapping[str, Path]:
    return {name: folder for name, (folder, _) in built.items()}


@pytest.fixture(scope="module")
def ran(
    built: Mapping[str, tuple[Path, str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("runs"))
    families.write_rows(plan.root, {"train": TRAIN, "eval": EVALUATION})
    for family, technique in PAIRS:
        folder, module = built[family]
        plan.add(
            f"{family}-{technique}",
            TECHNIQUES[technique],
            more={"imports": [module], "rehearsed": str(folder)},
            model=str(folder),
            technique=technique,
            per_device_train_batch_size=len(TRAIN) // TECHNIQUES[technique],
            max_steps=STEPS,
            optimizer="sgd",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            warmup_steps=0,
            router_aux_loss_coef=None if FAMILIES[family].pairs else 0,
            profile_step=0,
        )
    return plan.run()


@pytest.fixture(scope="module")
def plainly(folders: Mapping[str, Path]) -> dict[str, Trained]:
    trained = {}
    for name, folder in folders.items():
        trained[name] = families.plain(
            folder, pairs=FAMILIES[name].pairs, train=TRAIN, evaluation=EVALUATION
        )
    return trained


@pytest.mark.parametrize(("family", "technique"), PAIRS)
def test_a_family_trains_as_plain_transformers(
    family: str, technique: str, ran: Mapping[str, Ran], plainly: Mapping[str, Trained]
) -> None:
    run = ran[f"{family}-{technique}"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()[-2000:]
    (end,) = run.data("end")
    expected = plainly[family]
    assert end["first_eval_loss"] == pytest.approx(expected.first_eval_loss, abs=CLOSE)
    assert run.curve("loss") == pytest.approx(expected.losses, abs=CLOSE)
    assert end["eval_loss"] == pytest.approx(expected.eval_loss, abs=CLOSE)


@pytest.mark.parametrize(("family", "technique"), PAIRS)
def test_the_saved_folder_is_the_trained_model_in_plain_transformers(
    family: str, technique: str, ran: Mapping[str, Ran], plainly: Mapping[str, Trained]
) -> None:
    check_read(saved(ran, family, technique), family, plainly)


# An export reads the saved folder, whose values are those of `single` under every technique.
@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_folder_is_the_trained_model_in_plain_transformers(
    family: str, ran: Mapping[str, Ran], plainly: Mapping[str, Trained], tmp_path: Path
) -> None:
    model = load.load(str(saved(ran, family, "single")), (), seed=0)
    export_model(model, tmp_path / "exported", None, SHARD)
    check_read(tmp_path / "exported", family, plainly)


def saved(ran: Mapping[str, Ran], family: str, technique: str) -> Path:
    return ran[f"{family}-{technique}"].folder / "out" / "model"


def check_read(folder: Path, family: str, plainly: Mapping[str, Trained]) -> None:
    """Hold that plain transformers reads the trained model from a folder."""
    pairs = FAMILIES[family].pairs
    model = families.read(folder, pairs=pairs)
    words = AutoTokenizer.from_pretrained(folder)
    loss = families.eval_loss(model, words, EVALUATION, pairs=pairs)
    assert loss == pytest.approx(plainly[family].eval_loss, abs=CLOSE)
    assert json.loads((folder / "config.json").read_text())["model_type"] == family


@pytest.mark.parametrize(("family", "technique"), REFUSED)
def test_a_family_that_a_technique_cannot_make_is_refused_at_submit(
    family: str, technique: str, folders: Mapping[str, Path]
) -> None:
    job = FineTune(model=str(folders[family]), technique=technique)
    with pytest.raises(ConfigError, match=sentence("cuts the weights up before")):
        check_early(job, gpus=0)
