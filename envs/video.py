"""Videos of an environment, with Gymnasium's `RecordVideo`."""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import RecordVideo

from penstock.buffers.reports import in_one_line
from penstock.errors import ConfigError

_log = logging.getLogger("penstock")

_MODES = ("rgb_array", "rgb_array_list")


def require_video(render_mode: object) -> None:
    """Raise `ConfigError` if no video can be made of an environment with this render mode."""
    if render_mode not in _MODES:
        raise ConfigError(
            f'a video needs evaluation environments with render_mode="rgb_array", the first has {render_mode!r}: for '
            'an environment id, or an env_fn with this argument, give eval_env_kwargs={"render_mode": "rgb_array"}'
        )
    if importlib.util.find_spec("moviepy") is None:
        raise ConfigError(
            'a video needs moviepy, which is not installed: pip install moviepy, or ".[video]" in the checkout'
        )


def require_folder(folder: str) -> None:
    """Make the folder for videos. Raises `ConfigError` if no file can be written there."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except (OSError, ValueError) as error:
        raise ConfigError(f"video={folder!r} is no folder in which a file can be written: {error}") from error


def warn_if_unwritten(folder: str, itr: int) -> None:
    """Warn if the video of this evaluation is missing or empty."""
    path = os.path.join(folder, f"itr-{itr}-episode-0.mp4")
    if not (os.path.exists(path) and os.path.getsize(path)):
        warnings.warn(
            f"the video {path} was not written, or is empty. The worker's error output has the reason",
            RuntimeWarning,
            stacklevel=3,
        )


class _Recording(RecordVideo):
    """Goes on without a video if the file cannot be written."""

    def stop_recording(self) -> None:
        try:
            super().stop_recording()  # type: ignore[no-untyped-call]
        except Exception as error:  # of the disk, or of the program that encodes the pictures
            _log.warning("no video could be written into %s: %s", self.video_folder, in_one_line(error))
            self.recorded_frames, self.recording = [], False


@contextmanager
def recorded(env: gym.Env[Any, Any], folder: str, itr: int) -> Iterator[gym.Env[Any, Any]]:
    """A wrapper of `env`. It records the episode that begins with the next reset, as
    `folder/itr-{itr}-episode-0.mp4`. The file is written at the reset after that, or at the end of the context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the folder may exist: it has the videos of other evaluations
        wrapper: Any = _Recording(env, folder, episode_trigger=lambda episode: episode == 0, name_prefix=f"itr-{itr}")
    try:
        yield wrapper
    except BaseException:
        wrapper.recorded_frames = []  # otherwise it warns that it has not saved them
        raise
    if wrapper.recording:
        wrapper.stop_recording()
