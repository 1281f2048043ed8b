"""Files of rows in every format, parted, limited and mixed; refusals name file, line, columns."""

from __future__ import annotations

import csv
import json
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.hub import hub
from tests.support.forkedruns import Plan, run_all
from tests.support.sentences import sentence
from workbench.base import entries
from workbench.base.errors import ConfigError
from workbench.finetune.data.sources.dataset import Hub, Mix, RowFiles, dataset_from, prepare
from workbench.finetune.data.sources.read import read_rows
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.job.finetune import FineTune
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec

Rows = Sequence[Mapping[str, Any]]
ROWS: Rows = [
    {
        "article": f'Größe {n}, "so"\n\tor\u2028 [{n}]',
        "highlights": str(n) if n % 3 else f"a, b; {n}",
        "id": n,
        "score": n / 4,
    }
    for n in range(40)
]
COLUMNS = {"source": "article", "target": "highlights"}


def write_text(path: Path, rows: Rows, *, above: str = "", delimiter: str = ",") -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(above)
        match path.suffix:
            case ".jsonl":
                file.writelines(json.dumps(row) + "\n" for row in rows)
            case ".json":
                json.dump(rows, file, indent=2, ensure_ascii=False)
            case _:
                own = "\t" if path.suffix == ".tsv" else delimiter
                to = csv.DictWriter(file, rows[0], delimiter=own)
                to.writeheader()
                to.writerows(rows)


def prepared(value: object, folder: Path) -> tuple[bytes, bytes]:
    made = prepare(dataset_from(value), folder)  # type: ignore[arg-type]
    assert made.train is not None and made.eval is not None
    assert sorted(path.name for path in folder.iterdir()) == ["eval.jsonl", "train.jsonl"]
    assert made.train.read_bytes().count(b"\n") == made.train_rows
    return made.train.read_bytes(), made.eval.read_bytes()


def options(path: Path, **more: object) -> dict[str, object]:
    return {"kind": "files", "train": str(path), "eval_share": 0.1, "columns": COLUMNS, **more}


def targets(lines: bytes) -> list[str]:
    return [json.loads(line)["target"] for line in lines.splitlines()]


def test_the_same_rows_as_text_are_the_same_bytes(tmp_path: Path) -> None:
    made = set()
    for end in ("jsonl", "json", "csv", "tsv"):
        write_text(tmp_path / f"rows.{end}", ROWS)
        made.add(prepared(options(tmp_path / f"rows.{end}"), tmp_path / f"of-{end}"))
    (tmp_path / "in-an-object.json").write_text(json.dumps({"version": 2, "data": ROWS}))
    made.add(prepared(options(tmp_path / "in-an-object.json"), tmp_path / "of-object"))
    (tmp_path / "lines.json").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    made.add(prepared(options(tmp_path / "lines.json"), tmp_path / "of-lines"))
    # A spreadsheet's separator may stand above the names, and need not be a usual one.
    for number, above in enumerate(("sep=;\r\n", '"sep=~"\n')):
        table = tmp_path / f"separated-{number}.csv"
        write_text(table, ROWS, above=above, delimiter=above.strip('"\r\n')[-1])
        made.add(prepared(options(table), tmp_path / f"of-separated-{number}"))
    ((train, evaluation),) = made
    assert sorted(targets(train) + targets(evaluation)) == sorted(row["highlights"] for row in ROWS)
    assert len(targets(evaluation)) == 4
    assert json.loads(train.splitlines()[0])["source"].startswith("Größe")


