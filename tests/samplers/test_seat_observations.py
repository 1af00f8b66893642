"""What observations of several agents get beside their own: masks, the state of the environment; and normalization."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock import (
    CategoricalPgAgent,
    ConfigError,
    EpsilonGreedyAgent,
    FunctionAgent,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    SerialSampler,
    WorkerError,
)
from penstock.envs.toy import ScriptedGame

from ..scale import FULL, pairs
from ..support import EVALUATING, assert_same, collect_with
from ..toy_games import OPENING, STORY, Valued
from .started import check_fails, check_refused, started

MIXED = [{"k": k} for k in (4, 2, 5, 3, 4)]


# ---- the state of the whole environment --------------------------------------------------------


class Stated(ScriptedGame):
    """Its state has a random number, so that each is different. `state_at` are all states, by game and step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.states: list[list[list[float]]] = []
        self._now = np.zeros(3, np.float32)

    def state(self) -> Any:
        return self._now  # one array for all steps

    def _note(self) -> None:
        self._now[:] = len(self.states), self.t, self._random.random()
        self.states[-1].append(self._now.tolist())

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed, options)
        self._random = np.random.default_rng(len(self.states))
        self.states.append([])
        self._note()
        return result

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        self._note()
        return result


@pytest.mark.parametrize("record_final_obs", [True, False])
def test_the_state_stands_beside_each_observation(record_final_obs: bool) -> None:
    agent, n_compared = Valued(), 0
    sizes: dict[str, Any] = {"batch_T": 12, "batch_B": 5, "max_decorrelation_steps": 200, "seed": 3}
    options = {"global_state": True, "record_final_obs": record_final_obs, "bootstrap_value": True}
    with started(Stated, agent, env_kwargs=MIXED, **sizes, **options) as sampler:
        (seats,) = sampler.seats().values()
        for itr in range(6):
            sampler.obtain_samples(itr)
            states, env, own = sampler.get_attr("states"), sampler.samples_np.env, sampler.samples_np.agent
            assert set(env.observation.keys()) == {"observation", "global_state"}
            np.testing.assert_array_equal(env.global_state, env.observation.global_state)

            def check(seen: Any, number: float, b: int, states: Any = states) -> None:
                """It is the state of step `number`, and stands beside the observation of this step."""
                game, t = int(seen[0]), int(seen[1])
                assert t == number
                assert seen.tolist() == states[seats[b][0]][game - 1][t]

            for t, b in np.argwhere(env.valid):
                check(env.global_state[t, b], env.observation.observation[t, b, 1], b)
                n_compared += 1
            after = env.bootstrap_obs
            is_there = after.observation[:, 0] != 0
            for b in np.flatnonzero(is_there):
                check(after.global_state[b], after.observation[b, 1], b)
            assert not after.global_state[~is_there].any()
            if record_final_obs:
                for t, b in np.argwhere(env.done):
                    check(env.final_obs.global_state[t, b], env.global_state[t, b, 1] + 1, b)
                    assert env.final_obs.global_state[t, b, 0] == env.global_state[t, b, 0], "of the same game"
                at = env.truncated & ~env.terminated
                np.testing.assert_allclose(own.final_value[at], agent.value(env.final_obs[at], None, None), rtol=1e-6)
        assert n_compared > 500


def test_a_dict_gets_one_more_entry() -> None:
    for where, names in (("observation", {"board", "rules"}), ("info", {"observation", "action_mask"})):
        agent = RandomAgent(mask_key=f"{where}.rules.legal")
        with started(partial(Ruled, where), agent, global_state=True) as sampler:
            samples, _ = sampler.obtain_samples(0)
            assert set(samples.env.observation.keys()) == {*names, "global_state"}


class Already(ScriptedGame):
    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Dict({"global_state": spaces.Discrete(2)})


def test_an_observation_with_such_an_entry_is_refused() -> None:
    check_refused(Already, "the observation has an entry 'global_state' already", global_state=True)


# ---- columns of an environment together --------------------------------------------------------


