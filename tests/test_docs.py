"""What the repository says of itself: README, pages, Makefile, requirements, hooks, notebooks."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import metadata, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import nbformat
import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup, SoupStrainer
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from playwright.sync_api import Page, sync_playwright

import workbench
from tests.browser.readings import PICTURES, RECORDS, digest, load_records
from tests.support import executed
from tools.options import PUBLIC, find
from workbench.finetune.advice import rules
from workbench.rundir.result import RunFault
from workbench.rundir.spec import ClusterSpec

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXECUTED = ROOT / "docs" / "executed"
WALKTHROUGHS = sorted((ROOT / "docs" / "walkthroughs").glob("*.ipynb"))
PINS = [
    line
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
]

# What a user installs, with the extras whose packages all stand in requirements.txt.
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("notebook", "worker", "kubernetes", "trl", "qlora", "gguf", "eval", "s3")
NEEDS = [
    Requirement(need)
    for needs in (
        PROJECT["dependencies"],
        *(PROJECT["optional-dependencies"][extra] for extra in EXTRAS),
    )
    for need in needs
]


def cells_of(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells]


def test_the_readme_stays_short_and_leads_to_every_page() -> None:
    assert len(README.splitlines()) <= 150
    shown = {path.relative_to(ROOT).as_posix() for path in PAGES if path.parent == ROOT / "docs"}
    assert shown - set(re.findall(r"\]\(([^)#]+)", README)) == set()


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=lambda path: path.stem)
def test_commands_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    asked = set(re.findall(r"(?:`|    )make ([a-z][a-z-]*)\b", path.read_text()))
    assert asked <= targets
    if path.stem == "README":
        assert {"quickstart", "test", "lab", "docs"} <= asked


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=lambda path: path.stem)
def test_python_parses_and_imports_public_names(path: Path) -> None:
    # A package of another person derives from the interfaces of jobs, which are no public names.
    extending = {"workbench.jobs.job", "workbench.base.record"}
    allowed = extending if path.stem == "extending" else set()
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        assert set(private_names(block)) <= allowed


def private_names(source: str) -> list[str]:
    """What a piece of Python imports of us that is not public."""
    private = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module="workbench", names=names):
                private += [alias.name for alias in names if alias.name not in workbench.__all__]
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("workbench."):
                public = all(f"{module}.{alias.name}" in PUBLIC for alias in names)
                private += [] if public else [module]
            case ast.Import(names=names):
                private += [alias.name for alias in names if alias.name.startswith("workbench.")]
    return private


def anchors_of(path: Path) -> set[str]:
    """Anchors of a page: its own, and those that GitHub and MyST make of headings."""
    page = path.read_text()
    headings = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', page))


def test_links_of_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", README):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            assert (ROOT / path).exists(), link
            assert not anchor or anchor in anchors_of(ROOT / path), link


def test_every_picture_has_a_record_of_what_is_read_in_it() -> None:
    pages = [ROOT / "README.md", *PAGES]
    shown = {
        name for page in pages for name in re.findall(r"pictures/([\w.-]+)\)", page.read_text())
    }
    kept = {path.name for path in PICTURES.iterdir()} - {RECORDS.name}
    records = load_records()
    assert shown == kept == set(records)
    changed = [
        name
        for name, record in records.items()
        if record["sha256"] != digest(PICTURES / name, record["texts"])
    ]
    assert changed == [], "a picture or its record was changed alone: run `make pictures`"


def test_numbers_of_the_promises_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "promises.md").read_text()
    row = re.compile(r"^\| .+ \| ([\d ]+) s.* \| `(\w+)\((\w+)=…\)`", flags=re.MULTILINE)
    promised = {
        (owner, option): float(value.replace(" ", "")) for value, owner, option in row.findall(page)
    }
    code = {(o, n): inspect.signature(find(o)).parameters[n].default for o, n in promised}
    # The default depends on the place; local pods wait in no queue.
    code["Cluster", "start_timeout_s"] = ClusterSpec().start_limit_s
    assert len(promised) == 10
    assert promised == code


def test_the_structure_page_has_the_floors_of_the_contract() -> None:
    page = (ROOT / "docs" / "structure.md").read_text().replace("\\|", "|")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = {
        contract["containers"][0]: contract["layers"]
        for contract in contracts
        if contract["type"] == "layers" and "containers" in contract  # else it is of single modules
    }
    floors = re.findall(r"^\| \d+ \| ((?:`[\w/.]+`(?: \||,)? ?)+)", page, flags=re.MULTILINE)
    rooms = [set(re.findall(r"`(\w+)[/.]", floor)) for floor in reversed(floors)]
    assert rooms == [set(re.findall(r"\w+", layer)) for layer in layers["workbench"]]


def test_the_paths_of_the_pages_on_the_structure_are_there() -> None:
    rooms = "|".join(
        path.name for path in (ROOT / "workbench").iterdir() if (path / "__init__.py").exists()
    )
    pages = [(ROOT / "docs" / page).read_text() for page in ("structure.md", "inside.md")]
    paths = set(re.findall(rf"`((?:{rooms})/[\w/]*)`", "".join(pages)))
    assert len(paths) > 20
    places = {path: ROOT / "workbench" / path for path in paths}
    assert [
        name
        for name, place in places.items()
        if not (place.is_dir() or place.with_suffix(".py").exists())
    ] == []


def test_every_fault_of_the_page_is_held_by_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| (\d+[a-z]?) \|.*\| (.*) \|$", page, flags=re.MULTILINE)
    whole = [
        int(number) for number, _ in rows if number.isdigit()
    ]  # a letter behind it: one that came in between
    assert whole == list(range(1, len(whole) + 1)) and len(whole) > 60
    for number, cell in rows:
        names = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)
        assert names, f"row {number} names no test"
        for path, name in names:
            assert name in functions_of(ROOT / path), f"{path}::{name}"


@functools.cache
def functions_of(path: Path) -> set[str]:
    """The names of a module's own functions; rows of the page name some modules many times."""
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


