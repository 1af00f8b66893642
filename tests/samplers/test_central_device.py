"""Central samplers with a model that is compiled, or that lies on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock import (
    CategoricalPgAgent,
    ConfigError,
    GpuSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    SerialSampler,
    WorkerError,
)
from penstock.agents.torch_agent import DeviceLink
from penstock.buffers import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.envs import CountingEnv

from ..models import Gru
from ..scale import pairs

pytestmark = pytest.mark.slow

servers = pytest.mark.parametrize("server", ["caller", "process"])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Net(nn.Module):
    """In float64: the same on every device but for the last bits. Its second output tells what ran it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(2, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, observation: torch.Tensor) -> Any:
        out = self.out(torch.tanh(self.body(observation)))
        return out, out[:, 0] + 1000 * torch.compiler.is_compiling()


def batches(sampler: Any, agent: Any) -> list[Any]:
    """Three batches with new parameters for each, and an evaluation between them."""
    found = []
    with sampler:
        sampler.initialize(agent, seed=3, bootstrap_value=True)
        for itr in range(3):
            sampler.obtain_samples(itr)
            found.append(sampler.samples_np.copy())
            sampler.evaluate_agent(itr)
            with torch.no_grad():
                next(agent.model.parameters()).add_(0.1)
            agent.sync_shared_memory()
    return found


SIZES: dict[str, Any] = {"batch_T": 6, "batch_B": 4, "eval_n_envs": 2, "eval_max_steps": 20}


def assert_same(ours: list[Any], theirs: list[Any], offset: float = 0.0) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.agent.action, other.agent.action)
        np.testing.assert_array_equal(one.env.observation, other.env.observation)
        wanted = np.float32(other.agent.agent_info.value + offset)
        np.testing.assert_allclose(one.agent.agent_info.value, wanted, rtol=1e-5, atol=1e-6)


# ---- torch.compile -------------------------------------------------------------------------


@pytest.mark.parametrize(("server", "min_ready"), pairs(["caller", "process"], [1, None]))
def test_a_compiled_model_acts_as_it_would_otherwise(server: Any, min_ready: Any) -> None:
    """Traced by torch, and run without a compiler of machine code."""
    kwargs: dict[str, Any] = {"n_workers": 2, "min_ready": min_ready, "compile_model": {"backend": "eager"}}
    found = batches(GpuSampler(CountingEnv, server=server, **SIZES, **kwargs), CategoricalPgAgent(Net))
    assert_same(found, batches(SerialSampler(CountingEnv, **SIZES), CategoricalPgAgent(Net)), offset=1000)


def test_the_learners_model_is_not_compiled() -> None:
    agent = CategoricalPgAgent(Net)
    with GpuSampler(CountingEnv, batch_T=2, batch_B=2, n_workers=1, compile_model={"backend": "eager"}) as sampler:
        sampler.initialize(agent, seed=0)
        assert type(agent.model) is Net
        assert agent.model(torch.zeros(1, 2).double())[1] < 1000


@servers
def test_a_model_that_cannot_be_compiled_is_named_before_the_first_batch(server: Any) -> None:
    class Odd(Net):
        def forward(self, observation: torch.Tensor) -> Any:
            if torch.compiler.is_compiling():
                raise NotImplementedError("not this one")
            return super().forward(observation)

    kwargs: dict[str, Any] = {"compile_model": {"backend": "eager", "fullgraph": True}, "server": server}
    with (
        GpuSampler(CountingEnv, batch_T=2, batch_B=2, n_workers=1, **kwargs) as sampler,
        pytest.raises(ConfigError if server == "caller" else WorkerError, match="the model could not be compiled: "),
    ):
        sampler.initialize(CategoricalPgAgent(Odd), seed=0)


def test_there_must_be_a_model_to_compile() -> None:
    sampler = GpuSampler(CountingEnv, batch_T=2, batch_B=2, n_workers=1, compile_model=True)
    with sampler, pytest.raises(ConfigError, match="RandomAgent has no model that could be compiled"):
        sampler.initialize(RandomAgent())


