"""Connect unattended ranks through files in a shared folder.

Files of an earlier attempt are recognized and ignored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.errors import RunError
from workbench.base.files import read_json, write_json

_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRendezvous:
    folder: Path
    """Folder shared by all ranks."""
    rank: int
    world_size: int
    patience_s: float = 900.0
    """Seconds to wait for the other ranks, whose images may still be loading."""

    def lead(self, prepare: Callable[[], Mapping[str, object]]) -> Mapping[str, Any]:
        """Call the other ranks, run `prepare` once all are there, and send its result (rank 0)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        call = secrets.token_hex(8)
        write_json(self.folder / "call.json", {"call": call})
        self._await(
            lambda: len(self._nonces(call)) == self.world_size - 1,
            lambda: (
                "ranks "
                f"{[r for r in range(1, self.world_size) if str(r) not in self._nonces(call)]} "
                "did not come"
            ),
        )
        word: dict[str, object] = {"nonces": self._nonces(call)}
        try:
            word["facts"] = facts = prepare()
        except BaseException as error:
            word["refused"] = str(error) or type(error).__name__
            raise
        finally:
            write_json(self.folder / "word.json", word)
        return facts

    def follow(self) -> Mapping[str, Any]:
        """Answer rank 0 and wait for its result (all other ranks)."""
        nonce = secrets.token_hex(8)
        answer = self.folder / f"answer-{self.rank}.json"
        answered = ""

        def is_answered() -> bool:
            nonlocal answered
            call = str(read_json(self.folder / "call.json").get("call", ""))
            if call and call != answered:
                write_json(answer, {"call": call, "nonce": nonce})
                answered = call
            return bool(self._word().get("nonces", {}).get(str(self.rank)) == nonce)

        self._await(is_answered, lambda: "rank 0 did not come")
        word = self._word()
        if "refused" in word:
            raise RunError(f"rank 0 could not prepare the run: {word['refused']}")
        facts: Mapping[str, Any] = word["facts"]
        return facts

    def _word(self) -> Mapping[str, Any]:
        return read_json(self.folder / "word.json")

    def _nonces(self, call: str) -> dict[str, object]:
        answers = {
            str(rank): read_json(self.folder / f"answer-{rank}.json")
            for rank in range(1, self.world_size)
        }
        return {
            rank: answer["nonce"] for rank, answer in answers.items() if answer.get("call") == call
        }

    def _await(self, ready: Callable[[], bool], missing: Callable[[], str]) -> None:
        deadline = time.monotonic() + self.patience_s
        while not ready():
            if time.monotonic() > deadline:
                raise RunError(
                    f"{missing()} within {self.patience_s:.0f} s; all ranks must see the folder "
                    f"{self.folder.parent}: a claim that several pods use must be ReadWriteMany"
                )
            time.sleep(_LOOK_S)
