"""check_env and check_batched: each defect of an environment is named, and sound ones pass."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import ConfigError
from penstock.__main__ import main
from penstock.envs import BatchedCartPole, CountingEnv, NestedEnv
from penstock.envs.toy import ScriptedGame
from penstock.testing import ConformanceError, check_batched, check_env

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

short = partial(check_env, n_episodes=12, max_steps=20, start_method="fork")


class Sound(gym.Env[Any, Any]):
    """Draws from its own generator, and sets all of its state in reset. Episodes have 5 steps."""

    observation_space: Any = gym.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def seen(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def reward(self) -> float:
        return float(self.t)

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.seen(), self.reward(), self.t == 5, False, {}


class WrongDtype(Sound):
    def seen(self) -> Any:
        return super().seen().astype(np.float64)


class OutOfBounds(Sound):
    def seen(self) -> Any:
        return super().seen() + 20 * (self.t == 3)


class NotFinite(Sound):
    def reward(self) -> float:
        return float("nan")


class NoTuple(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class Locked(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], {"lock": threading.Lock()}


class Rare(Sound):
    """One episode of twelve leaves the space."""

    def seen(self) -> Any:
        return super().seen() + 20 * (self.np_random_seed == 9 and self.t == 2)


class LockedLater(Sound):
    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        return *result, {"lock": threading.Lock()}


class Garbage(Sound):
    """What is in a circle is freed by the garbage collector."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        world: dict[str, Any] = {"pixels": bytearray(1_000_000)}
        world["self"] = self.world = world
        return super().reset(seed=seed)


class Masked(Sound):
    """Only one action is legal, and it is observed."""

    observation_space = gym.spaces.MultiBinary(4)
    action_space = gym.spaces.Discrete(4)

    def seen(self) -> Any:
        self.legal = int(self.np_random.integers(4))
        return np.eye(4, dtype=np.int8)[self.legal]

    def step(self, action: Any) -> Any:
        if action != self.legal:
            raise ValueError(f"{action} is illegal")
        return super().step(action)


class Words(Sound):
    observation_space = gym.spaces.Sequence(gym.spaces.Discrete(3))


class Unseeded(Sound):
    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def seen(self) -> Any:
        return self.rng.uniform(-1, 1, 2).astype(np.float32)


