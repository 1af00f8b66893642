"""inference="numpy" and "traced" compute what the model computes, or refuse the model and name the layer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from penstock.agents import (
    CategoricalPgAgent,
    DeterministicPgAgent,
    EpsilonGreedyAgent,
    GaussianPgAgent,
    RecurrentCategoricalPgAgent,
    RecurrentGaussianPgAgent,
    SquashedGaussianAgent,
)
from penstock.agents.inference import TracedModel
from penstock.agents.numpy_model import TILE, NumpyModel
from penstock.buffers import NamedArrays
from penstock.errors import ConfigError

from ..models import CartPoleNet, acting, of_columns
from ..scale import examples

FAST = ("traced", "numpy")
ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "tanh": lambda n: nn.Tanh(),
    "relu": lambda n: nn.ReLU(),
    "relu in place": lambda n: nn.ReLU(inplace=True),
    "sigmoid": lambda n: nn.Sigmoid(),
    "elu": lambda n: nn.ELU(0.7),
    "gelu": lambda n: nn.GELU(),
    "norm": nn.LayerNorm,
    "norm without weights": lambda n: nn.LayerNorm(n, elementwise_affine=False),
    "identity": lambda n: nn.Identity(),
    "dropout": lambda n: nn.Dropout(0.5),
    "flatten": lambda n: nn.Flatten(),
}


def outputs_of(kind: str, model: nn.Module, *inputs: Any) -> Any:
    """The outputs of a fast model for numpy inputs, as arrays."""
    if kind == "numpy":
        return NumpyModel(model)(len(inputs[0]), *inputs)
    with torch.inference_mode():
        return plain(TracedModel(model)(*map(torch.from_numpy, inputs)))


def plain(output: Any) -> Any:
    return tuple(map(plain, output)) if isinstance(output, tuple) else output.detach().numpy()


def assert_equals_torch(kind: str, model: nn.Module, *inputs: Any, tolerance: float = 1e-5) -> None:
    model.eval()
    with torch.inference_mode():
        expected = plain(model(*map(torch.from_numpy, inputs)))
    found = outputs_of(kind, model, *inputs)
    assert isinstance(found, tuple) == isinstance(expected, tuple)
    for ours, wanted in zip(*((x,) if isinstance(x, np.ndarray) else x for x in (found, expected)), strict=True):
        assert ours.shape == wanted.shape
        assert ours.dtype == wanted.dtype
        np.testing.assert_allclose(ours, wanted, rtol=tolerance, atol=tolerance * max(1.0, np.abs(wanted).max()))


def observations(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(dtype)


# ---- the same numbers --------------------------------------------------------------------------


@st.composite
def chains(draw: st.DrawFn) -> nn.Module:
    """A chain of layers: nested at random, in either dtype."""
    width, layers = 3, []
    torch.manual_seed(draw(st.integers(0, 2**31)))
    for _ in range(draw(st.integers(1, 4))):
        new = draw(st.integers(1, 40))
        part = [nn.Linear(width, new, bias=draw(st.booleans()))]
        # A single number is constant after LayerNorm: only rounding would be left of it.
        names = [name for name in ACTIVATIONS if new > 2 or "norm" not in name]
        part += [ACTIVATIONS[name](new) for name in draw(st.lists(st.sampled_from(names), max_size=2))]
        layers += [nn.Sequential(*part)] if draw(st.booleans()) else part
        width = new
    return nn.Sequential(*layers).to(draw(st.sampled_from([torch.float32, torch.float64])))


@pytest.mark.parametrize("kind", FAST)
@examples(20, 40)
@given(model=chains(), rows=st.integers(1, 17), seed=st.integers(0, 2**32))
def test_random_chains_compute_what_torch_computes(kind: str, model: nn.Module, rows: int, seed: int) -> None:
    dtype = next(model.parameters()).detach().numpy().dtype
    with torch.random.fork_rng(devices=[]):
        assert_equals_torch(kind, model, observations(rows, 3, seed=seed, dtype=dtype))


class Outputs(nn.Module):
    """Linear outputs of these sizes; 0 is a value `[B]`. `models.Net` cannot be traced."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.ReLU())
        self.heads, self.sizes = nn.ModuleList(nn.Linear(16, max(1, n)) for n in sizes), sizes

    def forward(self, observation: Any) -> Any:
        x = self.body(observation)
        out = [head(x) if n else head(x).squeeze(-1) for n, head in zip(self.sizes, self.heads, strict=True)]
        return tuple(out) if len(out) > 1 else out[0]


