"""Our part of JupyterLab: a sidebar of runs, and TensorBoard behind the Jupyter server's login."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from workbench.client.tensorboard.board import JUPYTER_VARIABLE

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp

__all__: list[str] = []


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(app: ServerApp) -> None:
    from workbench.lab.handlers import routes

    app.web_app.add_handlers(".*$", routes(app.base_url, app.root_dir))  # type: ignore[no-untyped-call]
    # The variable tells kernels that this server forwards TensorBoard, and at which address.
    os.environ[JUPYTER_VARIABLE] = f"{os.getpid()} {app.base_url} {app.root_dir}"
