"""Samplers with a model that is compiled, or that lies on a GPU. `make gpu` runs those that need one."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RecurrentCategoricalPgAgent,
    SerialSampler,
    WorkerDiedError,
    WorkerError,
)
from penstock.agents.torch_agent import DeviceLink
from penstock.buffers import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.envs import CountingEnv
from penstock.envs.toy import ScriptedGame
from penstock.learning import gae

from ..models import Gru
from ..scale import pairs, scaled
from ..support import until
from .started import check_refused, started

pytestmark = pytest.mark.slow

compiling = pytest.mark.xdist_group("compiling")  # one process imports what torch needs for it, in 2 s
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="session")
def gpu() -> None:
    """Start CUDA before the first test: what it opens stays open, and a test must not count it as left over."""
    ones = torch.ones(8, 8, device=DEVICE)
    assert (ones @ ones).cpu().sum() == 512
    assert torch.empty(1, pin_memory=True).is_pinned()
    with suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # torch's compiler uses it, and its thread would stay


@pytest.fixture
def nothing_left_on_the_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of torch
        from torch._inductor import config
    monkeypatch.setattr(config, "compile_threads", 1)  # the processes of torch's compiler would stay
    before = allocated()
    yield
    assert allocated() <= before, "what was shut down has left tensors on the GPU"


def allocated() -> int:
    gc.collect()
    torch.compiler.reset()  # the memory of graphs
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def needs_cuda(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (
        pytest.mark.gpu,
        pytest.mark.usefixtures("nothing_left_on_the_gpu"),
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ):
        test = mark(test)
    return test


# torch's compiler warns of torch itself, and of a first graph that it records empty.
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The CUDA Graph is empty:UserWarning")


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


def assert_same_actions_and_values(ours: list[Any], theirs: list[Any], offset: float = 0.0) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.agent.action, other.agent.action)
        np.testing.assert_array_equal(one.env.observation, other.env.observation)
        wanted = np.float32(other.agent.agent_info.value + offset)
        np.testing.assert_allclose(one.agent.agent_info.value, wanted, rtol=1e-5, atol=1e-6)


# ---- torch.compile -------------------------------------------------------------------------


@compiling
@pytest.mark.parametrize(("server", "min_ready"), pairs(["caller", "process"], [1, None]))
def test_a_compiled_model_acts_as_it_would_otherwise(server: Any, min_ready: Any) -> None:
    """Traced by torch, and run without a compiler of machine code. The learner's model is not compiled."""
    kwargs: dict[str, Any] = {"n_workers": 2, "min_ready": min_ready, "compile_model": {"backend": "eager"}}
    # A fork has already what torch imports for a compiled model. That takes 2 s in a new process.
    kwargs["start_method"] = scaled("forkserver", "fork")
    agent = CategoricalPgAgent(Net)
    found = batches(GpuSampler(CountingEnv, server=server, **SIZES, **kwargs), agent)
    assert_same_actions_and_values(
        found, batches(SerialSampler(CountingEnv, **SIZES), CategoricalPgAgent(Net)), offset=1000
    )
    assert type(agent.model) is Net
    assert agent.model(torch.zeros(1, 2).double())[1] < 1000


@compiling
@pytest.mark.parametrize("server", scaled(["caller", "process"], ["caller"]))
def test_a_model_that_cannot_be_compiled_is_named_before_the_first_batch(server: Any) -> None:
    class Odd(Net):
        def forward(self, observation: torch.Tensor) -> Any:
            if torch.compiler.is_compiling():
                raise NotImplementedError("not this one")
            return super().forward(observation)

    options: dict[str, Any] = {"compile_model": {"backend": "eager", "fullgraph": True}, "server": server}
    options |= {"cls": GpuSampler, "error": ConfigError if server == "caller" else WorkerError}
    check_refused(CountingEnv, "the model could not be compiled: ", CategoricalPgAgent(Odd), **options)


def test_arguments_of_torch_compile_are_checked() -> None:
    with_model, options = CategoricalPgAgent(Net), {"cls": GpuSampler, "compile_model": {"speed": 9}}
    check_refused(CountingEnv, "RandomAgent has no model that could be compiled", **options)
    check_refused(CountingEnv, r"torch.compile\(model, \*\*{'speed': 9}\) raised", with_model, **options)
    for odd in (None, 1, "fast", ["mode"]):
        options["compile_model"] = odd
        check_refused(CountingEnv, "compile_model must be True, False or arguments", with_model, **options)


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


