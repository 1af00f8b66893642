"""`evaluate_agent(itr, video=folder)` records the first episode of the first evaluation environment."""

import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import (
    AsyncSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    WorkerError,
)
from penstock.envs import BatchedCartPole, CountingEnv

from ..scale import pairs

pytestmark = pytest.mark.slow

# In place of moviepy: it writes the frames themselves.
STUB = """
import numpy as np

class ImageSequenceClip:
    def __init__(self, frames, fps):
        self.frames, self.fps = frames, fps

    def write_videofile(self, path, logger):
        with open(path, "wb") as file:
            np.savez(file, frames=np.stack(self.frames), fps=self.fps)
"""


class Painted(CountingEnv):
    """Its pictures show the episode and the step."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, render_mode: Any = None, length: int = 5) -> None:
        super().__init__(length)
        self.render_mode = render_mode

    def render(self) -> Any:
        picture = np.zeros((8, 8, 3), np.uint8)
        picture[..., 0], picture[..., 1] = self.episode, self.count
        return picture


@pytest.fixture
def moviepy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stub of moviepy, also for workers."""
    folder = tmp_path / "stub/moviepy/video/io"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (folder / "ImageSequenceClip.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path / "stub")
    for name in _imported_moviepy():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in _imported_moviepy():  # other tests must not find the stub
        del sys.modules[name]


def _imported_moviepy() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "moviepy"]


EVAL: dict[str, Any] = {
    "batch_T": 4,
    "batch_B": 2,
    "eval_n_envs": 3,
    "eval_max_steps": 36,
    "eval_env_kwargs": {"render_mode": "rgb_array"},
}


@pytest.mark.usefixtures("moviepy")
@pytest.mark.parametrize(
    ("episodes", "cls"),
    pairs([None, 6], [SerialSampler, ParallelSampler, GpuSampler, partial(GpuSampler, server="process")]),
)
def test_the_first_episode_is_recorded(cls: Any, episodes: int | None, tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    plain, recorded = [], []
    for found, video in ((plain, None), (recorded, folder)):
        with cls(Painted, **EVAL, eval_episodes=episodes, n_workers=2) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            for itr in (3, 4):
                found.append([vars(info) for info in sampler.evaluate_agent(itr, video=video)])
            found.append(sampler.obtain_samples(5)[0].env.observation.tolist())
    assert plain == recorded, "a video changes nothing"
    assert sorted(path.name for path in folder.iterdir()) == ["itr-3-episode-0.mp4", "itr-4-episode-0.mp4"]
    video = np.load(folder / "itr-4-episode-0.mp4", allow_pickle=False)
    frames = video["frames"]
    assert video["fps"] == 7
    assert frames[:, 0, 0, 1].tolist() == [0, 1, 2, 3, 4, 5]
    assert len(set(frames[:, 0, 0, 0].tolist())) == 1, "one episode"


@pytest.mark.usefixtures("moviepy")
def test_an_episode_that_does_not_end_is_recorded_to_the_end_of_the_evaluation(tmp_path: Path) -> None:
    options = {**EVAL, "eval_env_kwargs": {"render_mode": "rgb_array", "length": 100}}
    with AsyncSampler(Painted, **options, n_workers=1) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.start()
        sampler.evaluate_agent(0, video=os.fspath(tmp_path / "videos"))
        sampler.obtain_samples(0)
    frames = np.load(tmp_path / "videos/itr-0-episode-0.mp4")["frames"]
    assert frames[:, 0, 0, 1].tolist() == list(range(13))


class Breaks(Painted):
    def step(self, action: Any) -> Any:
        if self.render_mode and self.count == 3:
            raise RuntimeError("broken")
        return super().step(action)

    step_into = None  # type: ignore[assignment]


@pytest.mark.usefixtures("moviepy")
def test_an_environment_that_fails_is_reported_as_without_a_video(tmp_path: Path) -> None:
    with SerialSampler(Breaks, **EVAL) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match=r"RuntimeError while stepping env_rank 0.*: broken"):
            sampler.evaluate_agent(0, video=tmp_path / "videos")
    assert not list((tmp_path / "videos").iterdir())


