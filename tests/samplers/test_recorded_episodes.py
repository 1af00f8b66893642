"""seed_episodes=True: any step of the last batch, and any failure, can be repeated in another environment.
`RecordedEpisode.film` returns what this environment renders."""

import importlib.util
import itertools
import os
import pickle
import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    ConfigError,
    GameError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    RecordedEpisode,
    RepeatError,
    Sampler,
    SamplerStateError,
    SerialSampler,
    WaitResetCollector,
    WorkerError,
)
from penstock.columns import episode_log
from penstock.envs import BatchedCartPole, CountingEnv, NestedEnv, ScriptedGame
from penstock.testing import Fault, FaultyAgent, faulty_env

from ..scale import mostly_first, some
from ..support import Diary, collect
from .started import check_refused, started

T, B = 12, 4


def recording(env_fn: Any = "CartPole-v1", cls: type[Sampler] = SerialSampler, **options: Any) -> Any:
    """A sampler that has started."""
    given = {"batch_T": T, "batch_B": B, "n_workers": 2, "max_decorrelation_steps": 30, "seed_episodes": True}
    return started(env_fn, cls=cls, **{**given, **options})


class Walk(gym.Env[Any, Any]):
    """A random walk from the seed of its reset. Every third step pays a random reward; an episode has 5 to 40 steps."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, noise: float = 0.0, fails_at: int = -1) -> None:
        self.noise, self.fails_at = noise, fails_at

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.length = 0, int(self.np_random.integers(5, 40))
        self.position = self.np_random.normal(size=2)
        return self.position.copy(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.count == self.fails_at:
            raise ValueError(f"step {self.count} fails")
        self.count += 1
        self.position = self.position + action + self.np_random.normal(size=2)
        reward = float(self.position[0]) if self.count % 3 == 0 else 0.0
        if self.noise:
            reward += self.noise * np.random.default_rng().normal()
        return self.position.copy(), reward, self.count == self.length, False, {}


@pytest.mark.slow
@pytest.mark.parametrize("wait_reset", [False, True])
@pytest.mark.parametrize(
    ("env_fn", "cls"),
    mostly_first(
        [Walk, partial(NestedEnv, 31)], [SerialSampler, *some([ParallelSampler, GpuSampler, AlternatingSampler], 1)]
    ),
)
def test_any_step_of_the_last_batch_is_repeated(env_fn: Any, cls: type[Sampler], wait_reset: bool) -> None:
    rng = np.random.default_rng(0)
    collector = {"collector_cls": WaitResetCollector} if wait_reset else {}
    n_long = 0
    with recording(env_fn, cls, **collector, seed=4) as sampler:
        for itr in range(6):
            sampler.obtain_samples(itr)
            samples = sampler.samples_np
            for t, b in zip(*np.nonzero(samples.env.valid), strict=True):
                if rng.random() > 0.2:
                    continue
                episode = sampler.episode(int(b), int(t))
                env, action = episode.run()
                _, reward, terminated, truncated, _ = env.step(action)
                env.close()
                assert np.float32(reward) == samples.env.reward[t, b]
                assert (terminated, truncated) == (samples.env.terminated[t, b], samples.env.truncated[t, b])
                n_long += episode.step > t
    assert n_long > 10, "episodes that began before this batch, some before the first"


def test_only_later_episodes_differ_from_a_run_without_the_option() -> None:
    starts = []
    for seed_episodes in (False, True):
        with recording(Walk, batch_T=50, max_decorrelation_steps=0, seed_episodes=seed_episodes, seed=4) as sampler:
            sampler.obtain_samples(0)
            env = sampler.samples_np.env
            starts.append((env.observation[0].copy(), [env.observation[:, b][env.prev_done[:, b]] for b in range(B)]))
    assert np.array_equal(starts[0][0], starts[1][0])
    for plain, seeded in zip(starts[0][1], starts[1][1], strict=True):
        assert not np.array_equal(plain[1:2], seeded[1:2])
        assert len(np.unique(seeded[:, 0])) == len(seeded), "no episode is repeated"


class Told(Walk):
    """Its last reward is a part of the seed that its reset got; none: -1."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seed = -1 if seed is None else seed % 2**20
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, _, terminated, *rest = super().step(action)
        return observation, float(self.seed * terminated), terminated, *rest


