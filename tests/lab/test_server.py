"""What a real Jupyter server with our extension answers, to whom, and its way to TensorBoard."""

from __future__ import annotations

import glob
import io
import json
import random
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from jupyter_core.paths import jupyter_path
from jupyterlab_server.config import get_federated_extensions

import workbench.lab
from tests.fakes.jupyterserver import Server, start_server
from tests.support.poll import until
from tests.support.sentences import says
from tests.support.writtenrun import WrittenRun, write_run
from workbench.base.process import is_alive
from workbench.client.tensorboard.board import (
    BOARD_PATH,
    JUPYTER_VARIABLE,
    Way,
    find_route,
    jupyter_server,
)
from workbench.client.tensorboard.server import BoardServer
from workbench.rundir.events import Event
from workbench.rundir.figures.curves import ScalarWriter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("with"), "jupyter_server") as server:
        yield server


@pytest.fixture(scope="module")
def written(server: Server) -> WrittenRun:
    run = write_run(server.folder)
    run.end(steps=3)
    writer = ScalarWriter(run.paths.tensorboard)
    for step in range(3):
        writer.add(
            Event(time_s=time.time(), rank=0, kind="step", data={"step": step, "loss": 2.0 - step})
        )
    writer.close()
    return run


def client_of(server: Server, *, token: bool = True) -> Any:
    headers = {"Authorization": f"token {server.token}"} if token else {}
    return httpx.Client(base_url=server.url, headers=headers, timeout=300.0, trust_env=False)


def path_of(written: WrittenRun) -> str:
    return f"cluster/runs/{written.paths.root.name}"


def kernel_environment(server: Server) -> dict[str, str]:
    """What the environment of a kernel that this server starts tells of the server."""
    with client_of(server) as client:
        kernel = client.post("api/kernels", json={}).json()["id"]
        try:
            found: list[dict[str, str]] = []

            def started() -> bool:
                for process in Path("/proc").glob("[0-9]*"):
                    try:
                        if f"kernel-{kernel}".encode() in (process / "cmdline").read_bytes():
                            pairs = (process / "environ").read_bytes().decode().split("\0")
                            found.append(dict(pair.split("=", 1) for pair in pairs if pair))
                    except OSError:
                        continue
                return bool(found)

            until(started, 120)
            return {name: found[0].get(name, "") for name in ("JPY_PARENT_PID", JUPYTER_VARIABLE)}
        finally:
            client.delete(f"api/kernels/{kernel}")


def test_runs_are_listed_and_drawn_for_who_is_logged_in(
    server: Server, written: WrittenRun
) -> None:
    with client_of(server) as client:
        answer = client.get("workbench/api/runs", params={"folder": "", "limit": 10}).json()
        assert [(row["path"], row["state"]) for row in answer["runs"]] == [
            (path_of(written), "succeeded")
        ]
        page = client.get("workbench/api/page", params={"run": path_of(written)}).json()
        assert page["html"].startswith("<!doctype html>")
        missing = client.get("workbench/api/page", params={"run": "../../etc"})
        assert (
            missing.status_code,
            says(missing.json()["message"], "not a folder below"),
        ) == (
            409,
            True,
        )
        gone = client.post("workbench/api/stop", json={"run": "cluster"})
        assert (gone.status_code, "not a run directory" in gone.json()["message"]) == (409, True)
        stopped = client.post("workbench/api/stop-cluster", json={"cluster": "cluster"})
        assert stopped.status_code == 409, "it is no cluster of this user"
        named = client.post(
            "workbench/api/label", json={"run": path_of(written), "name": "first", "tags": ["a"]}
        )
        assert named.status_code == 200
        asked = {"folder": "", "find": "first a"}
        (row,) = client.get("workbench/api/runs", params=asked).json()["runs"]
        assert (row["name"], row["tags"]) == ("first", ["a"])
        client.post("workbench/api/label", json={"run": path_of(written), "name": ""})
        assert (
            "FineTune("
            in client.get("workbench/api/again", params={"run": path_of(written)}).json()["source"]
        )
        alone = client.get("workbench/api/compare", params={"run": path_of(written)})
        assert alone.status_code == 409
        assert client.post("workbench/api/tensorboard", json={"runs": []}).status_code == 400
        assert client.get(f"{BOARD_PATH}/{'0' * 20}/").status_code == 404


def test_card_and_report_are_made_when_they_are_asked_for(
    server: Server, written: WrittenRun
) -> None:
    with client_of(server) as client, client_of(server, token=False) as stranger:
        for what, of in (("card", path_of(written)), ("report", "cluster")):
            answer = client.get(f"workbench/api/{what}", params={"of": of})
            assert answer.headers["Content-Disposition"] == f'attachment; filename="{what}.html"'
            assert (
                answer.text.startswith("<!doctype html>") and written.paths.root.name in answer.text
            )
            assert client.get(f"workbench/api/{what}", params={"of": "../.."}).status_code == 409
            assert stranger.get(f"workbench/api/{what}", params={"of": of}).status_code in (
                302,
                403,
            )


def test_a_model_of_several_files_is_one_zip(
    server: Server, written: WrittenRun, tmp_path: Path
) -> None:
    model = written.paths.model
    (model / "tower").mkdir(parents=True)
    content = {"config.json": b"{}", "tower/weights.safetensors": random.randbytes(3_000_000)}
    for name, each in content.items():
        (model / name).write_bytes(each)
    (tmp_path / "secret").write_text("not theirs")
    (model / "link").symlink_to(tmp_path / "secret")
    with client_of(server) as client, client_of(server, token=False) as stranger:
        answer = client.get("workbench/api/model", params={"of": path_of(written)})
        assert "model.zip" in answer.headers["Content-Disposition"]
        assert "Content-Length" not in answer.headers, "nobody waits until it is made"
        archive = zipfile.ZipFile(io.BytesIO(answer.content))
        assert {name: archive.read(name) for name in archive.namelist()} == content
        assert client.get("workbench/api/model", params={"of": "../.."}).status_code == 409
        assert stranger.get("workbench/api/model", params={"of": path_of(written)}).status_code in (
            302,
            403,
        )


