"""`FineTuneRun`: the run of a fine-tuning job. Beyond what every run does, its model answers, and goes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.client.run import Run
from workbench.finetune.notebook.result import FineTuneResult
from workbench.rundir.paths import RunPaths

if TYPE_CHECKING:
    from workbench.finetune.answers.conversation import Conversation
    from workbench.finetune.answers.predictions import Answers
    from workbench.finetune.answers.questions import RowLike
    from workbench.finetune.export.folder import Export
    from workbench.finetune.export.push import Pushed
    from workbench.jobs.job import Job


class FineTuneRun(Run):
    """A fine-tuning run, live or finished. Make one with `Cluster.submit` or `Run.load`."""

    __slots__ = ()

    if TYPE_CHECKING:  # at run time the kind in spec.json decides which class a result has

        @property
        def result(self) -> FineTuneResult: ...

        def wait(self, timeout_s: float | None = None, progress: bool = True) -> FineTuneResult: ...

    @classmethod
    def before_submit(
        cls, job: Job, paths: RunPaths, *, pods: int, gpus: int, memory_gib: float | None
    ) -> None:
        """Write what the job is predicted to need, or an inquiry for its first pod; see `finetune/plan/prediction`."""
        from workbench.finetune.plan.prediction import begin_prediction

        begin_prediction(
            job, pods, paths.prediction, paths.inquiry, gpus=gpus, memory_gib=memory_gib
        )

    def predict(self, rows: Sequence[RowLike] | None = None, *, before: bool = False) -> Answers:
        """Let the trained model answer rows, greedily and in batches; blocks until it has.

        The model is loaded once, in a process of its own that ends with this one or after ten idle minutes.

        Args:
            rows: Texts, chats (lists of turns, as OpenAI's `messages`), or objects in any form of a dataset's rows.
                Default: of the run's evaluation.
            before: Also ask the model as it was before training.

        Raises:
            RunError: The run left no model, or the model's process failed; carries its words.
            ConfigError: A row is of no known form.
        """
        from workbench.finetune.answers.ask import predict

        return predict(self, rows, before=before)

    def chat(
        self, *, before: bool = False, beside: FineTuneRun | None = None, system: str | None = None
    ) -> Conversation:
        """Return a chat with the trained model, whose template its tokenizer must have.

        A notebook shows it as turns and a field to write in, and answers as they are written; `.send(text)` asks from
        a program. The models are loaded in processes of their own, as those of `predict` are.

        Args:
            before: Also ask the model as it was before training.
            beside: Another run, whose model is asked the same.
            system: A system turn.

        Raises:
            RunError: A run left no model.
            ConfigError: A run's model has no chat template, or is asked by another prompt.
        """
        from workbench.finetune.answers.ask import chat

        return chat(self, before=before, beside=beside, system=system)

    def export(
        self,
        folder: str | Path,
        *,
        dtype: str | None = "bf16",
        merged: bool = True,
        max_shard_size: int | str = "5GB",
    ) -> Export:
        """Write the model into a folder that transformers, vLLM and TGI load; blocks until it is done.

        Weights are safetensors, with configuration, generation configuration, tokenizer and its chat template. The
        model is loaded in the process that answers `predict`: adapters on their base take 4 bytes a parameter.

        Args:
            folder: The folder to make; it must be new or empty. Nothing is left of it where the export fails.
            dtype: The weights' number format, fp32, bf16 or fp16; None for the one that they have.
            merged: Whether adapters are added to the weights of their base; else they are written alone.
            max_shard_size: The largest file of weights, in bytes or as text such as 5GB.

        Returns:
            The folder with its files, and the lines that start it elsewhere.

        Raises:
            ConfigError: The folder holds something, or an option is not possible.
            DiskFull: The weights find no room.
            RunError: The run left no model, or the process failed; carries its words.
        """
        from workbench.finetune.export.folder import export

        return export(self.paths, folder, dtype=dtype, merged=merged, max_shard_size=max_shard_size)

    def merge(self, path: str | Path) -> Path:
        """Add the adapters that this run trained to the weights of their base; `export` with the weights as they are.

        Plain `from_pretrained` loads the folder, and a `FineTune(model=…)` trains on from it.

        Args:
            path: The folder to make; it must be new or empty.

        Returns:
            The folder, absolute.

        Raises:
            ConfigError: The folder holds something.
            DiskFull: The weights find no room.
            RunError: The run trained no adapters or left none, or the process failed; carries its words.
        """
        from workbench.finetune.export.folder import merge

        return merge(self.paths, path)

    def push(
        self,
        repo_id: str,
        *,
        private: bool = True,
        token: str | None = None,
        dtype: str | None = "bf16",
        merged: bool = True,
    ) -> Pushed:
        """Export the model into a temporary folder and upload it to the model hub, with a model card; blocks.

        Token and rights are checked before the model is loaded. The run's own model stays as it is.

        Args:
            repo_id: Its name on the hub, such as `me/model`; made where it does not exist.
            private: Whether a new repository is private; into a public one nothing is pushed then.
            token: A token with write access; it is never written down. Default: HF_TOKEN, or that of `hf auth login`.
            dtype: As for `export`.
            merged: As for `export`.

        Returns:
            Where it is, and the lines that start it.

        Raises:
            ConfigError: The name or an option is not possible.
            DiskFull: There is no room for the temporary folder.
            RunError: There is no model, token or right, or the hub does not answer; carries its words.
        """
        from workbench.finetune.export.push import push

        return push(self.result, repo_id, private=private, token=token, dtype=dtype, merged=merged)
