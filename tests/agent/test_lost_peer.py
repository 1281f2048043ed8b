from __future__ import annotations

from pathlib import Path

import pytest

from workbench.agent.rank.records import write_error
from workbench.agent.ranks.rank import Rank
from workbench.agent.ranks.records import only_lost_its_peer, read_record
from workbench.base.process import RankPlace

TCP = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690,"
# Of a rank whose peer was killed, stopped or never there:
# gloo's and the store's are recorded from torch 2.13.
LOST = [
    f"{TCP}/pair.cc:553] Connection closed by peer [127.0.0.1]:32442. "
    "This is typically caused by a remote worker crashing. Check the "
    "logs of the remote worker before reporting an error. GLHF! 🏖️",
    f"{TCP}/pair.cc:537] Read error [127.0.0.1]:18570: Connection reset by peer. "
    "This is typically caused by a remote worker hanging or bugs in the application.",
    f"{TCP}/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
    f"{TCP}/unbound_buffer.cc:129] Timed out waiting 5000ms for send operation to complete",
    "Application timeout caused pair closure",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:799] "
    "connect [127.0.1.1]:8192: Connection refused",
    "Rank 1 successfully reached monitoredBarrier, but received errors while "
    "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.",
    "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms",
    "Broken pipe",
    "[Errno 32] Broken pipe",
    "Connection reset by peer",
    "Failed to recv, got 0 bytes. Connection was likely "
    "closed. Did the remote server shutdown or crash?",
    "failed to recv, got 0 bytes",
    "wait timeout after 5000ms, keys: /default_pg/0//never",
    "The client socket has timed out after 5000ms while trying to connect to (127.0.0.1, 53093).",
    "Timed out after 6 seconds waiting for clients. 1/2 clients joined.",
    "[c10d] recvValue failed on SocketImpl(fd=105, addr=[localhost]:39468, "
    "remote=[localhost]:12201): Connection reset by peer",
    f"{NCCL} remote process exited or there was a network error, NCCL version "
    "2.28.9\nncclRemoteError: A call failed possibly due to a network error or "
    "a remote process exiting prematurely.\nLast error:\nsocketProgressOpt: "
    "Call to recv from 10.0.0.2<33759> failed : Connection reset by peer",
    f"{NCCL} internal error, NCCL version 2.20.5\nncclInternalError: Internal check "
    "failed.\nLast error:\nNet : Connection closed by remote peer pod-1<50260>",
    f"{NCCL} unhandled system error, NCCL version 2.28.9\nncclSystemError: System call "
    "(e.g. socket, malloc) or external library call failed or device error.\nLast "
    "error:\nsocketPollConnect: connect to 10.0.0.2<4711> returned Connection refused",
    "NCCL communicator was aborted on rank 2.  Original reason for failure was: [Rank 2] "
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=10, OpType=BROADCAST, "
    "Timeout(ms)=1800000) ran for 1805457 milliseconds before timing out.",
    "The connection to the C10d store has failed. See inner exception for details.",
    "PRTE has lost communication with a remote daemon.",
    "[pod-1][[3,1],0][btl_tcp_frag.c:241:mca_btl_tcp_frag_recv] "
    "mca_btl_tcp_frag_recv: readv failed: Connection reset by peer (104)",
]
HUB = (
    "HTTPSConnectionPool(host='huggingface.co', port=443): "
    "Max retries exceeded with url: /api/models/t5-small"
)
OWN = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 8 bytes. Error code 12 (Cannot allocate memory)",
    "loss is nan on rank 1 at step 3; try a lower learning rate, or precision fp32",
    "index out of range in self",
    "row 17 names no connection",
    # What torch's store says of a rank that is not there is another text.
    "[Errno 111] Connection refused",
    f"{HUB} (Caused by NewConnectionError('<urllib3.connection.HTTPSConnection object "
    "at 0x7f>: Failed to establish a new connection: [Errno 111] Connection refused'))",
    f"{HUB} (Caused by ConnectTimeoutError('Connection to "
    "huggingface.co timed out. (connect timeout=10)'))",
    "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
    "HTTPSConnectionPool(host='cdn-lfs.huggingface.co', "
    "port=443): Read timed out. (read timeout=10)",
    "Couldn't reach 'wikisql' on the Hub (ConnectionError)",
    "API request to http://mlflow:5000/api/2.0/mlflow/runs/create failed: Connection refused",
    "connection to server at 10.0.0.9, port 5432 failed: server closed the connection unexpectedly",
    f"{NCCL} unhandled cuda error, NCCL version 2.28.9\nncclUnhandledCudaError: "
    "Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    f"{NCCL} unhandled system error, NCCL version 2.28.9\nncclSystemError: System "
    "call failed\nLast error:\nError while creating shared memory segment "
    "/dev/shm/nccl-XyZ (size 9637888), error: No space left on device (28)",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000",
    "train.py FAILED\nFailures:\n  <NO_OTHER_FAILURES>\nRoot Cause "
    "(first observed failure):\n  rank : 1\n  exitcode : -9 (pid: "
    "69811)\n  traceback : Signal 9 (SIGKILL) received by PID 69811",
    "['python', '-u', 'train.py'] exits with return code = 1",
    "mpirun noticed that process rank 1 with PID 0 on node pod-1 exited on signal 9 (Killed).",
]


@pytest.mark.parametrize("text", LOST)
def test_what_a_rank_says_that_lost_its_peer_is_no_cause(text: str) -> None:
    assert only_lost_its_peer(text)


@pytest.mark.parametrize("text", OWN)
def test_a_failure_of_its_own_is_a_cause(text: str) -> None:
    assert not only_lost_its_peer(text)


@pytest.mark.parametrize("text", [*LOST, *OWN])
def test_ranks_of_a_script_and_of_a_finetune_are_judged_alike(tmp_path: Path, text: str) -> None:
    write_error(tmp_path / "finetune", 0, RuntimeError(text))
    script = tmp_path / "script"
    script.mkdir()
    rank = Rank(
        place=RankPlace(rank=0, local_rank=0, pod="pod-0"), folder=script, success="exit code"
    )
    rank.log("stderr").parent.mkdir()
    rank.log("stderr").write_text(
        f"Traceback (most recent call last):\n  File ...\nRuntimeError: {text}\n"
    )
    rank.end(1)
    finetune = read_record(tmp_path / "finetune" / "error.json")
    assert finetune is not None
    assert (read_record(script / "error.json") or {})["echo"] == finetune["echo"] == (text in LOST)
