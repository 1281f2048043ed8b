"""Compare the step times that shallow copies predict with the steps of real runs, on this machine.

`python -m tests.finetune.plan.record_copies FILE REPETITIONS [CLOCK]` appends one JSON line for
each model to FILE: seconds of a step of the whole model under `single`, as predicted and as
measured in a rank of the trainer. The clock is `cpu` or `wall`, by default both. CPU seconds of a
process with one thread depend less on other work of the machine. Copies and runs alternate.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from workbench.base.allocator import preloaded
from workbench.finetune.job.deepspeed_config import resolve
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.notebook.calibrate import calibrate
from workbench.rundir.state import RunState

REPOSITORY = Path(__file__).resolve().parents[3]
LENGTHS = (96, 32)
STEPS = 12
_WORDS = 40  # of a row
CASES: dict[str, dict[str, object]] = {
    "tiny-t5": {"model": "tiny-t5"},
    "tiny-t5, LoRA": {"model": "tiny-t5", "peft": "lora"},
    "tiny-llama": {"model": "tiny-llama", "loss_on": "all"},
    "tiny-llama, LoRA": {"model": "tiny-llama", "loss_on": "all", "peft": "lora"},
    "T5, 8 layers of 384": {"model": "t5"},
    "T5, 8 layers of 384, LoRA": {"model": "t5", "peft": "lora"},
    "Llama, 8 layers of 384": {"model": "llama"},
    "Llama, 8 layers of 384, LoRA": {"model": "llama", "peft": "lora"},
    "Llama, 8 layers of 384, 32,000 words": {"model": "words", "loss_on": "all"},
}
_MODELS = """
import sys, json
from pathlib import Path
from transformers import T5Config, T5ForConditionalGeneration, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer
from workbench.finetune.model.text.tokenizer import train_tokenizer
root = Path(sys.argv[1])
row = json.loads((root / "train.jsonl").open().readline())
text = train_tokenizer([row["source"]], vocabulary=500)
ids = dict(pad_token_id=0, eos_token_id=1)
t5 = T5Config(vocab_size=8000, d_model=384, d_kv=64, d_ff=1536, num_layers=8, num_heads=6,
              decoder_start_token_id=0, **ids)
shape = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=8,
             num_attention_heads=6, bos_token_id=1, **ids)
models = {
    "t5": T5ForConditionalGeneration(t5),
    "llama": LlamaForCausalLM(LlamaConfig(vocab_size=8000, **shape)),
    "words": LlamaForCausalLM(LlamaConfig(vocab_size=32000, **shape)),
}
for name, model in models.items():
    model.save_pretrained(root / name)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), pad_token="<pad>",
                            eos_token="</s>").save_pretrained(root / name)
"""


class Measurer:
    """A process with torch, which forks the copies and the ranks."""

    path = Path("cluster")

    def __init__(self) -> None:
        self.clock = "cpu"
        self.child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __spec__.name, "--serve"],
            env={**os.environ, **preloaded(), "OMP_NUM_THREADS": "1"},
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **task: object) -> Any:
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(json.dumps({**task, "clock": self.clock}) + "\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())

    def submit(self, job: Any, *, pods: int, path: Path) -> SimpleNamespace:
        """Measure copies as a cluster's first pod does."""
        del pods
        returned = [self.ask(copies=job.args)]
        result = SimpleNamespace(state=RunState.SUCCEEDED, path=path)
        return SimpleNamespace(path=path, returned=returned, wait=lambda *_, **__: result)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(REPOSITORY / "tests" / "finetune" / "train"))
    import forkrun

    forkrun.import_once()
    for line in sys.stdin:
        task = json.loads(line)
        child = os.fork()
        if child == 0:
            answers.write(json.dumps(measured(forkrun, task)) + "\n")
            answers.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, task


def measured(forkrun: Any, task: Mapping[str, Any]) -> object:
    """Measure copies, or the seconds of a run's step, by the clock of the task."""
    from workbench.finetune.plan.trace import shallow
    from workbench.finetune.train.measure import meter

    if task["clock"] == "cpu":
        clock = SimpleNamespace(perf_counter=time.process_time, monotonic=time.process_time)
        shallow.time = meter.time = clock  # type: ignore[attr-defined]
    if "copies" in task:
        return shallow.measure(*task["copies"])
    folder = Path(task["run"])
    codes = forkrun.run_one(folder, 1, 1, None)
    log = (folder / "rank-0" / "stdout.log").read_text()
    assert set(codes.values()) == {0}, log + (folder / "rank-0" / "stderr.log").read_text()
    found = [line for line in log.splitlines() if '"micro_batch_s"' in line]
    event = json.loads(found[-1].partition(" ")[2])
    return {name: event[name] for name in ("step_s", "micro_batch_s")}


def prepare(root: Path) -> dict[str, FineTune]:
    """Write models, rows that are cut at the longest length, and a run's folder for every case."""
    # The built-in models have as many words as their rows, up to 4,096.
    letters = random.Random(0)
    words = ["".join(letters.choices("abcdefghijklmnop", k=8)) for _ in range(4000)]
    rows = root / "train.jsonl"
    with rows.open("w", encoding="utf-8") as out:
        for first in range(0, len(words), _WORDS):
            long = " ".join(words[first : first + _WORDS])
            out.write(json.dumps({"source": long, "target": long}) + "\n")
    subprocess.run([sys.executable, "-c", _MODELS, str(root)], check=True, cwd=REPOSITORY)
    jobs = {}
    for name, more in CASES.items():
        model = str(more["model"])
        job = FineTune(
            **{**more, "model": model if model.startswith("tiny") else str(root / model)},  # type: ignore[arg-type]
            technique="single",
            max_source_length=LENGTHS[0],
            max_target_length=LENGTHS[1],
            max_steps=STEPS,
            profile_step=0,
            predict_rows=0,
            eval_strategy="no",
        )
        raw = {"job": job.to_dict(), "train": str(rows), "eval": None, "hub": None, "gpus": 0}
        (root / name).mkdir()
        config = resolve(job, gpus=0, world_size=1)
        (root / name / "job.json").write_text(json.dumps({**raw, "deepspeed": config}))
        jobs[name] = job
    return jobs


def compare(measurer: Measurer, root: Path, jobs: Mapping[str, FineTune]) -> Iterator[object]:
    for name, job in jobs.items():
        load = os.getloadavg()[0]
        calibration = calibrate(measurer, job, gpus=0)  # type: ignore[arg-type]
        run = measurer.ask(run=str(root / name))
        yield {
            "case": name,
            "clock": measurer.clock,
            "load": round(load, 1),
            "layers": calibration.layers,
            "rounds": [
                [[copy.layers, copy.micro_batch_s, copy.update_s] for copy in copies]
                for copies in calibration.rounds
            ],
            "predicted_s": [whole.step_s for whole in calibration.whole],
            "measured": run,
            "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        }


def main() -> None:
    if sys.argv[1] == "--serve":
        serve()
        return
    file, repetitions = Path(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="copies-") as folder:
        jobs = prepare(Path(folder))
        measurer = Measurer()
        for _ in range(repetitions):
            for measurer.clock in sys.argv[3:] or ("cpu", "wall"):
                for line in compare(measurer, Path(folder), jobs):
                    with file.open("a") as out:
                        out.write(json.dumps(line) + "\n")
        assert measurer.child.stdin is not None
        measurer.child.stdin.close()
        measurer.child.wait()


if __name__ == "__main__":
    main()
