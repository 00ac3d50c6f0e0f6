"""Whether a job's ranks are on GPUs or on CPUs, as far as the job itself says so."""

from __future__ import annotations

from raymoe.job.errors import ConfigError
from raymoe.job.model import Job
from raymoe.job.rules import CPU_BACKENDS, GPU_BACKENDS


def kind_of_ranks(job: Job) -> str | None:
    """`cuda` or `cpu`; None where either would do, and what there is decides.

    >>> exchange = {"name": "x", "workload": "exchange"}
    >>> kind_of_ranks(Job(**exchange, matrix={"exchange.backend": ("host", "collective")}))
    'cpu'
    >>> kind_of_ranks(Job(**exchange, exchange={"backend": "fused"})), kind_of_ranks(Job(**exchange))
    ('cuda', None)
    """
    if job.world.device != "auto":
        return job.world.device
    if job.workload == "overlap":
        return "cuda"
    if job.workload == "layer" or (job.workload == "p2p" and "host" in job.p2p.transports):
        return "cpu"
    return _kind_of_backends(job) if job.workload == "exchange" else None


def _kind_of_backends(job: Job) -> str | None:
    backends = [str(case.job.exchange.backend) for case in job.cases()]
    on_gpus = [name for name in backends if name in GPU_BACKENDS]
    on_cpus = [name for name in backends if name in CPU_BACKENDS]
    if on_gpus and on_cpus:
        raise ConfigError(
            f"exchange.backend is {on_gpus[0]}, of GPU ranks, in one case and {on_cpus[0]}, of CPU ranks, in another, "
            "and a gang is of one kind; start a run for each"
        )
    return "cuda" if on_gpus else "cpu" if on_cpus else None
