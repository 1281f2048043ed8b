"""A real JupyterLab with nothing of the user's, and a real Chromium to look at it.

All files of the folder share both. A file begins with an empty folder and no kernel, and a test
opens its notebook in the page of the test before. A test takes a page of its own if the test loads
the page anew, or changes its theme or style sheets.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright import sync_api

from tests.fakes.jupyterserver import Server, start_server
from tests.support.poll import LEAST_S, until
from workbench.base.errors import RunError
from workbench.base.messages.wire import ask

REPOSITORY = Path(__file__).resolve().parents[2]
ARTIFACTS = REPOSITORY / "artifacts"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
VIEWPORT = sync_api.ViewportSize(width=1280, height=800)
SETTINGS = {
    "apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "docmanager-extension/plugin": {"autosave": False},
    "notebook-extension/tracker": {"recordTiming": True},  # as nbmake does
}


def notebook(*cells: str) -> dict[str, Any]:
    """Give a notebook of these cells."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    return book


class Lab:
    """A running JupyterLab."""

    def __init__(self, server: Server):
        self.folder, self.url, self.token = server.folder, server.url, server.token
        self.home = server.homes["HOME"]

    def add(self, notebook: dict[str, Any], name: str) -> str:
        """Put a notebook there and give its name."""
        (self.folder / name).write_text(json.dumps(notebook), encoding="utf-8")
        return name


