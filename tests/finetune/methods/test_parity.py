"""The losses of every method equal those of TRL's own trainer with the same rows in order.

The losses on two ranks equal those of one rank, or those of TRL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.support.forkedruns import Plan, Ran, run_all
from tests.support.methodruns import rows_of, write_prepared
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.methods.registry import METHODS, method_of
from workbench.finetune.model import tiny
from workbench.finetune.recipe.order import GlobalBatchSampler

STEPS, BATCH, ROWS, RATE = 5, 8, 24, 2e-3
OTHERS = ("ddp", "zero1", "zero2", "zero3", "fsdp")
# The technique of two ranks; dpo meets all techniques.
TWO = {"kto": "ddp", "orpo": "zero3", "reward": "ddp", "grpo": "zero3"}
TRL = {
    "dpo": (trl.DPOConfig, trl.DPOTrainer),
    "kto": (trl.KTOConfig, trl.KTOTrainer),
    "orpo": (ORPOConfig, ORPOTrainer),
    "reward": (trl.RewardConfig, trl.RewardTrainer),
    "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
}
ANSWERS, LONGEST = 4, 10
REWARD = "def shared(completions, answer, **_):\n" + (
    "    return [len({*c} & {*a}) / 10 for c, a in zip(completions, answer)]\n"
)
# Every rank has random numbers of its own. Here an answer depends on its number in the group alone.
CHOSEN = f"""
import torch
noise = -torch.empty({ANSWERS}, 4096).exponential_(generator=torch.Generator().manual_seed(0)).log()
def chosen(probabilities, num_samples):
    rows, words = probabilities.shape
    own = noise[torch.arange(rows) % {ANSWERS}, :words]
    return (probabilities.log() + own).argmax(1, keepdim=True)
torch.multinomial = chosen
"""
PATIENCE_S = 840
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(PATIENCE_S + 60),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]
NAMES = [method.name for method in METHODS if method.uses_trl]
BESIDE_DPO = [name for name in NAMES if name != "dpo"]


@pytest.fixture(scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make the models that both trainers read: one that answers, and one that scores."""
    tokenizer = tiny.tokenizer_for_all("tiny-llama", list(mini_rows(0, 40)))
    folders = {}
    for kind in ("answers", "scores"):
        folder = tmp_path_factory.mktemp(kind)
        tokenizer.save_pretrained(folder)
        model = tiny.make("tiny-llama", tokenizer, 0, scores=kind == "scores")
        model.save_pretrained(folder)
        folders[kind] = folder
    return folders


def place(models: Mapping[str, Path], method: str) -> Path:
    return models["scores" if method_of(method).scores else "answers"]


def options(models: Mapping[str, Path], method: str) -> dict[str, Any]:
    return {
        "method": method,
        "model": str(place(models, method)),
        "max_steps": STEPS,
        "learning_rate": RATE,
        "train_sampling_strategy": "random",
        "eval_strategy": "no",
        "profile_step": 0,
    }


def add(plan: Plan, name: str, ranks: int, reward: str, **how: Any) -> None:
    """Add a run; grpo's answers are judged by the function in `reward`."""
    if how["method"] == "grpo":
        how["rewards"] = ["reward.py:shared"]
        how["method_options"] = {"num_generations": ANSWERS, "beta": 0.05}
        how["max_target_length"] = LONGEST
    plan.add(name, ranks, **how)
    job = plan.root / name / "job.json"
    sent = {"path": "reward.py", "function": "shared", "source": reward}
    job.write_text(json.dumps({**json.loads(job.read_text()), "rewards": [sent]}))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]) -> dict[str, Ran]:
    """Do every method on one process."""
    plans = []
    for method in NAMES:
        plan = Plan(tmp_path_factory.mktemp(method))
        write_prepared(plan, method, train=ROWS)
        how = {"technique": "single", "per_device_train_batch_size": BATCH}
        add(plan, method, 1, REWARD, **options(models, method), **how)
        plans.append(plan)
    done: dict[str, Ran] = {}
    for runs in run_all(*plans, timeout_s=PATIENCE_S):
        done |= runs
    return done


