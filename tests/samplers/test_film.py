"""`RecordedEpisode.film` repeats an episode and returns what the environment renders."""

import importlib.util
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

from penstock import ConfigError, ParallelSampler, RandomAgent, RepeatError, SerialSampler, WorkerError
from penstock.envs import CountingEnv, ScriptedGame


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
    with cls(
        env_fn, **{"batch_T": 6, "batch_B": 2, "seed_episodes": True, "max_decorrelation_steps": 0, **options}
    ) as s:
        s.initialize(RandomAgent(), seed=0)
        s.obtain_samples(0)
        return s.episode(1, t)


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
