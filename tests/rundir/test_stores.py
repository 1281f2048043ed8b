"""Object stores on a real S3 server: rights, rows, checkpoints and folders, honest and hostile."""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.fakes.hub import TOKEN, hub
from tests.fakes.s3server import SECRET, S3Server, s3_server
from workbench import FineTune
from workbench.base.errors import ConfigError, RunError
from workbench.finetune.data.sources.dataset import dataset_from, prepare
from workbench.finetune.export.folder import Export, export_to_store
from workbench.finetune.submit.prepare import check_early
from workbench.rundir.checkpoints import newest_good, write_manifest
from workbench.rundir.paths import RunPaths
from workbench.rundir.stores.address import check_address, store_variables
from workbench.rundir.stores.checkpoints import (
    checkpoint_of,
    fetch_newest,
    fetch_run,
    is_stored,
    put_checkpoint,
    put_run,
    trim,
)
from workbench.rundir.stores.rights import check_rights
from workbench.rundir.stores.store import Store

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def started() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def server(started: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in started.environment.items():
        monkeypatch.setenv(name, value)
    return started


@pytest.fixture
def store(server: S3Server, request: pytest.FixtureRequest) -> Iterator[Store]:
    """A folder of the test's own in the bucket."""
    with Store(f"s3://bucket/{request.node.name}/run-1") as store:
        yield store


def put(server: S3Server, key: str, data: bytes | str) -> None:
    body = data.encode() if isinstance(data, str) else data
    server.client().put_object(Bucket="bucket", Key=key, Body=body)


def key_of(store: Store, name: str) -> str:
    return store.at(name).removeprefix("s3://bucket/")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ftp://host/x", "the protocol 'ftp' is not known. Allowed: s3://, gs://, hf://"),
        ("file:///etc", "the protocol 'file' is not known"),
        ("s3a://bucket/x", "write s3:// in place of s3a://"),
        ("s3://", "names no bucket"),
        ("s3://bucket/../other", "has the part '..'"),
        ("s3://bucket/a//b", "has the part ''"),
        ("s3://bucket/a\nb", "only printable names"),
        ("s3://bucket/a?versionId=3", "'?', '#' and '*' are not used"),
        ("hf://owner", "names no bucket or repository, as in 'hf://datasets/owner/name"),
        ("s3://" + "b" * 400 + "/x", "names no bucket"),
        ("s3://bucket/" + "k/" * 600 + "x", "more than 1024 bytes"),
    ],
)
def test_an_address_is_refused_by_its_text_alone(address: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_address(address, "checkpoints")
    assert why in str(refused.value)
    assert len(str(refused.value)) < 600


def test_credentials_in_an_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="credentials in the address") as refused:
        FineTune(checkpoints=f"s3://AKIA:{SECRET}@bucket/x")
    assert SECRET not in str(refused.value)


def test_checkpoints_name_a_known_place() -> None:
    assert FineTune(checkpoints="s3://bucket/runs/").checkpoints == "s3://bucket/runs"
    rules = FineTune(checkpoints="s3://bucket/runs", save_steps=3).rules.checkpoints
    assert (rules.brings, rules.meanwhile, rules.store) == (True, True, "s3://bucket/runs")
    assert FineTune(checkpoints="bring").rules.checkpoints.store == ""
    with pytest.raises(ConfigError, match="or the address of a folder in an object store"):
        FineTune(checkpoints="brings")


def test_only_variables_of_the_store_reach_the_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("WANDB_API_KEY", "y")
    assert store_variables("s3://bucket/x")["AWS_ACCESS_KEY_ID"] == "x"
    assert "WANDB_API_KEY" not in store_variables("s3://bucket/x")
    assert "AWS_ACCESS_KEY_ID" not in store_variables("gs://bucket/x")


@slow
def test_rights_are_tried_and_nothing_is_left(server: S3Server) -> None:
    check_rights("s3://bucket/probed", "checkpoints")
    assert server.objects("bucket", "probed") == {}
    with pytest.raises(ConfigError) as refused:
        check_rights("s3://elsewhere/x", "checkpoints")
    assert "checkpoints: s3://elsewhere/x cannot be written to" in str(refused.value)
    assert "the bucket 'elsewhere'" in str(refused.value)


