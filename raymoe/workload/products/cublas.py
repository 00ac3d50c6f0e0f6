"""cuBLAS's grouped product beside the others. Its sizes are arrays of the host, so a layer would wait for the counts.

Here the counts are known before the clock starts. Experts without rows are no groups.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raymoe.workload.products.prepared import Compute, Unavailable
from raymoe.workload.products.tasks import Task

LIBRARIES = ("libcublas.so.13", "libcublas.so.12")
_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
_SUMS_OF_32_BITS = 68  # CUBLAS_COMPUTE_32F
_AS_IT_IS, _TRANSPOSED = 0, 1


def grouped_call() -> Any:
    """Return `cublasGemmGroupedBatchedEx` of the cuBLAS that torch has loaded."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name).cublasGemmGroupedBatchedEx
        except (OSError, AttributeError):  # another version, or one without grouped products
            continue
    raise Unavailable(f"no grouped product in {' or '.join(LIBRARIES)}")


@dataclass(frozen=True)
class GroupArrays:
    """The arguments of a call. To cuBLAS, which counts by columns, weights are [K, N], rows [K, r], and results [N, r].

    cuBLAS reads the arrays of the host in each call, and those of the device when the product runs.
    """

    task: Task
    y: Tensor
    sizes: dict[str, Any]
    addresses: Tensor

    @classmethod
    def of(cls, task: Task, y: Tensor) -> GroupArrays:
        outputs, columns = task.weight.shape[1:]
        experts = [expert for expert, count in enumerate(task.sizes.counts) if count]
        starts = [task.sizes.starts[expert] for expert in experts]
        tensors = ((task.weight, experts), (task.x, starts), (y, starts))
        addresses = [[of.data_ptr() + of.stride(0) * of.element_size() * at for at in places] for of, places in tensors]
        innermost = task.weight.stride(2) == 1

        def same(value: int) -> Any:
            return (ctypes.c_int * len(experts))(*([value] * len(experts)))

        sizes = {
            "of_weights": same(_TRANSPOSED if innermost else _AS_IT_IS),
            "weight_step": same(columns if innermost else outputs),
            "of_rows": same(_AS_IT_IS),
            "outputs": same(outputs),
            "rows": (ctypes.c_int * len(experts))(*(task.sizes.counts[expert] for expert in experts)),
            "columns": same(columns),
            "one": (ctypes.c_float * len(experts))(*([1.0] * len(experts))),
            "zero": (ctypes.c_float * len(experts))(),
            "products": same(1),
        }
        return cls(task, y, sizes, torch.tensor(addresses, dtype=torch.int64, device=y.device))

    def multiply(self, call: Any, handle: int) -> None:
        sizes, dtype = self.sizes, _TYPES[self.task.x.dtype]
        weights, rows, results = (ctypes.c_void_p(of.data_ptr()) for of in self.addresses)
        status = call(
            ctypes.c_void_p(handle),
            *(sizes[name] for name in ("of_weights", "of_rows", "outputs", "rows", "columns")),
            *(sizes["one"], weights, dtype, sizes["weight_step"], rows, dtype, sizes["columns"]),
            *(sizes["zero"], results, dtype, sizes["outputs"]),
            *(len(sizes["rows"]), sizes["products"], _SUMS_OF_32_BITS),
        )
        if status != 0:
            raise Unavailable(f"cublasGemmGroupedBatchedEx answered with status {status}")


def by_cublas(task: Task) -> Compute:
    if not task.on_gpu or task.x.dtype not in _TYPES:
        raise Unavailable("cuBLAS is compared on GPUs, with rows of 16 bits")
    call = grouped_call()
    groups = GroupArrays.of(task, task.x.new_empty(len(task.x), task.weight.shape[1]))
    handle: Any = torch.cuda.current_blas_handle  # has no annotations

    def compute() -> Tensor:
        groups.multiply(call, handle())
        return groups.y

    return compute
