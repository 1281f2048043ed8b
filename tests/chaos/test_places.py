"""The named places of chaos exist, and a run, a restart and a takeover call all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tools.chaos.faults import FAULTS
from tools.chaos.hooked import HookFolder
from tools.chaos.paired import paired
from tools.chaos.pairs import Pair, Strike, pairs
from tools.chaos.places import PLACES
from tools.chaos.site import Site

HOOK = Path(__file__).parents[2] / "tools" / "chaos" / "hook"
# The hook knows a keeper by the words of its command line; this program has the same words.
FAULTY = """
import os, sys, threading
from workbench.keeper.run.outputs import clear
run = sys.argv[2]
try:
    clear(None, None, all_but_checkpoints=False)
except Exception:
    pass
def tried(action):
    try:
        action()
    except (OSError, RuntimeError) as error:
        return type(error).__name__ + f" {getattr(error, 'errno', '')}"
    return "none"
print(tried(lambda: open(f"{run}/a", "w").close()))
print(tried(lambda: os.mkdir(f"{run}-beside")))
print(tried(lambda: open(f"{run}/there").close()))
print(tried(lambda: threading.Thread(target=int).start()))
print(tried(lambda: os.close(os.open("/dev/null", os.O_RDONLY))))
"""


def strikes(pair: Pair) -> tuple[Strike, Strike]:
    return pair.first, pair.second


@pytest.mark.parametrize("name", PLACES)
def test_the_function_of_a_place_exists(name: str) -> None:
    """A failure names the place: give `tools/chaos/places.py` the function's new name."""
    module, _, qualname = PLACES[name].target.partition(":")
    owner: object = import_module(module)
    for part in qualname.split("."):
        owner = getattr(owner, part)
    assert callable(owner)


def test_a_seed_walks_through_every_pair_at_places_that_are_near() -> None:
    for seed in range(20):
        made = pairs(seed)
        assert len({frozenset(pair.faults) for pair in made}) == len(made)
        assert {name for pair in made for name in pair.faults} == set(FAULTS)
        order = list(PLACES)
        for pair in made:
            assert Pair.parse(str(pair), pair.number) == pair
            assert order.index(pair.first.place) <= order.index(pair.second.place)
    made = [pair for seed in range(9) for pair in pairs(seed)]
    struck = {strike.place for pair in made for strike in strikes(pair)}
    assert struck == set(PLACES)


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        ("readonly", ["OSError 30", "none", "none", "none", "none"]),
        ("full", ["OSError 28", "none", "none", "none", "none"]),
        ("stale", ["OSError 116", "none", "OSError 116", "none", "none"]),
        ("thread", ["none", "none", "none", "RuntimeError ", "none"]),
        ("descriptor", ["OSError 24", "none", "OSError 24", "none", "OSError 24"]),
    ],
)
def test_a_fault_within_the_keeper_is_the_one_that_it_names(
    fault: str, raised: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "there").touch()
    hook = HookFolder(tmp_path / "hook")
    hook.arm(Pair.parse(f"{fault}@clear,late@answer", 1), run, 6.0)
    words = [sys.executable, "-c", FAULTY, "workbench.keeper.keeper", str(run)]
    env = {**os.environ, "PYTHONPATH": str(HOOK), "WORKBENCH_CHAOS": str(hook.root)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == raised, done.stderr
    assert hook.noted("calls") == {"clear"}
    assert hook.noted("fired") == hook.noted("done") == {"1-a"}


def test_no_other_process_has_the_hook(tmp_path: Path) -> None:
    hook = HookFolder(tmp_path / "hook")
    env = {**os.environ, "PYTHONPATH": str(HOOK), "WORKBENCH_CHAOS": str(hook.root)}
    code = "import sys; print(any('_Finder' in repr(finder) for finder in sys.meta_path))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["False"]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_a_restart_and_a_takeover_call_every_place(tmp_path: Path) -> None:
    hook = HookFolder(tmp_path / "hook")
    site = Site(tmp_path / "pairs", count=2, lease_s=8.0)
    with hook.in_environment():
        # A fault that no run notices: the line is cut, and the line is cut again.
        plain = paired(site, hook, Pair.parse("cut-line@logs,cut-line@logs:3", 1))
        called = hook.noted("calls")
        assert {name for name, place in PLACES.items() if not place.needs} <= called
        more = paired(site, hook, Pair.parse("cut-line@takeover,cut-line@restart", 2))
        called = hook.noted("calls")
        assert site.give_up() == []
    assert hook.noted("missing") == set()
    assert called == set(PLACES)
    assert (plain.state, plain.is_bad, plain.fired) == ("succeeded", False, 2), repr(plain)
    assert (more.state, more.is_bad) == ("succeeded", False), repr(more)
