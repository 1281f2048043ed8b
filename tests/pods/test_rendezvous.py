from __future__ import annotations

import hmac
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.hurried import HurriedClock
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError, PodError, PodTimeout
from workbench.base.files import write_text
from workbench.pods.pod import Pod
from workbench.pods.rendezvous.listener import Rendezvous, decode_report
from workbench.pods.rendezvous.report import encode_report, proof, register
from workbench.pods.ssh.identity import check_key_line, generate_key

NAMES = ["pod-0", "pod-1", "pod-2"]


@pytest.fixture(scope="module")
def host_key(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("key") / "key"
    generate_key(path, "test")
    return check_key_line(path.with_name("key.pub").read_text().strip())


@pytest.fixture
def pods(host_key: str) -> list[Pod]:
    return [
        Pod(
            name=name,
            address=f"127.0.0.{i + 2}",
            ssh_port=2222,
            user="me",
            slots=1,
            host_key=host_key,
            root=f"/srv/pods/{name}",
            python="/usr/bin/python3",
            versions={"torch": "2.13.0"},
        )
        for i, name in enumerate(NAMES)
    ]


@pytest.fixture
def place() -> Iterator[Rendezvous]:
    with Rendezvous(NAMES) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as made:
        yield made


def send(place: Rendezvous, pod: Pod, token: bytes | None = None, timeout_s: float = 120.0) -> None:
    register(place.host, place.port, token or place.token, pod, timeout_s=timeout_s)


def test_workers_come_at_once_in_any_order(
    place: Rendezvous, pods: list[Pod], pool: ThreadPoolExecutor
) -> None:
    lines: list[str] = []
    done = [pool.submit(send, place, pod) for pod in reversed(pods)]
    up: list[list[str]] = []
    came = place.wait(
        120.0, report=lines.append, arrived=lambda pods: up.append([pod.name for pod in pods])
    )
    assert [encode_report(pod) for pod in came] == [encode_report(pod) for pod in pods]
    assert [future.result(300) for future in done] == [None] * 3
    assert [line[:6] for line in lines] == ["1 of 3", "2 of 3", "3 of 3"]
    assert list(map(len, up)) == [1, 2, 3] and up[-1] == [pod.name for pod in pods]
    assert not place.refused


def test_thirty_two_workers(pods: list[Pod], pool: ThreadPoolExecutor) -> None:
    names = [f"pod-{i}" for i in range(32)]
    with Rendezvous(names) as place:
        for i, name in enumerate(names):
            pool.submit(send, place, replace(pods[0], name=name, address=f"10.0.0.{i + 1}"))
        assert [pod.name for pod in place.wait(300)] == names


def test_the_same_worker_twice_is_one(pods: list[Pod], pool: ThreadPoolExecutor) -> None:
    with Rendezvous(["pod-0", "pod-1"]) as place:
        again = [pool.submit(send, place, pods[0]) for _ in range(3)]
        later = pool.submit(lambda: (wait(again), send(place, pods[1])))
        assert len(place.wait(300)) == 2
        assert [future.result(300) for future in again] == [None] * 3
        assert later.exception(300) is None


def fail(
    place: Rendezvous, pool: ThreadPoolExecutor, *reports: Pod
) -> tuple[str, list[Future[None]]]:
    sent = []

    def one_after_the_other() -> None:
        for pod in reports:
            wait(sent)
            sent.append(pool.submit(send, place, pod))

    thread = threading.Thread(target=one_after_the_other)
    thread.start()
    with pytest.raises(PodError) as caught:
        place.wait(300)
    thread.join(300)
    assert not isinstance(caught.value, PodTimeout)
    return str(caught.value), sent


def test_two_workers_with_one_address_are_refused_by_name(
    place: Rendezvous, pods: list[Pod], pool: ThreadPoolExecutor
) -> None:
    message, sent = fail(place, pool, pods[0], replace(pods[1], address="127.0.0.2"))
    assert (
        message
        == "workers pod-0 and pod-1 both report 127.0.0.2:2222: the same host twice, or a clone?"
    )
    with pytest.raises(PodError, match="refused pod-1: workers pod-0 and pod-1"):
        sent[1].result(300)


def test_a_worker_that_contradicts_itself_is_refused(
    place: Rendezvous, pods: list[Pod], pool: ThreadPoolExecutor
) -> None:
    message, _ = fail(place, pool, pods[0], replace(pods[0], address="127.0.0.9"))
    assert says(
        message,
        "two different workers report as",
        "pod-0",
        "127.0.0.2:2222",
        "127.0.0.9:2222",
    )


HOSTILE = [
    "-oProxyCommand=touch canary",
    "exec:x",
    "a;id",
    "^/etc/passwd",
    "x slots=9\ny",
    "fe80::1%eth0",
    "a" * 300,
    "",
    "0.0.0.0",
]


@pytest.mark.parametrize("address", HOSTILE)
def test_a_hostile_address_is_refused_by_name(
    place: Rendezvous, pods: list[Pod], pool: ThreadPoolExecutor, address: str
) -> None:
    message, sent = fail(place, pool, replace(pods[2], address=address))
    assert message.startswith("worker pod-2 sent an invalid address: ")
    assert len(message) < 200
    with pytest.raises(PodError, match="refused pod-2"):
        sent[0].result(300)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ssh_port", 0),
        ("ssh_port", "22"),
        ("slots", 0),
        ("slots", 1e9),
        ("slots", True),
        ("user", "a b"),
        ("user", None),
        ("host_key", "ssh-ed25519 AAAA\n* ssh-ed25519 AAAA"),
        ("root", "relative"),
        ("root", "/a/../etc"),
        ("root", "/a\nb"),
        ("python", "python"),
        ("versions", []),
        ("versions", {"torch": 2}),
        ("versions", {"torch": "2\x1b[31m"}),
    ],
)
def test_other_hostile_fields(pods: list[Pod], field: str, value: object) -> None:
    data = json.loads(encode_report(pods[1])) | {field: value}
    with pytest.raises(
        ConfigError, match=f"worker pod-1 sent an invalid {field.replace('_', ' ')}"
    ):
        decode_report(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", "[" * 2000, '{"name": "pod-0"}', "1" * 4000])
def test_reports_of_another_shape(text: str) -> None:
    with pytest.raises(ConfigError):
        decode_report(text)


@pytest.mark.parametrize(
    "field", [{"ssh_address": "127.0.0.1"}, {"key": "/etc/shadow"}, {"control": ""}]
)
def test_a_worker_does_not_choose_the_way_to_it(pods: list[Pod], field: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=sentence("the report has not the fields of a worker's report")
    ):
        decode_report(json.dumps(json.loads(encode_report(pods[0])) | field))


@pytest.mark.parametrize("name", ["", "../pod", "pod 0", "-x", 7, "Pod", "a" * 70])
def test_hostile_names(pods: list[Pod], name: object) -> None:
    with pytest.raises(ConfigError, match=sentence("the report has no valid worker name")):
        decode_report(json.dumps(json.loads(encode_report(pods[0])) | {"name": name}))


def test_the_deadline_says_who_came_and_who_did_not(
    place: Rendezvous,
    pods: list[Pod],
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = HurriedClock()
    monkeypatch.setattr("workbench.pods.rendezvous.listener.time", clock)

    def arrived(came: Sequence[Pod]) -> None:
        assert clock.ahead_s == 0.0, "the deadline is not over"
        clock.ahead_s = 4000.0 * (len(came) == 2)

    pool.submit(send, place, pods[0])
    pool.submit(send, place, pods[1])
    with pytest.raises(PodTimeout) as caught:
        place.wait(
            4000.0,
            arrived=arrived,
            status_of=lambda name: "started 1 s ago, last log line: pulling image",
        )
    assert isinstance(caught.value, TimeoutError)
    expected = (
        "2 of 3 workers reported in 4000 s; missing: pod-2 "
        "(started 1 s ago, last log line: pulling image)"
    )
    assert str(caught.value) == expected


def test_watch_can_give_up_at_once(place: Rendezvous) -> None:
    def dead() -> None:
        raise PodError("pod-1 ended with exit code 3")

    with pytest.raises(PodError, match="exit code 3"):
        place.wait(3600.0, watch=dead)


def test_a_worker_that_nobody_expects(
    place: Rendezvous, pods: list[Pod], pool: ThreadPoolExecutor
) -> None:
    stray = pool.submit(send, place, replace(pods[0], name="pod-9"))
    sent = [pool.submit(send, place, pod) for pod in pods[:2]]
    pool.submit(lambda: (wait([stray, *sent]), send(place, pods[2])))
    assert len(place.wait(300)) == 3
    with pytest.raises(PodError, match=sentence("no worker {} is expected", "pod-9")):
        stray.result(300)
    assert all(future.exception(300) is None for future in sent)


def test_a_wrong_token_is_counted_and_told_only_when_none_came(
    place: Rendezvous,
    pods: list[Pod],
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = HurriedClock()
    monkeypatch.setattr("workbench.pods.rendezvous.listener.time", clock)

    def watch() -> None:
        clock.ahead_s = 4000.0 * bool(place.refused["wrong token"])

    sent = pool.submit(send, place, pods[0], b"x" * 32, 0.5)
    with pytest.raises(
        PodTimeout, match=sentence("; {} reports came with a wrong token", "0 of 3")
    ):
        place.wait(4000.0, watch=watch)
    assert place.refused["wrong token"] >= 1
    with pytest.raises(PodTimeout):
        sent.result(300)


def talk(place: Rendezvous, line: bytes) -> bytes:
    with socket.create_connection((place.host, place.port), timeout=300) as connection:
        connection.makefile("rb").readline()
        connection.sendall(line)
        return connection.makefile("rb").readline()


def test_a_replayed_report_is_refused(pods: list[Pod], pool: ThreadPoolExecutor) -> None:
    with Rendezvous(["pod-0", "pod-1"]) as place:
        recorded: list[bytes] = []

        def honest_worker_overheard() -> None:
            with socket.create_connection((place.host, place.port), timeout=300) as connection:
                nonce = json.loads(connection.makefile("rb").readline())["nonce"]
                report = encode_report(pods[0])
                message = {
                    "report": report,
                    "nonce": "n",
                    "proof": proof(place.token, "worker", nonce, "n", report),
                }
                recorded.append(json.dumps(message).encode() + b"\n")
                connection.sendall(recorded[0])
                assert b'"error": ""' in connection.makefile("rb").readline()
            assert talk(place, recorded[0]) == b""
            send(place, pods[1])

        done = pool.submit(honest_worker_overheard)
        place.wait(300)
        done.result(300)
        assert place.refused == {"wrong token": 1}


def test_a_false_rendezvous_is_recognised(pods: list[Pod], pool: ThreadPoolExecutor) -> None:
    """It takes the report without a word against it, but cannot prove the token."""
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(300)

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b'{"nonce": "00"}\n')
                seen.append(connection.makefile("rb").readline())
                connection.sendall(b'{"error": "", "proof": "00"}\n')

        done = pool.submit(impostor)
        token = os.urandom(32)
        with pytest.raises(
            PodError, match=sentence("is not proven to be the rendezvous of the cluster")
        ):
            register("127.0.0.1", listener.getsockname()[1], token, pods[0], timeout_s=300)
        done.result(300)
    assert token not in seen[0]
    assert token.hex().encode() not in seen[0]


def test_a_worker_waits_for_a_rendezvous_that_is_late(pods: list[Pod]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    began_s = time.monotonic()
    with pytest.raises(PodTimeout, match=sentence("no answer from the rendezvous {}:{} in {} s")):
        register("127.0.0.1", port, b"x" * 32, pods[0], timeout_s=0.6)
    assert time.monotonic() - began_s > 0.3


def junk(count: int) -> list[bytes]:
    source = random.Random(7)
    forms = [
        lambda: source.randbytes(source.randrange(1, 3000)),
        lambda: source.randbytes(200) + b"\n",
        lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda: b"SSH-2.0-scan\r\n",
        lambda: b"[" * 4000 + b"\n",
        lambda: b'{"report": 1, "nonce": [], "proof": null}\n',
        lambda: b'{"report": "\\ud800", "nonce": "\\ud800", "proof": "\\ud800"}\n',
        lambda: b"1" * 4000 + b"\n",
        lambda: json.dumps({"report": "{}", "nonce": "0", "proof": "0" * 64}).encode() + b"\n",
        lambda: b"\n",
        lambda: b"x" * 100_000,
        lambda: b"",
    ]
    return [source.choice(forms)() for _ in range(count)]


def throw(port: int, messages: list[bytes]) -> None:
    for message in messages:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
                connection.sendall(message)
                if random.random() < 0.5:
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                    )  # end by reset
        except OSError:
            continue


def storm(pods: list[Pod], pool: ThreadPoolExecutor, count: int) -> None:
    """Throw junk beside 300 silent open sockets: honest workers get through, and memory stays."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Rendezvous(NAMES) as place:
        idle = [socket.create_connection((place.host, place.port)) for _ in range(100)]
        waiting = pool.submit(place.wait, 500.0)
        idle += [socket.create_connection((place.host, place.port)) for _ in range(200)]
        for connection in idle[::2]:
            connection.sendall(b'{"half a mess')
        thrower = subprocess.Popen([sys.executable, __file__, str(place.port), str(count)])
        for future in [pool.submit(send, place, pod, timeout_s=300) for pod in pods[:2]]:
            future.result(300)
        assert thrower.wait(400) == 0
        send(place, pods[2], timeout_s=300)
        assert [pod.name for pod in waiting.result(300)] == NAMES
        for connection in idle:
            connection.close()
        assert sum(place.refused.values()) > 0.5 * count
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 10_000


def test_garbage_does_no_harm(pods: list[Pod], pool: ThreadPoolExecutor) -> None:
    storm(pods, pool, 500)


@pytest.mark.long
@pytest.mark.slow
def test_ten_thousand_junk_messages_do_no_harm(pods: list[Pod], pool: ThreadPoolExecutor) -> None:
    storm(pods, pool, 10_000)


def test_an_idle_connection_is_dropped_after_its_time(
    place: Rendezvous, pods: list[Pod], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.pods.rendezvous.listener._READ_TIMEOUT_S", 0.3)
    with socket.create_connection((place.host, place.port), timeout=300) as idle:
        while not place.refused["idle"]:
            with pytest.raises(PodTimeout):
                place.wait(0.5)
        assert idle.makefile("rb").read().count(b"\n") == 1  # its nonce, then the end
    assert place.refused["idle"] == 1


def test_it_listens_on_loopback_alone_and_closes(pods: list[Pod]) -> None:
    with Rendezvous(["pod-0"]) as place:
        port = place.port
        assert place.host == "127.0.0.1"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=1)
        assert place.token.hex() not in repr(place)
    place.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    with pytest.raises(ConfigError, match=sentence("the rendezvous cannot listen on", "192.0.2.1")):
        Rendezvous(["pod-0"], host="192.0.2.1")


def test_a_worker_that_is_no_child_brings_its_token_in_a_file(
    tmp_path: Path, pods: list[Pod]
) -> None:
    with Rendezvous(["pod-0"]) as place:
        write_text(tmp_path / "token", place.token.hex())
        script = (
            "import json,sys; from pathlib import Path; "
            "from workbench.pods.rendezvous.report import register;"
            "from workbench.pods.rendezvous.listener import decode_report;"
            "register('127.0.0.1', int(sys.argv[1]), "
            "bytes.fromhex(Path(sys.argv[2]).read_text()), decode_report(sys.argv[3]), "
            "timeout_s=300)"
        )
        argv = [
            sys.executable,
            "-c",
            script,
            str(place.port),
            str(tmp_path / "token"),
            encode_report(pods[0]),
        ]
        worker = subprocess.Popen(argv, start_new_session=True)
        try:
            assert place.wait(300)[0].address == "127.0.0.2"
        finally:
            assert worker.wait(300) == 0


def test_the_proof_binds_every_part() -> None:
    one = proof(b"t", "worker", "ab", "c")
    assert one != proof(b"t", "worker", "a", "bc")
    assert one != proof(b"t", "rendezvous", "ab", "c")
    assert one != proof(b"u", "worker", "ab", "c")
    assert hmac.compare_digest(one, proof(b"t", "worker", "ab", "c"))


if __name__ == "__main__":  # the junk comes from a process of its own, as it would
    throw(int(sys.argv[1]), junk(int(sys.argv[2])))
