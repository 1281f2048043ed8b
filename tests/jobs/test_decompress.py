"""Files as people have them: compressed, of other encodings and delimiters, or not readable."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data import decompress
from workbench.finetune.data.sources.dataset import dataset_from, prepare
from workbench.finetune.data.sources.read import read_rows

ROWS = [{"source": f"Größe {n} – €", "target": f"„{n}“"} for n in range(60)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
TABLE = "source,target\n" + "".join(f'"{row["source"]}",{row["target"]}\n' for row in ROWS)
TEXTS = {
    ".jsonl": LINES,
    ".json": json.dumps(ROWS, ensure_ascii=False),
    ".csv": TABLE,
    ".tsv": TABLE.replace(",", "\t"),
}
PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def prepared(path: Path, **options: object) -> bytes:
    value: object = {"kind": "files", "train": str(path), **options} if options else str(path)
    made = prepare(dataset_from(value), path.parent / "out")  # type: ignore[arg-type]
    assert made.train is not None
    return made.train.read_bytes()


@pytest.fixture
def plain(tmp_path: Path) -> bytes:
    (tmp_path / "plain.jsonl").write_text(LINES, encoding="utf-8")
    return prepared(tmp_path / "plain.jsonl")


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("end", TEXTS)
def test_compressed_rows_are_read_as_they_are(
    tmp_path: Path, plain: bytes, end: str, packed: str
) -> None:
    path = tmp_path / f"rows{end}{packed}"
    path.write_bytes(PACKERS[packed](TEXTS[end].encode()))
    assert prepared(path) == plain
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f"train{end}{packed}").write_bytes(path.read_bytes())
    assert prepared(folder) == plain
    # Beside the file itself, its compressed copy is not read a second time.
    (folder / f"train{end}").write_text(TEXTS[end], encoding="utf-8")
    assert prepared(folder) == plain


@pytest.mark.long
def test_broken_and_far_too_large_compressed_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(LINES.encode())
    for content in (
        whole[: len(whole) // 2],
        b"no gzip at all",
        whole[:30] + b"\0" * 40 + whole[70:],
    ):
        path.write_bytes(content)
        with pytest.raises(
            ConfigError,
            match=sentence(
                "the compressed content is broken: {}; was the file copied whole?", "rows.jsonl.gz"
            )
            + sentence("the dataset file {} cannot be read"),
        ):
            prepared(path)
    monkeypatch.setattr(decompress, "_FREE_BYTES", 1 << 20)
    for end, text in (
        (".jsonl", '{"text": "a"}\n' * 2_000_000),
        (".json", '{"a": "' + "b" * 30_000_000),
    ):
        path = tmp_path / f"bomb{end}.xz"
        path.write_bytes(lzma.compress(text.encode()))
        with pytest.raises(
            ConfigError,
            match=sentence("the file unpacks to more than", "bomb", "MiB")
            + sentence("the dataset file {} cannot be read"),
        ):
            prepared(path)


@pytest.mark.parametrize("end", TEXTS)
def test_other_encodings_are_read_by_their_mark_or_by_name(
    tmp_path: Path, plain: bytes, end: str
) -> None:
    path = tmp_path / f"rows{end}"
    for encoding in ("utf-16", "utf-32", "utf-8-sig"):
        path.write_text(TEXTS[end], encoding=encoding)
        assert prepared(path) == plain
    for encoding in ("cp1252", "utf-16-le"):
        path.write_text(TEXTS[end], encoding=encoding)
        assert prepared(path, encoding=encoding) == plain
    packed = tmp_path / f"rows{end}.gz"
    packed.write_bytes(gzip.compress(TEXTS[end].encode("utf-16")))
    assert prepared(packed) == plain
    path.write_text(TEXTS[end], encoding="cp1252")
    with pytest.raises(
        ConfigError,
        match=r"is not UTF-8: .*; save the file as UTF-8, or name the encoding of a dataset",
    ):
        prepared(path)
    with pytest.raises(
        ConfigError,
        match=sentence("or save the file as UTF-8", "ascii")
        + sentence("the dataset file {} cannot be read"),
    ):
        prepared(path, encoding="ascii")


def test_a_long_file_of_another_encoding_is_read_in_pieces(tmp_path: Path) -> None:
    rows = [{"text": f"{n} " + "ä€𝄞" * 2000} for n in range(200)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-16")
    assert [row for _, row in read_rows(tmp_path / "rows.jsonl", {})] == rows


def test_an_encoding_that_is_none_or_has_no_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(TABLE)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    for name in ("cp-12525", "rot13", "hex"):
        with pytest.raises(
            ConfigError,
            match=sentence("give a name that Python knows", name),
        ):
            prepared(tmp_path / "rows.csv", encoding=name)
    with pytest.raises(
        ConfigError,
        match=sentence("dataset encoding is for files of text", "rows.parquet"),
    ):
        prepared(tmp_path / "rows.parquet", encoding="cp1252")


@pytest.mark.parametrize("mark", [";", "\t", "|"])
@pytest.mark.parametrize("end", [".csv", ".tsv"])
def test_what_parts_columns_is_seen_by_the_content(tmp_path: Path, mark: str, end: str) -> None:
    path = tmp_path / f"rows{end}"
    path.write_text(f'source{mark}target\n\n"a, b; c{mark} d\n|"{mark}e, f\n' + f"g{mark}h\n" * 30)
    rows = [row for _, row in read_rows(path, {})]
    assert rows[:2] == [
        {"source": f"a, b; c{mark} d\n|", "target": "e, f"},
        {"source": "g", "target": "h"},
    ]
    path.write_text("text\nOne | two; three\n" + "four\n" * 30)
    assert next(row for _, row in read_rows(path, {})) == {"text": "One | two; three"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.xlsx",
            b"PK",
            sentence("is a spreadsheet, which is not read: save it as CSV (UTF-8)", "rows.xlsx"),
        ),
        (
            "rows.txt",
            b"Once upon a time\n",
            sentence('write each text as a line {"text', "rows.txt"),
        ),
        (
            "rows.csv.zip",
            b"PK",
            sentence(
                "is an archive that is not read: unpack it, or pack it as .gz", "rows.csv.zip"
            ),
        ),
        (
            "rows.arrow",
            b"ARROW1",
            sentence("is a table that is not read: save it as Parquet", "rows.arrow"),
        ),
        (
            "rows.jsonl",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n",
            sentence("is a pointer of git-lfs", "git lfs pull"),
        ),
        (
            "rows.csv",
            b"<!DOCTYPE html><html><title>Sign in</title></html>",
            sentence("is a page of a website"),
        ),
        ("rows.pkl", b"x", sentence("which may run code and is not read", "rows.pkl")),
        (
            "rows.json",
            b'{"train": [1], "test": [2]}',
            sentence("Write every list into a separate file", 2, "'train', 'test'"),
        ),
    ],
)
def test_a_format_that_is_not_read_is_refused_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    for value in (str(tmp_path / name), {"kind": "files", "train": str(tmp_path / name)}):
        with pytest.raises(ConfigError, match=message):
            prepare(dataset_from(value), tmp_path / "out")


def test_lines_under_another_name_are_read_where_they_are_named_as_files(
    tmp_path: Path, plain: bytes
) -> None:
    for name in ("rows.txt", "rows.data", "rows"):
        (tmp_path / name).write_text(LINES, encoding="utf-8")
        assert prepared(tmp_path / name, seed=0) == plain
        with pytest.raises(
            ConfigError,
            match=sentence("or name the file as 'train' of a dataset of kind 'files"),
        ):
            prepared(tmp_path / name)
