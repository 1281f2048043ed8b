"""A function of the notebook as it travels: refusals, its run in a rank, and what is read of it."""

from __future__ import annotations

import atexit
import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from tests.support.scripts import script_job
from tests.support.sentences import says, sentence
from workbench import FineTune, Function, Script
from workbench.agent.call import leave, leave_raised
from workbench.base.errors import ConfigError, RunError
from workbench.client.returned import raised_by, returned
from workbench.finetune.submit.metric_functions import with_metric_files
from workbench.jobs.script_folder import zip_script
from workbench.pods.pod import Pod
from workbench.rundir.make import function
from workbench.rundir.make.function import as_script, pickled_function
from workbench.rundir.paths import RunPaths

REPOSITORY = Path(__file__).resolve().parents[2]
LOCK = threading.Lock()
OPENED = Path(__file__).open(encoding="utf-8")  # noqa: SIM115
atexit.register(OPENED.close)
SCALE = 3


def helper(value: int) -> int:
    return value * SCALE


def train(rows: int, *, rate: float) -> dict[str, object]:
    return {
        "rank": int(os.environ["RANK"]),
        "rows": helper(rows),
        "rate": rate,
        "weights": numpy.arange(3.0),
    }


def uses_a_lock() -> None:
    with LOCK:
        pass


def uses_a_file() -> str:
    return OPENED.read()


def through_another() -> None:
    uses_a_lock()


def made(job: Function, folder: Path) -> Script:
    script = as_script(job, folder)
    assert isinstance(script, Script)
    return script


def on_rank(job: Function, folder: Path, rank: int = 0) -> subprocess.CompletedProcess[str]:
    """Unpack the function where its files would come back to, and run it as a rank does."""
    script = Path(made(job, folder / "functions").path)
    archive, outputs = folder / "script.zip", folder / "outputs"
    archive.write_bytes(zip_script(script))
    shutil.unpack_archive(archive, outputs)
    # Neither this package nor the test's own module is there.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "RANK": str(rank)
    }
    command = [sys.executable, "-u", script.name]
    return subprocess.run(
        command, cwd=outputs, env=env, capture_output=True, text=True, timeout=300
    )


def test_a_function_travels_with_what_it_uses_and_its_values_come_back(tmp_path: Path) -> None:
    for rank in range(2):
        ended = on_rank(Function(train, (7,), {"rate": 0.5}), tmp_path, rank)
        assert ended.returncode == 0, ended.stderr
    first, second = returned(RunPaths(tmp_path), 2)
    assert isinstance(first, dict) and isinstance(second, dict)
    assert (first["rank"], first["rows"], first["rate"], second["rank"]) == (0, 21, 0.5, 1)
    assert numpy.array_equal(first["weights"], numpy.arange(3.0))
    script = made(Function(train, (7,), {"rate": 0.5}), tmp_path / "functions")
    assert script.views.word == "traincall"
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "functions").rglob("*")}
    assert modes == {0}


def in_a_file() -> int:
    return 7


def test_a_function_of_a_file_keeps_the_name_of_its_file(tmp_path: Path) -> None:
    script = Path(as_script(Function(in_a_file), tmp_path).path)
    assert list(json.loads((script.parent / "function.json").read_text())["sources"]) == [__file__]


def test_the_lines_of_the_function_alone_travel(tmp_path: Path) -> None:
    """Its cell, or its file, may hold a token in another line."""
    script = made(Function(train, (1,), {"rate": 0.5}), tmp_path)
    sources = json.loads(Path(script.path).with_name("function.json").read_text())["sources"]
    (lines,) = (source.splitlines() for source in sources.values())
    whole = Path(__file__).read_text().splitlines()
    kept = [line for line in lines if line]
    assert all(line in ("", whole[number]) for number, line in enumerate(lines)), (
        "numbered as in the file"
    )
    assert kept[0] == "def helper(value: int) -> int:"
    assert kept[2].startswith("def train(rows: int")
    assert kept == [*inspect.getsource(helper).splitlines(), *inspect.getsource(train).splitlines()]