class Anew(Sound):
    """Makes a new generator in each reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.rng = np.random.default_rng(seed)
        return super().reset(seed=seed)

    def seen(self) -> Any:
        return self.rng.uniform(-1, 1, 2).astype(np.float32)


class Remembering(Sound):
    n_steps = 0

    def reward(self) -> float:
        self.n_steps += 1
        return float(self.n_steps)


class Sharing(Sound):
    moves: ClassVar[list[int]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.moves.clear()
        return super().reset(seed=seed)

    def reward(self) -> float:
        self.moves.append(1)
        return float(len(self.moves))


class OfProcess(Sound):
    def reward(self) -> float:
        return float(os.getpid())


class Leaking(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.kept = [*getattr(self, "kept", []), np.ones(1_000_000)]
        return super().reset(seed=seed)


class Opening(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.files = [*getattr(self, "files", []), Path(os.devnull).open()]  # noqa: SIM115
        return super().reset(seed=seed)

    def close(self) -> None:
        for file in getattr(self, "files", []):
            file.close()


class Starting(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.programs = [*getattr(self, "programs", []), subprocess.Popen(["sleep", "100"])]
        return super().reset(seed=seed)

    def close(self) -> None:
        for program in getattr(self, "programs", []):
            program.kill()
            program.wait()


@pytest.mark.parametrize("env_fn", [Sound, Garbage, NestedEnv, "CartPole-v1", "Pendulum-v1", "Taxi-v4"])
def test_a_sound_environment_passes_and_is_measured(env_fn: Any) -> None:
    if env_fn == "Taxi-v4" and env_fn not in gym.registry:
        env_fn = "Taxi-v3"
    figures = short(env_fn)
    assert figures.n_episodes == 12
    assert 0 < figures.step <= figures.slowest_step
    assert 0 < figures.reset <= figures.slowest_reset
    for word in ("reset", "step", "memory"):
        assert word in str(figures)


@pytest.mark.parametrize(
    ("env_fn", "rule", "words"),
    [
        (WrongDtype, "values_fit_their_spaces", "episode 0, reset: observation float64.*observation float32"),
        (OutOfBounds, "values_fit_their_spaces", "step 3: observation float32"),
        (NotFinite, "values_fit_their_spaces", "step 1: the reward nan"),
        (NoTuple, "values_fit_their_spaces", r"must return a tuple \(observation, info\)"),
        (Locked, "values_fit_their_spaces", "episode 0, reset: the info cannot be pickled"),
        (Rare, "values_fit_their_spaces", "episode 9, step 2: observation float32"),
        (LockedLater, "values_fit_their_spaces", "episode 0, step 1: the info cannot be pickled"),
        (Words, "values_fit_their_spaces", "ShmVectorEnv takes it as it is"),
        (Unseeded, "one_seed_gives_one_episode", "in another new environment: observation.*self.np_random"),
        (Anew, "what_follows_repeats_too", "episode 1, .* both without a seed of its own: observation.*keep it"),
        (Remembering, "earlier_episodes_leave_no_trace", "after other episodes: reward at step 1: 1.0 and 6.0"),
        (CountingEnv, "earlier_episodes_leave_no_trace", r"observation\[0\] at step 0: 0.0 and 1.0"),  # its episodes
        (Sharing, "environments_share_nothing", "beside another environment: reward at step 1"),
        (OfProcess, "a_worker_gives_the_same_episode", "in a worker, as its environment 0: reward at step 1"),
        (Leaking, "episodes_leave_nothing_behind", r"grows by [78]\.?\d* MB.*renew_every"),
        (Opening, "episodes_leave_nothing_behind", "open files: .* after episode 1"),
        (Starting, "episodes_leave_nothing_behind", "processes: .* after episode 1"),
    ],
)
def test_each_defect_is_named_with_what_to_do(env_fn: Any, rule: str, words: str) -> None:
    with pytest.raises(ConformanceError, match=f"(?s){words}") as caught:
        short(env_fn)
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"{env_fn.__name__} breaks the rule {rule}")


def test_a_policy_may_choose_the_actions() -> None:
    """An action that is legal in one episode is illegal in another."""

    def legal(observation: Any, info: Any, rng: Any) -> int:
        return int(np.flatnonzero(observation)[0])

    short(Masked, policy=legal)

    class Unseeded(Masked):
        def seen(self) -> Any:
            self.legal = int(np.random.default_rng().integers(4))
            return np.eye(4, dtype=np.int8)[self.legal]

    with pytest.raises(ConformanceError, match="breaks the rule one_seed_gives_one_episode"):
        short(Unseeded, policy=legal)


@pytest.mark.parametrize("seed", [-1, "a", 1.5])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed must be an integer"):
        short(Sound, seed=seed)
    short(Sound, seed=np.int64(3))


def test_what_check_env_does_not_check() -> None:
    with pytest.raises(ConfigError, match="ScriptedGame has several agents: check it with check_parallel_env"):
        short(ScriptedGame)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="pickle"):
        check_env(lambda: lock and Sound(), n_episodes=4, max_steps=5)


# ---- an engine beside its original ---------------------------------------------------------------


def rows(env_fn: Any, mode: AutoresetMode) -> Any:
    return lambda num_envs: SyncVectorEnv([env_fn] * num_envs, autoreset_mode=mode)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("env_fn", [Sound, NestedEnv, partial(gym.make, "CartPole-v1")])
def test_an_engine_that_does_the_same_passes(env_fn: Any, mode: AutoresetMode) -> None:
    assert check_batched(rows(env_fn, mode), env_fn, n_steps=200) > 5


def test_an_engine_with_other_random_numbers_is_compared_from_its_first_observations() -> None:
    def begin(env: Any, observation: Any) -> None:
        env.unwrapped.state = np.array(observation, np.float64)

    original = partial(gym.make, "CartPole-v1")
    assert check_batched(BatchedCartPole, original, begin=begin, close=True) > 5
    assert check_batched("CartPole-v1", original, begin=begin, close=True) > 5  # Gymnasium's, which takes one seed
    with pytest.raises(ConfigError, match=r"takes no list of seeds .*give begin"):
        check_batched("CartPole-v1", original)


class Slower(Sound):
    """Another reward in the last step."""

    def reward(self) -> float:
        return super().reward() - (self.t == 5)


class Longer(Sound):
    def step(self, action: Any) -> Any:
        observation, reward, *_, info = super().step(action)
        return observation, reward, self.t == 6, False, info


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Slower, "step 5, row 0, episode end 0: reward is 4.0, that of the original 5.0"),
        (Longer, r"step 5, row 0, .*: terminated is False, that of the original True"),
        (Unseeded, "step 0, row 0, .*: the first observation is"),
    ],
)
def test_the_first_difference_of_an_engine_is_named(engine: Any, words: str) -> None:
    with pytest.raises(ConformanceError, match=f"(?s){words}"):
        check_batched(rows(engine, AutoresetMode.NEXT_STEP), Sound)


def test_a_check_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="no episode has ended in 3 steps"):
        check_batched(rows(Sound, AutoresetMode.NEXT_STEP), Sound, n_steps=3)


# ---- the command -----------------------------------------------------------------------------------


def test_the_command_says_what_was_measured_or_what_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "their_envs.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.vector import SyncVectorEnv\n"
        "from penstock.envs import CountingEnv\n"
        "def make():\n    return gym.make('CartPole-v1')\n"
        "def make_many(num_envs):\n    return SyncVectorEnv([make] * num_envs)\n"
        "def heavier():\n    env = make()\n    env.unwrapped.masspole = 0.2\n    return env\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--episodes", "8", "--steps", "30"]
    assert main(["check", "their_envs:make", *options]) == 0
    assert "their_envs:make breaks no rule." in capsys.readouterr().out
    assert main(["check", "penstock.envs:CountingEnv", *options]) == 1
    assert "CountingEnv breaks the rule earlier_episodes_leave_no_trace" in capsys.readouterr().err
    assert main(["check", "their_envs:make", "--batched", "their_envs:make_many"]) == 0
    assert "their_envs:make_many does what their_envs:make does, in " in capsys.readouterr().out
    assert main(["check", "their_envs:heavier", "--batched", "their_envs:make_many"]) == 1
    assert "SyncVectorEnv breaks the rule" in capsys.readouterr().err
    assert main(["check", "their_envs:missing"]) == 2
