"""Without deaths, seats give what SuperSuit's vector environments give, and learners become the same, bit for bit."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock import ConfigError
from penstock.envs import ScriptedGame
from penstock.vector import ShmVectorEnv, concat_vec_envs
from penstock.workers.affinity import cpus_to_fill, usable_cpus

from ..scale import pairs, scaled
from ..support import assert_same

# SuperSuit, PettingZoo and Gymnasium warn of each other.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STATES = ("valid", "alive", "late_reward")
GOES_ON = [{}] * 7
N_STEPS = scaled(300, 50)  # an episode has 7 or 20


class Telling(ScriptedGame):
    """Has infos, and a seed of its own that no reset changes: Stable-Baselines3 gives SuperSuit none."""

    def __init__(self, k: int = 3, script: Any = GOES_ON) -> None:
        super().__init__(k, script, mask=True)

    @property
    def unwrapped(self) -> Any:
        return self


class Ending(Telling):
    """All agents end in the last step."""

    def __init__(self) -> None:
        super().__init__(3, [*GOES_ON, dict.fromkeys(("a0", "a1", "a2"), "die")])


def spread() -> Any:
    mpe2 = pytest.importorskip("mpe2.simple_spread_v3", exc_type=ImportError)
    return mpe2.parallel_env(max_cycles=20)


def supersuit() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("supersuit")


def theirs(env: Any, n: int, **kwargs: Any) -> Any:
    """SuperSuit's, for any `ParallelEnv`: its own function takes subclasses of PettingZoo's class only."""
    return supersuit().concat_vec_envs_v1(supersuit().vector.MarkovVectorEnv(env), n, **kwargs)


def without_states(infos: Any) -> Any:
    return [{key: value for key, value in info.items() if key not in STATES} for info in infos]


def compare(mine: Any, other: Any, n_steps: int, n_actions: int) -> int:
    """All that `reset` and `step` return, the infos too. Returns the number of ends."""
    n_ends, rng = 0, np.random.default_rng(0)
    got, wanted = mine.reset(seed=5), other.reset(seed=5)
    assert_same(got[0], wanted[0], "reset")
    assert_same(without_states(got[1]), wanted[1], "reset")
    for t in range(n_steps):
        actions = rng.integers(0, n_actions, mine.num_envs)
        (*got, infos), (*wanted, expected) = mine.step(actions), other.step(actions)
        wanted[2:] = [flags.astype(bool) for flags in wanted[2:]]  # uint8 in one process, bool in several
        assert_same(got, wanted, f"step {t}")
        assert_same(without_states(infos), expected, f"step {t}")
        assert all(info["valid"] and info["alive"] and info["late_reward"] == 0 for info in infos)
        n_ends += int((got[2] | got[3]).sum())
    return n_ends


@pytest.mark.parametrize(("make", "n_workers"), pairs([spread, Telling, partial(Telling, 6)], [3, 1]))
def test_the_swap_returns_what_supersuit_returns(make: Any, n_workers: int) -> None:
    other = theirs(make(), 3)
    mine = concat_vec_envs(make(), 3, num_cpus=n_workers)
    assert mine.num_envs == other.num_envs
    assert (mine.observation_space, mine.action_space) == (other.observation_space, other.action_space)
    assert compare(mine, other, N_STEPS, 5 if make is spread else 3) > 0
    mine.close()
    other.close()


def test_what_the_swap_takes() -> None:
    wrapped = supersuit().vector.MarkovVectorEnv(Telling())
    for given in (Telling(), Telling, partial(Telling, 3), wrapped):
        envs = concat_vec_envs(given, 2, num_cpus=0)
        assert (envs.num_envs, len(envs.envs.worker_pids)) == (6, 1)
        observation, infos = envs.reset(seed=0)
        assert (observation.shape, len(infos)) == ((6, 4), 6)
        envs.close()
    envs = concat_vec_envs(Telling, 2)
    assert len(envs.envs.worker_pids) == min(2, cpus_to_fill(usable_cpus()))
    envs.close()
    with pytest.raises(ConfigError, match="base_class must be one of gymnasium, gym, stable_baselines3"):
        concat_vec_envs(Telling, 2, base_class="stable_baselines")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cannot be pickled, .*Give a function that builds it"):
        game: Any = Telling()
        game.lock = threading.Lock()
        concat_vec_envs(game, 2)


class Passing:
    """A wrapper of a `ParallelEnv`."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["env"], name) if "env" in vars(self) else object.__getattribute__(self, name)


