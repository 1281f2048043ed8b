from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.lines import read_lines


def read(tmp_path: Path, content: bytes) -> list[tuple[str, object]]:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    return list(read_lines(path))


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1}\n{"a": 2}\n',
        b'{"a": 1}\r\n{"a": 2}\r\n',
        b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}',
        b'{"a": 1}\n{"a": 2}',
    ],
)
def test_line_ends_marks_and_blank_lines_do_not_matter(tmp_path: Path, content: bytes) -> None:
    assert [value for _, value in read(tmp_path, content)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; write a JSON object on every line"),
        (b'{"a": 1}\n{"a": \n{"a": 3}\n', "train.jsonl, line 2 is not JSON: Expecting value"),
        (
            b'{"a": 1}\n{"a": "b',
            "train.jsonl, line 2 is not JSON.*; the file ends within the line",
        ),
        (b'{"a": 1}\n{"a": "\xe4"}\n', "train.jsonl, line 2 is not UTF-8: byte 7 is 0xe4"),
        (b'{"a": NaN}\n', "train.jsonl, line 1 is not JSON: NaN is not a JSON number"),
        (b"[" * 100_000 + b"\n", "train.jsonl, line 1 is not JSON: it is nested too deeply"),
        (b'"' + b"a" * (17 * 2**20), "train.jsonl, line 1 is longer than 16 MiB"),
    ],
    ids=["empty", "broken", "cut", "latin-1", "nan", "deep", "long"],
)
def test_a_broken_line_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, content)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=sentence("the dataset file {} cannot be read", "nowhere.jsonl", "No such file"),
    ):
        list(read_lines(tmp_path / "nowhere.jsonl"))
