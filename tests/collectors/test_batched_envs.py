"""Batched environments in workers: what is recorded of them, resets in the next step, rows that belong together,
what is refused, and seeds."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import (
    AsyncSampler,
    ConfigError,
    EvalCollector,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    SpaceError,
    TrajInfo,
    WaitResetCollector,
    WorkerError,
)
from penstock.columns import Start
from penstock.envs import BatchedCartPole, BatchedEnvPool, CountingEnv, EnvContext
from penstock.learning import Replay

from ..against_loop import compare
from ..samplers.digest_cases import Plain, Stateful, rows_of
from ..scale import pairs, scaled, some
from ..support import assert_as_plain_loop, assert_same, collect_with, env_seeds, without_infos

pytestmark = pytest.mark.slow


def collect(env_fn: Any, n_workers: int | None = None, agent: Any = None, **kwargs: Any) -> Any:
    """Batches, with the infos of the first episodes in the evaluations that follow them: batched environments begin
    the others without seeds."""
    cls, workers = (SerialSampler, {}) if n_workers is None else (ParallelSampler, {"n_workers": n_workers})
    sizes = {"batch_T": 40, "batch_B": 6, "max_decorrelation_steps": 0, "eval_n_envs": 2, "eval_max_steps": 80}
    kept = collect_with(cls, env_fn, agent, scaled(3, 2), range(3), **{"batched": True, **sizes, **workers, **kwargs})
    first = [[info for info in more if info["number"] == 0] for _, more in kept[1::2]]
    return [(batch, infos + more) for (batch, infos), more in zip(kept[::2], first, strict=True)]


#: numpy's sine over an array may differ from that of a number in the last bit, depending on the processor.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5, "rough": ""}


# ---- Gymnasium's CartPole ----------------------------------------------------------------------


def test_batched_cartpole_goes_the_way_of_single_ones() -> None:
    single = collect(partial(gym.make, "CartPole-v1", max_episode_steps=25), batched=False)
    for n_workers in (None, 2):
        assert_same(single, collect(partial(BatchedCartPole, max_episode_steps=25), n_workers), **CLOSE)


def test_the_rows_of_a_batched_environment_cannot_wait_for_their_resets() -> None:
    class Own(WaitResetCollector):
        pass

    for collector in (WaitResetCollector, Own):
        with pytest.raises(ConfigError, match="batched environments and WaitResetCollector do not go together"):
            SerialSampler(BatchedCartPole, batch_T=4, batch_B=2, batched=True, collector_cls=collector)


# ---- EnvPool -----------------------------------------------------------------------------------


def test_what_envpool_says_of_a_step_is_recorded() -> None:
    pytest.importorskip("envpool")
    env_fn = partial(BatchedEnvPool, "CartPole-v1")
    for samples, infos in collect(env_fn, env_info={"elapsed_step": np.int32(0)}):
        elapsed, done = samples.env.env_info.elapsed_step, samples.env.done
        assert (elapsed >= 1).all(), "that of the step, not of the reset that followed"
        assert (elapsed[1:] == np.where(done[:-1], 1, elapsed[:-1] + 1)).all()
        assert len(infos) >= done.sum()


# ---- what the collector records ----------------------------------------------------------------


def synced(env_fn: Any, mode: AutoresetMode, num_envs: int) -> Any:
    return SyncVectorEnv([env_fn] * num_envs, autoreset_mode=mode)


MODES, NEXT = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], AutoresetMode.NEXT_STEP


class Wordy(CountingEnv):
    def step(self, action: Any) -> Any:
        *step, _ = super().step(action)
        return (*step, {"count": "many"})


@pytest.mark.parametrize("mode", MODES)
def test_env_info_that_does_not_fit_names_the_environment(mode: AutoresetMode) -> None:
    with pytest.raises(WorkerError, match=r"info\['count'\] of env_rank 0 must have"):
        collect(partial(synced, Wordy, mode), env_info={"count": 0})


# ---- resets in the next step --------------------------------------------------------------------


class Own(TrajInfo):
    """Is called at each step."""


class Told(CountingEnv):
    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {"count": 99}


class Loud(SyncVectorEnv):
    """A step that only resets a row returns a reward too, and the info of the reset."""

    def step(self, actions: Any) -> Any:
        resetting = self._autoreset_envs
        observation, rewards, *rest = super().step(actions)
        return (observation, np.where(resetting, 7.0, rewards), *rest)


@pytest.mark.parametrize("traj_info_cls", [TrajInfo, Own])
def test_a_reset_belongs_to_no_trajectory(traj_info_cls: Any) -> None:
    options = {"eval_n_envs": 3, "eval_max_steps": 300, "eval_episodes": 7, "traj_info_cls": traj_info_cls}
    found = collect_with(
        SerialSampler,
        lambda num_envs: Loud([partial(Told, length=4)] * num_envs, autoreset_mode=NEXT),
        None,
        2,
        (1,),
        batched=True,
        env_info={"count": 0},
        **options,
    )
    for samples, infos in found:
        assert infos
        assert all((info["Length"], info["Return"]) == (4, 10) for info in infos)
        if samples is None:
            assert len(infos) == 7
            continue
        env, is_reset = samples.env, ~samples.env.valid
        assert is_reset.any()
        assert (env.env_info.count == np.where(is_reset, 0, env.observation[..., 1] + 1)).all()
        assert (env.env_info._count == env.valid).all()
        assert (env.reward == np.where(is_reset, 0, env.env_info.count)).all()
        assert not env.prev_reward[1:][env.prev_done[1:]].any()


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("agent", [Stateful, Plain])
def test_values_of_final_observations_that_are_not_recorded_are_right(mode: AutoresetMode, agent: Any) -> None:
    sizes = {"batch_T": 20, "batch_B": 3, "n_batches": 4, "batched": True}
    compare(SerialSampler, rows_of(mode), agent, sampler={"record_final_obs": False}, **sizes)


def test_workers_that_write_into_a_replay_leave_the_resets_out() -> None:
    replay = Replay(500, discount=1.0, max_truncations=500, seed=0)
    env_fn = partial(synced, partial(CountingEnv, length=4, truncate=True), NEXT)
    sizes: dict[str, Any] = {"batch_T": 9, "batch_B": 4, "n_workers": 2, "batched": True}
    with AsyncSampler(env_fn, replay=replay, **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.start()
        for _ in range(3):
            batch = replay.sample(300)
            torch.testing.assert_close(batch.next_observation[:, 1], batch.observation[:, 1] + 1)
            torch.testing.assert_close(batch.next_observation[:, 0], batch.observation[:, 0])


class Masked(gym.Env[Any, Any]):
    """One action is legal at each step, and none after the last."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict({"at": spaces.Discrete(6), "mask": spaces.MultiBinary(3)})
        self.action_space = spaces.Discrete(3)

    def _observe(self) -> Any:
        return {"at": self.at, "mask": np.array([self.at < 5 and self.at % 3 == i for i in range(3)], np.int8)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.at = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self._observe(), 1.0, self.at == 5, False, {}


def test_an_observation_that_allows_no_action_may_end_an_episode() -> None:
    for samples, infos in collect(partial(synced, Masked, NEXT), agent=RandomAgent(mask_key="observation.mask")):
        assert all(info["Length"] == 5 for info in infos)
        valid = samples.env.valid
        assert not valid.all()
        assert (samples.agent.action[valid] == samples.env.observation.at[valid] % 3).all()


def test_an_environment_id_means_its_batched_environment() -> None:
    """It has one random stream, so only runs with the same number of workers are equal."""
    kwargs: dict[str, Any] = {"env_kwargs": {"max_episode_steps": 25}}
    found = collect("CartPole-v1", **kwargs)
    assert_same(found, collect("CartPole-v1", 1, **kwargs))
    env: Any = gym.make_vec("CartPole-v1", 6, "vector_entry_point", max_episode_steps=25)
    assert assert_as_plain_loop(env, env_seeds(6)[0], without_infos(found)) > 10


# ---- resets that a collector asks for -------------------------------------------------------------


class OwnStarts(ResetCollector):
    def begin_episodes(self, events: Any, going: Any) -> Any:
        return self.columns.reset(events.over, [Start(options={"level": 1}) for _ in events.over])


class Interrupts(ResetCollector):
    """Begins an episode in the second environment, whose last one goes on."""

    def begin_batch(self, itr: int) -> None:
        self.reset_now([1])
        super().begin_batch(itr)


class Repeats(ResetCollector):
    def begin_episodes(self, events: Any, going: Any) -> Any:
        return self.columns.reset(events.over, [Start(actions=([0], [0.0]))] * len(events.over))


OWN_MODE = r"SyncVectorEnv\(num_envs=3\) resets its rows itself .* so env_rank \[{}\] cannot .*AutoresetMode\.DISABLED"


def of_lengths(mode: AutoresetMode, *lengths: int) -> Any:
    env_fns = [partial(CountingEnv, length) for length in lengths]
    return lambda num_envs: SyncVectorEnv(env_fns[:num_envs], autoreset_mode=mode)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, NEXT])