def test_turns_of_a_chat_stand_in_a_table_as_json(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": 'a, "b"'}, {"role": "assistant", "content": "c"}]
    write_text(tmp_path / "rows.jsonl", [{"talk": turns}] * 20)
    write_text(tmp_path / "rows.csv", [{"talk": json.dumps(turns), "id": "5"}] * 20)
    made = {
        prepared(options(tmp_path / f"rows.{end}", columns={"messages": "talk"}), tmp_path / end)
        for end in ("jsonl", "csv")
    }
    ((train, _),) = made
    assert json.loads(train.splitlines()[0])["messages"][0] == turns[0]


@pytest.mark.slow
def test_parquet_and_saved_datasets_are_the_same_bytes_as_lines(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list(
        [{**row, "score": float("nan"), "at": b"\xff"} for row in ROWS]
    )
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    write_text(tmp_path / "rows.jsonl", ROWS)
    as_lines = prepared(options(tmp_path / "rows.jsonl"), tmp_path / "a")
    assert prepared(options(tmp_path / "rows.parquet"), tmp_path / "b") == as_lines
    assert prepared(options(tmp_path / "saved"), tmp_path / "c") == as_lines
    # Every column of a table has a place in every row: what is empty does not count.
    mixed = [
        {"instruction": "a", "output": "b"},
        {"query": "c", "response": "d"},
        {"instruction": "e", "output": "f"},
    ]
    every = [
        {**dict.fromkeys(("instruction", "output", "query", "response")), **row} for row in mixed
    ]
    datasets.Dataset.from_list(every).to_parquet(tmp_path / "mixed.parquet")
    write_text(tmp_path / "mixed.jsonl", mixed)
    assert prepared(str(tmp_path / "mixed.parquet"), tmp_path / "d") == prepared(
        str(tmp_path / "mixed.jsonl"), tmp_path / "e"
    )
    with pytest.raises(
        ConfigError,
        match=r"rows\.parquet, row 1: the column for 'target', 'highlight' is not known: did",
    ):
        prepared(
            options(tmp_path / "rows.parquet", columns={**COLUMNS, "target": "highlight"}),
            tmp_path / "f",
        )
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"broken\.parquet cannot be read: ArrowInvalid: "):
        prepared(str(tmp_path / "broken.parquet"), tmp_path / "g")
    assert next(read_rows(tmp_path / "rows.parquet", COLUMNS))[0] == "rows.parquet, row 1", (
        "the rest is left unread"
    )


def test_a_share_and_a_limit(tmp_path: Path) -> None:
    write_text(tmp_path / "rows.jsonl", ROWS)
    path = tmp_path / "rows.jsonl"
    train, evaluation = prepared(options(path), tmp_path / "a")
    assert prepared(options(path), tmp_path / "b") == (train, evaluation)
    assert prepared(options(path, seed=1), tmp_path / "c")[1] != evaluation
    train, evaluation = prepared(options(path, limit=9), tmp_path / "d")
    assert (len(targets(train)), len(targets(evaluation))) == (9, 1)
    assert set(targets(train) + targets(evaluation)) == {row["highlights"] for row in ROWS[:10]}
    apart = {"kind": "files", "train": str(path), "eval": str(path), "limit": 3, "columns": COLUMNS}
    train, evaluation = prepared(apart, tmp_path / "e")
    assert (len(targets(train)), len(targets(evaluation))) == (3, 40)
    write_text(path, [{"source": "a", "target": "b"}] * 20)
    assert [len(targets(part)) for part in prepared(str(path), tmp_path / "f")] == [19, 1]


def test_globs_lists_and_folders(tmp_path: Path) -> None:
    names = (
        "train-00000-of-00002.jsonl",
        "train-00001-of-00002.jsonl",
        "validation.csv",
        "test.csv",
        "train.csv.bak",
    )
    for number, name in enumerate(names):
        write_text(
            tmp_path / name, [{"source": f"{number}{n}", "target": str(number)} for n in range(3)]
        )
    train, evaluation = prepared(str(tmp_path), tmp_path / "out" / "a")
    assert (targets(train), targets(evaluation)) == (["0"] * 3 + ["1"] * 3, ["2"] * 3)
    value = {
        "kind": "files",
        "train": str(tmp_path / "train-*"),
        "eval": [str(tmp_path / name) for name in names[2:4]],
    }
    train, evaluation = prepared(value, tmp_path / "out" / "b")
    assert (targets(train), targets(evaluation)) == (["0"] * 3 + ["1"] * 3, ["2"] * 3 + ["3"] * 3)


def test_rows_that_will_find_no_room_are_named_before_they_are_read(tmp_path: Path) -> None:
    for name in ("part-0.jsonl", "part-1.jsonl"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(4 << 40)  # without blocks on the disk
    rows: dict[str, Any] = {"kind": "files", "train": str(tmp_path / "*.jsonl")}
    told = r"have 8192\.0 GiB, and the check writes about 16384\.0 GiB to .*, where .* GiB are free"
    with pytest.warns(RuntimeWarning, match=told), pytest.raises(ConfigError, match="line 1"):
        prepare(dataset_from(rows), tmp_path / "run")
    # A part of the rows may be small.
    with pytest.raises(ConfigError, match="line 1"):
        prepare(dataset_from({**rows, "limit": 3}), tmp_path / "run")


def test_a_mix_takes_rows_by_weight_and_all_evaluation_rows(tmp_path: Path) -> None:
    for name, rows in (("a", 40), ("b", 10)):
        write_text(
            tmp_path / f"{name}.jsonl",
            [{"source": str(n), "target": f"{name}{n}"} for n in range(rows)],
        )
    parts = [{"dataset": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    train, evaluation = prepared({"kind": "mix", "parts": parts}, tmp_path / "all")
    assert len(targets(train)) == 38 + 9
    assert len({*targets(train), *targets(evaluation)}) == 50
    weighted = {"kind": "mix", "parts": [{**parts[0], "weight": 1}, {**parts[1], "weight": 3}]}
    train, evaluation = prepared(weighted, tmp_path / "weighted")
    assert prepared(weighted, tmp_path / "again") == (train, evaluation)
    assert "".join(target[0] for target in targets(train)) == "abbbabbbabbb", (
        "dealt evenly, each part in its order"
    )
    assert len(set(targets(train))) == 12
    assert len(targets(evaluation)) == 3
    assert prepared({**weighted, "seed": 1}, tmp_path / "other")[0] != train
    mini = {"dataset": {"kind": "wikisql-mini", "train_rows": 5, "eval_rows": 2}}
    made = prepare(dataset_from({"kind": "mix", "parts": [mini, parts[1]]}), tmp_path / "mini")
    assert (made.train_rows, made.eval_rows, made.tables is not None) == (14, 3, True)
    assert isinstance(dataset_from(weighted), Mix)


def test_a_long_list_is_read_item_by_item(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = json.dumps({"source": "x" * 2000, "target": "y"})
    path.write_text(f"[{','.join([row] * 12_000)}]")
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(path, {})) == 12_000
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20 < path.stat().st_size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            '[{"source": "a", "target": "b"},\n {"source": "a", "target": "b"} x]',
            sentence("stands where {} must", "a.json, line 2: 'x'"),
        ),
        (
            "a.json",
            '[{"source": "a",\n "target": "b"',
            sentence("the item is not JSON", "a.json, line 1"),
        ),
        (
            "a.json",
            '[{"source": "a", "target": "b"}',
            sentence("the file ends within the list: was the file copied whole?"),
        ),
        (
            "a.json",
            '[{"source": "a", "target": "b"}] []',
            sentence("there is text behind the list"),
        ),
        (
            "a.json",
            '{"train": [1], "test": [2]}',
            sentence("Write every list into a separate file", 2),
        ),
        ("a.json", "[[1]]", sentence("is {}; it must be an object", "line 1", "the line")),
        (
            "a.json",
            "[" * 1000,
            sentence("line {}: {}; a list of objects is needed, as in [{…}, …]", "a.json", 1),
        ),
        ("a.json", "[NaN]", sentence("is not a JSON number", "NaN")),
        (
            "a.csv",
            "source,target\na,b\nc\n",
            sentence("has {} cells, and the header names {} columns", "a.csv, line 3", 1, 2),
        ),
        (
            "a.csv",
            "sep=;\nsource;target\na;b\nc\n",
            sentence("has {} cells, and the header names {} columns", "a.csv, line 4", 1, 2),
        ),
        (
            "a.csv",
            'source,target\na,"b\nc',
            sentence("line {}: {}; is a quote missing?", "a.csv", 2, "unexpected end of data"),
        ),
        (
            "a.csv",
            "source,source\na,b\n",
            sentence(
                "{}, line {}: two columns are called {}; give them separate names",
                "a.csv",
                1,
                "source",
            ),
        ),
        (
            "a.csv",
            "source;titel\na;b\n",
            sentence(
                "no known form of a row has the columns {}.", "a.csv, line 2", "'source', 'titel'"
            ),
        ),
        (
            "a.csv",
            "question,sql\na,{b}\n",
            sentence("is not JSON", "a.csv, line 2: sql"),
        ),
        (
            "a.csv",
            "source,target\n",
            sentence("the dataset file {} has no row; write at least 1 row"),
        ),
        (
            "a.csv",
            "source,target\na,\udcff\n",
            sentence("the dataset file {} is not UTF-8"),
        ),
        (
            "a.csv",
            "source,target\na,b\n",
            sentence("too few to hold a share out to evaluate on", 1),
        ),
        (
            "a.tsv",
            "body\ttitle\na\tb\n",
            sentence(
                "no known form of a row has the columns {}.", "a.tsv, line 2", "'body', 'title'"
            ),
        ),
    ],
)
def test_a_broken_file_names_the_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        prepare(dataset_from(str(tmp_path / name)), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"eval_share": 0},
            sentence("and less than", "eval_share is 0", "a number more than 0", "1 or None")
            + sentence("it must be"),
        ),
        (
            {"eval_share": 1.0},
            sentence("it must be", "eval_share is 1.0", "a number"),
        ),
        (
            {"eval": "FOLDER/rows.csv", "eval_share": 0.5},
            sentence("dataset eval_share holds rows out of train"),
        ),
        (
            {"limit": 0},
            "limit is 0; it must be a number of rows, at least 1, or a share such as '10%'",
        ),
        (
            {"columns": {"sorce": "a"}},
            sentence("dataset columns: the field", "sorce", "source")
            + sentence("is not known")
            + sentence(": did you mean '{}'?"),
        ),
        (
            {"columns": {"source": "a"}},
            sentence("also of one whose column has the field's name", "source"),
        ),
        (
            {"columns": {"source": 1, "target": "a"}},
            sentence("an object of a row's fields and columns", "columns is"),
        ),
        (
            {"train": "FOLDER/row.csv"},
            sentence("dataset {}: there is no file {}{}; paths count from", "row.csv", "rows.csv")
            + sentence("(did you mean {}?)"),
        ),
        (
            {"train": "FOLDER/*.parquet"},
            sentence("dataset {}: there is no file {}{}; paths count from", "*.parquet"),
        ),
        (
            {"train": ["FOLDER/rows.csv", "FOLDER"]},
            sentence("dataset {}: {} is a folder, and not a saved dataset", "name", "rows.csv"),
        ),
        (
            {"kind": "mix", "parts": []},
            sentence('a list of objects: {"dataset": …, "weight": …}', "parts is")
            + sentence("it must be"),
        ),
        (
            {"kind": "mix", "parts": [{"dataset": "FOLDER/rows.csv", "wieght": 1}]},
            sentence("option {} is not known", "wieght"),
        ),
        (
            {"kind": "mix", "parts": [{"dataset": "FOLDER/gone.csv"}]},
            sentence("a relative path counts from the current folder", "gone.csv"),
        ),
        (
            {
                "kind": "mix",
                "parts": [{"dataset": "wikisql-mini", "weight": 1}, {"dataset": "wikisql-mini"}],
            },
            sentence("some have a weight and some have none"),
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    write_text(tmp_path / "rows.csv", ROWS)
    base = {} if "kind" in changed else {"kind": "files", "train": "FOLDER/rows.csv"}
    value = json.loads(json.dumps({**base, **changed}).replace("FOLDER", str(tmp_path)))
    with pytest.raises(ConfigError, match=message):
        dataset_from(value)


def test_a_record_is_read_back(tmp_path: Path) -> None:
    write_text(tmp_path / "rows.csv", ROWS)
    files = dataset_from(options(tmp_path / "rows.csv"))
    assert (
        dataset_from(files.to_dict())
        == files
        == RowFiles(**{k: v for k, v in options(tmp_path / "rows.csv").items() if k != "kind"})
    )  # type: ignore[arg-type]
    mix = Mix(parts=[{"dataset": str(tmp_path / "rows.csv"), "weight": 2}])  # type: ignore[list-item]
    assert dataset_from(json.loads(json.dumps(mix.to_dict()))) == mix


@pytest.mark.long
def test_a_hub_dataset_is_asked_for_its_splits_and_columns_before_pods_load_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    write_text(folder / "train.csv", ROWS)
    hub = {"kind": "hub", "name": str(folder)}
    with pytest.raises(
        ConfigError,
        match=sentence(
            "or hold rows out of the first with eval_share=0.05",
            "validation",
            "train",
            "eval_share=0.05",
        ),
    ):
        prepare(dataset_from(hub), tmp_path / "out")
    with pytest.raises(
        ConfigError,
        match=r"split train, row 0: the column for 'source', 'artcle' .* mean 'article'",
    ):
        columns = {**COLUMNS, "source": "artcle"}
        prepare(dataset_from({**hub, "eval_share": 0.1, "columns": columns}), tmp_path / "out")
    value = {**hub, "eval_share": 0.1, "columns": COLUMNS, "limit": 9}
    made = prepare(dataset_from(value), tmp_path / "out")
    assert (made.train, made.hub) == (None, Hub.from_dict(value).model_dump())
    # A part of a mix is read here, and has the rows that pods and a file would have.
    read = prepared({"kind": "mix", "parts": [{"dataset": value}]}, tmp_path / "mixed")
    assert read == prepared(options(folder / "train.csv", limit=9), tmp_path / "file")
    assert made.hub is not None
    from workbench.finetune.data.training.rows import (
        load,  # torch, which other tests here do without
    )

    rows = load(None, None, made.hub)
    assert [[row.target for row in part] for part in (rows.train, rows.eval)] == [
        targets(part) for part in read
    ]


@pytest.mark.long
def test_a_dataset_of_the_hub_is_asked_over_http_before_a_run_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "HF_HUB_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "HF_TOKEN",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(
        "workbench.finetune.data.sources.hub._REMOTE_S", 300.0
    )  # this machine may be busy
    with hub() as held:
        monkeypatch.setenv("HF_ENDPOINT", held.url)
        held.rows = {
            f"{split}.jsonl": json.dumps({**ROWS[0], "sumary": "s"}).encode() + b"\n"
            for split in ("train", "test")
        }
        # A revision of one's own: of `main`, `datasets` asks another host for what it has exported.
        value = {"kind": "hub", "name": "me/rows", "revision": "v1", "eval_split": "test"}

        def made(**options: object) -> Mapping[str, Any]:
            job = FineTune(dataset={**value, **options})
            run = prepare_run(
                RunSpec(job=job, cluster=ClusterSpec()), root=tmp_path / f"run-{len(options)}"
            )
            return dict(json.loads(run.paths.job.read_text()))

        with pytest.raises(
            ConfigError,
            match=r"me/rows, split train, row 0: the column for 'source', 'artcle' .*'article'",
        ):
            made(columns={**COLUMNS, "source": "artcle"})
        assert not list(tmp_path.glob("run-*")) and any(
            "train.jsonl" in line for line in held.asked
        )
        assert made(columns=COLUMNS)["hub"]["columns"] == COLUMNS
        # Without columns, the nearest names are named;
        # what others may read alone is left to the pods.
        held.rows = dict.fromkeys(held.rows, b'{"dialogue": "a", "sumary": "b", "id": 3}\n')
        with pytest.raises(
            ConfigError,
            match=r"row 0: no known form .*'dialogue', 'sumary', 'id'\. Did you mean 'summary' for",
        ):
            made()
        value["name"] = "you/rows"
        assert made(eval_share=0.1, seed=1, limit=9)["hub"]["name"] == "you/rows"


