"""The reason of a rank's end from samples of its stderr, and the files of a rank. No process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sentences import says
from workbench.agent.rank import exits
from workbench.agent.ranks import records
from workbench.agent.ranks.records import (
    Failure,
    failure_from,
    keep_attempt,
    keep_room,
    last_traceback,
    only_lost_its_peer,
    read_attempt,
    read_record,
    signal_name,
    write_record,
)
from workbench.base.errors import DiskFull
from workbench.base.files import write_json

HEAD = "Traceback (most recent call last):"
FRAME = '  File "train.py", line 3, in <module>\n    step()'
CAUSE = "The above exception was the direct cause of the following exception:"
MEANWHILE = "During handling of the above exception, another exception occurred:"


def found(text: str) -> Failure:
    failure = last_traceback(text)
    assert failure is not None
    return failure


def test_an_exception_has_kind_message_and_traceback() -> None:
    text = f"{HEAD}\n{FRAME}\nmodule.Wrong: no such column"
    assert found(f"step 1\n{text}\nbye\n") == Failure(
        kind="Wrong", message="no such column", traceback=f"{text}\nbye"
    )


def test_an_exception_ends_at_an_empty_line_or_the_next_traceback() -> None:
    text = f"{HEAD}\n{FRAME}\nValueError: first\nsecond line"
    assert found(f"{text}\n\nlater output").traceback == text
    short = f"{HEAD}\n{FRAME}\nValueError: first"
    assert found(f"{short}\n\nlater output").traceback == short
    other = f"Exception in thread Thread-1:\n{HEAD}\n{FRAME}\nKeyError: 'late'"
    assert found(f"{text}\n\n{other}").traceback == text
    ignored = "Exception ignored in: <function f>"
    end = f"{ignored}\n{HEAD}\n{FRAME}\nKeyError: 'late'"
    assert found(f"{text}\n{end}").traceback == f"{text}\n{ignored}"


@pytest.mark.parametrize("lines", [0, 1, 18, 19, 20, 40])
def test_a_traceback_ends_with_at_most_20_lines_of_its_message(lines: int) -> None:
    text = "\n".join([HEAD, FRAME, "ValueError: all", *(f"line {n}" for n in range(lines))])
    shown = found(text).traceback.splitlines()
    assert len(shown) == 3 + min(20, 1 + lines)
    assert found(text).message == "all"


def test_a_message_may_begin_in_the_next_line() -> None:
    failure = found(f"{HEAD}\n{FRAME}\nRuntimeError: \nCUDA out of memory.\nTried 2 GiB\n\nend")
    assert failure.message == "CUDA out of memory. Tried 2 GiB"
    assert found(f"{HEAD}\n{FRAME}\nRuntimeError\n").message == ""
    assert found(f"{HEAD}\n{FRAME}\nRuntimeError:\n").message == ""


def test_the_source_of_a_frame_may_have_empty_lines_and_tabs() -> None:
    text = f"{HEAD}\n{FRAME}\n\n\tmore\n\nValueError: x"
    assert found(text) == Failure(kind="ValueError", message="x", traceback=text)


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}",
        f"{HEAD}\n{FRAME}",
        f"{HEAD}\n{FRAME}\n\n",
        f"{HEAD}\n{FRAME}\n42 is no exception",
        "ValueError: without a traceback",
    ],
)
def test_half_a_traceback_is_none(text: str) -> None:
    assert last_traceback(text) is None


@pytest.mark.parametrize("link", [CAUSE, MEANWHILE])
def test_a_chain_of_exceptions_is_kept_from_its_first(link: str) -> None:
    first = f"{HEAD}\n{FRAME}\nKeyError: 1"
    second = f"{HEAD}\n{FRAME}\nOSError: 2"
    third = f"{HEAD}\n{FRAME}\nValueError: 3"
    before = f"{HEAD}\n{FRAME}\nTypeError: handled\n\nnoise\n"
    for text in (
        f"{second}\n\n{link}\n\n{third}",
        f"{first}\n\n{link}\n\n{second}\n\n{link}\n\n{third}",
    ):
        assert found(f"{before}{text}\n") == Failure(kind="ValueError", message="3", traceback=text)


def test_a_link_without_an_earlier_traceback_begins_the_chain() -> None:
    text = f"{HEAD}\n{FRAME}\nValueError: 3"
    assert found(f"{CAUSE}\n\n{text}").traceback == text


def test_a_link_in_another_line_joins_nothing() -> None:
    text = f"{HEAD}\n{FRAME}\nValueError: 3"
    handled = f"{HEAD}\n{FRAME}\nKeyError: 1\n\n{CAUSE}\n\nnot so\n"
    assert found(f"{handled}{text}").traceback == text


@pytest.mark.parametrize(
    "harmless",
    [
        "Exception ignored in: <function f>",
        "Exception in thread Thread-1 (run):",
        "--- Logging error ---",
    ],
)
def test_a_traceback_that_ended_no_process_is_not_the_reason(harmless: str) -> None:
    real = f"{HEAD}\n{FRAME}\nTypeError: real"
    late = f"{harmless}\n{HEAD}\n{FRAME}\nKeyError: 'late'"
    assert found(f"{real}\n\n{late}").message == "real"
    assert found(f"{real}\n\n{harmless}\n\n{HEAD}\n{FRAME}\nKeyError: 'late'").message == "real"
    # It is better than nothing.
    assert found(late).kind == "KeyError"


def test_a_half_drawn_bar_is_not_part_of_the_traceback() -> None:
    failure = found(f"\r 10%|#\r 20%|##  {HEAD}\n{FRAME}\nTypeError: real")
    assert failure.traceback == f"{HEAD}\n{FRAME}\nTypeError: real"
    assert found(f" 20%|##{HEAD}\n{FRAME}\nTypeError: real").traceback.startswith(HEAD)


def test_a_group_of_exceptions_is_read_by_its_margin() -> None:
    text = "\n".join(
        [
            f"  + Exception Group {HEAD}",
            '  |   File "train.py", line 1, in <module>',
            "  |     raise group",
            "  | ExceptionGroup: both (2 sub-exceptions)",
            "  +-+---------------- 1 ----------------",
            f"    | {HEAD}",
            "    | ValueError: 1",
        ]
    )
    failure = found(text)
    assert (failure.kind, failure.message) == ("ExceptionGroup", "both (2 sub-exceptions)")
    assert failure.traceback == text


def test_a_script_that_does_not_compile_is_named() -> None:
    lines = ["  noise", '  File "train.py", line 1', "    x = = 1", "        ^"]
    text = "\n".join(["far", *lines, "SyntaxError: invalid syntax", "bye"])
    assert found(text) == Failure(
        kind="SyntaxError",
        message="invalid syntax",
        traceback="\n".join([*lines, "SyntaxError: invalid syntax"]),
    )
    assert found("TabError: mixed").traceback == "TabError: mixed"
    both = found("SyntaxError: first\nIndentationError: second\n")
    assert (both.kind, both.traceback) == (
        "IndentationError",
        "SyntaxError: first\nIndentationError: second",
    )


def test_messages_and_tracebacks_have_a_limit() -> None:
    failure = found(f"{HEAD}\n{FRAME}\nValueError: {'y' * 200_000}end")
    assert len(failure.message) == 4000
    assert len(failure.traceback) == 64 * 1024 and failure.traceback.endswith("end")


def test_a_rank_without_a_traceback_has_its_exit_code_and_its_last_line() -> None:
    failure = failure_from("[rank1]: one\n 5%|#\rtwo  \n\n", 1)
    assert failure == Failure(kind="exit", message="exit code 1: two", traceback="one\ntwo")
    assert failure_from("", 1) == Failure(kind="exit", message="exit code 1")
    assert len(failure_from("x" * 9000, 1).message) == len("exit code 1: ") + 4000


@pytest.mark.parametrize(
    "noise",
    [
        "USDT:2026-11-28 10:11:12 4711:4711 profiler_stop",
        "[rank0]:[W1128 10:11:12.5 ProcessGroupNCCL.cpp:1496] Warning: was not called",
        "I1128 10:11:12.500000 4711 torch/x.py:3] stopped",
        "2026-11-28 10:11:12,500 - trainer - saved",
        "[2026-11-28 10:11:12,500] [INFO] [launch.py:3:main] Process 4711 exits",
        "10:11:12 bye",
        "INFO:root:bye",
        "\x1b[32mINFO\x1b[0m:     bye\n\x1b[A\x1b[2K",
        "[I 2026-11-28 10:11:12,500] Trial 0 finished with value: 0.5",
        "Nov 28 10:11:12 gpu-1 train[4711]: bye",
        '{"level":"info","ts":"2026-11-28T10:11:12Z","msg":"bye"}',
        "OMP: Info #276: omp_set_nested routine deprecated",
        "libpng warning: iCCP: known incorrect sRGB profile",
        "[W1128 10:11:12.5 socket.cpp:207] The hostname of the client socket cannot be retrieved",
        "Exception ignored in: <function Pool.__del__ at 0x7f925c7e4b80>",
        f"Exception ignored in: <function f>\n{HEAD}\n{FRAME}\nAttributeError: late",
        f"--- Logging error ---\n{HEAD}\n{FRAME}\nTypeError: late\nCall stack:\n{FRAME}\n"
        "Message: '%d rows'\nArguments: ('no',)",
        "wandb: Find logs at: ./wandb/offline-run/logs",
        "huggingface/tokenizers: The current process just got forked, after parallelism",
        "/lib/a.py:3: DeprecationWarning: fork\n  self.pid = os.fork()",
        "wandb: WARN offline",
        "  warnings.warn(",
        "/lib/a.py:3: UserWarning: leaked semaphores",
        "100%|##########| 5/5 [00:01<00:00,  4.10it/s]",
        " 20%|##   | 1/5\r 40%|####  | 2/5",
        # PYTHONHOME, PYTHONHASHSEED, or faulthandler.dump_traceback_later
        "Current thread 0x00007f925c7e4b80 (most recent call first):\n  <no Python frame>",
        "Python runtime state: preinitialized",
        'Thread 0x00007f925c7e4b80 (most recent call first):\n  File "errors.py", line 3 in f',
        "Extension modules: numpy.core, error_tools (total: 2)",
    ],
)
def test_noise_of_stderr_is_not_the_cause(noise: str) -> None:
    told = failure_from(f"FAILED (failures=8)\n{noise}\n\n", 1)
    assert told.message == "exit code 1: FAILED (failures=8)"
    assert failure_from(f"{noise}\n", 1).message in ("exit code 1", "late")
    assert failure_from(f"{noise}\n", 1).traceback  # the card still shows the last lines


# Lines that libraries of this environment print to stderr, without a mark of a log.
UNMARKED = [
    "NCCL version 2.21.5+cuda12.4",
    "Using /home/me/.cache/torch_extensions/py311_cpu as PyTorch extensions root...",
    "Time to load fused_adam op: 0.52 seconds",
    "You should probably TRAIN this model on a down-stream task to be able to use it.",
    "Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.",
    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
    "QStandardPaths: XDG_RUNTIME_DIR not set, defaulting to '/tmp/runtime-root'",
    "swig/python detected a memory leak of type 'X *', no destructor found.",
    "E0000 00:00:1732950000.123 4711 init.cc:232] grpc_wait_for_shutdown_with_timeout() timed out.",
    "atexit: saved 3 files",
    "bye",
]


@pytest.mark.parametrize("noise", UNMARKED)
def test_a_line_of_a_library_is_not_the_cause_of_an_exit_code(noise: str) -> None:
    for code in (2, 3, 255):  # no text of `sys.exit` comes with them
        assert failure_from(f"{noise}\n", code).message == f"exit code {code}"
        told = failure_from(f"cannot open shard 7\n{noise}\n", code).message
        assert told == f"exit code {code}: cannot open shard 7"
    assert failure_from(f"{noise}\n", 1, exit_text="").message == "exit code 1"  # sys.exit(1)
    told = failure_from(f"no rows in it\n{noise}\n", 1, exit_text="no rows in it").message
    assert told == "exit code 1: no rows in it"


def test_a_text_of_several_lines_is_told_whole() -> None:
    text = "these files are empty:\n  a.csv\n  b.csv"
    told = failure_from(f"{text}\n", 1, exit_text=text).message
    assert told == "exit code 1: these files are empty: a.csv b.csv"
    assert len(failure_from("", 1, exit_text="x" * 9000).message) == len("exit code 1: ") + 4000


@pytest.mark.parametrize("status", [None, 0, 3, "no rows", "größe\n2", 2.5])
def test_a_rank_notes_the_text_of_its_exit(tmp_path: Path, status: object) -> None:
    program = (
        "import sys\nsys.path.insert(0, sys.argv[1])\nimport exits\nexits.changes()\n"
        f"sys.exit({status!r})\n"
    )
    rank = Path(exits.__file__).parent
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(rank)],
        env={**os.environ, "WORKBENCH_RANK_DIR": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    _, told = child.communicate(timeout=300)
    is_text = isinstance(status, str | float)
    noted = read_record(tmp_path / f"exit-{child.pid}.json")
    assert noted == {"text": str(status) if is_text else ""}
    assert told.decode() == (f"{status}\n" if is_text else "")
    assert child.returncode == (1 if is_text else status or 0)


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        ("train.py: error: the following arguments are required: --data", 2),
        ("2026-11-28 10:11:12 ERROR no rows in train.jsonl", 2),
        ("[2026-11-28 10:11:12] [WARNING] cannot open shard 3", 2),
        ("give --data", 1),
        ("5% of the rows are left", 1),
        ("wandb: ERROR api_key not configured (no-tty)", 2),
        ("  --data is missing", 1),
    ],
)
def test_a_last_line_that_may_be_the_cause_is_told(cause: str, code: int) -> None:
    """Code 1 may come from `raise SystemExit(text)`, which notes no text."""
    assert failure_from(f"one\n{cause}\n", code).message == f"exit code {code}: {cause}"


def test_the_last_20_lines_are_kept() -> None:
    lines = [f"line {number}" for number in range(30)]
    for text in ("\n".join(lines) + "\n", "\n".join(lines[:-1]) + "\n"):
        shown = failure_from(text, 1).traceback.splitlines()
        assert shown == text.splitlines()[-20:]


def test_a_traceback_is_the_reason_unless_the_rank_left_with_0() -> None:
    text = f"{HEAD}\n{FRAME}\nValueError: bad"
    assert failure_from(text, 1).message == "bad"
    early = failure_from(text, 0)
    assert early.kind == "exit" and early.traceback == text
    assert says(early.message, "ended early with 0")


def test_a_signal_is_the_reason_and_a_traceback_stands_beside_it() -> None:
    text = f"noise\n{HEAD}\n{FRAME}\nValueError: bad"
    failure = failure_from(text, -signal.SIGKILL, oom_hint="out of memory")
    assert failure.kind == "signal" and failure.traceback == text.removeprefix("noise\n")
    assert "SIGKILL" in failure.message and failure.message.endswith("; out of memory")
    assert "memory" not in failure_from("", -signal.SIGKILL).message
    assert "memory" not in failure_from("", -signal.SIGTERM, oom_hint="out of memory").message
    assert failure_from("last words\n", -1).traceback == "last words"


def test_a_bus_error_shows_the_free_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(f_bavail=512, f_frsize=1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda _: facts)
    assert says(
        failure_from("", -signal.SIGBUS).message,
        "often shared memory that is too small",
        "512 MiB",
    )
    assert not says(
        failure_from("", -signal.SIGSEGV).message, "often shared memory that is too small"
    )

    def missing(_: str) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(os, "statvfs", missing)
    assert says(
        failure_from("", -signal.SIGBUS).message,
        "often shared memory that is too small",
        "0 MiB",
    )


def test_an_abort_of_a_thread_of_torch_names_the_open_group() -> None:
    words = "terminate called without an active exception\n"
    told = failure_from(words, -signal.SIGABRT).message
    assert says(told, "with torch.distributed.destroy_process_group()")
    for other in (failure_from("", -signal.SIGABRT), failure_from(words, -signal.SIGSEGV)):
        assert "destroy" not in other.message


def test_signals_have_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/transport/tcp/pair.cc] Connection closed by peer [10.0.0.2]:4711",
        "Read error [10.0.0.2]:4711",
        "NCCL communicator was aborted: ncclRemoteError",
        "Watchdog caught collective operation timeout",
        "gloo: connection reset by peer",
        "TCPStore: Broken pipe",
        "[Errno 32] Broken pipe",
        " Connection reset by peer. ",
    ],
)
def test_a_lost_rank_is_an_echo_of_another_end(text: str) -> None:
    assert only_lost_its_peer(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no such column",
        "huggingface.co: Connection reset by peer",
        "gloo has no such backend",
        "[Errno 32] Broken pipe: the tracker at example.org is gone",
    ],
)
def test_an_error_of_another_server_is_a_reason(text: str) -> None:
    assert not only_lost_its_peer(text)


def test_a_record_has_its_time_and_its_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(records, "now_s", lambda: 12.5)
    path = tmp_path / "deep" / "rank-0" / "done.json"
    for _ in range(2):
        write_record(path, {"rank": 1})
    assert read_record(path) == {"rank": 1, "time_s": 12.5}


def test_a_record_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path / "missing.json") is None
    path = tmp_path / "done.json"
    path.write_text('{"rank": ')
    assert read_record(path) is None
    # A rank may have written anything: only the first 256 KiB count.
    path.write_text('{"rank": 1' + " " * (200 << 10) + "}")
    assert read_record(path) == {"rank": 1}
    path.write_text('{"rank": 1' + " " * (300 << 10) + "}")
    assert read_record(path) is None


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let a folder's disk be full for as long as the reserve is there."""
    write = write_json

    def fill(folder: Path) -> None:
        def write_if_room(path: Path, data: Any) -> None:
            if (folder / ".reserve").exists():
                raise DiskFull("the disk is full")
            write(path, data)

        monkeypatch.setattr(records, "write_json", write_if_room)

    return fill


