"""Memory: named arrays, shared allocation, the samples buffer, the control block, the trajectory queue."""

from penstock.buffers.control import ControlBlock, Phase, Progress, ProgressSnapshot, StopCollecting
from penstock.buffers.named import NamedArrays, as_named
from penstock.buffers.samples import AgentSamples, BatchColumns, EnvSamples, Samples, SamplesBuffer, SampleSpec
from penstock.buffers.shared import ArraySpec, NamedMemory, SharedBlock
from penstock.buffers.trajectory_queue import ObjectPipe, RecordRings

__all__ = [
    "AgentSamples",
    "ArraySpec",
    "BatchColumns",
    "ControlBlock",
    "EnvSamples",
    "NamedArrays",
    "NamedMemory",
    "ObjectPipe",
    "Phase",
    "Progress",
    "ProgressSnapshot",
    "RecordRings",
    "SampleSpec",
    "Samples",
    "SamplesBuffer",
    "SharedBlock",
    "StopCollecting",
    "as_named",
]
