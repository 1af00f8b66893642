"""What the tests of `RaySampler` share: runs that are compared, and what may be left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from penstock import Sampler

if TYPE_CHECKING:
    from penstock.distributed import RaySampler

CARTPOLE = partial(gym.make, "CartPole-v1")

# Ray's own processes. A shard's process is called ray::ShardHost.
_OF_RAY = ("/site-packages/ray/", "ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "raylet", "gcs_server")


def our_processes(run: str | None = None, *, with_ray: bool = False) -> dict[int, str]:
    """The processes that tests have started, with their command lines; without Ray's own, unless `with_ray`."""
    marker, found = f"PENSTOCK_TEST_RUN={run or os.environ['PENSTOCK_TEST_RUN']}".encode(), {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                environ, command = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            text = command.replace(b"\0", b" ").decode(errors="replace").strip()
            if marker in environ and text and (with_ray or not any(name in text for name in _OF_RAY)):
                found[int(folder.name)] = text
    return found


def wait_for_none(
    before: dict[int, str], seconds: float, run: str | None = None, *, with_ray: bool = False
) -> dict[int, str]:
    """Our processes that are left after `seconds` at most."""
    deadline = time.monotonic() + seconds
    while left := {p: t for p, t in our_processes(run, with_ray=with_ray).items() if p not in before}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def ray_sampler(env_fn: Any = CARTPOLE, **options: Any) -> RaySampler:
    """Two shards, each with one worker. `options` change that."""
    from penstock.distributed import RaySampler

    return RaySampler(env_fn, **{"batch_T": 20, "batch_B": 4, "n_shards": 2, "n_workers": 1, **options})


def rollouts(
    cls: type[Sampler],
    env_fn: Any,
    make_agent: Any,
    *,
    iterations: int = 3,
    seed: int = 11,
    before: Callable[[Any, int], None] = lambda sampler, itr: None,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """The batches (as copies) and the trajectory infos of some iterations, and those of an evaluation. `before` is
    called before each iteration."""
    batches, infos = [], []
    with cls(env_fn, **{"batch_T": 30, "batch_B": 7, "n_workers": 1, **options}) as sampler:
        sampler.initialize(make_agent(), seed=seed, bootstrap_value=True, traj_info_kwargs={"discount": 0.9})
        for itr in range(iterations):
            before(sampler, itr)
            if itr == 1 and options.get("eval_n_envs"):
                infos.append([vars(info) for info in sampler.evaluate_agent(itr)])
            _, traj_infos = sampler.obtain_samples(itr)
            batches.append(sampler.samples_np.copy())
            infos.append([vars(info) for info in traj_infos])
    return batches, infos
