"""A real JupyterLab with nothing of the user's, and a real Chromium to look at it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from poll import until

from workbench.base.errors import RunError
from workbench.base.wire import ask

REPOSITORY = Path(__file__).resolve().parents[2]
ARTIFACTS = REPOSITORY / "artifacts"
START_S = 60.0
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--disable-dev-shm-usage")  # fmt: skip
HOMES = ("HOME", "IPYTHONDIR", "XDG_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "docmanager-extension/plugin": {"autosave": False},
}


def notebook(*cells: str) -> dict[str, Any]:
    """Give a notebook of these cells."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    return book


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A running JupyterLab."""

    folder: Path
    """Its root, where notebooks are put."""
    url: str
    """Its address, ending in a slash."""
    token: str
    """What lets one in."""

    def add(self, notebook: dict[str, Any], name: str) -> str:
        """Put a notebook there and give its name."""
        (self.folder / name).write_text(json.dumps(notebook), encoding="utf-8")
        return name


class Book:
    """One notebook in one tab, driven as a person would: menus by their commands, buttons by their names."""

    def __init__(self, page: Any, lab: Lab, name: str) -> None:
        self.page, self.lab, self.name = page, lab, name
        # A workspace of its own: JupyterLab would open again what an earlier test had open.
        page.goto(f"{lab.url}lab/workspaces/{secrets.token_hex(4)}/tree/{name}?token={lab.token}")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.wait_idle(60)
        page.evaluate("() => window.jupyterapp.shell.collapseLeft()")

    def _command(self, name: str, **args: object) -> None:
        self.page.evaluate("([name, args]) => { window.jupyterapp.commands.execute(name, args); }", [name, args])

    def run_all(self) -> None:
        self._command("notebook:run-all-cells")

    def run(self, index: int) -> Any:
        """Run one cell and give its output area; does not wait for it."""
        self.page.evaluate("i => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = i; }", index)
        self._command("notebook:run-cell")
        return self.output(index)

    def output(self, index: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-OutputArea").first

    def said(self, index: int) -> str:
        """The text of a cell's output by now; brought into sight, for what is out of sight is not rendered."""
        area = self.output(index)
        return (
            str(area.evaluate("e => { e.scrollIntoView({block: 'nearest'}); return e.innerText; }"))
            if area.count()
            else ""
        )

    def see(self, index: int, wanted: str, timeout_s: float = 60) -> str:
        """Wait until a cell's output holds a text, and give the whole of it."""
        texts = [""]

        def shown() -> bool:
            texts[0] = self.said(index)
            return wanted in texts[0]

        # Each look has the browser lay the page out.
        until(shown, timeout_s, every_s=0.3, why=lambda: f"{wanted!r} in cell {index}:\n{texts[0][-3000:]}")
        return texts[0]

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until the kernel has nothing to do and no cell waits for it."""
        self.page.wait_for_function(
            """name => {
                const panel = window.jupyterapp && window.jupyterapp.shell.currentWidget;
                const kernel = panel && panel.sessionContext && panel.sessionContext.session
                    && panel.sessionContext.session.kernel;
                const waiting = [...document.querySelectorAll('.jp-InputPrompt')].some(p => p.innerText.includes('*'));
                return kernel && panel.context.path === name && kernel.status === 'idle' && !waiting;
            }""",
            arg=self.name,
            timeout=timeout_s * 1000,
        )

    def restart(self) -> None:
        """Restart the kernel from the menu's command, and say yes."""
        self._command("notebook:restart-kernel")
        self.page.get_by_role("button", name="Confirm Kernel Restart").or_(
            self.page.locator(".jp-Dialog button.jp-mod-accept")
        ).first.click()
        time.sleep(1)
        self.wait_idle(60)

    def shoot(self, index: int, name: str) -> None:
        """Keep pictures of a cell: wide in the light theme, and half as wide in the dark one."""
        for theme, width in (("light", 1280), ("dark", 640)):
            self._theme(theme)
            self.page.set_viewport_size({"width": width, "height": 800})
            area = self.output(index)
            area.evaluate("e => e.scrollIntoView({block: 'start'})")
            time.sleep(0.5)
            self.page.screenshot(path=str(ARTIFACTS / f"{name}-{width}-{theme}.png"))
        self._theme("light")
        self.page.set_viewport_size({"width": 1280, "height": 800})

    def _theme(self, theme: str) -> None:
        self._command("apputils:change-theme", theme=f"JupyterLab {theme.title()}")
        light = "true" if theme == "light" else "false"
        self.page.wait_for_selector(f"body[data-jp-theme-light='{light}']", state="attached")

    def is_wider_than_its_place(self, index: int) -> bool:
        """Tell whether a cell's output must be scrolled sideways."""
        return bool(self.output(index).evaluate("e => e.scrollWidth > e.clientWidth + 2"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab with a token, a free port, and a home of its own."""
    home = tmp_path_factory.mktemp("lab")
    folder = home / "notebooks"
    folder.mkdir()
    places = {name: home / name.lower() for name in HOMES}
    for place in places.values():
        place.mkdir(mode=0o700)
    for plugin, settings in SETTINGS.items():
        file = places["JUPYTER_CONFIG_DIR"] / "lab/user-settings/@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    token = secrets.token_hex(16)
    env = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    env |= {name: str(place) for name, place in places.items()} | {"JUPYTER_TOKEN": token}
    options = ["--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={folder}",
               "--LabApp.expose_app_in_browser=True", "--allow-root"]  # fmt: skip
    with (home / "lab.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=folder, start_new_session=True,
        )  # fmt: skip
    try:
        url = _url(places["JUPYTER_RUNTIME_DIR"] / f"jpserver-{process.pid}.json", process, home / "lab.log")
        yield Lab(folder=folder, url=url, token=token)
    finally:
        for state in folder.rglob("keeper.sock"):  # of a test that failed half way
            with contextlib.suppress(RunError):
                ask(state, {"op": "close"})
        process.send_signal(signal.SIGTERM)  # it ends its kernels, asking nothing
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A window of Debian's Chromium, headless, that all pages share."""
    sync_api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs chromium: sudo apt-get install chromium")
    ARTIFACTS.mkdir(exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        # One for all pages: what JupyterLab consists of is read and compiled once.
        yield browser.new_context(viewport={"width": 1280, "height": 800})
        browser.close()


@pytest.fixture
def open_book(browser: Any, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Book]]:
    """Opens a notebook that is in the lab; a picture of the page at the end is kept."""
    pages = []

    def opened(name: str) -> Book:
        page = browser.new_page()
        pages.append(page)
        return Book(page, lab, name)

    yield opened
    for number, page in enumerate(page for page in pages if not page.is_closed()):
        page.screenshot(path=str(ARTIFACTS / f"last-{request.node.name}-{number}.png"))
        page.close()


def _url(info: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    def written() -> bool:
        return info.exists() and info.stat().st_size > 0

    until(lambda: written() or process.poll() is not None, START_S, every_s=0.1, why=log.read_text)
    assert written(), f"JupyterLab did not start:\n{log.read_text()[-3000:]}"
    return str(json.loads(info.read_text())["url"])
