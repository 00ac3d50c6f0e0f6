"""The errors of raymoe, for programs that use the library: `except raymoe.errors.PeerTimeout as error`.

All of them are `RaymoeError`. The message is one sentence: what was asked, what was found, what to do. All survive
pickling with their attributes, so a Ray actor or a worker process can raise them to its caller.

>>> import pickle
>>> timeout = PeerTimeout(op="dispatch", epoch=7, peer=1, expected=7, seen=6, waited_s=30.0, rank=0)
>>> str(pickle.loads(pickle.dumps(timeout)))
'rank 0 waited 30.0 s for rank 1 in dispatch (epoch 7): expected 7, seen 6'
"""

from raymoe.device.driver import CaptureError, CudaError, CudaMissing
from raymoe.job.errors import (
    Aborted,
    CannotWrite,
    ClusterError,
    ConfigError,
    DataRefused,
    NotAnswering,
    PeerTimeout,
    PlacementError,
    RankDied,
    RaymoeError,
    Stopped,
    WiringError,
    WrongResult,
)

__all__ = [
    "Aborted",
    "CannotWrite",
    "CaptureError",
    "ClusterError",
    "ConfigError",
    "CudaError",
    "CudaMissing",
    "DataRefused",
    "NotAnswering",
    "PeerTimeout",
    "PlacementError",
    "RankDied",
    "RaymoeError",
    "Stopped",
    "WiringError",
    "WrongResult",
]
