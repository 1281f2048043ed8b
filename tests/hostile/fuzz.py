"""Seeded mutations of all bytes that other people write, and the parsers that read the bytes.

No process is started. `PYTHONPATH=tests python -m tests.hostile.fuzz 20000 [SEED]` prints the
tracebacks.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tests.rundir.test_damaged import whole_run
from tests.support.examplefolder import example_folder
from tests.support.wrong import WRONG, places, replaced
from workbench.agent.ranks.request import RunRequest
from workbench.base.display_protocol import as_text
from workbench.base.errors import WorkbenchError
from workbench.base.messages import lines, rpc
from workbench.base.messages.server import Requests
from workbench.base.redact import Redactor
from workbench.benchmark.read import row_of
from workbench.client.returned import returned
from workbench.client.run import Run
from workbench.client.takeover import stored_spec
from workbench.finetune.answers.predictions import read_predictions
from workbench.finetune.data.column_checks import RowTally
from workbench.finetune.data.rows import any_row
from workbench.finetune.data.sources.convert import read_row, read_tables
from workbench.finetune.data.sources.read import read_rows
from workbench.finetune.data.wikisql.query import parse
from workbench.finetune.notebook.history import history
from workbench.finetune.profile.parse import parse_profile
from workbench.finetune.profile.trace import read_trace
from workbench.keeper.requests import request_from
from workbench.lab.listing import Listing
from workbench.pods.hostfile import Hostfile
from workbench.pods.pod import Pod
from workbench.pods.rendezvous.listener import decode_report
from workbench.rundir.catalog.label import read_label
from workbench.rundir.catalog.store import record_of
from workbench.rundir.checkpoints import newest_good, problem_of
from workbench.rundir.events import parse_event
from workbench.rundir.figures.flight import communication, nccl_words
from workbench.rundir.outcome import first_cause, fold_failures, rank_statuses
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status
from workbench.rundir.thinned import ThinnedWriter
from workbench.rundir.totals import RunTotals, TotalsTail
from workbench.rundir.view import RunView

_TOKENS = (
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\x1b[2J",
    b"\r\n",
    b'"',
    b"\\",
    b"{",
    b"[" * 200,
    b"]",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 400,
    b"9" * 5000,
    b"null",
    b"true",
    b"\\ud800",
    b"\\u0000",
    b"..",
    b"/",
    b"~",
    b"${HOME}",
    b"=",
    b",",
    b":",
    b"." * 3000,
    "\u0661\u00b2\u2028\u202e".encode(),
)


@dataclass(frozen=True)
class Target:
    """A parser, samples of its bytes, and the errors that the parser documents."""

    samples: tuple[bytes, ...]
    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = (WorkbenchError,)


def mutated(sample: bytes, chance: random.Random) -> bytes:
    """Change JSON values of a sample, or its bytes, or both."""
    data = sample
    if chance.random() < 0.6:
        data = _with_wrong_value(data, chance)
    if data is sample or chance.random() < 0.3:
        for _ in range(chance.randint(1, 3)):
            data = _with_wrong_bytes(data, chance)
    return data


def _with_wrong_value(sample: bytes, chance: random.Random) -> bytes:
    """Replace a JSON value of the sample, of a line of the sample, or behind a prefix of it."""
    whole = sample.split(b"\n")
    number = chance.randrange(len(whole))
    prefix, brace, rest = whole[number].partition(b"{")
    for text, before, after in (
        (sample, b"", b""),
        (brace + rest, b"\n".join([*whole[:number], prefix]), b"\n".join(whole[number + 1 :])),
    ):
        try:
            value = json.loads(text)
        except ValueError:
            continue
        at = chance.choice(list(places(value)))
        wrong = replaced(value, at, chance.choice(WRONG))
        return before + json.dumps(wrong).encode() + after
    return sample


def _with_wrong_bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 1, 4, 40)))
    how = chance.randrange(6)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + data[end:]
    if how == 2:
        return data[:end] + data[at:end] * chance.choice((1, 50)) + data[end:]
    if how == 3:
        return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    token = chance.choice(_TOKENS)
    return data[:at] + token + data[at if how == 4 else end :]


class _Peer:
    """A stream that sends bytes once, in two pieces, and then ends."""

    def descriptors(self) -> list[int]:
        return []

    def __init__(self, data: bytes) -> None:
        half = len(data) // 2
        self._pieces = [data[:half], data[half:], b""]

    def read(self, timeout_s: float | None) -> bytes:
        while self._pieces:
            piece = self._pieces.pop(0)
            if piece or not self._pieces:
                return piece
        return b""

    def write(self, data: bytes) -> None:
        """Accept everything."""


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _request(data: bytes) -> None:
    """Read requests as the keeper does: bad lines are refused, and bad requests raise."""
    requests = Requests(lambda _: None)
    requests.received.feed(data + b"\n")
    while (request := requests.take()) is not None:
        request_from(request.fields)


def _agent_answer(data: bytes) -> None:
    """Read the answer of an agent as the keeper does, and the ranks' states in it."""
    answer = rpc.Client(_Peer(data + b"\n")).call({"op": "poll"}, 1.0)
    pod = Pod(name="pod-0", address="127.0.0.2", ssh_port=22, slots=1)
    statuses = rank_statuses(pod, answer, 0.5)
    first_cause(statuses)
    fold_failures(statuses)


