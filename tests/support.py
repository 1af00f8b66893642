"""What tests of several folders share: small samplers, what they give, how two results compare, and waiting."""

from __future__ import annotations

import inspect
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv

from penstock import RandomAgent, Sampler, TrajInfo
from penstock.buffers import NamedArrays, memory_limits
from penstock.envs import CountingEnv
from penstock.envs.seeding import ColumnStreams, Purpose
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
        found.append(kept(*sampler.obtain_samples(itr)))
        if itr in evaluate:
            found.append((None, figures_of(sampler.evaluate_agent(itr))))
    return found


def kept(samples: Any, infos: Any) -> Batch:
    """What `obtain_samples` has returned, as a copy that stays. Of several policies it is one tree. The batch itself
    is defaced: no later one may depend on it."""
    if not hasattr(samples, "env"):
        found = NamedArrays({name: own.copy().numpy() for name, own in samples.items()})
    else:
        found = samples.copy().numpy()
    deface(samples)
    return found, figures_of(infos)


def deface(samples: Any) -> None:
    """Write into every field of a batch, as a learner may."""
    for _, leaf in samples.leaves():
        array = np.asarray(leaf)
        if array.flags.writeable:
            array[...] = ~array if array.dtype == np.bool_ else 77 if array.dtype.kind in "iu" else -1e4


def figures_of(infos: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(info).items() if name[0] != "_"} for info in infos]


#: The names of the options that belong to `initialize`.
AT_START = set(inspect.signature(Sampler.initialize).parameters) - {"self", "agent"}
#: For `collect_with`: evaluations between batches.
EVALUATING: dict[str, Any] = {"evaluate": (1, 3), "eval_n_envs": 3, "eval_max_steps": 60}


def collect_with(
    cls: type[Sampler], env_fn: Any, agent: Any = None, n: int = 5, evaluate: Container[int] = (), **options: Any
) -> list[Batch]:
    """What `collect` gives with a new sampler. `options` are those of the sampler and of its `initialize`."""
    given = {"batch_T": 9, "batch_B": 5, "max_decorrelation_steps": 12, "seed": 7, "bootstrap_value": True, **options}
    with cls(env_fn, **{name: value for name, value in given.items() if name not in AT_START}) as sampler:
        at_start = {name: value for name, value in given.items() if name in AT_START}
        sampler.initialize(RandomAgent() if agent is None else agent, **at_start)
        if hasattr(sampler, "start"):
            sampler.start()
        return collect(sampler, n, evaluate)


class Diary(TrajInfo):
    """Keeps every argument of its calls, as it is given; of rewards, which may be any numbers, the value."""

    def __init__(self, discount: float = 1.0) -> None:
        super().__init__(discount)
        #: (observation, action, reward, terminated, truncated, agent_info, env_info) of each step.
        self.steps: list[Any] = []
        self.end: Any = None

    def step(self, observation: Any, action: Any, reward: Any, *rest: Any) -> None:
        super().step(observation, action, reward, *rest)
        self.steps.append((observation, action, float(reward), *rest))

    def terminate(self, final_observation: Any) -> None:
        self.end = final_observation

    @property
    def observations(self) -> list[Any]:
        return [step[0] for step in self.steps]

    @property
    def actions(self) -> list[Any]:
        return [step[1] for step in self.steps]

    @property
    def agent_infos(self) -> list[Any]:
        return [step[5] for step in self.steps]


def leave_memory(monkeypatch: pytest.MonkeyPatch, free: int, *, small: int | None = None) -> None:
    """Let only so many bytes be free. `small`: sizes below it are not checked."""
    monkeypatch.setattr(memory_limits, "free_memory", lambda: free)
    if small is not None:
        monkeypatch.setattr(memory_limits, "SMALL_BYTES", small)


# ---- comparisons ---------------------------------------------------------------------------

#: What a model has computed. The last bit of a matrix product may hang on the number of its rows.
OF_MODELS = r"\.agent\.(agent_info|bootstrap_value|final_value)"


def assert_same(
    found: Any,
    wanted: Any,
    where: str = "",
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    rough: str = OF_MODELS,
    but: str = "",
) -> None:
    """The same structure, dtypes, shapes, and values to the last bit. `rtol` and `atol` are for the leaves whose names
    the pattern `rough` finds. Those that `but` finds may differ."""
    ours, theirs = dict(_parts(found, where)), dict(_parts(wanted, where))
    assert list(ours) == list(theirs)
    for (name, a), b in zip(ours.items(), theirs.values(), strict=True):
        if but and re.search(but, name):
            continue
        if _are_identical(a, b):  # what follows takes ten times as long
            continue
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


def _are_identical(a: Any, b: Any) -> bool:
    if type(a) is np.ndarray is type(b):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and type(a) in (bool, int, float, str) and repr(a) == repr(b)  # 0.0 is not -0.0


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


def without_infos(found: list[Batch], columns: Any = slice(None)) -> list[Any]:
    """The batches without the rest, and of these only some columns."""
    return [batch[:, columns] for batch, _ in found if batch is not None]


def leaves(tree: Any) -> list[Any]:
    """The arrays of `tree`, which may be a single one."""
    return [leaf for _, leaf in tree.leaves()] if isinstance(tree, NamedArrays) else [tree]


# ---- what must hold -----------------------------------------------------------------------


def env_seeds(n: int, seed: int = 7, small: bool = True) -> list[int]:
    """The seeds of n training environments."""
    seeds = ColumnStreams(seed, range(n)).env_seeds(Purpose.TRAIN)
    return [each % 2**31 for each in seeds] if small else seeds


