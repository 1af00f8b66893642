"""What tests of several folders share: small samplers, what they give, how two results compare, and waiting."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock import RandomAgent, Sampler
from penstock.buffers import NamedArrays
from penstock.envs import CountingEnv
from penstock.testing import Fault, FaultyEnv

#: A batch as a copy, or None for an evaluation; and the attributes of the infos of its trajectories.
Batch = tuple[Any, list[dict[str, Any]]]

BOUND = 30.0  # for what must happen at some time
PROGRAMS = Path(__file__).parent / "programs"


# ---- samplers ------------------------------------------------------------------------------


def sampler_of(cls: type[Sampler], env_fn: Any = CountingEnv, **kwargs: Any) -> Any:
    """A sampler of 4 environments in 2 workers. `kwargs` change that."""
    sizes: dict[str, Any] = {"batch_T": 8, "batch_B": 4, "n_workers": 2, "max_decorrelation_steps": 0}
    return cls(env_fn, **{**sizes, **kwargs})


def crashing_env(where: str = "step", how: str = "raise", at: int = 1, spare_pid: int | None = None) -> Any:
    """A `CountingEnv` that fails at call `at` of `where`; never where this is "never"."""
    return CountingEnv() if where == "never" else FaultyEnv(CountingEnv(), Fault(how, at, spare_pid=spare_pid), where)


def collect(sampler: Any, n: int | range, evaluate: Container[int] = ()) -> list[Batch]:
    """`n` batches. After those in `evaluate` follow evaluations."""
    found: list[Batch] = []
    for itr in range(n) if isinstance(n, int) else n:
        _, infos = sampler.obtain_samples(itr)
        found.append(kept(sampler, infos))
        if itr in evaluate:
            found.append((None, [vars(info) for info in sampler.evaluate_agent(itr)]))
    return found


def kept(sampler: Any, infos: Any) -> Batch:
    """The batch that the sampler has now."""
    return sampler.samples_np.copy(), [vars(info) for info in infos]


def run(
    cls: type[Sampler],
    env_fn: Any,
    agent: Any = None,
    n: int = 5,
    evaluate: Container[int] = (),
    initialize: dict[str, Any] | None = None,
    **sizes: Any,
) -> list[Batch]:
    """What `collect` gives with a new sampler."""
    with cls(env_fn, **sizes) as sampler:
        sampler.initialize(agent or RandomAgent(), **{"seed": 7, "bootstrap_value": True, **(initialize or {})})
        return collect(sampler, n, evaluate)


# ---- comparisons ---------------------------------------------------------------------------

#: What a model has computed. The last bit of a matrix product may hang on the number of its rows.
OF_MODELS = r"\.agent\.(agent_info|bootstrap_value|final_value)"


def assert_same(
    found: Any, wanted: Any, where: str = "", *, rtol: float = 0.0, atol: float = 0.0, rough: str = OF_MODELS
) -> None:
    """The same structure, dtypes, shapes, and values to the last bit. `rtol` and `atol` are for the leaves whose names
    the pattern `rough` finds."""
    ours, theirs = dict(_parts(found, where)), dict(_parts(wanted, where))
    assert list(ours) == list(theirs)
    for (name, a), b in zip(ours.items(), theirs.values(), strict=True):
        if not isinstance(b, np.ndarray):  # a number may be of numpy's kind here and of Python's there
            assert np.asarray(a).dtype.kind == np.asarray(b).dtype.kind, name
            np.testing.assert_equal(a, b, err_msg=name)
            continue
        assert a.dtype == b.dtype, name
        if (rtol or atol) and re.search(rough, name):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name, strict=True)
            assert a.tobytes() == b.tobytes(), name


def _parts(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves, and of what is between them the type and the length."""
    if isinstance(tree, np.ndarray) and tree.dtype == object:
        tree = tree.tolist()
    if isinstance(tree, NamedArrays):
        parts = [(f".{part}", leaf) for part, leaf in tree.leaves()]
    elif isinstance(tree, Mapping):
        parts = [(f"[{key!r}]", tree[key]) for key in sorted(tree, key=repr)]
    elif isinstance(tree, tuple | list):
        yield f"{name} is a {type(tree).__name__} of {len(tree)}", True
        parts = [(f"[{k}]", part) for k, part in enumerate(tree)]
    else:
        yield name, tree.numpy() if hasattr(tree, "detach") else tree
        return
    for part, leaf in parts:
        yield from _parts(leaf, name + part)


def batches_of(found: list[Batch], columns: Any = slice(None)) -> list[Any]:
    """The batches without the rest, and of these only some columns."""
    return [batch[:, columns] for batch, _ in found if batch is not None]


def leaves(tree: Any) -> list[Any]:
    """The arrays of `tree`, which may be a single one."""
    return [leaf for _, leaf in tree.leaves()] if isinstance(tree, NamedArrays) else [tree]


# ---- waiting -------------------------------------------------------------------------------


def until(condition: Callable[[], Any], what: str = "it", seconds: float = BOUND) -> Any:
    """Poll for a fact; returns it."""
    deadline = time.monotonic() + seconds
    while not (fact := condition()):
        assert time.monotonic() < deadline, f"{what} has not come about in {seconds:g} s"
        time.sleep(0.001)
    return fact


class Held(CountingEnv):
    """Reads a pipe for leave to step."""

    def __init__(self, gate: int) -> None:
        super().__init__()
        self.gate = gate

    def step(self, action: Any) -> Any:
        os.read(self.gate, 1)
        return super().step(action)
