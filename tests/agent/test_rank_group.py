"""Collectives, the bound store and the imports of a rank, in this process alone."""

from __future__ import annotations

import errno
import gc
import importlib
import importlib.machinery
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.sentences import says
from workbench.agent import imports
from workbench.agent.imports import chosen_modules, import_for_forks, is_ours
from workbench.agent.rank import collectives
from workbench.agent.rank.collectives import FailedAlike, alike
from workbench.agent.rank.store import install, when_imported


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    rendezvous = torch._C._distributed_c10d.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=rendezvous, rank=0, world_size=1)
    yield
    collectives.close()


class Group:
    """torch.distributed as rank 1 of 3 sees it, with the other ranks' tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 1) -> None:
        self.others: list[bytes] = []
        self.sent: list[int] = []
        self.summed = 0
        self.rank = rank
        fakes = {
            "is_initialized": lambda: True,
            "get_rank": lambda: self.rank,
            "get_world_size": lambda: 3,
            "get_backend": lambda: "gloo",
            "all_reduce": self.all_reduce,
            "all_gather": self.all_gather,
            "broadcast": self.broadcast,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(dist, name, fake)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.summed += 1
        tensor.mul_(3)

    def all_gather(self, everyone: list[torch.Tensor], own: torch.Tensor) -> None:
        assert len(everyone) == 3
        for rank, tensor in enumerate(everyone):
            if rank == self.rank:
                tensor.copy_(own)
                continue
            data = self.others[rank]
            if own.dtype == torch.int64:
                tensor.fill_(len(data))
            else:
                tensor[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)

    def broadcast(self, tensor: torch.Tensor, *, src: int) -> None:
        assert src == 0
        if self.rank == 0:
            self.sent.append(tensor.numel())
        elif tensor.dtype == torch.int64:
            tensor.fill_(len(self.others[0]))
        else:
            tensor.copy_(torch.tensor(list(self.others[0]), dtype=torch.uint8))


def test_a_process_without_a_group_is_the_only_rank() -> None:
    assert not collectives.connected()
    assert (collectives.rank(), collectives.world_size(), collectives.backend()) == (0, 1, "")
    assert collectives.sums([1.5, 2]) == [1.5, 2.0]
    assert collectives.broadcast_bytes(b"a") == b"a" and collectives.broadcast_bytes(None) == b""
    assert collectives.gather_bytes(b"a") == [b"a"]
    values = torch.ones(2)
    collectives.add_up(values)
    assert values.tolist() == [1.0, 1.0]
    collectives.barrier()
    collectives.close()


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_rank_exchanges_with_itself() -> None:
    assert collectives.connected()
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    assert collectives.backend() == "gloo"
    assert collectives.sums([0.1, 2]) == [0.1, 2.0]
    for data in (b"", b"bytes\x00\xff"):
        assert collectives.broadcast_bytes(data) == data
        assert collectives.gather_bytes(data) == [data]
    collectives.barrier()
    collectives.close()
    assert not collectives.connected()


def test_ranks_gather_bytes_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    assert (collectives.rank(), collectives.world_size()) == (1, 3)
    group.others = [b"first", b"", b""]
    assert collectives.gather_bytes(b"own") == [b"first", b"own", b""]
    group.others = [b"", b"", b"the longest"]
    assert collectives.gather_bytes(b"") == [b"", b"", b"the longest"]


def test_ranks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    assert collectives.sums([1.0, 2.0]) == [3.0, 6.0]
    values = torch.ones(2)
    collectives.add_up(values)
    assert values.tolist() == [3.0, 3.0]
    collectives.barrier()
    assert group.summed == 3


def test_the_bytes_of_rank_0_reach_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    group.others = [b"words", b"", b""]
    assert collectives.broadcast_bytes(None) == b"words"
    group.others = [b"", b"", b""]
    assert collectives.broadcast_bytes(None) == b""
    group.rank = 0
    assert collectives.broadcast_bytes(b"abc") == b"abc"
    assert group.sent == [1, 3]


def test_nccl_has_its_tensors_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Group(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert collectives._device() == torch.device("cpu")
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        monkeypatch.setattr(dist, "get_backend", lambda name=backend: name)
        assert collectives._device() == torch.device("cuda", 2)


def test_all_ranks_fail_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = Group(monkeypatch)
    group.others = [b"", b"", b"rank 2: OSError: no file"]
    with pytest.raises(FailedAlike, match="rank 2: OSError: no file"), alike(collective=False):
        pass
    group.others = [b"", b"", b""]
    with alike(collective=False):
        pass
    with pytest.raises(FailedAlike, match="rank 1: ValueError: bad"), alike(collective=False):
        raise ValueError("bad")
    assert "Traceback" in capsys.readouterr().err


def test_a_failure_in_a_collective_is_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    group.others = [b"rank 0: late", b"", b""]
    with pytest.raises(ValueError, match="bad"), alike(collective=True):
        raise ValueError("bad")
    with alike(collective=True):
        pass


Make = Callable[..., Any]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every store that torch makes, with the module changed by `install`."""
    seen: list[dict[str, Any]] = []

    class TCPStore:
        """torch's own store."""

        def __init__(self, *args: Any, **options: Any) -> None:
            seen.append({"args": args, **options})

    module = SimpleNamespace(TCPStore=TCPStore)
    monkeypatch.setitem(sys.modules, "torch.distributed.rendezvous", module)
    install()
    install()
    return seen


