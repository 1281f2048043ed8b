"""Run unattended ranks as forks of one parent, so that torch and DeepSpeed are imported once.

`python forkunattended.py JOB_FOLDER SPEC.json OUT`: first the trainer alone in JOB_FOLDER,
which holds a job.json; then unattended ranks into OUT; then with a rank less, as if the first
attempt had failed after its last checkpoint but one. Prints the exit codes as JSON. Not a test.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from forkrun import LATE, end_as, free_port

RANKS = 3


def main() -> None:
    job, spec, out = (Path(word) for word in sys.argv[1:])
    import torch

    from workbench.agent.ranks import launcher
    from workbench.base.process import open_output
    from workbench.finetune.train.main import main as train
    from workbench.handover.unattended.__main__ import main as unattended

    for name in LATE:
        importlib.import_module(name)
    torch.set_num_threads(1)

    def forked(_argv: object, env: dict[str, str], _cwd: str, folder: Path) -> int:
        """Start a rank in the place of a new Python, which would import torch again."""

        def run() -> None:
            os.setsid()
            open_output(folder)
            os.environ.update(env)
            torch.set_num_threads(1)  # as in forkrun
            train()

        pid = os.fork()
        if pid == 0:
            end_as(run)
        return pid

    vars(launcher)["start_cold"] = forked

    def alone(rank: int) -> None:
        own = job / f"rank-{rank}"
        own.mkdir()
        os.dup2(os.open(own / "stdout.log", os.O_WRONLY | os.O_CREAT, 0o600), 1)
        os.environ.update(WORKBENCH_RUN_DIR=str(job), WORKBENCH_RANK_DIR=str(own))
        torch.set_num_threads(1)  # as in forkrun
        train()

    codes = [ranks_of(alone)]
    codes.append(ranks_of(lambda _: unattended([str(spec), str(out)])))
    result = json.loads((out / "result.json").read_text())
    (out / "first.json").write_text(json.dumps(result))
    (out / "result.json").write_text(json.dumps({**result, "state": "failed"}))
    shutil.rmtree(out / "checkpoints" / "step-4", ignore_errors=True)
    codes.append(ranks_of(lambda _: unattended([str(spec), str(out)]), RANKS - 1))
    codes.append(
        ranks_of(lambda _: unattended([str(spec), str(out)]))
    )  # it has succeeded: nothing to do
    sys.stderr.flush()
    print(json.dumps(codes), flush=True)


def ranks_of(run: Callable[[int], int | None], count: int = RANKS) -> list[int]:
    port = free_port()
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        os.dup2(2, 1)  # this program's own output is its answer
        places = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        end_as(partial(run, rank))
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    main()
