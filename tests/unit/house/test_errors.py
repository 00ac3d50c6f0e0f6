"""Errors keep every attribute when they cross processes."""

import pickle

import pytest

from raymoe import errors
from raymoe.errors import Problem

PROBLEM = Problem("x.yaml", 3, "a.b", "c", "wrong")
ALL = [
    (errors.RaymoeError("m"), 1),
    (errors.ConfigError("m", [PROBLEM]), 2),
    (errors.ClusterError("m"), 3),
    (errors.PlacementError("m"), 3),
    (errors.WiringError("m"), 1),
    (errors.RankDied(2, "rank 2 died"), 4),
    (errors.PeerTimeout("dispatch", epoch=7, peer=1, expected=7, seen=6, waited_s=2.0, rank=0), 5),
    (errors.WrongResult("m"), 6),
    (errors.DataRefused("m"), 7),
    (errors.WeightsMissing("m"), 1),
    (errors.CannotWrite("m"), 8),
    (errors.Aborted("m"), 1),
    (errors.Stopped(2), 130),
    (errors.Stopped(15), 143),
    (errors.CudaError("cuMemAlloc failed", 2), 1),
    (errors.CudaMissing("no driver"), 1),
    (errors.CaptureError("captured", 900), 1),
]


@pytest.mark.parametrize(("error", "exit_code"), ALL, ids=[type(error).__name__ for error, _ in ALL])
def test_errors_survive_pickling_with_every_attribute(error, exit_code):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.__dict__, again.args) == (str(error), error.__dict__, error.args)
    assert again.exit_code == error.exit_code == exit_code


def test_every_error_class_is_in_the_list():
    here = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.RaymoeError)
    }
    assert here == {type(error) for error, _ in ALL}


def test_advice_is_the_end_of_a_message_and_crosses_processes():
    refused = errors.DataRefused("48 rows came; the capacity is 40")
    refused.advice = "take more"
    assert str(pickle.loads(pickle.dumps(refused))) == "48 rows came; the capacity is 40: take more"


def test_a_timeout_names_both_ranks_the_operation_and_the_values():
    assert str(ALL[6][0]) == "rank 0 waited 2.0 s for rank 1 in dispatch (epoch 7): expected 7, seen 6"
