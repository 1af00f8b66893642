"""A replay behind real samplers, in a file, and its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from penstock import ConfigError, RandomAgent, SerialSampler, SpaceError
from penstock.envs import CountingEnv
from penstock.learning import Frames, Prioritized, Replay, Sequences
from penstock.learning import ring as ring_module

from ..support import assert_same
from .streams import Stream


class Pictures(gym.Env[Any, int]):
    """Random pictures. Episodes end, one way or the other, at random."""

    observation_space = spaces.Box(0, 255, (6, 5), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._picture(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        ends = self.np_random.random(2) < 0.1
        return self._picture(), float(action), bool(ends[0]), bool(ends[1]), {}

    def _picture(self) -> Any:
        return self.np_random.integers(1, 256, (6, 5), np.uint8)


@pytest.mark.parametrize("options", [{}, {"n_slots": 2}, {"debug": True}])
def test_a_batch_is_appended_only_once(options: Any) -> None:
    replay = Replay(200, seed=0)
    with SerialSampler(CountingEnv, batch_T=8, batch_B=2, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(6):
            samples, _ = sampler.obtain_samples(itr)
            if itr < 4:
                replay.append(samples)
            else:  # the parts of a batch are no repetition
                replay.append(samples[:4])
                samples = samples[4:]
                replay.append(samples)
            with pytest.raises(ConfigError, match=f"batch {itr} is in the replay already: append each batch once"):
                replay.append(samples)
            assert replay.n_steps == 16 * (itr + 1)


@pytest.mark.parametrize("padding", ["reset", "zero"])
def test_frames_of_gymnasium_are_built_again(padding: str) -> None:
    def make() -> Any:
        return FrameStackObservation(Pictures(), 4, padding_type=padding)

    whole = Replay(2 * 33, 3, max_truncations=66, seed=0)
    frames = Replay(2 * 33, 3, frames=Frames(4, padding), max_truncations=66, seed=0)
    with SerialSampler(make, batch_T=7, batch_B=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(15):
            samples, _ = sampler.obtain_samples(itr)
            for replay in (whole, frames):
                replay.append(samples)
            if itr < 2:
                continue
            index = frames.contents.index
            assert_same(frames.contents.read(index), whole.contents.read(index))
    assert frames.nbytes < whole.nbytes / 2.2


@pytest.mark.parametrize("T", [1, 7])
def test_what_is_no_stack_is_refused_in_the_first_batches(T: int) -> None:
    """A batch of one row is compared with the row before."""
    stream, replay = Stream(1, 2, frames=Frames(3), p_end=0.0), Replay(200, frames=Frames(3), max_truncations=200)
    if T == 1:
        replay.append(stream.batch(1))
    samples = stream.batch(T)
    with pytest.raises(ConfigError, match=r"shape \(4, ...\)"):
        Replay(100, frames=Frames(4)).append(samples)
    samples.env.observation[...] = np.random.default_rng(0).normal(size=samples.env.observation.shape)
    with pytest.raises(SpaceError, match="is no stack of the last 3 frames"):
        replay.append(samples)


@pytest.mark.parametrize("options", [{}, {"prioritized": Prioritized()}, {"sequences": Sequences(4, 1, 2)}])
def test_a_replay_in_a_file_is_the_same_and_leaves_no_file(tmp_path: Path, options: Any) -> None:
    path = tmp_path / "steps"
    streams = [Stream(0, 2, nested=not options.get("sequences")) for _ in range(2)]
    replays = [Replay(100, 2, file=file, max_truncations=99, seed=0, **options) for file in (None, path)]
    for _ in range(20):
        for stream, replay in zip(streams, replays, strict=True):
            replay.append(stream.batch(9))
        batches = [replay.sample(16) for replay in replays]
        for (_, a), (_, b) in zip(*(batch.leaves() for batch in batches), strict=True):
            assert torch.equal(a, b)
    assert not path.exists()
    path.touch()
    with pytest.raises(ConfigError, match="exists"):
        Replay(100, file=path).append(streams[0].batch(9))
    with pytest.raises(ConfigError, match="cannot be made"):
        Replay(100, file=tmp_path / "missing" / "steps").append(streams[0].batch(9))


def test_too_large_a_replay_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    samples = Stream(0, 2).batch(9)
    before = psutil.Process().memory_info().rss
    with pytest.raises(ConfigError, match=r"TiB of memory.*lower capacity"):
        Replay(10**12).append(samples)
    with pytest.raises(ConfigError, match="Lower capacity"):
        Replay(10**13, file=tmp_path / "steps").append(samples)
    assert psutil.Process().memory_info().rss < before + 2**26
    assert not list(tmp_path.iterdir())


def test_settings_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    prioritized = Prioritized(np.float32(0.5), np.float32(0.25))  # type: ignore[arg-type]
    sequences = Sequences(np.int64(4), np.int64(1), np.int64(2))  # type: ignore[arg-type]
    stream = Stream(0, 3)
    options: Any = {"prioritized": prioritized, "sequences": sequences, "max_truncations": np.int64(40)}
    replay = Replay(np.int64(90), **options)  # type: ignore[arg-type]
    replay.append(stream.batch(20))
    replay.sample(np.int64(2))  # type: ignore[arg-type]
    replay.beta = np.float32(0.75)  # type: ignore[assignment]
    replay.save(tmp_path)
    loaded = Replay.load(tmp_path)
    assert (loaded.sequences, loaded.alpha, loaded.beta, loaded.n_drawn) == (Sequences(4, 1, 2), 0.5, 0.75, 2)
    with pytest.raises(ConfigError, match="capacity must be an integer of at least 1, got 0"):
        Replay.load(tmp_path, capacity=0)


def test_its_repr_says_what_it_draws_and_holds() -> None:
    replay = Replay(100, n_step=3, frames=Frames(4))
    assert repr(replay) == "<Replay(100, n_step=3, discount=0.99, frames=Frames(n=4, padding='reset')) with 0 steps>"


def test_what_is_no_batch_or_no_earlier_batch_is_refused() -> None:
    samples = Stream(0, 3).batch(9)
    replay = Replay(30)
    replay.append(samples)
    for other, problem in (
        (samples.map(lambda array: array[:, 0]), r"a replay takes batches \[T, B\]"),
        (None, "a replay takes samples, got a NoneType"),
        (samples.to_dict(), "a replay takes samples, got a dict"),
        ((samples, []), r"got a tuple: obtain_samples returns \(samples, traj_infos\)"),
    ):
        with pytest.raises(ConfigError, match=problem):
            replay.append(other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="out has 5 positions, but 4 are to be drawn"):
        replay.sample(4, out=replay.sample(5))
    with pytest.raises(ConfigError, match="out must be an earlier ReplayBatch of this replay or None, got 3"):
        replay.sample(8, out=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": 2.5}, "capacity"),
        ({"n_step": 0}, "n_step"),
        ({"discount": 1.1}, "discount"),
        ({"prioritized": True}, "prioritized must be Prioritized"),
        ({"frames": 4}, "frames must be Frames"),
        ({"max_truncations": 0}, "max_truncations"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": "x"}, "seed must be an integer of at least 0, got 'x'"),
        ({"file": 5}, "file must be a path or None, got 5"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Replay(**{"capacity": 10, **arguments})
    for n, padding in ((1, "reset"), (4, "edge")):
        with pytest.raises(ConfigError, match=r"n must be|padding must be"):
            Frames(n, padding)


def test_batches_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    replay = Replay(40, max_truncations=99)
    replay.append(Stream(0, 2).batch(9))
    with pytest.raises(ConfigError, match="3 columns, the replay 2"):
        replay.append(Stream(0, 3).batch(9))
    with pytest.raises(ConfigError, match="does not fit into capacity=40"):
        replay.append(Stream(0, 2).batch(21))
    with pytest.raises(SpaceError, match="observation of this batch"):
        replay.append(Stream(0, 2, nested=True).batch(9))
    assert replay.n_steps == 18
    with pytest.raises(ConfigError, match="a window has 4 rows"):
        Replay(6, 3).append(Stream(0, 2).batch(1))
    samples = Stream(0, 2, p_end=1.0).batch(9)
    env = type(samples.env)({name: field for name, field in samples.env.items() if name != "final_obs"})
    with pytest.raises(ConfigError, match="record_final_obs=True"):
        Replay(100).append(type(samples)(env=env, agent=samples.agent))


@pytest.mark.parametrize("prioritized", [None, Prioritized()])
def test_a_failed_write_is_not_visible(prioritized: Prioritized | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, replay = Stream(0, 2), Replay(40, prioritized=prioritized, max_truncations=99, seed=0)
    replay.append(stream.batch(20))
    replay.sample(1)
    real = ring_module.copy_rows

    def failing(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(ring_module, "copy_rows", failing)
    with pytest.raises(KeyboardInterrupt):
        replay.append(stream.batch(5))
    monkeypatch.undo()
    assert replay.n_steps == 40
    assert len(replay) == 30, "the rows that were being overwritten are gone"
    assert replay.sample(500).index.min() >= 10
    assert replay.sample(500).index.max() < 38


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_final_observations_must_be_stacks_too_and_the_padding_that_of_the_environment(ending: str) -> None:
    stream = Stream(0, 2, frames=Frames(3), p_end=0.5)
    samples = stream.batch(30)
    with pytest.raises(SpaceError, match='padding="zero"'):
        Replay(100, frames=Frames(3, "zero"), max_truncations=99).append(samples)
    env = samples.env
    other = {"terminated": env.truncated, "truncated": env.terminated}[ending]
    t, b = (int(index[0]) for index in np.nonzero(env[ending][1:] & ~other[1:]))
    env.final_obs[t + 1, b, 0] += 1
    with pytest.raises(SpaceError, match=f"row {t + 1} of the batch is no stack"):
        Replay(100, frames=Frames(3), max_truncations=99).append(samples)


def test_at_the_begin_of_an_episode_previous_actions_and_rewards_may_be_others() -> None:
    stream, replay = Stream(0, 4, p_end=0.5), Replay(400, max_truncations=99)
    is_partial: list[Any] = []
    for _ in range(9):
        samples = stream.batch(9)
        begins = samples.env.prev_done[0]
        samples.env.prev_reward[0, begins] = samples.agent.prev_action[0, begins] = 77
        replay.append(samples)
        is_partial.append(replay.contents.rows().is_partial[-9])
    assert not np.any(is_partial[1:])
    samples = stream.batch(9)
    column = int(np.flatnonzero(~samples.env.prev_done[0])[0])
    samples.env.prev_reward[0, column] += 1
    replay.append(samples)
    assert replay.contents.rows(column).is_partial[-9]


def test_versions_may_stay_the_same_and_begin_anywhere() -> None:
    stream, replay = Stream(0, 2), Replay(400, max_truncations=99)
    for version in ([-5, -5], [1, 1], [2, 1], [2, 2]):
        replay.append(stream.batch(3), policy_version=np.array(version))
    with pytest.raises(ConfigError, match="must not fall"):
        replay.append(stream.batch(3), policy_version=np.array([3, 1]))
    versions = replay.contents.rows().policy_version
    assert versions[::3].tolist() == [[-5, -5], [1, 1], [2, 1], [2, 2]]
