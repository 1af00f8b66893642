"""Success and rewards as plain loops find them, objects as policies, and policies that cannot act as they are."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from penstock import ConfigError, SpaceError, evaluate
from penstock.evaluation.policies import make_player

from ..scale import scaled
from .reach import CHUNK, TASKS, Reach, as_batch, played, serial, vla

pytestmark = pytest.mark.timeout(scaled(600, 60))


class Visits(gym.Env[Any, Any]):
    """It walks at random for 5 to 30 steps, and is rewarded with its place. A success is a place above 2, which it
    leaves again. `says`: "always", "when true" and "not at the end"."""

    observation_space, action_space = gym.spaces.Box(-99, 99, (1,), np.float64), gym.spaces.Discrete(2)

    def __init__(self, says: str = "always") -> None:
        self.says = says

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.place, self.length = 0, 0.0, self.np_random.integers(5, 30)
        return np.zeros(1), {"success": True, "return": 7.0}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.place += self.np_random.normal()
        is_over, success = self.t >= self.length, bool(self.place > 2)
        info = {"success": success, "return": 7.0, "max_reward": np.float32(8), "t": self.t}
        if (self.says == "when true" and not success) or (self.says == "not at the end" and is_over):
            del info["success"]
        return np.array([self.place]), self.place, is_over, False, info


def zeros(observation: Any) -> Any:
    return np.zeros(len(observation), np.int64)


def walked(seed: int, says: str, most: int) -> tuple[list[float], list[dict[str, Any]]]:
    """The rewards and infos of an episode, in a plain loop."""
    env, rewards, infos, is_over = Visits(says), list[float](), list[dict[str, Any]](), False
    env.reset(seed=seed)
    while not is_over and len(rewards) < most:
        _, reward, is_over, _, info = env.step(0)
        rewards.append(reward)
        infos.append(info)
    return rewards, infos


@pytest.mark.parametrize("act_in", ["caller", "workers"])
@pytest.mark.parametrize("says", ["always", "not at the end"])
def test_success_at_any_step(says: str, act_in: Any) -> None:
    most, n = 20, scaled(200, 30)
    found = evaluate(
        zeros,
        partial(Visits, says),
        success="success",
        success_at="any",
        max_steps=most,
        episodes=n,
        n_workers=2,
        batch_B=5,
        act_in=act_in,
    )
    n_last = 0
    for result in found.episodes:
        rewards, infos = walked(result.seed, says, most)
        given = [info["success"] for info in infos if "success" in info]
        last = {"info.success": infos[-1]["success"]} if "success" in infos[-1] else {}
        rest = {"info.return": 7.0, "info.max_reward": 8.0, "t": len(rewards), **last}
        assert result.metrics == {"return": sum(rewards), "max_reward": max(rewards), "success": any(given), **rest}
        n_last += given[-1]
    share = found.mean("policy", "success").estimate
    assert n_last / n < share < 1


def test_success_at_the_last_step() -> None:
    found = evaluate(zeros, Visits, success="success", episodes=20, n_workers=1)
    for result in found.episodes:
        rewards, infos = walked(result.seed, "always", 99)
        assert (result.metrics["success"], result.length) == (infos[-1]["success"], len(rewards))
    assert 0 < found.mean("policy", "success").estimate < 1
    with pytest.raises(ConfigError, match="is not in the info of the last step of an episode, which has"):
        evaluate(zeros, partial(Visits, "not at the end"), success="success", episodes=2, n_workers=1)


@pytest.mark.parametrize("success_at", ["last", "any"])
def test_until_the_first_success(success_at: Any) -> None:
    found = evaluate(
        zeros, Visits, success="success", success_at=success_at, until_success=True, episodes=20, n_workers=1
    )
    for result in found.episodes:
        rewards, infos = walked(result.seed, "always", 99)
        ends = [t for t, info in enumerate(infos, 1) if info["success"]]
        assert (result.metrics["success"], result.length) == (bool(ends), ends[0] if ends else len(rewards))
        assert result.truncated is False


def test_an_environment_that_says_only_that_it_succeeds_is_refused() -> None:
    """Else a key that it does not have would be a failure in each episode."""
    make = partial(Visits, "when true")
    with pytest.raises(ConfigError, match="is not in the info of any step of an episode"):
        evaluate(zeros, make, success="success", success_at="any", episodes=30, n_workers=1)


def test_a_metric_of_the_info_without_success_keeps_its_name() -> None:
    (result,) = evaluate(zeros, Visits, episodes=1, n_workers=1).episodes
    assert set(result.metrics) == {"return", "max_reward", "success", "info.return", "info.max_reward", "t"}


# ---- objects ---------------------------------------------------------------------------------------------


class Told:
    """Chunks of a network that knows the task, with noise of the episode. It takes the instruction from the info."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def reset(self) -> None:
        self.queue: list[Any] = []
        self.t = 0

    def select_action(self, batch: Any, tasks: Any, infos: Any = None, *, rngs: Any) -> Any:
        assert len(tasks) == len(infos) == len(rngs) == 1
        assert batch["hand"][0][2] == np.float32(TASKS[tasks[0]]["radius"])
        assert ("gap" in infos[0]) == (self.t > 0)
        assert "slips" in infos[0]
        self.t += 1
        if not self.queue:
            self.queue = list(vla(batch, rngs)[0])
        return self.queue.pop(0)[None]


