"""PPO on connect four, by self-play against a pool of past selves.

    python examples/self_play.py --picture elo.png

Needs the extra `pettingzoo`; the picture needs matplotlib. In half of the games, `main` plays both sides. In the others
it plays against one of the past selves in the slots `past_0` to `past_3`, which are not trained. Every few batches the
parameters of `main` become a new past self. The ledger has the results of all pairs, and matchmaking is a function of
it. At the end, the trained policy plays 200 games against random moves. Exits with status 1 if it wins fewer than
`goal`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from pettingzoo.classic import connect_four_v3
from torch import Tensor, nn

from penstock import CategoricalPgAgent, ParallelSampler, RandomAgent, Samples, SerialSampler, TrajInfo
from penstock.targets import gae

MASK = "observation.action_mask"


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--batch-T 50`."""

    seed: int = 0
    goal: float = 0.9  # share of games that are won against random moves
    iterations: int = 80
    n_workers: int = 2
    batch_T: int = 64
    batch_B: int = 32  # games
    n_slots: int = 4  # past selves that can be opponents at the same time
    new_self_every: int = 10  # iterations
    eval_games: int = 200
    learning_rate: float = 1e-3
    discount: float = 0.98
    gae_lambda: float = 0.95
    epochs: int = 4
    minibatches: int = 8
    clip: float = 0.2
    entropy_weight: float = 0.01
    folder: str = ""  # continue with the past selves and the ledger in this folder, and save them there
    picture: str = ""  # a file for the curve of the ratings


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for own in fields(Config):
        name, default = own.name.replace("_", "-"), own.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return Config(**vars(parser.parse_args(arguments)))


class ActorCritic(nn.Module):
    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(6 * 7 * 2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.policy, self.critic = nn.Linear(128, 7), nn.Linear(128, 1)

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        features = self.body(observation.observation.to(self.critic.weight.dtype))
        return self.policy(features), self.critic(features).squeeze(-1)


# ---- the ledger ------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """The results of all pairs of players: `wins[a, b]` are the points of a against b, a draw is half a point."""

    wins: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def record(self, infos: Iterable[TrajInfo], names: Mapping[str, str]) -> None:
        """Add the games that have finished. `names`: which player each policy is at the moment."""
        games: dict[tuple[int, int], list[TrajInfo]] = defaultdict(list)
        for info in infos:
            if info.agent_id is not None:
                games[info.env_rank, info.episode].append(info)
        for game in games.values():
            if len(game) == 2:
                for info, other in (game, game[::-1]):
                    self.wins[names[info.policy], names[other.policy]] += (info.Return + 1) / 2

    def payoff(self, player: str, others: Sequence[str]) -> np.ndarray[Any, Any]:
        """The share of points of `player` against each of `others`; 0.5 before their first game."""
        won = np.array([self.wins.get((player, other), 0.0) for other in others])
        lost = np.array([self.wins.get((other, player), 0.0) for other in others])
        return (won + 0.5) / (won + lost + 1)

    def ratings(self, players: Sequence[str], anchor: str) -> dict[str, float]:
        """Elo ratings that explain the results best; that of `anchor` is 0."""
        own, rating = {player: i for i, player in enumerate(players)}, np.zeros(len(players))
        for _ in range(2_000):
            expected, found = np.zeros(len(players)), np.zeros(len(players))
            games = np.ones(len(players))
            for (one, other), points in self.wins.items():
                n = points + self.wins.get((other, one), 0.0)
                if one != other and one in own and other in own:
                    i, j = own[one], own[other]
                    expected[i] += n / (1 + 10 ** ((rating[j] - rating[i]) / 400))
                    found[i], games[i] = found[i] + points, games[i] + n
            rating += 400 * (found - expected) / games
        return {player: float(rating[i] - rating[own[anchor]]) for player, i in own.items()}

    def promote(self, name: str) -> None:
        """`main` becomes the past self `name`: the games of `main` until now were those of this self."""
        for pair, points in list(self.wins.items()):
            if "main" in pair:
                one, other = (name if own == "main" else own for own in pair)
                if one != other:
                    self.wins[one, other] += points
                del self.wins[pair]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps([[*pair, points] for pair, points in self.wins.items()]))

    @classmethod
    def load(cls, path: Path) -> Ledger:
        ledger = cls()
        for one, other, points in json.loads(path.read_text()):
            ledger.wins[one, other] = points
        return ledger


def matchmaking(ledger: Ledger, player: str, opponents: Sequence[str]) -> np.ndarray[Any, Any]:
    """Prioritized fictitious self-play: how often to meet each opponent. Hard ones come more often."""
    weights = (1 - ledger.payoff(player, opponents)) ** 2 + 0.05
    return weights / weights.sum()


def players(agent_id: str, env_rank: int, episode: int, rng: np.random.Generator, *, chances: Sequence[float]) -> str:
    """Who plays this side of a game: every second game is `main` against itself."""
    if (env_rank + episode) % 2 or agent_id == f"player_{episode // 2 % 2}":
        return "main"
    return f"past_{rng.choice(len(chances), p=chances)}"


# ---- training --------------------------------------------------------------------------------------


