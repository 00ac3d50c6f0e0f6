"""Calls of the CUDA driver, which is loaded at the first call."""

from __future__ import annotations

from typing import Any

from raymoe.errors import CaptureError, CudaError, CudaMissing

_CAPTURE_ERRORS = range(900, 909)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and its neighbours


def bindings() -> Any:
    """`cuda.bindings.driver`."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaMissing(
            f"CUDA was asked for and its Python binding cannot be imported ({error}); pip install 'cuda-python>=13,<14'"
        ) from error
    return driver


def call(name: str, *arguments: object) -> Any:
    """Call a driver function by name. Returns its result: a tuple if there are several, None if there is none."""
    driver = bindings()
    try:
        code, *results = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # the binding looks for libcuda at the first call
        raise CudaMissing(
            f"{name} was called and there is no CUDA driver here ({error}); a machine with an NVIDIA GPU is needed"
        ) from error
    if code != driver.CUresult.CUDA_SUCCESS:
        raise failure(name, code)
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def failure(name: str, code: Any) -> CudaError:
    """Return the error for a driver function that returned this code; for callers that do not use `call`."""
    driver = bindings()
    _, text = driver.cuGetErrorString(code)
    described = f"{name} failed: {code.name} ({text.decode() if text else 'no description'})"
    if int(code) in _CAPTURE_ERRORS:
        way_out = "make plans, memory and kernels before the capture begins, and synchronise after it"
        return CaptureError(f"{described}; {way_out}", int(code))
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return CudaMissing(f"{described}; no GPU is visible to this process (CUDA_VISIBLE_DEVICES?)", int(code))
    return CudaError(described, int(code))