QUOTED = (
    "is not known: did you mean",
    "is neither a folder on this machine nor a hub id",
    "no known form of a row has the columns ",
    "was removed from DeepSpeed",
    "zero_optimization.stage is ",
    " by process ",
    ", which is not installed",
    " is not empty; choose a new directory",
    "the host key of ",
    "torch is not installed for ",
    " did not start",
    " pods came up in ",
    "Hosts behind a slow line need more time",
    " cannot be read at this moment: ",
    "the keeper does not answer since ",
    "the file system there has no flock",
)


def test_the_errors_of_the_page_are_messages_of_the_code() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    code = "".join(path.read_text() for path in sorted((ROOT / "workbench").rglob("*.py")))
    assert [words for words in QUOTED if words not in page or words not in code] == []


def test_the_notebooks_of_the_design_are_here() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {
        "00_quickstart",
        "01_prep_dataset",
        "02_single_pod",
        "03_deepspeed_zero1",
        "04_deepspeed_zero3_offload",
        "05_run_inference",
    }


@pytest.mark.parametrize("path", [*NOTEBOOKS, *WALKTHROUGHS], ids=lambda path: path.stem)
def test_notebook_is_kept_clean(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert {"name", "version", "mimetype"} <= notebook["metadata"]["language_info"].keys(), (
        "opening it would change it"
    )
    cells = cells_of(path)
    assert [c["id"] for c in cells if c.get("outputs") or c.get("execution_count")] == [], (
        "run nbstripout"
    )
    ids = [cell["id"] for cell in cells]
    assert len(set(ids)) == len(ids)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert private_names(cell["source"]) == []
            assert cell["source"].count("\n") < 35, f"cell {cell['id']} is long"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_says_where_it_runs_and_what_was_learned(path: Path) -> None:
    cells = cells_of(path)
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"].startswith("# ")
    assert cells[1]["source"].startswith("## Where it runs\n")
    assert cells[2]["cell_type"] == "code"
    texts = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    assert texts[-1].startswith("## What was learned\n")
    own = re.compile(r"^## Now with your (data|script)$", re.MULTILINE)
    assert any(own.search(text) for text in texts)
    links = [link for cell in cells for link in re.findall(r"\]\(([^)]+\.ipynb)\)", cell["source"])]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_versions_are_exact_and_are_what_is_installed() -> None:
    pins = {name: pin for name, _, pin in (line.partition("==") for line in PINS)}
    assert all(pins.values())
    assert {n: version(n).partition("+")[0] for n in pins} == pins


def test_versions_install_on_the_oldest_python() -> None:
    oldest = "3.11.2"  # Debian 12's; some packages ask for a later patch release
    needs = {
        line.partition("==")[0]: metadata(line.partition("==")[0])["Requires-Python"]
        for line in PINS
    }
    assert [
        name for name, need in needs.items() if need and not SpecifierSet(need).contains(oldest)
    ] == []


def test_dependencies_of_the_package_are_pinned_within_their_range() -> None:
    pins = dict(line.split("==") for line in PINS)
    assert [
        str(need) for need in NEEDS if not need.specifier.contains(pins.get(need.name, "0"))
    ] == []
    assert {need.name for need in NEEDS} >= {"torch", "jupyterlab", "kubernetes", "paramiko"}


def test_no_page_sends_users_to_the_package_index_for_this_project() -> None:
    """The index does not have it yet: a stranger could register the name."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    texts = [
        ROOT / name
        for name in tracked.splitlines()
        if name.endswith((".py", ".md", ".ipynb", ".txt", ".yaml"))
    ]
    sent = re.compile(r"pip install [^\n`]*\bdeepspeed-workbench\b")
    assert [
        str(path) for path in texts if path != Path(__file__) and sent.search(path.read_text())
    ] == []


def test_the_repository_has_no_weights_and_nothing_that_a_run_left() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    weights = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf", ".onnx", ".npz")
    left = re.compile(r"(^|/)checkpoint-\d+/|^(runs|outputs?|out)/")
    assert [name for name in tracked if name.endswith(weights) or left.search(name)] == []


def test_every_pin_but_torch_is_locked_by_hashes() -> None:
    """A raised version without `make requirements` fails here, and in pip in `make setup`."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    locked = {pin: hashes for pin, *hashes in lines}
    assert locked.keys() == {pin for pin in PINS if not pin.startswith("torch==")}
    for pin, hashes in locked.items():
        assert hashes and all(
            re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes
        ), pin


def test_setup_installs_by_hash_and_pip_refuses_another_file(tmp_path: Path) -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\n$(READY):")[2].partition("\n\n")[0]
    assert "--no-deps --require-hashes -r requirements.lock" in recipe
    wheel = tmp_path / "idna-3.0-py3-none-any.whl"
    wheel.write_bytes(b"not what was locked")
    (tmp_path / "lock").write_text(f"idna @ {wheel.as_uri()} --hash=sha256:{'0' * 64}\n")
    argv = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--require-hashes",
        "--no-index",
        "--target",
    ]
    done = subprocess.run(
        [*argv, tmp_path / "there", "-r", tmp_path / "lock"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_every_promise_of_security_names_a_test_that_is_there() -> None:
    rows = re.findall(
        r"^\| (.+) \| (`tests/.+`) \|$", (ROOT / "SECURITY.md").read_text(), flags=re.MULTILINE
    )
    assert len(rows) > 10
    for promise, held in rows:
        file = ""
        for named in re.findall(r"`([^`]+)`", held):
            path, _, test = named.partition("::")
            file = file if path == "…" else path
            assert (ROOT / file).is_file(), promise
            assert f"def {test}" in (ROOT / file).read_text(), promise


def test_ci_runs_every_check() -> None:
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert "make test-all" in ci.read_text()


def test_the_site_is_built_with_warnings_as_errors_by_lint() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^lint:.* docs-check", makefile, flags=re.MULTILINE)
    recipe = makefile.partition("\ndocs-check:")[2].split("\n\n")[0]
    assert "sphinx" in recipe and " -W " in recipe


def test_a_page_shows_the_outputs_of_a_notebook_that_was_not_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = extension("executed")
    monkeypatch.setattr(pages, "EXECUTED", tmp_path)
    monkeypatch.setattr(executed, "KEPT", tmp_path)
    live = "application/vnd.jupyter.widget-view+json"
    needed: list[str] = []
    env = SimpleNamespace(doc2path=lambda name: f"{name}.ipynb", note_dependency=needed.append)
    app = SimpleNamespace(env=env)
    title, cell = nbformat.v4.new_markdown_cell("# Sum"), nbformat.v4.new_code_cell("1 + 1")
    book = nbformat.v4.new_notebook(cells=[title, cell])
    stripped = nbformat.writes(book)

    def shown() -> tuple[str, list[dict[str, Any]]]:
        source = [stripped]
        pages.show_outputs(app, "notebooks/sum", source)
        _, note, code = json.loads(source[0])["cells"]
        return "".join(note["source"]), code["outputs"]

    assert shown() == (pages.WITHOUT, [])
    assert needed == [str(tmp_path / "sum.ipynb")], "or no later build reads the page"
    data = {"text/plain": f"2, in {ROOT}/runs", live: {}}
    html = {"text/plain": "2", "text/html": "<b>2</b><script>2</script>"}
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stderr", text="a warning"),
        nbformat.v4.new_output("display_data", data),
        nbformat.v4.new_output("display_data", html),
        nbformat.v4.new_output("display_data", {live: {}}),
    ]
    cell.metadata["execution"] = {"iopub.execute_input": "2026-11-27T04:00:00Z"}
    executed.keep(book, ROOT / "notebooks" / "sum.ipynb")
    words, outputs = shown()
    assert "2026-11-27" in words
    kept = [{"text/plain": ["2, in …/runs"]}, {"text/html": ["<b>2</b>"]}]
    assert [output["data"] for output in outputs] == kept
    stripped = stripped.replace("# Sum", "# A sum")
    assert "2026-11-27" in shown()[0], "the text is the notebook's"
    stripped = stripped.replace("1 + 1", "1 + 2")
    assert shown() == (pages.WITHOUT, [])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["root", "home", "prefix", "state", "temporary", "shared memory"]),
            st.sampled_from(["", "/runs/first", "/a-b/x.json"]),
            st.sampled_from(["", " ", "'", '"', "<b>", ":", "=", "\n"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_copy_has_no_folder_of_the_machine_that_made_it(
    pieces: list[tuple[str, str, str]],
) -> None:
    state = "/somewhere/else/states-1"
    folders = {
        "root": str(ROOT),
        "home": str(Path.home()),
        "prefix": sys.prefix,
        "state": state,
        "temporary": "/tmp/tmpab12cd_z",
        "shared memory": "/dev/shm/wb-b77kqlsl",
    }
    shown = "".join(f"{mark}{folders[name]}{rest} " for name, rest, mark in pieces)
    public = "/tmp/cache /etc/workbench/spec.json /tmp/workbench"
    cell = nbformat.v4.new_code_cell("1")
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stdout", text=f"{shown}{public}"),
        nbformat.v4.new_output("display_data", {"text/html": f"<p>{shown}</p>"}),
    ]
    book = nbformat.v4.new_notebook(cells=[cell])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", state)
        made = executed.thinned(book, ROOT / "notebooks" / "sum.ipynb")
    assert [name for name, folder in folders.items() if folder in made] == []
    assert public in made
    for _, rest, _ in pieces:
        assert rest in made, "the rest of a path stays"


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://code.example/lab/workbench.git\n", "https://code.example/lab/workbench"),
        ("https://me:secret@code.example/lab/workbench", "https://code.example/lab/workbench"),
        ("git@code.example:lab/workbench.git", "https://code.example/lab/workbench"),
        ("ssh://git@code.example:2222/lab/workbench.git", "https://code.example/lab/workbench"),
        ("/srv/clones/workbench", ""),
        ("", ""),
    ],
)
def test_the_header_links_the_repository_of_the_clone(remote: str, address: str) -> None:
    assert extension("repository").address_of(remote) == address
    template = Template((ROOT / "docs" / "_templates" / "repository.html").read_text())
    link = template.render(repository=address)
    assert (f'href="{address}"' in link) == bool(address)


