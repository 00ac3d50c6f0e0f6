"""Where a job's ranks run, as far as the job says."""

import pytest

from raymoe.config import load_job
from raymoe.config.job import kind_of_ranks
from raymoe.errors import ConfigError
from tests.unit.configs_on_disk import write

SAID = [
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
    (["workload=p2p"], None),
    (["workload=p2p", "p2p.transports=[host]"], "cpu"),
]


@pytest.mark.parametrize(("settings", "kind"), SAID, ids=[" ".join(settings) or "nothing" for settings, _ in SAID])
def test_kind(tmp_path, settings, kind):
    assert kind_of_ranks(load_job(write(tmp_path, "workload: exchange\n"), settings)) == kind


def test_backends_of_two_kinds_make_no_gang(tmp_path):
    job = load_job(write(tmp_path, "workload: exchange\nmatrix: {exchange.backend: [fused, host]}\n"))
    with pytest.raises(ConfigError, match=r"needs GPU ranks in one case \(fused\) and CPU ranks in another \(host\)"):
        kind_of_ranks(job)
