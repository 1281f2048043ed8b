"""A look at a dataset before training: what the model reads and learns, cuts, and doubles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.scripts import script_job
from tests.support.sentences import says, sentence
from workbench import FineTune, preview
from workbench.base.errors import ConfigError
from workbench.finetune.options.text.lengths import TextLengths
from workbench.finetune.plan.plan import tokens_of
from workbench.finetune.plan.reading import Length, RowPreview


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_rows_as_a_causal_model_reads_them(tmp_path: Path) -> None:
    short = [{"source": f"two words {n}", "target": f"answer {n}"} for n in range(6)]
    long = {"source": "word " * 300, "target": "end " * 60}
    train = write(
        tmp_path / "train.jsonl",
        *short,
        short[1],
        short[1],
        long,
        {"text": "once upon a time " * 90},
    )
    evaluation = write(tmp_path / "eval.jsonl", short[2], {"source": "another", "target": "answer"})
    job = FineTune(
        model="tiny-llama",
        technique="single",
        prompt="<{instruction}>",
        dataset={"kind": "files", "train": train, "eval": evaluation},
        max_source_length=40,
        max_target_length=20,
    )
    seen = preview(job, rows=10)
    assert (seen.train_rows, seen.eval_rows, seen.duplicates, seen.overlap, seen.is_all) == (
        10,
        2,
        2,
        1,
        True,
    )
    assert seen.rows[0] == [("<s><two words 0>", False), ("answer 0</s>", True)]
    (asked, answer), plain = seen.rows[8], seen.rows[9]
    assert asked[0].startswith("<s><word word") and asked[0].endswith(">") and not asked[1], (
        "the form stays whole"
    )
    assert answer[1] and "</s>" not in answer[0], "a cut answer does not end"
    assert [learned for _, learned in plain][:2] == [False, True], (
        "nothing predicts the first token"
    )
    cut = [(length.read_is_cut, length.learned_is_cut) for length in seen.lengths]
    assert cut == [(False, False)] * 8 + [(True, True), (False, False)]
    assert seen.lengths[8].read > 40 and seen.lengths[8].learned > 20 < seen.lengths[9].learned
    everything = preview(job.replace(loss_on="all"), rows=1)
    assert [learned for _, learned in everything.rows[0]] == [False, True]
    assert everything.lengths == seen.lengths


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_rows_as_an_encoder_decoder_model_reads_them(tmp_path: Path) -> None:
    rows = [{"document": f"Some text {n}.", "summary": f"Short {n}."} for n in range(30)]
    seen = preview(FineTune(dataset=write(tmp_path / "rows.jsonl", *rows)), rows=2)
    assert (seen.train_rows, seen.eval_rows, len(seen.rows), len(seen.lengths)) == (28, 2, 2, 28)
    most = [(length.read, length.learned) for length in seen.lengths]
    assert seen.batch_lengths == (max(read for read, _ in most), max(own for _, own in most))
    (given, answer), _ = seen.rows
    assert given[0].startswith("Summarize this document:") and not given[1]
    assert answer[0].startswith("Short") and answer[0].endswith("</s>") and answer[1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_answers_that_the_tokenizer_does_not_end_are_remarked(tmp_path: Path) -> None:
    from tokenizers import processors

    from workbench.finetune.data.rows import Example
    from workbench.finetune.model import load as model

    loaded = model.load("tiny-t5", [Example(source="How many?", target="Three")], seed=0)
    loaded.model.save_pretrained(tmp_path / "m")
    rows = write(tmp_path / "rows.jsonl", *[{"source": "How many?", "target": "Three"}] * 20)
    job = FineTune(model=str(tmp_path / "m"), dataset=rows)
    for processor in (loaded.tokenizer.backend_tokenizer.post_processor, processors.Sequence([])):
        loaded.tokenizer.backend_tokenizer.post_processor = processor
        loaded.tokenizer.save_pretrained(tmp_path / "m")
        seen = preview(job, rows=1)
        has_end = seen.rows[0][-1][0].endswith("</s>")
        remark = "no end token of the tokenizer behind the answer"
        assert seen.remarks.get(remark, 0) == (0 if has_end else seen.train_rows)
    assert not has_end


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_chats_with_the_learned_tokens_marked_what_is_cut_and_what_is_there_twice(
    tmp_path: Path,
) -> None:
    def chat(*words: str) -> dict[str, object]:
        return {
            "messages": [
                {"role": ("user", "assistant")[n % 2], "content": w} for n, w in enumerate(words)
            ]
        }

    short, two = chat("apple", "red"), chat("apple", "red", "pear", "green")
    long = chat("old", "question", "word " * 60, "end " * 60)
    train = write(
        tmp_path / "train.jsonl",
        short,
        two,
        short,
        long,
        chat("plum", "blue"),
        {"text": "once upon a time"},
    )
    evaluation = write(tmp_path / "eval.jsonl", two, chat("lemon", "yellow"))
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    files = {"kind": "files", "train": train, "eval": evaluation}
    job = FineTune(
        model="tiny-llama",
        dataset=files,
        chat_template=template,
        max_source_length=40,
        max_target_length=20,
    )
    seen = preview(job, rows=6)
    assert (seen.train_rows, seen.eval_rows, seen.duplicates, seen.overlap) == (6, 2, 1, 1)
    assert seen.rows[0] == [("<|user|>apple<|end|><|assistant|>", False), ("red<|end|>", True)]
    assert seen.rows[1] == [
        *seen.rows[0],
        ("<|user|>pear<|end|><|assistant|>", False),
        ("green<|end|>", True),
    ]
    (asked, not_learned), (answer, learned) = seen.rows[3]
    assert asked.startswith("<|user|>word word") and asked.endswith("<|end|><|assistant|>"), (
        "the last question is left"
    )
    assert (not_learned, learned) == (False, True) and "<|end|>" not in answer, (
        "a cut answer does not end"
    )
    cut = [(length.read_is_cut, length.learned_is_cut) for length in seen.lengths]
    assert cut == [(False, False)] * 3 + [(True, True)] + [(False, False)] * 2
    assert (
        seen.lengths[0] == seen.lengths[2] and seen.lengths[1].learned > seen.lengths[0].learned > 1
    )
    assert "[red<|end|>]" in str(seen) and says(seen, "cuts {} of them ({}).", 1)


@pytest.mark.usefixtures("forked")
def test_the_shown_rows_are_spread_over_a_sorted_file(tmp_path: Path) -> None:
    rows = [{"question": f"number {n:02}", "answer": "yes"} for n in range(30)]
    job = FineTune(dataset={"kind": "files", "train": write(tmp_path / "train.jsonl", *rows)})
    shown = ["".join(text for text, _ in row) for row in preview(job, rows=3).rows]
    first, middle, last = (int(text.split("number ")[1][:2]) for text in shown)
    assert first < 10 < middle < 20 < last
    assert len(preview(job, rows=100).rows) < 30, "each row once; some are held out"


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=sentence("preview shows the rows of a FineTune; a {} has none", "Script")
    ):
        preview(script_job("train.py"))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=sentence("or leave out rows with an empty question or answer", "rows.jsonl, line 2"),
    ):
        preview(
            FineTune(
                dataset=write(tmp_path / "rows.jsonl", {"source": "a", "target": "b"}, {"a": 1})
            )
        )


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_columns_that_are_not_read_and_empty_answers_are_named(tmp_path: Path) -> None:
    rows = [
        {"source": f"a {n}", "target": "" if n < 3 else "b", "label": n, "url": "…"}
        for n in range(20)
    ]
    seen = preview(FineTune(dataset=write(tmp_path / "rows.jsonl", *rows)), rows=1)
    assert (seen.not_read, seen.empty_answers) == (["label", "url"], 3)
    assert "label, url" in str(seen) and "label, url" in seen._repr_html_()


def test_text_and_html_state_the_same() -> None:
    seen = RowPreview(
        job=FineTune(max_source_length=10),
        rows=[[("ask <b>", False), ("answer", True)]],
        lengths=[Length(4, 2, False, False), Length(23, 8, True, False)],
        train_rows=1234,
        eval_rows=5,
        duplicates=7,
        overlap=3,
        not_read=["label", *(f"c{n}" for n in range(30))],
        empty_answers=11,
        is_all=False,
    )
    text, html = str(seen), seen._repr_html_()
    for part in (
        "not read",
        "c18 and 11 more",
        "11 among the first rows",
        "1,234, the first of the hub",
        "7 among the first rows",
        "max_source_length=10 cuts 1 of them (50.0 %)",
    ):
        assert part in text and part in html
    assert "ask <b> [answer]" in text
    assert "ask &lt;b&gt;" in html and "ask <b>" not in html
    assert "21–23" in text and 'aria-label="1 row"' in html


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "found"), [(False, (12, 6)), (True, (0, 12))])
def test_the_lengths_of_batches_are_those_of_99_in_100(
    causal: bool, found: tuple[int, int]
) -> None:
    from workbench.finetune.model import look

    class Rows:
        """An encoder: the rows are given as their lengths."""

        def __init__(self) -> None:
            self.causal = causal

        def rows(self, sizes: list[tuple[int, int]]) -> list[dict[str, list[int]]]:
            return [{"input_ids": [0] * read, "labels": [0] * learned} for read, learned in sizes]

        def taken(self) -> TextLengths:
            return TextLengths(longest_answer=128)

    few = [(500, 100)] * 5
    for job in (FineTune(), FineTune(train_sampling_strategy="random")):
        assert look._batch_lengths(job, Rows(), [(12, 6)] * 8000 + few, most=None) == found
    # Five long rows of eighty stand in more than one in a hundred batches.
    long = look._batch_lengths(FineTune(), Rows(), [(12, 6)] * 80 + few, most=None)
    assert sum(long) == (500 if causal else 600)
    # A long row beside seven short ones, without padding.
    joined = look._batch_lengths(FineTune(), Rows(), [(12, 6)] * 80 + few, most=512)
    assert sum(joined) < sum(long) / 3
    # Rows of one length keep their own.
    assert look._batch_lengths(FineTune(), Rows(), [(12, 6)] * 80, most=512) == found


def test_a_plan_takes_the_lengths_of_a_preview_and_refuses_one_without() -> None:
    seen = RowPreview(
        job=FineTune(), rows=[], lengths=[], train_rows=1, eval_rows=0, duplicates=0, overlap=0
    )
    assert tokens_of(replace(seen, batch_lengths=(30, 9))) == (30, 9)
    assert tokens_of((4, 5)) == (4, 5) and tokens_of(None) is None
    with pytest.raises(ConfigError, match="no lengths of batches"):
        tokens_of(seen)