def extension(name: str) -> Any:
    """Import a module of the site's own extensions."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/_ext/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_built_of(site: Path, sources: Sequence[Path]) -> bool:
    """Whether a site was written to its end, after the last change of its sources."""
    end = site / "searchindex.js"
    if not end.is_file():
        return False
    suffixes = (".md", ".py", ".ipynb", ".html", ".css", ".js")
    changed = (
        path.stat().st_mtime
        for source in sources
        for path in source.rglob("*")
        if path.suffix in suffixes and not {"_build", "runs"} & {*path.relative_to(source).parts}
    )
    return max(changed) < end.stat().st_mtime


def test_a_site_is_built_anew_after_a_change(tmp_path: Path) -> None:
    page, site = tmp_path / "docs" / "page.md", tmp_path / "docs" / "_build" / "html"
    site.mkdir(parents=True)
    page.touch()
    assert not is_built_of(site, [page.parent]), "the build did not end"
    (site / "searchindex.js").touch()
    os.utime(page, (1, 1))
    assert is_built_of(site, [page.parent])
    os.utime(site / "searchindex.js", (0, 0))
    assert not is_built_of(site, [page.parent])


@pytest.mark.parametrize("kept", sorted(EXECUTED.iterdir()), ids=lambda path: path.stem)
def test_an_executed_copy_has_the_code_of_its_notebook(kept: Path) -> None:
    (path,) = (path for path in [*NOTEBOOKS, *WALKTHROUGHS] if path.name == kept.name)
    copy = nbformat.read(kept, as_version=4)
    code = [cell for cell in copy.cells if cell.cell_type == "code"]
    sources = [cell["source"] for cell in cells_of(path) if cell["cell_type"] == "code"]
    assert [cell.source for cell in code] == sources, f"run `make executed ONLY={path.stem}`"
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    kinds = {output.output_type for output in outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert "widgets" not in copy.metadata
    forms = [form for output in outputs for form in output.get("data", {"text": ""})]
    assert len(forms) == len(outputs)
    assert {*forms} <= {*executed.SHOWN, "text"}
    text = kept.read_text()
    assert [word for word in (str(ROOT), str(Path.home()), "<script") if word in text] == []
    assert len(text) < 600_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site: that of `make docs-check`, unless a file changed since."""
    built = ROOT / "docs" / "_build" / "html"
    if is_built_of(built, [ROOT / "docs", ROOT / "notebooks", ROOT / "workbench"]):
        return built
    there = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", str(ROOT / "docs"), str(there)],
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr
    return there


