"""Batched environments in workers: Gymnasium's CartPole, EnvPool, a written one; what is recorded; their seeds."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from penstock import (
    CategoricalPgAgent,
    ConfigError,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SerialSampler,
    SpaceError,
    WaitResetCollector,
    WorkerError,
)
from penstock.envs import BatchedCartPole, BatchedEnvPool, CountingEnv
from penstock.envs.direct_steps import step_into_of

from ..scale import scaled, some
from ..support import assert_same, collect_with, env_seeds
from .batches import Batch

pytestmark = pytest.mark.slow


class Values(nn.Module):
    def forward(self, observation: Any) -> Any:
        return observation[:, :2], observation.sum(dim=1)


def collect(env_fn: Any, n_workers: int | None = None, agent: Any = None, **kwargs: Any) -> Any:
    """Batches, with the infos of the first episodes in the evaluations that follow them: batched environments begin
    the others without seeds."""
    cls, workers = (SerialSampler, {}) if n_workers is None else (ParallelSampler, {"n_workers": n_workers})
    sizes = {"batch_T": 40, "batch_B": 6, "max_decorrelation_steps": 0, "eval_n_envs": 2, "eval_max_steps": 80}
    kept = collect_with(cls, env_fn, agent, scaled(3, 2), range(3), **{"batched": True, **sizes, **workers, **kwargs})
    first = [[info for info in more if info["episode"] == 0] for _, more in kept[1::2]]
    return [(batch, infos + more) for (batch, infos), more in zip(kept[::2], first, strict=True)]


#: numpy's sine over an array may differ from that of a number in the last bit, depending on the processor.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5, "rough": ""}


# ---- Gymnasium's CartPole ----------------------------------------------------------------------


@pytest.mark.parametrize("agent_cls", [RandomAgent, partial(CategoricalPgAgent, Values)])
def test_batched_cartpole_goes_the_way_of_single_ones(agent_cls: Any) -> None:
    single = collect(partial(gym.make, "CartPole-v1", max_episode_steps=25), batched=False, agent=agent_cls())
    batched = partial(BatchedCartPole, max_episode_steps=25)
    assert_same(single, collect(batched, agent=agent_cls()), **CLOSE)
    assert_same(single, collect(batched, 2, agent=agent_cls()), **CLOSE)


def test_the_rows_of_a_batched_environment_cannot_wait_for_their_resets() -> None:
    class Own(WaitResetCollector):
        pass

    for collector in (WaitResetCollector, Own):
        with pytest.raises(ConfigError, match="batched environments and WaitResetCollector do not go together"):
            SerialSampler(BatchedCartPole, batch_T=4, batch_B=2, batched=True, collector_cls=collector)


# ---- EnvPool -----------------------------------------------------------------------------------


def test_envpool_gives_one_batch_per_seed_whatever_the_workers() -> None:
    pytest.importorskip("envpool")
    env_fn = partial(BatchedEnvPool, "CartPole-v1", max_episode_steps=20)
    one = collect(env_fn)
    for n_workers in scaled((1, 2), (2,)):
        assert_same(one, collect(env_fn, n_workers, start_method=scaled("forkserver", "fork")))
    for samples, _ in one:
        ended = samples.env.terminated
        assert (np.abs(samples.env.final_obs[ended][:, [0, 2]]) > (2.4, 12 * np.pi / 180)).any(axis=1).all()
        first = samples.env.observation[1:][samples.env.done[:-1]]
        assert (np.abs(first) <= 0.05).all()
    assert any(samples.env.truncated.any() for samples, _ in one)
    assert len({samples.env.observation[0, b].tobytes() for samples, _ in one[:1] for b in range(6)}) == 6


def test_what_envpool_says_of_a_step_is_recorded() -> None:
    pytest.importorskip("envpool")
    env_fn = partial(BatchedEnvPool, "CartPole-v1")
    for samples, infos in collect(env_fn, env_info={"elapsed_step": np.int32(0)}):
        elapsed, done = samples.env.env_info.elapsed_step, samples.env.done
        assert (elapsed >= 1).all(), "that of the step, not of the reset that followed"
        assert (elapsed[1:] == np.where(done[:-1], 1, elapsed[:-1] + 1)).all()
        assert len(infos) >= done.sum()


# ---- what the collector records, against single environments -----------------------------------


class Described(CountingEnv):
    """Also says things in `info`: always, now and then, and deeper down."""

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"count": self.count, "deep": {"position": np.full(2, self.count, np.float32)}}
        return {**info, "even": self.count} if self.count % 2 == 0 else info

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {**self._info(), "count": 77}

    def step(self, action: Any) -> Any:
        *step, _ = super().step(action)
        return (*step, self._info())


def synced(env_fn: Any, mode: AutoresetMode, num_envs: int) -> Any:
    return SyncVectorEnv([env_fn] * num_envs, autoreset_mode=mode)


MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


@pytest.mark.parametrize("mode", MODES)
def test_env_info_is_recorded_as_from_single_environments(mode: AutoresetMode) -> None:
    env_fn = partial(Described, length=5)
    wanted = {"count": 0, "even": 0, "deep.position": np.zeros(2, np.float32), "missing": 0.0}
    expected = collect(env_fn, batched=False, env_info=wanted)
    assert_same(expected, collect(partial(synced, env_fn, mode), env_info=wanted))
    assert all(samples.env.env_info.even.any() for samples, _ in expected)


class Wordy(CountingEnv):
    def step(self, action: Any) -> Any:
        *step, _ = super().step(action)
        return (*step, {"count": "many"})


@pytest.mark.parametrize("mode", MODES)
def test_env_info_that_does_not_fit_names_the_environment(mode: AutoresetMode) -> None:
    with pytest.raises(WorkerError, match=r"info\['count'\] of env_rank 0 must have"):
        collect(partial(synced, Wordy, mode), env_info={"count": 0})


# ---- one's own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("checks", [{}, {"check_finite": True, "debug": True}])
def test_ones_own_batch_in_a_structure_keeps_its_final_observations(checks: dict[str, Any]) -> None:
    assert step_into_of(Batch(1), 0) is not None
    for samples, _ in collect(Batch, 2, env_info={"count": 0}, **checks):
        env = samples.env
        t, b = np.nonzero(env.done)
        lengths = np.array(env_seeds(6, small=False)) % 3 + 2
        assert set(b.tolist()) == set(range(6))
        assert (env.final_obs.at[t, b] == lengths[b][:, None]).all()
        assert (env.final_obs.both._1[t, b] == 2 * lengths[b]).all()
        assert (env.env_info.count[t, b] == lengths[b]).all()
        counts = env.observation.both._0
        assert (counts[1:] == np.where(env.done[:-1], 0, counts[:-1] + 1)).all()
        assert (env.final_obs.both._1[~env.done] == 0).all()


class WrongEnd(Batch):
    """`wrong` spoils what is said of row 1's end."""

    def __init__(self, num_envs: int, wrong: Any) -> None:
        super().__init__(num_envs)
        self.wrong_end = wrong

    def step(self, actions: Any) -> Any:
        *step, infos = super().step(actions)
        if infos.get("_final_obs", [False, False])[1]:
            infos["final_obs"]["at"] = self.wrong_end(infos["final_obs"]["at"])
        return (*step, infos)