def test_a_sidebar_that_is_open_does_not_keep_the_server_from_being_idle(server: Server) -> None:
    with client_of(server) as client:
        client.get("api/contents")
        before = client.get("api/status").json()["last_activity"]
        client.get("workbench/api/runs")
        assert client.get("api/status").json()["last_activity"] == before


def test_what_is_installed_is_what_is_here() -> None:
    source = Path(workbench.lab.__file__).parent / "labextension"
    extension = get_federated_extensions(jupyter_path("labextensions"))["deepspeed-workbench"]
    assert extension["version"] == workbench.__version__
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    assert {Path(extension["jupyterlab"]["_build"]["load"]), Path("static/style.css")} <= set(files)
    for file in files:
        assert (Path(extension["ext_path"]) / file).read_text() == (source / file).read_text(), (
            "run make setup"
        )


def test_tensorboard_is_behind_the_login_and_opens_no_port(
    server: Server, written: WrittenRun
) -> None:
    with client_of(server) as client, client_of(server, token=False) as stranger:
        path = client.post("workbench/api/tensorboard", json={"runs": [path_of(written)]}).json()[
            "path"
        ]
        record = next(server.homes["XDG_RUNTIME_DIR"].glob("workbench-tensorboard-*/*.json"))
        board = BoardServer(**json.loads(record.read_text()))
        assert (board.port, board.owner) == (0, server.pid)
        assert board.is_alive
        assert board.pid not in listening_processes()
        assert record.parent.stat().st_mode & 0o077 == 0

        assert "<tf-app" in client.get(path).text or "tensorboard" in client.get(path).text.lower()
        runs = f"{path}data/plugin/scalars/tags"
        until(lambda: client.get(runs).json(), 120, every_s=0.5)
        (tags,) = client.get(runs).json().values()
        assert "train/loss" in tags
        assert list(client.get(runs).json()) == [written.paths.root.name], (
            "a run is called by its name"
        )
        asked = {"requests": json.dumps([{"plugin": "scalars", "tag": "train/loss"}])}
        series = client.post(f"{path}data/plugin/timeseries/timeSeries", data=asked)
        assert written.paths.root.name in series.text

        for method in ("PUT", "DELETE", "PATCH"):
            assert client.request(method, path).status_code == 405, "it is only read here"

        # Neither pages, nor what lists and starts them, for who
        # has no token; nor with a login's cookie from elsewhere.
        for method, where in [
            ("GET", path),
            ("GET", runs),
            ("POST", f"{path}data/plugin/timeseries/timeSeries"),
            ("GET", "workbench/api/runs"),
            ("GET", "workbench/api/page?run=x"),
            ("GET", "workbench/api/compare?run=x&run=y"),
            ("GET", "workbench/api/again?run=x"),
            ("POST", "workbench/api/label"),
            ("POST", "workbench/api/stop"),
            ("POST", "workbench/api/stop-cluster"),
            ("POST", "workbench/api/tensorboard"),
            ("DELETE", "workbench/api/tensorboard?key=x"),
        ]:
            refused = stranger.request(method, where)
            assert refused.status_code in (302, 403), (method, where)
            assert "train/loss" not in refused.text
        logged_in = httpx.Client(base_url=server.url, timeout=300.0, trust_env=False)
        with logged_in:
            assert logged_in.get(f"?token={server.token}").status_code in (200, 302)
            assert logged_in.get("workbench/api/runs").status_code == 200, "its cookie is a login"
            for action in ("stop", "label", "stop-cluster"):
                asked = {"run": path_of(written), "cluster": "cluster", "name": "from elsewhere"}
                answer = logged_in.post(f"workbench/api/{action}", json=asked)
                assert answer.status_code == 403, "a page of another site has no XSRF token"

        client.delete("workbench/api/tensorboard", params={"key": board.key})
        until(lambda: not is_alive(board.pid, board.start_time), 120)
        assert client.get(path).status_code == 404


def test_a_kernel_takes_the_way_through_its_server_only_where_that_has_the_extension(
    server: Server, tmp_path: Path
) -> None:
    environ = kernel_environment(server)
    route = find_route(environ, jupyter=jupyter_server(environ)[0] or None)
    assert (route.way, route.port) == (Way.JUPYTER, None)
    assert route.template == f"/{BOARD_PATH}/%KEY%/"
    config = tmp_path / "jupyter_config_dir" / "jupyter_server_config.json"
    config.parent.mkdir(mode=0o700)
    without = {"workbench.lab": False, "jupyter_server_proxy": False}
    config.write_text(json.dumps({"ServerApp": {"jpserver_extensions": without}}))
    with start_server(tmp_path, "jupyter_server") as plain:
        environ = kernel_environment(plain)
        route = find_route(environ, jupyter=jupyter_server(environ)[0] or None)
        assert (route.way, route.port) == (Way.DIRECT, 0)
        with client_of(plain) as client:
            assert client.get("workbench/api/runs").status_code == 404


def listening_processes() -> set[int]:
    """The processes that listen on a port."""
    inodes = {
        words[9]
        for name in ("tcp", "tcp6")
        for words in (line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:])
        if words[3] == "0A"
    }
    pids = set()
    for link in map(Path, glob.glob("/proc/[0-9]*/fd/*")):  # noqa: PTH207  # none raises
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            pids.add(int(link.parts[2]))
    return pids
