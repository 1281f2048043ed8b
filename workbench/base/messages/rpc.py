"""Requests and answers between two processes, in lines of JSON over any two byte streams.

A request is `{"id": 7, "op": "ping", …}`, its answer `{"id": 7, "ok": true, …}` or
`{"id": 7, "ok": false, "error": "…"}`. A `{"id": 7, "piece": …}` may precede. Any order is fine.
Here is the side that asks; `server` has the side that answers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.base.messages import lines
from workbench.base.messages.lines import LARGEST, Lines, Stream

OnPiece = Callable[[Any], None]
"""Function that takes the pieces of an answer as they arrive."""


class Refused(Exception):
    """The peer answered and refused. `answer` has all fields of the answer."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(str(answer.get("error", "the request was refused")))
        self.answer = answer


class Late(TimeoutError):
    """No answer came before the deadline. `Client.result` returns a later answer."""


class Call:
    """A client's sent request, with its answer and pieces once received."""

    def __init__(self, number: int, op: object, arrived: Callable[[], None] | None) -> None:
        self.number = number
        self.op = op
        self.arrived = arrived
        self.pieces: deque[Any] = deque()
        self.answer: dict[str, Any] | None = None


class Client:
    """Send requests over a stream from any number of threads. A waiting thread reads for all."""

    def __init__(self, stream: Stream, *, largest_answer: int = LARGEST) -> None:
        self._stream = stream
        self._lines = Lines(largest_answer)
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._calls: dict[int, Call] = {}
        self._last = 0
        self._reading = False
        self.lost = ""  # why no message can be sent or read any more

    def call(
        self, request: Mapping[str, object], timeout_s: float, on_piece: OnPiece | None = None
    ) -> dict[str, Any]:
        """Send a request and return its answer. Errors as for `send` and `result`."""
        call = self.send(request)
        try:
            return self.result(call, timeout_s, on_piece)
        finally:
            self.forget(call)

    def send(
        self, request: Mapping[str, object], arrived: Callable[[], None] | None = None
    ) -> Call:
        """Send a request. TooLong: the request was not sent. OSError: the connection is lost.

        The thread that reads the answer calls `arrived`.
        """
        with self._writing:
            self._last += 1
            call = Call(self._last, request.get("op"), arrived)
            line = lines.to_line({**request, "id": call.number})
            lines.check_length(len(line), f"the request {call.op!r}")
            if self.lost:
                raise ConnectionError(self.lost)
            self._calls[call.number] = call
            try:
                self._stream.write(line)
            except BaseException as error:  # no line may follow a part of a line
                self.lost = str(error) or type(error).__name__
                self.forget(call)
                raise
        return call

    def result(
        self, call: Call, timeout_s: float, on_piece: OnPiece | None = None
    ) -> dict[str, Any]:
        """Wait for the answer to a call, and pass its pieces to `on_piece` as they arrive.

        Raises:
            Refused: The peer refused.
            Late: The time is over. The call remains, and `result` can be called again.
            ConnectionError: The peer ended, or sent an invalid answer.
        """
        end_s = lines.deadline(timeout_s)
        while True:
            lost, answer = self.lost, call.answer  # in this order: an answer precedes the loss
            while call.pieces:
                piece = call.pieces.popleft()
                if on_piece is not None:
                    on_piece(piece)
            if answer is not None:
                self.forget(call)
                if not answer.get("ok"):
                    raise Refused(answer)
                return answer
            if lost:
                raise ConnectionError(lost)
            if lines.remaining(end_s) == 0 or not self._wait(call, end_s):
                raise Late(f"no answer to {call.op!r} in {timeout_s:g} s")

    def look(self, call: Call) -> dict[str, Any] | None:
        """Read what has come, and return the answer to a call, or None. Errors as for `result`."""
        if call.answer is None and not self.lost:
            self._wait(call, lines.deadline(0.0))
        try:
            return self.result(call, 0.0)
        except Late:
            return None

    def descriptors(self) -> Sequence[int]:
        """Return the descriptors that are readable when an answer may have come."""
        return self._stream.descriptors()

    def forget(self, call: Call) -> None:
        """Drop the answer to a call when it comes. Idempotent."""
        self._calls.pop(call.number, None)

    def _wait(self, call: Call, end_s: float | None) -> bool:
        """Wait for news of a call; read the stream if no other thread reads. False: timed out."""
        with self._changed:
            if call.answer is not None or call.pieces or self.lost:
                return True
            if self._reading:
                return self._changed.wait(lines.remaining(end_s))
            self._reading = True
        try:
            self._receive(self._stream.read(lines.remaining(end_s)))
        except TimeoutError:
            return False
        except (OSError, ValueError) as error:
            self.lost = str(error) or type(error).__name__
        finally:
            with self._changed:
                self._reading = False
                self._changed.notify_all()
        return True

    def _receive(self, data: bytes) -> None:
        if not data:
            where = " in the middle of a message" if self._lines.is_cut else ""
            raise ConnectionError(f"the peer closed the line{where}")
        self._lines.feed(data)
        while (line := self._lines.take()) is not None:
            message = lines.from_line(line)
            number = message.get("id")
            if number is None and len(self._calls) == 1:  # the peer could not read the request
                (number,) = self._calls
            call = self._calls.get(number) if isinstance(number, int) else None
            if call is not None and "piece" in message:
                call.pieces.append(message["piece"])
            elif call is not None:
                call.answer = message
                if call.arrived is not None:
                    call.arrived()
