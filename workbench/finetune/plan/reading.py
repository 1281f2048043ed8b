"""`preview`: show a dataset's rows as the job's model reads them, without importing a library."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.base import entries
from workbench.base.child import replies
from workbench.base.display_protocol import Displayable
from workbench.base.errors import ConfigError, WorkbenchError, require_package, suggests
from workbench.finetune.data.column_checks import Written
from workbench.finetune.data.overlap import line_digests, overlap_of_files
from workbench.finetune.data.sources.convert import chosen, join_files
from workbench.finetune.data.sources.dataset import dataset_from, prepare
from workbench.finetune.data.sources.hub import Hub
from workbench.finetune.deepspeed.defaults import on_base
from workbench.finetune.job.checked_rows import checked_rows
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import Facts, check, known
from workbench.finetune.methods.registry import method_of
from workbench.finetune.options.text.templates import unread

_SAMPLE = 400  # rows used to count tokens
_HUB_ROWS = 2000  # rows fetched from a hub dataset
# A configuration or template of another person may ask for any amount of memory.
_MEMORY_BYTES = 16 << 30
_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Length:
    """Number of tokens of a row before it is cut."""

    read: int
    """Tokens of the input: the source or the prompt."""
    learned: int
    """Tokens counted in the loss."""
    read_is_cut: bool
    learned_is_cut: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPreview(Displayable):
    """Rows of a dataset as a model will read them."""

    job: FineTune
    rows: Sequence[Sequence[tuple[str, bool]]]
    """Some training rows, cut as in training: pieces of text, and whether the piece is learned."""
    lengths: Sequence[Length]
    """Lengths of a sample of the training rows."""
    train_rows: int
    eval_rows: int
    duplicates: int
    """Training rows equal to an earlier row."""
    overlap: int
    """Evaluation rows equal to a training row."""
    not_read: Sequence[str] = ()
    """Columns unused by the form of every row, and files of a folder that are not read."""
    empty_answers: int = 0
    """Rows whose answer is empty."""
    remarks: Mapping[str, int] = field(default_factory=dict)
    """Numbers of rows by what is odd about the rows."""
    batch_lengths: tuple[int, int] | None = None
    """Tokens of source and target that 99 of 100 micro-batches stay within, by the job's sampler.

    `plan(job, lengths=preview(job))` plans with these numbers. None: unknown, with packing or with
    a trainer of TRL.
    """
    is_all: bool = True
    """Whether all rows were counted. Only the first rows of a hub dataset are counted."""

    def __repr__(self) -> str:
        return (
            f"RowPreview({self.train_rows} rows to train on, "
            f"{self.eval_rows} to evaluate on, {self.job.model})"
        )


@suggests("preview")
def preview(job: FineTune, *, rows: int = 4) -> RowPreview:
    """Read a job's dataset as its run would and return the rows. Nothing is started or kept.

    Args:
        job: The job. The first 2,000 rows of a hub dataset are fetched to this machine.
        rows: Number of rows to show, spread over the dataset; at most 400.

    Raises:
        ConfigError: The dataset is refused, as at the start of a run.
        WorkbenchError: The model's tokenizer cannot be loaded on this machine.
    """
    if not isinstance(job, FineTune):
        raise ConfigError(f"preview shows the rows of a FineTune; a {type(job).__name__} has none")
    job = on_base(job)
    facts = known(job)
    check(job, facts)
    reader = method_of(job.method).rows
    dataset = dataset_from(job.dataset)
    with (
        tempfile.TemporaryDirectory(prefix="workbench-rows-") as scratch,
        checked_rows(job) as refusal,
    ):
        folder = Path(scratch)
        if isinstance(dataset, Hub):
            # The hub's rows are not counted for a preview, so a share is not cut.
            limit = dataset.limit if isinstance(dataset.limit, int) else _HUB_ROWS
            dataset = dataset.replace(limit=min(limit, _HUB_ROWS))
            written = dataset.write(folder, refusal=refusal, reader=reader)
            remarks = {**written.remarks, **join_files(folder, reader)}
            written = written._replace(remarks=remarks)
        else:
            made = prepare(dataset, folder, refusal=refusal, reader=reader)
            written = Written(
                made.train_rows,
                made.eval_rows,
                made.not_read,
                made.empty_answers or 0,
                made.remarks,
            )
        train = set(line_digests(folder / "train.jsonl"))
        overlap = overlap_of_files(folder / "train.jsonl", folder / "eval.jsonl")
        check(job, Facts(outline=facts.folder))
        answer = _ask(job, folder, written.train, rows)
    batches = answer["batches"]
    return RowPreview(
        job=job,
        rows=[[(str(text), bool(learned)) for text, learned in row] for row in answer["shown"]],
        lengths=[
            Length(int(read), int(own), bool(cut), bool(own_cut))
            for read, own, cut, own_cut in answer["lengths"]
        ],
        train_rows=written.train,
        eval_rows=written.eval,
        duplicates=written.train - len(train),
        overlap=overlap,
        not_read=unread(str(answer["template"]), written.not_read),
        empty_answers=written.empty_answers,
        remarks={**written.remarks, **dict.fromkeys(answer["remarks"], written.train)},
        batch_lengths=batches and (int(batches[0]), int(batches[1])),
        is_all=not isinstance(dataset, Hub),
    )


def _ask(job: FineTune, folder: Path, count: int, shown: int) -> Mapping[str, Any]:
    sample = chosen(count, min(count, _SAMPLE), job.seed)
    request = {
        "job": {**job.to_dict(), "env": {}},
        "train": str(folder / "train.jsonl"),
        "numbers": [number for number, taken in enumerate(sample) if taken],
        "shown": shown,
    }
    require_package("torch", "a preview of the tokens", extra="worker")
    try:
        (answer,) = replies(
            entries.ROW_LOOK,
            request=request,
            limit_s=_LIMIT_S,
            memory_bytes=_MEMORY_BYTES,
        )
    except ValueError as error:
        raise WorkbenchError(f"the rows cannot be read as {job.model!r} would: {error}") from error
    if "error" in answer:
        raise ConfigError(f"the rows cannot be read as {job.model!r} would: {answer['error']}")
    return dict(answer)
