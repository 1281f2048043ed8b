"""Small pieces of the agent: interfaces, run ids, requests, chunks of files."""

from __future__ import annotations

import pytest

from tests.support.sentences import sentence
from workbench.agent import machine
from workbench.agent.ranks.output import OutputStream, read_chunks
from workbench.agent.ranks.request import RunRequest, check_run_id


def test_interfaces():
    assert machine.interface_of("127.0.0.9") == "lo"
    assert machine.interface_of("-oProxyCommand=x") == ""


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "x" * 200, "a\nb", None, 3])
def test_a_run_id_is_one_plain_name(name):
    with pytest.raises(ValueError, match="run id"):
        check_run_id(name)


def test_a_request_never_shows_its_environment():
    raw = {
        "run": "r",
        "ranks": [{"rank": 0, "pod": "p"}],
        "argv": ["x"],
        "env": {"A": "canary"},
        "later": 1,
    }
    assert "canary" not in repr(RunRequest.from_dict(raw))


def test_chunks_of_files_that_are_not_there_or_grew_shorter(tmp_path):
    (tmp_path / "a.log").write_bytes(b"abc")
    streams = {name: OutputStream(tmp_path / f"{name}.log") for name in ("a", "b")}
    assert read_chunks(streams, {"a": 5}, 100) == {}
    assert read_chunks(streams, {"a": 1}, 1) == {"a": {"offset": 1, "data": "b"}}
    with pytest.raises(
        ValueError, match=sentence("is {}; it must be a whole number, 0 or more", "-1")
    ):
        read_chunks(streams, {"a": -1}, 1)
