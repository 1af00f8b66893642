"""Evaluations find what a plain loop finds, bit for bit, whatever plays the episodes and however odd they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from penstock import (
    CategoricalPgAgent,
    ConfigError,
    EvalResults,
    FunctionAgent,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    RepeatError,
    evaluate,
)
from penstock.envs import ColumnStreams, CountingEnv, NestedEnv, Purpose

from ..models import CartPoleNet, Lstm, Net, Normed
from ..scale import FULL, START_METHODS, scaled, with_start_methods
from ..support import assert_same
from .reach import CHUNK, TASKS, Reach, direction, played, serial, vla, weaker

pytestmark = pytest.mark.timeout(scaled(600, 60))


LAYOUTS = ((1, 1), (1, 4), (2, 2), (2, 7), (2, 16), (4, 4), (4, 25))  # workers, environments
MODES: tuple[dict[str, Any], ...] = ({}, {"batched": False}, {"act_in": "workers"})
EPISODES = range(scaled(200, 5))

cells = [(*layout, mode) for layout, mode in product(LAYOUTS, MODES)]
run = partial(evaluate, success="is_success", episodes=EPISODES, tasks=TASKS)

truth = cache(partial(serial, EPISODES))


@pytest.mark.parametrize(("n_workers", "batch_B", "mode"), cells if FULL else cells[3::5])
def test_as_a_plain_loop(n_workers: int, batch_B: int, mode: dict[str, Any]) -> None:
    assert played(run(vla, Reach, n_workers=n_workers, batch_B=batch_B, **mode)) == truth()


@with_start_methods("act_in", ["workers", "caller"], START_METHODS)
def test_with_every_start_method(start_method: Any, act_in: Any) -> None:
    found = run(vla, Reach, n_workers=2, batch_B=3, act_in=act_in, start_method=start_method)
    assert played(found) == truth()


@pytest.mark.parametrize("kwargs", [{"min_ready": 1}, {"min_ready": 1.0}, {"min_ready": 3, "max_wait": 0.0}])
def test_when_a_policy_acts_changes_nothing(kwargs: Any) -> None:
    assert played(run(vla, Reach, n_workers=2, batch_B=5, **kwargs)) == truth()


@pytest.mark.parametrize("kwargs", [{"episodes": range(2, 5)}, {"tasks": {"shelf": TASKS["shelf"]}}, {"seed": 1}])
def test_a_part_of_the_episodes_and_another_seed(kwargs: Any) -> None:
    assert played(run(vla, Reach, n_workers=1, **kwargs)) == serial(**{"episodes": EPISODES, **kwargs})


def test_several_policies_play_the_same_episodes() -> None:
    found = run({"vla": vla, "weaker": weaker}, Reach, n_workers=2, batch_B=6)
    assert played(found, "vla") == truth()
    assert played(found, "weaker") == serial(EPISODES, policy=weaker)
    seeds = [[r.seed for r in found.episodes if r.policy == name] for name in ("vla", "weaker")]
    assert seeds[0] == seeds[1]


def test_options_of_resets() -> None:
    def options(task: str, k: int) -> dict[str, Any]:
        return {"speed": 0.02 * (k + 1) + 0.01 * len(task)}

    found = run(vla, Reach, options=options, n_workers=2, batch_B=3)
    assert played(found) == serial(EPISODES, options=options)
    episode = found.episode("policy", "desk", 1)
    assert episode.options == options("desk", 1)


def test_an_episode_is_repeated() -> None:
    found = run(vla, Reach, n_workers=2, batch_B=3)
    for result in found.episodes:
        env, action = found.episode("policy", result.task, result.episode).run()
        _, _, terminated, _, info = env.step(action)
        assert (terminated, info["is_success"]) == (result.terminated, result.metrics["success"])
        env.close()


# ---- how episodes end ----------------------------------------------------------------------------------


class Lengths(gym.Env[Any, Any]):
    """Episodes of 10 or 1,000 steps, as the seed says. Its success comes and goes."""

    observation_space = gym.spaces.Discrete(3)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.length = 0, 1000 if self.np_random.random() < 0.3 else 10
        return 0, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return 1, 1.0, self.t == self.length, False, {"ok": self.t % 7 == 0, "long": self.length == 1000}


def idle(observation: Any) -> Any:
    return np.zeros((len(observation), 100), np.int64)


@pytest.mark.parametrize(("n_workers", "batch_B"), [(1, 1), (2, 9)])
def test_short_episodes_are_not_favoured(n_workers: int, batch_B: int) -> None:
    n = scaled(10_000, 200)
    found = evaluate(idle, Lengths, success="long", episodes=n, n_workers=n_workers, batch_B=batch_B, act_in="workers")
    env, n_long = Lengths(), 0
    for result in found.episodes:
        env.reset(seed=result.seed)
        n_long += env.length == 1000
    assert found.mean("policy", "success").estimate == n_long / n
    assert found.mean("policy", "return").estimate == (n_long * 1000 + (n - n_long) * 10) / n


def test_until_success_and_after_most_steps() -> None:
    (first,) = evaluate(idle, Lengths, success="ok", until_success=True, episodes=1, n_workers=1).episodes
    assert (first.length, first.terminated, first.truncated, first.metrics["success"]) == (7, False, False, True)
    (first,) = evaluate(idle, Lengths, success="ok", max_steps=6, episodes=1, n_workers=1).episodes
    assert (first.length, first.terminated, first.truncated, first.metrics["success"]) == (6, False, True, False)


# ---- policies of every form ------------------------------------------------------------------------------


class Robot:
    """As LeRobot's policies: one queue of actions, and noise of torch's global generator."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)
        self.reset()

    def reset(self) -> None:
        self.queue: list[Any] = []

    def select_action(self, batch: Any) -> Any:
        if not self.queue:
            shift = self.model(torch.as_tensor(batch["hand"]))[0].detach().numpy()
            noise = torch.randn(CHUNK, 2).numpy()
            self.queue = [direction(batch["hand"][0], batch["instruction"][0], each) + 0.01 * shift for each in noise]
        return torch.as_tensor(self.queue.pop(0))[None]


