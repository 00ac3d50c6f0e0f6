"""Whether a job asks for GPU ranks, for CPU ranks, or leaves it open."""

import pytest

from raymoe.config import load_job
from raymoe.config.job import kind_of_ranks
from raymoe.errors import ConfigError
from tests.unit.config.configs_on_disk import write

KINDS = [
    (["world.device=cuda"], "cuda"),
    (["world.device=cpu"], "cpu"),
    ([], None),
    (["exchange.backend=staged"], "cuda"),
    (["exchange.backend=row_push"], "cuda"),
    (["exchange.backend=nccl_bare"], "cuda"),
    (["exchange.backend=host"], "cpu"),
    (["exchange.backend=collective"], None),
    (["matrix={exchange.backend: [allgather, fused]}"], "cuda"),
    (["workload=layer"], "cpu"),
    (["workload=layer", "exchange.backend=fused"], "cuda"),
    (["workload=layer", "world.device=cuda"], "cuda"),
    (["matrix={workload: [exchange, overlap]}"], "cuda"),
    (["matrix={workload: [exchange, p2p]}"], None),
    (["matrix={workload: [p2p, layer]}"], "cpu"),
    (["matrix={workload: [exchange, layer], exchange.backend: [auto, fused]}"], "cuda"),
    (["matrix={workload: [layer, overlap]}"], "cuda"),
    (["workload=p2p"], None),
    (["workload=p2p", "p2p.transports=[host]"], "cpu"),
]


@pytest.mark.parametrize(("settings", "kind"), KINDS, ids=[" ".join(settings) or "nothing" for settings, _ in KINDS])
def test_kind_of_ranks_follows_device_backend_and_workload(tmp_path, settings, kind):
    assert kind_of_ranks(load_job(write(tmp_path, "workload: exchange\n"), settings)) == kind


def test_backends_of_two_kinds_in_one_matrix_are_refused(tmp_path):
    job = load_job(write(tmp_path, "workload: exchange\nmatrix: {exchange.backend: [fused, host]}\n"))
    with pytest.raises(ConfigError, match=r"needs GPU ranks in one case \(fused\) and CPU ranks in another \(host\)"):
        kind_of_ranks(job)


def test_workloads_of_two_kinds_in_one_matrix_are_refused(tmp_path):
    job = load_job(write(tmp_path, "matrix: {workload: [p2p, overlap]}\np2p: {transports: [host]}\n"))
    with pytest.raises(ConfigError, match="cases for GPU ranks and cases for CPU ranks; run them apart"):
        kind_of_ranks(job)
