"""How ranks that nobody looks after find each other: small files in a folder that all of them see.

The first rank calls, the others answer, and when all have it prepares and gives the word. Files of an earlier attempt
mislead nobody: an answer names the call that it answers, and the word names the nonces of those it is meant for.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import RunError
from workbench.base.files import read_json, write_json

__all__ = ["Muster"]

_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Muster:
    """One rank's side of the meeting."""

    folder: Path
    """The folder, the same one for all ranks."""
    rank: int
    """This rank."""
    world_size: int
    """Number of ranks."""
    patience_s: float = 900.0
    """Seconds to wait for the others. Default a quarter of an hour: their images may still be on the way."""

    def lead(self, prepare: Callable[[], Mapping[str, object]]) -> Mapping[str, object]:
        """Call the others and, when all are there, prepare and tell them what came of it; for rank 0."""
        self.folder.mkdir(parents=True, exist_ok=True)
        call = secrets.token_hex(8)
        write_json(self.folder / "call.json", {"call": call})
        nonces = self._await("ranks {} did not come", lambda: self._answers(call))
        try:
            facts = prepare()
        except BaseException as error:
            write_json(self.folder / "word.json", {"nonces": nonces, "refused": str(error) or type(error).__name__})
            raise
        write_json(self.folder / "word.json", {"nonces": nonces, "facts": facts})
        return facts

    def follow(self) -> Mapping[str, object]:
        """Answer the first rank and wait for its word; for all others."""
        nonce, answered = secrets.token_hex(8), ""

        def word() -> Mapping[str, object] | None:
            nonlocal answered
            call = str(read_json(self.folder / "call.json").get("call", ""))
            if call and call != answered:
                write_json(self.folder / f"answer-{self.rank}.json", {"call": call, "nonce": nonce})
                answered = call
            told = read_json(self.folder / "word.json")
            nonces = told.get("nonces")
            mine = isinstance(nonces, dict) and nonces.get(str(self.rank)) == nonce
            return told if mine else None

        told = self._await("rank 0 did not come", word)
        if "refused" in told:
            raise RunError(f"rank 0 could not prepare the run: {told['refused']}")
        facts = told["facts"]
        return facts if isinstance(facts, dict) else {}

    def _answers(self, call: str) -> Mapping[str, object] | None:
        found: dict[str, object] = {}
        for rank in range(1, self.world_size):
            answer = read_json(self.folder / f"answer-{rank}.json")
            if answer.get("call") == call:
                found[str(rank)] = answer["nonce"]
        return found if len(found) == self.world_size - 1 else None

    def _await(self, missing: str, look: Callable[[], Mapping[str, object] | None]) -> Mapping[str, object]:
        deadline = time.monotonic() + self.patience_s
        while (found := look()) is None:
            if time.monotonic() > deadline:
                call = str(read_json(self.folder / "call.json").get("call", ""))
                there = [r for r in range(1, self.world_size) if self._answered(r, call)]
                absent = [r for r in range(1, self.world_size) if r not in there]
                raise RunError(
                    f"{missing.format(absent)} within {self.patience_s:.0f} s; all ranks must see the folder "
                    f"{self.folder.parent}: a claim that several pods use must be ReadWriteMany"
                )
            time.sleep(_LOOK_S)
        return found

    def _answered(self, rank: int, call: str) -> bool:
        return read_json(self.folder / f"answer-{rank}.json").get("call") == call