def test_a_hub_that_cannot_be_reached_from_here_is_left_to_the_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = prepare(dataset_from("wikisql"), tmp_path / "out")
    assert (made.hub is not None, made.unasked) == (True, "HF_HUB_OFFLINE is set")
    monkeypatch.setattr(entries, "ROW_STREAM", "no_such_module")
    made = prepare(dataset_from({"kind": "hub", "name": str(tmp_path)}), tmp_path / "out")
    assert (
        made.hub is not None
        and "cannot be read: " in made.unasked
        and "no_such_module" in made.unasked
    )
    with pytest.raises(
        ConfigError, match=r"the dataset file .*a\.parquet cannot be read: .*no_such"
    ):
        list(read_rows(tmp_path / "a.parquet", {}))


@pytest.mark.long
def test_the_same_rows_in_four_formats_give_the_same_losses_to_the_digit(tmp_path: Path) -> None:
    import datasets

    rows = [{"article": row.source, "highlights": row.target} for row in mini_rows(0, 60)]
    plans = []
    for end in ("jsonl", "json", "csv", "parquet"):
        root = tmp_path / end
        root.mkdir()
        plans.append(Plan(root))
        file = tmp_path / f"rows.{end}"
        if end == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(file)
        else:
            write_text(file, rows)
        prepare(dataset_from(options(file)), root)
        plans[-1].add("run", 1, technique="single", max_steps=4, profile_step=0)
    first, *others = (ran["run"] for ran in run_all(*plans))
    losses = first.curve("loss")
    assert len(set(losses)) == 4, first.stderr()
    (end,) = first.data("end")
    for other in others:
        assert other.curve("loss") == losses
        assert other.data("end")[0]["eval_loss"] == end["eval_loss"]
