"""What `make bench` measures of rows: trained on, answered and read, each beside the plain way.

The rows are WikiSQL's, which lie beside the checkout or in the folder BENCH_WIKISQL;
where they do not, nothing of this is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tools.bench.pair import Pair, Turn
from tools.bench.starts import loss_times, recipe_in
from workbench import Cluster, FineTune, LocalPods, PodSpec, Script
from workbench.finetune.data.rows import row_from
from workbench.results import RunResult

REPOSITORY = Path(__file__).resolve().parents[2]
BESIDE = REPOSITORY.parent / "shared" / "data" / "wikisql"
ROWS = Path(os.environ.get("BENCH_WIKISQL", BESIDE))
if "BENCH_WIKISQL" in os.environ and not (ROWS / "train.jsonl").is_file():
    raise SystemExit(f"BENCH_WIKISQL={ROWS} has no train.jsonl; name the folder of WikiSQL's rows")
PADDED = str(REPOSITORY / "tests" / "scripts" / "padded.py")
READING = str(REPOSITORY / "tests" / "scripts" / "reading.py")
AT_ONCE = 32
"""Rows of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How much of a model's training is measured."""

    model: str
    learned: int
    """Steps after which evaluation losses are compared."""
    steps: int
    """Steps of a turn."""
    padded_steps: int
    """The plain Trainer's, whose steps are all alike: the first is left out of its figure."""
    evaluated: int
    """Evaluation rows."""
    turns: int
    precision: str = "fp32"


_SMALL = Training(model="t5-small", learned=20, steps=10, padded_steps=3, evaluated=256, turns=2)
_HAS_AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="ascii").split()
"""Whether this CPU multiplies matrices of bf16 faster than of FP32."""

TRAININGS = (
    Training(
        model="tiny-t5",
        learned=150,
        steps=40,
        padded_steps=10,
        evaluated=512,
        turns=3,
    ),
    _SMALL,
    *([replace(_SMALL, precision="bf16")] if _HAS_AMX else []),
)