@pytest.mark.parametrize(
    ("wrong", "kwargs", "message"),
    [
        (
            lambda at: at[:, :1],
            {},
            r"the final observation\['at'\] of the batched environment .* must have shape \(6, 2\)",
        ),
        (lambda at: at.astype(complex), {}, r"the final observation\['at'\] .*complex"),
        (lambda at: at * np.nan, {"check_finite": True}, r"the final observation\['at'\] of env_rank 1 must be finite"),
        (lambda at: at - 99, {"debug": True}, "the final observation of env_rank 1 must be in"),
    ],
)
def test_a_final_observation_that_does_not_fit_is_named(wrong: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        collect(partial(WrongEnd, wrong=wrong), **kwargs)


# ---- what is refused ---------------------------------------------------------------------------


def of_batches(env_fn: Any, **kwargs: Any) -> Sampler:
    return SerialSampler(env_fn, batch_T=12, batch_B=2, batched=True, **kwargs)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda result: result[:4], r"env\.step of env_rank 0 must return five values"),
        (lambda result: None, r"env\.step of env_rank 0 must return five values"),
        (lambda result: (*result[:4], None), "the info that env.step of env_rank 0 returned must be a dict, got None"),
    ],
)
def test_what_is_no_step_of_a_batch_is_refused(spoil: Any, error: str) -> None:
    def spoilt(num_envs: int) -> Any:
        env = synced(CountingEnv, AutoresetMode.SAME_STEP, num_envs)
        step = env.step
        env.step = lambda actions: spoil(step(actions))  # type: ignore[method-assign]
        return env

    with of_batches(spoilt) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError) as caught:
            sampler.obtain_samples(0)
    assert isinstance(caught.value.__cause__, SpaceError)
    assert re.search(error, str(caught.value.__cause__))


def test_what_is_no_batched_environment_is_refused() -> None:
    def one(num_envs: int) -> Any:
        return CountingEnv()

    with pytest.raises(ConfigError, match="VectorEnv of 1 environments, got CountingEnv"):
        of_batches(one).initialize(RandomAgent())