def test_a_raise_shows_the_cells_own_line(tmp_path: Path) -> None:
    """In a real IPython, whose cells are in no file."""
    cells = f"""
        from IPython.core.interactiveshell import InteractiveShell
        from pathlib import Path
        from workbench import Function, Script
        from workbench.rundir.make.function import as_script
        shell = InteractiveShell.instance()
        shell.run_cell("LIMIT = 3", store_history=True)
        shell.run_cell("def inner(x):\\n    return 1 / (x - LIMIT)  # the line", store_history=True)
        shell.run_cell("def train(x):\\n    y = x + 1\\n    return inner(y)", store_history=True)
        print(as_script(Function(shell.user_ns["train"], (2,)), Path({str(tmp_path)!r})).path)
    """
    command = [sys.executable, "-c", textwrap.dedent(cells)]
    env = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    path = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=True
    ).stdout.split()[-1]
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<cell 3>", line 3, in train',
        "    return inner(y)",
        "           ^^^^^^^^",
        '  File "<cell 2>", line 2, in inner',
        "    return 1 / (x - LIMIT)  # the line",
        "           ~~^~~~~~~~~~~~~",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize(
    ("job", "named"),
    [
        (Function(uses_a_lock), "the variable 'LOCK' in uses_a_lock, of type lock, cannot travel"),
        (
            Function(through_another),
            "the variable 'LOCK' in uses_a_lock, of type lock, cannot travel",
        ),
        (
            Function(uses_a_file),
            "the variable 'OPENED' in uses_a_file, of type TextIOWrapper, cannot travel",
        ),
        (Function(train, [(x for x in "ab")]), "argument 1, of type generator, cannot travel"),
        (Function(train, (1,), {"rate": LOCK}), "argument 'rate', of type lock, cannot travel"),
        (Function(helper, (bytes(151 << 20),)), "are 151 MiB as a pickle; the limit is 150 MiB"),
        (Function(7), "7 is not a function"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_pickled_is_refused_by_name(
    job: Function, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        as_script(job, tmp_path)
    assert named in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_the_folder_is_named_by_function_and_content_and_has_what_a_pod_may_lack(
    tmp_path: Path,
) -> None:
    def unnamed() -> None:
        pass

    unnamed.__name__ = "<>"
    folder = Path(made(Function(helper, (1,)), tmp_path).path).parent
    name, _, digest = folder.name.partition("-")
    assert (name, len(digest)) == ("helper", 16)
    assert (folder / "cloudpickle" / "cloudpickle.py").is_file()
    script = Path(made(Function(unnamed), tmp_path).path)
    assert script.name == "function-call.py"
    assert script.parent != folder


def test_a_pickle_may_be_as_large_as_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Function(helper, (1,))
    size = len(pickled_function(job)[0])
    monkeypatch.setattr(function, "_LARGEST", size)
    assert made(job, tmp_path)
    monkeypatch.setattr(function, "_LARGEST", size - 1)
    with pytest.raises(ConfigError, match="as a pickle; the limit is"):
        as_script(job, tmp_path)


def test_modules_of_the_user_travel_and_those_of_pods_do_not() -> None:
    assert function._is_own(sys.modules[__name__])
    for other in (None, sys.modules["__main__"], sys, json, numpy, pytest):
        assert not function._is_own(other), other


@pytest.mark.parametrize("requirements", [None, [], ["rich==15"], "requirements.txt"])
def test_a_function_has_the_requirements_of_a_script(
    requirements: list[str] | str | None, tmp_path: Path
) -> None:
    job = Function(helper, (1,), requirements=requirements)
    assert made(job, tmp_path).requirements == requirements


class Named(Exception):
    def __init__(self, *, column: str) -> None:
        super().__init__(column)


class Counted(Exception):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __str__(self) -> str:
        return f"{self.rows} rows"


class Refusing(ValueError):
    """No pickle of it can be made or read."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(first, second)
        self.lock = LOCK

    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


class Acting(ValueError):
    """Its making has an effect, which a pod could choose."""

    made = 0

    def __new__(cls, *args: object) -> Acting:
        cls.made += 1
        return super().__new__(cls, *args)

    def __init__(self, *args: object) -> None:
        type(self).made += 1
        super().__init__(*args)


def raise_a_chain() -> None:
    try:
        try:
            raise OSError(2, "No such file or directory", "rows.csv")
        except OSError as error:
            raise Counted(3) from error
    except Counted:
        late = ValueError("late")
        late.add_note("in row 7")
        late.add_note("of rows.csv")
        raise late  # noqa: B904  # with a context, and no cause


def raise_a_group() -> None:
    inner = ExceptionGroup("inner", [KeyError("a"), Named(column="b")])
    raise ExceptionGroup("both", [ValueError("c", 4), inner])


def raise_of_an_unknown_type() -> None:
    class Local(LookupError):
        pass

    raise Local("x", 1)


def raised_on_a_rank(raised: BaseException, folder: Path) -> BaseException | None:
    (folder / "outputs").mkdir()
    try:
        raise raised
    except BaseException as error:
        leave_raised(error, folder / "outputs" / "returned", 1)
    return raised_by(RunPaths(folder), 1)


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("no such column"),
        ValueError("no such column", 3, None),
        ValueError(),
        KeyError("no such column"),
        KeyError(("a", 1)),
        Named(column="no such column"),
        Counted(3),
        json.JSONDecodeError("no such column", "{", 1),
        subprocess.CalledProcessError(3, ["ls", "-l"], b"", "why"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        FileNotFoundError(2, "No such file or directory", "rows.csv"),
        StopIteration(3),
        Refusing("a", "b"),
        Refusing(LOCK, "b"),
        OSError("plain"),
    ],
    ids=lambda raised: type(raised).__name__,
)
def test_the_cause_is_of_the_type_that_the_function_raised(
    tmp_path: Path, raised: Exception
) -> None:
    cause = raised_on_a_rank(raised, tmp_path)
    assert isinstance(cause, type(raised))
    assert (type(cause).__name__, str(cause)) == (type(raised).__name__, str(raised))
    for name, value in vars(raised).items():
        if isinstance(value, int | str | list):
            assert getattr(cause, name) == value
    if isinstance(raised, FileNotFoundError):
        assert (cause.errno, cause.filename) == (2, "rows.csv")  # type: ignore[attr-defined]


def test_no_code_of_a_class_runs_for_what_a_pod_wrote(tmp_path: Path) -> None:
    raised = Acting("no such column")
    before = Acting.made
    cause = raised_on_a_rank(raised, tmp_path)
    assert (type(cause), str(cause), Acting.made) == (Acting, "no such column", before)


def test_a_cause_has_its_notes_and_its_own_causes(tmp_path: Path) -> None:
    assert on_rank(Function(raise_a_chain), tmp_path).returncode == 1
    late = raised_by(RunPaths(tmp_path), 0)
    assert repr(late) == "ValueError('late')"
    assert late is not None and late.__notes__ == ["in row 7", "of rows.csv"]
    counted = late.__context__
    assert isinstance(counted, LookupError | Exception) and str(counted) == "3 rows"
    assert late.__cause__ is None and counted is not None
    assert repr(counted.__cause__) == "FileNotFoundError(2, 'No such file or directory')"


def test_a_group_has_its_exceptions(tmp_path: Path) -> None:
    assert on_rank(Function(raise_a_group), tmp_path).returncode == 1
    both = raised_by(RunPaths(tmp_path), 0)
    assert isinstance(both, ExceptionGroup) and both.message == "both"
    first, inner = both.exceptions
    assert repr(first) == "ValueError('c', 4)"
    assert isinstance(inner, ExceptionGroup)
    assert [str(each) for each in inner.exceptions] == ["'a'", "b"]
    assert both.subgroup(KeyError) is not None


def test_a_type_that_is_not_known_here_has_the_first_base_that_is(tmp_path: Path) -> None:
    assert on_rank(Function(raise_of_an_unknown_type), tmp_path).returncode == 1
    cause = raised_by(RunPaths(tmp_path), 0)
    assert isinstance(cause, LookupError)
    assert (type(cause).__name__, str(cause)) == ("Local", "('x', 1)")


@pytest.mark.parametrize(
    "written", ["", "[]", "{}", '{"types": [["os", "system"]], "text": "x", "args": []}']
)
def test_what_no_rank_of_ours_wrote_is_no_cause(tmp_path: Path, written: str) -> None:
    (tmp_path / "outputs" / "returned").mkdir(parents=True)
    (tmp_path / "outputs" / "returned" / "rank-0-raised.json").write_text(written)
    assert raised_by(RunPaths(tmp_path), 0) is None
    assert raised_by(RunPaths(tmp_path), 1) is None
    assert raised_by(RunPaths(tmp_path / "none"), 0) is None


def test_what_is_no_plain_data_fails_on_the_rank_with_its_type(tmp_path: Path) -> None:
    ended = on_rank(Function(Path, ("a",)), tmp_path)
    assert ended.returncode == 1
    assert (
        "Path returned what cannot come back: the value "
        "is of type pathlib.PosixPath; return numbers" in ended.stderr
    )
    with pytest.raises(RunError, match=r"rank 0 of .* returned nothing"):
        returned(RunPaths(tmp_path), 1)


def test_pods_of_another_python_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    mine = "{}.{}".format(*sys.version_info)
    same, unknown = Pod(name="pod-0", versions={"python": f"{mine}.99+"}), Pod(name="pod-1")
    assert as_script(Function(helper, (1,)), tmp_path / "made", [same, unknown]) == made(
        Function(helper, (1,)), tmp_path / "made"
    )
    other = Pod(name="pod-2", versions={"python": f"{mine}9.1"})
    refused = (
        rf"helper would be pickled by Python {mine}, and Python {mine}9\.1 of pod-2 "
        "cannot load the pickle: choose pods"
    )
    with pytest.raises(ConfigError, match=refused):
        as_script(Function(helper, (1,)), tmp_path / "refused", [same, unknown, other])
    assert not (tmp_path / "refused").exists()
    assert as_script(script_job("train.py"), tmp_path, [other]) == script_job("train.py")
    with pytest.raises(ConfigError, match=sentence("would be pickled by Python", "agreed")):
        as_script(FineTune(metrics=["rouge", agreed]), tmp_path, [other])


def test_a_metric_is_a_file_that_holds_its_function_and_cannot_shadow_a_module(
    tmp_path: Path,
) -> None:
    def random(predictions: list[str], references: list[str]) -> int:
        return helper(len(predictions) + len(references))

    job = with_metric_files(FineTune(metrics=["rouge", random, "m.py:f"]), tmp_path)
    assert isinstance(job, FineTune)
    assert job.metrics == ("rouge", f"{tmp_path}/1-random-metric.py:random", "m.py:f")
    assert with_metric_files(job, tmp_path) is job
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 200_000 and file.stat().st_mode & 0o077 == 0
    # As on a pod: without cloudpickle, which the file brings, and without the module of this test.
    code = f"""
        import sys
        sys.path[:] = [path for path in sys.path if "site-packages" not in path]
        sys.path.append({str(REPOSITORY)!r})
        scope = {{}}
        exec(compile(open({str(file)!r}).read(), "metric", "exec"), scope)
        assert scope["random"](["a"], ["b"]) == 6
        import random
        assert "site-packages" not in sys.modules["cloudpickle"].__file__
    """
    subprocess.run([sys.executable, "-I", "-c", textwrap.dedent(code)], timeout=300, check=True)
    with pytest.raises(
        ConfigError, match="the variable 'LOCK' in locked, of type lock, cannot travel"
    ):
        with_metric_files(FineTune(metrics=[locked]), tmp_path)


def agreed(predictions: list[str], references: list[str]) -> int:
    return sum(map(str.__eq__, predictions, references))


def locked(predictions: list[str], references: list[str]) -> int:
    with LOCK:
        return len(predictions) + len(references)


def test_another_python_is_refused_before_the_pickle_is_read(tmp_path: Path) -> None:
    script = made(Function(helper, (1,)), tmp_path)
    facts = Path(script.path).with_name("function.json")
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "python": "3.9"}))
    facts.with_name("function.pickle").write_bytes(b"not read")
    ended = subprocess.run(
        [sys.executable, script.path], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1
    assert says(ended.stderr, "was pickled by Python", "helper", "3.9")
    assert "choose pods with the notebook's Python" in ended.stderr


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, "two", 2.5, True, float("inf")],
        {"a": (1, [2]), 3: {"array": "0"}},
        {"deep": {"er": [numpy.ones((2, 3), dtype="int8")]}},
    ],
)
def test_plain_data_comes_back_as_it_was(value: object, tmp_path: Path) -> None:
    (folder := tmp_path / "outputs" / "pod-1").mkdir(parents=True)
    leave(value, folder / "returned", 0)
    (got,) = returned(RunPaths(tmp_path), 1)
    assert repr(got) == repr(value)


def test_tensors_come_back_as_arrays(tmp_path: Path) -> None:
    import torch

    (tmp_path / "outputs").mkdir()
    weights = torch.linspace(0, 1, 6).reshape(2, 3)
    value = {
        "t": weights.T,
        "half": weights.bfloat16().requires_grad_(),
        "loss": weights.sum(),
        "n": numpy.float32(2),
    }
    leave(value, tmp_path / "outputs" / "returned", 0)
    (got,) = returned(RunPaths(tmp_path), 1)
    assert isinstance(got, dict)
    assert numpy.array_equal(got["t"], weights.T.numpy())
    assert numpy.array_equal(got["half"], weights.bfloat16().float().numpy())
    assert (got["loss"], got["n"]) == (3.0, 2.0)


@pytest.mark.parametrize(
    "text",
    [
        '{"array": "7"}',
        '{"array": "../x"}',
        '{"list": 3}',
        '{"dict": [[1]]}',
        "{}",
        "[",
        '{"dict":[[{},1]]}',
    ],
)
def test_what_no_rank_writes_is_refused(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "returned"
    folder.mkdir(parents=True)
    (folder / "rank-0.json").write_text(text)
    save_file({"0": numpy.ones(1)}, folder / "rank-0.safetensors")
    with pytest.raises(RunError, match=sentence("cannot be read")):
        returned(RunPaths(tmp_path), 1)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (folder := tmp_path / "outputs" / "returned").mkdir(parents=True)
    (tmp_path / "mine").write_text('"mine"')
    (folder / "rank-0.json").symlink_to(tmp_path / "mine")
    with pytest.raises(RunError, match=r"cannot be read|returned nothing"):
        returned(RunPaths(tmp_path), 1)
