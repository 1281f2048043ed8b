"""The Jupyter server's endpoints below `workbench/`, for the logged-in user.

Work runs in threads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from jupyter_server_proxy.handlers import ProxyHandler
from tornado import web
from tornado.iostream import StreamClosedError

from workbench.base.errors import WorkbenchError
from workbench.base.messages.wire import short_path
from workbench.base.words import strip_controls
from workbench.client.tensorboard.board import BOARD_PATH
from workbench.client.tensorboard.server import find_by_key

if TYPE_CHECKING:
    from workbench.lab.listing import Listing

_MOST = 2000  # rows at once
# One look at a time, for any number of open windows.
_READER = ThreadPoolExecutor(1, "workbench-reader")
_ACTOR = ThreadPoolExecutor(4, "workbench-actor")


# Pattern of the path, handler, and keyword arguments of the handler's `initialize`.
_Route = tuple[str, type[web.RequestHandler], dict[str, object]]


def routes(base_url: str, root: str) -> list[_Route]:
    """Return the routes for a server with a contents root."""
    api: dict[str, object] = {"root": root}
    # A page of TensorBoard asks all day; these requests must not keep an idle server up.
    boards: dict[str, object] = {"update_last_activity": False}
    handlers: Mapping[str, type[web.RequestHandler]] = {
        "runs": RunsHandler,
        "page": PageHandler,
        "compare": CompareHandler,
        "again": AgainHandler,
        "label": LabelHandler,
        "stop": StopHandler,
        "delete": DeleteHandler,
        "stop-cluster": StopClusterHandler,
        "tensorboard": BoardsHandler,
        "(card|report)": DownloadHandler,
        "model": ModelHandler,
    }
    found: list[_Route] = []
    for name, handler in handlers.items():
        pattern = url_path_join(base_url, "workbench/api", name)
        found.append((pattern, handler, api))
    board = url_path_join(base_url, BOARD_PATH, "([0-9a-f]{20})/(.*)")
    found.append((board, BoardHandler, boards))
    return found


class _Handler(APIHandler):
    def initialize(self, root: str) -> None:
        self.root = root

    async def answer(self, pool: ThreadPoolExecutor, work: Callable[[Listing], object]) -> None:
        """Run the work in a thread; answer with its result or with the error's message."""

        def work_on_listing() -> object:
            listing = _listing(self.root)
            return work(listing)

        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(pool, work_on_listing)
        except (WorkbenchError, OSError) as error:
            self.set_status(409)
            answer = {"message": strip_controls(str(error))}
        self.finish(json.dumps(answer))

    def body(self) -> dict[str, Any]:
        sent = self.get_json_body()
        if isinstance(sent, dict):
            return sent
        raise web.HTTPError(400, "the body of the request is not a JSON object")


@cache
def _listing(root: str) -> Listing:
    # Imported at the first question, so that a server without questions starts as fast as before.
    from workbench.lab.listing import Listing

    return Listing(Path(root))


class RunsHandler(_Handler):
    # An open sidebar asks all day; these requests must not keep an idle server up.
    _track_activity = False

    @web.authenticated
    async def get(self) -> None:
        """List the content of `folder`, with the newest `limit` runs found by `find`."""
        folder = self.get_query_argument("folder", "")
        find = self.get_query_argument("find", "")
        limit = self.get_query_argument("limit", "50")
        most = 50
        if limit.isdecimal():
            most = min(int(limit), _MOST)
        await self.answer(_READER, lambda listing: listing.look(folder, most, find))


class PageHandler(_Handler):
    _track_activity = False

    @web.authenticated
    async def get(self) -> None:
        """Draw the run at `run`, a path below the server's root."""
        run = self.get_query_argument("run")
        await self.answer(_READER, lambda listing: listing.page(run))


class CompareHandler(_Handler):
    _track_activity = False

    @web.authenticated
    async def get(self) -> None:
        """Draw the comparison of the runs at every `run`, paths below the server's root."""
        runs = self.get_query_arguments("run")
        await self.answer(_READER, lambda listing: listing.compare(runs))


class AgainHandler(_Handler):
    @web.authenticated
    async def get(self) -> None:
        """Answer with the code that submits the job of `run` again."""
        run = self.get_query_argument("run")
        await self.answer(_ACTOR, lambda listing: listing.again(run))


