"""Run trainer jobs in forked ranks and write down the most that their tensors held.

`python measure.py PLAN.json`: the plan's `models` are folders with a configuration, which get
weights and a tokenizer of the plan's `rows`. Its `runs` are a list of {"folder", "world_size"};
each folder holds a job.json. Leaves peak.json ({"codes", "peaks": {rank: {"loading": bytes,
"training": bytes}}}) in each folder. Every real storage of the rank is counted from its making to
its release, those of the engine's own buffers among them, and nothing of the planner is used; pages
of a model's files are not, until something is made of them. The `requests` of the plan are traced
as the planner has it done, in a process beside, and their answers written to `traces`.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = 4000  # of the models of test_measured.py
REPOSITORY = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "finetune" / "train")]

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402


class Held(TorchDispatchMode):
    """Add up the storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}
        self.alive: dict[int, Any] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it asks again with the parts that really are here
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, FakeTensor):
                continue  # it has no memory
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self.see(leaf.untyped_storage())
        return out

    def see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            self.alive[key] = weakref.ref(storage, lambda _: self.gone(key))
            self.sizes[key] = 0
        self.live += size - self.sizes[key]
        self.sizes[key] = size
        self.peak = max(self.peak, self.live)

    def gone(self, key: int) -> None:
        self.live -= self.sizes.pop(key)
        del self.alive[key]


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    import forkrun

    forkrun.import_once()
    import trl.trainer.utils as trl_utils

    # TRL's buffer has room for 32,768 words. On a CPU, memory beyond the words is never touched.
    trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = WORDS
    import workbench.finetune.train.main as train

    real = train.main
    train.main = lambda: measured(real)
    for folder in plan["models"]:
        make_model(Path(folder), Path(plan["rows"]))
    trace_beside(plan["requests"], Path(plan["traces"]))
    for run in plan["runs"]:
        folder = Path(run["folder"])
        codes = forkrun.run_one(folder, run["world_size"], 1, None)
        peaks = {
            rank: json.loads(p.read_text())
            for rank in codes
            if (p := folder / f"rank-{rank}/peak.json").exists()
        }
        (folder / "peak.json").write_text(json.dumps({"codes": codes, "peaks": peaks}))


def make_model(folder: Path, rows: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        PreTrainedTokenizerFast,
    )

    from workbench.finetune.model.text.tokenizer import train_tokenizer

    place = folder / "config.json"
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    written = place.read_text()
    auto.from_config(config, dtype=config.dtype).save_pretrained(folder)
    place.write_text(written)  # the requests hold it
    source = json.loads(rows.read_text().splitlines()[0])["source"]
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(train_tokenizer([source], vocabulary=500)),
        pad_token="<pad>",
        eos_token="</s>",
    ).save_pretrained(folder)


def trace_beside(requests: Sequence[Mapping[str, Any]], answers: Path) -> None:
    tracer = os.fork()
    if tracer == 0:
        code = 1
        try:
            from workbench.finetune.plan.trace.trace import prepared_trace

            answers.write_text(json.dumps([prepared_trace(request) for request in requests]))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(tracer, 0)[1] == 0


def measured(real: Any) -> None:
    from transformers import Trainer

    held = Held()
    fit, resize = Trainer.train, torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        resize(storage, size)  # FSDP empties and refills storages behind the dispatcher
        held.see(storage)
        return storage

    def fit_measured(self: Any, *args: object, **options: object) -> Any:
        loading = held.peak
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not isinstance(tensor, DTensor) and not hasattr(tensor, "ds_id"):
                tensor.data = (
                    tensor.data.clone()
                )  # it is pages of a file, which no operation has made
        held.peak = held.live
        result = fit(self, *args, **options)
        (Path(os.environ["WORKBENCH_RANK_DIR"]) / "peak.json").write_text(
            json.dumps({"loading": loading, "training": held.peak})
        )
        return result

    Trainer.train, torch.UntypedStorage.resize_ = fit_measured, resized  # type: ignore
    with held:
        real()


if __name__ == "__main__":
    main()
