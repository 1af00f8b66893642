"""Deathmatches of two players in ViZDoom: one environment holds the match, with an engine for each player.

    python examples/vizdoom_match.py --steps 20000 --kill-every 1000

Needs vizdoom and pettingzoo. The two engines of a match talk over UDP, at a port that the environment leases. Every
`--kill-every` steps the example kills one engine. Its match then raises `GameError`, only this match is started again,
and the run goes on. The exit status is 1 if an engine or a file in shared memory is left at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import vizdoom
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

from penstock import GameError, ParallelSampler, RandomAgent
from penstock.games import lease_port

START_TIMEOUT = 60.0  # seconds until both players are in the match
STEP_TIMEOUT = 10.0  # seconds for one step of both engines
FRAME_SKIP = 4  # tics of the engine in one step
RULES = "-deathmatch +sv_forcerespawn 1 +sv_noautoaim 1 +sv_respawnprotect 1 +sv_spawnfarthest 1 +viz_nocheat 1"
BUTTONS = (
    vizdoom.Button.ATTACK,
    vizdoom.Button.TURN_LEFT,
    vizdoom.Button.TURN_RIGHT,
    vizdoom.Button.MOVE_FORWARD,
)


class DoomMatch(ParallelEnv):
    """Observation: the screen in grey, [30, 40]. Actions: nothing, or one of the buttons. Reward: frags."""

    metadata = {"name": "doom_match"}  # noqa: RUF012 - PettingZoo declares it so
    possible_agents = ["player_0", "player_1"]  # noqa: RUF012

    def __init__(self, max_steps: int = 200) -> None:
        self.max_steps = max_steps
        self.observation_spaces = dict.fromkeys(self.possible_agents, Box(0, 255, (30, 40), np.uint8))
        self.action_spaces = dict.fromkeys(self.possible_agents, Discrete(1 + len(BUTTONS)))
        self._games: list[Any] = []

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self._games:
            self._both(lambda game, _: game.new_episode(), STEP_TIMEOUT)
        else:
            self._start(seed)
        self.agents, self._t, self._frags = list(self.possible_agents), 0, [0, 0]
        seen = self._both(lambda game, _: _look(game), STEP_TIMEOUT)
        return {agent: screen for agent, (screen, _) in zip(self.agents, seen, strict=True)}, {
            agent: {} for agent in self.agents
        }

    def step(self, actions: dict[str, Any]) -> Any:
        pressed = [[int(actions[agent]) == 1 + b for b in range(len(BUTTONS))] for agent in self.agents]
        # The engines wait for each other in every tic. With several tics in one call they would wait for ever.
        for _ in range(FRAME_SKIP):
            self._both(lambda game, k: game.make_action(pressed[k]), STEP_TIMEOUT)
        seen = self._both(lambda game, _: _look(game), STEP_TIMEOUT)
        self._t += 1
        agents, is_over = self.agents, self._t == self.max_steps
        rewards = {agent: float(seen[k][1] - self._frags[k]) for k, agent in enumerate(agents)}
        self._frags = [frags for _, frags in seen]
        self.agents = [] if is_over else agents
        return (
            {agent: seen[k][0] for k, agent in enumerate(agents)},
            rewards,
            dict.fromkeys(agents, False),
            dict.fromkeys(agents, is_over),
            {agent: {} for agent in agents},
        )

    def close(self) -> None:
        if self._games:
            self._kill()
            for game in self._games:
                game.close()
            self._threads.shutdown()
            self._lease.release()  # last, when no engine uses the port
            self._games = []

    def _start(self, seed: int | None) -> None:
        self._lease = lease_port(protocol="udp", host="0.0.0.0")  # where the engine listens
        self._threads = ThreadPoolExecutor(2)
        for k, arguments in enumerate(
            (f"-host 2 -port {self._lease.port} {RULES}", f"-join 127.0.0.1:{self._lease.port}")
        ):
            game = vizdoom.DoomGame()
            game.set_doom_scenario_path(str(Path(vizdoom.scenarios_path) / "multi_duel.wad"))
            game.set_doom_map("map01")
            game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
            game.set_screen_format(vizdoom.ScreenFormat.GRAY8)
            game.set_window_visible(False)
            game.set_mode(vizdoom.Mode.PLAYER)
            game.set_available_buttons(list(BUTTONS))
            game.set_available_game_variables([vizdoom.GameVariable.FRAGCOUNT])
            game.set_doom_config_path(os.devnull)
            game.set_seed((seed or 0) % 2**31 + k)
            game.add_game_args(f"{arguments} +name player_{k} +colorset {k}")
            self._games.append(game)
        self._both(lambda game, _: game.init(), START_TIMEOUT)
        for engine in self._engines():
            _unlink(engine)

    def _both(self, call: Callable[[Any, int], Any], limit: float) -> list[Any]:
        """`call(game, k)` for both players at the same time. An engine whose peer was killed waits for ever, so then
        the other engine is killed too: this frees the call."""
        futures = [self._threads.submit(call, game, k) for k, game in enumerate(self._games)]
        _, waiting = wait(futures, limit, FIRST_EXCEPTION)
        failed = next((each.exception() for each in futures if each.done() and each.exception()), None)
        if failed or waiting:
            self._kill()
            wait(waiting, STEP_TIMEOUT)
            raise GameError(f"the match at port {self._lease.port}: {failed or f'no engine answered in {limit:g} s'}")
        return [each.result() for each in futures]

    def _engines(self) -> dict[str, psutil.Process]:
        """The engines of this match by their ids."""
        found, places = {}, {str(self._lease.port), f"127.0.0.1:{self._lease.port}"}
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has ended
                words = process.cmdline()
                if places & set(words) and "+viz_instance_id" in words:
                    found[words[words.index("+viz_instance_id") + 1]] = process
        return found

    def _kill(self) -> None:
        for name, process in self._engines().items():
            with contextlib.suppress(psutil.Error):
                process.kill()
                process.wait(STEP_TIMEOUT)
            _unlink(name)


def _unlink(engine: str) -> None:
    """Remove the names of its shared memory. Once both sides have it open, nothing is left after any death."""
    for kind in ("SM", "MQCtr", "MQDoom"):
        Path(f"/dev/shm/ViZDoom{kind}{engine}").unlink(missing_ok=True)


def _look(game: Any) -> tuple[Any, int]:
    state = game.get_state()
    return state.screen_buffer[::4, ::4].copy(), int(state.game_variables[0])


def engines() -> list[psutil.Process]:
    """The engines of this run."""
    return [each for each in psutil.Process().children(recursive=True) if each.name() == "vizdoom"]


def ids_of(engines: list[psutil.Process]) -> set[str]:
    """The ids of engines, with which the names of their files in shared memory end."""
    found = set()
    for engine in engines:
        with contextlib.suppress(psutil.Error, ValueError):  # it has ended, or is about to begin
            words = engine.cmdline()
            found.add(words[words.index("+viz_instance_id") + 1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kill-every", type=int, default=500, help="steps; 0: no engine is killed")
    parser.add_argument("--n-envs", type=int, default=4)
    parser.add_argument("--n-workers", type=int, default=2)
    options = parser.parse_args()
    chance, killed, batch_T = random.Random(0), 0, 25
    began, ids = time.perf_counter(), set[str]()
    with ParallelSampler(
        DoomMatch,
        batch_T=batch_T,
        batch_B=options.n_envs,
        n_workers=options.n_workers,
        max_decorrelation_steps=0,
        on_game_failure="renew",
        max_renewals=1000,
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(options.steps // (batch_T * options.n_envs)):
            steps = itr * batch_T * options.n_envs
            if options.kill_every and steps // options.kill_every > killed:
                chance.choice(engines()).kill()
                killed += 1
            samples, _ = sampler.obtain_samples(itr)
            ids |= ids_of(engines())
            if itr == 0:
                print("playing", *(each.pid for each in engines()), flush=True)
        frags, stats = float(samples.env.reward.sum()), sampler.stats()
    seconds = time.perf_counter() - began
    left = [each for each in engines() if each.is_running()]
    new = [name for name in os.listdir("/dev/shm") if name.startswith("ViZDoom") and any(map(name.endswith, ids))]
    print(f"{options.steps} steps in {seconds:.0f} s, {killed} engines killed, {stats.renewals} matches started again")
    print(f"frags in the last batch: {frags:g}; left: {len(left)} engines, {len(new)} files")
    return 0 if stats.renewals == killed and not stats.restarts and not left and not new else 1


if __name__ == "__main__":
    sys.exit(main())
