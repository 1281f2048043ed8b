"""Modules that a file of the user's hides, such as `numbers.py` beside a notebook."""

from __future__ import annotations

import re
import site
import sys
import sysconfig
import traceback
from importlib.machinery import PathFinder
from pathlib import Path

_WANTED = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_OWN = ("stdlib", "platstdlib", "purelib", "platlib")


def hiding_file(error: Exception) -> str:
    """Return the user's file that was imported in place of a module, if that broke an import."""
    words = str(error)
    # A package that imports its names on demand leaves out why a name is missing.
    if wanted := _WANTED.match(words):
        try:
            getattr(sys.modules[wanted[2]], wanted[1])
        except Exception as cause:
            words += str(cause)
    paths = {}
    for name, module in sys.modules.items():
        if f"'{name}'" in words:
            paths[name] = getattr(module, "__file__", None)
    # A file that fails itself is not among the modules.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        paths.setdefault(frame.f_globals.get("__name__", ""), frame.f_code.co_filename)
    for name, file in paths.items():
        if file and "." not in name and name != "workbench" and _hides(name, Path(file).absolute()):
            return str(file)
    return ""


def _hides(name: str, path: Path) -> bool:
    # A package's file is one folder further down.
    folder = path.parent.parent if path.name == "__init__.py" else path.parent
    own = [*map(sysconfig.get_path, _OWN), *site.getsitepackages(), site.getusersitepackages()]
    if any(folder.is_relative_to(place) for place in own):
        return False
    others = [entry for entry in sys.path if Path(entry).absolute() != folder]
    return name in sys.stdlib_module_names or PathFinder.find_spec(name, others) is not None
