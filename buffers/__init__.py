"""Memory: named arrays, shared memory, the samples buffer, and what workers send to the main process."""

from penstock.buffers.named import NamedArrays, as_named
from penstock.buffers.object_pipe import ObjectPipe, TrajectoryRecords
from penstock.buffers.samples import AgentSamples, EnvSamples, PolicySamples, Samples
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.buffers.slots import BatchColumns, SamplesBuffer, SampleSpec

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
