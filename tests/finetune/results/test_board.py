from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

import pytest

from workbench.base.errors import BackendError
from workbench.client.tensorboard import board
from workbench.client.tensorboard.board import Board, Route, Way, find_route, jupyter_server
from workbench.client.tensorboard.server import BoardServer
from workbench.display.kit.templates import macro
from workbench.display.records.board import frame_widget

CLOUDERA = {
    "CDSW_ENGINE_ID": "abc",
    "CDSW_DOMAIN": "ml.example.org",
    "CDSW_APP_PORT": "8100",
    "CDSW_READONLY_PORT": "8090",
}


def server_at(folder: str, port: int = 6006) -> BoardServer:
    return BoardServer(
        folder=folder, port=port, pid=1, start_time=1, owner=1, token="T0k", nonce="n"
    )


def board_at(
    template: str, way: Way = Way.CUSTOM, runs: tuple[str, ...] = ("tiny",), **route: Any
) -> Board:
    return Board(
        server=server_at("/runs"), route=Route(way=way, template=template, **route), runs=runs
    )


KEY = server_at("/runs").key


@pytest.mark.parametrize(
    ("environ", "jupyter", "way", "url", "port"),
    [
        ({}, None, Way.DIRECT, "http://127.0.0.1:6006/T0k/", 0),
        ({}, "/", Way.JUPYTER, f"/workbench/tensorboard/{KEY}/", None),
        ({}, "/jupyter/", Way.JUPYTER, f"/jupyter/workbench/tensorboard/{KEY}/", None),
        (
            {"JUPYTERHUB_SERVICE_PREFIX": "/user/me/"},
            "/user/me/",
            Way.JUPYTER,
            f"/user/me/workbench/tensorboard/{KEY}/",
            None,
        ),
        (
            {"JUPYTERHUB_SERVICE_PREFIX": "/user/m@e/lab/"},
            None,
            Way.HUB,
            "/user/m@e/lab/proxy/6006/T0k/",
            0,
        ),
        (CLOUDERA, "/", Way.CLOUDERA, "https://abc.ml.example.org/T0k/", 8100),
        (
            CLOUDERA | {"CDSW_APP_PORT": "9999"},
            "/",
            Way.CLOUDERA,
            "https://read-only-abc.ml.example.org/T0k/",
            8090,
        ),
        ({"VSCODE_PID": "7"}, None, Way.VSCODE, "http://localhost:6006/T0k/", 0),
        (
            {"VSCODE_PROXY_URI": "https://c.example.org/proxy/{{port}}", "VSCODE_PID": "7"},
            None,
            Way.VSCODE,
            "https://c.example.org/proxy/6006/T0k/",
            0,
        ),
        ({"TENSORBOARD_PROXY_URL": "/tb/%PORT%/x"}, "/", Way.CUSTOM, "/tb/6006/x/T0k/", 0),
        (
            CLOUDERA | {"TENSORBOARD_PROXY_URL": "https://e.org/"},
            "/",
            Way.CUSTOM,
            "https://e.org/T0k/",
            0,
        ),
        ({"TENSORBOARD_PROXY_URL": ""}, "/", Way.JUPYTER, f"/workbench/tensorboard/{KEY}/", None),
    ],
)
def test_the_way_from_the_browser(
    environ: Mapping[str, str],
    jupyter: str | None,
    way: Way,
    url: str,
    port: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(board, "is_free", lambda p: p != 9999)
    route = find_route(environ, jupyter=jupyter)
    assert (route.way, route.url(server_at("/runs")), route.port) == (way, url, port)


def test_no_published_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "is_free", lambda _: False)
    with pytest.raises(BackendError, match=r"CDSW_APP_PORT=8100 and CDSW_READONLY_PORT=8090"):
        find_route(CLOUDERA, jupyter=None)


def test_text_and_html_state_the_same_and_escape() -> None:
    board = board_at(
        '/"><script>%PORT%', hint="See %PORT%.", runs=("<img src=x onerror=alert(1)>",)
    )
    page = board._repr_html_()
    assert "<img" not in page
    assert "<script" not in page
    text = re.sub(r"<[^>]*>", "", page)
    assert html.unescape(text).startswith(repr(board))
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
def test_the_page_is_below_the_token_and_nothing_that_is_saved_loads_it(
    template: str, url: str
) -> None:
    board = board_at(template)
    assert board.url == url
    for saved in board._repr_mimebundle_().values():
        assert not re.findall(
            r"<(?:iframe|embed|object|img|script|link|frame|a) |src=|srcdoc=|href=", str(saved)
        )
        assert html.escape(url) in str(saved)
    assert "T0k" not in repr(board.server)


def test_the_only_link_that_is_saved_leads_to_the_jupyter_server() -> None:
    board = board_at("/lab/workbench/tensorboard/%KEY%/", Way.JUPYTER, port=None)
    assert re.findall(r'href="([^"]*)"', board._repr_html_()) == [
        f"/lab/workbench/tensorboard/{KEY}/"
    ]
    assert "T0k" not in str(board._repr_mimebundle_())


def test_the_frame_comes_with_a_press_of_the_button_and_not_for_a_server_that_is_gone() -> None:
    board = board_at("/%PORT%/</script>")
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


def test_only_a_kernel_of_the_server_with_our_extension_goes_through_it() -> None:
    told = {"WORKBENCH_JUPYTER": "77 /user/me/ /home/a person"}
    assert jupyter_server({"JPY_PARENT_PID": "77", **told}) == ("/user/me/", "/home/a person")
    assert jupyter_server({"JPY_PARENT_PID": "78", **told}) == ("", "")  # one that it has started
    assert jupyter_server({"JPY_PARENT_PID": "78"}) == ("", "")
    assert jupyter_server(told) == ("", "")
    assert jupyter_server({}) == ("", "")
