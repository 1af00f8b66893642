"""TorchAgent: building the model, feeding it, and moving its parameters between processes' copies."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock import EpsilonGreedyAgent, GpuSampler, ParallelSampler, Sampler, SerialSampler
from penstock.agents import AgentStep, TorchAgent
from penstock.buffers import NamedArrays, pickling
from penstock.errors import ConfigError

from ..models import Normed
from ..support import sampler_of

OBSERVATIONS, ACTIONS = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)


class Plain(TorchAgent):
    """Nothing but what TorchAgent itself does."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        return AgentStep(self.forward(observation, prev_action, prev_reward))


class Keeper(nn.Module):
    """Has parameters and buffers of every kind."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.BatchNorm1d(4, dtype=dtype))
        self.temperature = nn.Parameter(torch.rand((), dtype=dtype))
        self.register_buffer("seen", torch.randint(0, 100, (2,)))
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("scratch", torch.rand(2, dtype=dtype), persistent=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.body(observation) * self.temperature


def agent_of(model: Any, seed: int | None = None, observation_space: Any = OBSERVATIONS) -> Plain:
    agent = Plain(model)
    agent.initialize(observation_space, ACTIONS, seed=seed)
    return agent


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(tensors(one).items(), tensors(other).items(), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def randomize(model: nn.Module) -> None:
    """Give every parameter and buffer other values."""
    with torch.no_grad():
        for tensor in tensors(model).values():
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + torch.ones(()).to(tensor.dtype))


# ---- building the model ------------------------------------------------------------------------


def build(observation_space: Any, action_space: Any) -> nn.Module:
    return nn.Linear(observation_space.shape[0], int(action_space.n))


class Sized(nn.Linear):
    def __init__(self, action_space: spaces.Discrete, bias: bool = False) -> None:
        super().__init__(3, int(action_space.n), bias)


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (lambda: nn.Linear(3, 5), (5, 3)),
        (partial(nn.Linear, 3, 6), (6, 3)),
        (build, (2, 3)),
        (lambda observation_space: nn.Linear(observation_space.shape[0], 7), (7, 3)),
        (Sized, (2, 3)),
    ],
    ids=["lambda", "partial", "function of both spaces", "lambda of one space", "class"],
)
def test_a_factory_is_given_the_spaces_that_it_names(source: Callable[..., nn.Module], shape: tuple[int, int]) -> None:
    assert agent_of(source).model.weight.shape == shape


def test_a_module_is_used_as_it_is() -> None:
    model = nn.Linear(3, 2)
    assert agent_of(model).model is model


@pytest.mark.parametrize("model", [None, 3, "Model", {}], ids=repr)
def test_what_is_neither_module_nor_factory_is_refused_at_once(model: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"got {model!r}")):
        Plain(model)


def test_a_seed_gives_the_same_initial_weights_and_without_one_they_come_from_torchs_generator() -> None:
    models = []
    with torch.random.fork_rng(devices=[]):
        for of_torch, seed in ((1, 5), (2, 5), (1, 6), (1, None), (1, None), (2, None)):
            torch.manual_seed(of_torch)
            models.append(agent_of(Keeper, seed).model)
    for same, twin, other in (models[:3], models[3:]):
        assert_same_bits(same, twin)
        assert not torch.equal(same.body[0].weight, other.body[0].weight)


def failing() -> nn.Module:
    torch.rand(3)
    raise ZeroDivisionError


@pytest.mark.parametrize("source", [Keeper, failing])
def test_a_seeded_model_leaves_torchs_generator_untouched(source: Any) -> None:
    before = torch.get_rng_state()
    try:
        agent_of(source, seed=5)
    except ZeroDivisionError:
        pass
    assert torch.equal(torch.get_rng_state(), before)


class Lazy(nn.Module):
    """Finds out its sizes. Without `calls_all`, one layer is not called."""

    def __init__(self, calls_all: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(momentum=1.0))
        self.other = nn.LazyLinear(2)
        self.calls_all = calls_all

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        found = self.body(observation)
        return self.other(found) if self.calls_all else found


@pytest.mark.parametrize("make", [lambda: Lazy, Lazy], ids=["class", "module"])
def test_lazy_layers_get_their_sizes_and_seeded_weights_when_the_agent_is_initialized(make: Any) -> None:
    before = torch.get_rng_state()
    agents = [agent_of(make(), seed) for seed in (5, 5, 6)]
    assert torch.equal(torch.get_rng_state(), before)
    one, twin, other = (agent.model for agent in agents)
    assert_same_bits(one, twin)
    assert not torch.equal(one.body[0].weight, other.body[0].weight)
    assert one.body[0].weight.shape == (4, 3)
    assert all(module.training for module in one.modules())
    assert one.body[1].running_mean.tolist() == [0] * 4, "statistics are of observations only"
    one(torch.ones(2, 3)).sum().backward()
    assert one.body[0].weight.grad is not None
    assert_same_bits(agents[0].runtime.worker_copy().model, one)


def test_a_lazy_layer_of_which_the_size_cannot_be_known_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^other\.weight of the model has no size, since forward has not called its"):
        agent_of(partial(Lazy, calls_all=False))
    with pytest.raises(ConfigError, match=r"^body\.0\.weight .* calling the model on zeros raised AttributeError"):
        agent_of(Lazy, observation_space=spaces.Dict({"x": OBSERVATIONS}))
    joint = Plain(Lazy)
    joint.joint = True
    with pytest.raises(ConfigError, match=r"^body\.0\.weight .* the first input of a joint agent is not known"):
        joint.initialize(OBSERVATIONS, ACTIONS)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_seeded_model_leaves_the_generators_of_gpus_untouched() -> None:
    torch.rand(1, device="cuda")
    before = torch.cuda.get_rng_state()
    agent_of(Keeper, seed=5)
    assert torch.equal(torch.cuda.get_rng_state(), before)


# ---- feeding it --------------------------------------------------------------------------------


class Recorder(nn.Module):
    """Keeps what it was called with."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if dtype is not None:
            self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.calls: list[tuple[Any, ...]] = []


