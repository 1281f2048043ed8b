from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.support.poll import until
from tests.support.sentences import sentence
from tests.support.writtenrun import write_run
from workbench import Run, tensorboard
from workbench.base.errors import BackendError, RunError
from workbench.base.process import is_alive, process_start_time
from workbench.client.tensorboard import server as boardserver
from workbench.rundir.events import Event
from workbench.rundir.figures.curves import ScalarWriter

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def curves(folder: Path) -> Path:
    writer = ScalarWriter(folder)
    for step in range(3):
        writer.add(
            Event(time_s=time.time(), rank=0, kind="step", data={"step": step, "loss": 2.0 - step})
        )
    writer.close()
    return folder


def test_a_server_shows_the_curves_on_loopback_and_is_found_again(tmp_path: Path) -> None:
    folder = curves(tmp_path / "tensorboard")
    assert boardserver.find(folder) is None
    server = boardserver.serve(folder)
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{server.port}/{server.token}/data/plugin/scalars/tags"
        ) as answer:
            assert "train/loss" in json.dumps(json.load(answer))
        assert listeners(server.port) == ["0100007F"]
        assert boardserver.serve(folder) == server == boardserver.find(folder)
        (tmp_path / "link").symlink_to(folder)
        assert boardserver.find(tmp_path / "link") == server
        assert boardserver.find(tmp_path / "elsewhere") is None
    finally:
        server.stop()
    assert not is_alive(server.pid, server.start_time)
    assert boardserver.find(folder) is None
    server.stop()


def test_it_ends_with_its_owner_however_that_ends(tmp_path: Path) -> None:
    code = (
        "import sys, os; from pathlib import Path; "
        "from workbench.client.tensorboard.server import serve; s = serve(Path(sys.argv[1])); "
        "print(s.pid, s.start_time, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    pid, start_time = (int(word) for word in done.stdout.split())
    until(lambda: not is_alive(pid, start_time))


def test_another_folder_takes_over_a_prescribed_port(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert not boardserver.is_free(port)
        with pytest.raises(BackendError, match=str(port)):
            boardserver.serve(tmp_path / "a", port=port)
    first = boardserver.serve(tmp_path / "a", port=port)
    assert boardserver.is_free(port)
    second = boardserver.serve(tmp_path / "b", port=port)
    assert (first.port, second.port) == (port, port)
    assert not first.is_alive
    second.stop()


def test_a_record_of_another_process_with_that_pid_is_no_server(
    tmp_path: Path, own_records: Path
) -> None:
    record = boardserver._record(tmp_path)
    stale = {
        "folder": str(tmp_path),
        "port": 1,
        "pid": os.getpid(),
        "start_time": 1,
        "owner": 1,
        "token": "t",
        "nonce": "n",
    }
    record.write_text(json.dumps(stale))
    assert boardserver.find(tmp_path) is None


def test_records_in_a_folder_that_others_can_write_are_refused(
    tmp_path: Path, own_records: Path
) -> None:
    boardserver.find(tmp_path)
    (folder,) = own_records.iterdir()
    folder.chmod(0o777)
    with pytest.raises(BackendError, match=sentence("or set XDG_RUNTIME_DIR to a private folder")):
        boardserver.find(tmp_path)


def test_who_does_not_know_the_token_gets_nothing(tmp_path: Path) -> None:
    server = boardserver.serve(curves(tmp_path / "tensorboard"))
    try:
        record = boardserver._record(tmp_path / "tensorboard")
        assert record.stat().st_mode & 0o777 == 0o600
        argv = Path("/proc", str(server.pid), "cmdline").read_bytes()
        for path in (
            "",
            "data/environment",
            "data/plugin/scalars/tags",
            "index.js",
            f"{server.token[:-1]}/data/runs",
        ):
            with pytest.raises(HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{server.port}/{path}")
            answer = refused.value.read()
            assert refused.value.code == 404
            assert server.token.encode() not in answer + str(refused.value.headers).encode() + argv
    finally:
        server.stop()


def test_several_runs_are_shown_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "CDSW_ENGINE_ID",
        "JUPYTERHUB_SERVICE_PREFIX",
        "TENSORBOARD_PROXY_URL",
        "WORKBENCH_JUPYTER",
    ):
        monkeypatch.delenv(name, raising=False)
    runs = [write_run(tmp_path / name) for name in ("first", "second")]
    for run in runs:
        curves(run.paths.tensorboard)
    board = tensorboard([str(runs[0].paths.root), Run.load(runs[1].paths.root)])
    try:
        names = [f"{name}/cluster/runs/{runs[0].paths.root.name}" for name in ("first", "second")]
        assert list(board.runs) == names, (
            "where the directories have the same name, those above tell them apart"
        )
        url = f"http://127.0.0.1:{board.server.port}/{board.server.token}/data/plugin/scalars/tags"

        def shown() -> list[str]:
            with urllib.request.urlopen(url) as answer:
                return sorted(json.load(answer))

        until(
            lambda: shown() == [name.replace("/", " ") for name in names],
            120,
            every_s=0.5,
            why=shown,
        )
        assert tensorboard(run.paths.root for run in runs).server == board.server
    finally:
        board.stop()
    with pytest.raises(RunError, match=sentence("not a run directory: {} holds no run.json")):
        tensorboard(tmp_path)


class Stranger(BaseHTTPRequestHandler):
    """Answers everything, and is no TensorBoard of ours."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"window_title": "Workbench", "data_location": "/runs"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_stranger_on_the_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        thread = threading.Thread(target=stranger.serve_forever)
        thread.start()
        me, port = os.getpid(), stranger.server_port
        alive = {"pid": me, "start_time": process_start_time(me), "owner": me}
        server = boardserver.BoardServer(
            folder=str(tmp_path), port=port, token="t", nonce="5f1e", **alive
        )
        assert server.is_alive
        assert not server.answers
        stranger.shutdown()
        thread.join(300)
    assert not server.answers


def listeners(port: int) -> list[str]:
    """The local addresses, as the kernel writes them, on which somebody listens."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return [
        words[1].partition(":")[0]
        for words in lines
        if words[3] == "0A" and words[1].endswith(f":{port:04X}")
    ]
