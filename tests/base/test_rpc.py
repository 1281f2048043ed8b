"""Requests and answers over byte streams: any cuts, any order, late, lost, in pieces, too long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sentences import says, sentence
from workbench.base.messages.lines import LARGEST, Lines, Pipes, TooLong, from_line, to_line
from workbench.base.messages.rpc import Client, Late, Refused
from workbench.base.messages.server import Request, Requests, incoming

SOON_S = 300.0  # for what takes no time on an idle machine

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
MESSAGES = st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=6)


def pipes(end: socket.socket) -> Pipes:
    return Pipes(end.fileno(), end.fileno(), write_s=SOON_S)


@contextmanager
def pair(**options: int) -> Iterator[tuple[Client, socket.socket]]:
    """Yield a client, and the socket of its peer, which a test plays."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(SOON_S)
    with ours, theirs:
        yield Client(pipes(ours), **options), theirs


def told(peer: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages that a peer is sent."""
    with peer.makefile("rb") as lines:
        for line in lines:
            yield from_line(line)


@contextmanager
def serving(do: Callable[[Request], object]) -> Iterator[Client]:
    """Yield a client of a server that does something with each request."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        for request in incoming(pipes(theirs)):
            do(request)

    thread = threading.Thread(target=serve)
    with theirs:
        with ours:
            thread.start()
            yield Client(pipes(ours))
        thread.join(SOON_S)
    assert not thread.is_alive(), "the server ends with its peer"


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@given(MESSAGES, st.lists(st.integers(0, 400), max_size=40))
def test_messages_survive_any_cut(messages: list[dict[str, Any]], cuts: list[int]) -> None:
    lines, found = Lines(), []
    for data in pieces_of(b"".join(map(to_line, messages)), cuts):
        lines.feed(data)
        while (line := lines.take()) is not None:
            found.append(from_line(line))
    assert found == messages
    assert not lines.is_cut


@given(st.lists(st.binary(max_size=12)), st.integers(1, 6), st.lists(st.integers(0, 99)))
def test_a_line_beyond_the_limit_is_refused_however_it_comes(
    words: list[bytes], limit: int, cuts: list[int]
) -> None:
    whole = b"\n".join(words) + b"\n"
    within = [len(line) <= limit for line in whole.split(b"\n")[:-1]]
    lines, found = Lines(limit), []
    try:
        for data in pieces_of(whole, cuts):
            lines.feed(data)
            while (line := lines.take()) is not None:
                found.append(line)
    except TooLong:
        assert not all(within)
        assert len(found) == within.index(False)
    else:
        assert all(within)
        assert found == whole.split(b"\n")[:-1]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_junk_gets_a_refusal_and_the_next_request_is_read(junk: bytes, cuts: list[int]) -> None:
    answers: list[dict[str, Any]] = []
    requests = Requests(lambda line: answers.append(from_line(line)))
    found = []
    for data in pieces_of(junk + b"\n" + to_line({"id": 5, "op": "ping"}), cuts):
        requests.received.feed(data)
        while (request := requests.take()) is not None:
            found.append(request.fields)
    assert found[-1] == {"id": 5, "op": "ping"}
    assert len(answers) + len(found) == junk.count(b"\n") + 2
    assert all(answer["ok"] is False and answer["id"] is None for answer in answers)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=100))
def test_a_client_survives_junk_as_a_lost_line(junk: bytes) -> None:
    with pair() as (client, peer):
        call = client.send({"op": "ping"})
        peer.sendall(junk + b"\n")
        peer.close()
        with pytest.raises((ConnectionError, Refused)):
            client.result(call, SOON_S)


def test_answers_come_in_any_order_and_each_reaches_its_own_call() -> None:
    with pair() as (client, peer):
        calls = [client.send({"op": "n", "n": n}) for n in range(3)]
        messages = told(peer)
        numbers = [next(messages)["id"] for _ in calls]
        for n in (2, 0, 1):
            peer.sendall(to_line({"id": numbers[n], "ok": True, "n": n}))
        assert [client.result(call, SOON_S)["n"] for call in calls] == [0, 1, 2]


def test_an_answer_that_comes_after_the_deadline_is_not_lost() -> None:
    with pair() as (client, peer):
        call = client.send({"op": "submit"})
        with pytest.raises(Late, match=sentence("no answer to {} in {} s", "submit", "0.05")):
            client.result(call, 0.05)
        peer.sendall(to_line({"id": 1, "ok": True, "taken": 7}))
        assert client.result(call, SOON_S)["taken"] == 7


