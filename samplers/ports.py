"""A worker's connection to the inference server, where workers hold no agent."""

from __future__ import annotations

from typing import Any

from penstock.buffers.step_buffer import StepBuffer
from penstock.collectors.central import Question
from penstock.workers.control import Phase, Progress
from penstock.workers.gates import Gate

__all__ = ["WorkerPort"]


class WorkerPort:
    """Asks through the worker's gate about its columns of a step buffer."""

    def __init__(self, gate: Gate, progress: Progress, main_process: Any, steps: StepBuffer, columns: range) -> None:
        self._gate, self._progress, self._main_process = gate, progress, main_process
        self.row = steps.columns(columns)

    def ask(self, question: Question) -> None:
        """Ask, and wait for the answer. Raises `StopCollecting` once the sampler is shutting down."""
        self._gate.ask(self._progress, int(question), self._main_process)
        self._progress.enter(Phase.ACTING)
