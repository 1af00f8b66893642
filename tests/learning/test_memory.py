"""How much memory a replay takes, and what happens if there is not enough."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from penstock import NamedArrays, Samples
from penstock.buffers import AgentSamples, EnvSamples
from penstock.learning import Frames, Prioritized, Replay

from ..children import exit_code_of_fork
from ..scale import scaled
from .streams import storage_of

_MADV_PAGEOUT = 21  # mmap has it from Python 3.12 on


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
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would be used again
    before = process.memory_info().rss
    for start in range(0, n_steps // B, T):
        replay.append(samples[start // T % 2], continues=False)
    replay.sample(32)
    found = process.memory_info().rss - before
    assert found == pytest.approx(estimate.total, rel=0.01, abs=2**22)  # and what a draw needs
    assert found <= 1.05 * n_steps * (84 * 84 + 64)
    assert replay.nbytes == pytest.approx(estimate.total - estimate.nbytes["priorities"], rel=0.01)
    assert "total" in str(estimate)
    assert f"{n_steps:,} steps" in str(estimate)


@pytest.mark.slow
def test_the_memory_of_a_replay_of_frames_is_as_estimated() -> None:
    n_steps = scaled(2**18, 2**14)
    assert exit_code_of_fork(lambda: _compare_memory_with_the_estimate(n_steps)) == 0


def _sample_from_a_file(path: Path, n_bytes: int) -> None:
    T, B, n_numbers = 64, 4, 4096

    def bytes_of(entry: str) -> int:
        return 1024 * int(Path("/proc/self/status").read_text().split(f"{entry}:")[1].split()[0])

    allocated, of_files = bytes_of("VmData"), bytes_of("RssFile")  # libraries are files too
    resource.setrlimit(resource.RLIMIT_DATA, (allocated + n_bytes // 3, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    n_rows = n_bytes // (n_numbers * B)
    replay = Replay(n_rows * B, 3, 1.0, file=path, max_truncations=1, seed=0)
    for start in range(0, n_rows + 5 * T, T):  # wraps
        replay.append(pictures(start, T, B, 1, (n_numbers,)))
    ring = storage_of(replay).ring
    block = ring.observation
    while not isinstance(block, mmap.mmap):
        block = block.base if isinstance(block, np.ndarray) else block.obj
    block.flush()
    block.madvise(_MADV_PAGEOUT)  # the kernel takes the memory, as it does if it needs some
    assert bytes_of("RssFile") - of_files < n_bytes // 3
    oldest = replay.n_steps - replay.capacity
    for _ in range(20):
        batch = replay.sample(64)
        assert (batch.index >= oldest).all()
        for offset, observation in ((0, batch.observation), (3 * B, batch.next_observation)):
            number = ((batch.index + offset) % 251).byte()
            assert torch.equal(observation, number[:, None, None].expand(-1, 1, n_numbers))
        assert torch.equal(batch.return_, (3 * batch.index + 3 * B).float())


@pytest.mark.slow
@pytest.mark.linux("/proc, RLIMIT_DATA and MADV_PAGEOUT")
def test_a_replay_in_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    n_bytes = scaled(3 * 2**30, 3 * 2**23)
    assert exit_code_of_fork(lambda: _sample_from_a_file(tmp_path / "steps", n_bytes)) == 0