class LabelHandler(_Handler):
    @web.authenticated
    async def post(self) -> None:
        """Change `name` or `tags` of `run`."""
        body = self.body()
        run = str(body.get("run"))
        changes = {str(name): body[name] for name in ("name", "tags") if name in body}
        await self.answer(_ACTOR, lambda listing: listing.label(run, changes))


class StopHandler(_Handler):
    @web.authenticated
    async def post(self) -> None:
        """Ask a run's keeper to end the run within two steps."""
        body = self.body()
        run = str(body.get("run"))
        await self.answer(_ACTOR, lambda listing: listing.stop(run))


class DeleteHandler(_Handler):
    @web.authenticated
    async def post(self) -> None:
        """Delete the directory of the ended run at `run`."""
        body = self.body()
        run = str(body.get("run"))
        await self.answer(_ACTOR, lambda listing: listing.delete(run))


class StopClusterHandler(_Handler):
    @web.authenticated
    async def post(self) -> None:
        """Stop the pods of a `cluster` of this user without a run."""
        body = self.body()
        cluster = str(body.get("cluster"))
        await self.answer(_ACTOR, lambda listing: listing.stop_cluster(cluster))


class BoardsHandler(_Handler):
    @web.authenticated
    async def post(self) -> None:
        """Start TensorBoard for `runs`, unless already running, and answer with its page's path."""
        body = self.body()
        runs = body.get("runs")
        if not isinstance(runs, list) or not runs:
            raise web.HTTPError(400, "runs must be a list of paths")
        names = [str(run) for run in runs]
        await self.answer(_ACTOR, lambda listing: listing.open_board(names))

    @web.authenticated
    async def delete(self) -> None:
        """End a TensorBoard of the server after the last tab was closed."""
        key = self.get_query_argument("key")
        await self.answer(_ACTOR, lambda listing: listing.close_board(key))


class DownloadHandler(_Handler):
    """Generates and sends a run's card or a benchmark's report as a file."""

    @web.authenticated
    async def get(self, what: str) -> None:
        """Generate the file for `of`, a path below the server's root."""
        place = self.get_query_argument("of")
        listing = _listing(self.root)
        make = listing.card if what == "card" else listing.report
        loop = asyncio.get_running_loop()
        try:
            page = await loop.run_in_executor(_ACTOR, make, place)
        except (WorkbenchError, OSError) as error:
            raise web.HTTPError(409, strip_controls(str(error))) from error
        self.set_header("Content-Disposition", f'attachment; filename="{what}.html"')
        self.finish(page, set_content_type="text/html; charset=utf-8")


class ModelHandler(_Handler):
    """Streams a run's model as a zip."""

    @web.authenticated
    async def get(self) -> None:
        """Send the model of the run at `of`, a path below the server's root."""
        place = self.get_query_argument("of")
        loop = asyncio.get_running_loop()
        listing = _listing(self.root)
        try:
            pieces = await loop.run_in_executor(_ACTOR, listing.model, place)
        except (WorkbenchError, OSError) as error:
            raise web.HTTPError(409, strip_controls(str(error))) from error
        self.set_header("Content-Disposition", 'attachment; filename="model.zip"')
        self.set_header("Content-Type", "application/zip")
        with suppress(StreamClosedError):  # the client has disconnected
            while True:
                piece = await loop.run_in_executor(_ACTOR, next, pieces, b"")
                if not piece:
                    break
                self.write(piece)
                await self.flush()


class BoardHandler(ProxyHandler):  # type: ignore[misc]
    """Forwards requests of a logged-in browser to a TensorBoard on a Unix socket of the user."""

    async def http_get(self, key: str, path: str) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.run_in_executor(_ACTOR, find_by_key, key)
        if server is None or server.port:
            raise web.HTTPError(
                404,
                "TensorBoard has ended: run the cell again, "
                "or open TensorBoard in the sidebar again",
            )
        self.proxy_base = f"{BOARD_PATH}/{key}"
        with short_path(server.socket) as self.unix_socket:
            await self.proxy("localhost", 80, f"{server.token}/{path}")

    async def post(self, key: str, path: str) -> None:
        """Forward a question that is too long for a URL; questions change nothing."""
        await self.http_get(key, path)

    async def _refuse(self, *_: str) -> None:
        raise web.HTTPError(405, "TensorBoard is only read here")

    # The proxy's own methods have other parameters.
    put = _refuse
    delete = _refuse
    patch = _refuse
    options = _refuse
