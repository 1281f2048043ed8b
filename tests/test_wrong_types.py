"""A value of any type, given to any public call, is refused in words that say what to give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import workbench
from tests.support.scripts import script_job
from tests.support.writtenrun import write_run
from workbench import (
    Benchmark,
    Cluster,
    FineTune,
    Function,
    KubernetesPods,
    LocalPods,
    PodSpec,
    Run,
    SlurmPods,
    SSHPods,
    compare,
    gpus_for,
    history,
    plan,
    preview,
    tensorboard,
)
from workbench.errors import ConfigError, WorkbenchError
from workbench.results import RunResult

WRONG: dict[str, object] = {
    "number": 3,
    "huge number": 10**5000,
    "none": None,
    "list": [],
    "numbers": [3, 4],
    "mapping": {"a": 1},
    "object": object(),
    "bytes": b"x",
    "function": print,
    "long text": "a" * 5000,
    "control": "a\0b",
    "absent home": "~nobody-of-this-name/x",
}
CALLS: dict[str, Callable[[object], object]] = {
    "Run.load": Run.load,  # type: ignore[dict-item]
    "RunResult.load": RunResult.load,  # type: ignore[dict-item]
    "Cluster": lambda value: Cluster(value),  # type: ignore[arg-type]
    "Cluster.attach": Cluster.attach,  # type: ignore[dict-item]
    "Cluster(path)": lambda value: Cluster.attach(value),  # type: ignore[arg-type]
    "history": history,  # type: ignore[dict-item]
    "history(sort)": lambda value: history(sort=value),  # type: ignore[arg-type]
    "plan": plan,  # type: ignore[dict-item]
    "gpus_for": gpus_for,  # type: ignore[dict-item]
    "preview": preview,  # type: ignore[dict-item]
    "compare": compare,  # type: ignore[call-overload, dict-item]
    "tensorboard": tensorboard,  # type: ignore[dict-item]
    "SSHPods(key)": lambda value: SSHPods(hosts=["a"], key=value),
    "PodSpec(cpus)": lambda value: PodSpec(cpus=value),
    "FineTune(model)": lambda value: FineTune(model=value),
    "Cluster(path=)": lambda value: Cluster(LocalPods(), path=value),
    "Benchmark(path)": lambda value: Benchmark([script_job(path="a.py")], pods=[1], path=value),
    "history(state)": lambda value: history(state=value),
    "history(within)": lambda value: history(within=value),
}
FINE = {
    ("SSHPods(key)", "long text"),
    ("PodSpec(cpus)", "none"),
    ("PodSpec(cpus)", "number"),
    ("FineTune(model)", "long text"),
    ("FineTune(model)", "absent home"),
    ("Cluster(path=)", "none"),
    ("Cluster(path=)", "list"),
    ("Cluster(path=)", "long text"),
    ("Benchmark(path)", "long text"),
    ("history(state)", "list"),
    ("history(within)", "none"),
    ("history(within)", "list"),
}
"""Calls with a value that is no fault, or that only the submission can judge."""


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_value_is_refused_in_words(
    call: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if (call, value) in FINE:
        CALLS[call](WRONG[value])
        return
    with pytest.raises(WorkbenchError) as caught:
        CALLS[call](WRONG[value])
    assert len(str(caught.value)) < 12_000


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PodSpec(2), r"write PodSpec\(cpus=2\)"),
        (lambda: Cluster("local"), r"Write Cluster\(LocalPods\(\)\)"),  # type: ignore[arg-type]
        (lambda: FineTune(technique="lora"), "adapters are peft='lora'"),
        (lambda: FineTune(technique="qlora"), "adapters are peft='qlora'"),
        (lambda: plan(LocalPods()), "plan takes a FineTune"),  # type: ignore[arg-type]
    ],
)
def test_a_call_as_in_other_libraries_is_refused_with_the_call_that_works(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize("value", WRONG)
def test_a_function_with_an_argument_of_any_kind_is_shown(value: str) -> None:
    shown = repr(Function(print, (WRONG[value],), {"a": WRONG[value]}))
    assert shown.startswith("Function(print, args=") and len(shown) < 600


def test_every_public_call_is_tried_or_is_no_call() -> None:
    tried = {name.partition("(")[0].partition(".")[0] for name in CALLS}
    others = {"Script", "Function", "Benchmark", "Volume", "CMLPods", "KubernetesPods"}
    others |= {"SlurmPods", "LocalPods", "log"}
    assert set(workbench.__all__) <= tried | others


@pytest.mark.parametrize("place", [LocalPods, PodSpec, KubernetesPods, SlurmPods])
@pytest.mark.parametrize(
    "value",
    [4, "name", ["a", "b"], {"a": 1}, object()],
    ids=["number", "text", "list", "mapping", "object"],
)
def test_a_value_without_a_name_is_refused_with_a_call_that_works(
    place: type, value: object
) -> None:
    with pytest.raises(ConfigError) as refusal:
        place(value)
    _, _, call = str(refusal.value).partition("write ")
    if call:
        names = {"Cluster": Cluster, place.__name__: place}
        eval(call.replace("(…)", "()"), names)
    else:
        assert "by name alone: one of " in str(refusal.value)


def test_the_number_of_pods_belongs_to_the_cluster() -> None:
    with pytest.raises(ConfigError, match=r"write Cluster\(LocalPods\(…\), count=4\)"):
        LocalPods(4)


SKIPPED = {"start", "close", "show", "tensorboard", "submit_prepared"}
"""Verbs that start or end something, and one for this package alone."""
LISTS = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def verbs(owner: object) -> Iterator[tuple[str, list[inspect.Parameter]]]:
    for name in dir(type(owner)):
        verb = inspect.getattr_static(type(owner), name)
        if name.startswith("_") or name in SKIPPED or isinstance(verb, property):
            continue
        if callable(getattr(type(owner), name)):
            yield name, [*inspect.signature(getattr(owner, name)).parameters.values()]


@pytest.mark.parametrize("which", ["run", "cluster", "benchmark"])
def test_no_verb_answers_a_wrong_value_with_an_error_of_python(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    written = write_run(tmp_path / "r")
    written.end()
    cluster = Cluster(LocalPods(), path=tmp_path / "c")
    monkeypatch.setattr(cluster, "_check_ready", lambda: None)
    made: dict[str, object] = {
        "run": Run.load(written.paths.root),
        "cluster": cluster,
        "benchmark": Benchmark([script_job(path="a.py")], pods=[1], path=tmp_path / "b"),
    }
    owner = made[which]
    found = []
    for name, parameters in verbs(owner):
        parameters = [each for each in parameters if each.kind not in LISTS]
        needed = {each.name: "a" for each in parameters if each.default is each.empty}
        for each in parameters:
            for kind, value in WRONG.items():
                if kind == "huge number":  # Python itself writes no text of the number
                    continue
                try:
                    getattr(owner, name)(**{**needed, each.name: value})
                except WorkbenchError:
                    pass
                except Exception as error:
                    found.append(f"{name}({each.name}={kind}): {error!r:.200}")
    assert not found, "\n".join(found)