def _totals(data: bytes) -> None:
    """Read a printed line, and take its event as the keeper does."""
    totals = RunTotals()
    for line in _text(data).split("\n"):
        event = parse_event(line)
        if event is not None:
            totals.take(event)
    totals.progress(RunState.RUNNING, "")
    totals.facts(1.0)


class Files:
    """A run directory whose files are replaced, read, and put back."""

    def __init__(self, root: Path) -> None:
        self.run = whole_run(root)
        self.cluster = ClusterPaths(root / "cluster")
        self.listing = Listing(root)
        for path, content in {
            self.run.label: {"name": "mine", "note": "a note"},
            self.run.trace_operators: {"operators": [{"name": "aten::mm", "calls": 1}]},
            self.run.flight(0): {"entries": [{"collective_seq_id": 7, "process_group": ["0"]}]},
            self.run.manifest: {"files": {"config.json": {"bytes": 2, "sha256": "0"}}},
            self.cluster.config: {"backend": {"kind": "local"}, "pods": {}, "count": 3},
        }.items():
            path.write_text(json.dumps(content))
        ThinnedWriter(self.run.events).renew(0)

    def target(self, path: Path, *reads: Callable[[], object]) -> Target:
        """Make the target of a file, with everything that reads it."""
        whole = path.read_bytes()

        def parse_file(data: bytes) -> None:
            path.write_bytes(data)
            try:
                for read in reads:
                    try:
                        read()
                    except WorkbenchError as error:
                        assert str(error)
            finally:
                path.write_bytes(whole)

        return Target((whole,), parse_file)

    def targets(self) -> dict[str, Target]:
        run, root = self.run, self.run.root

        def record() -> object:
            return record_of(run), row_of(root), read_label(run)

        def shown() -> object:
            view = RunView(root)
            return repr(Run(root)), view.state, view.memory, as_text(history(self.cluster.root))

        def result() -> object:
            return as_text(Run(root).result)

        def spec() -> object:
            return RunSpec.load(run.spec), RunSpec.load(run.spec, of_run=True)

        def tail() -> object:
            return TotalsTail(run.events).read().facts(1.0), list(Run(root).events())

        def status() -> object:
            return cluster_status(self.cluster.root), stored_spec(self.cluster.root)

        def rows() -> object:
            found = read_rows(run.inputs / "eval.jsonl", {})
            tally = RowTally(())
            return [read_row(data, where, refusal=any_row, tally=tally) for where, data in found]

        def answers() -> object:
            return read_predictions(run.predictions, run.tables)

        return {
            "run.json": self.target(run.info, record, shown, result),
            "state.json": self.target(run.state, record, shown),
            "result.json": self.target(run.result, record, result),
            "spec.json": self.target(run.spec, spec, record, shown),
            "label.json": self.target(run.label, record),
            "origin.json": self.target(run.origin, record),
            "profile.txt": self.target(
                run.profile, lambda: str(parse_profile(run.profile.read_text(errors="replace")))
            ),
            "held.json": self.target(run.held, lambda: newest_good(root)),
            "manifest.json": self.target(run.manifest, lambda: problem_of(root)),
            "events.jsonl": self.target(run.events, tail, shown),
            "thinned.jsonl": self.target(run.thinned, shown),
            "samples.jsonl": self.target(run.samples, shown),
            "trace-operators.json": self.target(run.trace_operators, lambda: read_trace(run)),
            "flight.json": self.target(run.flight(0), lambda: communication(run)),
            "predictions.jsonl": self.target(run.predictions, answers),
            "tables.jsonl": self.target(run.tables, answers, lambda: [*read_tables(run.tables)]),
            "eval.jsonl": self.target(run.inputs / "eval.jsonl", rows),
            "returned": self.target(run.result, lambda: returned(run, 3)),
            "cluster.json": self.target(self.cluster.config, status),
            "cluster state.json": self.target(self.cluster.state, status, shown),
            "lab": Target((b"cluster/runs/x", b".."), self._ask_lab, (WorkbenchError, OSError)),
        }

    def _ask_lab(self, data: bytes) -> None:
        for ask in (self.listing.run, lambda name: self.listing.look(name, 5)):
            ask(data.decode(errors="surrogateescape"))


