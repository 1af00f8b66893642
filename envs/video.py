"""Videos of an environment, with Gymnasium's `RecordVideo`."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import RecordVideo

from penstock.errors import ConfigError

_MODES = ("rgb_array", "rgb_array_list")


def require_video(render_mode: Any) -> None:
    """Raise `ConfigError` if no video can be made of an environment with this render mode."""
    if render_mode not in _MODES:
        raise ConfigError(
            f'a video needs evaluation environments with render_mode="rgb_array", the first has {render_mode!r}: for '
            'an environment id, or an env_fn with this argument, give eval_env_kwargs={"render_mode": "rgb_array"}'
        )
    if importlib.util.find_spec("moviepy") is None:
        raise ConfigError('a video needs moviepy, which is not installed: pip install moviepy, or "penstock[video]"')


@contextmanager
def recorded(env: gym.Env[Any, Any], folder: str, itr: int) -> Iterator[gym.Env[Any, Any]]:
    """A wrapper of `env`. It records the episode that begins with the next reset, as
    `folder/itr-{itr}-episode-0.mp4`. The file is written at the reset after that, or at the end of the context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the folder may exist: it has the videos of other evaluations
        wrapper: Any = RecordVideo(env, folder, episode_trigger=lambda episode: episode == 0, name_prefix=f"itr-{itr}")
    try:
        yield wrapper
    except BaseException:
        wrapper.recorded_frames = []  # otherwise it warns that it has not saved them
        raise
    if wrapper.recording:
        wrapper.stop_recording()
