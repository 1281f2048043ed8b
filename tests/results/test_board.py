from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from workbench.base.errors import BackendError
from workbench.display.kit.templates import macro
from workbench.display.records.board import frame_widget
from workbench.results.tensorboard.board import Board, Route, Way, _base_url, find_route
from workbench.results.tensorboard.server import BoardServer

CLOUDERA = {"CDSW_ENGINE_ID": "abc", "CDSW_DOMAIN": "ml.example.org", "CDSW_APP_PORT": "8100",
            "CDSW_READONLY_PORT": "8090"}  # fmt: skip


def server_at(folder: str) -> BoardServer:
    return BoardServer(folder=folder, port=6006, pid=1, start_time=1, owner=1, token="T0k", nonce="n")


@pytest.mark.parametrize(
    ("environ", "base_url", "has_proxy", "way", "url", "port"),
    [
        ({}, None, False, Way.DIRECT, "http://127.0.0.1:6006/", 0),
        ({}, None, True, Way.DIRECT, "http://127.0.0.1:6006/", 0),
        ({}, "/", False, Way.DIRECT, "http://127.0.0.1:6006/", 0),
        ({}, "/", True, Way.PROXY, "/proxy/6006/", 0),
        ({}, "/jupyter/", True, Way.PROXY, "/jupyter/proxy/6006/", 0),
        ({}, "/jupyter", True, Way.PROXY, "/jupyter/proxy/6006/", 0),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/me/"}, "/user/me/", True, Way.HUB, "/user/me/proxy/6006/", 0),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/m@e/lab/"}, None, False, Way.HUB, "/user/m@e/lab/proxy/6006/", 0),
        (CLOUDERA, "/", True, Way.CLOUDERA, "https://abc.ml.example.org/", 8100),
        (CLOUDERA | {"CDSW_APP_PORT": "9999"}, "/", True, Way.CLOUDERA, "https://read-only-abc.ml.example.org/", 8090),
        ({"VSCODE_PID": "7"}, None, False, Way.VSCODE, "http://localhost:6006/", 0),
        ({"VSCODE_PROXY_URI": "https://c.example.org/proxy/{{port}}", "VSCODE_PID": "7"}, None, False, Way.VSCODE,
         "https://c.example.org/proxy/6006/", 0),
        ({"TENSORBOARD_PROXY_URL": "/tb/%PORT%/x"}, "/", True, Way.CUSTOM, "/tb/6006/x", 0),
        (CLOUDERA | {"TENSORBOARD_PROXY_URL": "https://e.org/"}, "/", True, Way.CUSTOM, "https://e.org/", 0),
        ({"TENSORBOARD_PROXY_URL": ""}, "/", True, Way.PROXY, "/proxy/6006/", 0),
    ],
)  # fmt: skip
def test_the_way_from_the_browser(
    environ: Mapping[str, str], base_url: str | None, has_proxy: bool, way: Way, url: str, port: int
) -> None:
    route = find_route(environ, base_url=base_url, has_proxy=has_proxy, free=lambda p: p != 9999)
    assert (route.way, route.url(6006), route.port) == (way, url, port)


def test_no_published_port_is_free() -> None:
    with pytest.raises(BackendError, match=r"CDSW_APP_PORT=8100 and CDSW_READONLY_PORT=8090"):
        find_route(CLOUDERA, base_url=None, has_proxy=False, free=lambda _: False)


def test_text_and_html_state_the_same_and_escape() -> None:
    server = server_at("/runs/<img src=x onerror=alert(1)>")
    board = Board(server=server, route=Route(way=Way.CUSTOM, template='/"><script>%PORT%', hint="See %PORT%."))
    page = board._repr_html_()
    assert "<img" not in page
    assert "<script" not in page
    said = re.sub(r"<[^>]*>", "", page)
    assert html.unescape(said).startswith(repr(board))
    assert "See 6006." in repr(board)
    assert board.url in repr(board)


@pytest.mark.parametrize(
    ("template", "url"),
    [
        ("http://127.0.0.1:%PORT%/", "http://127.0.0.1:6006/T0k/"),
        ("/user/me/proxy/%PORT%/", "/user/me/proxy/6006/T0k/"),
        ("/p/%PORT%?p=1", "/p/6006/T0k/?p=1"),
    ],
)
def test_the_page_is_below_the_token_and_nothing_that_is_saved_loads_it(template: str, url: str) -> None:
    board = Board(server=server_at("/runs"), route=Route(way=Way.CUSTOM, template=template))
    assert board.url == url
    for saved in board._repr_mimebundle_().values():
        assert not re.findall(r"<(?:iframe|embed|object|img|script|link|frame)|src=|srcdoc=", str(saved))
        assert html.escape(url) in str(saved)
    assert "T0k" not in repr(board.server)


def test_the_frame_comes_with_a_press_of_the_button_and_not_for_a_server_that_is_gone() -> None:
    board = Board(server=server_at("/runs"), route=Route(way=Way.CUSTOM, template="/%PORT%/</script>"))
    button, frame = frame_widget(board).children
    assert frame.value == ""
    button.value = True
    assert frame.value == "<p>TensorBoard has ended. Run the cell again.</p>"
    page = str(macro("board.html", "page")(board.url, 12345, "late"))
    assert page.count("</script>") == 1
    assert "Date.now() < 12345" in page
    drawn = str(macro("board.html", "frame")(macro("board.html", "page")(board.url, 12345, "late")))
    (srcdoc,) = re.findall(r'srcdoc="([^"]*)"', drawn)
    assert html.unescape(srcdoc).strip() == page.strip()
    assert " src=" not in drawn


def test_the_kernels_own_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "jpserver-77.json").write_text(json.dumps({"base_url": "/user/me/", "token": "t"}))
    assert _base_url({"JPY_PARENT_PID": "77"}) == "/user/me/"
    assert _base_url({"JPY_PARENT_PID": "78"}) is None
    assert _base_url({}) is None
