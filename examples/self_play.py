"""PPO on connect four, by self-play in a league of past selves.

    python examples/self_play.py --folder league --picture elo.png

Needs the extra `pettingzoo`; the picture needs matplotlib. In half of the games, `main` plays both sides. In the others
it plays against a past self in one of the slots `past_0` to `past_3`, which are neither trained nor recorded. Every few
batches, the parameters of `main` become a new past self, a file in the folder. The ledger has all games, and
matchmaking, a function of the ledger, chooses who is loaded into the slots. At the end, the trained policy plays 200
games against random moves. Exits with status 1 if it wins fewer than `goal`. Start the same command again with more
`--iterations` to continue.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from penstock.learning import gae

MASK = "observation.action_mask"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--batch-T 50`."""

    seed: int = 0
    goal: float = 0.9  # share of games that are won against random moves
    iterations: int = 120
    n_workers: int = 2
    batch_T: int = 64
    batch_B: int = 32  # games
    n_slots: int = 4  # past selves that can be opponents at the same time
    new_self_every: int = 10  # iterations
    matchmaking: str = "prioritized"  # or "uniform", "elo_band"
    eval_games: int = 200
    learning_rate: float = 1e-3  # at the beginning; it falls to a tenth
    discount: float = 0.98
    gae_lambda: float = 0.95
    epochs: int = 4
    minibatches: int = 8
    clip: float = 0.2
    entropy_weight: float = 0.02
    folder: str = ""  # where the league is kept, or continued
    picture: str = ""  # a file for the curve of the ratings


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for own in fields(Config):
        name, default = own.name.replace("_", "-"), own.default
        choices = list(MATCHMAKING) if own.name == "matchmaking" else None
        parser.add_argument(
            f"--{name}", type=type(default), default=default, choices=choices, help=f"default: {default}"
        )
    return Config(**vars(parser.parse_args(arguments)))