def training(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare a run's training with the original's recipe, and with its own script.

    The plain evaluation loss is of batches cut to their longest rows,
    which is sooner and changes no loss: what is masked counts nowhere.
    """
    for each in TRAININGS if ROWS.exists() else ():
        folder = root / f"{each.model}-{each.precision}"
        write_model(folder, each.model, evaluated=each.evaluated)
        with Cluster(LocalPods(), PodSpec(cpus=2), path=root / f"{folder.name}-cluster") as cluster:
            yield _rows_of(each, cluster, folder)


def _rows_of(each: Training, cluster: Cluster, folder: Path) -> Sequence[Pair]:
    job = FineTune(
        model=str(folder / "model"),
        dataset=str(folder),
        technique="single",
        max_steps=each.learned,
        profile_step=0,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_source_length=96,
        max_target_length=96,
        predict_rows=0,
        precision=each.precision,
    )
    learned = cluster.submit(job).wait(progress=False).raise_for_status()
    losses = _padded(cluster, "learn", folder, each.learned)
    watched: list[float] = []
    window = job.replace(max_steps=each.steps, eval_strategy="no")

    def ours() -> float:
        run = cluster.submit(window)
        result = run.wait().raise_for_status()
        if not watched:
            recipe_in(folder / "bare", result)
        times = [event.time_s for event in run.events() if event.kind == "step"]
        watched.append(_rate(times))
        return result.train_samples_per_s or 0.0

    def bare() -> float:
        command = ["torchrun", "--nproc-per-node", "1", "train.py"]
        return _rate(loss_times(command, folder / "bare", {"OMP_NUM_THREADS": "2"}))

    def plain() -> float:
        return _padded(cluster, "train", folder, each.padded_steps)["samples_per_s"]

    both = {"plain_is": "the original's recipe, padded to 96 + 96", "turns": each.turns}
    model = f"{each.model} in {each.precision}"
    return (
        Pair(
            what=f"samples/s, {model}, one pod, {AT_ONCE} rows, {each.steps} steps",
            ours=ours,
            plain=plain,
            more_is_better=True,
            **both,
        ),
        Pair(
            what=f"samples/s, {model}, all watched, after the first step",
            ours=lambda: watched[-1],
            plain=bare,
            plain_is="the same script, bare",
            bound=">= 0.98 x",
            more_is_better=True,
            turns=each.turns,
        ),
        Pair(
            what=f"useful of all tokens, {model}, {each.learned} steps",
            ours=partial(_useful, learned),
            plain=partial(losses.__getitem__, "useful"),
            bound=">= 0.9",
            more_is_better=True,
            **both,
        ),
        Pair(
            what=f"masked evaluation loss after {AT_ONCE * each.learned} samples, {model}",
            ours=lambda: learned.eval_loss or 0.0,
            plain=partial(losses.__getitem__, "eval_loss"),
            bound="<= 1.02 of plain",
            **both,
        ),
    )


def _padded(cluster: Cluster, action: str, folder: Path, steps: int) -> dict[str, float]:
    run = cluster.submit(Script(PADDED, args=[action, str(folder), str(steps)]))
    run.wait(progress=False).raise_for_status()
    figures: dict[str, float] = json.loads(run.logs(stream="stdout").strip().splitlines()[-1])
    return figures


def _rate(times: Sequence[float]) -> float:
    return AT_ONCE * (len(times) - 1) / (times[-1] - times[0])


def _useful(result: RunResult) -> float:
    return (result.useful_tokens_per_s or 0.0) / (result.padded_tokens_per_s or 1.0)


def write_model(folder: Path, name: str, evaluated: int = 512) -> None:
    """Write a model of random weights and real rows: `model/`, `train.jsonl`, `eval.jsonl`."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        T5Config,
        T5ForConditionalGeneration,
    )

    from workbench.finetune.data.rows import Example
    from workbench.finetune.model.load import load
    from workbench.finetune.model.text.tokenizer import END, PAD, train_tokenizer

    (folder / "model").mkdir(parents=True)
    examples: list[Example] = []
    for part, most in (("train", None), ("eval", evaluated)):
        lines = (ROWS / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()[:most]
        rows = [row_from(json.loads(line), part) for line in lines]
        (folder / f"{part}.jsonl").write_text(
            "".join(row.to_json() + "\n" for row in rows), encoding="utf-8"
        )
        examples += [Example(source=row.source, target=row.target) for row in rows]
    if name.startswith("tiny-"):
        loaded = load(name, examples, seed=0)
        model, tokenizer = loaded.model, loaded.tokenizer
    else:
        text = train_tokenizer(
            [text for e in examples for text in (e.source, e.target)], vocabulary=8192
        )
        from tokenizers import Tokenizer

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(text), pad_token=PAD, eos_token=END
        )
        if name == "llama-9m":
            size = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
            model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, num_attention_heads=4, **size))
        else:
            # The defaults of a T5 are t5-small's.
            size = {}
            if name == "t5-9m":
                size = {"vocab_size": 8192, "d_model": 256, "d_ff": 1024, "num_layers": 4}
                size |= {"num_heads": 4, "dropout_rate": 0.0}
            model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **size))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def answers(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare the answers a second of `run.predict` with those of a loop of one question at a time.

    The loop takes each fortieth question: its time for each does not depend on how many there are.
    """
    if not ROWS.exists():
        return
    folder, asked, steps = root / "asked", 1000, 150
    write_model(folder, "tiny-t5", evaluated=asked)
    job = FineTune(
        model=str(folder / "model"),
        dataset=str(folder),
        technique="single",
        max_steps=steps,
        learning_rate=2e-3,
        per_device_train_batch_size=AT_ONCE,
        max_source_length=96,
        max_target_length=96,
        predict_rows=0,
        eval_strategy="no",
        profile_step=0,
    )
    with Cluster(LocalPods(), PodSpec(cpus=2), path=root / "asked-cluster") as cluster:
        run = cluster.submit(job)
        run.wait(progress=False).raise_for_status()
    shutil.rmtree(folder / "model")
    shutil.copytree(run.paths.model, folder / "model")
    lines = (folder / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [row_from(json.loads(line), "eval").source for line in lines]
    run.predict(questions[:1])  # the model is loaded

    def ours() -> float:
        began = time.monotonic()
        assert len(run.predict(questions)) == asked
        return asked / (time.monotonic() - began)

    def plain() -> float:
        command = [sys.executable, PADDED, "ask", str(folder), "25"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}  # of a model this small, more are slower
        out = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        return float(json.loads(out.splitlines()[-1])["answers_per_s"])

    yield [
        Pair(
            what=f"answers/s, 1,000 questions, tiny-t5 after {steps} steps",
            ours=ours,
            plain=plain,
            plain_is="generate, one at a time, 25 of them",
            bound=">= 10 x",
            more_is_better=True,
            turns=2,
        )
    ]


def reading(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare how long 80,000 rows take to token batches, and the memory beyond that of 8,000."""
    if not ROWS.exists():
        return
    for count in (8_000, 80_000):
        write_model(folder := root / f"read-{count}", "tiny-t5")
        lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
        rows = (json.loads(lines[n % len(lines)]) for n in range(count))
        texts = (
            json.dumps({**row, "source": f"{row['source']} {n}"}) for n, row in enumerate(rows)
        )
        (folder / "train.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    last: dict[str, float] = {}

    def turn(who: str) -> Turn:
        def measure() -> float:
            small, large = (_read(who, root / f"read-{count}") for count in (8_000, 80_000))
            last[who] = large["mib"] - small["mib"]
            return large["seconds"]

        return measure

    both = {"plain_is": "tokenized whole, DataCollatorForSeq2Seq", "turns": 1}
    yield [
        Pair(
            what="seconds from 80,000 rows to token batches, one core",
            ours=turn("ours"),
            plain=turn("plain"),
            bound="<= 60 s",
            **both,
        ),
        Pair(
            what="MiB of memory more for 80,000 rows than for 8,000",
            ours=lambda: last["ours"],
            plain=lambda: last["plain"],
            bound="<= 10 MiB",
            **both,
        ),
    ]


def _read(who: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, READING, who, str(folder)]
    figures: dict[str, float] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    )
    return figures