@pytest.mark.slow
@pytest.mark.parametrize("seed_episodes", [True, False])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (SerialSampler, {"collector_cls": WaitResetCollector}),
        (ParallelSampler, {"traj_info_cls": Diary}),
        (GpuSampler, {"server": "process"}),
        (AlternatingSampler, {}),
        (AsyncSampler, {"n_slots": 3}),
    ],
)
def test_a_trajectory_has_the_seed_of_its_reset(cls: type[Sampler], options: Any, seed_episodes: bool) -> None:
    infos: list[Any] = []
    with recording(Told, cls, seed_episodes=seed_episodes, eval_n_envs=2, eval_episodes=4, **options) as sampler:
        for itr in range(12):
            infos += sampler.obtain_samples(itr)[1]
        evaluated = sampler.evaluate_agent(0)
    assert all(info.Return == info.seed % 2**20 for info in evaluated)
    assert [(info.env_rank, info.number) for info in evaluated] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    if not seed_episodes:
        assert {info.seed for info in infos} == {None}
        return
    assert all(info.Return == info.seed % 2**20 for info in infos)
    assert len({info.seed for info in infos}) == len(infos) > 2 * B


# ---- failures ------------------------------------------------------------------------------


def failure(env_fn: Any, cls: type[Sampler] = SerialSampler, **options: Any) -> WorkerError:
    with pytest.raises(WorkerError) as caught, recording(env_fn, cls, seed=1, **options) as sampler:
        collect(sampler, 50)
    return caught.value


@pytest.mark.parametrize("where", ["batch", "random steps"])
@pytest.mark.parametrize("cls", [ParallelSampler, SerialSampler])
def test_run_stops_before_the_step_that_failed(cls: type[Sampler], where: str, tmp_path: Path) -> None:
    n = 400 if where == "random steps" else 0
    error = failure(Walk, cls, batch_T=5, max_decorrelation_steps=n, env_kwargs={"fails_at": 17}, crash_dir=tmp_path)
    assert ("in the random steps before the first batch" in str(error)) == (where == "random steps")
    assert "error.episode.run() repeats episode" in str(error)
    path = error.episode.path  # the worker of another environment may have failed too
    assert path in str(error)
    for episode in (error.episode, RecordedEpisode.load(path)):
        assert episode.step == 17
        assert f"until its step 17 (worker {episode.context.worker_rank}" in str(episode)
        env, action = episode.run()
        assert env.count == 17
        with pytest.raises(ValueError, match="step 17 fails"):
            env.step(action)


def test_run_stops_before_a_reset_that_failed() -> None:
    error = failure(faulty_env(Walk, Fault("raise", at=4), "reset"))
    env, action = error.episode.run()
    assert action is None
    assert (error.episode.is_reset, error.episode.step, error.episode.episode) == (True, 0, 3)
    env.reset(seed=error.episode.seed)
    assert env.unwrapped.count == 0


class OneMemory(Walk):
    """Returns the same array each time. Counts the environments that are not closed."""

    n_open = 0

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__(fails_at=fails_at)
        self.memory = np.zeros(2)
        OneMemory.n_open += 1

    def reset(self, **kwargs: Any) -> Any:
        self.memory[:], info = super().reset(**kwargs)
        return self.memory, info

    def step(self, action: Any) -> Any:
        self.memory[:], *rest = super().step(action)
        return self.memory, *rest

    def close(self) -> None:
        OneMemory.n_open -= 1