def assert_as_plain_loop(env: VectorEnv[Any, Any, Any], seed: Any, batches: Sequence[Any]) -> int:
    """Step `env` with the recorded actions: `batches` (numpy, in order) have what it returns. Returns the number of
    episodes that ended."""
    mode, n_ends = env.metadata["autoreset_mode"], 0
    observation, _ = env.reset(seed=seed)
    resets = np.zeros(env.num_envs, bool)
    starts = np.ones(env.num_envs, bool)
    for samples in batches:
        for t in range(len(samples.env.done)):
            row = samples[t]
            assert (row.env.valid == ~resets).all()
            assert (row.env.prev_done == (starts & ~resets)).all()
            expected = np.array(observation)
            expected[resets] = 0
            np.testing.assert_array_equal(row.env.observation, expected)
            observation, reward, terminated, truncated, infos = env.step(row.agent.action)
            done = np.logical_or(terminated, truncated)
            starts = np.where(resets, True, done)
            for name, wanted in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
                np.testing.assert_array_equal(row.env[name], wanted, name)
            assert (row.env.done == done).all()
            final = infos.get("final_obs", observation)
            for b in range(env.num_envs):
                wanted = final[b] if done[b] else np.zeros_like(observation[b])
                np.testing.assert_array_equal(row.env.final_obs[b], wanted)
            if mode is AutoresetMode.DISABLED and done.any():
                observation, _ = env.reset(options={"reset_mask": done})
            resets, n_ends = done & (mode is AutoresetMode.NEXT_STEP), n_ends + int(done.sum())
    env.close()
    return n_ends


def check_rules(samples: Any) -> None:
    """The rules that hold in every batch of a `ScriptedGame`: idle cells are zero, episodes have no gap, starts and
    ends are where they are said to be. Observations are (agent's number + 1, step, own steps, draw)."""
    env, agent = samples.env, samples.agent
    valid, done = np.asarray(env.valid), np.asarray(env.done)
    for name, field in [*env.items(), *agent.items()]:
        if name in ("bootstrap_obs", "bootstrap_value", "policy_version", "prev_reward", "prev_action"):
            continue
        for path, leaf in NamedArrays({name: field}).leaves():
            assert not np.asarray(leaf)[~valid].any(), f"{path} of an idle cell"
    assert not np.asarray(env.prev_done)[~valid].any()
    goes_on = valid[:-1] & ~done[:-1]
    assert valid[1:][goes_on].all(), "a gap in an episode"
    observation = np.asarray(env.observation)
    observation = observation[..., :4]
    own = observation[..., 2]
    assert (np.asarray(env.prev_done) == (valid & (own == 0)))[valid].all(), "own steps are 0 where an episode begins"
    assert (own[1:] == own[:-1] + 1)[goes_on].all()
    assert (done == (np.asarray(env.terminated) | np.asarray(env.truncated))).all()
    action = np.asarray(agent.action)
    np.testing.assert_array_equal(np.asarray(env.reward)[valid], (observation[..., 1] + 1 + action)[valid])
    if "final_obs" in env:
        final = np.asarray(env.final_obs)
        assert (final[done][:, 2] == own[done] + 1).all()
        assert (final[done][:, 0] == observation[done][:, 0]).all()
        assert not final[~done].any()
    after = np.asarray(env.bootstrap_obs)
    assert (after[..., 2] == own[-1] + 1)[valid[-1] & ~done[-1]].all()


class Follower:
    """Follows every column over batches: the rewards of each trajectory, by (env_rank, agent)."""

    def __init__(self, seats: Sequence[tuple[int, Any]]) -> None:
        self.seats = list(seats)
        self.running: dict[Any, list[float]] = defaultdict(list)
        self.finished: list[tuple[int, Any, int, float]] = []
        self.total = 0.0

    def follow(self, samples: Any) -> list[tuple[int, Any, int, float]]:
        """The trajectories that end in this batch: (env_rank, agent, length, return), ordered by time, then column."""
        env, found = samples.env, []
        valid, done, reward = (np.asarray(each) for each in (env.valid, env.done, env.reward))
        starts = np.asarray(env.prev_done)
        for t in range(len(valid)):
            for b in np.flatnonzero(valid[t]):
                seat = self.seats[b]
                if starts[t, b]:
                    self.running[seat] = []
                self.running[seat].append(float(reward[t, b]))
                self.total += float(reward[t, b])
                if done[t, b]:
                    rewards = self.running.pop(seat)
                    found.append((*seat, len(rewards), sum(rewards)))
        self.finished += found
        return found


# ---- waiting -------------------------------------------------------------------------------


def until(condition: Callable[[], Any], what: str = "it", seconds: float = BOUND) -> Any:
    """Poll for a fact; returns it."""
    deadline = time.monotonic() + seconds
    while not (fact := condition()):
        assert time.monotonic() < deadline, f"{what} has not come about in {seconds:g} s"
        time.sleep(0.001)
    return fact


@contextmanager
def pipes(n: int) -> Iterator[list[tuple[int, int]]]:
    """Their ends for reading and for writing, inherited by forked workers."""
    made = [os.pipe() for _ in range(n)]
    try:
        yield made
    finally:
        for fd in (fd for pipe in made for fd in pipe):
            os.close(fd)


class Gated(CountingEnv):
    """Reads `gate` for leave to end each step, after writing to `sign` that it has begun."""

    def __init__(self, gate: int | None = None, sign: int | None = None) -> None:
        super().__init__()
        self.gate, self.sign = gate, sign

    def step(self, action: Any) -> Any:
        if self.sign is not None:
            os.write(self.sign, b"1")
        if self.gate is not None:
            os.read(self.gate, 1)
        return super().step(action)
