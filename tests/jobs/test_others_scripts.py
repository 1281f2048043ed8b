"""Scripts and tests of others run unchanged on pods: DeepSpeed's pipeline, torch's own tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.poll import until
from workbench import Cluster, Run, Script

pytestmark = [pytest.mark.slow, pytest.mark.long]
SCRIPTS = Path(__file__).parents[1] / "scripts"
REPOSITORY = """
import os
from .sizes import SIZE

print("rank", os.environ["RANK"], "of size", SIZE)
"""


def trained(cluster: Cluster, script: Path, *args: str) -> Run:
    run = cluster.submit(Script(script, args=args, stall_timeout_s=300))
    run.wait(500, progress=False).raise_for_status()
    return run


def test_deepspeed_s_pipeline_trains(cluster: Cluster) -> None:
    run = trained(cluster, SCRIPTS / "pipeline.py")
    assert "stage 0 of 2 losses" in run.logs(rank=0, stream="stdout")


def test_torch_s_own_tests_pass(cluster: Cluster, tmp_path: Path) -> None:
    trained(cluster, SCRIPTS / "torch_distributed.py", str(tmp_path))
    for rank in (0, 1):
        ends = json.loads((tmp_path / f"ends-{rank}.json").read_text())
        assert [name for name, end in ends.items() if end not in ("passed", "skipped")] == []
        assert [*ends.values()].count("passed") > 80


@pytest.mark.parametrize("start", [{"module": "pkg.train", "folder": "src"}, {"path": "run.py"}])
def test_a_repository_with_a_src_folder_runs(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: dict[str, str]
) -> None:
    package = tmp_path / "src" / "pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("SIZE = 3\n")
    (package / "train.py").write_text(REPOSITORY)
    (tmp_path / "run.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "sys.path.insert(0, str(Path(__file__).parent / 'src'))\nimport pkg.train\n"
    )
    monkeypatch.chdir(tmp_path)
    run = cluster.submit(Script(**start))
    run.wait(300, progress=False).raise_for_status()
    for rank in (0, 1):
        assert run.logs(rank=rank, stream="stdout").strip() == f"rank {rank} of size 3"


def test_the_lock_of_an_aborted_build_is_named(cluster: Cluster, tmp_path: Path) -> None:
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    script = tmp_path / "waiting.py"
    script.write_text(
        f"from torch.utils.file_baton import FileBaton\n\nFileBaton({str(lock)!r}).wait()\n"
    )
    run = cluster.submit(Script(script), pods=1)
    named = f"waiting for the build of an op that holds {lock}. If no process builds the op"
    until(lambda: named in run.logs(rank=0, stream="stderr"), 180)
    lock.unlink()
    run.wait(300, progress=False).raise_for_status()
