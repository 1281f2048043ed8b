"""The side of `rpc` that answers: requests out of the bytes of a peer, answered now or later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from workbench.base.messages import lines
from workbench.base.messages.lines import Lines, Stream, TooLong


class Request:
    """A request as the server received it. `answer` or `refuse` ends the request, now or later."""

    def __init__(self, fields: Mapping[str, Any], write: Callable[[bytes], object]) -> None:
        self.fields = fields
        self._write = write

    def answer(self, fields: Mapping[str, object]) -> None:
        self._say({"ok": True, **fields})

    def refuse(self, error: str, **fields: object) -> None:
        self._say({"ok": False, "error": error, **fields})

    def piece(self, value: object) -> None:
        """Send a part of the answer ahead of it."""
        self._say({"piece": value})

    def _say(self, message: Mapping[str, object]) -> None:
        self._write(lines.to_line({**message, "id": self.fields.get("id")}))


class Requests:
    """Requests in the bytes of a peer. A line without a valid request is refused at once."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.received = Lines()
        self._write = write
        self.is_broken = False  # a line was too long: no later request can be found

    def take(self) -> Request | None:
        """Return the next complete request, or None."""
        while not self.is_broken:
            try:
                line = self.received.take()
                return None if line is None else Request(lines.from_line(line), self._write)
            except ValueError as error:
                self.is_broken = isinstance(error, TooLong)
                Request({}, self._write).refuse(str(error))
        return None


def incoming(stream: Stream, timeout_s: float | None = None) -> Iterator[Request]:
    """Yield the requests of a peer until it ends. TimeoutError: none came in `timeout_s`."""
    requests = Requests(stream.write)
    end_s = lines.deadline(timeout_s)
    while not requests.is_broken:
        request = requests.take()
        if request is not None:
            yield request
            end_s = lines.deadline(timeout_s)
        elif lines.remaining(end_s) == 0:
            raise TimeoutError("no whole request came in time")
        else:
            data = stream.read(lines.remaining(end_s))
            if not data:
                return
            requests.received.feed(data)