class OfObservation(Recorder):
    def forward(self, observation: Any, mask: Any = None) -> Any:
        self.calls.append((observation, mask))
        return observation


class OfPrevious(Recorder):
    def forward(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        self.calls.append((observation, prev_action, prev_reward))
        return observation


class OfPreviousAndState(OfPrevious):
    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any = None) -> Any:
        return super().forward(observation, prev_action, prev_reward)


INPUTS = np.ones((2, 3), np.float32), np.array([1, 0]), np.array([0.5, -2], np.float32)


def test_a_model_of_the_observation_gets_no_more() -> None:
    agent = agent_of(OfObservation)
    agent.step(*INPUTS)
    ((observation, mask),) = agent.model.calls
    assert observation.tolist() == INPUTS[0].tolist()
    assert mask is None


@pytest.mark.parametrize("model", [OfPrevious, OfPreviousAndState])
def test_a_model_of_three_inputs_or_more_gets_the_previous_action_and_reward(model: Any) -> None:
    agent = agent_of(model)
    agent.step(*INPUTS)
    (got,) = agent.model.calls
    assert [tensor.tolist() for tensor in got] == [array.tolist() for array in INPUTS]
    assert [tensor.dtype for tensor in got] == [torch.float32, torch.int64, torch.float32]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [(None, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2, (torch.bfloat16,) * 2],
    ids=str,
)
@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64])
def test_floats_are_cast_to_the_dtype_of_the_parameters(parameters: Any, expected: torch.dtype, given: Any) -> None:
    agent = agent_of(lambda: OfPrevious(parameters))
    agent.step(np.ones((2, 3), given), np.ones((2, 1), given), INPUTS[2])
    assert [tensor.dtype for tensor in agent.model.calls[0]] == [expected] * 3


@pytest.mark.parametrize("given", [np.uint8, np.int64, np.bool_])
def test_whole_numbers_stay_what_they_are(given: Any) -> None:
    agent = agent_of(lambda: OfObservation(torch.float16))
    agent.step(np.ones((2, 3), given), *INPUTS[1:])
    assert agent.model.calls[0][0].dtype == torch.from_numpy(np.ones(1, given)).dtype


def test_a_nested_observation_arrives_with_its_structure() -> None:
    agent = agent_of(lambda: OfObservation(torch.float64))
    agent.step(NamedArrays(a=INPUTS[0], b=NamedArrays(_0=INPUTS[1])), *INPUTS[1:])
    observation = agent.model.calls[0][0]
    assert observation.a.dtype == torch.float64
    assert observation.b._0.tolist() == [1, 0]


def test_the_forward_pass_builds_no_graph() -> None:
    output = agent_of(lambda: nn.Linear(3, 2)).forward(*INPUTS)
    assert not output.requires_grad
    assert output.shape == (2, 2)


def test_modes_switch_the_model_between_training_and_evaluation() -> None:
    agent = agent_of(Keeper)
    seen = []
    for mode in (agent.sample_mode, agent.train_mode, agent.eval_mode, agent.train_mode, agent.sample_mode):
        mode(0)
        seen.append((agent.model.training, agent.model.body[1].training))
        agent.model.eval()
        agent.model.body[1].train()  # as a module that is made in the first `forward` would be
    assert seen == [(False, False), (True, True), (False, False), (True, True), (False, False)]