def test_an_answer_that_is_on_its_way_at_the_deadline_is_not_taken_for_the_next() -> None:
    with pair() as (client, peer):
        with pytest.raises(Late):
            client.call({"op": "first"}, 0.05)
        peer.sendall(b'{"id": 1, "ok": true, "of": ')  # half of it
        with pytest.raises(Late):
            client.call({"op": "second"}, 0.05)
        peer.sendall(b'"first"}\n' + to_line({"id": 3, "ok": True, "of": "third"}))
        assert client.call({"op": "third"}, SOON_S)["of"] == "third"


def test_a_peer_that_drips_does_not_delay_the_deadline() -> None:
    with pair() as (client, peer):
        over = threading.Event()

        def drip() -> None:
            while not over.wait(0.01):
                peer.send(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(Late):
            client.call({"op": "ping"}, 0.3)
        with pytest.raises(TimeoutError):
            next(incoming(_Dripping(), 0.1))
        over.set()
        thread.join()


class _Dripping:
    def read(self, timeout_s: float | None) -> bytes:
        time.sleep(0.01)
        return b" "

    def write(self, data: bytes) -> None:
        raise AssertionError("there is nothing to answer")

    def descriptors(self) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (b"", sentence("the peer closed the line")),
        (b'{"id": 1, "ok": tr', sentence("in the middle of a message")),
    ],
)
def test_a_peer_that_dies_ends_every_call(last: bytes, words: str) -> None:
    with pair() as (client, peer):
        calls = [client.send({"op": "ping"}) for _ in range(2)]
        messages = told(peer)
        assert [next(messages)["id"] for _ in calls] == [1, 2]
        peer.sendall(to_line({"id": 2, "ok": True}) + last)
        peer.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionError, match=words):
            client.result(calls[0], SOON_S)
        assert client.result(calls[1], SOON_S)["ok"], "an answer that came before the end counts"
        with pytest.raises(ConnectionError, match=words):
            client.call({"op": "ping"}, SOON_S)


def test_a_request_that_was_sent_in_half_ends_the_line() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = Client(Pipes(ours.fileno(), ours.fileno(), write_s=0.05))
        with pytest.raises(TimeoutError):  # its peer does not read
            client.send({"op": "stage", "files": "x" * (4 << 20)})
        with pytest.raises(ConnectionError):
            client.send({"op": "ping"})