def train(agent: CategoricalPgAgent, optimizer: torch.optim.Optimizer, samples: Samples, cfg: Config) -> None:
    advantage, target = gae(samples, cfg.discount, cfg.gae_lambda)
    samples = samples.with_targets(advantage=advantage, value=target)
    for _ in range(cfg.epochs):
        for part in samples.minibatches(cfg.minibatches):
            now, advantage = agent.evaluate(part), part.targets.advantage
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (now.log_prob - part.agent.agent_info.log_prob).exp()
            clipped = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
            loss = -torch.min(ratio * advantage, clipped * advantage).mean()
            loss = loss + 0.5 * (now.value - part.targets.value).square().mean()
            loss = loss - cfg.entropy_weight * now.entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.model.parameters(), 0.5)
            optimizer.step()


def share_won(agent: CategoricalPgAgent, cfg: Config) -> float:
    """The share of `eval_games` that the agent wins against random moves. It begins every second one."""

    def side(agent_id: str, episode: int) -> str:
        return "main" if agent_id == f"player_{episode % 2}" else "random"

    with SerialSampler(
        connect_four_v3.env,
        batch_T=32,
        batch_B=1,
        eval_n_envs=10,
        eval_episodes=cfg.eval_games,
        eval_max_steps=100 * cfg.eval_games,
    ) as sampler:
        sampler.initialize({"main": agent, "random": RandomAgent(mask_key=MASK)}, policy_of=side, seed=cfg.seed + 1)
        own = [info.Return for info in sampler.evaluate_agent(0) if info.policy == "main"]
    return sum(result > 0 for result in own) / len(own)


def put(slots: Mapping[str, CategoricalPgAgent], names: dict[str, str], i: int, name: str, source: Any) -> None:
    """Past self number i takes the place of the oldest one. `source`: the agent, or the folder with the file."""
    slot = f"past_{i % len(slots)}"
    if isinstance(source, Path):
        slots[slot].load(source / f"{name}.pt")
    else:
        slots[slot].load_state_dict(source.state_dict())
    slots[slot].sync_shared_memory()
    names[slot] = name


def main(cfg: Config) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    began, ledger, folder = time.monotonic(), Ledger(), Path(cfg.folder) if cfg.folder else None
    agent = CategoricalPgAgent(ActorCritic, mask_key=MASK, greedy_eval=True)
    slots = {f"past_{i}": CategoricalPgAgent(ActorCritic, mask_key=MASK) for i in range(cfg.n_slots)}
    names = {"main": "main", **dict.fromkeys(slots, "self_0")}
    selves = ["self_0"]
    with ParallelSampler(
        connect_four_v3.env, batch_T=cfg.batch_T, batch_B=cfg.batch_B, n_workers=cfg.n_workers
    ) as sampler:
        chances = [1 / cfg.n_slots] * cfg.n_slots
        sampler.initialize(
            {"main": agent, **slots}, policy_of=partial(players, chances=chances), seed=cfg.seed, bootstrap_value=True
        )
        for i in range(cfg.n_slots):
            put(slots, names, i, "self_0", agent)
        if folder is not None and (folder / "ledger.json").exists():
            ledger = Ledger.load(folder / "ledger.json")
            selves = [f"self_{i}" for i in range(len(list(folder.glob("self_*.pt"))))]
            agent.load(folder / f"{selves[-1]}.pt")
            agent.sync_shared_memory()
            for i, name in list(enumerate(selves))[-cfg.n_slots :]:
                put(slots, names, i, name, folder)
        elif folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            agent.save(folder / "self_0.pt")
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=cfg.learning_rate)
        for itr in range(cfg.iterations):
            batch, traj_infos = sampler.obtain_samples(itr)
            ledger.record(traj_infos, names)
            train(agent, optimizer, batch.main, cfg)
            agent.sync_shared_memory()
            if (itr + 1) % cfg.new_self_every == 0:
                selves.append(f"self_{len(selves)}")
                ledger.promote(selves[-1])
                put(slots, names, len(selves) - 1, selves[-1], agent)
                if folder is not None:
                    agent.save(folder / f"{selves[-1]}.pt")
                    ledger.save(folder / "ledger.json")
                found = matchmaking(ledger, selves[-1], [names[own] for own in slots])
                sampler.set_policy_of(partial(players, chances=found.tolist()))
                shown = ", ".join(f"{names[own]} {chance:.2f}" for own, chance in zip(slots, found, strict=True))
                print(f"{itr + 1}: {time.monotonic() - began:.0f} s; opponents: {shown}", flush=True)
    ratings = ledger.ratings(selves, "self_0")
    print("ratings: " + ", ".join(f"{name} {rating:.0f}" for name, rating in ratings.items()))
    if cfg.picture:
        draw(list(ratings.values()), cfg)
    share = share_won(agent, cfg)
    print(f"won {share:.1%} of {cfg.eval_games} games against random moves, after {time.monotonic() - began:.0f} s")
    if share < cfg.goal:
        print(f"goal missed: at least {cfg.goal:.0%} must be won", file=sys.stderr)
    return int(share < cfg.goal)


def draw(ratings: Sequence[float], cfg: Config) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.plot([cfg.new_self_every * i for i in range(len(ratings))], ratings, marker="o")
    axes.set_xlabel("batches")
    axes.set_ylabel("Elo rating; 0: the first self")
    figure.tight_layout()
    figure.savefig(cfg.picture)


if __name__ == "__main__":
    sys.exit(main(parse_config()))
