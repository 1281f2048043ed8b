"""Requirements of a script: what is read, and what is refused before pods start."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.scripts import script_job
from tests.support.sentences import sentence
from workbench import Script
from workbench.errors import ConfigError, RunError
from workbench.jobs.job import HandoverRequest, NewRun
from workbench.jobs.requirements.read import header_in, read_requirements
from workbench.jobs.requirements.requirements import (
    WITHOUT_HEADER,
    Requirements,
    check_secrets,
    parsed,
)

HEADER = """\
#!/usr/bin/env python
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl==1.16.0",
#   "rich",
# ]
#
# [tool.uv]
# exclude-newer = "2026-01-01T00:00:00Z"
# ///
import trl
"""
HASH = "0123456789abcdef" * 4
LOCK = """\
version = 1
revision = 3
requires-python = ">=3.11"

[[package]]
name = "project"
version = "0.1.0"
source = { virtual = "." }
dependencies = [
    { name = "above", extra = ["fast"] },
    { name = "wide", version = "1.0", marker = "sys_platform == 'linux'", source = PYPI },
    { name = "wide", version = "2.0", marker = "sys_platform != 'linux'", source = PYPI },
]

[package.dev-dependencies]
dev = [{ name = "unasked" }]

[[package]]
name = "above"
version = "1.5"
source = { registry = "https://pypi.org/simple" }
wheels = [{ url = "https://files.example.org/above-1.5-py3-none-any.whl", hash = "sha256:HASH" }]
dependencies = [{ name = "below", marker = "python_full_version < '3.13'" }]

[package.optional-dependencies]
fast = [{ name = "quick" }, { name = "above" }]

[[package]]
name = "below"
version = "2.0"
source = { registry = "https://download.example.org/cpu" }
wheels = [{ url = "https://files.example.org/below-2.0-py3-none-any.whl", hash = "sha256:HASH" }]

[[package]]
name = "quick"
version = "3.1"
source = { git = "https://example.org/quick.git?rev=main#0123abcd0123abcd0123abcd0123abcd0123abcd" }

[[package]]
name = "unasked"
version = "9"
source = { registry = "https://pypi.org/simple" }
wheels = [{ url = "https://files.example.org/unasked-9-py3-none-any.whl", hash = "sha256:HASH" }]

[[package]]
name = "wide"
version = "1.0"
source = { registry = "https://pypi.org/simple" }
wheels = [{ url = "https://files.example.org/wide-1.0-py3-none-any.whl", hash = "sha256:HASH" }]

