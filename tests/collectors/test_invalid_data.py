"""Data that nearly fits: numbers that float32 cannot hold, structures with too much in them, nothing at all."""

import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock import ParallelSampler, RandomAgent, Sampler, SerialSampler, SpaceError, WorkerError
from penstock.envs import CountingEnv

from ..scale import mostly_first, scaled
from ..support import sampler_of

pytestmark = pytest.mark.slow

both = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
NOTHING = "nothing"


class Spoilt(CountingEnv):
    """Gives `observation` or `reward` at its third step. An episode lasts three steps if it is a `short` one."""

    def __init__(
        self, observation: Any = NOTHING, reward: Any = NOTHING, short: bool = False, nested: bool = False
    ) -> None:
        super().__init__(length=3 if short else 1000, truncate=True)
        self.observation, self.reward, self.nested, self.n_steps = observation, reward, nested, 0
        if nested:
            pair = spaces.Tuple((spaces.Discrete(9), spaces.Box(-1, 1)))
            self.observation_space = spaces.Dict({"grid": self.observation_space, "goal": pair})

    def _observation(self) -> Any:
        counted = super()._observation()
        return {"grid": counted, "goal": (self.count % 9, np.zeros(1, np.float32))} if self.nested else counted

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        observation, reward, *rest = super().step(action)
        if self.n_steps == 3:
            observation = observation if isinstance(self.observation, str) else self.observation
            reward = reward if isinstance(self.reward, str) else self.reward
        return observation, reward, *rest


def observation(value: Any) -> dict[str, Any]:
    return {"observation": value}


def nested(grid: Any, *goal: Any, **more: Any) -> dict[str, Any]:
    return {"observation": {"grid": grid, "goal": goal, **more}, "nested": True}


def make(cls: type[Sampler], env_kwargs: Any, **options: Any) -> Any:
    return sampler_of(cls, Spoilt, env_kwargs=env_kwargs, **{"batch_T": 2, **options})


KEYS = r"observation of env_rank 3 must have the entries \['goal', 'grid'\], got "
HOLD = r"must have values that float32 can hold, got 1e\+300"

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too large": (observation(np.array([1.0, 1e300])), f"observation of env_rank 3 {HOLD}"),
    "too large in a list": (observation([1.0, 1e300]), f"observation of env_rank 3 {HOLD}"),
    "too large at an end": (
        {**observation(np.array([1.0, 1e300])), "short": True},
        f"the final observation of env_rank 3 {HOLD}",
    ),
    "too large in a nested leaf": (
        nested(np.array([1.0, 1e300]), 3, np.zeros(1)),
        rf"observation\['grid'\] of env_rank 3 {HOLD}",
    ),
    "reward too large": (
        {"reward": 1e300},
        r"the reward of env_rank 3 must be a number that float32 can hold, got 1e\+300",
    ),
    "reward in an array": (
        {"reward": np.ones(1)},
        r"the reward of env_rank 3 must be a single number, got .*: return reward\.item\(\)",
    ),
    "reward in a list": ({"reward": [1.0]}, r"the reward of env_rank 3 must be a single number, got \[1\.0\]$"),
    "None": (observation(None), r"observation of env_rank 3 must have shape \(2,\), got None"),
    "dict": (observation({"a": 1.0, "b": 2.0}), r"observation of env_rank 3 must have shape \(2,\), got a dict"),
    "a key too many": (nested(np.zeros(2), 3, np.zeros(1), extra=1), KEYS + r"\['grid', 'goal', 'extra'\]"),
    "no dict": ({"observation": np.zeros(2), "nested": True}, KEYS + "a ndarray"),
    "a tuple too long": (
        nested(np.zeros(2), 1, np.zeros(1), 2),
        r"observation\['goal'\] of env_rank 3 must have the entries \[0, 1\], got a tuple of 3",
    ),
    "a tuple too short": (
        nested(np.zeros(2), 1),
        r"observation\['goal'\] of env_rank 3 must have the entries \[0, 1\], got a tuple of 1",
    ),
}


@pytest.mark.parametrize(("cls", "name"), mostly_first([SerialSampler, *[ParallelSampler] * scaled(1, 3)], BAD))
def test_what_nearly_fits_is_named_in_its_batch(cls: type[Sampler], name: str) -> None:
    wrong, message = BAD[name]
    right = {key: value for key, value in wrong.items() if key in ("short", "nested")}
    with make(cls, [right] * 3 + [wrong]) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        with pytest.raises(WorkerError) as error:
            sampler.obtain_samples(1)
    assert type(error.value.__cause__) is SpaceError
    assert error.match(f"SpaceError while .*: {message}")


@both
def test_infinity_itself_is_recorded_as_it_is(cls: type[Sampler]) -> None:
    with make(cls, observation(np.array([1.0, -np.inf])), batch_T=4) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        assert sampler.samples_np.env.observation[3, :, 1].tolist() == [-np.inf] * 4


class Silent(Spoilt):
    """Ignores all warnings, as many simulators do, and numpy's errors too."""

    def step(self, action: Any) -> Any:
        warnings.filterwarnings("ignore")
        np.seterr(all="ignore")
        return super().step(action)


@both
@pytest.mark.parametrize("has_c", [True, False])
@pytest.mark.parametrize("spoilt", [observation(np.array([1.0, 1e300])), {"reward": 1e300}])
def test_no_infinity_is_recorded_where_warnings_are_ignored(
    cls: type[Sampler], spoilt: Any, has_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_c:  # in this process, so it counts for a SerialSampler
        monkeypatch.setattr("penstock.envs.rows.put_row", lambda *_: False)
    size = {"batch_T": 4, "batch_B": 2, "max_decorrelation_steps": 0}
    with warnings.catch_warnings(), np.errstate(), cls(Silent, env_kwargs=spoilt, **size) as sampler:
        sampler.initialize(RandomAgent())
        with pytest.raises(WorkerError, match="can hold, got"):
            sampler.obtain_samples(0)


@both
def test_before_the_first_batch_no_time_step_is_told(cls: type[Sampler]) -> None:
    with (
        make(cls, observation(None), max_decorrelation_steps=50) as sampler,
        pytest.raises(WorkerError, match=r"while decorrelating env_rank \d \(start-up\): .*got None"),
    ):
        sampler.initialize(RandomAgent())