@pytest.mark.slow
@pytest.mark.long
def test_every_page_of_the_site_shows_all_pages_in_its_left_column(site: Path) -> None:
    captions = ["Tutorials", "How-to guides", "Reference", "Explanation"]
    pages = [
        path for path in site.rglob("*.html") if path.name not in ("genindex.html", "search.html")
    ]
    assert len(pages) > 30
    for page in pages:
        parsed = BeautifulSoup(page.read_text(), "html.parser", parse_only=SoupStrainer("aside"))
        column = parsed.select_one("aside.sidebar-drawer")
        assert column is not None, page
        assert [caption.get_text() for caption in column.select("p.caption")] == captions, page
        linked = {
            (page.parent / str(link["href"]).split("#")[0]).resolve()
            for link in column.select("li a")
        }
        # A page's own link is an anchor.
        assert {each.resolve() for each in pages} - {site / "index.html"} <= linked | {
            page.resolve(),
            page.parent,
        }, page


@pytest.mark.slow
@pytest.mark.long
def test_options_have_anchors_and_the_api_has_every_name_on_the_site(site: Path) -> None:
    options_page = BeautifulSoup((site / "options.html").read_text(), "html.parser")
    row = options_page.select_one("tr:has(#learning-rate)")
    assert row is not None
    assert row.select_one('a[href="#learning-rate"]').get_text() == "learning_rate"
    api = BeautifulSoup((site / "api.html").read_text(), "html.parser")
    for name, value in PUBLIC.items():
        described = api.find(id=name)
        assert described is not None and described.parent is not None, name
        first = (inspect.getdoc(value) or "").partition("\n")[0]
        words = re.sub(r"\W+", " ", first)
        assert words in re.sub(r"\W+", " ", described.parent.get_text()), name


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium: sudo apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.browser
def test_a_search_finds_the_right_page_first(site: Path, page: Page) -> None:
    """Sphinx's own search: titles and entries of the index count most."""
    wanted = {
        "out of memory": "troubleshooting.html#out-of-memory",
        "CUDA out of memory": "troubleshooting.html#out-of-gpu-memory",
        "No space left on device": "troubleshooting.html#the-disk-is-full",
        "learning_rate": "options.html#learning-rate",
        "learning rate": "options.html#learning-rate",
        "which technique should I choose": "choose-technique.html",
        "choose a model": "choose-model.html",
        "own csv": "data.html",
        "slurm": "places/slurm.html",
        "gradient_accumulation_steps": "options.html#gradient-accumulation-steps",
        "hostfile": "glossary.html#hostfile",
        "keeper": "glossary.html#keeper",
        "install": "install.html",
        "troubleshooting": "troubleshooting.html",
        "FineTune": "api.html#workbench.FineTune",
    }
    found, shown = {}, {}
    for query in wanted:
        page.goto(f"{(site / 'search.html').as_uri()}?q={quote(query)}")
        first = page.locator("#search-results li a").first
        found[query] = str(first.get_attribute("href"))
        shown[query] = first.inner_text()
    assert {query: href.removeprefix("./") for query, href in found.items()} == wanted
    assert shown["learning_rate"] == "Options > learning_rate"
    assert shown["out of memory"] == "Troubleshooting > out of memory"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.browser
