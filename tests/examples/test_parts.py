"""Parts of the examples: their updates, gradients and returns are what they should be, and their words those of the
field."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from penstock import RandomAgent, SerialSampler
from penstock.buffers import AgentSamples, EnvSamples, NamedArrays, Samples
from penstock.learning import Steps, n_step_return

from .programs import EXAMPLES, ROOT, imported


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_have_the_names_of_the_field_and_plain_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name, pattern in {
        "an advantage that is called weight": r"\bweight\.(mean|std)\(\)|\bratio \* weight\b",
        "-(-a // b): use math.ceil(a / b)": r"-\(-",
        "result |= {...}": r"\|= \{",
        '"{x}".format(**values): use an f-string': r"\.format\(\*\*",
        "a generator that is unpacked into attributes": r"self\.\w+(, self\.\w+)+ = \(\n[^\n]+\n\s+for ",
    }.items():
        assert not re.search(pattern, text), name


def parameters_of(agent: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in agent.model.named_parameters()}


def all_have_changed(agent: Any, before: dict[str, Any]) -> bool:
    return not any(torch.equal(value, before[name]) for name, value in agent.model.named_parameters())


@pytest.mark.slow
def test_one_update_of_continuous_actions_changes_all_parameters() -> None:
    with imported("ppo") as ppo, SerialSampler("Pendulum-v1", batch_T=16, batch_B=2) as sampler:
        agent = ppo.make_agent("Pendulum-v1")
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        optimizer, before = torch.optim.Adam(agent.model.parameters(), lr=1e-3), parameters_of(agent)
        ppo.train(agent, optimizer, sampler.obtain_samples(0)[0], ppo.Config(minibatches=2, entropy_weight=0.01))
    assert "log_std" in before
    assert all_have_changed(agent, before)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "model"), [("ippo_pettingzoo", "ActorCritic"), ("mappo", "ActorAndCentralCritic")])
def test_one_update_of_many_agents_changes_all_parameters(example: str, model: str) -> None:
    pytest.importorskip("mpe2")
    with imported(example) as module:
        cfg = module.Config(batch_T=25, batch_B=2, minibatches=2, epochs=1)
        agent = module.CategoricalPgAgent(getattr(module, model))
        with module.make_sampler(cfg) as sampler:
            sampler.initialize(agent, seed=0, bootstrap_value=True)
            samples, traj_infos = sampler.obtain_samples(0)
            # The values of the workers are those of the learner's model, with the state of the game where it needs it.
            own = samples.agent
            assert torch.allclose(agent.evaluate(samples).value, own.agent_info.value, atol=1e-5)
            assert torch.allclose(agent.model(samples.env.bootstrap_obs)[1], own.bootstrap_value, atol=1e-5)
            ended = samples.env.truncated
            assert ended.any()
            assert torch.allclose(agent.model(samples.env.final_obs[ended])[1], own.final_value[ended], atol=1e-5)
            games = [info.Return for info in traj_infos if info.agent_id is None]
            assert module.mean_return(traj_infos) == pytest.approx(sum(games) / len(games))
            before = parameters_of(agent)
            module.train(agent, torch.optim.Adam(agent.model.parameters(), lr=1e-3), samples, cfg)
    assert all_have_changed(agent, before)


def test_the_returns_of_decisions_are_those_of_steps() -> None:
    """With `discount ** steps`, the return from a decision on is that of all steps of the game from there on."""
    rewards: list[float] = []

    class Random(gym.RewardWrapper[Any, Any]):
        """Rewards that differ from step to step."""

        def reward(self, reward: Any) -> float:
            rewards.append(float(np.sin(7 * len(rewards))))
            return rewards[-1]

    with imported("action_repeats") as example:
        how: dict[str, Any] = {"env_info": {"steps": 0}, "traj_info_cls": example.Game, "max_decorrelation_steps": 0}
        with SerialSampler(
            lambda: example.Repeats(Random(gym.make("Acrobot-v1")), (1, 3, 8), 0.95), batch_T=60, batch_B=1, **how
        ) as sampler:
            sampler.initialize(RandomAgent(), seed=0, bootstrap_value=True)
            rewards.clear()
            samples, _ = sampler.obtain_samples(0)
    steps = samples.env.env_info.steps[:, 0].numpy()
    assert not samples.env.done.any()
    assert sorted(set(steps.tolist())) == [1, 3, 8]
    assert int(steps.sum()) == len(rewards)
    zero = torch.zeros(60, 1)
    own = Steps.of(samples, value=zero, bootstrap_value=zero[0])
    found = n_step_return(own, 60, 0.95**samples.env.env_info.steps)[:, 0]
    firsts = np.cumsum(steps) - steps
    for t, first in enumerate(firsts.tolist()):
        wanted = sum(0.95**i * reward for i, reward in enumerate(rewards[first:]))
        assert found[t] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.usefixtures("daily_forks")
@pytest.mark.slow
def test_the_ceiling_and_the_samplers_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    figures = importlib.import_module("throughput").measure_pair(4, 16, 2, seconds=0.05, repeats=2)
    assert figures.keys() == {"ceiling", "ceiling in step", "ParallelSampler"}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in figures.values())


@pytest.mark.slow
def test_the_gradients_in_numpy_are_those_of_torch() -> None:
    with imported("numpy_pg") as example:
        cfg, rng = example.Config(hidden=5), np.random.default_rng(0)
        parameters = example.new_parameters(rng, 4, 5, 2)
    observation, (log_prob, advantage, target) = rng.normal(size=(30, 4)), rng.normal(size=(3, 30))
    action, log_prob = rng.integers(0, 2, 30), np.log(0.5) + 0.3 * log_prob  # some ratios are clipped
    part = Samples(
        env=EnvSamples(observation=observation, reward=advantage),
        agent=AgentSamples(action=action, agent_info=NamedArrays(log_prob=log_prob)),
        targets=NamedArrays(advantage=advantage, value=target),
    )
    tensors = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in parameters.items()}

    def network(name: str) -> Any:
        hidden = torch.tanh(torch.tensor(observation) @ tensors[f"{name}.hidden"] + tensors[f"{name}.hidden.bias"])
        return hidden @ tensors[f"{name}.out"] + tensors[f"{name}.out.bias"]

    chosen = network("policy").log_softmax(1).gather(1, torch.tensor(action)[:, None]).squeeze(1)
    ratio = (chosen - torch.tensor(log_prob)).exp()
    weight = torch.tensor((advantage - advantage.mean()) / (advantage.std() + 1e-8))
    objective = torch.min(ratio * weight, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * weight).mean()
    error = network("value").squeeze(1) - torch.tensor(target)
    (0.5 * error.square().mean() - objective).backward()
    assert ((ratio - 1).abs() > cfg.clip).any()
    found = example.gradients(parameters, part, cfg)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(found[name], tensor.grad, atol=1e-5, err_msg=name)


def walk(env: Any, sign: int, *actions: int) -> list[Any]:
    """Steps of an episode that shows `sign`."""
    while env.reset()[0][0] != sign:
        pass
    return [env.step(action) for action in actions]


@pytest.mark.slow
def test_the_maze_rewards_the_turn_that_was_shown() -> None:
    with imported("recurrent_ppo") as example:
        env = example.TMaze(2, time_limit=5)
    env.reset(seed=0)
    for sign in (-1, 1):
        for turn in (1, 2):
            *corridor, last = walk(env, sign, 0, 2, 0, turn)
            assert [list(step[0]) for step in corridor] == [[0, 1, 0], [0, 1, 0], [0, 0, 1]]
            assert all(step[1:4] == (0.0, False, False) for step in corridor)
            assert last[1:4] == (float((turn == 2) == (sign == 1)), True, False)
    assert [step[3] for step in walk(env, 1, 0, 0, 0, 0, 0)] == [False] * 4 + [True]