def test_the_steps_of_an_episode_are_those_of_the_batch() -> None:
    with recording(OneMemory, batch_T=40, max_decorrelation_steps=0, seed=4) as sampler:
        sampler.obtain_samples(0)
        samples, n_open = sampler.samples_np, OneMemory.n_open
        t = int(np.argmax(samples.env.done[:, 1]))  # the end of the first episode
        steps = list(sampler.episode(1, t).steps())
        assert OneMemory.n_open == n_open, "each is closed"
        env, action = sampler.episode(1, t).run()
        env.step(action)
        assert len(steps) == t + 1
        assert [step.terminated for step in steps] == [False] * t + [True]
        np.testing.assert_array_equal([step.observation for step in steps], samples.env.observation[: t + 1, 1])
        np.testing.assert_array_equal([step.action for step in steps], samples.agent.action[: t + 1, 1])
        np.testing.assert_array_equal(np.float32([step.reward for step in steps]), samples.env.reward[: t + 1, 1])
        np.testing.assert_array_equal(steps[-1].next_observation, env.memory)
        for before, after in itertools.pairwise(steps):
            np.testing.assert_array_equal(before.next_observation, after.observation)
        first = sampler.episode(1, t).steps()
        next(first)
        assert OneMemory.n_open == n_open + 2
        first.close()
        assert OneMemory.n_open == n_open + 1, "also one that is left early"


def test_the_steps_end_with_what_failed_and_differ_as_run_does() -> None:
    episode = failure(OneMemory, max_decorrelation_steps=0, env_kwargs={"fails_at": 17}).episode
    n_open, steps = OneMemory.n_open, []
    with pytest.raises(ValueError, match="step 17 fails"):
        steps += episode.steps()
    assert len(steps) == 17
    differs = replace(episode, rewards=np.where(np.arange(17) == 5, 9, episode.rewards))
    with pytest.raises(RepeatError, match=r"of its 17 steps: the reward of step 5 is"):
        list(differs.steps())
    with pytest.raises(RepeatError, match=r"observation before step 17 is"):
        list(replace(episode, observation=episode.observation + 1).steps())
    with pytest.raises(RepeatError, match=r"the log no longer has the first 3"):
        list(replace(episode, n_missing=3).steps())
    assert OneMemory.n_open == n_open
    assert list(replace(episode, actions=episode.actions[:0], rewards=episode.rewards[:0]).steps()) == []


def test_data_that_do_not_fit_are_replayed_too() -> None:
    class Wrong(Walk):
        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            return (observation[:1] if self.count == 9 else observation), *rest

    error = failure(Wrong, max_decorrelation_steps=0)
    env, action = error.episode.run()
    assert len(env.step(action)[0]) == 1


def test_a_failure_outside_of_training_environments_has_no_replay() -> None:
    assert failure(Walk, agent=FaultyAgent(RandomAgent(), Fault("raise", at=3))).episode is None
    assert failure(Walk, env_kwargs={"fails_at": 17}, seed_episodes=False).episode is None
    with (
        recording(Walk, eval_n_envs=2, eval_env_kwargs={"fails_at": 3}) as sampler,
        pytest.raises(WorkerError) as caught,
    ):
        sampler.evaluate_agent(0)
    assert caught.value.episode is None


def test_a_file_that_cannot_be_written_does_not_hide_the_failure(tmp_path: Path) -> None:
    with recording(Walk, env_kwargs={"fails_at": 17}, crash_dir=tmp_path / "crashes", seed=1) as sampler:
        (tmp_path / "crashes").rmdir()
        with pytest.raises(WorkerError, match=r"step 17 fails(.|\n)*not written: .*No such file") as caught:
            collect(sampler, 50)
        assert caught.value.episode.step == 17
        with pytest.raises(WorkerError) as again:
            sampler.obtain_samples(99)
        assert again.value.episode is caught.value.episode, "later calls raise the same"


def test_a_crash_file_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "now")
    victim, folder = tmp_path / "victim", tmp_path / "crashes"
    victim.write_text("mine")
    with recording(Walk, env_kwargs={"fails_at": 17}, crash_dir=folder, seed=1) as sampler:
        for env_rank in range(B):
            for episode in range(20):
                name = f"env_rank_{env_rank}-episode_{episode}-step_17-now-{os.getpid()}-1.episode"
                (folder / name).symlink_to(victim)
        with pytest.raises(WorkerError, match=r"not written: .*File exists"):
            collect(sampler, 50)
    assert victim.read_text() == "mine"


