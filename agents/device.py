"""Moves arrays to a GPU and results back: page-locked memory, asynchronous copies, one wait for all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_log = logging.getLogger("penstock")


class DeviceLink:
    """Moves the inputs of a model to its device, and its outputs back.

    On CUDA, copies in both directions are asynchronous. This requires page-locked host memory. Inputs in other memory
    are first copied to a page-locked buffer of torch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_cuda = device, device.type == "cuda"

    def send(self, array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        """`array` on the device. Floating-point numbers are converted to `dtype` there.

        Do not write into `array` before a result that depends on it has been fetched.
        """
        tensor = torch.from_numpy(array)
        if self._is_cuda and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        tensor = tensor.to(self.device, non_blocking=True)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def fetch(self, outputs: Sequence[Any]) -> list[Any]:
        """`outputs` in host memory, with one wait for all of them. Values that are not tensors stay as they are."""
        if not self._is_cuda:
            return [output.cpu() if isinstance(output, torch.Tensor) else output for output in outputs]
        fetched = [self._start_fetch(output) for output in outputs]
        torch.cuda.current_stream(self.device).synchronize()
        return fetched

    def _start_fetch(self, output: object) -> Any:
        if not isinstance(output, torch.Tensor) or output.device != self.device:
            return output
        target = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        return target.copy_(output.detach(), non_blocking=True)

    @contextmanager
    def page_locked(self, memory: npt.NDArray[np.uint8]) -> Iterator[None]:
        """Keep `memory` page-locked, so that the device copies from it directly. If the driver refuses, this is
        logged, and copies go through a buffer of torch."""
        if not self._is_cuda:
            yield
            return
        with torch.cuda.device(self.device):
            address, cudart = memory.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
            if error:
                _log.info("CUDA error %d: %d bytes of shared memory are not page-locked", error, memory.nbytes)
                with suppress(RuntimeError):  # CUDA keeps the error, and torch would raise it later
                    torch.zeros(1, device=self.device)
        try:
            yield
        finally:
            if not error:
                # Wait for running copies. If this fails, an earlier CUDA error has made the device unusable.
                with suppress(RuntimeError), torch.cuda.device(self.device):
                    torch.cuda.current_stream().synchronize()
                cudart.cudaHostUnregister(address)