def test_a_page_of_the_site_violates_no_rule_of_axe_and_its_code_can_be_copied(
    site: Path, page: Page
) -> None:
    page.goto((site / "install.html").as_uri())
    assert page.locator("button.copybtn").count() == page.locator("article pre").count() > 4
    violations = Axe().run(page).response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"]) for rule in violations] == []


def test_private_keys_are_refused_by_the_hook() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    pattern = re.compile(next(hook["entry"] for hook in hooks if hook["id"] == "private-key"))
    assert pattern.search("-----BEGIN " + "OPENSSH PRIVATE KEY-----")
    assert pattern.search("-----BEGIN " + "PRIVATE KEY-----")
    assert not pattern.search("-----BEGIN PUBLIC KEY-----")
    assert not pattern.search((ROOT / ".pre-commit-config.yaml").read_text())


def files_with_links() -> list[Path]:
    tracked = subprocess.run(
        ["git", "ls-files", "*.md", "*.ipynb"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in tracked.splitlines()]


def links_of(path: Path) -> list[str]:
    """Relative links of a page or of a notebook's text, outside of code."""
    texts = [path.read_text()]
    if path.suffix == ".ipynb":
        texts = [cell["source"] for cell in cells_of(path) if cell["cell_type"] == "markdown"]
    text = re.sub(r"```.*?```|`[^`\n]*`", "", "\n".join(texts), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def test_no_relative_link_is_dead_on_a_code_host() -> None:
    """A code host shows the files as they are: a link is a path, and an anchor a heading of it."""
    dead, count = [], 0
    for path in files_with_links():
        for link in links_of(path):
            count += 1
            target, _, anchor = link.partition("#")
            there = path.parent / target if target else path
            alive = there.exists() and not there.is_relative_to(ROOT / "docs" / "notebooks")
            if alive and anchor and there.suffix == ".md":
                alive = anchor in anchors_of(there)
            if not alive:
                dead.append(f"{path.relative_to(ROOT)}: {link}")
    assert dead == []
    assert count > 300


def test_the_extras_of_the_install_page_are_those_of_the_project() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    table = page.partition("| Extra |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, flags=re.MULTILINE)) == set(
        PROJECT["optional-dependencies"]
    )
    pins = dict(line.split("==") for line in PINS)
    needs = {need.name: need.specifier for need in NEEDS}
    table = page.partition("| Package | Tested version |")[2].partition("\n\n")[0]
    row = r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+|–) \|"
    rows = re.findall(row, table, flags=re.MULTILINE)
    assert len(rows) == 7
    for name, tested, least, below in rows:
        bounds = f">={least}" if below == "–" else f">={least},<{below}"
        assert (tested, SpecifierSet(bounds)) == (pins[name.lower()], needs[name.lower()])


def test_every_cause_of_a_failure_has_a_section_that_quotes_its_words() -> None:
    """Each quoted message leads to the section of its own cause, so a search for it does too."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    parts = re.split(r"^##+ (.+)\n\n", page, flags=re.MULTILINE)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    for rule in rules._RULES:
        seen = sections[rule.title].partition("\n\n")[0]
        assert seen.startswith("You see "), rule.title
        kind = rule.kinds[0] if rule.kinds else "RuntimeError"
        for words in re.findall(r"`([^`]+)`", seen):
            advice = rules.advise(RunFault(kind=kind, message=words))
            assert advice.title == rule.title, words
