"""Run trainer jobs as forks of one parent, so that torch and DeepSpeed are imported once.

It reads requests, one a line: {"plans": files, "env"}; and answers each with the exit code of the
fork that did it. A plan is a list of {"folder", "world_size"} and perhaps "on_pod", the ranks that
share a pod (1), "path", a folder that the ranks import from first, "watched", the options of
watchedcalls.py, "compiles", where DeepSpeed's ops for a disk are used, and "shallow", a model's
folder and the folder for a copy of it with one layer, and "imports", modules that the ranks need
and the fork imports once, and "rehearsed", a model's folder that is looked at once,
so that no rank pays for the look, and "script", a file that the ranks run in its folder instead of
the trainer; each run's folder holds a job.json. Leaves exit.json
({rank: code}) in each folder, and beside a plan failed.txt, why it could not be done.
Not a test, and not the warm server: only what a test of the trainer needs.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import resource
import runpy
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from oneunit import compile_as_one_unit
from safetensors.numpy import load_file, save_file
from watchedcalls import watch

from workbench.agent.imports import LATE_MODULES, MODULES, import_for_forks

GRACE_S = 10
LIMIT_S = 800
WORDS = 1224  # of the vocabulary that a built-in model learns from the rows of a plan
# Of a configuration, what `returns_scores` takes no notice of.
UNSEEN = ("_name_or_path", "dtype", "use_cache")
# What the profiler, the shards and the other model
# import when they are made: seconds in every rank.
LATE = (
    *LATE_MODULES,
    "deepspeed.profiling.flops_profiler",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where DeepSpeed logs
    import_once()
    for line in sys.stdin:
        child = os.fork()  # nothing that the runs change is left for the next
        if child == 0:
            try:
                request = json.loads(line)
                os.environ.clear()
                os.environ.update(request["env"])
                run_plans([json.loads(Path(name).read_text()) for name in request["plans"]])
            except BaseException:
                failed = Path(request["plans"][0]).with_name("failed.txt")
                failed.write_text(traceback.format_exc())
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def run_plans(plans: list[list[dict]]) -> None:
    if any("compiles" in run for plan in plans for run in plan):
        compile_as_one_unit()
    for name in {name for plan in plans for run in plan for name in run.get("imports", ())}:
        importlib.import_module(name)
    for folder in {run["rehearsed"] for plan in plans for run in plan if "rehearsed" in run}:
        rehearse(folder)
    gc.freeze()  # no rank copies the pages of these objects to count them
    for run in [run for plan in plans for run in plan]:
        if "checkpoint" in run:  # that an earlier run of the plan left
            if not Path(run["checkpoint"]).is_dir():
                raise RuntimeError(f"no {run['checkpoint']}:\n{said_by(Path(run['checkpoint']))}")
            shutil.copytree(run["checkpoint"], Path(run["folder"]) / "resume")
        began = time.monotonic()
        if "shallow" in run:
            copy_one_layer(*map(Path, run["shallow"]))
        if "path" in run:
            sys.path.insert(0, run["path"])
        script = Path(run["script"]) if "script" in run else None
        codes = run_one(
            Path(run["folder"]), run["world_size"], run.get("on_pod", 1), run.get("watched"), script
        )
        if "path" in run:
            sys.path.remove(run["path"])
        (Path(run["folder"]) / "exit.json").write_text(json.dumps(codes))
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            Path(run["folder"]).name,
            codes,
            round(time.monotonic() - began, 1),
            "s",
            round(cpu.ru_utime),
            flush=True,
        )


def rehearse(folder: str) -> None:
    """Keep the answer of `returns_scores` for the model of a folder."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    with torch.device("meta"):
        model = auto.from_config(config)
    lean_loss().returns_scores(model)


def rehearse_built_in() -> None:
    """Keep the answers for the built-in models, which most runs train."""
    import torch

    from workbench.finetune.model import tiny
    from workbench.finetune.options.model.models import TINY_LLAMA, TINY_T5

    for name in (TINY_LLAMA, TINY_T5):
        with torch.device("meta"):
            model = tiny.make(name, range(WORDS), 0)
        lean_loss().returns_scores(model)


@functools.cache
def lean_loss() -> Any:
    """Return the module, whose look at a model is kept: it takes a rank a fifth of its CPU time."""
    from workbench.finetune.recipe import lean_loss as module

    look, kept = module.returns_scores, {}

    def returns_scores(model: Any) -> bool:
        config = {**model.config.to_dict(), **dict.fromkeys(UNSEEN)}
        kind = type(model).__name__.removeprefix("FSDP")  # torch's class of a sharded model
        key = (kind, json.dumps(config, sort_keys=True, default=str))
        if key not in kept:
            kept[key] = look(model)
        return kept[key]

    module.returns_scores = returns_scores
    return module


def said_by(checkpoint: Path) -> str:
    """Give the exit codes and last lines of the run that was to write the checkpoint."""
    run = checkpoint.parent.parent
    parts = [f"exit codes: {(run / 'exit.json').read_text()}"]
    for log in sorted(run.glob("rank-*/*.log")):
        parts.append(f"{log.parent.name} {log.name}: {log.read_text(errors='replace')[-1000:]}")
    return "\n".join(parts)


def import_once() -> None:
    """Have in this process what every rank needs."""
    import_for_forks(MODULES, LATE)
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping(
        "t5"
    )  # 882 regular expressions, 0.5 s, once a process that loads or saves
    torch.set_num_threads(1)
    rehearse_built_in()


def copy_one_layer(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps({**config, "num_layers": 1, "num_decoder_layers": 1})
    )
    weights = load_file(target / "model.safetensors")
    save_file(
        {name: w for name, w in weights.items() if ".block.1." not in name},
        target / "model.safetensors",
        {"format": "pt"},
    )


def run_one(
    folder: Path, world_size: int, on_pod: int, watched: dict | None, script: Path | None = None
) -> dict[int, int]:
    port = free_port()
    pids = {
        fork_rank(folder, rank, world_size, on_pod, port, watched, script): rank
        for rank in range(world_size)
    }
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT_S
    while len(codes) < world_size:
        for pid, rank in pids.items():
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                elif time.monotonic() > deadline:
                    os.kill(pid, 9)
        time.sleep(0.05)
    return codes


def fork_rank(
    folder: Path,
    rank: int,
    world_size: int,
    on_pod: int,
    port: int,
    watched: dict | None,
    script: Path | None,
) -> int:
    def run() -> None:
        own = folder / f"rank-{rank}"
        own.mkdir(exist_ok=True)
        for number, name in ((1, "stdout.log"), (2, "stderr.log")):
            os.dup2(os.open(own / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank % on_pod),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(on_pod),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
            WORKBENCH_RUN_DIR=str(folder),
            WORKBENCH_RANK_DIR=str(own),
        )
        import torch

        from workbench.finetune.train.main import main as train

        # The first call in a fork makes torch's pool of threads anew. Two threads of the backward
        # pass that do so at once abort the process ("Invalid thread pool").
        torch.set_num_threads(1)
        if watched is not None:
            watch(own, watched)
        if script is None:
            train()
        else:
            os.chdir(script.parent)
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")

    pid = os.fork()
    if pid == 0:
        end_as(run)
    return pid


def end_as(run: Callable[[], int | None]) -> NoReturn:
    """Run the work of a forked child and end the child with its exit code: 1 after an error."""
    code = 1
    try:
        code = run() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