@pytest.mark.slow
def test_an_object_with_a_queue_plays_each_episode_alone() -> None:
    tasks, episodes = dict(list(TASKS.items())[: scaled(4, 2)]), range(scaled(200, 4))
    torch.manual_seed(0)
    robot, before = Robot(), torch.random.get_rng_state()
    found = [
        played(run(robot, Reach, tasks=tasks, episodes=episodes, n_workers=n_workers, batch_B=batch_B, act_in=act_in))
        for n_workers, batch_B, act_in in ((1, 1, "caller"), (2, 7, "caller"), (2, 3, "workers"))
    ]
    assert found[0] == found[1] == found[2]
    assert torch.equal(before, torch.random.get_rng_state())

    def alone(observation: Any, rngs: Any) -> Any:
        torch.manual_seed(int(rngs[0].integers(2**62)))
        return robot.select_action(observation).numpy()[None]  # a chunk of one action

    loop = []
    for row in found[0][:3]:
        robot.reset()
        loop += serial([row.episode], {"kitchen": TASKS["kitchen"]}, policy=alone)
    assert found[0][:3] == loop


class Contrary(Lstm):
    """It often takes another action than the last one."""

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        logits, value, state = super().forward(observation, prev_action, prev_reward, state)
        last = prev_action.reshape(len(logits), 1)
        return logits + torch.cat([3 * last, -3 * last], 1), value, state