class Book:
    """One notebook in one tab, driven as a person would: menus by command, buttons by name."""

    def __init__(self, page: Any, lab: Lab, name: str) -> None:
        self.page, self.lab, self.name = page, lab, name
        if page.url.startswith(lab.url):
            page.set_viewport_size(VIEWPORT)
            page.evaluate(
                "path => { window.jupyterapp.commands.execute('docmanager:open', {path}); }", name
            )
        else:
            # A workspace of its own: JupyterLab would open again what an earlier test had open.
            place = f"lab/workspaces/{secrets.token_hex(4)}/tree/{name}"
            page.goto(f"{lab.url}{place}?token={lab.token}")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=300_000)
        try:
            self.wait_idle(30)
        except (
            sync_api.TimeoutError
        ):  # seen once: JupyterLab, just started, never said what the kernel does
            page.reload()
            page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=300_000)
            self.wait_idle(60)
        page.evaluate("() => window.jupyterapp.shell.collapseLeft()")

    def close(self) -> None:
        """Close every document without a question, and end the kernels of the server."""
        self.page.evaluate(
            """async () => {
                const {shell, serviceManager} = window.jupyterapp;
                for (const tab of [...shell.widgets("main")]) {
                    if (tab.context) tab.context.model.dirty = false;
                    tab.close();
                }
                await serviceManager.sessions.shutdownAll();
            }"""
        )
        self.page.wait_for_selector(".jp-Notebook", state="detached")

    def _command(self, name: str, **args: object) -> None:
        self.page.evaluate(
            "([name, args]) => { window.jupyterapp.commands.execute(name, args); }", [name, args]
        )

    def save(self) -> None:
        """Save the notebook, and wait until that is done."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")

    def run_all(self) -> None:
        self._command("notebook:run-all-cells")

    def run(self, index: int) -> Any:
        """Run one cell and give its output area; does not wait for it."""
        self.page.evaluate(
            "i => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = i; }", index
        )
        self._command("notebook:run-cell")
        return self.output(index)

    def output(self, index: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-OutputArea").first

    def said(self, index: int) -> str:
        """The text of a cell's output by now; the cell is scrolled into sight to be rendered."""
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
        until(
            shown,
            timeout_s,
            every_s=0.3,
            why=lambda: f"{wanted!r} in cell {index}:\n{texts[0][-3000:]}",
        )
        return texts[0]

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until the kernel has nothing to do and no cell waits for it."""
        self.page.wait_for_function(
            """name => {
                const panel = window.jupyterapp && window.jupyterapp.shell.currentWidget;
                const kernel = panel && panel.sessionContext && panel.sessionContext.session
                    && panel.sessionContext.session.kernel;
                const waiting = [...document.querySelectorAll('.jp-InputPrompt')].some(
                    p => p.innerText.includes('*'));
                return kernel && panel.context.path === name && kernel.status === 'idle'
                    && !waiting;
            }""",
            arg=self.name,
            timeout=max(timeout_s, LEAST_S) * 1000,
            polling=300,  # ms; without it, at every picture of the browser
        )

    def restart(self) -> None:
        """Restart the kernel from the menu's command, say yes, and wait until that is done."""
        self.page.evaluate(
            """() => {
                window.restarted = false;
                window.jupyterapp.commands.execute('notebook:restart-kernel').then(
                    () => { window.restarted = true; });
            }"""
        )
        self.page.get_by_role("button", name="Confirm Kernel Restart").or_(
            self.page.locator(".jp-Dialog button.jp-mod-accept")
        ).first.click()
        self.page.wait_for_function("window.restarted", timeout=LEAST_S * 1000, polling=300)
        self.wait_idle(60)

    def saved(self) -> Any:
        """The notebook as it would be saved now."""
        text = self.page.evaluate(
            "() => JSON.stringify(window.jupyterapp.shell.currentWidget.context.model.toJSON())"
        )
        return json.loads(text)

    def _theme(self, theme: str) -> None:
        self._command("apputils:change-theme", theme=f"JupyterLab {theme.title()}")
        light = "true" if theme == "light" else "false"
        self.page.wait_for_selector(f"body[data-jp-theme-light='{light}']", state="attached")

    def is_wider_than_its_place(self, index: int) -> bool:
        """Tell whether a cell's output must be scrolled sideways."""
        return bool(self.output(index).evaluate("e => e.scrollWidth > e.clientWidth + 2"))


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A JupyterLab with a token, a free port, and a home of its own."""
    home = tmp_path_factory.mktemp("lab")
    with start_server(home, "jupyterlab", "--LabApp.expose_app_in_browser=True") as server:
        yield server


@pytest.fixture(scope="module")
def lab(server: Server) -> Iterator[Lab]:
    """The JupyterLab with an empty folder and settings that no other file has changed."""
    lab = Lab(server)
    folder = server.homes["JUPYTER_CONFIG_DIR"] / "lab" / "user-settings"
    shutil.rmtree(folder, ignore_errors=True)
    for plugin, settings in SETTINGS.items():
        file = folder / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    yield lab
    for state in lab.home.rglob("keeper.sock"):  # of a test that failed half way
        with contextlib.suppress(RunError):
            ask(state, {"op": "close"})
    for left in lab.folder.iterdir():
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A window of Debian's Chromium, headless, that all pages share."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs chromium: sudo apt-get install chromium")
    ARTIFACTS.mkdir(exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        # A profile on the disk keeps what JupyterLab consists of compiled: a third of a page's CPU.
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("chromium"),
            executable_path=program,
            args=list(FLAGS),
            viewport=VIEWPORT,
            reduced_motion="reduce",
        )
        context.set_default_timeout(300_000)  # ms; a busy machine took 30 s to load a report
        yield context
        context.close()


@pytest.fixture(scope="package")
def spare_pages() -> list[Any]:
    """The page that shows JupyterLab without a document, once a test has ended."""
    return []


@pytest.fixture
def open_book(
    browser: Any, lab: Lab, spare_pages: list[Any], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Book]]:
    """Opens a notebook that is in the lab; a picture of the page at the end is kept."""
    books: list[tuple[Book, bool]] = []

    def opened(name: str, *, own_page: bool = False) -> Book:
        page = browser.new_page() if own_page or not spare_pages else spare_pages.pop()
        book = Book(page, lab, name)
        books.append((book, own_page))
        return book

    yield opened
    open_books = [each for each in books if not each[0].page.is_closed()]
    for number, (book, own_page) in enumerate(open_books):
        book.page.screenshot(path=str(ARTIFACTS / f"last-{request.node.name}-{number}.png"))
        if own_page:
            book.page.close()
        else:
            book.close()
            spare_pages.append(book.page)