def options(**other: Any) -> dict[str, Any]:
    known = {"host_name": "127.0.0.1", "port": 0, "timeout": timedelta(seconds=5)}
    return {**known, **other}


def tcp_store() -> Make:
    make: Make = sys.modules["torch.distributed.rendezvous"].TCPStore
    return make


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_store_of_rank_0_listens_on_its_address_alone(made: list[dict[str, Any]]) -> None:
    port = free_port()
    tcp_store()(**options(is_master=True, port=port))
    listener = socket.socket(fileno=made[0]["master_listen_fd"])
    with listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    assert len(made) == 1 and tcp_store().__doc__ == "torch's own store."


@pytest.mark.parametrize(
    ("args", "other"),
    [
        (("127.0.0.1",), {}),
        ((), {"host_name": ""}),
        ((), {"port": 0}),
        ((), {"master_listen_fd": 9}),
    ],
)
def test_other_stores_are_made_by_torch(
    made: list[dict[str, Any]], args: tuple[str, ...], other: dict[str, Any]
) -> None:
    asked = options(**{"is_master": True, "port": free_port(), **other})
    tcp_store()(*args, **asked)
    assert made == [{"args": args, **asked}]


def test_a_port_in_use_is_left_to_torch(
    made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = options(is_master=True, port=server.getsockname()[1])
        tcp_store()(**asked)
    assert made == [{"args": (), **asked}] and capsys.readouterr().err == ""


def test_an_address_of_another_machine_is_reported(
    made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "no such address")

    monkeypatch.setattr(socket, "create_server", refuse)
    asked = options(is_master=True, port=1234)
    tcp_store()(**asked)
    assert made == [{"args": (), **asked}]
    assert says(
        capsys.readouterr().err,
        "torch's store listens on all interfaces",
        "127.0.0.1",
        "no such address",
    )


def test_another_rank_waits_until_the_port_is_open(made: list[dict[str, Any]]) -> None:
    port = free_port()
    opened = threading.Event()

    def make() -> None:
        tcp_store()(**options(port=port))
        opened.set()

    thread = threading.Thread(target=make)
    thread.start()
    assert not opened.wait(0.2) and not made
    with socket.create_server(("127.0.0.1", port)):
        assert opened.wait(300)
    thread.join()
    assert made[0]["port"] == port and "master_listen_fd" not in made[0]


def test_a_rank_waits_no_longer_than_torch_would(made: list[dict[str, Any]]) -> None:
    tcp_store()(**options(port=free_port(), timeout=timedelta(seconds=0.1)))
    assert len(made) == 1


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that is not imported yet."""
    name = "workbench_test_module"
    (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield name
    sys.meta_path[:] = finders
    sys.modules.pop(name, None)


def test_a_module_is_changed_once_at_its_import(module: str) -> None:
    changed: list[ModuleType] = []
    for _ in range(2):
        when_imported(module, changed.append)
    when_imported("no_such_module_of_a_test", changed.append)
    import json as other

    importlib.reload(other)
    assert not changed
    imported = importlib.import_module(module)
    assert changed == [imported] and imported.VALUE == 1
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_of_a_test")


def test_a_module_that_is_imported_already_is_changed_now(module: str) -> None:
    imported = importlib.import_module(module)
    changed: list[ModuleType] = []
    when_imported(module, changed.append)
    assert changed == [imported]
    assert all(getattr(finder, "changes", "") != module for finder in sys.meta_path)


def test_a_change_of_one_module_does_not_hide_another(module: str) -> None:
    changed: list[str] = []
    when_imported("no_such_module_of_a_test", lambda _: changed.append("other"))
    when_imported(module, lambda _: changed.append("own"))
    importlib.import_module(module)
    assert changed == ["own"]


def test_a_change_comes_before_other_finders(module: str) -> None:
    sys.meta_path.insert(0, importlib.machinery.PathFinder)
    changed: list[ModuleType] = []
    when_imported(module, changed.append)
    assert changed == [importlib.import_module(module)]


def test_modules_of_a_warm_server_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_WARM_MODULES", "json,csv")
    assert chosen_modules() == (["json", "csv"], ())
    monkeypatch.delenv("WORKBENCH_WARM_MODULES")
    needed, late = chosen_modules()
    assert "torch" in needed and late


def test_a_module_of_the_package_is_known_by_its_name() -> None:
    assert is_ours("workbench") and is_ours("workbench.agent.rank")
    assert not is_ours("workbenches") and not is_ours("my.workbench") and not is_ours("")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_on_a_gpu_ranks_import_the_trainer_themselves(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    taken: list[str] = []

    def take(name: str) -> None:
        taken.append(name)
        if name == "missing":
            raise ImportError(name)

    monkeypatch.setattr(imports.importlib, "import_module", take)  # type: ignore[attr-defined]
    monkeypatch.setattr(gc, "freeze", lambda: taken.append("frozen"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    import_for_forks(["torch", "transformers.trainer"], ["missing", "late"])
    trainer = [] if has_gpu else ["transformers.trainer"]
    assert taken == ["torch", *trainer, "missing", "late", "frozen"]
    assert gc.isenabled()
    with pytest.raises(ImportError):
        import_for_forks(["missing"])


def test_without_torch_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(imports.importlib, "import_module", taken.append)  # type: ignore[attr-defined]
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.delitem(sys.modules, "torch")
    import_for_forks(["transformers.trainer"])
    assert taken == ["transformers.trainer"]
