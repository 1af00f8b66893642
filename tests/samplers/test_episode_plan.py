"""episode_plan: a function chooses the options of each reset. A plain loop resets with the same seeds and options."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SamplerStateError,
    SerialSampler,
    WaitResetCollector,
    WorkerError,
)
from penstock.envs import BatchedCartPole, Purpose, stream
from penstock.envs.seeding import episode_seed
from penstock.envs.toy import ScriptedGame
from penstock.testing import Fault, faulty_env

from ..support import assert_same, collect
from ..toy_games import TurnGame

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

T, B, SEED = 12, 5, 3


class Maze(gym.Env[Any, Any]):
    """Shows the level of its options, and what it has drawn at its reset. It changes the options that it gets."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, fails_at_level: float | None = None) -> None:
        self.fails_at_level = fails_at_level

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.level = -1.0 if options is None else options.pop("level")
        self.n_left, self.drawn = int(self.np_random.integers(2, 9)), self.np_random.normal()
        return self._seen(), {}

    def _seen(self) -> Any:
        return np.array([self.level, self.n_left, self.drawn])

    def step(self, action: Any) -> Any:
        if self.fails_at_level is not None and self.level >= self.fails_at_level:
            raise ValueError("too hard")
        self.n_left -= 1
        self.drawn += float(action[0])
        return self._seen(), self.level + self.drawn, self.n_left == 0, False, {}


class Repeated(Maze):
    """Cannot be saved, so its episode is repeated."""

    def __reduce__(self) -> Any:
        raise TypeError("it has a socket")


def plan(env_rank: int, episode: int, rng: np.random.Generator) -> Any:
    return None if episode % 4 == 1 else {"level": 100.0 * env_rank + episode + rng.random()}


def harder(env_rank: int, episode: int, rng: np.random.Generator) -> Any:
    return {"level": 1000.0 + episode + rng.random()}


def easy(env_rank: int, episode: int, rng: np.random.Generator) -> Any:
    return {"level": -100.0 - episode - rng.random()}


def planned(cls: Any = SerialSampler, env_fn: Any = Maze, **options: Any) -> Any:
    own = {"n_workers": 2} if cls in (ParallelSampler, AsyncSampler) else {}
    given = {"batch_T": T, "batch_B": B, "episode_plan": plan, "max_decorrelation_steps": 0}
    return cls(env_fn, **{**given, **own, **options})


def started(sampler: Any) -> Any:
    sampler.initialize(RandomAgent(), seed=SEED)
    return sampler


def options_of(chosen: Any, e: int, episode: int) -> Any:
    return chosen and chosen(e, episode, stream(SEED, Purpose.PLAN, e, episode))


def follow(batches: Any, plans: Any, first: Any = plan) -> int:
    """A plain loop plays the batches again, with the plan of each batch, and compares. The environments were reset for
    the first time with the plan `first`. Returns how many episodes there are."""
    n = 0
    for e in range(B):
        env, episode = Maze(), 0
        seen, _ = env.reset(seed=episode_seed(SEED, e, 0), options=options_of(first, e, 0))
        for (batch, _), now in zip(batches, plans, strict=True):
            for t in np.flatnonzero(batch.env.valid[:, e]):
                np.testing.assert_array_equal(batch.env.observation[t, e], seen)
                seen, reward, is_over, *_ = env.step(batch.agent.action[t, e])
                assert batch.env.reward[t, e] == np.float32(reward)
                assert batch.env.done[t, e] == is_over
                if is_over:
                    episode += 1
                    seed, options = episode_seed(SEED, e, episode), options_of(now, e, episode)
                    seen, _ = env.reset(seed=seed, options=options)
        n += episode + 1
    return n