AGENTS: dict[str, Any] = {
    "samples": lambda: CategoricalPgAgent(partial(Net, 4, 2, 0)),
    "numpy": lambda: CategoricalPgAgent(partial(CartPoleNet, 8), inference="numpy", greedy_eval=True),
    "recurrent": lambda: RecurrentCategoricalPgAgent(partial(Contrary, 4, 2)),
    "function": lambda: FunctionAgent(lambda x, rngs: np.array([rng.integers(2) for rng in rngs])),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent(name: str) -> None:
    torch.manual_seed(0)
    agent, found = AGENTS[name](), []
    for n_workers, batch_B, mode in ((1, 1, {}), (2, 5, {"batched": False}), (2, 3, {"act_in": "workers"}), (2, 6, {})):
        results = evaluate(agent, "CartPole-v1", episodes=scaled(12, 8), n_workers=n_workers, batch_B=batch_B, **mode)
        found.append([(r.length, r.played()[0][0].tobytes()) for r in results.episodes])
    assert found[0] == found[1] == found[2]
    if name != "numpy":  # which has numbers of 32 bits
        assert found[0] == found[3]


def test_a_greedy_agent_as_a_plain_loop() -> None:
    agent = CategoricalPgAgent(partial(Net, 4, 2, 0), greedy_eval=True)
    results = evaluate(agent, "CartPole-v1", episodes=5, n_workers=1, batch_B=1)
    env = gym.make("CartPole-v1")
    for result in results.episodes:
        observation, _ = env.reset(seed=result.seed)
        for action in result.played()[0][0]:
            assert action == agent.act(observation)
            observation, *_ = env.step(action)
    env.close()


class Greedy:
    """Takes the best action of a model. torch cannot copy it, nor pickle it."""

    def __init__(self) -> None:
        self.model = Normed(2)
        self.model(torch.ones(1, 4, dtype=torch.float64))  # its lazy layer finds its size
        self.model.eval()

    def reset(self) -> None:
        """Nothing."""

    def select_action(self, observation: Any) -> Any:
        return self.model(torch.as_tensor(observation).double())[0].argmax(1)


@pytest.mark.parametrize("act_in", ["caller", "workers"])
def test_models_with_weights_that_are_computed_before_each_call(act_in: Any) -> None:
    greedy, env = Greedy(), gym.make("CartPole-v1")
    policies = {"object": greedy, "function": greedy.select_action}
    for result in evaluate(policies, "CartPole-v1", episodes=3, n_workers=2, act_in=act_in).episodes:
        observation, _ = env.reset(seed=result.seed)
        for action in result.played()[0][0]:
            assert action == greedy.select_action(observation[None]).item()
            observation, *_ = env.step(action)
    env.close()


def test_a_function_gets_what_it_asks_for() -> None:
    seen = []

    def policy(observation: Any, states: Any, infos: Any, tasks: Any, rngs: Any) -> Any:
        seen.extend(zip(states, tasks, [info["slips"] for info in infos], strict=True))
        assert all("gap" in info for info, state in zip(infos, states, strict=True) if state)
        return vla(observation, rngs), [(state or 0) + 1 for state in states]

    found = run(policy, Reach, n_workers=2, batch_B=4)
    assert played(found) == truth()
    n_chunks = [-(-r.length // CHUNK) for r in found.episodes]
    again = n_chunks[len(EPISODES) - 1 :: len(EPISODES)]  # the last episode of each task once more
    assert sorted(state or 0 for state, _, _ in seen) == sorted(k for n in [*n_chunks, *again] for k in range(n))
    assert {task for _, task, _ in seen} == set(TASKS)
    assert {slips for *_, slips in seen} == {True, False}


class Pushes(NestedEnv):
    """Its actions are Dicts. It changes them, and rewards what it was given."""

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        reward = float(action["move"].sum() + 10 * action["mode"][1])
        action["move"] += 1
        observation, _, *rest = super().step(action)
        return observation, reward, *rest


def nested_policy(observation: Any, rngs: Any) -> Any:
    place, (goal, _) = observation["position"], observation["goal"]
    return {"move": place / 3, "mode": np.stack([[rng.integers(2) for rng in rngs], goal % 3], 1)}


def test_nested_spaces() -> None:
    found = evaluate(nested_policy, Pushes, episodes=4, n_workers=2, batch_B=3)
    for result in found.episodes:
        env, (rng,) = Pushes(), ColumnStreams(0, (0,)).rngs(Purpose.EVAL_ACTION, result.episode)
        observation, _ = env.reset(seed=result.seed)
        total, is_over = 0.0, False
        while not is_over:
            goal = np.array([observation["goal"][0]]), observation["goal"][1]
            action = nested_policy({"position": observation["position"][None], "goal": goal}, [rng])
            own = {"move": action["move"][0].astype(np.float32), "mode": action["mode"][0]}
            observation, reward, is_over, _, _ = env.step(own)
            total += reward
        assert result.metrics["return"] == pytest.approx(total, abs=1e-6)


class Own(gym.Env[Any, Any]):
    """Reuses one array for all observations, takes entries out of its options, and has infos of every kind."""

    observation_space = gym.spaces.Box(-9, 9, (1,), np.float64)
    action_space = gym.spaces.Box(-100, 100, (1,), np.int8)
    memory = np.zeros(1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.length = 0, options.pop("length", 1) if options else 5
        self.memory[:] = self.np_random.normal()
        return self.memory, {"goal": {"x": 1.0, "lists": [1, None]}, "tensor": torch.tensor(2.0), "object": object()}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.memory[:] = self.np_random.normal()
        done = self.t >= self.length
        info = {"goal": {"x": float(self.t)}, "task": 3, "length": 99, "ok": torch.tensor(True)}
        return self.memory, float(action[0]), done, done, info


def as_actions(numbers: Any) -> Any:
    return np.array(numbers, np.int64).reshape(-1, 1)


@pytest.mark.parametrize("mode", [{}, {"act_in": "workers"}])
def test_a_policy_keeps_observations(mode: Any) -> None:
    def moves(observation: Any, states: Any) -> Any:
        each = zip(observation, states, strict=True)
        return as_actions([np.sign(own - (own if last is None else last))[0] for own, last in each]), list(observation)

    for result in evaluate(moves, Own, episodes=4, n_workers=1, batch_B=2, **mode).episodes:
        rng, last, total = gym.utils.seeding.np_random(result.seed)[0], None, 0.0
        for _ in range(5):
            value = rng.normal()
            total += 0 if last is None else np.sign(value - last)
            last = value
        assert result.metrics["return"] == total
        assert (result.terminated, result.truncated) == (True, True)


@pytest.mark.parametrize("mode", [{}, {"act_in": "workers"}])
def test_options_and_infos_reach_every_policy(mode: Any) -> None:
    def policy(observation: Any, infos: Any) -> Any:
        assert all("object" not in info and info["tensor"] == 2.0 for info in infos)
        return as_actions([info["goal"]["x"] for info in infos])

    found = evaluate(
        {"a": policy, "b": policy},
        Own,
        episodes=4,
        options=lambda _, k: {"length": 3 + k},
        success="ok",
        n_workers=1,
        **mode,
    )
    assert [r.length for r in found.episodes] == [3, 4, 5, 6] * 2
    assert [r.metrics["return"] for r in found.episodes if r.policy == "b"] == [1 + 1 + 2, 7, 11, 16]
    assert found.mean("a", "success").estimate == 1.0


def test_a_module_gets_what_its_forward_asks_for() -> None:
    class Asks(nn.Module):
        def forward(self, observation: Any, tasks: Any = None, rngs: Any = None) -> Any:
            assert rngs is not None
            return as_actions([len(task) for task in tasks])

    found = evaluate(Asks(), lambda task: Own(), tasks=["a", "abc"], episodes=1, n_workers=1)
    assert [r.metrics["return"] for r in found.episodes] == [5, 15]
    given = partial(lambda observation, tasks: as_actions([len(tasks)] * len(observation)), tasks="pick")
    assert evaluate(given, Own, episodes=1, n_workers=1).episodes[0].metrics["return"] == 20


def test_buffers_of_a_module_belong_to_the_episode() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(1, dtype=torch.int64))

        def reset(self) -> None:
            self.n.zero_()

        def select_action(self, batch: Any) -> Any:
            self.n += 1
            return self.n[None].clone()

    policy = Counts()
    found = evaluate(policy, Own, episodes=6, n_workers=1, batch_B=3)
    assert [r.metrics["return"] for r in found.episodes] == [15] * 6
    assert policy.n.item() == 0


class NoNumber(Own):
    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, np.nan if self.np_random.random() < 0.3 else reward, *rest


def test_what_is_no_number_is_seen_and_a_metric_may_have_the_name_of_a_column(tmp_path: Any) -> None:
    found = evaluate(lambda x: as_actions([1] * len(x)), NoNumber, episodes=6, n_workers=1)
    assert np.isnan(found.mean("policy", "return")).all()
    assert "nan" in str(found)
    found.save(tmp_path / "x.csv")
    header, row, *_ = (tmp_path / "x.csv").read_text().splitlines()
    values = dict(zip(header.split(","), row.split(","), strict=True))
    assert (values["length"], values["info.length"], values["task"], values["info.task"]) == ("5", "99.0", "", "3.0")


class Masked(CountingEnv):
    """The only legal action is in the info. Observations do not have the number of the episode."""

    def reset(self, **kwargs: Any) -> Any:
        observation, _ = super().reset(**kwargs)
        return np.zeros_like(observation), {"mask": np.eye(3, dtype=np.int8)[0]}

    def step(self, action: Any) -> Any:
        assert action == self.count % 3
        observation, *rest, _ = super().step(action)
        return np.zeros_like(observation), *rest, {"mask": np.eye(3, dtype=np.int8)[self.count % 3]}


@pytest.mark.parametrize("mode", [{}, {"act_in": "workers"}])
def test_masks_in_infos(mode: Any, tmp_path: Any) -> None:
    agent = RandomAgent(mask_key="info.mask")
    found = evaluate(agent, Masked, episodes=3, n_workers=1, folder=tmp_path, **mode)
    assert [r.metrics["return"] for r in found.episodes] == [15] * 3
    loaded = EvalResults.load(tmp_path, env_fn=Masked).episode("policy", "", 1)
    assert len(list(loaded.steps())) == 5


# ---- arrays that are used again, and what is changed ---------------------------------------------


class Drifts(gym.Env[Any, Any]):
    """Its info is the same array in each step, its reset takes no options, and it changes the action in place."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Box(-9, 9, (2,), np.float64)

    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2)
        self.t = 0
        return np.zeros(1, np.float32), {"place": self.place}

    def step(self, action: Any) -> Any:
        action *= 2
        self.place += action
        self.t += 1
        return np.zeros(1, np.float32), self.place[0], False, self.t == 6, {"place": self.place}


def follows(observation: Any, states: Any, infos: Any) -> Any:
    """Acts on how far the place has moved since the last step, which it keeps as it is given."""
    moved = [info["place"] - (0 if state is None else state) for state, info in zip(states, infos, strict=True)]
    return np.array(moved) / 8, [info["place"] for info in infos]


def plain_return(seed: int) -> float:
    env, last, total, is_over = Drifts(), np.zeros(2), 0.0, False
    _, info = env.reset(seed=seed)
    while not is_over:
        place = info["place"].copy()
        _, reward, _, is_over, info = env.step((place - last) / 8)
        last, total = place, total + float(reward)
    return total


@pytest.mark.parametrize("act_in", ["caller", "workers"])
def test_arrays_that_are_used_again(act_in: str) -> None:
    found = evaluate(follows, Drifts, episodes=4, n_workers=1, batch_B=2, act_in=act_in)  # type: ignore[arg-type]
    assert [r.metrics["return"] for r in found.episodes] == pytest.approx(
        [plain_return(r.seed) for r in found.episodes]
    )
    episode = found.episode("policy", "", 0)
    steps = list(episode.steps())
    assert_same([step.action for step in steps], list(episode.actions))
    assert sum(step.reward for step in steps) == pytest.approx(found.episodes[0].metrics["return"])


class Moves(gym.Env[Any, Any]):
    """It walks from the place that its options give, and writes into them. The last reward is the prize."""

    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)

    def __init__(self, prize: float = 5.0) -> None:
        self.prize = prize

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place, self.t = options["start"], 0
        return 0, {}

    def step(self, action: Any) -> Any:
        self.place += 1
        self.t += 1
        return 0, float(self.place[0]) if self.t < 4 else self.prize, self.t == 4, False, {}


def zeros(observation: Any) -> Any:
    return np.zeros(len(observation), np.int64)


def starts(task: str, k: int) -> Any:
    return {"start": np.full(1, 10 * k)}


def test_the_options_of_an_episode_stay_as_they_are() -> None:
    found = evaluate(zeros, Moves, options=starts, episodes=2, n_workers=1)
    episode = found.episode("policy", "", 1)
    for _ in range(3):
        assert [step.reward for step in episode.steps()] == [11, 12, 13, 5]


def test_the_last_step_of_a_repeated_episode_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is a relative one, and the program goes to another folder."""
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"options": starts, "episodes": 1, "n_workers": 1}
    found = evaluate(zeros, Moves, folder="found", **given)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    episode = found.episode("policy", "", 0)
    assert len(list(episode.steps())) == 4
    another = replace(episode, factory=replace(episode.factory, fn=partial(Moves, prize=1.0)))
    with pytest.raises(RepeatError, match=r"the reward of its last step is 1.0, recorded was 5.0"):
        list(another.steps())


class Locked:
    """A policy that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle a lock")

    def reset(self) -> None:
        """Nothing."""

    def select_action(self, batch: Any) -> Any:
        return zeros(batch)


def test_a_policy_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Locked object at .* cannot be copied, .*cannot pickle a lock"):
        evaluate(Locked(), Moves, options=starts, episodes=1, n_workers=1)
