"""An engine in C that steps all its worlds in one call, and writes into memory of its own, as Madrona does."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from penstock import ParallelSampler, SerialSampler

from ..support import assert_as_plain_loop, assert_same, collect_with, env_seeds, without_infos

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]

#: A walker on a line: it ends at -4 or 4, or after 9 steps. Each world has a random stream of its own.
ENGINE = """
#include <stdint.h>
typedef struct { uint64_t random; float x; int32_t age; } World;
static uint64_t next(World *w) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return w->random >> 33;
}
static void begin(World *w) { w->x = (float)(next(w) % 3) - 1.0f; w->age = 0; }
static void observe(const World *w, float *out) { out[0] = w->x; out[1] = (float)w->age; }
void reset(World *worlds, int32_t n, const int64_t *seeds, float *observations) {
    for (int32_t i = 0; i < n; i++) {
        worlds[i].random = (uint64_t)seeds[i];
        begin(&worlds[i]);
        observe(&worlds[i], observations + 2 * i);
    }
}
void step(World *worlds, int32_t n, const int64_t *actions, float *observations, float *finals, float *rewards,
          uint8_t *terminated, uint8_t *truncated) {
    for (int32_t i = 0; i < n; i++) {
        World *w = &worlds[i];
        w->x += (float)actions[i] - 1.0f + (float)(next(w) % 2);
        w->age++;
        rewards[i] = w->x;
        terminated[i] = w->x <= -4.0f || w->x >= 4.0f;
        truncated[i] = !terminated[i] && w->age == 9;
        observe(w, finals + 2 * i);
        if (terminated[i] || truncated[i]) begin(w);
        observe(w, observations + 2 * i);
    }
}
"""
WORLD_BYTES = 16


class Engine(VectorEnv[Any, Any, Any]):
    """Its arrays are the engine's: each step overwrites them."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  Gymnasium's own declaration

    def __init__(self, library: Path, num_envs: int) -> None:
        self.num_envs, self._engine = num_envs, ctypes.CDLL(str(library))
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._worlds = np.zeros(num_envs * WORLD_BYTES, np.uint8)
        self._observations, self._finals = np.zeros((2, num_envs, 2), np.float32)
        self._rewards, (self._terminated, self._truncated) = (
            np.zeros(num_envs, np.float32),
            np.zeros((2, num_envs), bool),
        )

    def _call(self, name: str, *arrays: Any) -> None:
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (self._worlds, *arrays)]
        getattr(self._engine, name)(pointers[0], ctypes.c_int32(self.num_envs), *pointers[1:])

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._call("reset", np.array(seed, np.int64), self._observations)
        return self._observations, {}

    def step(self, actions: Any) -> Any:
        flags = self._terminated, self._truncated
        self._call("step", np.array(actions, np.int64), self._observations, self._finals, self._rewards, *flags)
        return self._observations, self._rewards, *flags, {"final_obs": self._finals}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "engine.c").write_text(ENGINE, encoding="utf-8")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", "engine.so", "engine.c"], cwd=folder, check=True, timeout=60)
    return folder / "engine.so"


def test_one_batch_per_seed_whatever_the_workers(library: Path) -> None:
    env_fn = partial(Engine, library)
    sizes = {"batch_T": 30, "batch_B": 6, "eval_n_envs": 3, "eval_max_steps": 90, "batched": True}
    found = collect_with(SerialSampler, env_fn, None, 3, range(2), **sizes)
    for n_workers in (1, 2, 3):
        assert_same(found, collect_with(ParallelSampler, env_fn, None, 3, range(2), n_workers=n_workers, **sizes))
    seeds = [each % 2**63 for each in env_seeds(6, small=False)]
    assert assert_as_plain_loop(env_fn(6), seeds, without_infos(found)) > 30