def test_env_is_wrapped_tells_of_each_row() -> None:
    envs = concat_vec_envs(lambda: Passing(Passing(Telling(2))), 2, num_cpus=2)
    for kind, answer in ((Passing, True), (Telling, True), (Pictures, False)):
        assert envs.env_is_wrapped(kind) == [answer] * envs.num_envs
    envs.close()


class Pictures(Telling):
    def render(self) -> Any:
        return np.full((2, 2, 3), 9, np.uint8)


def test_what_the_script_does_with_its_environments() -> None:
    envs = concat_vec_envs(Pictures(2), 2, num_cpus=0, base_class="gym")
    envs.single_observation_space = envs.observation_space
    envs.single_action_space = envs.action_space
    envs.is_vector_env = True
    assert envs.render().max() == 9
    assert isinstance(envs.single_action_space, spaces.Discrete)
    assert envs.single_observation_space.shape == (4,)
    assert (envs.num_envs, envs.is_vector_env) == (4, True)
    envs.reset(seed=0)
    for _ in GOES_ON:
        *_, infos = envs.step(np.zeros(4, int))
    assert isinstance(infos, list)
    assert all("terminal_observation" in item for item in infos)
    envs.close()


# ---- learners ----------------------------------------------------------------------------------


def test_stable_baselines3_learns_the_same() -> None:
    sb3, torch = pytest.importorskip("stable_baselines3"), pytest.importorskip("torch")

    def learn(envs: Any) -> Any:
        torch.manual_seed(2)
        model = sb3.PPO("MlpPolicy", envs, n_steps=16, batch_size=32, n_epochs=2, device="cpu")
        torch.manual_seed(3)
        np.random.seed(3)
        model.learn(16 * 6 * scaled(4, 2))
        envs.close()
        return [parameter.detach().numpy().copy() for parameter in model.policy.parameters()]

    # Episodes that are cut off are no test: SuperSuit does not tell Stable-Baselines3 that they are.
    wanted = learn(theirs(Ending(), 2, base_class="stable_baselines3"))
    assert_same(learn(ShmVectorEnv([Ending] * 2, n_workers=2).to_sb3()), wanted)
    assert_same(learn(concat_vec_envs(Ending(), 2, num_cpus=2, base_class="stable_baselines3")), wanted)
    sb3.PPO("MlpPolicy", envs := concat_vec_envs(Ending(), 1, base_class="stable_baselines3"), seed=0, device="cpu")
    envs.close()
    assert not np.array_equal(learn(ShmVectorEnv([Telling] * 2, n_workers=2).to_sb3())[0], wanted[0])


def test_stable_baselines3_sees_who_is_idle() -> None:
    pytest.importorskip("stable_baselines3")
    games = [partial(ScriptedGame, 2, [{}, {"a0": "die"}, {"a0": "late"}, {}]), partial(Pictures, 3)]
    envs = ShmVectorEnv(games, n_workers=2).to_sb3()  # type: ignore[arg-type]
    envs.seed(4)
    first = envs.reset()
    infos = []
    for _ in range(3):
        observations, rewards, dones, step_infos = envs.step(np.zeros(5, int))
        infos.append(step_infos)
    assert observations.shape == (5, 4)
    assert rewards.dtype == np.float32
    assert not dones.any()
    assert [info[0]["valid"] for info in infos] == [True, True, False]
    assert [info[0]["alive"] for info in infos] == [True, False, False]
    assert infos[2][0]["late_reward"] == 0.5
    assert infos[1][0]["terminal_observation"][:3].tolist() == [1, 2, 2]
    assert infos[1][0]["TimeLimit.truncated"] is False
    envs.step(np.zeros(5, int))
    assert envs.get_attr("possible_agents", indices=[0, 2, 4]) == [["a0", "a1"], *[["a0", "a1", "a2"]] * 2]
    assert [frame is None or frame.max() for frame in envs.get_images()] == [True, 9]
    envs.seed(4)
    assert np.array_equal(envs.reset(), first)
    envs.set_attr("level", 3, indices=[3])
    assert envs.get_attr("level", [4]) == [3]
    assert envs.env_method("render", indices=[4])[0].max() == 9
    envs.close()