TwoHeads = partial(Outputs, 5, 0)


class Functional(nn.Module):
    """The functional and method forms of everything, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 6), nn.Linear(6, 6)
        self.log_std = nn.Parameter(torch.full((6,), -0.5))

    def forward(self, observation: Any) -> Any:
        x = self.one(torch.flatten(observation.float(), 1))
        x = x + 0.5 * F.elu(F.linear(torch.tanh(x), bias=self.two.bias, weight=self.two.weight), alpha=0.3)
        x = F.layer_norm(F.gelu(x), (6,)) / 2 - torch.sigmoid(x).relu()
        x = torch.cat([x, F.relu(x).tanh().sigmoid()], dim=-1)[:, 3:9].clamp(min=-1, max=0.9)
        return (
            x,
            self.log_std.clamp(min=-0.4),
            self.log_std.expand_as(x),
            torch.clamp(x.exp(), max=2.0)[..., :1].squeeze(dim=1),
        )


class WithPrevious(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return self.layer(torch.cat([observation, prev_action], 1))


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("model", [TwoHeads, Functional])
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_models_with_several_outputs_compute_what_torch_computes(kind: str, model: Any, rows: int) -> None:
    with torch.random.fork_rng(devices=[]):
        assert_equals_torch(kind, model(), observations(rows, 3))


@pytest.mark.parametrize("kind", FAST)
def test_the_previous_action_is_an_input_too(kind: str) -> None:
    assert_equals_torch(kind, WithPrevious(), observations(4, 3), observations(4, 2, seed=1), observations(4))


def test_fields_of_a_dict_space_are_found() -> None:
    model = Of(lambda x: torch.cat([x["body"].position, torch.flatten(x.camera, 1)], dim=1))
    position, camera = observations(5, 2), observations(5, 2, 3)
    tree = NamedArrays(body=NamedArrays(position=position), camera=camera, unused=np.zeros((5, 9)))
    np.testing.assert_array_equal(NumpyModel(model)(5, tree), model(tree.torch()).numpy())


def test_inputs_of_another_dtype_are_converted() -> None:
    model, pixels = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    with torch.inference_mode():
        expected = model(torch.from_numpy(pixels).float()).numpy()
    np.testing.assert_allclose(NumpyModel(model)(2, pixels), expected, rtol=1e-5, atol=1e-5)


def test_outputs_are_the_callers_to_keep() -> None:
    fast = NumpyModel(TwoHeads())
    first = fast(4, observations(4, 3))
    kept = [part.copy() for part in first]
    fast(4, observations(4, 3, seed=1))
    for part, before in zip(first, kept, strict=True):
        np.testing.assert_array_equal(part, before)


def test_many_numbers_of_rows_can_be_asked_for() -> None:
    model = TwoHeads()
    fast, rows = NumpyModel(model), observations(200, 3)
    whole = fast(200, rows)[0]
    for n in (*range(1, 200), 1):
        np.testing.assert_allclose(fast(n, rows[:n])[0], whole[:n], atol=1e-6)
    assert len(fast._programs) <= 32, "each keeps memory"


def rounds_alike(*sizes: tuple[int, int]) -> bool:
    """Whether this BLAS computes every row of a product of TILE rows in the same way."""
    rng = np.random.default_rng(0)
    for n_inputs, n_outputs in sizes:
        matrix, rows = (rng.normal(size=size).astype(np.float32) for size in ((n_inputs, n_outputs), (TILE, n_inputs)))
        for k in range(1, TILE):
            if not np.array_equal(np.matmul(np.roll(rows, k, 0), matrix), np.roll(np.matmul(rows, matrix), k, 0)):
                return False
    return True


def test_a_row_has_the_same_bits_among_any_number_of_rows() -> None:
    if not rounds_alike((4, 64), (64, 64), (64, 3)):
        pytest.skip("this BLAS rounds the rows of one product in different ways")
    fast, rows = NumpyModel(CartPoleNet()), observations(64, 4)
    whole = fast(64, rows)
    for n in (*range(1, 34), 63):
        for first in (0, 1):
            own = slice(first, first + n)
            for part, all_rows in zip(fast(n, rows[own]), whole, strict=True):
                np.testing.assert_array_equal(part, all_rows[own])


# ---- weights that change -----------------------------------------------------------------------

OBSERVATIONS, ACTIONS = spaces.Box(-1, 1, (3,)), spaces.Discrete(5)


def worker_copy(agent: Any) -> Any:
    if not hasattr(agent, "observation_space"):
        return acting(agent, OBSERVATIONS, ACTIONS, range(4))
    return of_columns(agent.runtime.worker_copy(), range(4))


def inputs(seed: int = 0) -> tuple[Any, Any, Any]:
    return observations(4, 3, seed=seed), np.zeros(4, np.int64), np.zeros(4, np.float32)


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("pickled", [False, True])
def test_weights_follow_every_publication(kind: Any, pickled: bool) -> None:
    agent = CategoricalPgAgent(TwoHeads, inference=kind)
    worker = worker_copy(agent)
    source = agent.runtime.share_memory(shared=False)
    if pickled:
        worker = pickle.loads(pickle.dumps(worker))
    worker.runtime.attach(source)
    for change in (1.0, -0.3):
        before = worker.value(*inputs())
        with torch.no_grad():
            for parameter in agent.model.parameters():
                parameter.add_(change)
        np.testing.assert_array_equal(worker.value(*inputs()), before)
        agent.sync_shared_memory()
        worker.runtime.pull_shared_memory()
        expected = agent.value(*inputs())  # the learner's agent uses torch
        np.testing.assert_allclose(worker.value(*inputs()), expected, rtol=1e-5, atol=1e-5)
    assert agent.model.training
    agent.runtime.unshare_memory(source)


# ---- the agents --------------------------------------------------------------------------------


BOX = spaces.Box(-1, 1, (2,))
STOCK: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "categorical": (ACTIONS, lambda kind: CategoricalPgAgent(TwoHeads, record_distribution=True, inference=kind)),
    "multi-discrete": (spaces.MultiDiscrete([2, 3]), lambda kind: CategoricalPgAgent(TwoHeads, inference=kind)),
    "gaussian": (BOX, lambda kind: GaussianPgAgent(lambda: Outputs(2, 0), inference=kind)),
    "gaussian with log_std": (BOX, lambda kind: GaussianPgAgent(lambda: Outputs(2, 2, 1), inference=kind)),
    "squashed": (BOX, lambda kind: SquashedGaussianAgent(lambda: Outputs(2, 2), inference=kind)),
    "deterministic": (BOX, lambda kind: DeterministicPgAgent(lambda: Outputs(2), squash=True, inference=kind)),
    "epsilon-greedy": (ACTIONS, lambda kind: EpsilonGreedyAgent(lambda: Outputs(5), inference=kind)),
}


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("case", STOCK)
def test_every_agent_acts_and_reports_as_with_torch(case: str, kind: str) -> None:
    action_space, make = STOCK[case]

    def steps(inference: str) -> list[Any]:
        agent = make(inference)
        agent.initialize(OBSERVATIONS, action_space, seed=3)
        worker = worker_copy(agent)
        worker.sample_mode(0)
        found = [worker.step(*inputs(seed)) for seed in range(3)]
        worker.eval_mode(0)
        return [*found, worker.step(*inputs(9))]

    for ours, wanted in zip(steps(kind), steps("torch"), strict=True):
        np.testing.assert_allclose(ours.action, wanted.action, rtol=1e-5, atol=1e-5)
        assert ours.agent_info.keys() == wanted.agent_info.keys()
        for (_, left), (_, right) in zip(ours.agent_info.leaves(), wanted.agent_info.leaves(), strict=True):
            assert left.dtype == right.dtype
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("agent", [RecurrentCategoricalPgAgent, RecurrentGaussianPgAgent])
@pytest.mark.parametrize("kind", FAST)
def test_recurrent_agents_refuse_it(agent: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f'{agent.__name__} needs inference="torch", got "{kind}"'):
        agent(TwoHeads, inference=kind)


@pytest.mark.parametrize("value", ["jit", None, 3])
def test_another_choice_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="inference must be one of torch, traced, numpy"):
        CategoricalPgAgent(TwoHeads, inference=value)


# ---- models that are refused -------------------------------------------------------------------


class Deep(nn.Module):
    """A layer below other layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.Sequential(layer))

    def forward(self, observation: Any) -> Any:
        return self.encoder(observation)