class Dies(Painted):
    """Its worker is killed once, in the middle of an evaluation."""

    def __init__(self, marker: str, render_mode: Any = None) -> None:
        super().__init__(render_mode)
        self.marker = Path(marker)

    def step(self, action: Any) -> Any:
        if self.render_mode and self.count == 3:
            with contextlib.suppress(FileExistsError):
                self.marker.touch(exist_ok=False)  # the first of the workers makes it, and dies
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.usefixtures("moviepy")
def test_a_worker_that_is_replaced_records_again(tmp_path: Path) -> None:
    marker, folder = str(tmp_path / "marker"), tmp_path / "videos"
    options = {**EVAL, "eval_env_kwargs": {"render_mode": "rgb_array", "marker": marker}}
    with ParallelSampler(
        Dies, env_kwargs={"marker": marker}, **options, n_workers=2, on_worker_failure="restart"
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.evaluate_agent(0, video=folder)
        assert sampler.stats().restarts == 1
    assert np.load(folder / "itr-0-episode-0.mp4")["frames"][:, 0, 0, 1].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_a_folder_that_cannot_be_written_is_refused(cls: Any, moviepy: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with cls(Painted, **EVAL) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(ConfigError, match=r"file/videos' is no folder in which a file can be written: .*Not a dir"):
            sampler.evaluate_agent(0, video=tmp_path / "file" / "videos")
        assert sampler.evaluate_agent(0, video=tmp_path / "new" / "videos")
        assert (tmp_path / "new" / "videos" / "itr-0-episode-0.mp4").stat().st_size


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
@pytest.mark.parametrize("failure", ["raise OSError(28, 'No space left on device')", "open(path, 'wb').close()"])
def test_a_video_that_is_not_written_is_a_warning(cls: Any, failure: str, moviepy: None, tmp_path: Path) -> None:
    stub = tmp_path / "stub/moviepy/video/io/ImageSequenceClip.py"
    stub.write_text(STUB.partition("        with open")[0] + f"        {failure}\n")
    with cls(Painted, **EVAL) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.warns(RuntimeWarning, match=r"itr-3-episode-0.mp4 was not written, or is empty"):
            infos = sampler.evaluate_agent(3, video=tmp_path)
        assert infos
        assert len(sampler.evaluate_agent(4)) == len(infos)
        sampler.obtain_samples(0)


def test_what_cannot_be_recorded_is_named_and_the_sampler_stays_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ParallelSampler(Painted, **{**EVAL, "eval_env_kwargs": None}, n_workers=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(ConfigError, match=r"render_mode=\"rgb_array\", the first has None: .*eval_env_kwargs="):
            sampler.evaluate_agent(0, video=tmp_path)
        assert sampler.evaluate_agent(0)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "moviepy" else find_spec(name))
    with ParallelSampler(Painted, **EVAL, n_workers=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(ConfigError, match=r"needs moviepy.*pip install moviepy, or \"\.\[video\]\""):
            sampler.evaluate_agent(0, video=tmp_path)
        assert sampler.evaluate_agent(0)
    with SerialSampler(
        BatchedCartPole, batch_T=4, batch_B=2, eval_n_envs=2, eval_max_steps=20, batched=True
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(ConfigError, match="a batched environment"):
            sampler.evaluate_agent(0, video=tmp_path)
        sampler.evaluate_agent(0)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("moviepy", "pygame"))), reason="needs moviepy and pygame to make a film"
)
def test_a_film_of_cartpole(tmp_path: Path) -> None:
    evaluation = {"eval_n_envs": 1, "eval_episodes": 1, "eval_env_kwargs": {"render_mode": "rgb_array"}}
    with ParallelSampler("CartPole-v1", batch_T=4, batch_B=1, **evaluation) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        (info,) = sampler.evaluate_agent(0, video=tmp_path)
    from moviepy import VideoFileClip

    with VideoFileClip(str(tmp_path / "itr-0-episode-0.mp4")) as clip:
        assert (clip.w, clip.h, clip.fps) == (600, 400, 50)
        assert abs(clip.n_frames - (info.Length + 1)) <= 1
