"""A process that stands in for another system beside a rank. The job's name holds its script."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from raymoe.workload.compare.other_systems import Answer, SystemFacts

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tests.unit.workload.scripted_system import main; main(int(sys.argv[2]))"
)
OPS = (("dispatch", "cold"), ("dispatch", "warm"))


def main(fd: int) -> None:
    connection = Connection(fd)
    order = connection.recv()
    _, script, rank = order.job["name"].split(".")
    mine = order.rank == int(rank)
    if mine and script == "ends":
        print("cannot find a network\n", flush=True)
        os._exit(3)
    if mine and script == "hangs":
        time.sleep(60)
    connection.send(Answer({"rank": order.rank}))
    assert [descriptor["rank"] for descriptor in connection.recv()] == [0, 1]
    if mine and script == "codes":
        print("too few experts", flush=True)
        connection.send(Answer(failure="Error 5", explained=False))
        return
    if mine and script == "refuses":
        connection.send(Answer(failure="only 3 experts"))
        return
    connection.send(
        Answer(
            SystemFacts(
                OPS, {"dispatch": "routing"}, {"graph": True, "sms": 8, "device": os.environ["NVSHMEM_DISABLE_NVLS"]}
            )
        )
    )
    step, again = 0, 0
    while True:
        index, verify = connection.recv()
        assert index == step, "a verified step is done twice more, the second time for its times"
        if mine and script == "crashes" and step == 3:
            os.abort()
        if mine and script == "lies" and verify:
            connection.send(Answer(failure="its dispatch of step 2 was wrong: nothing came"))
            return
        connection.send(Answer((10.0 + order.rank, 8.0)))
        again = 2 if verify else max(0, again - 1)
        step += again == 0
