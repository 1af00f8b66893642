"""A replay behind real samplers, in a file, and its memory."""

from __future__ import annotations

import mmap
import multiprocessing
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from penstock import (
    ConfigError,
    NamedArrays,
    ParallelSampler,
    RandomAgent,
    Samples,
    SerialSampler,
    SpaceError,
    WaitResetCollector,
)
from penstock.buffers import AgentSamples, EnvSamples, memory_limits
from penstock.envs import CountingEnv
from penstock.replays import Frames, Prioritized, Replay, Sequences
from penstock.replays import ring as ring_module

from ..scale import scaled
from .streams import Stream

_MADV_PAGEOUT = 21  # mmap has it from Python 3.12 on


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


@pytest.mark.parametrize("collector_cls", [None, WaitResetCollector])
def test_batches_of_a_sampler_are_replayed(collector_cls: Any) -> None:
    options = {} if collector_cls is None else {"collector_cls": collector_cls}
    replay = Replay(3 * 40, 2, 0.5, max_truncations=120, seed=0)
    with ParallelSampler(partial(CountingEnv, length=5), batch_T=8, batch_B=3, n_workers=2, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(12):
            replay.append(sampler.obtain_samples(itr)[0])
    batch = replay.sample(2000)
    # CountingEnv: the reward of step t of an episode is t, and observation[1] counts the steps.
    t = batch.observation[:, 1]
    is_last = t == 4
    ends_next = t == 3
    reward, next_reward = t + 1, torch.where(is_last, 0, t + 2)
    torch.testing.assert_close(batch.return_, reward + 0.5 * next_reward)
    assert (batch.discount[is_last | ends_next] == 0).all() or (batch.next_observation[ends_next, 1] == 5).all()
    assert (batch.next_observation[~is_last & ~ends_next, 1] == t[~is_last & ~ends_next] + 2).all()


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
            storage, reference = frames._storage, whole._storage
            assert storage is not None
            assert reference is not None
            positions = storage.places.all_eligible(*storage.places.bounds())
            found, wanted = storage.reader.read(positions), reference.reader.read(positions)
            assert found is not None
            assert wanted is not None
            for name, field in wanted.items():
                np.testing.assert_array_equal(found[name], field, err_msg=name)
    assert frames.nbytes < whole.nbytes / 2.2


def test_what_is_no_stack_is_refused_in_the_first_batch() -> None:
    class Vectors(Pictures):
        observation_space = spaces.Box(0, 255, (4, 6, 5), np.uint8)

        def _picture(self) -> Any:
            return self.np_random.integers(1, 256, (4, 6, 5), np.uint8)

    with SerialSampler(Vectors, batch_T=7, batch_B=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
        with pytest.raises(SpaceError, match="no stack of the last 4 frames"):
            Replay(100, frames=Frames(4)).append(samples)
        with pytest.raises(ConfigError, match=r"shape \(3, ...\)"):
            Replay(100, frames=Frames(3)).append(samples)


def test_the_padding_must_be_that_of_the_environment() -> None:
    stream = Stream(0, 2, frames=Frames(3, "zero"), p_end=0.5)
    with pytest.raises(SpaceError, match='padding="reset"'):
        Replay(100, frames=Frames(3, "reset"), max_truncations=99).append(stream.batch(30))


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
    with pytest.raises(ConfigError, match=r"GiB of memory.*lower capacity"):
        Replay(10**12).append(samples)
    with pytest.raises(ConfigError, match="Lower capacity"):
        Replay(10**13, file=tmp_path / "steps").append(samples)
    assert psutil.Process().memory_info().rss < before + 2**26
    assert not list(tmp_path.iterdir())


def test_a_limit_of_a_cgroup_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "_cgroup_headrooms", lambda: iter([2**40, 2**20]))
    with pytest.raises(ConfigError, match=r"only 0\.00 GiB are free"):
        Replay(10**6).append(Stream(0, 2).batch(9))
    Replay(1000).append(Stream(0, 2).batch(9))


def pictures(start: int, T: int, B: int, n: int, shape: tuple[int, ...]) -> Samples:
    """Stacks of n pictures. The numbers in a picture, and the reward, tell the position."""
    number = start * B + np.arange(T * B).reshape(T, B)
    reward, flags = number.astype(np.float32), np.zeros((T, B), np.bool_)
    frames = (number[..., None] - np.arange(n - 1, -1, -1) * B) % 251
    env = EnvSamples(
        observation=np.broadcast_to(frames.reshape(T, B, n, *[1] * len(shape)), (T, B, n, *shape)).astype(np.uint8),
        reward=reward,
        prev_reward=reward - B,
        terminated=flags,
        truncated=flags,
        done=flags,
        prev_done=flags,
        valid=~flags,
    )
    action = np.zeros((T, B), np.int64)
    return Samples(env=env, agent=AgentSamples(action=action, prev_action=action, agent_info=NamedArrays()))


def in_a_child(work: Callable[..., None], *arguments: Any) -> None:
    child = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    child.start()
    child.join()
    assert child.exitcode == 0
    child.close()


def _compare_memory_with_the_estimate(n_steps: int) -> None:
    T, B, shape = 16, 32, (84, 84)
    options: Any = {"frames": Frames(4), "prioritized": Prioritized(), "max_truncations": 1}
    samples = [pictures(start, T, B, 4, shape) for start in (0, T)]
    warm_up = Replay(2 * T * B, **options)
    for batch in samples:
        warm_up.append(batch)
    warm_up.sample(32)
    process, replay = psutil.Process(), Replay(n_steps, **options)
    estimate = replay.estimate(samples[0])
    before = process.memory_info().rss
    for start in range(0, n_steps // B, T):
        replay.append(samples[start // T % 2], continues=False)
    replay.sample(32)
    found = process.memory_info().rss - before
    assert found == pytest.approx(estimate.total, rel=0.01)
    assert found <= 1.05 * n_steps * (84 * 84 + 64)


def test_the_memory_of_a_replay_of_frames_is_as_estimated() -> None:
    in_a_child(_compare_memory_with_the_estimate, 2**18 if scaled(True, False) else 2**14)


def _sample_from_a_file(path: Path, n_bytes: int) -> None:
    T, B, n_numbers = 64, 4, 4096
    status = Path("/proc/self/status")
    allocated = 1024 * int(status.read_text().split("VmData:")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (allocated + n_bytes // 3, resource.RLIM_INFINITY))
    with pytest.raises(MemoryError):
        np.zeros(n_bytes, np.uint8)
    n_rows = n_bytes // (n_numbers * B)
    replay = Replay(n_rows * B, 3, 1.0, file=path, max_truncations=1, seed=0)
    for start in range(0, n_rows + 5 * T, T):  # wraps
        replay.append(pictures(start, T, B, 1, (n_numbers,)))
    ring = replay._storage.ring  # type: ignore[union-attr]
    block = ring.observation
    while not isinstance(block, mmap.mmap):
        block = block.base if isinstance(block, np.ndarray) else block.obj
    block.flush()
    block.madvise(_MADV_PAGEOUT)  # the kernel takes the memory, as it does if it needs some
    assert 1024 * int(status.read_text().split("RssShmem:")[0].split("RssFile:")[1].split()[0]) < n_bytes // 3
    oldest = replay.n_steps - replay.capacity
    for _ in range(20):
        batch = replay.sample(64)
        assert (batch.index >= oldest).all()
        for offset, observation in ((0, batch.observation), (3 * B, batch.next_observation)):
            number = ((batch.index + offset) % 251).byte()
            assert torch.equal(observation, number[:, None, None].expand(-1, 1, n_numbers))
        assert torch.equal(batch.return_, (3 * batch.index + 3 * B).float())


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits and advice of Linux")
def test_a_replay_in_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    in_a_child(_sample_from_a_file, tmp_path / "steps", scaled(3 * 2**30, 3 * 2**23))


def test_frames_of_batches_with_one_row_are_compared_with_the_row_before() -> None:
    stream = Stream(0, 2, frames=Frames(3), p_end=0.3)
    replay = Replay(200, frames=Frames(3), max_truncations=200)
    for _ in range(60):
        replay.append(stream.batch(1))
    other = Stream(1, 2, frames=Frames(3), p_end=0.0)
    replay = Replay(200, frames=Frames(3), max_truncations=200)
    replay.append(other.batch(1))
    with pytest.raises(SpaceError, match="is no stack of the last 3 frames"):
        for _ in range(20):
            samples = other.batch(1)
            samples.env.observation[...] = np.random.default_rng(0).normal(size=samples.env.observation.shape)
            replay.append(samples)


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


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": "x"}, "seed must be an integer of at least 0, got 'x'"),
        ({"file": 5}, "file must be a path or None, got 5"),
    ],
)
def test_wrong_options_are_refused_at_once(option: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Replay(10, **option)


def test_what_obtain_samples_returns_is_not_the_samples_alone() -> None:
    with pytest.raises(ConfigError, match=r"got a tuple: obtain_samples returns \(samples, traj_infos\)"):
        Replay(10).append((Stream(0, 3).batch(2), []))


def test_rows_without_columns_and_an_earlier_batch_of_another_size_are_refused() -> None:
    samples = Stream(0, 3).batch(9)
    replay = Replay(30)
    replay.append(samples)
    with pytest.raises(ConfigError, match=r"a replay takes batches \[T, B\]"):
        replay.append(samples.map(lambda array: array[:, 0]))
    with pytest.raises(ConfigError, match="out has 5 positions, but 4 are to be drawn"):
        replay.sample(4, out=replay.sample(5))


def test_the_estimate_is_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return FrameStackObservation(Pictures(), 4)

    replay = Replay(10_000, frames=Frames(4), prioritized=Prioritized())
    with SerialSampler(make, batch_T=7, batch_B=2) as sampler:
        samples = sampler.initialize(RandomAgent(), seed=0)
        estimate = replay.estimate(samples)
        assert replay.nbytes == 0
        replay.append(sampler.obtain_samples(0)[0])
    tree = estimate.nbytes["priorities"]
    # The ring was allocated for B = 2, and the estimate is for B = 1.
    assert replay.nbytes == pytest.approx(estimate.total - tree, rel=0.01)
    assert tree == 4 * 8 * 2**14
    # 32 bytes a step, beside frames and final observations
    assert estimate.total - tree <= 10_000 * (6 * 5 + 64)
    assert "total" in str(estimate)
    assert "10,000 steps" in str(estimate)
    # Atari: a million steps with their trees
    pixels = estimate.nbytes["observation"] * 84 * 84 // 30 * 100
    assert pixels < 7.5e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": 2.5}, "capacity"),
        ({"capacity": 10, "n_step": 0}, "n_step"),
        ({"capacity": 10, "discount": 1.1}, "discount"),
        ({"capacity": 10, "prioritized": True}, "prioritized must be Prioritized"),
        ({"capacity": 10, "frames": 4}, "frames must be Frames"),
        ({"capacity": 10, "max_truncations": 0}, "max_truncations"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Replay(**arguments)
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


def test_a_failed_write_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, replay = Stream(0, 2), Replay(40, max_truncations=99, seed=0)
    replay.append(stream.batch(20))
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