@pytest.mark.parametrize(("cls", "lengths", "ranks"), [(OwnStarts, (9, 3, 3), "1, 2"), (Interrupts, (9, 9, 9), "1")])
def test_an_environment_that_resets_itself_resets_no_row_for_a_collector(
    mode: AutoresetMode, cls: Any, lengths: Any, ranks: str
) -> None:
    with of_batches(of_lengths(mode, *lengths), collector_cls=cls, batch_B=3) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match=OWN_MODE.format(ranks)) as caught:
            sampler.obtain_samples(0)
    assert isinstance(caught.value.__cause__, ConfigError)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, NEXT])
def test_an_environment_that_resets_itself_is_reset_as_a_whole(mode: AutoresetMode) -> None:
    with of_batches(of_lengths(mode, 3, 3), collector_cls=OwnStarts) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        env = sampler.obtain_samples(0)[0].env
    each = 2 if mode is AutoresetMode.SAME_STEP else 1  # then the environment has begun an episode before
    assert env.observation[:, 1].tolist() == [[each * (t // 3), t % 3] for t in range(12)]
    assert env.prev_done[:, 1].tolist() == [t % 3 == 0 for t in range(12)]
    assert env.valid.all()


def test_an_episode_of_one_row_cannot_be_repeated() -> None:
    env_fn = partial(synced, CountingEnv, AutoresetMode.DISABLED)
    with of_batches(env_fn, collector_cls=Repeats) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match="cannot repeat an episode of one row: use single environments"):
            sampler.obtain_samples(0)


class Rests(EvalCollector):
    """An environment rests after each episode until that of another one has ended."""

    def begin_episodes(self, events: Any, going: Any) -> Any:
        rested = list(self.columns.waiting)
        self.columns.park(events.over)
        return self.columns.reset(rested)


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_row_that_was_parked_is_stepped_again_after_its_reset(is_batched: bool) -> None:
    def row_fns(context: EnvContext, num_envs: int) -> Any:
        return [partial(CountingEnv, 3 + context.env_rank + i) for i in range(num_envs)]

    def batch_fn(num_envs: int, context: EnvContext) -> Any:
        return SyncVectorEnv(row_fns(context, num_envs), autoreset_mode=AutoresetMode.DISABLED)

    env_fn = batch_fn if is_batched else lambda context: row_fns(context, 1)[0]()
    wanted, ends, rested = [], {e: 3 + e for e in range(3)}, list[int]()
    for t in range(1, 61):
        if over := [e for e, end in ends.items() if end == t]:
            wanted += [(e, 3 + e, sum(range(4 + e))) for e in over]
            ends.update({e: t + 3 + e for e in rested})
            rested = over
    sizes: dict[str, Any] = {"batch_T": 2, "batch_B": 3, "eval_n_envs": 3, "eval_max_steps": 180}
    with SerialSampler(env_fn, batched=is_batched, eval_collector_cls=Rests, **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for _ in range(2):  # the second begins where rows rest
            found = [(info.env_rank, info.Length, info.Return) for info in sampler.evaluate_agent(0)]
            assert sorted(found) == sorted(wanted)


class Sown(SyncVectorEnv):
    """Takes seeds as `takes` says, and notes them by row."""

    takes: Any
    notes: list[Any]

    def __init__(self, num_envs: int) -> None:
        super().__init__([partial(CountingEnv, 3 + i) for i in range(num_envs)], autoreset_mode=AutoresetMode.DISABLED)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        rows = np.flatnonzero((options or {}).get("reset_mask", np.ones(self.num_envs))).tolist()
        seeds = {} if seed is None else Sown.takes(seed, rows, self.num_envs)
        Sown.notes.append((rows, {row: seeds[row] for row in rows if seeds.get(row) is not None}))
        return super().reset(options=options)


def takes_list(seed: Any, rows: Any, n: int) -> Any:
    assert isinstance(seed, list)
    return dict(zip(range(n), seed, strict=True))


def takes_array(seed: Any, rows: Any, n: int) -> Any:
    assert seed.shape == (n,)
    return dict(enumerate(seed.tolist()))


def takes_own(seed: Any, rows: Any, n: int) -> Any:
    """As ALE's vector environment."""
    assert seed.shape == (len(rows),)
    return dict(zip(rows, seed.tolist(), strict=True))


def takes_number(seed: Any, rows: Any, n: int) -> Any:
    if not isinstance(seed, int):
        raise TypeError("a number")
    return {rows[0]: seed}


class Seeds(ResetCollector):
    def begin_episodes(self, events: Any, going: Any) -> Any:
        return self.columns.reset(events.over, [Start(seed=10 + e) for e in events.over])


@pytest.mark.parametrize("takes", [takes_list, takes_array, takes_own, takes_number])
def test_each_row_that_is_reset_alone_gets_its_seed(takes: Any) -> None:
    def careful(*given: Any) -> Any:
        try:
            return takes(*given)
        except AttributeError:
            raise TypeError("another form") from None

    Sown.takes, Sown.notes = staticmethod(careful), []
    with of_batches(Sown, collector_cls=Seeds, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        del Sown.notes[:]
        sampler.obtain_samples(0)
    only_first = takes is takes_number
    wanted = [[b for b in (0, 1) if t % (3 + b) == 0] for t in range(1, 13)]
    expected = [(rows, {b: 10 + b for b in rows[: 1 if only_first else 2]}) for rows in wanted if rows]
    assert Sown.notes == expected


# ---- columns that belong together, such as the players of one game ------------------------------


def of_threes(num_envs: int) -> Any:
    assert num_envs % 3 == 0
    return synced(CountingEnv, AutoresetMode.SAME_STEP, num_envs)


THREES: dict[str, Any] = {"batched": True, "rows_per_env": 3}


SIZES: dict[str, Any] = {"batch_T": 10, "batch_B": 12, "eval_n_envs": 6, "eval_max_steps": 60}


@pytest.mark.parametrize(("cls", "n_workers"), pairs([ParallelSampler, GpuSampler], [1, 2, 3, 4]))
def test_rows_that_belong_together_are_never_cut(cls: Any, n_workers: int) -> None:
    with cls(of_threes, **SIZES, **THREES, n_workers=n_workers) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert {len(worker.env_ranks) % 3 for worker in sampler.stats().workers} == {0}
        sampler.obtain_samples(0)
        assert sampler.evaluate_agent(0)


def test_there_are_no_more_workers_than_games(caplog: Any) -> None:
    with ParallelSampler(of_threes, batch_T=2, batch_B=6, n_workers=3, **THREES) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert [len(worker.env_ranks) for worker in sampler.stats().workers] == [3, 3]
    assert "2 are enough" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_B": 8}, "batch_B must be a multiple of rows_per_env=3, got 8"),
        ({"eval_n_envs": 4}, "eval_n_envs must be a multiple of rows_per_env=3, got 4"),
        ({"batched": False}, "rows_per_env is for batched environments"),
        ({"rows_per_env": 0}, "rows_per_env must be an integer of at least 1"),
    ],
)
def test_other_sizes_are_refused(kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SerialSampler(of_threes, **{**SIZES, **THREES, **kwargs})


# ---- what is refused ---------------------------------------------------------------------------


def of_batches(env_fn: Any, **kwargs: Any) -> Sampler:
    return SerialSampler(env_fn, **{"batch_T": 12, "batch_B": 2, "batched": True, **kwargs})


def replacing(change: Any, place: int = 0) -> Any:
    """A spoil of one value that a step returns."""
    return lambda result: (*result[:place], change(result[place]), *result[place + 1 :])


def at_end(change: Any) -> Any:
    """A spoil of the final observations."""
    return replacing(lambda infos: {**infos, "final_obs": change(infos["final_obs"])} if infos else infos, 4)


FINAL = "the final observation of "


@pytest.mark.parametrize(
    ("spoil", "options", "error"),
    [
        (lambda result: result[:4], {}, r"env\.step of env_rank 0 must return five values"),
        (lambda result: None, {}, r"env\.step of env_rank 0 must return five values"),
        (replacing(lambda _: None, 4), {}, "info that env.step of env_rank 0 returned must be a dict, got None"),
        (
            replacing(lambda seen: seen[:, :1]),
            {},
            r"observation of the batched environment .* must have shape \(2, 4\)",
        ),
        (replacing(lambda seen: seen.astype(complex)), {}, "observation of the batched environment .*complex"),
        (replacing(lambda _: np.zeros(3), 1), {}, r"rewards must have shape \(2,\), got \(3,\)"),
        (replacing(lambda _: None, 2), {}, r"terminated of .* \(env_rank 0 to 1\) must be bools \(2,\), got None"),
        (replacing(lambda _: np.zeros(2), 3), {}, r"truncated of .* \(env_rank 0 to 1\) must be bools \(2,\)"),
        (replacing(lambda _: np.ones(2, bool), 2), {}, "gave no final_obs for env_rank 0"),
        (at_end(lambda seen: seen[:, :1]), {}, FINAL + r"the batched environment .* must have shape \(2, 4\)"),
        (at_end(lambda seen: seen.astype(complex)), {}, FINAL + "the batched environment .*complex"),
        (at_end(lambda seen: seen * np.nan), {"check_finite": True}, FINAL + "env_rank 0 must be finite"),
        (at_end(lambda seen: seen - 99), {"debug": True}, FINAL + "env_rank 0 must be in"),
    ],
)
def test_what_is_no_step_of_a_batch_is_refused(spoil: Any, options: Any, error: str) -> None:
    def spoilt(num_envs: int) -> Any:
        env: Any = BatchedCartPole(num_envs, max_episode_steps=3)
        step = env.step
        env.step = lambda actions: spoil(step(actions))
        return env

    with of_batches(spoilt, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match=error) as caught:
            sampler.obtain_samples(0)
    assert isinstance(caught.value.__cause__, SpaceError)


def silent(num_envs: int) -> Any:
    """It does not tell its mode."""
    env = synced(CountingEnv, NEXT, num_envs)
    del env.metadata["autoreset_mode"]
    return env


@pytest.mark.parametrize(
    ("env_fn", "error", "message"),
    [
        (lambda num_envs: CountingEnv(), ConfigError, "VectorEnv of 1 environments, got CountingEnv"),
        (CountingEnv, ConfigError, r"TypeError: .*'num_envs'.* calls env_fn\(num_envs=n\), which must return"),
        ("FrozenLake-v1", ConfigError, r"FrozenLake-v1 has no batched environment .*leave batched out"),
        (silent, WorkerError, r"set metadata\['autoreset_mode'\]"),
        (lambda num_envs: synced(CountingEnv, NEXT, 3), ConfigError, "got SyncVectorEnv.*rows_per_env"),
    ],
)
def test_what_is_no_batched_environment_is_refused(env_fn: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message), of_batches(env_fn) as sampler:
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
@pytest.mark.parametrize("at", [(1, 2, 3, 4), (1,), (3,)], ids=str)
def test_an_environments_own_error_in_a_reset_comes_through(cls: Any, at: tuple[int, ...]) -> None:
    fails = of_seeded(lambda n, seed: cls(f"broken at reset {n}") if n in at else None, eval_n_envs=2)
    with fails as sampler, pytest.raises(WorkerError, match=f"broken at reset {at[0]}") as caught:
        sampler.initialize(RandomAgent(), seed=0)
        for _ in range(2):
            sampler.evaluate_agent(0)
    assert type(caught.value.__cause__) is cls