def test_arguments_of_torch_compile_are_checked() -> None:
    sampler = GpuSampler(CountingEnv, batch_T=2, batch_B=2, n_workers=1, compile_model={"speed": 9})
    with sampler, pytest.raises(ConfigError, match=r"torch.compile\(model, \*\*{'speed': 9}\) raised"):
        sampler.initialize(CategoricalPgAgent(Net))
    for odd in (None, 1, "fast", ["mode"]):
        with pytest.raises(ConfigError, match="compile_model must be True, False or arguments"):
            GpuSampler(CountingEnv, batch_T=2, batch_B=2, compile_model=odd)


# ---- the way to a GPU ----------------------------------------------------------------------


def memory() -> NamedMemory:
    spec = ArraySpec((5, 7), np.dtype(np.float64))
    return NamedMemory(NamedArrays(a=spec, b=ArraySpec((3,), np.dtype(np.int64))), shared=True, purpose="a test")


def test_all_of_a_shared_block_can_be_named() -> None:
    """As bytes, from the first array to the last."""
    block = memory()
    block.arrays.a[...] = 1.0
    block.arrays.b[...] = 255
    whole = block.whole
    assert whole.nbytes == block.nbytes
    assert whole.ctypes.data == block.arrays.a.ctypes.data
    assert whole[-24:].view(np.int64).tolist() == [255] * 3
    block.close()
    with pytest.raises(TypeError, match="private to this process"):
        _ = NamedMemory(NamedArrays(a=ArraySpec((1,), np.dtype(np.int64))), shared=False, purpose="a test").whole


def test_where_there_is_no_gpu_nothing_is_locked_and_nothing_moved() -> None:
    link, block = DeviceLink(torch.device("cpu")), memory()
    with link.page_locked(block.whole):
        sent = link.send(block.arrays.a, torch.float32)
        assert sent.dtype == torch.float32
        assert link.send(block.arrays.b, torch.float32).dtype == torch.int64
        fetched, other = link.fetch([sent, "what is no tensor"])
        assert fetched is sent
        assert other == "what is no tensor"
    block.close()


@needs_cuda
def test_what_goes_to_a_gpu_comes_back() -> None:
    link, block = DeviceLink(torch.device("cuda", 0)), memory()
    block.arrays.a[...] = np.arange(35).reshape(5, 7)
    for _ in range(2):  # locked, unlocked, and locked again
        assert not torch.from_numpy(block.whole).is_pinned()
        with link.page_locked(block.whole):
            assert torch.from_numpy(block.arrays.a).is_pinned()
            for array in (block.arrays.a, block.arrays.a[[1, 3]], block.arrays.b):
                sent = link.send(array, torch.float32)
                assert sent.device == link.device
                (fetched,) = link.fetch([sent * 2])
                assert fetched.is_pinned()
                np.testing.assert_array_equal(fetched.numpy(), array * 2)
    block.close()


@needs_cuda
def test_memory_that_cannot_be_locked_is_sent_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    link, block = DeviceLink(torch.device("cuda", 0)), memory()
    with link.page_locked(block.whole), link.page_locked(block.whole):  # the second is refused
        (fetched,) = link.fetch([link.send(block.arrays.a, torch.float32)])
        np.testing.assert_array_equal(fetched.numpy(), block.arrays.a)
    block.close()


@needs_cuda
@servers
@pytest.mark.parametrize("kwargs", [{}, {"min_ready": 1}, {"compile_model": True}], ids=str)
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_gpu_acts_as_the_cpu_does(recurrent: bool, kwargs: Any, server: Any) -> None:
    def make(device: str) -> Any:
        torch.manual_seed(0)
        model = (Gru(2, 3) if recurrent else Net()).to(device)
        return (RecurrentCategoricalPgAgent if recurrent else CategoricalPgAgent)(model)

    found = batches(GpuSampler(CountingEnv, n_workers=2, server=server, **SIZES, **kwargs), make("cuda"))
    offset = 1000 if kwargs.get("compile_model") and not recurrent else 0
    assert_same(found, batches(SerialSampler(CountingEnv, **SIZES), make("cpu")), offset)
