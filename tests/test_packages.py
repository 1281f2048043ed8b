"""Packages that a cluster asks for, from wheels made here: no index and no network."""

from __future__ import annotations

import os
import socket
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from tests.support.wheels import wheel
from workbench import Cluster, FineTune, LocalPods, PodSpec
from workbench.errors import ConfigError, PodError, PodTimeout

pytestmark = pytest.mark.slow
TRACKER = Path(__file__).parent / "samples" / "trackers" / "mlflow.py"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    wheel(folder, "wb_above", "1.5", needs=["wb_below>=2", "numpy"])
    wheel(folder, "wb_below", "2.0")
    wheel(folder, "wb_below", "1.0")
    wheel(folder, "wb_greedy", "1.0", needs=["numpy==0.0.1"])
    wheel(folder, "numpy", "0.0.1")
    return folder


def offline(wheels: Path, *pip: str) -> PodSpec:
    """Pods whose pip looks into a folder alone, whatever this machine's settings are."""
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    return PodSpec(cpus=1, pip=pip, env=env)


def look() -> dict[str, object]:
    import sys

    import numpy
    import wb_above  # type: ignore[import-not-found]
    import wb_below  # type: ignore[import-not-found]

    numbers = (wb_above.NUMBER, wb_below.NUMBER, numpy.__version__)
    return {"numbers": numbers, "from": wb_above.__file__, "last": sys.path[-1]}


def test_what_a_pod_lacks_lies_once_behind_its_own_for_functions_and_the_trainer(
    wheels: Path, tmp_path: Path
) -> None:
    direct = wheel(tmp_path, "wb_direct", "3.0")
    tracker = wheel(tmp_path, "mlflow", "3.18.0", text=TRACKER.read_text())
    data = {"kind": "wikisql-mini", "train_rows": 20, "eval_rows": 4}
    job = FineTune(
        technique="single",
        dataset=data,
        max_steps=1,
        profile_step=0,
        predict_rows=0,
        report_to=["mlflow"],
    )
    spec = offline(wheels, "wb_above", str(direct), str(tracker))
    with Cluster(LocalPods(), spec, count=2, path=tmp_path / "cluster") as cluster:
        store = cluster.path / "pods" / "store"
        (folder,) = store.glob("packages-*/lib/python3*/site-packages")
        seen = cluster.run(look, progress=False)
        assert sorted(path.name for path in folder.glob("*.py")) == [
            "mlflow.py",
            "wb_above.py",
            "wb_below.py",
            "wb_direct.py",
        ]
        assert not (folder / "numpy").exists()
        cluster.submit(job).wait(300, progress=False).raise_for_status()
    for each in seen:
        assert isinstance(each, dict)
        assert each["numbers"] == ("1.5", "2.0", version("numpy"))
        assert each["last"] == str(folder)
        assert each["from"] == str(folder / "wb_above.py")


@pytest.mark.long
def test_what_cannot_be_installed_is_told_before_any_rank_starts(
    wheels: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        PodError, match=r"(?s)could not install wb_nowhere on pod-\d:.*No matching distribution"
    ):
        Cluster(LocalPods(), offline(wheels, "wb_nowhere"), path=tmp_path / "a", warm=False).start()
    own = version("numpy").replace(".", r"\.")
    with pytest.raises(
        PodError, match=rf"wb_greedy wants numpy 0\.0\.1, and the pod has {own} of its own"
    ):
        Cluster(LocalPods(), offline(wheels, "wb_greedy"), path=tmp_path / "b", warm=False).start()
    assert version("numpy") != "0.0.1"


@pytest.mark.long
def test_a_pip_that_takes_too_long_is_told_with_what_to_raise(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the request, and never answers
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        env = {
            "PIP_INDEX_URL": index,
            "PIP_DEFAULT_TIMEOUT": "300",
            "PIP_CONFIG_FILE": os.devnull,
            "no_proxy": "*",
        }
        cluster = Cluster(
            LocalPods(),
            PodSpec(cpus=1, pip=["wb-above"], env=env),
            path=tmp_path / "c",
            warm=False,
            start_timeout_s=10,
        )
        with pytest.raises(
            PodTimeout,
            match=sentence(
                "pip did not finish in {} s on {} ({}); raise start_timeout_s",
                10,
                "pod-0",
                "wb-above",
            ),
        ):
            cluster.start()


@pytest.mark.parametrize(
    "pip", [["--index-url=http://x"], [" -U"], ["evaluate "], [""], ["a\nb"], "evaluate", [3]]
)
def test_what_is_no_requirement_is_refused(pip: object) -> None:
    with pytest.raises(ConfigError, match="pip"):
        PodSpec(pip=pip)