@pytest.mark.slow
def test_a_replaced_worker_leaves_a_file(tmp_path: Path) -> None:
    fault = Fault("raise", at=60, marker=str(tmp_path / "marker"))
    folder = tmp_path / "crashes"
    with recording(
        faulty_env(Walk, fault), ParallelSampler, on_worker_failure="restart", crash_dir=folder, seed=1
    ) as sampler:
        starts = [batch.env.observation[batch.env.prev_done] for batch, _ in collect(sampler, 10)]
        assert len(np.unique(np.concatenate(starts), axis=0)) == sum(map(len, starts)) > B, "none begins twice"
        assert sampler.stats().restarts == 1
        for env_rank in range(B):
            sampler.episode(env_rank, 3).run()[0].close()  # the new worker's episodes can be repeated too
    (path,) = folder.glob("*.episode")
    RecordedEpisode.load(path).run()[0].close()


def test_episodes_after_one_that_was_cut_are_repeated() -> None:
    class Failing(Walk):
        def step(self, action: Any) -> Any:
            if self.count == 3 and self.length % 2:
                raise GameError("the game has failed")
            return super().step(action)

    with recording(Failing, batch_T=60, on_game_failure="renew", max_renewals=1000) as sampler:
        sampler.obtain_samples(0)
        env = sampler.samples_np.env
        for t, b in np.argwhere(env.valid).tolist():
            again, action = sampler.episode(b, t).run()
            assert np.float32(again.step(action)[1]) == env.reward[t, b]
        assert sampler.stats().cut_episodes > B


# ---- what cannot be repeated ---------------------------------------------------------------


def test_an_environment_that_is_not_deterministic_is_named_with_its_first_step_that_differs() -> None:
    with recording(Walk, env_kwargs={"noise": 1.0}, max_decorrelation_steps=0) as sampler:
        sampler.obtain_samples(0)
        with pytest.raises(RepeatError, match=r"of env_rank 2 differs .* of its 4 steps: the reward of step 0 is"):
            sampler.episode(2, 4).run()
    with recording(CountingEnv, max_decorrelation_steps=0) as sampler:  # it counts episodes, so they are not alike
        sampler.obtain_samples(0)
        sampler.episode(1, 4).run()
        with pytest.raises(RepeatError, match=r"episode 1 of env_rank 1 differs .* observation before step 2 is"):
            sampler.episode(1, 7).run()


def test_a_step_that_raises_or_ends_too_early_is_named() -> None:
    class Other(Walk):
        """Another environment than the one that was recorded, from the second that is built on."""

        how = ""

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            if Other.how == "raise" and self.count == 3:
                raise KeyError("x")
            return observation, reward, terminated or (Other.how == "end" and self.count == 2), truncated, info

    with recording(Other, max_decorrelation_steps=0) as sampler:
        sampler.obtain_samples(0)
        episode = sampler.episode(0, 4)
    Other.how = "raise"
    with pytest.raises(RepeatError, match=r"of its 4 steps: step 2 raised KeyError"):
        episode.run()
    Other.how = "end"
    with pytest.raises(RepeatError, match=r"of its 4 steps: it ends at step 1"):
        episode.run()


def test_an_episode_that_is_longer_than_the_log_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_log, "_MOST_STEPS", 7)
    with recording("Pendulum-v1", max_decorrelation_steps=0) as sampler:
        for itr in range(4):
            sampler.obtain_samples(itr)
            if itr == 0:
                sampler.episode(0, T - 1).run()[0].close()
        with pytest.raises(RepeatError, match=r"Of its 46 steps, the log no longer has the first 29"):
            sampler.episode(0, 10).run()


def test_an_episode_is_repeated_across_the_place_where_the_log_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_log, "_MOST_STEPS", 7)  # 19 rows: an episode may have 7 steps before the last batch
    lengths = []
    with recording(Walk, batch_B=20, max_decorrelation_steps=0) as sampler:
        for itr in range(5):
            sampler.obtain_samples(itr)
            for episode in (sampler.episode(b, 0) for b in range(20)):
                if not episode.n_missing:
                    episode.run()[0].close()
                    lengths.append(episode.step)
    assert sum(length > 1 for length in lengths) > 3