@pytest.mark.slow
def test_the_columns_of_an_environment_can_be_seen_together() -> None:
    for cls, debug in ((SerialSampler, False), (ParallelSampler, True)):
        options = {"global_state": True, "debug": debug, "bootstrap_value": True, "max_decorrelation_steps": 200}
        with started(Stated, Valued(), cls, env_kwargs={"k": 3}, batch_T=6, batch_B=4, **options) as sampler:
            samples, _ = sampler.obtain_samples(0)
            view = samples.by_env()
            assert view.env.reward.shape == view.env.valid.shape == (6, 4, 3)
            assert view.env.observation.observation.shape == (6, 4, 3, 4)
            assert view.agent.bootstrap_value.shape == (4, 3)
            assert view.env.bootstrap_obs.observation.shape == (4, 3, 4)
            for (name, one), (_, other) in zip(view.leaves(), samples.leaves(), strict=True):
                assert one.data_ptr() == other.data_ptr(), name
                assert torch.equal(one.reshape(other.shape), other), name
            for b, (rank, agent_id) in enumerate(sampler.seats()["agent"]):
                assert torch.equal(view.env.reward[:, rank, int(agent_id[1:])], samples.env.reward[:, b])
            state = view.env.global_state  # the same for all who act
            mean = state.sum(2) / view.env.valid.sum(2).clamp(min=1)[..., None]
            torch.testing.assert_close(state[view.env.valid], mean[:, :, None].expand_as(state)[view.env.valid])
            assert sampler.samples_np.by_env().env.reward.shape == (6, 4, 3)
            copied = samples.copy()
            assert copied.by_env(3).env.reward.shape == (6, 4, 3)
            with pytest.raises(ConfigError, match=r"by_env needs .* it is not known"):
                copied.by_env()
            for wrong in (5, 0, -1, 2.0, True):
                with pytest.raises(ConfigError, match="by_env needs the same number of agents in each environment"):
                    copied.by_env(wrong)
            with pytest.raises(ConfigError, match="by_env needs"):
                samples.by_env(4)


@pytest.mark.parametrize("n_seats", [None, 3, 6])
def test_unlike_numbers_of_agents_cannot_be_seen_together(n_seats: Any) -> None:
    with started(ScriptedGame, batch_B=5, env_kwargs=MIXED) as sampler:
        samples, _ = sampler.obtain_samples(0)
        with pytest.raises(ConfigError, match=r"^by_env needs the same number of agents in each environment\. "):
            samples.by_env(n_seats)


# ---- masks -------------------------------------------------------------------------------------


class Ruled(ScriptedGame):
    """Raises for an illegal action. Each agent that acts has a legal action; who has ended has none, or no mask."""

    def __init__(self, where: str = "observation", none_at: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._where, self._none_at = where, none_at
        self.masks: dict[str, Any] = {}

    def observation_space(self, agent: str) -> gym.Space[Any]:
        board = super().observation_space(agent)
        rules = spaces.Dict({"legal": spaces.MultiBinary(3)})
        return spaces.Dict({"board": board, "rules": rules}) if self._where == "observation" else board

    def with_masks(self, observations: Any) -> tuple[Any, Any]:
        self.masks = {}
        for agent in observations:
            mask = np.zeros(3, np.int8)
            if agent in self.agents and not (self._none_at and self._none_at == self._own[agent]):
                mask[:] = self.np_random.random(3) < 0.3
                mask[self.np_random.integers(3)] = 1
            self.masks[agent] = mask
        if self._where == "observation":
            return {a: {"board": o, "rules": {"legal": self.masks[a]}} for a, o in observations.items()}, {}
        return observations, {a: {"rules": {"legal": self.masks[a]}} for a in observations if a in self.agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return self.with_masks(super().reset(seed, options)[0])

    def step(self, actions: dict[str, Any]) -> Any:
        for agent, action in actions.items():
            assert self.masks[agent][action], f"illegal action of {agent}"
        observations, *rest, _ = super().step(actions)
        observations, infos = self.with_masks(observations)
        return observations, *rest, infos


class Model(nn.Module):
    state_shape = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.arange(3) / 2)

    def forward(self, observation: Any) -> Any:
        board = observation.board if "board" in observation else observation.observation
        return self.logits.expand(len(board), -1).double(), board[:, 1]


class Recurrent(Model):
    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:  # type: ignore[override]
        return *super().forward(observation), state + 1


class Q(Model):
    def forward(self, observation: Any) -> Any:
        return super().forward(observation)[0]


MASKED = {
    "random": RandomAgent,
    "categorical": partial(CategoricalPgAgent, Model),
    "recurrent": partial(RecurrentCategoricalPgAgent, Recurrent),
    "epsilon": partial(EpsilonGreedyAgent, Q, epsilon=0.5, eval_epsilon=0.5),
}


def legal_of(samples: Any) -> Any:
    observation = samples.env.observation
    return observation.rules.legal if "rules" in observation else observation.action_mask


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), pairs(MASKED, ["observation", "info"]))
def test_no_illegal_action_is_taken(name: str, where: str) -> None:
    make = partial(MASKED[name], mask_key=f"{where}.rules.legal")
    env_fn = partial(Ruled, where)
    options = {"env_kwargs": MIXED, "bootstrap_value": name in ("categorical", "recurrent"), **EVALUATING}
    wanted = collect_with(SerialSampler, env_fn, make(), **options)
    for batch, _ in wanted:
        if batch is None:
            continue
        valid, legal = batch.env.valid, legal_of(batch)
        assert np.take_along_axis(legal, batch.agent.action[..., None], -1)[..., 0][valid].all()
        assert not legal[~valid].any()
        for path, leaf in batch.leaves():
            assert not (leaf.dtype.kind == "f" and np.isnan(leaf).any()), path
            if path.startswith("agent.agent_info"):
                assert not leaf[~valid].any(), path
    central = name in ("random", "recurrent")
    if FULL or not central:
        assert_same(wanted, collect_with(ParallelSampler, env_fn, make(), n_workers=3, **options), rtol=1e-6)
    if central:
        assert_same(wanted, collect_with(GpuSampler, env_fn, make(), n_workers=2, min_ready=1, **options), rtol=1e-6)