# ---- parameters --------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def test_every_parameter_and_buffer_is_read_the_unsaved_ones_included() -> None:
    agent = agent_of(Keeper)
    read = agent.read_parameters()
    assert set(read) == set(agent.model.state_dict()) | {"scratch"}
    assert all(isinstance(array, np.ndarray) for array in read.values())
    assert read["body.0.weight"].tolist() == agent.model.body[0].weight.tolist()


def test_writing_keeps_the_tensors_that_an_optimizer_holds() -> None:
    agent, other = agent_of(Keeper, 1), agent_of(Keeper, 2)
    held = tensors(agent.model)
    agent.write_parameters(other.read_parameters())
    assert all(tensor is held[name] for name, tensor in tensors(agent.model).items())
    agent.model(torch.ones(2, 3)).sum().backward()
    assert agent.model.temperature.grad is not None


# ---- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_worker_copy_is_independent_of_the_learner_until_it_pulls(dtype: torch.dtype) -> None:
    learner = agent_of(lambda: Keeper(dtype), 1)
    at_first = agent_of(lambda: Keeper(dtype), 1)
    subscriber, worker = learner.runtime.share_memory(shared=False), learner.runtime.worker_copy()
    worker.runtime.attach(subscriber)
    assert_same_bits(worker.model, learner.model)
    randomize(learner.model)
    assert_same_bits(worker.model, at_first.model)
    worker.runtime.pull_shared_memory()
    assert_same_bits(worker.model, at_first.model)
    learner.sync_shared_memory()
    assert_same_bits(worker.model, at_first.model)
    worker.runtime.pull_shared_memory()
    assert_same_bits(worker.model, learner.model)


def test_a_worker_and_a_target_network_get_weights_that_are_computed_before_each_call() -> None:
    """torch refuses to copy those of the old weight_norm, and to pickle those of parametrizations."""
    learner, rows = agent_of(partial(Normed, 2), 1), torch.rand(2, 3, dtype=torch.float64)
    learner.eval_mode(0)
    before = learner.model(rows)
    target = copy.deepcopy(learner)
    subscriber = learner.runtime.share_memory(shared=False)
    worker = pickle.loads(pickling.dumps(learner.runtime.worker_copy()))
    worker.runtime.attach(subscriber)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(3)
    after = learner.model(rows)
    assert not torch.equal(after[0], before[0])
    learner.sync_shared_memory()
    worker.runtime.pull_shared_memory()
    for found, wanted in [(worker.model(rows), after), (target.model(rows), before)]:
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
    assert type(worker.model.heads[0]).__name__ == "ParametrizedLinear"


def test_a_subclass_may_add_to_the_copies_for_workers_and_servers() -> None:
    class WithTarget(Plain):
        def copy_for_worker(self) -> Any:
            copied: Any = super().copy_for_worker()
            copied.model = nn.Sequential(self.model)
            return copied

    learner = WithTarget(nn.Linear(3, 2))
    learner.initialize(OBSERVATIONS, ACTIONS)
    for copied in (learner.runtime.worker_copy(), learner.runtime.server_copy()):
        assert isinstance(copied.model, nn.Sequential)
        assert_same_bits(copied.model[0], learner.model)
        assert copied.model[0].weight is not learner.model.weight


def test_column_copies_share_the_workers_model() -> None:
    worker = agent_of(Keeper).runtime.worker_copy()
    copies = [worker.runtime.column_copy([np.random.default_rng(0)]) for _ in range(2)]
    assert all(twin.model is worker.model for twin in copies)


def test_tied_weights_stay_tied_in_a_worker() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 3)
            self.decode.weight = self.encode.weight

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.decode(self.encode(observation))

    learner = agent_of(Tied)
    subscriber, worker = learner.runtime.share_memory(shared=False), learner.runtime.worker_copy()
    worker.runtime.attach(subscriber)
    randomize(learner.model)
    learner.sync_shared_memory()
    worker.runtime.pull_shared_memory()
    assert worker.model.decode.weight is worker.model.encode.weight
    assert_same_bits(worker.model, learner.model)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler, GpuSampler])
def test_a_model_that_is_wrapped_after_initialize_is_refused_with_the_way_to_compile_it(cls: type[Sampler]) -> None:
    agent = EpsilonGreedyAgent(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
    wrappers: Any = (torch.compile, nn.DataParallel, lambda model: nn.Sequential(*map(torch.compile, model)))
    with sampler_of(cls) as sampler:
        sampler.initialize(agent)
        own = agent.model
        for wrap in wrappers:
            agent.model = wrap(own)
            with pytest.raises(ConfigError, match=r"Call model\.compile\(\) in place of torch\.compile"):
                agent.sync_shared_memory()
        agent.model = nn.Sequential(nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="Initialize a new sampler for a new model"):
            agent.sync_shared_memory()
        agent.model = own
        own.compile()
        agent.sync_shared_memory()
