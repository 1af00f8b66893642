"""Games fail in random ways at random moments, with every sampler, start method and policy: the run goes on, or ends
with an error that shows the output of the game; nothing is left. `make faults` has many more trials."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncSampler, GameError, RandomAgent, ResetCollector, WaitResetCollector, WorkerError

from ..scale import USUAL_METHODS, scaled
from ..support import assert_same, collect, sampler_of, until, without_infos
from .games_support import SAMPLERS, Played, processes, undisturbed_games

pytestmark = [pytest.mark.xdist_group("ports"), pytest.mark.slow, pytest.mark.timeout(scaled(3600, 120))]

HARMLESS = ("late", "flood", "child", "leak", "ignore_term")
FAULTS = ("exit", "crash", "hang", "vanish", "twice", "drip", "spout", "orphan", *HARMLESS)
POLICIES: dict[str, dict[str, Any]] = {
    "renew": {"on_game_failure": "renew", "max_renewals": 99},
    "restart": {"on_worker_failure": "restart", "max_restarts": 99},
    "raise": {},
}


@pytest.mark.parametrize("trial", range(scaled(250, len(SAMPLERS))))
def test_nothing_hangs_and_nothing_is_left(trial: int, tmp_path: Path) -> None:
    draw = random.Random(trial)
    cls, start_method = SAMPLERS[trial % len(SAMPLERS)], draw.choice(USUAL_METHODS)
    policy = "renew" if trial % 2 else draw.choice(list(POLICIES))
    faults = {rank: (draw.randrange(1, 30), draw.choice(FAULTS)) for rank in range(4)}
    options: dict[str, Any] = {"start_method": start_method, "step_timeout": 60.0, **POLICIES[policy]}
    options["collector_cls"] = WaitResetCollector if draw.random() < 0.3 else ResetCollector
    failing = [fault for _, fault in faults.values() if fault not in HARMLESS]
    env_fn = partial(Played, str(tmp_path), faults, reply_timeout=5.0, stop_timeout=0.1, spares=draw.randrange(2))
    raised: list[WorkerError] = []
    with sampler_of(cls, env_fn, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        try:
            if cls is AsyncSampler:
                sampler.start()
            found = collect(sampler, 5)
        except WorkerError as error:
            raised.append(error)
        stats = sampler.stats()
    for error in raised:
        assert failing
        assert policy == "raise" or cls.__name__ == "SerialSampler", error
        assert isinstance(error.__cause__, GameError)
        assert "\n  | the fault is " in str(error.__cause__)
    if policy == "renew":
        assert not raised
        assert stats.cut_episodes <= len(failing)
        assert stats.restarts == 0
        others = [rank for rank, (_, fault) in faults.items() if fault in HARMLESS]
        wanted = undisturbed_games(options["collector_cls"])
        assert_same(without_infos(found, others), [batch[:, others] for batch in wanted])
    until(lambda: not list(processes(str(tmp_path))), "the end of all games", 5.0)