def levels_of(sampler: Any, last: Any = None) -> list[tuple[Any, float]]:
    """For some steps of the last batch: the options of the recorded episode, and the level that was seen. Repeats each
    episode. `last` has this batch as `collect` returns it, which defaces the batch itself."""
    found: list[tuple[Any, float]] = []
    samples = sampler.samples_np if last is None else last[0]
    for t, e in np.argwhere(samples.env.valid)[::3].tolist():
        episode, level = sampler.episode(e, t), float(samples.env.observation[t, e, 0])
        assert episode.options == (None if level == -1 else {"level": level})
        env, action = episode.run()
        assert np.float32(env.step(action)[1]) == samples.env.reward[t, e]
        found.append((episode.options, level))
    assert found
    return found


SAMPLERS = [
    SerialSampler,
    *(partial(ParallelSampler, n_workers=n) for n in (1, 2, 3, 5)),
    partial(GpuSampler, n_workers=2),
    partial(GpuSampler, n_workers=3, server="process"),
    partial(AlternatingSampler, n_workers=2),
]


@pytest.mark.parametrize("wait_reset", [False, True])
@pytest.mark.parametrize("cls", SAMPLERS)
def test_a_plan_is_replaced_between_two_batches(cls: Any, wait_reset: bool) -> None:
    collector = {"collector_cls": WaitResetCollector} if wait_reset else {}
    with started(planned(cls, **collector)) as sampler:
        batches = collect(sampler, range(2))
        sampler.set_episode_plan(harder)
        batches += collect(sampler, range(2, 5))
        sampler.set_episode_plan(None)
        batches += collect(sampler, range(5, 7))
    assert follow(batches, [plan] * 2 + [harder] * 3 + [None] * 2) > 3 * B
    assert (batches[1][0].env.observation[..., 0] == -1).any(), "some episodes of a plan have no options"


@pytest.mark.parametrize("lag", [None, 1])
def test_a_plan_is_replaced_while_workers_are_ahead(lag: Any) -> None:
    options = {"lag": lag} if lag else {}
    with started(planned(AsyncSampler, n_slots=2, episode_plan=None, seed_episodes=True, **options)) as sampler:
        sampler.set_episode_plan(plan)  # before the first batch, so all samplers have the same
        sampler.start()
        batches = collect(sampler, 3)
        sampler.set_episode_plan(harder)
        more = collect(sampler, range(3, 9))
    follow(batches, [plan] * 3, first=None)
    assert (more[-1][0].env.observation[..., 0] >= 1000).all()


def test_a_plan_has_a_copy_of_what_it_uses() -> None:
    class Curriculum:
        level = 3.0

        def plan(self, env_rank: int, episode: int, rng: Any) -> Any:
            return {"level": self.level}

    curriculum = Curriculum()
    with started(planned()) as sampler:
        for level in (3.0, 4.0):
            curriculum.level = level
            sampler.set_episode_plan(curriculum.plan)
            curriculum.level = 9.0
            sampler.obtain_samples(0)
            assert sampler.samples_np.env.observation[-1, :, 0].tolist() == [level] * B
            assert levels_of(sampler)


# ---- recorded episodes ---------------------------------------------------------------------


