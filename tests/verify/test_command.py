"""The table of `workbench verify`: its rows, limits, outcomes and exit codes, without pods."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.base.errors import ConfigError
from workbench.cli import main
from workbench.verify.claims.registry import ROWS, chosen
from workbench.verify.command import Outcome, Report, list_text, try_rows
from workbench.verify.figures import Broken, Cannot
from workbench.verify.pods import Pods
from workbench.verify.row import Row


class Endless:
    """A run that does not end in time."""

    id = "endless"
    paths = SimpleNamespace(logs="logs")

    def __init__(self) -> None:
        self.cancelled = 0

    def wait(self, timeout_s: float, *, progress: bool) -> None:
        assert timeout_s >= 0 and not progress
        raise TimeoutError

    def cancel(self) -> None:
        self.cancelled += 1


def row(name: str, check: Any, *, limit_s: float = 30.0) -> Row:
    return Row("made up", name, "a claim", check, limit_s)


def holds(_pods: Pods) -> str:
    return "0.1 of 1"


def lacks(_pods: Pods) -> str:
    raise Cannot("no CUDA device on the pods")


def breaks(_pods: Pods) -> str:
    raise Broken("loss off by 0.3, at most 0.01 allowed")


def raises(_pods: Pods) -> str:
    raise ValueError("not ours\nat all")


def ends(_pods: Pods) -> str:
    raise SystemExit(3)


def tried(*rows: Row, limit_s: float = 600.0) -> list[Outcome]:
    return try_rows(rows, Pods(Path("/runs/verify-1")), limit_s)


def report(*outcomes: Outcome) -> Report:
    return Report(
        rows=outcomes,
        where="2 pods of place local",
        versions={"torch": "2.13.0"},
        began_s=0.0,
        took_s=12.0,
        folder="/runs/verify-1",
    )


def test_a_row_that_raises_fails_and_the_others_are_still_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [row("one", raises), row("two", ends), row("three", breaks), row("four", lacks)]
    outcomes = tried(*rows, row("five", holds))
    assert [outcome.verdict for outcome in outcomes] == ["failed"] * 3 + [
        "cannot be tried here",
        "held",
    ]
    assert outcomes[0].detail == "ValueError: not ours at all"
    assert "SystemExit" in outcomes[1].detail
    assert outcomes[2].detail == "Broken: loss off by 0.3, at most 0.01 allowed"
    assert outcomes[3].detail == "no CUDA device on the pods"
    assert outcomes[4].detail == "0.1 of 1"
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[1/5] one …" and lines[-1].startswith("[5/5] five: held (0.0 s) 0.1")


def test_a_row_over_its_limit_fails_and_its_run_is_cancelled() -> None:
    run: Any = Endless()

    def waits(pods: Pods) -> str:
        pods.wait(run)
        return "too late"

    slow, after = tried(row("slow", waits), row("next", holds))
    assert (slow.verdict, after.verdict) == ("failed", "held")
    assert slow.detail == "endless was not done in time; see logs"
    assert run.cancelled == 1


def test_a_row_over_its_limit_gets_no_pods() -> None:
    pods = Pods(Path("/runs/verify-1"))
    pods.begin_row(0.0)
    with pytest.raises(TimeoutError, match="over its limit"):
        pods.call(print)


def test_no_row_starts_after_the_time_of_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = tried(row("late", holds), limit_s=1.0)
    assert outcomes[0].verdict == "cannot be tried here"
    assert "no time left" in outcomes[0].detail
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_row_that_had_less_than_its_time_has_not_failed() -> None:
    run: Any = Endless()

    def waits(pods: Pods) -> str:
        pods.wait(run)
        return "too late"

    (late,) = tried(row("late", waits, limit_s=300), limit_s=60.0)
    assert late.verdict == "cannot be tried here"
    assert late.detail == "only 60 s were left for the row, which may take 300"


def test_the_table_has_a_line_for_every_row_and_counts_them() -> None:
    outcomes = tried(row("one", holds), row("two", raises), row("three", lacks))
    made = report(*outcomes)
    lines = made.text.splitlines()
    assert lines[0].split("  ")[0].strip() == "name" and "ran on" in lines[0]
    assert [line.split()[0] for line in lines[2:5]] == ["one", "two", "three"]
    assert "1 claim held, 1 failed, 1 cannot be tried here; 12.0 s" in made.text
    assert "torch 2.13.0" in made.text and "/runs/verify-1" in made.text
    raw = json.loads(json.dumps(made.to_dict()))
    assert raw["counts"] == {"held": 1, "failed": 1, "cannot be tried here": 1}
    assert [each["verdict"] for each in raw["rows"]] == ["held", "failed", "cannot be tried here"]


def test_the_names_are_unique_and_the_claims_short() -> None:
    names = [each.name for each in ROWS]
    assert len(set(names)) == len(names) > 40
    assert all(len(each.claim) <= 60 and each.limit_s <= 300 for each in ROWS)
    listed = list_text(ROWS)
    assert all(name in listed for name in names)


def test_only_chooses_by_name_pattern_and_subject() -> None:
    assert [each.name for each in chosen(["zero1", "bf16-*", "ddp"])] == [
        "ddp",
        "zero1",
        "bf16-ddp",
        "bf16-zero3",
        "bf16-fsdp",
    ]
    assert {each.subject for each in chosen(["kernels"])} == {"kernels"}
    assert chosen([]) == list(ROWS)
    with pytest.raises(ConfigError, match="did you mean 'zero3-offload'"):
        chosen(["zero3-ofload"])


def test_the_command_lists_refuses_and_exits_by_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, object]] = []
    outcomes = tried(row("one", holds), row("two", breaks))

    def verify(rows: list[Row], folder: Path, **options: object) -> Report:
        asked.append({"rows": [each.name for each in rows], "folder": folder, **options})
        return report(*outcomes[: len(rows)])

    json_file = tmp_path / "rows.json"
    assert main(["verify", "--list", "--only", "tf32", "--json", str(json_file)]) == 0
    assert [row["name"] for row in json.loads(json_file.read_text())["rows"]] == ["tf32"]
    assert "tf32 follows fp32" in capsys.readouterr().out
    assert main(["verify", "--only", "nothing"]) == 2
    assert main(["verify", str(tmp_path / "no.json")]) == 2
    assert main(["verify", "--json", str(tmp_path / "no" / "table.json")]) == 2
    assert "make the folder first" in capsys.readouterr().out
    monkeypatch.setattr("workbench.verify.command.verify", verify)
    table = tmp_path / "table.json"
    assert main(["verify", "--only", "ddp", "--json", str(table), "--minutes", "3"]) == 0
    folder = asked[0].pop("folder")
    assert isinstance(folder, Path) and folder.match("runs/verify-*")
    assert asked[0] == {"rows": ["ddp"], "cluster": None, "minutes": 3.0}
    assert json.loads(table.read_text())["counts"]["held"] == 1
    assert "1 claim held, 0 failed" in capsys.readouterr().out
    assert main(["verify", "--only", "ddp", "--only", "tf32"]) == 1
    assert "1 claim held, 1 failed" in capsys.readouterr().out


def test_a_folder_with_content_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("")
    assert main(["verify", "--out", str(tmp_path), "--only", "ddp"]) == 2
    assert "choose a new folder" in capsys.readouterr().out
    assert main(["verify", "--minutes", "nan", "--only", "ddp"]) == 2
    assert "--minutes is nan" in capsys.readouterr().out