class Of(nn.Module):
    """A function of the observation."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, observation: Any) -> Any:
        return self.function(observation)


CUMULATIVE = Of(lambda observation: observation.cumsum(-1))


def hooked() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            Of(lambda x: x if x.sum() > 0 else -x),
            r"cannot run layer 'encoder\.1\.0', an? Of: tracing its forward raised TraceError",
        ),
        (hooked(), r"cannot run layer 'encoder\.1\.0', a Linear: it has forward hooks"),
    ],
    ids=["control flow", "hooks"],
)
def test_what_cannot_be_traced_is_refused_by_name(kind: Any, layer: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=f'inference="{kind}" {message}.*Use inference="torch" for this model'):
        worker_copy(CategoricalPgAgent(Deep(layer), inference=kind))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Softplus(), r"layer 'encoder\.1\.0', a Softplus: there is no numpy version"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), r"layer 'encoder\.1\.0', a ParametrizedLinear"),
        (CUMULATIVE, r"'cumsum' in layer 'encoder\.1\.0', an? Of: there is no numpy version"),
        (Of(torch.linalg.vector_norm), r"'linalg_vector_norm' in layer 'encoder\.1\.0', an? Of"),
        (Of(lambda x: x[0]), r"'getitem' in layer 'encoder\.1\.0', an? Of: an index must keep the batch dimension"),
        (
            Of(lambda x: x[:, [0, 2, 1]]),
            r"'getitem' in layer 'encoder\.1\.0', an? Of: an index must consist of integers and slices",
        ),
        (nn.GELU("tanh"), r"'gelu' in layer 'encoder\.1\.0', a GELU: approximate='tanh' has no numpy version"),
        (nn.Flatten(0), r"'flatten' in layer 'encoder\.1\.0', a Flatten: it would flatten the batch dimension"),
        (nn.Linear(3, 3, dtype=torch.bfloat16), r"the parameter encoder\.1\.0\.weight: it has dtype torch.bfloat16"),
        (Of(lambda x: {"logits": x}), r"the model: it must return a tensor or a tuple of tensors"),
        (Of(lambda x: (x, (x, x))), r"the model: it must return a tensor or a tuple of tensors"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_numpy_refuses_what_it_does_not_know_by_name(layer: nn.Module, message: str) -> None:
    use = 'Use inference="traced" or "torch" for this model'
    with pytest.raises(ConfigError, match=f'inference="numpy" cannot run {message}.*{use}$'):
        NumpyModel(Deep(layer).eval())(4, observations(4, 3))


@pytest.mark.parametrize("layer", [nn.Softplus(), CUMULATIVE, nn.Sequential(nn.Conv1d(1, 1, 1))], ids=["a", "b", "c"])
def test_traced_runs_layers_that_it_does_not_know(layer: nn.Module) -> None:
    rows = observations(4, 1, 3) if isinstance(layer, nn.Sequential) else observations(4, 3)
    assert_equals_torch("traced", Deep(layer), rows)


@pytest.mark.parametrize("kind", FAST)
def test_a_server_refuses_a_model_on_another_device(kind: Any) -> None:
    agent = CategoricalPgAgent(lambda: TwoHeads().to("meta"), inference=kind)
    agent.initialize(OBSERVATIONS, ACTIONS)
    with pytest.raises(ConfigError, match=f'inference="{kind}" is for models on the CPU, the model is on meta'):
        agent.runtime.server_copy()
