"""A run has the same record whatever its environment holds, and a secret is in none of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import tries
from tests.support.scripts import script_job
from tests.support.writtenrun import write_run
from workbench import FineTune, LocalPods, PodSpec, Script
from workbench.base.files import read_json
from workbench.base.redact import Redactor, is_secret
from workbench.rundir.events import MARK, STATE_EVENTS, Event, read_events
from workbench.rundir.journal import Journal
from workbench.rundir.output.collect import Collector
from workbench.rundir.output.cutter import EventCutter
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.state import RunState

NAMES = (
    *("KEY", "HF_TOKEN", "DB_PASSWORD", "DB_AUTH", "WANDB_API_KEY", "X_TOKEN", "MY_SETTING"),
    *("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "AUTHOR", "SORT_KEY", "MAX_CONNECTIONS"),
)
JOBS = (
    FineTune(technique="zero3-offload", max_source_length=2048, per_device_train_batch_size=4),
    FineTune(model="tiny-llama", technique="ddp", peft="lora", lora={"r": 8}, max_steps=1),
    script_job(path="/home/me/train.py", launcher="ssh", requirements=["nltk==3.9.1"]),
)
EVENTS: tuple[dict[str, object], ...] = (
    {"kind": "phase", "name": "loading model", "done": 1, "total": 2},
    {"kind": "start", "model": "tiny-t5", "family": "t5", "world_size": 2},
    *({"kind": "step", "step": step, "loss": 1000.0} for step in (998, 999, 1000, 1001)),
    {"kind": "eval", "step": 1000, "eval_loss": 2048, "metrics": {"exact_match": 0.5}},
    {"kind": "memory", "step": 1000, "rss_gib": 1.0},
)


def spec_of(env: dict[str, str], job: FineTune | Script, *, on_pods: bool) -> RunSpec:
    pods = PodSpec(env=env if on_pods else {})
    cluster = ClusterSpec(backend=LocalPods().to_dict(), pods=pods, count=2)
    return RunSpec(cluster=cluster, job=job if on_pods else job.replace(env=env))


def lines_of() -> bytes:
    lines = [json.dumps({"time_s": 1.0 + n, "rank": 0, **e}) for n, e in enumerate(EVENTS)]
    return "".join(f"{MARK}{line}\n" for line in lines).encode()


def leaves(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    elif value is not None:
        yield str(value) if isinstance(value, str) else json.dumps(value)


WORDS = sorted(
    {
        *(leaf for job in JOBS for leaf in leaves(spec_of({}, job, on_pods=True).to_dict())),
        *(leaf for event in EVENTS for leaf in leaves(dict(event))),
        *("true", "false", "null", "succeeded", "running", "time_s", "rank", "all", "step", "NaN"),
    }
    - {""}
)


@given(
    env=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(WORDS), min_size=1, max_size=3),
    job=st.sampled_from(JOBS),
    on_pods=st.booleans(),
)
@tries(150)
def test_a_spec_loads_again_as_it_was(
    env: dict[str, str], job: FineTune | Script, on_pods: bool
) -> None:
    written = json.loads(json.dumps(spec_of(env, job, on_pods=on_pods).to_dict()))
    hidden = {name: f"${{{name}}}" for name in env}  # references, so no secret is known
    expected = json.loads(json.dumps(spec_of(hidden, job, on_pods=on_pods).to_dict()))
    assert RunSpec.from_dict(written) == RunSpec.from_dict(expected)


def test_events_states_and_logs_are_the_same_for_every_word(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    plain = recorded(tmp_path_factory.mktemp("plain"), Redactor())
    assert len(plain[0]) == len(EVENTS)
    for number, word in enumerate(WORDS):
        redact = Redactor({"X_TOKEN": word, "KEY": word})
        assert recorded(tmp_path_factory.mktemp(f"run-{number}"), redact) == plain, word


def recorded(folder: Path, redact: Redactor) -> tuple[list[Event], dict[str, object], int]:
    """Return events and state of a run, and the events that another keeper finds in the log."""
    paths = write_run(folder).paths
    paths.events.unlink(missing_ok=True)
    collector = Collector(paths, [0], redact)
    journal = Journal(paths, redact)
    chunk = {"offset": 0, "data": lines_of().decode("latin-1")}
    for event in collector.take({"attempt-0/rank-0.stdout.log": chunk}):
        journal.event(event)
    journal.state(RunState.RUNNING)
    state = read_json(paths.state)
    log = paths.rank_log(0, 0, "stdout").read_bytes()
    again = [event.data for event in EventCutter(0, 0, STATE_EVENTS).feed(log)]
    events = list(read_events(paths.events))
    assert [event.data for event in events] == again
    return events, {**state, "time_s": 0}, len(log)


def test_a_run_knows_no_secrets_of_the_run_before_it() -> None:
    cluster = Redactor({"PGPASS": "pods-a1b2c3"})
    first = cluster.of_run({"KEY": "step"}, {"KEY": "store-d4e5f6"})
    second = cluster.of_run({"KEY": "loss"})
    text = "step loss pods-a1b2c3 store-d4e5f6"
    assert first(text) == "**** loss *********** ************"
    assert second(text) == "step **** *********** store-d4e5f6"
    assert cluster(text) == "**** **** *********** ************"


@given(
    data=st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    # Half of a surrogate pair is a byte of another encoding, as of PGPASS in Latin-1.
    env=st.dictionaries(
        st.sampled_from(NAMES),
        st.text(st.characters() | st.sampled_from("\ud800\udce4"), min_size=1),
        max_size=3,
    ),
)
@tries(150)
def test_masking_never_raises_and_keeps_the_form(data: object, env: dict[str, str]) -> None:
    redact = Redactor(env)
    masked = redact.json({"a": data, "kind": data})
    assert form(masked) == form({"a": data, "kind": data})
    redact(str(data))
    redact.blob(f"{MARK}{json.dumps(data)}\n{data}".encode("utf-8", "replace"), MARK)


def test_a_secret_in_latin_1_is_masked_in_a_log() -> None:
    redact = Redactor({"PGPASS": os.fsdecode(b"p\xe4ssword9")})
    assert redact.blob(b"login p\xe4ssword9") == b"login *********"


def form(value: object) -> object:
    if isinstance(value, dict):
        return sorted((len(key), repr(form(inner))) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return [form(each) for each in value]
    return len(value) if isinstance(value, str) else repr(value)


@pytest.mark.parametrize(
    "secret", ["q7Zk29xLmW", "s3cr3t-9f8e7d6c", 'p"w\\9x!k2', "hf_" + "aB3" * 8]
)
@pytest.mark.parametrize("key", ["message", "kind", "note", "path", "name", "metrics"])
def test_a_real_secret_is_in_no_value(secret: str, key: str) -> None:
    assert is_secret("DB_PASSWORD", secret)
    redact = Redactor({"DB_PASSWORD": secret})
    shown = redact.json({key: f"failed: {secret}", "list": [{key: secret}], f"x {secret}": 1})
    assert secret not in json.dumps(shown) and json.dumps(secret)[1:-1] not in json.dumps(shown)
    line = f"{MARK}{json.dumps({'kind': 'note', key: secret})}\n".encode()
    masked = redact.blob(line, MARK)
    assert len(masked) == len(line) and json.loads(masked[len(MARK) :])["kind"]
    assert json.dumps(secret)[1:-1].encode() not in masked


@pytest.mark.parametrize(
    "text", ["no JSON: opensesame-7", '{"note": "opensesame-7', "[opensesame-7]"]
)
def test_a_marked_line_that_is_no_json_is_masked_as_text(text: str) -> None:
    masked = Redactor({"PGPASS": "opensesame-7"}).blob(f"{MARK}{text}\n".encode(), MARK)
    assert b"opensesame" not in masked


def test_a_secret_beside_its_key_is_masked_as_in_a_line() -> None:
    shown = Redactor().json(
        {"api_key": "a1b2c3d4e5", "password": "a1b2c3d4e5", "step": "a1b2c3d4e5"}
    )
    assert shown == {"api_key": "*" * 10, "password": "*" * 10, "step": "a1b2c3d4e5"}


def test_a_value_that_is_nested_too_deeply_is_left_out() -> None:
    deep: object = "end"
    for _ in range(5000):
        deep = [deep]
    assert Redactor({"X_TOKEN": "a1b2c3"}).json({"deep": deep})["deep"]