class ActorCritic(nn.Module):
    """Filters of 4 x 4 squares, each of which can see a line of four. The model adds its outputs for the board and for
    its mirror image, so that it treats both alike."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        super().__init__()
        self.lines = nn.Conv2d(2, 64, 4)  # it has 3 x 4 places on the board of 6 x 7
        self.body = nn.Sequential(nn.Linear(64 * 3 * 4, 128), nn.ReLU())
        self.policy, self.critic = nn.Linear(128, 7), nn.Linear(128, 1)

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        board = observation.observation.to(self.critic.weight.dtype)  # [n, 6, 7, 2]: own pieces, those of the other
        board = board.permute(0, 3, 1, 2)
        features = self.body(self.lines(torch.cat([board, board.flip(3)])).relu().flatten(1))
        (logits, mirrored), values = self.policy(features).chunk(2), self.critic(features).squeeze(-1).chunk(2)
        return logits + mirrored.flip(1), values[0] + values[1]


# ---- the ledger ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """A game: the players in the order of their seats, the versions of their parameters when it ended, and the points
    of the first player. A win is 1, a draw 0.5."""

    players: tuple[str, str]
    versions: tuple[int, int]
    points: float


@dataclass
class Ledger:
    """All games of the league."""

    matches: list[Match] = field(default_factory=list)

    def record(self, infos: Iterable[TrajInfo], names: Mapping[str, str], versions: Mapping[str, int]) -> None:
        """Add the games that have finished. `names`: which player each policy is at the moment."""
        games: dict[tuple[int, int], list[TrajInfo]] = defaultdict(list)
        for info in infos:
            if info.agent_id is not None:
                games[info.env_rank, info.number].append(info)
        for game in games.values():
            if len(game) == 2:
                one, two = sorted(game, key=lambda info: info.agent_id)
                players, version = (names[one.policy], names[two.policy]), (versions[one.policy], versions[two.policy])
                self.matches.append(Match(players, version, (one.Return + 1) / 2))

    def results(self, players: Sequence[str]) -> tuple[Array, Array]:
        """The points `[n, n]` of each player against each other one, and the number of their games `[n, n]`."""
        number, points = {player: i for i, player in enumerate(players)}, np.zeros((2, len(players), len(players)))
        for match in self.matches:
            i, j = (number.get(player, -1) for player in match.players)
            if i >= 0 <= j and i != j:
                points[:, i, j] += match.points, 1
                points[:, j, i] += 1 - match.points, 1
        return points[0], points[1]

    def payoff(self, players: Sequence[str]) -> Array:
        """The payoff matrix: which share of the points each player has won from each other one. Every pair begins with
        a draw, so that one game does not decide."""
        points, games = self.results(players)
        return (points + 0.5) / (games + 1)  # type: ignore[no-any-return]

    def ratings(self, players: Sequence[str]) -> Array:
        """Elo ratings that explain the results best; that of the first player is 0."""
        (points, games), rating = self.results(players), np.zeros(len(players))
        points, games = points + 0.5 * (games > 0), games + (games > 0)
        for _ in range(2_000):
            expected = games / (1 + 10 ** ((rating - rating[:, None]) / 400))
            rating += 400 * (points - expected).sum(1) / games.sum(1).clip(1)
        return rating - rating[0]  # type: ignore[no-any-return]

    def save(self, path: Path) -> None:
        """One game in each line, as JSON."""
        path.write_text("".join(json.dumps(vars(match)) + "\n" for match in self.matches), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Ledger:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return cls([Match(tuple(own["players"]), tuple(own["versions"]), own["points"]) for own in lines])


# Matchmaking: how often the last of `players` meets each of the others `[n - 1]`.


def uniform(ledger: Ledger, players: Sequence[str]) -> Array:
    return np.full(len(players) - 1, 1 / (len(players) - 1))


def prioritized(ledger: Ledger, players: Sequence[str]) -> Array:
    """Prioritized fictitious self-play: those that are hard to beat come more often."""
    weights = (1 - ledger.payoff(players)[-1, :-1]) ** 2 + 0.05
    return weights / weights.sum()  # type: ignore[no-any-return]


def elo_band(ledger: Ledger, players: Sequence[str], width: float = 200.0) -> Array:
    """Those whose ratings are near come more often."""
    ratings = ledger.ratings(players)
    weights = (np.abs(ratings[:-1] - ratings[-1]) <= width) + 0.05
    return weights / weights.sum()  # type: ignore[no-any-return]


MATCHMAKING: dict[str, Callable[[Ledger, Sequence[str]], Array]] = {
    "uniform": uniform,
    "prioritized": prioritized,
    "elo_band": elo_band,
}


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

    def side(agent_id: str, game: int) -> str:
        return "main" if agent_id == f"player_{game % 2}" else "random"

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


def players(agent_id: str, env_rank: int, game: int, rng: np.random.Generator, *, n_slots: int) -> str:
    """Who plays this side of a game: in every second game, `main` plays against itself."""
    if (env_rank + game) % 2 or agent_id == f"player_{game // 2 % 2}":
        return "main"
    return f"past_{rng.integers(n_slots)}"


@dataclass
class League:
    """The past selves in a folder, those of them that are in the slots, and the ledger."""

    agent: CategoricalPgAgent
    slots: Mapping[str, CategoricalPgAgent]
    folder: Path
    matchmaking: Callable[[Ledger, Sequence[str]], Array]
    ledger: Ledger = field(default_factory=Ledger)
    n_selves: int = 0
    #: The player in each slot. A game of `main` counts for the past self that `main` will become next.
    names: dict[str, str] = field(default_factory=dict)

    @property
    def selves(self) -> list[str]:
        """The past selves, oldest first."""
        return [f"self_{i}" for i in range(self.n_selves)]

    def add_self(self, rng: np.random.Generator) -> None:
        """The present parameters become a past self, and matchmaking chooses who is in the slots."""
        self.agent.save(self.folder / f"self_{self.n_selves}.pt")
        self.n_selves += 1
        chances = self.matchmaking(self.ledger, self.selves) if self.n_selves > 1 else [1.0]
        drawn = rng.choice(self.selves[: len(chances)], len(self.slots), p=chances)
        self.seat({"main": f"self_{self.n_selves}", **dict(zip(self.slots, drawn.tolist(), strict=True))})

    def seat(self, names: dict[str, str]) -> None:
        """Load these players into the slots."""
        self.names = names
        for slot, agent in self.slots.items():
            agent.load(self.folder / f"{names[slot]}.pt")
            agent.sync_shared_memory()

    def save(self, itr: int, optimizer: torch.optim.Optimizer) -> None:
        """Write what `load` needs. Each file is complete, also if the program is killed."""
        state = {"itr": itr, "n_selves": self.n_selves, "names": self.names, "matches": len(self.ledger.matches)}
        state.update({"agent": self.agent.state_dict(), "optimizer": optimizer.state_dict()})
        self.ledger.save(self.folder / "matches.new")
        os.replace(self.folder / "matches.new", self.folder / "matches.jsonl")
        torch.save(state, self.folder / "league.new")
        os.replace(self.folder / "league.new", self.folder / "league.pt")

    def load(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Continue where this state was saved."""
        self.agent.load_state_dict(state["agent"])
        self.agent.sync_shared_memory()
        optimizer.load_state_dict(state["optimizer"])
        # The file of the games may be newer than the state.
        self.ledger = Ledger(Ledger.load(self.folder / "matches.jsonl").matches[: state["matches"]])
        self.n_selves = state["n_selves"]
        self.seat(state["names"])


