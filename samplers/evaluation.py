"""Parts of `evaluate_agent`: it ends after enough trajectories, warns about missing episodes, and records a video."""

from __future__ import annotations

import os
import pickle
import warnings
from typing import TYPE_CHECKING, Literal

from penstock.envs.calls import EnvCall
from penstock.envs.video import require_folder, require_video
from penstock.errors import ConfigError, brief
from penstock.samplers.config import SamplerConfig
from penstock.samplers.results import run_call
from penstock.workers.control import ControlBlock

if TYPE_CHECKING:
    from penstock.workers.pool import Pool

EVAL_POLL_SECONDS = 0.005  # how soon an evaluation is ended once enough trajectories have finished


def stop_if_enough(control: ControlBlock, n_workers: int, limit: int) -> Literal[False]:
    """End an evaluation when the workers have finished `limit` trajectories. The wait for them goes on."""
    if sum(control.n_results_by_rank(n_workers)) >= limit:
        control.stop_eval = True
    return False


def warn_if_unfinished(config: SamplerConfig, itr: int, n_finished: int) -> None:
    """Warn if an evaluation with `eval_episodes` has finished fewer. The warning names the line that called
    `evaluate_agent`."""
    wanted = config.eval_episodes
    if wanted is not None and n_finished < wanted:
        warnings.warn(
            f"evaluation, itr={itr}: {wanted - n_finished} of {wanted} episodes had not ended after "
            f"eval_max_steps={config.eval_max_steps} steps of all environments together",
            RuntimeWarning,
            stacklevel=3,
        )


def video_message(pool: Pool, config: SamplerConfig, folder: str | os.PathLike[str]) -> bytes:
    """The message that makes the worker of the first evaluation environment record a video. Raises `ConfigError` if
    that is impossible."""
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"video must be the path of a folder or None, got {brief(folder)}")
    if config.collector_cls.batched:
        raise ConfigError("video records a single environment: it cannot record one of a batched environment")
    call = EnvCall("get_attr", "render_mode", evaluation=True, only=frozenset({0}))
    (render_mode,) = run_call(pool, call, "the render mode of the evaluation environments")
    require_video(render_mode)
    require_folder(path := os.path.abspath(folder))
    return pickle.dumps(path)