def test_an_env_fn_for_single_environments_is_told_how_it_is_called() -> None:
    with (
        SerialSampler(CountingEnv, batch_T=2, batch_B=2, batched=True) as sampler,
        pytest.raises(ConfigError, match=r"TypeError: .*'num_envs'.* calls env_fn\(num_envs=n\), which must return"),
    ):
        sampler.initialize(RandomAgent())


# ---- seeds -------------------------------------------------------------------------------------


class Seeded(SyncVectorEnv):
    """Notes the seeds of its resets. `fails` says which of them raise: (number of the reset, its seed) -> error."""

    seeds: list[Any]
    fails: Any

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        Seeded.seeds.append(seed)
        if (error := Seeded.fails(len(Seeded.seeds), seed)) is not None:
            raise error
        return super().reset(seed=seed, options=options)


def seeded(num_envs: int) -> Any:
    return Seeded([CountingEnv] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.fixture
def _fails() -> Any:
    Seeded.seeds = []
    yield
    Seeded.fails = None


def of_seeded(fails: Any, **kwargs: Any) -> Sampler:
    Seeded.fails = staticmethod(fails)
    return of_batches(seeded, **kwargs)


@pytest.mark.usefixtures("_fails")
def test_an_environment_that_takes_a_list_of_seeds_is_reset_once() -> None:
    with of_seeded(lambda n, seed: None, eval_n_envs=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert [len(seed) for seed in Seeded.seeds] == [2]
        sampler.obtain_samples(0)
        sampler.evaluate_agent(0)
        sampler.evaluate_agent(0)
    assert [len(seed) for seed in Seeded.seeds] == [2] * 3


def is_per_column(seed: Any) -> bool:
    return isinstance(seed, list | np.ndarray)


@pytest.mark.usefixtures("_fails")
@pytest.mark.parametrize("error", some([gym.error.Error("list"), TypeError("list"), ValueError("list")], 1), ids=repr)
def test_an_environment_that_takes_one_seed_gets_the_first_and_a_warning(error: Exception, caplog: Any) -> None:
    with of_seeded(lambda n, seed: error if is_per_column(seed) else None, eval_n_envs=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert "does not take a list of seeds" in caplog.text
        assert Seeded.seeds[-1] == Seeded.seeds[0][0] % 2**31
        sampler.obtain_samples(0)
        sampler.evaluate_agent(0)
        n = len(Seeded.seeds)
        sampler.evaluate_agent(0)
        assert [type(seed) for seed in Seeded.seeds[n:]] == [int]


class Picky(BatchedCartPole):
    """Takes seeds as `accepts` says, as engines in C do."""

    def __init__(self, num_envs: int, accepts: str) -> None:
        super().__init__(num_envs, max_episode_steps=20)
        self.accepts = accepts

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        array, most = np.asarray(seed), 2**31 if "small" in self.accepts else 2**32
        if not isinstance(seed, np.ndarray if "array" in self.accepts else list):
            raise TypeError("Unsupported seed type")
        if array.dtype != np.int64 or (array >= most).any():
            raise OverflowError("too large")
        return super().reset(seed=array.tolist())


@pytest.mark.parametrize("accepts", ["list", "array", "small array", "small list"])
def test_one_seed_per_column_gives_one_batch_whatever_the_workers(accepts: str, caplog: Any) -> None:
    env_fn = partial(Picky, accepts=accepts)
    found = collect(env_fn)
    for n_workers in scaled((1, 2, 3), (3,)):
        assert_same(found, collect(env_fn, n_workers))
    assert "depend on the number of workers" not in caplog.text


@pytest.mark.usefixtures("_fails")
@pytest.mark.parametrize("cls", [TypeError, ValueError, gym.error.Error])
@pytest.mark.parametrize(
    "fails", [lambda n, seed: True, lambda n, seed: n == 1], ids=["at every reset", "at the first reset"]
)
def test_an_environments_own_error_in_its_first_reset_comes_through(cls: Any, fails: Any) -> None:
    with (
        of_seeded(lambda n, seed: cls(f"broken at reset {n}") if fails(n, seed) else None) as sampler,
        pytest.raises(WorkerError, match="broken at reset 1") as caught,
    ):
        sampler.initialize(RandomAgent(), seed=0)
    assert type(caught.value.__cause__) is cls


@pytest.mark.usefixtures("_fails")
@pytest.mark.parametrize("cls", some([gym.error.Error, TypeError, ValueError], 1))
def test_an_environments_own_error_in_a_later_reset_comes_through(cls: Any) -> None:
    with of_seeded(lambda n, seed: cls("broken") if n == 3 else None, eval_n_envs=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        sampler.evaluate_agent(0)
        with pytest.raises(WorkerError, match="broken"):
            sampler.evaluate_agent(0)
    assert len(Seeded.seeds) == 3
