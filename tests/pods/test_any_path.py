"""For every path and name the same run has the same record: on local pods, and over a real sshd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.sshhosts import HostsPlace
from tests.support.sentences import sentence
from workbench import Cluster, LocalPods, PodSpec, Run, Script
from workbench.base.errors import ConfigError
from workbench.pods.place import Place
from workbench.pods.pod import LaunchContext

pytestmark = pytest.mark.slow

PROGRAM = """\
import os, sys
import workbench

print(ascii(sys.argv[1:]), os.environ["RANK"])
workbench.log(step=1, loss=0.5)
with open("made.txt", "w") as file:
    file.write("made")
"""
NAMES = {
    "plain": "plain",
    "blanks": "  my cluster\t1 ",
    "quotes": 'it\'s a "name" `x` \\ ',
    "dollar": "$HOME ${HOME} $(id) !! %h %%",
    "dash": "-rf --path=x",
    "marks": "#a~b*c?d[e]f{g}|h;i&j<k>l",
    "line break": "a\nb",
    "unicode": "日本語 é e\u0301 🚀",
    "right to left": "\u202eabc\u202c \u200f\u05d0\u05d1",
    "long": "n" * 200,
}
REFUSED = ("blanks", "quotes", "line break", "right to left")
"""The daemon of a local pod has the path in its configuration."""
PATHS = {
    "marks of a shell": "".join(NAMES[kind] for kind in ("dash", "dollar", "marks", "unicode")),
    "long": NAMES["long"],
}
REFUSED_PATHS = {"blanks, quotes and lines": "".join(NAMES[kind] for kind in REFUSED)}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsPlace]:
    with HostsPlace(tmp_path_factory.mktemp("there")) as made:
        yield made


def records(place: Place, folder: Path, names: Sequence[str]) -> list[dict[str, object]]:
    """Run a script of each name on a cluster in this folder; return what a person finds of each."""
    with Cluster(place, PodSpec(cpus=1), count=2, path=folder / "cluster", warm=False) as cluster:
        return [record(cluster, folder / "code", name) for name in names]


def record(cluster: Cluster, folder: Path, name: str) -> dict[str, object]:
    code = folder / name[:100]
    code.mkdir(parents=True)
    script = code / f"{name}.py"
    script.write_text(PROGRAM)
    run = cluster.submit(Script(script, args=[name], outputs=["made.txt"]))
    run.name = name[:80]  # the longest
    result = run.wait(300, progress=False)
    assert Run.load(run.paths.root).name == name[:80].strip()
    shown = ascii([name])
    return {
        "state": result.state,
        "message": result.message,
        "logs": [run.logs(rank).replace(shown, "[…]") for rank in (0, 1)],
        "events": [(event.kind, event.number("loss")) for event in run.events()],
        "files": {file.name: file.read_text() for file in run.paths.outputs.rglob("*.txt")},
    }


EXPECTED = {
    "state": "succeeded",
    "message": "all ranks finished; outputs/ has 1 file (4 bytes)",
    "logs": ["[…] 0", "[…] 1"],
    "events": [("step", 0.5)],
    "files": {"made.txt": "made"},
}


def names_for(path: str) -> list[str]:
    """All names for one of the paths, and one for the others."""
    return list(NAMES.values()) if path == "marks of a shell" else [NAMES["quotes"]]


@pytest.mark.long
@pytest.mark.parametrize("path", [*PATHS, *REFUSED_PATHS])
def test_a_run_over_a_real_sshd_has_the_same_record(
    hosts: HostsPlace, tmp_path: Path, path: str
) -> None:
    names = names_for(path)
    folder = tmp_path / {**PATHS, **REFUSED_PATHS}[path]
    for name, found in zip(names, records(hosts.backend(), folder, names), strict=True):
        assert found == EXPECTED, name


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
def test_a_run_on_local_pods_has_the_same_record(tmp_path: Path, path: str) -> None:
    names = names_for(path)
    for name, found in zip(names, records(LocalPods(), tmp_path / PATHS[path], names), strict=True):
        assert found == EXPECTED, name


@pytest.mark.parametrize("kind", REFUSED)
def test_a_path_that_sshd_cannot_have_is_refused_before_pods_start(
    context: LaunchContext, kind: str
) -> None:
    folder = context.directory / NAMES[kind]
    with pytest.raises(ConfigError, match=sentence("backslashes or letters that do not print")):
        LocalPods().launch(PodSpec(), 1, replace(context, directory=folder))
    assert not folder.exists()
