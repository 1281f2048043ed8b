"""Checkpoints for resuming: every rank writes its part, and parts get their names at the end.

Parts are renamed only after all ranks have written successfully. With `async_save`, a thread
writes a copy in host memory while training continues.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainerCallback

from workbench.agent.rank import collectives as ranks
from workbench.base.errors import DiskFull, RunError
from workbench.base.files import records
from workbench.base.process import pod_name
from workbench.finetune.checkpoint import snapshot
from workbench.finetune.checkpoint.reshard import resharded
from workbench.finetune.checkpoint.tensor_tree import Packed, packed, read_tree, write_packed
from workbench.finetune.train.callbacks import emit_memory
from workbench.rundir.checkpoints import number_in, problem_of, read_manifest, write_manifest
from workbench.rundir.events import emit

_KEPT = 2
_Written = tuple[int, OSError | None]


class _Unnamed(NamedTuple):
    """Checkpoint whose parts have no names yet."""

    step: int
    began: float
    written: Callable[[], _Written]
    """Wait for the rank's part; return its bytes, or the error."""
    is_done: Callable[[], bool]


class Checkpoints(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Decide when a checkpoint is due, write it, and keep the checkpoint to resume from."""

    def __init__(
        self,
        folder: Path,
        *,
        every: int | None,
        resumes: bool,
        most: int | None = None,
        rescues: bool = False,
        shared: Path | None = None,
        beside: bool = False,
    ) -> None:
        """Set up. `rescues`: a step may end with a call of `rescue`.

        `shared` is the run's folder in a folder that all pods share, in place of `folder`.
        `beside`: a thread writes beside the training.
        """
        self.folder = (shared or folder) / "checkpoints"
        self._shared = shared is not None
        self.every = every
        self.most = most or _KEPT
        self.sent = _of_rank(folder / "resume") if resumes else []
        """Folders of the sent parts: of the rank, or of all ranks of another number of ranks.

        The folders are removed after reading.
        """
        self.tree: dict[str, Any] | None = _read_sent(self.sent) if resumes else None
        """Checkpoint to resume from; None for a run from the beginning."""
        self._good: deque[int] = deque()
        self._unnamed: _Unnamed | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if beside else None
        # A restart continues from a checkpoint of the run itself, which is not written again.
        if (
            self._shared
            and self.sent
            and self.sent[0].resolve().parent == self._parts(self.first_step)
        ):
            self._good.append(self.first_step)
        self._told = False
        self._trainer: Any = None
        # True until the first step of a resumed run.
        self._begins = False
        self._begins_amid = False
        self._rescues = rescues
        # Random numbers after the last finished step and its evaluation; None if not needed.
        self._random: dict[str, object] | None = None
        self._begins_epoch = False

    def follow(self, trainer: Any) -> None:
        """Store the trainer that continues from the checkpoint when its training begins."""
        self._trainer = trainer

    @property
    def first_step(self) -> int:
        """Optimizer step after which the run continues; 0 from the beginning."""
        return int(self.tree["step"]) if self.tree is not None else 0

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        _control: Any,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Restore the sent checkpoint, and set the order of rows to the continued epoch."""
        if self.tree is None:
            return
        self.restore(self._trainer)
        steps_of_epoch = max(1, len(train_dataloader) // int(args.gradient_accumulation_steps))
        train_dataloader.batch_sampler.epoch = state.global_step // steps_of_epoch
        self._begins = True
        self._begins_amid = state.global_step % steps_of_epoch > 0
        if ranks.rank() == 0:
            emit("resumed", step=state.global_step)

    def on_epoch_begin(self, args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Restore the random numbers at the boundary of two epochs, before rows are read."""
        if self._begins and self.tree is not None:
            snapshot.restore_random(self.tree, seed=args.seed)
        self._begins = False
        self._keep_random()
        self._begins_epoch = True

    def on_step_begin(self, args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Restore the random numbers within an epoch.

        Reading the skipped rows has consumed some.
        """
        if self._begins_amid and self.tree is not None:
            snapshot.restore_random(self.tree, seed=args.seed)
            self._begins_epoch = False
        self._begins_amid = False
        # Reading the first rows of an epoch consumes some, also in a resumed run.
        if not self._begins_epoch:
            self._keep_random()
        self._begins_epoch = False

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask the Trainer to save after this step, if a checkpoint is due.

        `StopFile.obey` asks for the checkpoint of a stopped run.
        """
        control.should_save = bool(self.every) and state.global_step % self.every == 0
        if self.tree is not None and state.global_step == self.first_step + 1:
            emit("first_step")
            emit_memory(state.global_step)

    def rescue(self, trainer: Any, *, amid_step: bool) -> None:
        """Write a checkpoint of the last finished step before an error ends the run.

        Every rank must call the method. A resumed run continues as if the error had not happened,
        unless an evaluation failed (not `amid_step`): its random numbers were partly used.
        """
        self.save(trainer, self._random if amid_step else None)
        self.finish(trainer)
        step = trainer.state.global_step
        if not amid_step and ranks.rank() == 0:
            emit(
                "note",
                message=f"an evaluation after step {step} failed. A run that resumes from step "
                f"{step} samples other answers than an unbroken run, because the evaluation has "
                "used random numbers",
            )

    def _keep_random(self) -> None:
        if self._rescues:
            self._random = snapshot.random_state(self._trainer)

    def save(self, trainer: Any, random: dict[str, object] | None = None) -> None:
        """Write a checkpoint of the current step; every rank must call the method.

        `random` are random numbers to continue with. None: the present ones. A full disk is
        reported once and does not stop training. With a thread, the checkpoint counts after
        `finish`.
        """
        # A copy in host memory at a time.
        self.finish(trainer)
        began = time.monotonic()
        step = trainer.state.global_step
        best = trainer.best
        # The checkpoint was due, and its step is now the best.
        if step in self._good:
            if best.step == step:
                best.kept = step
            return
        part = self._parts(step) / f"rank-{ranks.rank()}.part"
        tree = packed(snapshot.capture(trainer, random), copies=self._thread is not None)
        if self._thread is not None:
            future = self._thread.submit(_write, part, tree, step)
            self._unnamed = _Unnamed(step, began, future.result, future.done)
            return
        self._unnamed = _Unnamed(step, began, partial(_write, part, tree, step), lambda: True)
        self.finish(trainer)

    def is_there(self) -> bool:
        """Return whether the rank's part is written and waits for its name."""
        return self._unnamed is not None and self._unnamed.is_done()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Wait for the last checkpoint."""
        self.finish(self._trainer)

    def finish(self, trainer: Any) -> None:
        """Wait for the parts of the last `save`, and name them; every rank must call the method."""
        if self._unnamed is None:
            return
        step, began, written, _ = self._unnamed
        self._unnamed = None
        best = trainer.best
        final = self._parts(step) / f"rank-{ranks.rank()}"
        part = final.with_name(f"{final.name}.part")
        size, error = written()
        failed, total = ranks.sums([float(error is not None), float(size)])
        if failed:
            shutil.rmtree(part, ignore_errors=True)
            self._tell(step, error)
            return
        part.rename(final)
        # After a power cut, every pod has all parts of the new checkpoint or of an older one.
        # The other ranks sync their own parts in a shared folder.
        synced = final if self._shared else final.parent
        (unsynced,) = ranks.sums([float(not _is_synced(synced))])
        self._good.append(step)
        if best.wanted and best.step == step:
            best.kept = step
        if not unsynced:
            self._remove_old(best.kept)
        if ranks.rank() == 0:
            took_s = round(time.monotonic() - began, 3)
            emit("checkpoint", step=step, bytes=int(total), took_s=took_s)

    def restore(self, trainer: Any) -> None:
        """Restore the trainer from the checkpoint, if any; every rank must call the method."""
        if self.tree is None:
            return
        self.tree = _for_rank(trainer, self.tree)
        snapshot.restore(trainer, self.tree)
        saved_best = self.tree.get("best") or {}
        is_best = trainer.best.restore(saved_best, at_step=self.first_step)
        if is_best and trainer.best.wanted:
            self._keep_sent(trainer)
        # The tensors would stay in memory for the whole run.
        self.tree["engine"] = None
        ranks.barrier()  # ranks of one pod read the same parts
        for part in self.sent:
            shutil.rmtree(part, ignore_errors=True)

    def load_best(self, trainer: Any) -> bool:
        """Restore the trainer from the checkpoint of the best evaluation.

        Every rank must call this method.

        Return False if no checkpoint has the best evaluation.
        """
        step = trainer.best.kept
        if step is None or step != trainer.best.step:
            return False
        parts = _of_rank(self._parts(step))
        damaged = any(problem_of(part) for part in parts)
        (damaged_parts,) = ranks.sums([float(damaged)])
        if damaged_parts:
            return False
        snapshot.restore(trainer, _for_rank(trainer, _read_trees(parts)))
        return True

    def _parts(self, step: int) -> Path:
        """Return the folder of the parts of a step: a run directory names the pods too."""
        folder = self.folder / f"step-{step}"
        return folder / "pods" if self._shared else folder

    def _remove_old(self, best: int | None) -> None:
        others = [step for step in self._good if step != best]
        most_others = self.most if best is None else self.most - 1
        for step in others[: -max(1, most_others)]:
            self._good.remove(step)
            part = self._parts(step) / f"rank-{ranks.rank()}"
            shutil.rmtree(part, ignore_errors=True)
        if self._shared and ranks.rank() == 0:
            # Also the steps of earlier attempts, which had other ranks.
            for folder in records.folders_in(self.folder, "step-*"):
                if number_in(folder.name, "step") not in {*self._good, best}:
                    shutil.rmtree(folder, ignore_errors=True)

    def _keep_sent(self, trainer: Any) -> None:
        assert self.tree is not None
        step = self.first_step
        failed = 0.0
        if step not in self._good:
            final = self._parts(step) / f"rank-{ranks.rank()}"
            _, error = _write(final, packed(self.tree), step)
            (failed,) = ranks.sums([float(error is not None)])
        if not failed:
            if step not in self._good:
                self._good.append(step)
            trainer.best.kept = step

    def _tell(self, step: int, error: OSError | None) -> None:
        if error is not None and not self._told:
            message = f"on {pod_name()} {error.strerror or error}"
            match error:
                case DiskFull():
                    message = str(error)
            emit("checkpoint_failed", step=step, message=message)
            self._told = True


def _write(part: Path, tree: Packed, step: int) -> _Written:
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write_packed(part, tree)
        size = write_manifest(
            part,
            step=step,
            rank=ranks.rank(),
            world_size=ranks.world_size(),
        )
    except OSError as error:
        return 0, error
    return size, None


def _is_synced(folder: Path) -> bool:
    try:
        records.sync_below(folder)
    except OSError:
        return False
    return True


def _of_rank(folder: Path) -> list[Path]:
    """Return the rank's own part, or the parts of all ranks of another number of ranks."""
    own = folder / f"rank-{ranks.rank()}"
    # Every part's manifest has the number of ranks. With more ranks now, the rank has no own part.
    manifest = read_manifest(own if own.is_dir() else folder / "rank-0")
    size = manifest.get("world_size", ranks.world_size())
    if size == ranks.world_size():
        return [own]
    return [folder / f"rank-{rank}" for rank in range(size)]


def _read_sent(parts: Sequence[Path]) -> dict[str, Any]:
    for part in parts:
        # Pods have read every byte of parts in a shared folder just now, each pod a share. A rank
        # that cuts parts anew reads only its own rows.
        is_read = part.is_symlink() and len(parts) > 1
        problem = "" if is_read else problem_of(part)
        if problem:
            raise RunError(
                f"the checkpoint to resume from arrived damaged: {problem}; submit the run again"
            )
        rank = read_manifest(part).get("rank")
        if rank != number_in(part.name, "rank"):
            raise RunError(
                "the checkpoint to resume from arrived wrong: "
                f"{part.name} is of rank {rank}; submit it again"
            )
    return _read_trees(parts)


def _read_trees(parts: Sequence[Path]) -> dict[str, Any]:
    trees = [read_tree(part) for part in parts]
    first = trees[0]
    if read_manifest(parts[0]).get("world_size") == ranks.world_size():
        return dict(first)
    return {
        **first,
        "random": None,
        "engines": [tree["engine"] for tree in trees],
    }


def _for_rank(trainer: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Return a read checkpoint with the rank's own part of the engine's states."""
    engines = tree.pop("engines", None)
    return {**tree, "engine": resharded(trainer, engines)} if engines else tree
