"""A process that ends while a thread of Gloo or of the store is in C++ ends with its own status, not by SIGABRT."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.python_path import REPOSITORY

PROGRAM = """
import atexit, ctypes
# Registered first, so called last: Gloo gives the operation up while Python holds its lock and is about to end.
atexit.register(ctypes.PyDLL(None).usleep, 1_500_000)
import sys, threading
from datetime import timedelta
from types import SimpleNamespace
import torch
from torch import distributed
from raymoe.errors import PeerTimeout
from raymoe.memory.wait import Waiter
from raymoe.net.gloo import PrivateGroup

Gloo, store, made = distributed.ProcessGroupGloo, distributed.HashStore(), {}

def connect(rank):
    options = Gloo._Options()
    options._devices, options._timeout = [Gloo.create_device(hostname="127.0.0.1")], timedelta(seconds=1)
    made[rank] = Gloo(store, rank, 2, options)

def wait_in_vain(group):
    if sys.argv[1] == "gather":
        wait = group.all_gather("gather", torch.empty(4), torch.ones(2))
    else:
        wait = group.all_to_all("swap", torch.empty(2, 2), torch.ones(2, 2))
    if sys.argv[2] == "waits":
        try:
            wait()
        except PeerTimeout as error:
            print(error)

threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
numbers = SimpleNamespace(enter=lambda number: None, lagging=lambda number: (1, 0))
groups = [PrivateGroup(made[rank], store, Waiter(rank, 0.3), numbers) for rank in range(2)]
wait_in_vain(groups[0])
for group in groups:
    group.abandon()
print("ends")
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("op", "how"), [("gather", "waits"), ("swap", "does not wait")])
def test_an_abandoned_operation_does_not_end_the_process(op: str, how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, op, how], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    said = f"rank 0 waited 0.3 s for rank 1 in {op} (epoch 1): expected 1, seen 0\n" if how == "waits" else ""
    assert (ended.returncode, ended.stdout) == (0, f"{said}ends\n"), ended.stderr


SERVER = """
import time
from torch import distributed
store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""
CLIENT = """
import atexit, ctypes
atexit.register(ctypes.PyDLL(None).usleep, 1_500_000)  # as above
import os, signal, subprocess, sys, time
from pathlib import Path
from raymoe.memory.across import BoundedStore, StoreAddress, connect
from raymoe.memory.wait import Waiter

server, port = int(sys.argv[1]), int(sys.argv[2])
address = StoreAddress("127.0.0.1", port, b"secret")
store = BoundedStore(address, lambda: connect(address, 5), Waiter(1, 5))
store.open(timeout_s=5)
store.ask("set", "key", "value", timeout_s=5)
os.kill(server, signal.SIGSTOP)
# A signal stops the threads one by one, and the store's own thread could still answer.
threads = Path(f"/proc/{server}/task")
while {file.read_text().rpartition(")")[2].split()[0] for file in threads.glob("*/stat")} != {"T"}:
    time.sleep(0.01)
try:
    store.ask("get", "key", timeout_s=0.2)
except RuntimeError as error:
    print(error)
subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -KILL {server}"])
"""


def test_a_store_that_dies_while_python_ends_does_not_end_the_process() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            command = [sys.executable, "-c", CLIENT, str(server.pid), server.stdout.readline()]
            ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        finally:
            server.kill()
    said = "the store of rank 0 did not answer within 0.2 s\n"
    assert (ended.returncode, ended.stdout) == (0, said), ended.stderr