def test_a_record_on_a_full_disk_takes_the_reserve(
    tmp_path: Path, full: Callable[[Path], None]
) -> None:
    keep_room(tmp_path)
    assert (tmp_path / ".reserve").stat().st_size >= 4096
    full(tmp_path)
    write_record(tmp_path / "done.json", {"rank": 3})
    assert (read_record(tmp_path / "done.json") or {})["rank"] == 3


def test_a_full_disk_without_a_reserve_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DiskFull("the disk is full")

    monkeypatch.setattr(records, "write_json", refuse)
    with pytest.raises(DiskFull):
        write_record(tmp_path / "done.json", {"rank": 3})


def test_a_folder_that_takes_no_reserve_stops_no_rank(tmp_path: Path) -> None:
    keep_room(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_an_attempt_is_kept_for_the_next_agent(tmp_path: Path) -> None:
    assert read_attempt(tmp_path) == (0, 0)
    keep_attempt(tmp_path, 3, 2)
    assert read_attempt(tmp_path) == (3, 2)
    (tmp_path / "attempt.json").write_text('{"attempt": 3}')
    for name in ("attempt-2", "attempt-10", "attempt-x"):
        (tmp_path / name).mkdir()
    assert read_attempt(tmp_path) == (0, 10), "of the last folder of logs"
    for name in ("attempt-2", "attempt-10"):
        (tmp_path / name).rmdir()
    assert read_attempt(tmp_path) == (0, 0)
    (tmp_path / "attempt.json").write_text('{"attempt": "3", "restart": 2}')
    assert read_attempt(tmp_path) == (0, 0)


def test_no_attempt_is_better_than_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    keep_attempt(tmp_path, 3, 2)
    monkeypatch.setattr(records, "write_json", refuse)
    for _ in range(2):
        keep_attempt(tmp_path, 4, 3)
        assert read_attempt(tmp_path) == (0, 0)