WAITS: dict[str, Any] = {"collector_cls": WaitResetCollector}


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (SerialSampler, {}),
        (SerialSampler, WAITS),
        (ParallelSampler, {}),
        (partial(GpuSampler, n_workers=2), WAITS),
        (partial(AlternatingSampler, n_workers=2), WAITS),
    ],
)
@pytest.mark.parametrize("every", [1, 2])
def test_a_recorded_episode_has_the_options_that_it_began_with(cls: Any, options: Any, every: int) -> None:
    """There is a new plan before every batch, or every second one. Environments that wait begin with the one before."""
    levels: list[float] = []
    with started(planned(cls, max_decorrelation_steps=20, **options)) as sampler:
        for itr in range(8):
            if itr % every == every - 1:
                shift = 1000.0 * itr
                sampler.set_episode_plan(lambda env_rank, episode, rng, shift=shift: {"level": shift + rng.random()})
            sampler.obtain_samples(itr)
            found = levels_of(sampler)
            assert any(options is not None for options, _ in found)
            levels += [level for _, level in found]
        n_kept = len(sampler.run.log_reader._plans)
    assert n_kept < 6, "plans that no episode in the log has are dropped"
    last = 7 - every if options else 7
    assert {level // 1000 for level in levels} == {-1, 0, *range(every - 1, last + 1, every)}


@pytest.mark.parametrize("options", [{}, WAITS], ids=["resets", "waits"])
@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_the_episode_of_a_failure_has_its_options(cls: Any, options: Any, tmp_path: Path) -> None:
    with started(planned(cls, env_kwargs={"fails_at_level": 1000.0}, crash_dir=tmp_path, **options)) as sampler:
        collect(sampler, 2)
        sampler.set_episode_plan(harder)
        if options:  # after this batch, the environments begin with the hard plan
            collect(sampler, 1)
            sampler.set_episode_plan(plan)
            sampler.set_episode_plan(None)
        with pytest.raises(WorkerError) as caught:
            collect(sampler, 2)
    episode = caught.value.episode
    assert {path.suffix for path in tmp_path.iterdir()} == {".episode", ".json"}  # and a trace
    assert episode.options["level"] >= 1000
    env, action = episode.run()
    with pytest.raises(ValueError, match="too hard"):
        env.step(action)


@pytest.mark.slow
@pytest.mark.parametrize("is_set", [False, True])
def test_a_worker_that_is_replaced_follows_the_newest_plan(is_set: bool, tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        env_fn = [Maze] * 3 + [faulty_env(Maze, Fault("kill", at=30, marker=str(tmp_path / name)))] + [Maze]
        with started(planned(ParallelSampler, env_fn, on_worker_failure="restart")) as sampler:
            if is_set:
                sampler.set_episode_plan(harder)
            runs.append(collect(sampler, 6))
            assert sampler.stats().restarts == 1
            levels_of(sampler, runs[-1][-1])
    assert_same(*runs)
    last = runs[0][-1][0].env.observation[..., 0]
    assert ((last >= 1000) if is_set else (last < 1000)).all()


# ---- saved runs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_fn", "is_set", "options"),
    [(Maze, True, {}), (Maze, True, WAITS), (Maze, False, {}), (Repeated, True, WAITS), (Repeated, False, {})],
)
def test_a_run_that_is_continued_keeps_plan_and_options(env_fn: Any, is_set: bool, options: Any) -> None:
    samplers = [SerialSampler, ParallelSampler] if options else [ParallelSampler, SerialSampler]
    with started(planned(samplers[0], env_fn, **options)) as sampler:
        first = collect(sampler, 1)
        if is_set:
            sampler.set_episode_plan(easy)
        first += collect(sampler, range(1, 2))
        if is_set:
            sampler.set_episode_plan(plan)
            sampler.set_episode_plan(harder)
        state = sampler.state_dict()
        expected = collect(sampler, range(2, 5))
    assert {column["kind"] for column in state["columns"].values()} == {"repeat" if env_fn is Repeated else "pickle"}
    with started(planned(samplers[1], env_fn, **options)) as sampler:
        assert sampler.load_state_dict(state).exact == tuple(range(B))
        continued = collect(sampler, range(2, 3))
        levels_of(sampler, continued[-1])
        continued += collect(sampler, range(3, 5))
        levels_of(sampler, continued[-1])
    assert_same(continued, expected)
    follow(first + continued, [plan, easy, harder, harder, harder] if is_set else [plan] * 5)


def test_plans_of_a_state_that_are_damaged_are_refused() -> None:
    with started(planned()) as sampler:
        sampler.set_episode_plan(harder)
        state = sampler.state_dict()
    with started(planned()) as sampler:
        for damaged in ({**state, "plans": "x"}, {name: part for name, part in state.items() if name != "plans"}):
            with pytest.raises(ConfigError, match=r"this state is damaged: .*plans"):
                sampler.load_state_dict(damaged)
        sampler.obtain_samples(0)


# ---- several agents ------------------------------------------------------------------------


class Leveled(ScriptedGame):
    """Its observations show the level of its options."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.level = 0 if options is None else options["level"]
        return super().reset(seed, options)

    def observe(self) -> Any:
        return {agent: seen + np.float32(1000 * self.level) for agent, seen in super().observe().items()}


def test_games_in_lock_step_have_options_too() -> None:
    def level(env_rank: int, episode: int, rng: Any) -> Any:
        return {"level": 10 * env_rank + episode}

    batches = []
    for cls in (SerialSampler, ParallelSampler):
        with started(planned(cls, Leveled, episode_plan=level)) as sampler:
            batches.append(collect(sampler, 4))
            seats, env = sampler.seats()["agent"], sampler.samples_np.env
            for column, (e, _) in enumerate(seats):
                if env.valid[-1, column]:
                    episode = sampler.episode(e, T - 1)
                    assert episode.options == {"level": 10 * e + episode.episode}
                    game, _ = episode.run()
                    assert game.level == episode.options["level"]
    assert_same(*batches)


# ---- what cannot work ----------------------------------------------------------------------


def test_what_does_not_go_together_with_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^episode_plan and batched environments do not go together"):
        planned(env_fn=BatchedCartPole, batched=True)
    with (
        planned(env_fn=TurnGame) as sampler,
        pytest.raises(ConfigError, match=r"^episode_plan and games in turns do not go together"),
    ):
        sampler.initialize(RandomAgent())
    with pytest.raises(ConfigError, match="episode_plan must be a function of env_rank, episode and rng, or None"):
        planned(episode_plan={"level": 3})
    with planned(episode_plan=None) as sampler:
        with pytest.raises(SamplerStateError, match="set_episode_plan was called out of order"):
            sampler.set_episode_plan(plan)
        sampler.initialize(RandomAgent())
        with pytest.raises(ConfigError, match="set_episode_plan needs a first episode_plan, or seed_episodes=True"):
            sampler.set_episode_plan(plan)
    with started(planned(ParallelSampler)) as sampler:
        frame: Any = sys._getframe()
        for wrong, problem in ((3, "must be a function"), (partial(plan, frame), "cannot be pickled")):
            with pytest.raises(ConfigError, match=f"episode.plan {problem}"):
                sampler.set_episode_plan(wrong)
        follow(collect(sampler, 2), [plan] * 2)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
@pytest.mark.parametrize("env_fn", [Maze, Leveled])
def test_a_plan_that_fails_is_named(cls: Any, env_fn: Any) -> None:
    def fails(env_rank: int, episode: int, rng: Any) -> Any:
        return {"level": 1 // (episode - 2)} if episode else [env_rank, 3]

    text = r"while resetting env_rank (\d)(.|\n)*episode_plan must return a dict, .*; for env_rank \1, episode 0 it"
    with planned(cls, env_fn, episode_plan=fails) as sampler, pytest.raises(WorkerError, match=text):
        sampler.initialize(RandomAgent())
    text = r"while resetting env_rank (\d)(.|\n)*episode_plan raised ZeroDivisionError.* for env_rank \1, episode 2"
    with started(planned(cls, env_fn, episode_plan=None, seed_episodes=True)) as sampler:
        sampler.set_episode_plan(fails)
        with pytest.raises(WorkerError, match=text) as caught:
            collect(sampler, 9)
    assert caught.value.episode is None
    assert isinstance(caught.value.__cause__, Exception)


class Popping(Maze):
    """Takes the first goal out of its options."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.drawn = float(options["goals"].pop(0))
        return self._seen(), {}


GOALS = {"goals": [1, 2, 3]}


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_what_an_environment_changes_in_its_options_is_in_no_other_episode(cls: Any) -> None:
    with started(planned(cls, Popping, episode_plan=lambda *_: dict(GOALS))) as sampler:
        sampler.obtain_samples(0)
        samples = sampler.samples_np
        starts = samples.env.prev_done & samples.env.valid
        assert starts.sum() > B
        assert (samples.env.observation[starts][:, 2] == 1).all()
        assert sampler.episode(0, T - 1).options == {"goals": [1, 2, 3]}