def main(cfg: Config, folder: Path) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    began, saved = time.monotonic(), folder / "league.pt"
    state = torch.load(saved) if saved.exists() else None
    first = state["itr"] if state else 0
    agent = CategoricalPgAgent(ActorCritic, mask_key=MASK, greedy_eval=True)
    slots = {f"past_{i}": CategoricalPgAgent(ActorCritic, mask_key=MASK) for i in range(cfg.n_slots)}
    league = League(agent, slots, folder, MATCHMAKING[cfg.matchmaking])
    with ParallelSampler(
        connect_four_v3.env, batch_T=cfg.batch_T, batch_B=cfg.batch_B, n_workers=cfg.n_workers
    ) as sampler:
        sampler.initialize(
            {"main": agent, **slots},
            policy_of=partial(players, n_slots=cfg.n_slots),
            record=["main"],
            seed=cfg.seed + first,  # a run that continues plays other games
            bootstrap_value=True,
        )
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=cfg.learning_rate)
        if state:
            league.load(state, optimizer)
        else:
            league.add_self(np.random.default_rng((cfg.seed, 0)))
        for itr in range(first, cfg.iterations):
            optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - 0.9 * itr / cfg.iterations)
            batch, traj_infos = sampler.obtain_samples(itr)
            league.ledger.record(traj_infos, league.names, sampler.policy_version)
            train(agent, optimizer, batch.main, cfg)
            agent.sync_shared_memory()
            if (itr + 1) % cfg.new_self_every == 0:
                league.add_self(np.random.default_rng((cfg.seed, itr + 1)))
                league.save(itr + 1, optimizer)
                opponents = ", ".join(league.names[slot] for slot in slots)
                print(f"{itr + 1}: {time.monotonic() - began:.0f} s; opponents: {opponents}", flush=True)
    ratings = league.ledger.ratings(league.selves)
    print("ratings: " + ", ".join(f"{name} {own:.0f}" for name, own in zip(league.selves, ratings, strict=True)))
    if cfg.picture:
        draw(ratings, cfg)
    share = share_won(agent, cfg)
    print(f"won {share:.1%} of {cfg.eval_games} games against random moves, after {time.monotonic() - began:.0f} s")
    if share < cfg.goal:
        print(f"goal missed: at least {cfg.goal:.0%} must be won", file=sys.stderr)
    return int(share < cfg.goal)


def draw(ratings: Array, cfg: Config) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    # A grey that can be read on white and on black.
    colors = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style = {"svg.fonttype": "none", "savefig.transparent": True, "font.size": 12, **dict.fromkeys(colors, "#808080")}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
        axes.plot([cfg.new_self_every * i for i in range(len(ratings))], ratings, marker="o")
        axes.set_xlabel("batches")
        axes.set_ylabel("Elo rating; 0: the first self")
        figure.savefig(cfg.picture)


if __name__ == "__main__":
    config = parse_config()
    with tempfile.TemporaryDirectory() as temporary:
        league_folder = Path(config.folder or temporary)
        league_folder.mkdir(parents=True, exist_ok=True)
        sys.exit(main(config, league_folder))