_EVENTS = (
    b'@workbench {"time_s": 1.5, "rank": 0, "kind": "step", "step": 3, "loss": 2.0}',
    b'@workbench {"time_s": 1.5, "rank": 0, "kind": "epoch", "seconds": 1.0, "total_s": 3.0}',
    b'@workbench {"time_s": 1, "rank": 1, "kind": "memory", "rss_gib": 1.5, "peak_gib": 2}',
    b'@workbench {"time_s": 1, "rank": 1, "kind": "traffic", "sent_bytes": 9, "steps": 3}',
    b'@workbench {"time_s": 1, "rank": 0, "kind": "start", "world_size": 3, "model": "t5"}',
    b'@workbench {"time_s": 1, "rank": null, "kind": "sample", "gpus": [{"index": 0}]}',
    b'@workbench {"time_s": 1, "rank": 0, "kind": "eval", "metrics": {"f1": 0.5}, "step": 1}',
)
_REQUESTS = (
    b'{"id": 1, "op": "submit", "run": "r1", "path": "/x", "job": {"kind": "script"}, "pods": 2}',
    b'{"id": 2, "op": "cancel", "run": "r1"}',
    b'{"id": 3, "op": "held", "path": "/x", "last_step": 3}',
    b'{"id": 4, "op": "status"}',
)
_KEY = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
_REPORT = (
    b'{"name": "pod-0", "address": "10.0.0.1", "ssh_port": 22, "user": "u", "slots": 1, '
    b'"host_key": "' + _KEY + b'", "root": "/r", "python": "/p", "versions": {"torch": "2"}}'
)
_ANSWER = (
    b'{"id": 1, "ok": true, "ranks": [{"rank": 0, "phase": "exited", "exit_code": 1, "pid": 5, '
    b'"error": {"kind": "ValueError", "message": "no", "traceback": "T", "time_s": 1.5}}], '
    b'"logs": {"attempt-0/rank-0.stdout.log": {"offset": 0, "data": "eA=="}}, "settled": false}'
)
_RUN_REQUEST = (
    b'{"run": "r1", "ranks": [{"rank": 0, "pod": "pod-0", "local_rank": 0}], "argv": ["python"], '
    b'"world_size": 1, "env": {"A": "b"}, "threads": 1, "master_port": 5}'
)
_HOSTFILE = b"127.0.0.2 slots=1\n# a comment\n10.0.0.3 slots=2 max_slots=3\nname-4 slots=1\n"


def targets(root: Path) -> dict[str, Target]:
    """Return all targets by name; files lie below `root`."""
    found = {
        "event": Target(_EVENTS, _totals),
        "hostfile": Target((_HOSTFILE,), lambda data: Hostfile.parse(_text(data))),
        "request": Target(_REQUESTS, _request),
        "report": Target((_REPORT,), lambda data: decode_report(_text(data))),
        "agent's answer": Target((_ANSWER,), _agent_answer, (rpc.Refused, OSError, ValueError)),
        "agent's request": Target(
            (_RUN_REQUEST,),
            lambda data: RunRequest.from_dict(lines.from_line(data)),
            (ValueError,),
        ),
        "NCCL log": Target((b"h:1:2 [0] NCCL INFO NET/IB : Using mlx5",), _nccl),
        "masked text": Target((b"token=abc password: x https://u:p@h/",), _mask),
        "SQL": Target((b"SELECT MAX(a) FROM table WHERE b = 'x' AND c > 3",), _sql),
    }
    return {**found, **Files(root).targets()}


def _nccl(data: bytes) -> object:
    return nccl_words(_text(data).split("\n"))


def _mask(data: bytes) -> object:
    return Redactor({"A": "secret-value"})(_text(data))


def _sql(data: bytes) -> object:
    return parse(_text(data))


def tracebacks(root: Path, count: int, seed: int) -> tuple[int, dict[str, str]]:
    """Try `count` inputs; return the number of tracebacks and an example of each place."""
    chance = random.Random(seed)
    chosen = targets(root)
    names = sorted(chosen)
    number = 0
    examples: dict[str, str] = {}
    for turn in range(count):
        name = names[turn % len(names)]
        target = chosen[name]
        data = mutated(chance.choice(target.samples), chance)
        try:
            target.parse(data)
        except Exception as error:
            # The errors of pydantic are ValueErrors, and are no words for people.
            known = isinstance(error, target.errors) and not isinstance(error, ValidationError)
            if known and str(error):
                continue
            number += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{name}: {type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            examples.setdefault(place, f"{data[:300]!r}\n{traceback.format_exc()[-1800:]}")
    return number, examples


def main() -> int:
    count = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with example_folder() as folder:
        number, examples = tracebacks(Path(folder), count, seed)
    for place, example in examples.items():
        sys.stdout.write(f"== {place}\n{example}\n")
    sys.stdout.write(f"{number} tracebacks in {count} inputs\n")
    return int(bool(number))


if __name__ == "__main__":
    sys.exit(main())
