"""What every trainer of TRL needs between the workbench's mixin and TRL's own class.

The class of a trainer has the bases `Hooks` of a method, the mixin, and `Base` of the method.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from workbench.finetune.methods.on_pods.evaluation import EvalBatch, dealt_in_turn

Figures = dict[str, list[float]]


class TrlHooks:
    """Rows that are tokens already, figures of the right step, and no telemetry."""

    judges_together: ClassVar[bool] = False
    """Whether the ranks need each other's rows to compute the figures of a micro-batch."""
    _kept_step: int

    def __init__(self, *, lengths: torch.Tensor, sampling: str, **options: Any) -> None:
        """Set up with the numbers of tokens of the rows, rows x 2, and the job's order of rows."""
        self._lengths = lengths
        self._sampling = sampling
        # TRL's figures of the steps that are not logged yet, by step.
        self._of_steps: dict[int, Figures] = {}
        super().__init__(**options)

    def _send_telemetry(self) -> None:
        """Send nothing: TRL would report model and hardware to the model hub."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def row_lengths(self) -> torch.Tensor:
        return self._lengths

    def get_train_dataloader(self) -> Any:
        # transformers would order the rows of evaluations in the same way, and knows no lengths.
        args = self.args  # type: ignore[attr-defined]
        in_order = args.train_sampling_strategy
        args.train_sampling_strategy = self._sampling
        try:
            return super().get_train_dataloader()  # type: ignore[misc]
        finally:
            args.train_sampling_strategy = in_order

    # Losses are read one step late: TRL's figures wait until then.

    def _keep(self, loss: torch.Tensor, grad_norm: Any, *, due: bool) -> None:
        before = self._kept_step
        super()._keep(loss, grad_norm, due=due)  # type: ignore[misc]
        if self._kept_step != before and due:
            self._of_steps[self._kept_step] = self.take_figures("train")

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        # An evaluation, or the end of the run, has no figures of a step.
        figures: Figures | None = {}
        if "loss" in logs:
            figures = self._of_steps.pop(self.state.global_step, None)  # type: ignore[attr-defined]
        if figures is None:
            super().log(logs, *args, **options)  # type: ignore[misc]
            return
        later = self._exchange("train", figures)
        try:
            super().log(logs, *args, **options)  # type: ignore[misc]
        finally:
            self._exchange("train", later)

    def take_figures(self, mode: str) -> Figures:
        """Return TRL's figures of "train" or "eval" since the last call."""
        return self._exchange(mode, defaultdict(list))

    def _exchange(self, mode: str, figures: Figures) -> Figures:
        """Replace and return TRL's figures."""
        held: Figures = self._metrics[mode]  # type: ignore[attr-defined]
        self._metrics[mode] = figures  # type: ignore[attr-defined]
        return held

    # Evaluations, called by `MethodEvaluator`.

    def eval_batches(self) -> Iterator[EvalBatch]:
        """Yield the rank's micro-batches of an evaluation."""
        args = self.args  # type: ignore[attr-defined]
        rows = self.eval_dataset  # type: ignore[attr-defined]
        return dealt_in_turn(
            len(rows),
            size=args.per_device_eval_batch_size,
            rank=args.process_index,
            world_size=args.world_size,
        )

    def weighed(
        self, figures: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, float, float]]:
        """Yield the figures of a micro-batch, and the share of rows behind each."""
        del rows
        for name, mean in figures.items():
            yield name, mean, 1.0

    def completed(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the figures of an evaluation from means over the rows."""
        return figures


class ReferenceHooks(TrlHooks):
    """Reference of a preference: the model before the training."""

    def __init__(self, *, keeps_adapters: bool, **options: Any) -> None:
        """Set up. `keeps_adapters`: the reference has the adapters that the training begins with.

        Otherwise, new adapters change nothing yet, and the reference is the base without adapters.
        """
        super().__init__(**options)
        model = self.model  # type: ignore[attr-defined]
        if not keeps_adapters and "ref" in getattr(model, "peft_config", {}):
            # TRL has copied the adapters for its reference.
            model.delete_adapter("ref")
