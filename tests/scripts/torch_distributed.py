"""torch's own tests of collectives and of DDP, one after another in the ranks that are here."""

import json
import os
import sys
import types
import unittest
from pathlib import Path

import torch.distributed as dist

# torch's tests derive from this package's class, which adds comparisons of printed text.
sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
shared = Path(sys.argv[1])
for folder in ("barrier", "test_dir"):
    (shared / folder).mkdir(parents=True, exist_ok=True)
os.environ |= {"BACKEND": "gloo", "TEMP_DIR": str(shared)}

from torch.testing._internal.common_utils import TestCase  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest  # noqa: E402


class Here(DistributedTest._DistTestBase, TestCase):
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])

    def _barrier(self, *args, timeout=10, **more):
        super()._barrier(*args, timeout=max(timeout, 180), **more)


class Ends(unittest.TestResult):
    """How each test ended."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, str] = {}

    def addSuccess(self, test) -> None:  # noqa: N802
        self.of[test._testMethodName] = "passed"

    def addSkip(self, test, reason) -> None:  # noqa: N802
        self.of[test._testMethodName] = "skipped"

    def addFailure(self, test, error) -> None:  # noqa: N802
        self.of[test._testMethodName] = f"failed: {error[1]}"

    def addError(self, test, error) -> None:  # noqa: N802
        # torch's tests skip themselves by the exit code of the process.
        if isinstance(error[1], SystemExit):
            self.addSkip(test, error[1])
        else:
            self.addFailure(test, error)


def names():
    """The tests that hold on a machine that is busy: a barrier's limit is a time of the machine."""
    found = unittest.TestLoader().getTestCaseNames(Here)
    return [name for name in found if "monitored_barrier" not in name and "timeout" not in name]


def meet(where, word):
    """Wait for the other ranks: a group that one rank closes early breaks the others' start."""
    where.set(f"{word}-{rank}", "")
    where.wait([f"{word}-{other}" for other in range(world_size)])


store, rank, world_size = next(iter(dist.rendezvous("env://")))
ends = Ends()
for name in names():
    # A test may leave its group broken on purpose, so each has a group of its own.
    own = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
    meet(own, "begun")
    Here(name).run(ends)
    meet(own, "done")
    dist.destroy_process_group()
(shared / f"ends-{rank}.json").write_text(json.dumps(ends.of))
meet(store, "over")
