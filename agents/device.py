"""The way to a GPU and back: page-locked memory, copies that nobody waits for one by one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["DeviceLink"]

_log = logging.getLogger("penstock")


class DeviceLink:
    """Moves the inputs of a model to its device, and its outputs back.

    On CUDA both ways are asynchronous, which takes page-locked memory on this side. Inputs that do not lie in such (see
    `page_locked`) go through a buffer of torch's that does, and that torch reuses once the copy is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_cuda = device, device.type == "cuda"

    def send(self, array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        """`array` on the device; floating-point numbers in `dtype`, which they become there.

        `array` may be written again once something that hangs on it has come back.
        """
        tensor = torch.from_numpy(array)
        if self._is_cuda and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        tensor = tensor.to(self.device, non_blocking=True)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def fetch(self, outputs: Sequence[Any]) -> list[Any]:
        """`outputs` in this process's memory, with one wait for all. What is no tensor is returned as it is."""
        if not self._is_cuda:
            return [output.cpu() if isinstance(output, torch.Tensor) else output for output in outputs]
        fetched = [self._begin_to_fetch(output) for output in outputs]
        torch.cuda.current_stream(self.device).synchronize()
        return fetched

    def _begin_to_fetch(self, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.device != self.device:
            return output
        here = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        return here.copy_(output.detach(), non_blocking=True)

    @contextmanager
    def page_locked(self, memory: npt.NDArray[np.uint8]) -> Iterator[None]:
        """Keep `memory` page-locked, so that copies to the device begin where it lies. If the driver will not, it is
        logged, and they take the way round."""
        if not self._is_cuda:
            yield
            return
        with torch.cuda.device(self.device):
            address, cudart = memory.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
            if error:
                _log.info("CUDA error %d: %d bytes of shared memory are not page-locked", error, memory.nbytes)
                self._forget_the_last_error()
        try:
            yield
        finally:
            if not error:
                with (
                    suppress(RuntimeError),
                    torch.cuda.device(self.device),
                ):  # should it have failed, all is lost anyway
                    torch.cuda.current_stream().synchronize()  # no copy may be under way
                cudart.cudaHostUnregister(address)

    def _forget_the_last_error(self) -> None:
        """CUDA keeps it, and torch would raise it in the next thing that is done."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)