# ---- with a GPU, each way to act and to train ----------------------------------------------

SAMPLERS: list[tuple[Any, dict[str, Any]]] = [
    (SerialSampler, {}),
    (ParallelSampler, {}),
    (AlternatingSampler, {}),
    *((GpuSampler, {"server": "process", **options}) for options in ({}, {"min_ready": 1}, {"compile_model": True})),
    *((GpuSampler, options) for options in ({}, {"min_ready": 1}, {"compile_model": True})),
    # It records CUDA graphs, which write each result where they wrote the last one.
    (GpuSampler, {"compile_model": {"mode": "reduce-overhead"}}),
]


def agent(device: Any, recurrent: bool = False, is_moved: bool = False) -> Any:
    """Its model is sent to the device by the agent, or already there."""
    torch.manual_seed(0)
    model, cls = (Gru(2, 3), RecurrentCategoricalPgAgent) if recurrent else (Net(), CategoricalPgAgent)
    return cls(model.to(device)) if is_moved else cls(model, device=device)


def begin(cls: Any, agent: Any, env_fn: Any = CountingEnv, **options: Any) -> Any:
    return started(env_fn, agent, cls, **{"batch_T": 6, "batch_B": 4, "n_workers": 2, "seed": 3, **options})


@needs_cuda
@compiles
@pytest.mark.parametrize(("recurrent", "is_moved"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("cls", "options"), SAMPLERS, ids=str)
def test_each_sampler_collects_what_it_collects_without_a_gpu(
    cls: Any, options: dict[str, Any], recurrent: bool, is_moved: bool
) -> None:
    found = batches(cls(CountingEnv, n_workers=2, **SIZES, **options), agent("cuda", recurrent, is_moved))
    offset = 1000 if "compile_model" in options and not recurrent else 0
    assert_same_actions_and_values(found, batches(SerialSampler(CountingEnv, **SIZES), agent(None, recurrent)), offset)


@needs_cuda
@pytest.mark.parametrize("server", [None, "process"])
def test_an_asynchronous_sampler(server: Any) -> None:
    """It collects batches while the learner changes the parameters."""
    learner = agent("cuda")
    with begin(AsyncSampler, learner, server=server) as sampler:
        for itr in range(6):
            samples, _ = sampler.obtain_samples(itr)
            assert samples.agent.agent_info.value.abs().sum() > 0
            with torch.no_grad():
                next(learner.model.parameters()).add_(0.1)
            learner.sync_shared_memory()


@needs_cuda
def test_a_batch_moves_to_the_gpu_and_is_evaluated_there_as_on_a_cpu() -> None:
    there, here = agent("cuda"), agent(None)
    options = {"bootstrap_value": True}
    with begin(SerialSampler, there, **options) as sampler, begin(SerialSampler, here, **options) as other:
        samples, _ = sampler.obtain_samples(0)
        others, _ = other.obtain_samples(0)
        advantage, value = gae(samples, discount=0.9, lambda_=0.9)
        on_gpu = samples.with_targets(advantage=advantage, value=value).to("cuda")
        assert on_gpu.env.observation.device == DEVICE
        assert on_gpu.targets.advantage.device == DEVICE
        found, wanted = there.evaluate(on_gpu), here.evaluate(others)
        assert found.log_prob.device == DEVICE
        np.testing.assert_allclose(found.log_prob.detach().cpu(), wanted.log_prob.detach(), rtol=1e-5)
        parts = list(on_gpu.minibatches(3))
        assert all(part.env.observation.device == DEVICE for part in parts)
        there.evaluate(parts[0]).log_prob.mean().backward()
        assert all(p.grad is not None for p in there.model.body.parameters())
        # numpy's and torch's targets agree on the device, too
        there_too = gae(samples.to("cuda"), discount=0.9, lambda_=0.9)
        np.testing.assert_allclose(there_too[0].cpu(), advantage, rtol=1e-5, atol=1e-6)


@needs_cuda
def test_the_memory_of_batches_is_page_locked_until_the_end() -> None:
    """So that `samples.to("cuda")` copies at full speed. The batch stays readable afterwards."""
    with begin(ParallelSampler, agent("cuda")) as sampler:
        samples, _ = sampler.obtain_samples(0)
        assert samples.env.observation.is_pinned()
        wanted = samples.to("cuda").env.observation.cpu()
    assert not torch.from_numpy(sampler.samples_np.env.observation).is_pinned()
    assert torch.equal(samples.env.observation, wanted)


@needs_cuda
def test_a_run_is_saved_and_resumed(tmp_path: Path) -> None:
    first = agent("cuda")
    with begin(GpuSampler, first) as sampler:
        sampler.obtain_samples(0)
        torch.save(first.state_dict(), tmp_path / "agent.pt")
    second = agent("cuda")
    with torch.no_grad():
        for parameter in second._model_source.parameters():
            parameter.zero_()
    with begin(GpuSampler, second) as sampler:
        second.load_state_dict(torch.load(tmp_path / "agent.pt", map_location="cpu"))
        samples, _ = sampler.obtain_samples(0)
        assert samples.agent.agent_info.value.abs().sum() > 0
    assert all(p.device == DEVICE for p in second.model.parameters())


@needs_cuda
def test_bfloat16_parameters() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(2, 4).to(torch.bfloat16)

        def forward(self, observation: torch.Tensor) -> Any:
            out = self.out(observation)
            return out[:, :3], out[:, 3]

    learner = CategoricalPgAgent(Small, device="cuda")
    with begin(GpuSampler, learner, server="process") as sampler:
        samples, _ = sampler.obtain_samples(0)
        assert samples.agent.agent_info.value.dtype == torch.float32
        again = learner.evaluate(samples.to("cuda")).value.float().cpu()
        np.testing.assert_allclose(again.detach(), samples.agent.agent_info.value, rtol=1e-2, atol=1e-2)


@needs_cuda
def test_a_worker_is_killed_and_the_batch_is_completed() -> None:
    with begin(GpuSampler, agent("cuda"), on_worker_failure="restart") as sampler:
        sampler.obtain_samples(0)
        os.kill(sampler.worker_pids[0], signal.SIGKILL)
        for itr in range(1, 4):
            sampler.obtain_samples(itr)
        assert sampler.stats().restarts == 1


@needs_cuda
@pytest.mark.parametrize("cls", [GpuSampler, AsyncSampler])
def test_the_server_is_killed(cls: Any) -> None:
    with begin(cls, agent("cuda"), server="process") as sampler:
        sampler.obtain_samples(0)
        server = psutil.Process(sampler.worker_pids[-1])
        assert uses_the_gpu(server.pid)
        server.kill()
        with pytest.raises(WorkerDiedError, match=r"inference server.*SIGKILL"):
            for itr in range(1, 1000):
                sampler.obtain_samples(itr)
    until(lambda: not server.is_running(), "the end of the server", 5.0)


def uses_the_gpu(pid: int) -> bool:
    return any("/dev/nvidia" in os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())


@needs_cuda
@pytest.mark.parametrize("cls", [GpuSampler, ParallelSampler])
def test_no_worker_uses_the_gpu(cls: Any) -> None:
    """Each process that does takes hundreds of MB there."""
    with begin(cls, agent("cuda")) as sampler:
        sampler.obtain_samples(0)
        assert not [pid for pid in sampler.worker_pids if uses_the_gpu(pid)]


@needs_cuda
def test_an_error_on_the_gpu_is_named() -> None:
    class Large(Net):
        def forward(self, observation: torch.Tensor) -> Any:
            if observation.is_cuda:
                torch.empty(1 << 50, dtype=torch.uint8, device=observation.device)
            return super().forward(observation)

    with (
        pytest.raises((ConfigError, WorkerError), match="out of memory"),
        begin(GpuSampler, CategoricalPgAgent(Large, device="cuda")) as sampler,
    ):
        sampler.obtain_samples(0)


@needs_cuda
def test_fork_is_refused_once_the_gpu_is_in_use() -> None:
    message = 'start_method="fork" is not possible once CUDA is initialized'
    check_refused(CountingEnv, message, cls=ParallelSampler, start_method="fork")


@needs_cuda
def test_several_agents_of_a_game_act_on_the_gpu() -> None:
    """Agents die, join and leave, so that the server acts for some of the columns only."""

    def found(cls: Any, device: Any) -> Any:
        learner = CategoricalPgAgent(Heads, device=device)
        with begin(cls, learner, ScriptedGame, env_kwargs={"k": 3}, bootstrap_value=True) as sampler:
            return [(sampler.obtain_samples(itr), sampler.samples_np.copy())[1] for itr in range(3)]

    assert_same_actions_and_values(found(GpuSampler, "cuda"), found(SerialSampler, None))


class Heads(Net):
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(observation_space.shape[0], 8), nn.Linear(8, int(action_space.n))
        self.double()