def test_the_learner_may_evaluate_idle_cells() -> None:
    agent = CategoricalPgAgent(Model, mask_key="observation.rules.legal")
    with started(Ruled, agent, env_kwargs=MIXED, batch_B=5) as sampler:
        samples, _ = sampler.obtain_samples(0)
        assert not samples.env.valid.all()
        outputs = agent.evaluate(samples)
        for value in (outputs.log_prob, outputs.entropy, outputs.value):
            assert torch.isfinite(value).all()
            assert value.shape == samples.env.valid.shape
        recorded = samples.agent.agent_info.log_prob
        torch.testing.assert_close(outputs.log_prob[samples.env.valid], recorded[samples.env.valid], check_dtype=False)
        outputs.log_prob[samples.env.valid].sum().backward()
        assert torch.isfinite(agent.model.logits.grad).all()


@pytest.mark.parametrize(("cls", "where"), pairs([SerialSampler, ParallelSampler, GpuSampler], ["observation", "info"]))
def test_who_decides_without_a_legal_action_is_named(cls: Any, where: str) -> None:
    options = {} if cls is SerialSampler else {"n_workers": 2}
    script = [{"a2": "join"}, *[{}] * 9]
    fine, wrong = (partial(Ruled, where, none_at, script=script, start=OPENING) for none_at in (0, 3))
    agent, message = RandomAgent(mask_key=f"{where}.rules.legal"), "the action mask of env_rank 2, agent 'a0' allows no"
    check_fails([fine, fine, wrong], message, agent, cls=cls, batch_B=3, **options)


class Usual(Ruled):
    """The mask is where PettingZoo's games have it."""

    def observation_space(self, agent: str) -> gym.Space[Any]:
        board = super().observation_space(agent)["board"]  # type: ignore[index]
        return spaces.Dict({"observation": board, "action_mask": spaces.MultiBinary(3)})

    def with_masks(self, observations: Any) -> tuple[Any, Any]:
        observations, infos = super().with_masks(observations)
        return {
            agent: {"observation": own["board"], "action_mask": own["rules"]["legal"]}
            for agent, own in observations.items()
        }, infos


def first_legal(observation: Any) -> Any:
    return observation.action_mask.argmax(1)


