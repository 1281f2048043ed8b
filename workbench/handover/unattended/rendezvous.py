"""Connect unattended ranks through files in a shared folder.

Files of an earlier attempt are recognized and ignored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

    @contextmanager
    def leading(self) -> Iterator[dict[str, Any]]:
        """Wait for the other ranks. Yield facts to fill, and send them at the end (rank 0).

        After an error in the block, the other ranks end with the error's words.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        call = secrets.token_hex(8)
        write_json(self.folder / "call.json", {"call": call})
        deadline = time.monotonic() + self.patience_s
        while len(nonces := self._nonces(call)) < self.world_size - 1:
            missing = [rank for rank in range(1, self.world_size) if str(rank) not in nonces]
            self._pause(deadline, f"ranks {missing} did not come")
        facts: dict[str, Any] = {}
        word: dict[str, object] = {"nonces": nonces, "facts": facts}
        try:
            yield facts
        except BaseException as error:
            word["refused"] = str(error) or type(error).__name__
            raise
        finally:
            write_json(self.folder / "word.json", word)

    def follow(self) -> Mapping[str, Any]:
        """Answer rank 0 and wait for its result (all other ranks)."""
        nonce = secrets.token_hex(8)
        answer = self.folder / f"answer-{self.rank}.json"
        answered = ""
        deadline = time.monotonic() + self.patience_s
        while True:
            call = str(read_json(self.folder / "call.json").get("call", ""))
            if call and call != answered:
                write_json(answer, {"call": call, "nonce": nonce})
                answered = call
            word = self._word()
            if word.get("nonces", {}).get(str(self.rank)) == nonce:
                break
            self._pause(deadline, "rank 0 did not come")
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

    def _pause(self, deadline: float, missing: str) -> None:
        if time.monotonic() > deadline:
            raise RunError(
                f"{missing} within {self.patience_s:.0f} s; all ranks must see the folder "
                f"{self.folder.parent}: a claim that several pods use must be ReadWriteMany"
            )
        time.sleep(_LOOK_S)
