"""The values that a batch must hold: one environment and one step at a time, without shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from penstock import Agent, NamedArrays
from penstock.agents import draw
from penstock.envs import Purpose
from penstock.envs.seeding import ColumnStreams, stream


def row(space: Any, element: Any) -> Any:
    """`element` as a recorded row of one; zeros for None."""
    if isinstance(space, spaces.Dict):
        return NamedArrays({str(k): row(sub, None if element is None else element[k]) for k, sub in space.items()})
    if isinstance(space, spaces.Tuple):
        return NamedArrays({f"_{i}": row(sub, None if element is None else element[i]) for i, sub in enumerate(space)})
    return np.zeros((1, *space.shape), space.dtype) if element is None else np.asarray(element, space.dtype)[None]


def element(space: Any, row: Any) -> Any:
    """The only element of a row, as Gymnasium returns it."""
    if isinstance(space, spaces.Dict):
        return {k: element(sub, row[str(k)]) for k, sub in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(element(sub, row[f"_{i}"]) for i, sub in enumerate(space))
    return int(row[0]) if isinstance(space, spaces.Discrete) else np.array(row[0])


def play(  # noqa: C901
    env: Any, agent: Agent, b: int, *, seed: int, T: int, n_batches: int, warm_up: int, wait: bool
) -> list[dict[str, Any]]:
    """Environment b's column of every batch: the T values of each field, and under `episodes` the episodes that ended.

    `wait`: after an episode's end, nothing more until the batch has ended.
    """
    streams, seen, acted = ColumnStreams(seed, range(b, b + 1)), env.observation_space, env.action_space
    agent.initialize(seen, acted)
    agent.runtime.set_columns([b], 1)
    agent.seed_columns(streams.rngs(Purpose.ACTION))
    agent.reset()
    prev: dict[str, Any] = {"action": row(acted, None), "reward": 0.0}  # the arguments of the agent
    observation, _ = env.reset(seed=streams.env_seeds(Purpose.TRAIN)[0])
    episode: list[Any] = []

    def step(action: Any) -> tuple[bool, bool]:
        nonlocal observation
        before = observation
        observation, reward, terminated, truncated, info = env.step(element(acted, action))
        episode.append((before, element(acted, action), reward, terminated, truncated, info))
        prev.update(action=action, reward=reward)
        return terminated, truncated

    def restart() -> None:
        nonlocal observation
        observation, _ = env.reset()
        prev.update(action=row(acted, None), reward=0.0)
        episode.clear()

    def ask(method: Any) -> Any:
        return method(row(seen, observation), prev["action"], np.array([prev["reward"]], np.float32))

    rng = stream(seed, Purpose.DECORRELATE, b)
    for _ in range(int(rng.integers(0, warm_up + 1))):
        if any(step(draw(acted, rng, 1))):
            restart()

    recorded, batches = dict(prev), []
    for itr in range(n_batches):
        agent.sample_mode(itr)
        batch: dict[str, Any] = {"episodes": []}
        parked = False
        for t in range(T):
            cell = {"observation": row(seen, None if parked else observation), "valid": not parked}
            cell |= {"prev_action": recorded["action"], "prev_reward": recorded["reward"]}
            cell["prev_done"] = batch["done"][-1] if t else not episode
            choice, info, ended = ask(agent.step), {}, (False, False)
            cell |= {"final_obs": row(seen, None), "final_value": 0.0, "agent_info": choice.agent_info}
            if parked:  # the agent acts, but its action is ignored
                recorded = {"action": row(acted, None), "reward": 0.0}
                cell["agent_info"] = choice.agent_info.map(np.zeros_like)
            else:
                ended = step(choice.action)
                recorded, info = dict(prev), episode[-1][-1]
            cell |= {**recorded, "terminated": ended[0], "truncated": ended[1], "done": any(ended), "env_info": info}
            if any(ended):
                cell["final_obs"] = row(seen, observation)
                if not ended[0]:
                    cell["final_value"] = float(ask(agent.value)[0])
                batch["episodes"].append((t, b, list(episode), observation))
                parked = wait
                if not wait:
                    restart()
                    agent.reset_one(0)
            for name, value in cell.items():
                batch.setdefault(name, []).append(value)
        batch["bootstrap_obs"] = [row(seen, None if parked else observation)]
        batch["bootstrap_value"] = 0.0 if parked else float(ask(agent.value)[0])
        if parked:
            restart()
            agent.reset_one(0)
        batches.append(batch)
    return batches