@pytest.mark.parametrize("act_in", ["caller", "workers"])
def test_an_object_gets_what_it_asks_for(act_in: Any) -> None:
    told, episodes = Told(), range(scaled(50, 4))
    arguments: dict[str, Any] = {"success": "is_success", "episodes": episodes, "tasks": TASKS, "n_workers": 2}
    found = played(evaluate(told, Reach, batch_B=5, act_in=act_in, **arguments))

    def alone(observation: Any, rngs: Any) -> Any:
        rng = rngs[0]
        if not queue:
            rng.integers(2**62)
            queue.extend(vla(observation, [rng])[0])
        else:
            rng.integers(2**62)
        return queue.pop(0)[None, None]

    loop = []
    for row in found:
        queue: list[Any] = []
        loop += serial([row.episode], {row.task: TASKS[row.task]}, policy=alone)
    assert found == loop
    assert CHUNK > 1


class Holds:
    """An object that holds something."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Deep:
    """A policy whose network lies somewhere in it. Its state is in tensors, buffers and arrays, anywhere."""

    def __init__(self, where: str) -> None:
        self.where, self.network = where, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
        self.network.register_buffer("count", torch.zeros(1))
        network, self.network = self.network, None  # type: ignore[assignment]
        places = {
            "itself": network,
            "list": [network],
            "dict": {"a": {"b": network}},
            "two objects deep": Holds(Holds(network)),
            "method": network.forward,
            "parameters alone": list(network.parameters()),
        }
        self.held: Any = places[where]
        self.state, self.shown = {"n": torch.zeros(1)}, [np.zeros(1)]
        self.spare: Any = network if where == "parameters alone" else None

    def found(self) -> Any:
        held = self.held
        while isinstance(held, Holds):
            held = held.held
        if self.where == "method":
            return held.__self__
        return {"list": lambda: held[0], "dict": lambda: held["a"]["b"]}.get(self.where, lambda: self.spare or held)()

    def reset(self) -> None:
        self.state["n"].zero_()
        self.shown[0][:] = 0
        self.found().count.zero_()

    def select_action(self, batch: Any) -> Any:
        network = self.found()
        network.count += 1
        self.state["n"] += 1
        self.shown[0] += 1
        assert network.count == self.state["n"] == self.shown[0][0]
        with torch.no_grad():
            shift = network(torch.as_tensor(batch["hand"]))[0].numpy()
        return (np.sin(self.shown[0] + shift) / 2).astype(np.float32)[None]


def assert_played_by(policy: Any, results: Any) -> None:
    """Each episode has the actions of a plain loop with this object."""
    env = Reach()
    for result in results.episodes:
        observation, _ = env.reset(seed=result.seed)
        policy.reset()
        for action in result.played()[0][0]:
            assert np.array_equal(action, policy.select_action(as_batch(observation))[0])
            observation, *_ = env.step(action)


WHERE = ("itself", "list", "dict", "two objects deep", "method", "parameters alone")


@pytest.mark.parametrize("where", WHERE)
def test_copies_share_parameters_wherever_they_lie_and_no_state(where: str) -> None:
    torch.manual_seed(0)
    deep, env, n = Deep(where), Reach(), 8
    spaces = env.observation_space, env.action_space
    player: Any = make_player(deep, spaces, n, batched=True)
    of_each = [list(copied.found().parameters()) for copied in player._copies]
    assert all(p is own for ps in of_each for p, own in zip(ps, deep.found().parameters(), strict=True))
    for part in ("count", "1.running_mean"):  # buffers may be states
        assert len({dict(copied.found().named_buffers())[part].data_ptr() for copied in player._copies}) == n
    found = evaluate(deep, Reach, success="is_success", episodes=12, n_workers=1, batch_B=n, max_steps=20)
    assert_played_by(deep, found)


class Lazy:
    """Its network is made, and finds its size, in the first call."""

    def reset(self) -> None:
        self.t = 0

    def select_action(self, batch: Any) -> Any:
        if self.t == 0:
            self.network = nn.LazyLinear(2, bias=False)
            self.network(torch.ones(1, 3))
            nn.init.constant_(self.network.weight, 0.1)
        self.t += 1
        with torch.no_grad():
            return torch.sin(self.t + self.network(torch.as_tensor(batch["hand"])))


def test_a_network_that_is_made_late() -> None:
    found = evaluate(Lazy(), Reach, success="is_success", episodes=9, n_workers=1, batch_B=8, max_steps=10)
    assert_played_by(Lazy(), found)


# ---- modules in training mode, and policies of another library -------------------------------------------


class Acts:
    """A policy that has modules."""

    def __init__(self, *modules: nn.Module) -> None:
        self.held = {"modules": [Holds(module) for module in modules]}

    def reset(self) -> None:
        """Nothing."""

    def select_action(self, batch: Any) -> Any:
        return zeros(batch)


class Zeros(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, observation: Any) -> Any:
        return zeros(observation)


PARTS: dict[str, Any] = {
    "Dropout": nn.Dropout(0.1),
    "BatchNorm1d": nn.BatchNorm1d(3),
    "LSTM": nn.LSTM(3, 3, 2, dropout=0.2),
    "InstanceNorm1d": nn.InstanceNorm1d(3, track_running_stats=True),
    "RReLU": nn.RReLU(),
    "MultiheadAttention": nn.MultiheadAttention(4, 2, dropout=0.1),
}


def training_warnings(policy: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluate(policy, "CartPole-v1", episodes=1, n_workers=1, max_steps=2)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("name", PARTS)
def test_a_module_in_training_mode_is_warned_about_once(name: str) -> None:
    part = PARTS[name]
    made = Zeros(nn.Sequential(part)), Acts(nn.Linear(2, 2), part), partial(Acts(part).select_action)
    for policy in (*made, called(made[0]), by_global):
        in_use[:] = [part]
        part.train()
        (message,) = training_warnings(policy)
        assert f"the policy 'policy' has a {name} in training mode" in message
        assert "call eval() of its module" in message
        part.eval()
        assert not training_warnings(policy)
        assert part.training is False


in_use: list[Any] = []


def by_global(observation: Any) -> Any:
    return zeros(observation if in_use is not None else None)


def called(policy: Any) -> Any:
    """A function that calls `policy`, as that of a model of Stable-Baselines3."""
    return lambda observation: policy(observation) + 0


def test_no_false_alarms() -> None:
    in_use.clear()
    quiet = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.0), nn.LSTM(2, 2))
    assert quiet.training
    for policy in (Zeros(quiet), Acts(quiet), zeros, by_global):
        assert not training_warnings(policy)


def test_the_models_of_stable_baselines3() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    model = sb3.PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
    hint = r"lambda obs: model.predict\(obs, deterministic=True\)\[0\]"
    play = partial(evaluate, env_fn="CartPole-v1", episodes=2, n_workers=1, max_steps=3)
    with pytest.raises(ConfigError, match=f"a policy is an Agent, .*{hint}"):
        play(model)
    for policy in (model.predict, partial(model.predict, deterministic=True)):
        with pytest.raises(SpaceError, match=f"must return an array .* It returned a tuple. .*{hint}"):
            play(policy)
    model.policy.train()
    found = play(lambda obs: model.predict(obs, deterministic=True)[0])
    env = gym.make("CartPole-v1")
    for result in found.episodes:
        observation, _ = env.reset(seed=result.seed)
        for action in result.played()[0][0]:
            assert action == model.predict(observation, deterministic=True)[0]
            observation, *_ = env.step(action)
    env.close()