@slow
def test_missing_and_wrong_credentials_name_the_variables(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigError, match="set AWS_PROFILE, or AWS_ACCESS_KEY_ID"):
        check_rights("s3://bucket/x", "checkpoints")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    key, secret = server.reader()
    try:
        with Store(
            "s3://bucket/x", {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
        ) as s:
            assert s.list().kind == "none"
            with pytest.raises(RunError) as refused:
                s.probe()
        words = str(refused.value)
        assert "lack the right to do so in the bucket 'bucket'" in words
        assert ("AWS_PROFILE" in words and "Access Denied" in words) or "AccessDenied" in words
        assert secret not in words
        wrong = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": "b" * 40}
        with Store("s3://bucket/x", wrong) as s, pytest.raises(RunError) as refused:
            s.probe()
        assert "no valid credentials" in str(refused.value)
    finally:
        server.check_rights(False)


@slow
def test_a_silent_store_is_given_up_with_its_endpoint(server: S3Server) -> None:
    away = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    with Store("s3://bucket/x", away) as s, pytest.raises(RunError) as refused:
        s.probe()
    assert "the store does not answer" in str(refused.value)
    assert "http://127.0.0.1:9" in str(refused.value)


def rows(count: int) -> str:
    return "".join(json.dumps({"source": f"q{n}", "target": f"a{n}"}) + "\n" for n in range(count))


@slow
def test_rows_of_every_form_equal_local_rows(server: S3Server, tmp_path: Path) -> None:
    put(server, "forms/rows.jsonl", rows(20))
    put(server, "forms/rows.csv.gz", gzip.compress(b"source,target\n" + b"a,b\n" * 20))
    put(server, "forms/folder/train-00000-of-00002.jsonl", rows(8))
    put(server, "forms/folder/train-00001-of-00002.jsonl", rows(5))
    put(server, "forms/folder/validation.jsonl", rows(3))
    put(server, "forms/folder/README.md", "x" * 100)
    (tmp_path / "rows.jsonl").write_text(rows(20))
    here = prepare(dataset_from(str(tmp_path / "rows.jsonl")), tmp_path / "here")
    there = prepare(dataset_from("s3://bucket/forms/rows.jsonl"), tmp_path / "there")
    assert here.train and there.train
    assert here.train.read_bytes() == there.train.read_bytes()
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["eval.jsonl", "train.jsonl"]
    packed = prepare(dataset_from("s3://bucket/forms/rows.csv.gz"), tmp_path / "packed")
    assert packed.train_rows + packed.eval_rows == 20
    folder = prepare(dataset_from("s3://bucket/forms/folder/"), tmp_path / "folder")
    assert (folder.train_rows, folder.eval_rows) == (13, 3)
    options = {
        "kind": "files",
        "train": ["s3://bucket/forms/folder/train-*.jsonl", str(tmp_path / "rows.jsonl")],
        "eval": "s3://bucket/forms/folder/validation.jsonl",
    }
    several = prepare(dataset_from(options), tmp_path / "several")
    assert (several.train_rows, several.eval_rows) == (33, 3)
    mix = {"kind": "mix", "parts": [{"dataset": "s3://bucket/forms/rows.jsonl"}]}
    assert prepare(dataset_from(mix), tmp_path / "mix").train_rows == 19


@slow
def test_early_checks_ask_the_store_and_copy_nothing(server: S3Server) -> None:
    put(server, "early/rows.jsonl", rows(9))
    job = FineTune(dataset="s3://bucket/early/rows.jsonl", checkpoints="s3://bucket/early-runs")
    check_early(job, gpus=0)
    with pytest.raises(ConfigError, match="there is no object s3://bucket/early/no"):
        check_early(job.replace(dataset="s3://bucket/early/no.jsonl"), gpus=0)
    with pytest.raises(ConfigError, match="checkpoints: s3://nowhere/x cannot be written to"):
        check_early(job.replace(checkpoints="s3://nowhere/x"), gpus=0)


@slow
def test_files_of_a_stored_folder_that_are_not_read_are_named_as_local_ones(
    server: S3Server, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    row = json.dumps({"text": "a", "url": "u"}) + "\n"
    contents = dict.fromkeys(("train.jsonl", "val.jsonl", "test.jsonl", "more.jsonl"), row * 3)
    contents |= {"train.csv": "text,url\na,u\n", "README.md": "Rows.", "notes.txt": "No rows."}
    for name, content in contents.items():
        (local / name).write_text(content)
        put(server, f"unread/{name}", content)
    given = {"kind": "files", "ignore": ["url"]}
    here = prepare(dataset_from(str(local)), tmp_path / "here")
    there = prepare(dataset_from("s3://bucket/unread"), tmp_path / "there")
    assert there.not_read == here.not_read
    assert {"file test.jsonl", "file more.jsonl", "file train.csv"} <= {*there.not_read}
    assert "file README.md" not in there.not_read
    # Options of the dataset stay.
    kept = prepare(dataset_from({**given, "train": "s3://bucket/unread"}), tmp_path / "kept")
    assert (kept.train_rows, kept.eval_rows) == (3, 3)
    assert {*kept.not_read} == {*there.not_read}


@slow
def test_refused_rows_name_the_address(server: S3Server, tmp_path: Path) -> None:
    put(server, "bad/rows.jsonl", '{"source": "a"}\n')
    put(server, "bad/rows.xlsx", b"PK")
    put(server, "bad/notes/README.md", "x")
    for value, why in {
        "s3://bucket/bad/rows.jsonl": "rows.jsonl, line 1",
        "s3://bucket/bad/rows.xlsx": "the dataset file s3://bucket/bad/rows.xlsx is a spreadsheet",
        "s3://bucket/bad/none.jsonl": "there is no object s3://bucket/bad/none.jsonl",
        "s3://bucket/bad/*.csv": "no object fits s3://bucket/bad/*.csv",
        "s3://bucket/bad/notes": "a folder without the rows of a dataset, and has README.md",
        "s3://nowhere/rows.jsonl": "the bucket 'nowhere'",
    }.items():
        with pytest.raises(ConfigError) as refused:
            prepare(dataset_from(value), tmp_path / "out")
        assert why in str(refused.value), value
        assert str(tmp_path) not in str(refused.value)
    with pytest.raises(ConfigError, match="download the archive"):
        dataset_from("s3://bucket/data.tar.bz2")
    with pytest.raises(ConfigError, match="the protocol 'https' is not known"):
        dataset_from("https://host/rows.jsonl")


@slow
def test_the_hub_holds_rows_and_checks_the_right_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        server.rows["train.jsonl"] = rows(9).encode()
        made = prepare(dataset_from("hf://datasets/me/rows@v1/train.jsonl"), tmp_path / "rows")
        assert made.train_rows + made.eval_rows == 9
        server.private["me/model"] = True
        check_rights("hf://me/model/runs", "checkpoints")
        assert [commit["summary"].split()[0] for commit in server.commits] == ["Upload", "Delete"]
        assert server.files == {}
        monkeypatch.setenv("HF_TOKEN", "hf_" + "b2" * 17)
        with pytest.raises(ConfigError) as refused:
            check_rights("hf://me/model/runs", "checkpoints")
    assert "HF_TOKEN, or `hf auth login`" in str(refused.value)
    assert "b2b2" not in str(refused.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gcsfs").mkdir()
    (tmp_path / "gcsfs" / "__init__.py").write_text("raise ImportError('no gcsfs here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="run: pip install gcsfs"):
        check_rights("gs://bucket/x", "checkpoints")


def write_run(root: Path, steps: Mapping[int, bytes]) -> RunPaths:
    """Write a run directory with checkpoints of one rank."""
    paths = RunPaths(root)
    paths.inputs.mkdir(parents=True, exist_ok=True)
    paths.job.write_text('{"job": {}, "ranks": 1}')
    (paths.inputs / "train.jsonl").write_text("row\n")
    for step, content in steps.items():
        part = paths.checkpoints / f"step-{step}" / "pod-0" / "rank-0"
        part.mkdir(parents=True)
        (part / "tensors.safetensors").write_bytes(content)
        write_manifest(part, rank=0, step=step, world_size=1)
    return paths


def upload(store: Store, paths: RunPaths, *steps: int) -> None:
    put_run(store, paths, "run-1")
    for step in steps:
        put_checkpoint(store, paths, checkpoint_of(paths, step))


def manifest_of(server: S3Server, store: Store, step: int) -> dict[str, object]:
    key = key_of(store, f"step-{step}/checkpoint.json")
    content: dict[str, object] = json.loads(server.objects("bucket", key)[key])
    return content


@slow
def test_the_newest_complete_checkpoint_comes_back(
    server: S3Server, store: Store, tmp_path: Path
) -> None:
    paths = write_run(tmp_path / "run", {1: b"one", 2: b"two", 3: b"three", 4: b"four"})
    upload(store, paths, 1, 2, 3)
    # The upload of step 4 was cut off before its manifest.
    put(server, key_of(store, "step-4/pod-0/rank-0/tensors.safetensors"), b"four")
    trim(store, 2)
    assert {name.split("/")[2] for name in server.objects("bucket", key_of(store, ""))} == {
        *("run.json", "job.json", "step-2", "step-3", "step-4")
    }
    target = tmp_path / "target"
    fetch_run(store, target)
    assert (target / "inputs" / "job.json").read_text() == paths.job.read_text()
    digest = hashlib.sha256(b"row\n").hexdigest()
    assert json.loads((target / "inputs.json").read_text()) == {"train.jsonl": {"sha256": digest}}
    notes = fetch_newest(store, target)
    assert notes == ["the checkpoint of step 4 was left out: its upload did not end"]
    checkpoint = newest_good(target)
    assert checkpoint.step == 3
    assert (checkpoint.parts[0] / "tensors.safetensors").read_bytes() == b"three"
    earlier = tmp_path / "earlier"
    fetch_newest(store, earlier, last_step=3)
    assert newest_good(earlier).step == 2


@slow
def test_an_upload_is_not_repeated(server: S3Server, store: Store, tmp_path: Path) -> None:
    paths = write_run(tmp_path / "run", {1: b"one"})
    upload(store, paths, 1)
    assert is_stored(store, checkpoint_of(paths, 1))
    key = key_of(store, "step-1/checkpoint.json")
    put(server, key, b"{}")
    assert not is_stored(store, checkpoint_of(paths, 1))


HOSTILE = {
    "a name that leads out": ({"../../../x/rank-0/evil": 4}, "is not the file of a rank's part"),
    "an absolute name": ({"/etc/rank-0/evil": 4}, "is not the file of a rank's part"),
    "a name with a NUL": ({"pod\0/rank-0/evil": 4}, "is not the file of a rank's part"),
    "a folder too deep": ({"pod-0/x/rank-0/evil": 4}, "is not the file of a rank's part"),
    "a huge size": ({"pod-0/rank-0/evil": 1 << 62}, "bytes and was written with"),
    "a negative size": ({"pod-0/rank-0/evil": -1}, "greater than or equal to 0"),
    "a missing object": ({"pod-0/rank-0/gone": 4}, "has None bytes and was written with 4"),
    "another digest": ({"pod-0/rank-0/evil": 4}, "the checksum of pod-0/rank-0/evil is wrong"),
    "no file": ({}, "at least 1 item"),
}


@slow
def test_a_hostile_manifest_is_left_out(server: S3Server, store: Store, tmp_path: Path) -> None:
    for step, (names, _) in enumerate(HOSTILE.values(), 1):
        put(server, key_of(store, f"step-{step}/pod-0/rank-0/evil"), b"evil")
        files = {name: {"bytes": size, "sha256": "0" * 64} for name, size in names.items()}
        manifest = json.dumps({"step": step, "files": files})
        put(server, key_of(store, f"step-{step}/checkpoint.json"), manifest)
    with pytest.raises(ConfigError) as refused:
        fetch_newest(store, tmp_path / "target")
    words = str(refused.value)
    assert f"there is no checkpoint to resume from in {store.address}" in words
    for step, (what, (_, why)) in enumerate(HOSTILE.items(), 1):
        _, _, after = words.partition(f"the checkpoint of step {step} was left out: ")
        assert why in after.partition("; the checkpoint")[0], what
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@slow
def test_a_damaged_manifest_falls_back_to_the_checkpoint_before(
    server: S3Server, store: Store, tmp_path: Path
) -> None:
    paths = write_run(tmp_path / "run", {1: b"one", 2: b"two", 3: b"three"})
    upload(store, paths, 1, 2, 3)
    put(server, key_of(store, "step-3/checkpoint.json"), "[" * 5000)
    put(server, key_of(store, "step-2/pod-0/rank-0/tensors.safetensors"), b"TWO")
    notes = fetch_newest(store, tmp_path / "target")
    assert len(notes) == 2
    assert "is not JSON" in notes[0]
    assert "the checksum of pod-0/rank-0/tensors.safetensors is wrong" in notes[1]
    assert newest_good(tmp_path / "target").step == 1


@slow
def test_an_address_without_a_run_names_the_runs_below(
    server: S3Server, store: Store, tmp_path: Path
) -> None:
    upload(store, write_run(tmp_path / "run", {1: b"one"}), 1)
    above = store.address.rpartition("/")[0]
    with Store(above) as other, pytest.raises(ConfigError) as refused:
        fetch_run(other, tmp_path / "target")
    assert f"name one of its runs: {store.address}" in str(refused.value)
    put(server, key_of(store, "job.json"), '{"job": {"model": "other"}}')
    with pytest.raises(RunError, match=r"the checksum of .*job\.json is wrong"):
        fetch_run(store, tmp_path / "target")


def write_model(folder: Path) -> Export:
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(name)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    return Export(folder=folder, files=files, dtype="fp32", family="causal")


@slow
def test_a_model_is_uploaded_with_its_configuration_last(server: S3Server) -> None:
    made = export_to_store("s3://bucket/models/a/", write_model)
    assert made.folder == "s3://bucket/models/a"
    assert "s3://bucket/models/a" in made.start_lines["fsspec"]
    assert made.start_lines["vLLM"] == "vllm serve a"
    objects = server.objects("bucket", "models/a/")
    assert {key.rpartition("/")[2]: body.decode() for key, body in objects.items()} == {
        name: name for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    with pytest.raises(ConfigError, match=r"s3://bucket/models/a is not empty \(config\.json"):
        export_to_store("s3://bucket/models/a", write_model)


@slow
def test_an_interrupted_export_can_be_repeated(server: S3Server) -> None:
    put(server, "models/b/.uploading", json.dumps(["model.safetensors", "old.safetensors"]))
    put(server, "models/b/old.safetensors", "half")
    export_to_store("s3://bucket/models/b", write_model)
    names = {key.rpartition("/")[2] for key in server.objects("bucket", "models/b/")}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    # Objects of others are not replaced, even beside an interrupted upload.
    put(server, "models/c/.uploading", json.dumps(["model.safetensors"]))
    put(server, "models/c/thesis.pdf", "mine")
    with pytest.raises(ConfigError, match=r"is not empty \(thesis\.pdf\)"):
        export_to_store("s3://bucket/models/c", write_model)


@slow
def test_a_failed_upload_leaves_the_model_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with s3_server() as own:
        for name, value in own.environment.items():
            monkeypatch.setenv(name, value)

        def write(folder: Path) -> Export:
            made = write_model(folder)
            own.stop()
            return made

        with pytest.raises(RunError) as failed:
            export_to_store("s3://bucket/models/d", write)
    words = str(failed.value)
    assert "call export('s3://bucket/models/d') again" in words
    folder = Path(words.partition("is whole in ")[2].partition(";")[0])
    assert folder.is_relative_to(tmp_path)
    assert (folder / "config.json").read_text() == "config.json"
