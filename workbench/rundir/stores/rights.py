"""Check the rights at an object store before anything starts."""

from __future__ import annotations

from workbench.base.errors import ConfigError, RunError
from workbench.rundir.stores.address import check_address
from workbench.rundir.stores.store import Store


def check_rights(address: str, what: str) -> None:
    """Write a small object below an address and remove the object.

    `what` is the name of the option, for the message.

    Raises:
        ConfigError: The store refuses, or the package for the protocol is missing.
    """
    try:
        with Store(check_address(address, what)) as store:
            store.probe()
    except RunError as error:
        raise ConfigError(f"{what}: {error}") from error
