"""The import at the head of a notebook loads what every notebook needs, and no more."""

from __future__ import annotations

import subprocess
import sys

IMPORT = "from workbench import Cluster, FineTune, LocalPods"
LATE = (
    *("IPython", "ipywidgets", "kubernetes", "matplotlib", "numpy", "pandas", "paramiko"),
    *("pathspec", "re2", "tensorboard", "torch", "transformers"),
    *("workbench.display", "workbench.keeper.link", "workbench.rundir.catalog.store"),
)
_MOST_MODULES = 246  # of the package; each costs about a millisecond of CPU


def test_the_first_import_loads_no_library_and_no_module_that_waits_for_its_first_use() -> None:
    code = f"import sys\n{IMPORT}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    loaded = done.stdout.split()
    early = [name for name in loaded if any(f"{name}.".startswith(f"{late}.") for late in LATE)]
    assert early == []
    assert len([name for name in loaded if name.startswith("workbench")]) <= _MOST_MODULES