@pytest.fixture(scope="module")
def on_ranks(
    tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]
) -> dict[str, Ran]:
    """Do dpo on two ranks under every technique, and with adapters."""
    plan = Plan(tmp_path_factory.mktemp("ranks"))
    write_prepared(plan, "dpo", train=ROWS)
    how = {**options(models, "dpo"), "per_device_train_batch_size": BATCH // 2}
    for technique in OTHERS:
        plan.add(technique, 2, technique=technique, **how)
    plan.add("lora-zero3", 2, technique="zero3", peft="lora", **how)
    whole = {**how, "per_device_train_batch_size": BATCH}
    plan.add("lora", 1, technique="single", peft="lora", **whole)
    return plan.run(timeout_s=PATIENCE_S)


@pytest.fixture(scope="module")
def on_two(
    tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]
) -> dict[str, dict[str, Ran]]:
    """Do the other methods on two ranks, and on one rank with the same rows in a step."""
    plans = []
    for method in BESIDE_DPO:
        plan = Plan(tmp_path_factory.mktemp(f"{method}-two"))
        how = {**options(models, method), "per_device_train_batch_size": BATCH // 2}
        longer = 1 + (method == "kto")  # until its divergence is more than nought
        how["max_steps"] *= longer
        write_prepared(plan, method, train=longer * ROWS)
        if method == "kto":
            answer_alike(plan.root / "train.jsonl")
        whole = {"technique": "single", "per_device_train_batch_size": BATCH}
        # TRL averages over the tokens of a micro-batch, so one rank needs the same micro-batches.
        if method == "orpo":
            whole = {"technique": "single", "gradient_accumulation_steps": 2}
        add(plan, "alone", 1, REWARD + CHOSEN, **{**how, **whole})
        # The ranks share the rows of their pod; those of dpo are on pods of their own.
        pod = {"more": {"on_pod": 2}}
        add(plan, "two", 2, REWARD + CHOSEN, **how, **pod, technique=TWO[method])
        plans.append(plan)
    return dict(zip(BESIDE_DPO, run_all(*plans, timeout_s=PATIENCE_S), strict=True))


def answer_alike(path: Path) -> None:
    """Give all rows one answer: kto's divergence pairs a prompt with the answer of another row."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "target": "SELECT name"}) + "\n" for row in rows))


def in_order(rows: Sequence[Any], batch: int) -> list[Any]:
    """Return the rows of two epochs as the package's trainer reads them on one process."""
    sampler = GlobalBatchSampler(
        rows=len(rows), micro_batch=batch, accumulation=1, rank=0, world_size=1, seed=0
    )
    return [rows[number] for _ in range(4) for numbers in sampler for number in numbers]


def alone(method: str, folder: Path, root: Path) -> list[dict[str, float]]:
    """Train with TRL's own trainer and the user's rows, and return what it logs."""
    config, trainer_class = TRL[method]
    per_step = BATCH // ANSWERS if method == "grpo" else BATCH
    rows = in_order(rows_of(method, 0, ROWS), per_step)[: STEPS * per_step]
    # Without a chat template the package's prompt ends in a line end.
    rows = [{**row, "prompt": f"{row['prompt']}\n"} for row in rows]
    given: dict[str, Any] = {
        "output_dir": str(root),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "warmup_steps": 0.1,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 0,
    }
    if method == "grpo":
        given |= {
            "num_generations": ANSWERS,
            "max_completion_length": LONGEST,
            "shuffle_dataset": False,
            "beta": 0.05,
        }
    else:
        given |= {"train_sampling_strategy": "sequential", "max_length": 4096}
    beside: dict[str, Any] = {"processing_class": AutoTokenizer.from_pretrained(folder)}
    model: Any = str(folder)
    if method == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    if method == "grpo":
        functions: dict[str, Any] = {}
        exec(REWARD, functions)
        beside["reward_funcs"] = [functions["shared"]]
    trainer = trainer_class(
        model=model, args=config(**given), train_dataset=Dataset.from_list(rows), **beside
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]
) -> dict[str, list[dict[str, float]]]:
    return {
        method: alone(method, place(models, method), tmp_path_factory.mktemp("alone"))
        for method in NAMES
    }


def held(run: Ran, logged: Sequence[Mapping[str, float]], metrics: Sequence[str]) -> None:
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    steps = run.data("step")
    assert [step["step"] for step in steps] == [entry["step"] for entry in logged]
    assert len(steps) >= STEPS
    for name in ("loss", "grad_norm", *metrics):
        got = [step.get(name) for step in steps]
        assert got == pytest.approx([entry[name] for entry in logged], rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("method", NAMES)
def test_losses_gradients_and_figures_equal_those_of_trl_alone(
    ran: Mapping[str, Ran], expected: Mapping[str, Any], method: str
) -> None:
    own = [name for name in method_of(method).metrics if name in expected[method][0]]
    assert len(own) >= 3
    held(ran[method], expected[method], own)


@pytest.mark.long
@pytest.mark.parametrize("technique", OTHERS)
def test_losses_of_dpo_on_two_ranks_equal_those_of_trl_alone(
    on_ranks: Mapping[str, Ran], expected: Mapping[str, Any], technique: str
) -> None:
    held(on_ranks[technique], expected["dpo"], method_of("dpo").metrics)


@pytest.mark.long
def test_adapters_have_the_base_as_reference_on_one_rank_and_under_zero3(
    on_ranks: Mapping[str, Ran],
) -> None:
    losses = [on_ranks[name].curve("loss") for name in ("lora", "lora-zero3")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    # New adapters change nothing: the first loss of a pair is that of a coin.
    assert losses[0][0] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-6)
    assert len({round(loss, 4) for loss in losses[0]}) > 3


@pytest.mark.long
@pytest.mark.parametrize("method", BESIDE_DPO)
def test_losses_and_figures_on_two_ranks_equal_those_of_one_rank(
    on_two: Mapping[str, Mapping[str, Ran]], method: str
) -> None:
    alone = on_two[method]["alone"].data("step")
    held(on_two[method]["two"], alone, method_of(method).metrics)
    assert len({round(float(str(step["loss"])), 3) for step in alone}) > 3
    assert method not in ("kto", "grpo") or any(step["kl"] for step in alone)