def test_calls_and_arguments_that_cannot_work(tmp_path: Path) -> None:
    message = "seed_episodes=True and batched environments do not go together"
    check_refused(BatchedCartPole, message, batched=True, seed_episodes=True)
    check_refused(Walk, "crash_dir needs seed_episodes=True", crash_dir=tmp_path)
    check_refused(Walk, "crash_dir must be the path of a folder", seed_episodes=True, crash_dir=3)
    (tmp_path / "file").touch()
    check_refused(Walk, "cannot be made", seed_episodes=True, crash_dir=tmp_path / "file")
    message = "construct the sampler with seed_episodes=True"
    with recording(seed_episodes=False) as sampler, pytest.raises(ConfigError, match=message):
        sampler.episode(0, 0)
    with recording(collector_cls=WaitResetCollector, batch_T=60) as sampler:
        with pytest.raises(SamplerStateError, match="before the first batch"):
            sampler.episode(0, 0)
        sampler.obtain_samples(0)
        for env_rank, t in ((B, 0), (-1, 0), (0, 60)):
            with pytest.raises(ConfigError, match=r"must be (at most|an integer of at least)"):
                sampler.episode(env_rank, t)
        t, b = np.argwhere(~sampler.samples_np.env.valid)[0]
        with pytest.raises(ConfigError, match=f"env_rank {b} made no step at t={t}"):
            sampler.episode(int(b), int(t))
    message = r"episode\(\) and AsyncSampler do not go together"
    with recording(cls=AsyncSampler) as sampler, pytest.raises(ConfigError, match=message):
        sampler.episode(0, 0)


