"""Memory: named arrays, shared memory, the samples buffer, and what workers send to the main process."""

from penstock.buffers.named import NamedArrays, as_named
from penstock.buffers.object_pipe import ObjectPipe, TrajectoryRecords
from penstock.buffers.samples import (
    AgentSamples,
    BatchColumns,
    EnvSamples,
    PolicySamples,
    Samples,
    SamplesBuffer,
    SampleSpec,
)
from penstock.buffers.shared import ArraySpec, NamedMemory

__all__ = [
    "AgentSamples",
    "ArraySpec",
    "BatchColumns",
    "EnvSamples",
    "NamedArrays",
    "NamedMemory",
    "ObjectPipe",
    "PolicySamples",
    "SampleSpec",
    "Samples",
    "SamplesBuffer",
    "TrajectoryRecords",
    "as_named",
]