[[package]]
name = "wide"
version = "2.0"
source = { registry = "https://pypi.org/simple" }
wheels = [{ url = "https://files.example.org/wide-2.0-py3-none-any.whl", hash = "sha256:HASH" }]
""".replace("HASH", HASH).replace("PYPI", '{ registry = "https://pypi.org/simple" }')
PROJECT = """\
[project]
name = "project"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["above[fast]", "wide"]
"""


def read(
    folder: Path, given: str | Sequence[str] | None, content: str = "", *, isolated: bool = False
) -> Requirements | None:
    script = folder / "train.py"
    script.write_text(content)
    return read_requirements(given, script, {"INDEX_TOKEN": "tok-9f8e7d6c"}, isolated=isolated)


def lines(folder: Path, given: str | Sequence[str] | None, content: str = "") -> Sequence[str]:
    found = read(folder, given, content)
    assert found is not None
    return found.lines


def test_a_header_is_used_unless_requirements_are_given(tmp_path: Path) -> None:
    found = read(tmp_path, None, HEADER)
    assert found is not None
    assert found.lines == ["trl==1.16.0", "rich"]
    assert (found.source, found.requires_python) == ("the header of train.py", ">=3.11")
    assert found.notes == ["the header of train.py: [tool] is not used"]
    other = read(tmp_path, ["rich==15"], HEADER)
    assert other is not None
    assert (other.lines, other.requires_python) == (["rich==15"], "")
    assert other.notes == ["the header of train.py is not used, as requirements are given"]
    none = read(tmp_path, [], HEADER)
    assert none is not None
    assert not none.installs
    assert read(tmp_path, None, "import trl\n") is None


@pytest.mark.parametrize(
    "name",
    ["UV_INDEX", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"],
)
def test_an_index_for_uv_alone_is_refused_and_other_settings_of_uv_are_named(
    name: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")

    def notes(env: Mapping[str, str], *lines: str) -> Sequence[str]:
        found = read_requirements(lines, script, env, isolated=False)
        assert found is not None
        return found.notes

    address = "https://me:s3cretword@one.org/simple"
    with pytest.raises(ConfigError, match=sentence("Give the source as", name)) as error:
        notes({name: address}, "rich")
    assert "s3cretword" not in str(error.value)
    # The script itself may use uv.
    assert notes({name: address}) == []
    both = {name: address, "UV_OFFLINE": "1", "PIP_INDEX_URL": address}
    (note,) = notes(both, "rich")
    assert f"{name}, UV_OFFLINE" in note or f"UV_OFFLINE, {name}" in note


@pytest.mark.parametrize(
    "text",
    [
        "# //// script\n# dependencies = []\n# ////\n",
        "    # /// script\n",
        "# /// other\n# dependencies = []\n# ///\n",
        "x = 1\n",
    ],
)
def test_what_is_no_header(text: str) -> None:
    assert header_in(text, "train.py") is None


@pytest.mark.parametrize(
    "content",
    [
        HEADER.replace("\n", "\r\n").encode(),
        HEADER.replace("\n", "\r").encode(),
        HEADER.encode("utf-8-sig"),
        f"# coding: latin-1\n# größe\n{HEADER}".encode("latin-1"),
    ],
)
def test_a_header_is_read_wherever_python_reads_the_script(tmp_path: Path, content: bytes) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(content)
    found = read_requirements(None, script, {}, isolated=False)
    assert found is not None
    assert found.lines == ["trl==1.16.0", "rich"]


@pytest.mark.parametrize(
    "text",
    [
        "# /// script\n# dependencies = ['trl']\nimport x\n",
        "#///script\n# dependencies = ['trl']\n#///\n",
        "# /// script \n# dependencies = ['trl']\n# ///\n",
        "# /// script\n# dependencies = ['trl']\n# /// \n",
        "#\t/// script\n#\tdependencies = ['trl']\n#\t///\n",
        "# /// script\n#dependencies = ['trl']\n# ///\n",
        "# /// script\n\n# dependencies = ['trl']\n# ///\n",
        "# /// Script\n# dependencies = ['trl']\n# ///\n",
    ],
)
def test_a_header_that_python_s_tools_would_not_see_is_refused(tmp_path: Path, text: str) -> None:
    remedy = sentence("and no header follows", "line 2 of train.py is")
    with pytest.raises(ConfigError, match=remedy) as refused:
        read(tmp_path, None, f"import os\n{text}")
    assert refused.value.args[0].endswith(WITHOUT_HEADER)
    ignored = read(tmp_path, [], text)  # the way out is one
    assert ignored is not None and not ignored.installs


def test_an_empty_header_needs_no_environment(tmp_path: Path) -> None:
    found = read(tmp_path, None, "# /// script\n# ///\n")
    assert found is not None and not found.installs


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("# dependencies = [", "the header of train.py is not TOML"),
        ("# dependencies = 'trl'", "must be a list of strings"),
        ("# dependencies = ['trl=1']", "'trl=1' is not a requirement"),
        ("# requires-python = 'three'", "requires-python is 'three'"),
    ],
)
def test_a_broken_header_is_refused(block: str, words: str, tmp_path: Path) -> None:
    way_out = r"; requirements=\[\] ignores the header and uses the pods' own packages"
    broken = f"# /// script\n{block}\n# ///\n"
    with pytest.raises(ConfigError, match=f"{words}.*{way_out}"):
        read(tmp_path, None, broken)
    twice = "# /// script\n# dependencies = []\n# ///\n\n" * 2
    with pytest.raises(ConfigError, match=f"2 blocks.*{way_out}"):
        read(tmp_path, None, twice)
    for content in (broken, twice):
        found = read(tmp_path, [], content)  # the way out is one
        assert found is not None
        assert not found.installs


@pytest.mark.parametrize("given", [None, ["trl==1.16.0"]])
def test_only_an_error_of_a_header_names_the_way_out(
    given: list[str] | None, tmp_path: Path
) -> None:
    found = read(tmp_path, given, HEADER)
    assert found is not None
    assert bool(found.way_out) is (given is None)
    if given is None:
        with pytest.raises(ConfigError, match=r"requirements=\[\] ignores the header"):
            found.check_python("3.10.2", "pod-0")


def test_a_requirements_file_is_read_as_pip_reads_it(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("rich  # colours\n-c limits.txt\n")
    (tmp_path / "limits.txt").write_text("numpy<3\n")
    file = tmp_path / "requirements.txt"
    file.write_text(
        "# packages\n--extra-index-url https://example.org/simple\n-r more.txt\n"
        "trl==1.16.0 \\\n    --hash=sha256:00ff\n"
        "pkg @ https://example.org/a#egg=pkg ; python_version > '3'\n"
    )
    found = read(tmp_path, str(file))
    assert found is not None
    assert found.lines == [
        "--extra-index-url https://example.org/simple",
        "rich",
        "trl==1.16.0      --hash=sha256:00ff",
        "pkg @ https://example.org/a#egg=pkg ; python_version > '3'",
    ]
    assert found.constraints == ["numpy<3"]
    assert found.packages == found.lines[1:]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-e ./lib", "names a folder of this machine"),
        ("--target /x", "the option --target is not known"),
        ("./lib", "a file on the pods is"),
        ("-r absent.txt", "absent.txt does not exist"),
        ("-r requirements.txt", "names itself"),
        ("trl ==", "line 1: 'trl ==' is not a requirement"),
    ],
)
def test_a_line_that_pods_cannot_use_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, str(file))


def test_lines_that_go_together_are_taken(tmp_path: Path) -> None:
    fine = [
        "trl==1.0",
        "trl>=0.9",
        "x==1 ; python_version<'3'",
        "x==2 ; python_version>'3'",
        "y==1.*",
        "y==1.2",
    ]
    assert lines(tmp_path, fine) == fine


def test_a_secret_is_refused_and_a_reference_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="looks as if it has a secret") as caught:
        read(tmp_path, ["pkg @ git+https://me:tok-9f8e7d6c@example.org/pkg"])
    assert "tok-9f8e7d6c" not in str(caught.value)
    asked = ["pkg @ git+https://${INDEX_TOKEN}@example.org/pkg"]
    assert lines(tmp_path, asked) == asked


@pytest.mark.parametrize(
    "line",
    [
        "requests @ https://h.example.org/x.whl\n--index-url=http://other.example.org/simple",
        "requests --hash\n--index-url=http://other.example.org/simple",
        "requests\r--pre",
        "requests @ https://h.example.org/x.whl\u2028--pre",
        "requests\u202e",
    ],
)
def test_a_requirement_cannot_hold_a_second_line(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a control character"):
        read(tmp_path, [line])
    header = f"# /// script\n# dependencies = [{json.dumps(line)}]\n# ///\n"
    with pytest.raises(ConfigError, match="has a control character"):
        read(tmp_path, None, header)


def test_a_deep_requirement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a requirement"):
        read(tmp_path, [f"requests; {'(' * 5000}"])


def test_a_header_ends_at_the_last_closing_line_of_its_comment(tmp_path: Path) -> None:
    inner = "# /// script\n# dependencies = ['rich']\n# [tool.x]\n# y = '''\n# ///\n#'''\n# ///\n"
    assert lines(tmp_path, None, inner.replace("#'", "# '")) == ["rich"]


def test_a_long_header_is_read_line_by_line(tmp_path: Path) -> None:
    for text in ("# /// script\n", "# /// script\n#\n", "# /// script\n#x\n"):
        with pytest.raises(ConfigError, match=sentence("and no header follows")):
            read(tmp_path, None, text * 200_000)


def of_lock(folder: Path, lock: str) -> Requirements:
    (folder / "uv.lock").write_text(lock)
    (folder / "pyproject.toml").write_text(PROJECT)
    found = read(folder, str(folder / "uv.lock"))
    assert found is not None
    return found


def test_the_packages_of_a_lock_are_pinned(tmp_path: Path) -> None:
    found = of_lock(tmp_path, LOCK)
    assert found.requires_python == ">=3.11"
    assert found.lines == [
        "--extra-index-url https://download.example.org/cpu",
        "above==1.5",
        "below==2.0 ; python_full_version < '3.13'",
        f"quick @ git+https://example.org/quick.git@{'0123abcd' * 5}",
        "wide==1.0 ; sys_platform == 'linux'",
        "wide==2.0 ; sys_platform != 'linux'",
    ]
    # The project file stands for its lock.
    project = tmp_path / "pyproject.toml"
    assert lines(tmp_path, str(project)) == found.lines
    (tmp_path / "uv.lock").unlink()
    assert lines(tmp_path, str(project)) == ["above[fast]", "wide"]


def test_a_lock_of_an_index_alone_keeps_its_hashes(tmp_path: Path) -> None:
    packages = of_lock(tmp_path, LOCK.replace('{ name = "quick" }, ', "")).packages
    assert packages[0] == f"above==1.5      --hash=sha256:{HASH}"
    assert len(packages) == 4 and all(line.endswith(f"sha256:{HASH}") for line in packages)


def test_a_long_chain_of_markers_is_read(tmp_path: Path) -> None:
    # Our own reader needed time that doubled with every diamond of the chain.
    parts = [LOCK[: LOCK.index("[[package]]")]]
    parts.append('[[package]]\nname = "project"\nversion = "0.1.0"\nsource = { virtual = "." }\n')
    parts.append('dependencies = [{ name = "p0a" }]\n')
    ends = [(f"p{n}{side}", [f"p{n + 1}a", f"p{n + 1}b"]) for n in range(40) for side in "ab"]
    for name, needs in [*ends, ("p40a", []), ("p40b", [])]:
        each = [f"{{ name = '{need}', marker = \"sys_platform == '{name}'\" }}" for need in needs]
        parts.append(
            f'[[package]]\nname = "{name}"\nversion = "1"\nsource = {{ registry = '
            '"https://pypi.org/simple" }\n'
            f'wheels = [{{ url = "https://files.example.org/{name}-1-py3-none-any.whl", '
            f'hash = "sha256:{HASH}" }}]\ndependencies = [{", ".join(each)}]\n'
        )
    assert len(of_lock(tmp_path, "\n".join(parts)).packages) >= 1


def test_a_lock_that_pods_cannot_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"below comes from the folder \.\./wheels"):
        of_lock(tmp_path, LOCK.replace('"https://download.example.org/cpu"', '"../wheels"'))
    with pytest.raises(ConfigError, match="uv lock writes the lock again"):
        of_lock(tmp_path, "version = 2\n")
    other = tmp_path / "poetry.lock"
    other.write_text(LOCK)
    with pytest.raises(ConfigError, match=r"pyproject\.toml and uv\.lock are known"):
        read(tmp_path, str(other))
    monkeypatch.setattr("shutil.which", lambda *_args, **_options: None)
    with pytest.raises(ConfigError, match="this machine has no uv"):
        of_lock(tmp_path, LOCK)


def test_an_isolated_environment_needs_requirements(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="isolated=True makes an environment without"):
        read(tmp_path, None, isolated=True)
    empty = read(tmp_path, [], isolated=True)
    assert empty is not None
    assert empty.installs


def test_python_is_compared_with_the_pods() -> None:
    needs = Requirements(source="uv.lock", lines=["trl"], requires_python=">=3.12")
    needs.check_python("3.12.4", "pod-0")
    with pytest.raises(
        ConfigError, match=r"uv\.lock requires Python >=3\.12, and pod-0 has Python 3\.11\.7"
    ):
        needs.check_python("3.11.7", "pod-0")


def test_an_environment_is_known_by_packages_python_and_index() -> None:
    one = Requirements(source="a", lines=["x==1", "y"])
    index = {"PIP_INDEX_URL": "https://me:pass-1234@example.org/simple"}
    same = Requirements(source="b", lines=["y", "x==1"])
    key = one.key("3.11", index)
    assert same.key("3.11", {**index, "SEED": "1"}) == key
    rotated = {"PIP_INDEX_URL": "https://me:pass-9876@example.org/simple"}
    assert one.key("3.11", rotated) == key
    others = [
        one.key("3.12", index),
        one.key("3.11", {}),
        Requirements(source="a", lines=["x==1"]).key("3.11", index),
        Requirements(source="a", lines=["x==1", "y"], isolated=True).key("3.11", index),
    ]
    assert len({key, *others}) == 5 and len(key) == 16
    again = Requirements.read(json.loads(json.dumps(one.facts())))
    assert again.key("3.11", index) == key


@pytest.mark.parametrize("given", [3, {"trl": "1"}, [1]])
def test_other_types_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="requirements"):
        script_job("train.py", requirements=given)


def test_a_handover_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEADER)
    job = Script(path)
    (tmp_path / "run" / "inputs").mkdir(parents=True)
    job = job.prepare(NewRun(root=tmp_path / "run", asked=job, ranks=1, gpus=0)).job
    with pytest.raises(ConfigError, match=r"2 requirements of the header of train\.py, which no"):
        job.handed_over(HandoverRequest(root=tmp_path / "run"))


def test_a_run_without_its_requirements_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read; submit the job again"):
        script_job("train.py", requirements=["trl"]).packages_in(tmp_path)
    assert script_job("train.py").packages_in(tmp_path) is None


def test_the_panel_names_given_packages() -> None:
    listed = script_job("train.py", requirements=["trl==1.16.0", "rich"], isolated=True)
    assert ("environment", "trl==1.16.0, rich, isolated") in listed.views.panel_facts({})
    of_file = script_job("train.py", requirements="/home/me/uv.lock")
    assert ("environment", "uv.lock") in of_file.views.panel_facts({})
    assert [name for name, _ in script_job("train.py").views.panel_facts({})] == ["script"]


def test_any_python_does_if_nothing_is_required_or_known_and_a_candidate_is_one() -> None:
    Requirements(source="a").check_python("2.7", "pod-0")
    needs = Requirements(source="a", requires_python=">=3.11")
    needs.check_python("", "pod-0")
    needs.check_python("3.14.0rc1", "pod-0")


def test_a_line_with_a_secret_is_named_by_its_number(tmp_path: Path) -> None:
    secret = "pkg @ git+https://me:tok-9f8e7d6c@example.org/pkg"
    with pytest.raises(ConfigError, match=sentence("and the run directory keeps the lines", 3)):
        check_secrets(["a", "b", secret], "requirements", {})


def test_candidates_ranges_and_addresses_are_left_to_pip(tmp_path: Path) -> None:
    fine = ["trl==1.0rc1", "trl>=0.9", "x @ https://a.org/x", "y @ https://b.org/y"]
    assert lines(tmp_path, fine) == fine
    again = ["x @ https://a.org/x", "x @ https://a.org/x"]
    assert lines(tmp_path, again) == again


def test_the_reason_and_a_hint_are_in_one_line_for_a_line_that_is_no_requirement() -> None:
    for line, hint in (
        ("--pre", "pip's options are variables PIP_"),
        ("./lib", "a file on the pods is"),
        ("lib.whl=1", "such as 'trl==1.16.0'"),
        ("a b", "such as 'trl==1.16.0'"),
    ):
        with pytest.raises(ConfigError) as caught:
            parsed(line, "requirements")
        text = str(caught.value)
        assert hint in text and "\n" not in text and "is not a requirement (" in text
        assert "()" not in text and "^" not in text
    with pytest.raises(ConfigError, match=r"'a b' is not a requirement \(Expected "):
        parsed("a b", "requirements")


def test_pods_with_another_python_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEADER)
    root = tmp_path / "run"
    (root / "inputs").mkdir(parents=True)
    job = Script(path)

    def prepare(pythons: dict[str, str], script: Script) -> Script:
        run = NewRun(root=root, asked=script, ranks=1, gpus=0, pythons=pythons)
        return script.prepare(run).job

    with pytest.raises(ConfigError, match=r"pod-1 has Python 3\.10"):
        prepare({"pod-0": "3.12", "pod-1": "3.10"}, job)
    assert not any((root / "inputs").iterdir())
    prepared = prepare({"pod-0": "3.12"}, job)
    found = prepared.packages_in(root)
    assert found is not None and found.lines == ["trl==1.16.0", "rich"]
    # A script without requirements runs under any Python.
    path.write_text("print(1)\n")
    assert prepare({"pod-1": "3.10"}, job).path == str(path)


def test_a_script_is_handed_over_with_its_folder_and_its_bare_name(tmp_path: Path) -> None:
    path = tmp_path / "work" / "train.py"
    path.parent.mkdir()
    path.write_text("print(1)\n")
    other = tmp_path / "other" / "later.py"
    other.parent.mkdir()
    other.write_text("print(2)\n")
    root = tmp_path / "run"
    (root / "inputs").mkdir(parents=True)
    job = Script(path)
    with pytest.raises(ConfigError, match=r"script='FOLDER/train\.py'"):
        job.handed_over(HandoverRequest(root=root))
    job = job.prepare(NewRun(root=root, asked=job, ranks=1, gpus=0)).job
    handed = job.handed_over(HandoverRequest(root=root))
    assert handed.job["path"] == "work/train.py" and names(handed.archive) == ["train.py"]
    given = job.handed_over(HandoverRequest(root=root, script=str(other)))
    assert given.job["path"] == "work/later.py" and names(given.archive) == ["later.py"]
    put = job.handed_over(HandoverRequest(root=root, folder="/jobs/"))
    assert put.job["path"] == "/jobs/script/work/train.py" and not put.archive
    # Requirements that install nothing need no environment.
    bare = Script(path, requirements=[])
    bare = bare.prepare(NewRun(root=root, asked=bare, ranks=1, gpus=0)).job
    assert bare.handed_over(HandoverRequest(root=root)).job["path"] == "work/train.py"


def names(archive: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        return packed.namelist()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("# " + "a." * 50_000 + "b = 1", "has a key of more than 100 parts"),
        ("# " + '"a" . ' * 50_000 + "b = 1", "has a key of more than 100 parts"),
        ("# a = " + "[" * 100_000, "is not TOML"),
        (f"# requires-python = '>=3{'0' * 5000}'", "not a version specifier"),
    ],
)
def test_a_strangers_header_costs_no_time_and_is_refused_in_words(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        header_in(f"# /// script\n{line}\n# ///\n", "train.py")


def test_a_version_of_thousands_of_digits_is_no_error_of_ours(tmp_path: Path) -> None:
    found = read(tmp_path, [f"a==1{'0' * 5000}"], "import a\n")
    assert found is not None and found.installs


def test_versions_and_tables_with_many_dots_are_read() -> None:
    many = ", ".join(f"'a{n}==1.2.3.4'" for n in range(300))
    found = header_in(f"# /// script\n# dependencies = [{many}]\n# ///\n", "train.py")
    assert found is not None and len(found.lines) == 300
