"""How Sphinx builds the site: Markdown and notebooks by MyST-NB, the theme Furo, no network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

from repository import address_of  # noqa: E402

import workbench  # noqa: E402

# The notebooks are pages too. Sphinx reads only what is below its own folder, and
# MyST follows links to where they lead, so they are copied; git ignores the copies.
COPIES = HERE / "notebooks"
shutil.rmtree(COPIES, ignore_errors=True)
COPIES.mkdir()
for notebook in sorted((HERE.parent / "notebooks").glob("*.ipynb")):
    shutil.copy2(notebook, COPIES)

project = "DeepSpeed Workbench"
version = release = workbench.__version__
extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "anchors",
    "executed",
    "records",
]
exclude_patterns = ["_build", "_ext", "walkthroughs/runs", "executed", "**/.ipynb_checkpoints"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the tests run the notebooks; _ext/executed.py shows their outputs
nb_output_stderr = "remove"  # warnings of libraries; errors are shown
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # would be loaded from another server

# The API page: Google docstrings, with the types in the signature.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "both"
default_role = "literal"  # docstrings write code in single backticks
maximum_signature_line_length = 88
toc_object_entries = False

smartquotes = False
html_theme = "furo"  # its left column shows every page below its caption, on every page
html_title = f"{project} {version}"
templates_path = ["_templates"]
# The clone knows the address of its repository. A build outside of a clone shows no link.
remote = subprocess.run(
    ["git", "remote", "get-url", "origin"], cwd=HERE, capture_output=True, text=True, check=False
)
html_context = {"repository": address_of(remote.stdout)}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "repository.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_js_files = ["labels.js"]
html_search_scorer = str(HERE / "_ext" / "scorer.js")
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
# A prompt and what a command prints are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