def test_a_file_that_is_no_episode_and_a_factory_that_cannot_be_pickled(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(pickle.dumps(3))
    with pytest.raises(ConfigError, match="does not contain a RecordedEpisode, but a int"):
        RecordedEpisode.load(tmp_path / "other")
    (tmp_path / "other").write_text("i am no pickle\n")
    with pytest.raises(ConfigError, match="other cannot be read as a RecordedEpisode"):
        RecordedEpisode.load(tmp_path / "other")

    class Unpicklable(Walk):
        def __reduce__(self) -> Any:
            raise TypeError("not this one")

    env = Unpicklable()
    with recording(lambda: env) as sampler:
        sampler.obtain_samples(0)
        with pytest.raises(ConfigError, match="the episode cannot be pickled"):
            sampler.episode(0, 0).save(tmp_path / "episode")


# ---- films ---------------------------------------------------------------------------------


class Clip:
    """In place of moviepy's: it writes the frames themselves."""

    def __init__(self, frames: Any, fps: Any) -> None:
        self.frames, self.fps = frames, fps

    def write_videofile(self, path: str, logger: Any) -> None:
        with Path(path).open("wb") as file:
            np.savez(file, frames=np.stack(self.frames), fps=self.fps)


class Painted(gym.Env[Any, Any]):
    """Its pictures show the seed of the reset and the step. It paints into the same memory each time."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012 - as Gymnasium has it
    observation_space = CountingEnv().observation_space
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode: Any = None, length: int = 5, fails_at: int = -1, color: int = 1) -> None:
        self.render_mode, self.length, self.fails_at = render_mode, length, fails_at
        self.picture = np.full((4, 8, 3), color, np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count, self.picture[..., 0] = 0, seed % 256
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.count == self.fails_at:
            raise ValueError("broken")
        self.count += 1
        observation = np.full(self.observation_space.shape, self.count, np.float32)
        return observation, 1.0, self.count == self.length, False, {}

    def render(self) -> Any:
        self.picture[..., 1] = self.count
        return self.picture


class Game(ScriptedGame):
    """A game that paints."""

    metadata: dict[str, Any] = {"render_fps": 3}  # noqa: RUF012

    def __init__(self, render_mode: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.full((4, 4, 3), self.t, np.uint8)


def episode_of(env_fn: Any = Painted, t: int = 4, cls: Any = SerialSampler, **options: Any) -> Any:
    """The episode until step t of the first batch."""
    options = {"batch_T": 6, "batch_B": 2, "max_decorrelation_steps": 0, **options}
    with recording(env_fn, cls, **options) as sampler:
        sampler.obtain_samples(0)
        return sampler.episode(1, t)


@pytest.fixture
def moviepy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub of moviepy."""
    for name in ("moviepy", "moviepy.video.io.ImageSequenceClip"):
        stub: Any = ModuleType(name)
        stub.__spec__, stub.ImageSequenceClip = ModuleSpec(name, None), Clip
        monkeypatch.setitem(sys.modules, name, stub)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_a_film_shows_the_reset_and_each_step(cls: Any) -> None:
    episode = episode_of(cls=cls)
    frames = episode.film()
    assert (frames.dtype, frames.shape) == (np.uint8, (6, 4, 8, 3))
    assert frames[:, 0, 0, 1].tolist() == [0, 1, 2, 3, 4, 5]
    assert set(frames[..., 0].flat) == {episode.seed % 256}
    assert len(episode_of(t=2).film()) == 4
    assert len(episode_of(t=5).film()) == 2, "the next episode"


def test_arguments_of_the_environment_may_be_changed() -> None:
    episode = episode_of(env_kwargs={"render_mode": None, "color": 9})
    assert set(episode.film()[..., 2].flat) == {9}
    assert set(episode.film(color=3)[..., 2].flat) == {3}
    assert set(episode_of(partial(Painted, render_mode="human")).film(render_mode="rgb_array")[..., 2].flat) == {1}


def test_an_environment_that_renders_by_itself_needs_no_argument() -> None:
    assert len(episode_of(lambda: Painted("rgb_array")).film()) == 6


@pytest.mark.usefixtures("moviepy")
@pytest.mark.parametrize(("fps", "wanted"), [(None, 7), (20, 20)])
def test_a_film_is_written_into_a_file(fps: Any, wanted: int, tmp_path: Path) -> None:
    frames = episode_of().film(tmp_path / "a.mp4", fps=fps)
    file = np.load(tmp_path / "a.mp4")
    assert file["fps"] == wanted
    np.testing.assert_array_equal(file["frames"], frames)


@pytest.mark.usefixtures("moviepy")
def test_a_film_of_a_failure_ends_before_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        episode_of(env_kwargs={"fails_at": 3})
    frames = caught.value.episode.film(tmp_path / "a.mp4")
    assert frames[:, 0, 0, 1].tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("moviepy")
def test_a_film_of_a_game(tmp_path: Path) -> None:
    frames = episode_of(Game, t=1).film(tmp_path / "a.mp4")
    assert frames[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert np.load(tmp_path / "a.mp4")["fps"] == 3


def without_arguments() -> Any:
    return Painted()


class Flat(Painted):
    def render(self) -> Any:
        return self.picture[..., 0]


def test_what_cannot_be_filmed_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs render_mode=\"rgb_array\", but has None. Give env_fn a parameter"):
        episode_of(without_arguments).film()
    with pytest.raises(ConfigError, match=r"of env_rank 1 cannot be filmed: .* but has 'human'"):
        episode_of().film(render_mode="human")
    with pytest.raises(ConfigError, match=r"must return an array \[height, width, 3\] of uint8, got array\(\[\["):
        episode_of(Flat).film()
    with pytest.raises(TypeError, match="colour"):
        episode_of().film(colour=3)
    with pytest.raises(RepeatError, match="it ends at step 1"):
        episode_of().film(length=2)
    episode = episode_of()
    with pytest.raises(ConfigError, match="cannot be filmed: it stops before its reset"):
        replace(episode, actions=episode.actions[:0], rewards=episode.rewards[:0]).film()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "moviepy" else find_spec(name))
    with pytest.raises(ConfigError, match=r"needs moviepy.*pip install moviepy, or \"\.\[video\]\""):
        episode.film(tmp_path / "a.mp4")
    assert len(episode.film()) == 6


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("moviepy", "pygame"))), reason="needs moviepy and pygame to make a film"
)
def test_a_film_of_cartpole(tmp_path: Path) -> None:
    frames = episode_of("CartPole-v1", batch_T=20).film(tmp_path / "a.mp4")
    from moviepy import VideoFileClip

    with VideoFileClip(str(tmp_path / "a.mp4")) as clip:
        assert (clip.w, clip.h, clip.fps) == (600, 400, 50)
        assert abs(clip.n_frames - len(frames)) <= 1