@pytest.mark.parametrize(
    ("agents", "is_told"),
    [
        ({"a0": first_legal, "rest": RandomAgent(mask_key="observation.action_mask")}, False),
        ({"a0": first_legal, "rest": first_legal}, False),
        ({"a0": RandomAgent(), "rest": RandomAgent()}, True),
    ],
)
def test_random_steps_of_a_scripted_function_are_legal(
    agents: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    agents = {name: FunctionAgent(fn) if fn is first_legal else fn for name, fn in agents.items()}
    options: dict[str, Any] = {"policy_of": lambda agent: "a0" if agent == "a0" else "rest"}
    with (
        caplog.at_level("WARNING", logger="penstock"),
        started(Usual, agents, batch_B=3, max_decorrelation_steps=60, **options) as sampler,
    ):
        for itr in range(0 if is_told else 3):  # `Usual` raises for an illegal action
            sampler.obtain_samples(itr)
    told = [text for record in caplog.records if "action_mask" in (text := record.getMessage())]
    assert len(told) == is_told
    assert all('make the agents with mask_key="observation.action_mask"' in text for text in told)


def test_random_steps_without_a_legal_action_name_the_agent() -> None:
    env_fn = partial(Ruled, "observation", 3, script=[{}] * 40)
    agent, message = RandomAgent(mask_key="observation.rules.legal"), "the action mask of env_rank 0, agent 'a0' allows"
    check_refused(env_fn, message, agent, error=WorkerError, max_decorrelation_steps=40)


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        (lambda t: {}, r"agent 'a0': info has no action mask 'rules\.legal'"),
        (
            lambda t: {"rules": {"legal": np.ones(2)}},
            "agent 'a0': the action mask in info must have one entry for each",
        ),
    ],
)
def test_a_missing_mask_names_the_agent(infos: Any, message: str) -> None:
    class Forgetful(Ruled):
        def step(self, actions: Any) -> Any:
            *rest, own = super().step(actions)
            return *rest, {**own, "a0": infos(self.t)}

    env_fns = [partial(Ruled, "info", script=STORY), partial(Forgetful, "info", script=STORY)]
    assert "env_rank 1" in check_fails(env_fns, message, RandomAgent(mask_key="info.rules.legal"))


def test_policies_with_unlike_masks_in_info_are_refused() -> None:
    agents = {"a0": RandomAgent(mask_key="info.rules.legal"), "a1": RandomAgent()}
    check_refused(partial(Ruled, "info", k=2), "the masks in info must be the same for all policies", agents)


def test_one_policy_may_use_a_mask_and_another_not() -> None:
    class Lenient(Ruled):
        def step(self, actions: Any) -> Any:
            assert self.masks["a0"][actions["a0"]] if "a0" in actions else True
            self.masks = {agent: np.ones(3) for agent in self.masks}
            return super().step(actions)

    agents = {"a0": RandomAgent(mask_key="observation.rules.legal"), "a1": RandomAgent()}
    with started(partial(Lenient, k=2), agents, batch_T=50, max_decorrelation_steps=100) as sampler:
        samples, _ = sampler.obtain_samples(0)
        for name, is_masked in (("a0", True), ("a1", False)):
            own = samples[name]
            legal, action = own.env.observation.rules.legal, own.agent.action
            taken = legal.gather(-1, action[..., None])[..., 0][own.env.valid]
            assert bool(taken.all()) == is_masked


# ---- stock agents ------------------------------------------------------------------------------


class Cell(nn.Module):
    """A recurrent state that counts the steps since the start, and a value that shows it."""

    state_shape = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        state = state + self.weight
        return observation[:, :3].double() * 0, state[:, 0] + 100 * observation[:, 1], state


def test_a_recurrent_model_starts_again_when_an_agent_joins() -> None:
    agent = RecurrentCategoricalPgAgent(Cell, record_state="step")
    with started(ScriptedGame, agent, env_kwargs=MIXED, batch_T=12, batch_B=5) as sampler:
        for itr in range(4):
            samples, _ = sampler.obtain_samples(itr)
            env, own = sampler.samples_np.env, sampler.samples_np.agent
            own_steps = np.where(env.valid, env.observation[..., 2], 0)
            np.testing.assert_array_equal(own.agent_info.prev_rnn_state[..., 0], own_steps)
            # The learner's view along a column, with its resets, is the same where there is a decision.
            for view in (samples, samples.sequences(4)):
                value, recorded, valid = agent.evaluate(view).value, view.agent.agent_info.value, view.env.valid
                torch.testing.assert_close(value[valid], recorded[valid], check_dtype=False)
