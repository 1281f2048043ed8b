"""`Named`: what people call a run, and remark on it."""

from __future__ import annotations

from abc import abstractmethod

from workbench.rundir.catalog.label import read_label, write_label
from workbench.rundir.paths import RunPaths


class Named:
    """The part of a run that people write; it may change at any time, also after the run has ended."""

    __slots__ = ()

    @property
    @abstractmethod
    def paths(self) -> RunPaths:
        """Every path in the run directory."""

    @property
    def name(self) -> str:
        """What the run is called in panel, card, `history`, `compare` and reports; empty until somebody sets it.

        Raises:
            ConfigError: When set to anything but text of at most 80 letters.
            RunError: When set, and the run directory cannot be written.
        """
        return read_label(self.paths).name

    @name.setter
    def name(self, name: str) -> None:
        write_label(self.paths, name=name)

    @property
    def note(self) -> str:
        """What somebody remarked on the run, shown with it; empty until somebody sets it. At most 2,000 letters."""
        return read_label(self.paths).note

    @note.setter
    def note(self, note: str) -> None:
        write_label(self.paths, note=note)
