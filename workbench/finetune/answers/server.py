"""Run a model server per run directory: a child process, reused while this process lives."""

from __future__ import annotations

import atexit
import errno
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import IO, Any

from workbench.base import entries
from workbench.base.child import (
    child_environment,
    close_input,
    ended_within,
    limit_memory,
    machine_bytes,
    main_of,
    start,
)
from workbench.base.errors import DiskFull, RunError, require_package
from workbench.base.files import is_folder, load_json, read_json, records
from workbench.base.files.gate import check_regular
from workbench.base.json_values import as_int, get_object
from workbench.base.messages import rpc
from workbench.base.messages.lines import Pipes, TooLong
from workbench.finetune.answers.questions import Question
from workbench.finetune.options.model.limits import too_many_parts
from workbench.rundir.checkpoints import model_folder
from workbench.rundir.paths import RunPaths, is_output_name
from workbench.rundir.status import result_file

_IDLE_S = 600.0
_ANSWER_S = 600.0
# Enough for a large model on a slow disk.
_EXPORT_S = 6 * 3600.0
_END_S = 2.0
# Python needs some time to exit after its last output.
_DYING_S = 15.0
# Processes at once. A process holds torch, some 400 MiB, and its model.
_KEPT = 4
_TAIL_LINES = 15
# Bytes of an answer: texts of as many rows as were asked.
_LARGEST = 1 << 30
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    texts: Sequence[str]
    load_s: float
    """Seconds to load the model. 0: the model was loaded already."""
    answer_s: float