def test_pieces_come_in_order_to_the_thread_that_asked_and_precede_the_answer() -> None:
    def count(request: Request) -> None:
        for n in range(request.fields["to"]):
            request.piece(n)
        request.answer({"sum": "whole"})

    with serving(count) as client:
        got: dict[int, list[tuple[int, int]]] = {}

        def ask(to: int) -> None:
            mine = got.setdefault(to, [])
            answer = client.call(
                {"op": "count", "to": to}, SOON_S, lambda n: mine.append((n, threading.get_ident()))
            )
            assert answer["sum"] == "whole"
            assert mine == [(n, threading.get_ident()) for n in range(to)]

        asking = [threading.Thread(target=ask, args=(to,)) for to in (50, 3, 200)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(SOON_S)
        assert {to: len(pieces) for to, pieces in got.items()} == {50: 50, 3: 3, 200: 200}
        assert client.call({"op": "count", "to": 5}, SOON_S)["sum"] == "whole", "none wanted them"


def test_a_refusal_is_a_value_with_its_fields_and_the_line_remains() -> None:
    def do(request: Request) -> None:
        if request.fields["op"] == "good":
            request.answer({"n": 1})
        else:
            request.refuse("the disk is full", full=True)

    with serving(do) as client:
        with pytest.raises(Refused, match="the disk is full") as caught:
            client.call({"op": "export"}, SOON_S)
        assert caught.value.answer["full"] is True
        assert client.call({"op": "good"}, SOON_S)["n"] == 1


def test_an_oversized_line_is_refused_by_name_on_either_side() -> None:
    with (
        pair() as (client, _peer),
        pytest.raises(
            TooLong, match=sentence("has {} KiB; at most {} KiB are accepted", "submit", 16384)
        ),
    ):
        client.send({"op": "submit", "job": "x" * LARGEST})
    with pair(largest_answer=1000) as (client, peer):
        call = client.send({"op": "poll"})
        peer.sendall(to_line({"id": 1, "ok": True, "log": "x" * 1000}))
        with pytest.raises(
            ConnectionError, match=sentence("a message of more than {} bytes is not accepted", 1000)
        ):
            client.result(call, SOON_S)
    answers: list[bytes] = []
    requests = Requests(answers.append)
    for _ in range(17):
        requests.received.feed(b"x" * (1 << 20))
        assert requests.take() is None
    assert requests.is_broken
    (answer,) = map(from_line, answers)
    assert says(answer["error"], "a message of more than {} bytes is not accepted", LARGEST)


def test_an_answer_may_be_longer_than_a_request_where_the_client_expects_it() -> None:
    with pair(largest_answer=2 * LARGEST) as (client, peer):
        line = to_line({"id": 1, "ok": True, "log": "x" * (LARGEST + 1)})
        sending = threading.Thread(target=peer.sendall, args=(line,))
        sending.start()
        assert len(client.call({"op": "poll"}, SOON_S)["log"]) == LARGEST + 1
        sending.join()


def test_many_threads_share_one_client_while_one_call_takes_long() -> None:
    kept: list[Request] = []

    def do(request: Request) -> None:
        if request.fields["op"] == "long":
            kept.append(request)
        else:
            request.answer({"n": request.fields["n"]})

    with serving(do) as client:
        long = client.send({"op": "long"})
        waiting = threading.Thread(target=client.result, args=(long, SOON_S))
        waiting.start()
        wrong: list[object] = []

        def ask(thread: int) -> None:
            for n in range(50):
                number = 1000 * thread + n
                answer = client.call({"op": "n", "n": number}, SOON_S)
                if answer["n"] != number:
                    wrong.append(answer)

        asking = [threading.Thread(target=ask, args=(thread,)) for thread in range(8)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(SOON_S)
            assert not thread.is_alive()
        assert not wrong
        assert waiting.is_alive(), "it has no answer yet"
        kept[0].answer({})
        waiting.join(SOON_S)
        assert not waiting.is_alive()


def test_a_child_answers_over_its_standard_streams() -> None:
    program = (
        "from workbench.base.messages import lines, server\n"
        "for request in server.incoming(lines.Pipes(0, 1)):\n"
        "    request.piece(1)\n"
        "    request.answer({'twice': 2 * request.fields['text']})\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as child:
        assert child.stdin is not None and child.stdout is not None
        client = Client(Pipes(child.stdout.fileno(), child.stdin.fileno(), write_s=SOON_S))
        for size in (1, 1 << 20):
            pieces: list[int] = []
            answer = client.call({"op": "twice", "text": "é" * size}, SOON_S, pieces.append)
            assert answer["twice"] == "é" * 2 * size
            assert pieces == [1]
        os.kill(child.pid, 9)
        with pytest.raises(OSError):
            client.call({"op": "twice", "text": ""}, SOON_S)


def test_an_answer_without_a_number_is_for_the_only_open_call() -> None:
    with pair() as (client, peer):
        only = client.send({"op": "one"})
        peer.sendall(to_line({"ok": True, "a": 1}))
        assert client.result(only, SOON_S) == {"ok": True, "a": 1}
        first, second = client.send({"op": "one"}), client.send({"op": "two"})
        peer.sendall(to_line({"ok": True, "a": 2}))
        peer.sendall(to_line({"id": second.number, "ok": True, "a": 3}))
        assert client.result(second, SOON_S)["a"] == 3
        assert first.answer is None, "nobody can say which of two was answered"
        peer.sendall(to_line({"id": second.number, "ok": True, "a": 4}))
        peer.sendall(to_line({"id": first.number, "ok": True, "a": 5}))
        assert client.result(first, SOON_S)["a"] == 5


def test_a_loss_without_words_is_named_by_its_kind() -> None:
    class Broken:
        def write(self, _data: bytes) -> None:
            raise ConnectionResetError

        def read(self, _timeout_s: float | None) -> bytes:
            raise BrokenPipeError

        def descriptors(self) -> list[int]:
            return []

    client = Client(Broken())
    with pytest.raises(ConnectionResetError):
        client.send({"op": "one"})
    assert client.lost == "ConnectionResetError"
    with pytest.raises(ConnectionError, match=r"^ConnectionResetError$"):
        client.send({"op": "two"})
