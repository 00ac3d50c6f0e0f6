"""Which device `auto` means, and when it is refused."""

from __future__ import annotations

import pytest

from raymoe.errors import ConfigError
from raymoe.memory.auto_device import VisibleGpus, device_in_ray

UUIDS = ["GPU-aaaa1111-0000", "GPU-bbbb2222-0000"]


@pytest.mark.parametrize(
    ("assigned", "visible", "sight", "want"),
    [
        (["1"], "0,1", VisibleGpus(2, None), "cuda:1"),
        (["5", "4"], "4,5", VisibleGpus(2, None), "cuda:0"),  # Ray's ids are in no fixed order
        (["5", "4"], "4,5", VisibleGpus(2, 1), "cuda:1"),
        (["4"], "4,5", VisibleGpus(2, 1), "cuda:0"),  # torch's current device is not the assigned one
        ([UUIDS[1]], ",".join(UUIDS), VisibleGpus(2, None), "cuda:1"),
        ([UUIDS[1]], "GPU-aaaa,GPU-bbbb", VisibleGpus(2, None), "cuda:1"),
        (["0"], " 0", VisibleGpus(1, None), "cuda:0"),
        ([], "0", VisibleGpus(1, None), "cpu"),
        ([], "", VisibleGpus(0, None), "cpu"),
    ],
)
def test_auto_in_ray_is_the_assigned_gpu_or_the_cpu(
    assigned: list[str], visible: str | None, sight: VisibleGpus, want: str
) -> None:
    assert device_in_ray("auto", assigned, visible, sight) == want
    assert device_in_ray("cpu", assigned, visible, sight) == "cpu"


@pytest.mark.parametrize(
    ("assigned", "visible", "sight", "says"),
    [
        (["3"], "3", VisibleGpus(0, None, "2.13.0+cpu"), "Ray assigned GPU 3; torch 2.13.0+cpu sees no GPU: install"),
        (["3"], "0,1", VisibleGpus(2, None), "Ray assigned GPU 3; CUDA_VISIBLE_DEVICES is '0,1' and torch sees 2 GPUs"),
        (
            ["3"],
            None,
            VisibleGpus(2, None),
            "Ray assigned GPU 3; CUDA_VISIBLE_DEVICES is not set and torch sees 2 GPUs",
        ),
        ([UUIDS[0]], None, VisibleGpus(2, None), "CUDA_VISIBLE_DEVICES is not set"),
        (["3"], "1,3", VisibleGpus(1, None), "torch sees 1 GPUs"),  # set after CUDA was initialised
    ],
)
def test_auto_raises_when_torch_cannot_see_the_assigned_gpu(
    assigned: list[str], visible: str | None, sight: VisibleGpus, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        device_in_ray("auto", assigned, visible, sight)
    assert says in str(caught.value)