class ModelServer:
    """Child process of a run directory.

    The child starts with the object, and again if a request finds the child ended.
    """

    def __init__(self, paths: RunPaths, *, idle_s: float = _IDLE_S):
        self._paths = paths
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] | None = None
        self._client: rpc.Client | None = None
        self.start()

    @property
    def pid(self) -> int | None:
        process = self._process
        if process is None or process.poll() is not None:
            return None
        return process.pid

    def start(self) -> None:
        """Start the child unless it runs. Returns at once."""
        if self.pid is not None and self._client is not None and not self._client.lost:
            return
        self.close()
        check_model(self._paths)
        require_package("torch", "the model of a run", extra="worker")
        command = [*main_of(entries.ANSWERS), str(model_folder(self._paths))]
        options = ["--job", str(self._paths.job), "--idle-s", str(self._idle_s)]
        options += ["--longest-answer", str(_longest_answer(self._paths))]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        pipe = subprocess.PIPE
        # A rank's variables in the kernel's environment would make torch wait for peers.
        env = {name: value for name, value in child_environment().items() if name not in _OF_RANKS}
        self._process = start(
            *command,
            *options,
            env=env,
            stdin=pipe,
            stdout=pipe,
            stderr=self._words,
        )
        limit_memory(self._process.pid, machine_bytes())
        assert self._process.stdin is not None and self._process.stdout is not None
        streams = self._process.stdout.fileno(), self._process.stdin.fileno()
        line = Pipes(*streams, write_s=_ANSWER_S)
        self._client = rpc.Client(line, largest_answer=_LARGEST)

    def answer(
        self,
        questions: Sequence[Question],
        *,
        before: bool = False,
        on_text: rpc.OnPiece | None = None,
    ) -> Answered:
        """Return the model's answers. `on_text` receives the pieces of a single answer.

        The child survives an interrupt.
        """
        sent = ("source", "input", "opening", "messages", "tools")
        asked = [{name: getattr(question, name) for name in sent} for question in questions]
        which = "before" if before else "after"
        pieces = on_text is not None
        request = {
            "op": "answer",
            "which": which,
            "questions": asked,
            "pieces": pieces,
        }
        try:
            reply = self._answered(request, _ANSWER_S, on_text)
        except rpc.Refused as refusal:
            raise RunError(
                f"the model of {self._paths.root} did not answer: {refusal}"
            ) from refusal
        return Answered(texts=reply["answers"], load_s=reply["load_s"], answer_s=reply["answer_s"])

    def export(self, target: Path, **options: object) -> Mapping[str, object]:
        """Write the model into a folder in the child, wait, and return the facts of the export."""
        try:
            return self._answered({"op": "export", "export": str(target), **options}, _EXPORT_S)
        except rpc.Refused as refusal:
            if refusal.answer.get("full"):
                raise DiskFull(errno.ENOSPC, str(refusal)) from refusal
            why = f"the model of {self._paths.root} could not be exported: {refusal}"
            raise RunError(why) from refusal

    def close(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        assert process.stdout is not None
        close_input(process)
        if not ended_within(process, _END_S):
            process.kill()
            process.wait()
        process.stdout.close()
        if self._words is not None:
            self._words.close()

    def _answered(
        self,
        request: Mapping[str, object],
        timeout_s: float,
        on_text: rpc.OnPiece | None = None,
    ) -> dict[str, Any]:
        with self._lock:
            try:
                return self._asked(request, timeout_s, on_text)
            except _EndedIdle:
                return self._asked(request, timeout_s, on_text)

    def _asked(
        self,
        request: Mapping[str, object],
        timeout_s: float,
        on_text: rpc.OnPiece | None,
    ) -> dict[str, Any]:
        self.start()
        assert self._client is not None
        try:
            return self._client.call(request, timeout_s, on_text)
        except TimeoutError as error:
            self.close()
            raise RunError(
                f"the model of {self._paths.root} did not answer in time and was ended; "
                "ask fewer rows at once"
            ) from error
        except TooLong as error:
            raise RunError(f"{error}; ask fewer rows at once") from error
        except OSError as error:
            raise self._ended() from error

    def _ended(self) -> RunError:
        assert self._process is not None and self._words is not None
        ended_within(self._process, _DYING_S)
        code = self._process.returncode
        self._words.seek(0)
        last = (
            self._words.read().decode("utf-8", errors="replace").strip().splitlines()[-_TAIL_LINES:]
        )
        self.close()
        if code == 0:
            return _EndedIdle(f"the process that holds the model of {self._paths.root} ended")
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return RunError(
            "\n".join([f"the process of the model of {self._paths.root} ended ({how})", *last])
        )


class _EndedIdle(RunError):
    """The child ended by itself between two questions."""


def server_of(paths: RunPaths) -> ModelServer:
    """Return the live server of a run directory, and start a server if none is alive."""
    with _guard:
        server = _servers.pop(paths.root, None) or ModelServer(paths)
        server.start()
        _servers[paths.root] = server  # now the last of the dict
        atexit.unregister(close_all)  # one registration is enough
        atexit.register(close_all)
        extra = [_servers.pop(root) for root in list(_servers)[:-_KEPT]]
    for old in extra:
        old.close()
    return server


def close_all() -> None:
    with _guard:
        servers = list(_servers.values())
        _servers.clear()
    for server in servers:
        server.close()


_guard = threading.Lock()
_servers: dict[Path, ModelServer] = {}


def check_model(paths: RunPaths) -> None:
    """Raise RunError if a run directory has no model, or a model that the run did not write.

    Weights are compared with the digests in the run's manifest, once for each size and time of a
    file.
    """
    if not paths.root.is_dir():
        raise RunError(f"not a run directory: {paths.root}")
    model = model_folder(paths)
    if model != paths.model and paths.model.is_symlink() and not is_folder(model):
        raise RunError(
            f"the model of the run in {paths.root} stays in {model}, and this machine cannot read "
            "the folder. Mount the shared folder here with your rights, or open the run on a "
            "machine that sees the folder"
        )
    check_regular(model)
    check_regular(paths.job)
    if not any((model / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise RunError(f"the run in {paths.root} left no model: the run has not ended, or failed")
    if not paths.job.is_file():
        raise RunError(f"{paths.job} is missing; the file states how the model was trained")
    _check_shards(paths)
    _check_weights(paths)
    too_large = too_many_parts(read_json(model / "config.json"))
    if too_large:
        raise RunError(f"{model / 'config.json'} has {too_large}; put a whole copy back")


def _check_weights(paths: RunPaths) -> None:
    """Raise RunError if weights are not those whose digests the run's manifest has."""
    for name, expected in read_json(paths.manifest).items():
        relative = PurePath(name)
        is_weights = relative.suffix == ".safetensors" and is_output_name(relative)
        if not is_weights or relative.parts[0] != paths.model.name:
            continue
        path = model_folder(paths).parent / relative
        try:
            facts = path.stat(follow_symlinks=False)
            found = _digest(path, facts.st_size, facts.st_mtime_ns)
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
        if found != expected:
            raise RunError(
                f"{path} is damaged: {paths.manifest} has another SHA-256 of the weights. "
                "Put a whole copy back, or train again"
            )


@lru_cache(maxsize=256)
def _digest(path: Path, _size: int, _time_ns: int) -> str:
    return records.sha256_of(path)


def _longest_answer(paths: RunPaths) -> int:
    """Return the tokens of the longest answer that the model learned; 0: unknown."""
    result = read_json(result_file(paths))
    return as_int(get_object(result, "text_lengths").get("longest_answer")) or 0


def _check_shards(paths: RunPaths) -> None:
    """Raise RunError if an index of weights names files outside its folder."""
    for index in records.files_in(model_folder(paths), "*.index.json"):
        shards = get_object(load_json(index), "weight_map").values()
        for shard in shards:
            if isinstance(shard, str) and PurePath(shard).name == shard:
                continue
            raise RunError(
                f"{index} names weights outside its folder: "
                f"{str(shard)[:200]!r}; put a whole copy back"
            )
