"""on_worker_failure="restart", for every sampler and kind of environment: no batch is lost, no other column is touched,
and what is lost is told."""

import contextlib
import logging
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import psutil
import pytest

from penstock import (
    Agent,
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    EvalCollector,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    ResetCollector,
    TrajInfo,
    WorkerDiedError,
)
from penstock.envs import CountingEnv, SlowEnv
from penstock.testing import Fault, faulty_collector, faulty_env, faulty_eval_collector

from ..models import Gru, Net
from ..scale import START_METHODS, methods, pairs, scaled, some
from ..support import Diary, Follower, assert_same, check_rules, until
from ..toy_games import Book, Valued, Valuing
from .failing_games import FailingGame, FailingTurns, check_turns, kinds, seat
from .support import ERROR_SECONDS, Notebook, check_counting, generator, killer, note, pid_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # `test_ctrl_c.py` uses it too

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]

N_WORKERS, B, T = 3, 6, 24
CARTPOLE = partial(gym.make, "CartPole-v1", max_episode_steps=25)
NEVER = Fault("delay", at=10**9)


# ---- samplers and kinds of environments ----------------------------------------------------


MODES: dict[str, tuple[type[GpuSampler], dict[str, Any]]] = {
    "lock-step": (GpuSampler, {}),
    "first-ready": (GpuSampler, {"min_ready": 2}),
    "alternating": (AlternatingSampler, {}),
    "no overlap": (AlternatingSampler, {"overlap": False}),
}
#: As `MODES`, with the server in a process of its own.
ELSEWHERE: dict[str, tuple[type[GpuSampler], dict[str, Any]]] = {
    f"own process, {mode}": (cls, {"server": "process", **options}) for mode, (cls, options) in MODES.items()
}
SAMPLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "parallel": (ParallelSampler, {}),
    **MODES,
    **ELSEWHERE,
    "ahead": (AsyncSampler, {}),
    "ahead, own process": (AsyncSampler, {"server": "process"}),
}
CENTRAL = [*list(MODES)[:: scaled(1, 3)], *list(ELSEWHERE)[:: scaled(1, 2)]]


def restarting_sampler(mode: str, env_fn: Any, **kwargs: Any) -> Any:
    cls, options = SAMPLERS[mode]
    arguments: dict[str, Any] = {"batch_T": T, "batch_B": B, "n_workers": N_WORKERS, "max_decorrelation_steps": 0}
    arguments |= {"on_worker_failure": "restart", "max_restarts": 10**6}
    arguments |= {"eval_n_envs": 3, "eval_max_steps": 3 * 60, "eval_env_kwargs": {}}
    return cls(env_fn, **{**arguments, **options, **kwargs})


def check_count(samples: Any) -> None:
    check_counting(samples.env.observation, samples.env.reward, samples.env.done, 5)


def check_pole(samples: Any) -> None:
    assert samples.env.valid.all()
    assert np.isfinite(samples.env.observation).all()
    assert (np.abs(samples.env.observation[..., 2]) < 0.25)[~samples.env.done].all(), "a pole that stands"


def two_policies() -> dict[str, Agent]:
    return {"one": Valuing(), "two": Valuing()}


class Kind(NamedTuple):
    env_fn: Callable[[Fault], Any]  #: builds an environment with this fault
    agent: Callable[[], Any]
    check: Callable[[Any], None]  #: the rules of a batch
    options: Mapping[str, Any] = MappingProxyType({})  #: of `initialize`
    tolerance: Mapping[str, float] = MappingProxyType({})  #: of what models compute
    n_seats: int = 0


POLE, GAME, TURNS = partial(faulty_env, CARTPOLE), partial(partial, FailingGame), partial(partial, FailingTurns)
MODEL = {"rtol": 1e-6, "atol": 1e-9}
TWO = {"policy_of": seat}
KINDS: dict[str, Kind] = {
    "counting": Kind(partial(faulty_env, CountingEnv), RandomAgent, check_count),
    "random": Kind(POLE, RandomAgent, check_pole),
    "categorical": Kind(POLE, lambda: CategoricalPgAgent(lambda: Net(4, 2, 0)), check_pole, tolerance=MODEL),
    "recurrent": Kind(POLE, lambda: RecurrentCategoricalPgAgent(lambda: Gru(4, 2)), check_pole, tolerance=MODEL),
    "game": Kind(GAME, Book, check_rules, n_seats=3),
    "game, two policies": Kind(GAME, two_policies, check_rules, {"policy_of": kinds}, n_seats=3),
    "turns": Kind(TURNS, Valued, check_turns, n_seats=2),
    "turns, two policies": Kind(TURNS, two_policies, check_turns, TWO, n_seats=2),
    "turns, one recorded": Kind(TURNS, two_policies, check_turns, {**TWO, "record": ["one"]}, n_seats=2),
}
AGENTS, GAMES = ("random", "categorical", "recurrent"), ("game", "game, two policies", "turns")


class Checked:
    """A sampler that was initialized. Of every batch, the rules of its kind hold, and the trajectories that are told
    are those that end in its columns: none is cut, none has parts of two."""

    def __init__(self, sampler: Any, kind: Kind, seed: int = 9) -> None:
        self.sampler, self.kind = sampler, kind
        sampler.initialize(kind.agent(), seed=seed, bootstrap_value=True, **kind.options)
        if isinstance(sampler, AsyncSampler):
            sampler.start()
        self.seats = sampler.seats() if kind.n_seats else {"agent": [(rank, None) for rank in range(B)]}
        self._followers = {name: Follower(own) for name, own in self.seats.items()}
        self.n_ended = 0

    def batch(self, itr: int) -> dict[str, Any]:
        """The next batch of each policy."""
        _, infos = self.sampler.obtain_samples(itr)
        samples = self.sampler.samples_np
        parts = {"agent": samples} if hasattr(samples, "env") else dict(samples.items())
        ended: list[Any] = []
        for name, part in parts.items():
            self.kind.check(part)
            ended += self._followers[name].follow(part)
        if self.kind.n_seats:  # others are of a whole game, or of a policy that is not recorded
            infos = [info for info in infos if info.agent_id is not None and info.policy in (None, *parts)]
        told = [(info.env_rank, info.agent_id, info.Length, info.Return) for info in infos]
        assert sorted(told, key=repr) == sorted(ended, key=repr)
        self.n_ended += len(ended)
        return parts


# ---- the same failure ----------------------------------------------------------------------


def run(name: str, mode: str = "parallel", at: int = 0, fault: Fault = NEVER, **kwargs: Any) -> Any:
    """Four batches of each policy, with an evaluation, the environments of their columns, and the restarts of each
    worker. env_rank 3 fails."""
    kind, found = KINDS[name], []
    fns = [kind.env_fn(NEVER)] * B
    fns[3] = kind.env_fn(fault)
    with restarting_sampler(mode, fns, **kwargs) as sampler:
        checked = Checked(sampler, kind)
        for itr in range(4):
            found.append({policy: part.copy() for policy, part in checked.batch(itr).items()})
            if itr == 2:
                assert sampler.evaluate_agent(itr)
        ranks = {policy: [rank for rank, _ in own] for policy, own in checked.seats.items()}
        return found, ranks, [worker.restarts for worker in sampler.stats().workers]


undisturbed = cache(run)


@pytest.mark.parametrize("at", scaled([1, 50], [50]))
@pytest.mark.parametrize(
    ("name", "mode", "how"),
    [
        *((name, mode, "kill") for name, mode in pairs(AGENTS, ["parallel", *some(MODES, 3), *some(ELSEWHERE, 1)])),
        *((name, "parallel", how) for name, how in pairs(GAMES, ["raise", "exit", "kill", "hang"])),
    ],
)
def test_a_replacement_changes_no_other_column(name: str, mode: str, how: str, at: int, tmp_path: Path) -> None:
    """Its worker has the environments 2 and 3. It fails at once, or after the first batch."""
    limit = {"step_timeout": 1.0} if how == "hang" else {}
    found, ranks, restarts = run(name, mode, fault=Notebook(tmp_path).fault(how, at), **limit)
    whole, *_ = undisturbed(name)
    assert restarts == [0, 1, 0]
    for policy, own in ranks.items():
        others, lost = ([b for b, rank in enumerate(own) if (rank in (2, 3)) == is_lost] for is_lost in (False, True))
        ours, theirs = ([batch[policy][:, others] for batch in each] for each in (found, whole))
        assert_same(ours, theirs, **KINDS[name].tolerance)
        ours, theirs = ([batch[policy].env.observation[:, lost] for batch in each] for each in (found, whole))
        differs = [not np.array_equal(*pair) for pair in zip(ours, theirs, strict=True)]
        first = differs.index(True)
        assert all(differs[first:])
        assert (first > 0) == (at > 1), "what was delivered before is what it was"
        redone = found[first][policy].env
        assert (redone.prev_done == redone.valid)[0, lost].all(), "new episodes, from the first row on"
        assert not np.array_equal(ours[first][0], theirs[0][0]), "of fresh streams"


def test_the_same_failure_gives_the_same_batches(tmp_path: Path) -> None:
    def found(folder: str) -> Any:
        (tmp_path / folder).mkdir()
        return run("random", fault=Notebook(tmp_path / folder).fault("kill", 30))[0]

    assert_same(found("first"), found("second"))


# ---- at random moments ---------------------------------------------------------------------


MOMENTS = pairs(
    [
        *(("counting", mode) for mode in ["parallel", *CENTRAL, "ahead", "ahead, own process"]),
        *((name, "parallel") for name in KINDS if KINDS[name].n_seats),
    ],
    scaled([*product((TrajInfo, Diary), START_METHODS)], [(Diary, "fork"), (TrajInfo, "forkserver")]),
)


@pytest.mark.parametrize(("name", "mode", "traj_info_cls", "start_method"), [(*scene, *how) for scene, how in MOMENTS])
def test_workers_may_be_killed_at_any_moment(
    name: str, mode: str, traj_info_cls: type[TrajInfo], start_method: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng, kills, itr = generator("restart", name, mode, start_method), [0] * N_WORKERS, 0
    options = {"traj_info_cls": traj_info_cls, "start_method": start_method, "batch_T": 12}
    with killer() as kill, restarting_sampler(mode, KINDS[name].env_fn(NEVER), **options) as sampler:
        checked = Checked(sampler, KINDS[name])
        for n_kills in range(1, scaled(30, 2) + 1):
            rank = rng.randrange(N_WORKERS)
            kill.kill([pid_of(sampler, rank)], rng.uniform(0, 0.02))
            while sampler.stats().restarts < n_kills:
                checked.batch(itr)
                if name == "counting":
                    assert len(sampler.evaluate_agent(itr)) == 3 * 12
                itr += 1
            kill.when()
            kills[rank] += 1
            assert [worker.restarts for worker in sampler.stats().workers][:N_WORKERS] == kills
            record = [r.getMessage() for r in caplog.records if "is being replaced" in r.getMessage()][n_kills - 1]
            assert record.startswith(f"worker {rank} (pid "), record
        assert checked.n_ended > scaled(20, 5)


@methods("forkserver")
def test_a_replacement_that_fails_at_start_is_replaced(start_method: str) -> None:
    rng = generator("start", start_method)
    for rank in range(scaled(N_WORKERS, 1)):
        with killer() as kill, restarting_sampler("parallel", CountingEnv, start_method=start_method) as sampler:
            kill.kill_newborn(rank, rng.uniform(0, 0.02), start_method)
            sampler.initialize(RandomAgent(), seed=5)
            kill.when()
            sampler.obtain_samples(0)
            sampler.obtain_samples(1)  # a death after the answer to the first is noticed now
            assert sampler.stats().restarts == 1


@methods("fork", "forkserver")
def test_a_batch_that_the_user_holds_is_not_touched_by_a_replacement(start_method: str) -> None:
    options: dict[str, Any] = {"env_kwargs": {"seconds": 0.001}, "eval_max_steps": 3 * 100}
    options["eval_env_kwargs"] = options["env_kwargs"]
    with killer() as kill, restarting_sampler("parallel", SlowEnv, start_method=start_method, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        for itr in range(scaled(10, 2)):
            sampler.obtain_samples(itr)
            before = {name: leaf.tobytes() for name, leaf in sampler.samples_np.leaves()}
            kill.kill([pid_of(sampler, itr % N_WORKERS)], 0.03)
            assert len(sampler.evaluate_agent(itr)) == 3 * 20
            kill.when()
            assert sampler.stats().restarts == itr + 1
            assert {name: leaf.tobytes() for name, leaf in sampler.samples_np.leaves()} == before


def disturbed(mode: str, name: str, seed: int, n: int) -> list[Any]:
    """Batches, with evaluations, calls, pauses and killed workers between them, in an order that `seed` draws."""
    rng, found, n_kills, agent = random.Random(seed), [], 0, KINDS[name].agent()
    with restarting_sampler(mode, CARTPOLE, batch_T=3) as sampler:
        sampler.initialize(agent, seed=9)
        for itr in range(n):
            what = rng.choice(["batch", "batch", "pause", "evaluation", "call", "kill", "parameters", "change"])
            if what == "evaluation":
                sampler.evaluate_agent(itr)
            elif what == "call":
                sampler.call("get_wrapper_attr", "spec")
            elif what == "kill":
                n_kills += 1
                os.kill(sampler.worker_pids[0], signal.SIGKILL)
            elif what == "parameters":
                agent.sync_shared_memory()
            if what == "pause":
                sampler.start_samples(itr)
                sampler.wait_samples()
            else:
                sampler.obtain_samples(itr)
            found.append(sampler.samples_np.copy())
            if what == "change":  # the next batch begins with what the user has made of the last row
                sampler.samples_np.env.bootstrap_obs[...] *= -0.5
        assert sampler.stats().restarts == n_kills
    return found


@pytest.mark.parametrize(("mode", "seed"), pairs(MODES, range(scaled(20, 4))))
def test_batches_are_those_of_a_parallel_sampler_in_any_order_of_calls(mode: str, seed: int) -> None:
    name, n = AGENTS[seed % 3], scaled(40, 12)
    assert_same(disturbed(mode, name, seed, n), disturbed("parallel", name, seed, n), **KINDS[name].tolerance)


# ---- evaluations ---------------------------------------------------------------------------


class Telling(CountingEnv):
    """The return tells which actions were taken, in order."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float(int(action) * 4**self.count), *rest


def evaluations(mode: str, **kwargs: Any) -> list[list[float]]:
    with restarting_sampler(mode, Telling, **kwargs) as sampler:
        sampler.initialize(RandomAgent(), seed=9)
        return [[info.Return for info in sampler.evaluate_agent(itr)] for itr in range(2)]


@pytest.mark.parametrize("mode", CENTRAL)
def test_an_evaluation_is_made_good(mode: str, tmp_path: Path) -> None:
    """A worker is killed in the first of two."""
    whole = evaluations(mode)
    hit = evaluations(
        mode, eval_collector_cls=faulty_eval_collector(EvalCollector, Notebook(tmp_path).fault("kill", 4))
    )
    assert [len(returns) for returns in hit] == [36, 36]
    env_rank = [[hit[e][b::3] == whole[e][b::3] for b in range(3)] for e in range(2)]
    assert env_rank[0].count(True) == env_rank[1].count(True) == 2, "the other two are what they would have been"
    (b,) = (b for b in range(3) if not env_rank[0][b])
    assert not env_rank[1][b]
    assert not set(hit[0][b::3]) & set(hit[1][b::3]), "the redone evaluation shares no noise with the next"


# ---- what is lost --------------------------------------------------------------------------


@pytest.mark.parametrize("traj_info_cls", [TrajInfo, Diary], ids=["ring", "pipe"])
def test_lost_trajectories_are_counted_exactly(
    traj_info_cls: type[TrajInfo], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Episodes of 5; env_rank 3 ends its worker in its 30th step, t=5 of the second batch of 24."""
    caplog.set_level(logging.WARNING, "penstock")
    fns = [CountingEnv] * 3 + [faulty_env(CountingEnv, Notebook(tmp_path).fault("kill", 30))] + [CountingEnv] * 2
    with restarting_sampler("parallel", fns, traj_info_cls=traj_info_cls) as sampler:
        checked = Checked(sampler, KINDS["counting"])
        for itr in range(3):
            checked.batch(itr)
        # Two at t=0, and the two that were running. That of env_rank 2 has just ended, and no other has begun.
        assert [worker.lost_trajectories for worker in sampler.stats().workers] == [0, 4, 0]
        assert [worker.trajectories for worker in sampler.stats().workers] == [2 * 14, 2 * (4 + 4 + 5), 2 * 14]
    (record,) = caplog.records
    assert "it is being replaced, 4 trajectories are lost" in record.getMessage()


def test_what_has_been_delivered_is_not_counted_as_lost(tmp_path: Path) -> None:
    """Dies at the beginning of a batch, with the batch before still in the buffer."""
    collector = faulty_collector(ResetCollector, Notebook(tmp_path).fault("kill", 2))
    with restarting_sampler("parallel", CountingEnv, collector_cls=collector, env_kwargs={"length": 1}) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        for itr in range(3):
            assert len(sampler.obtain_samples(itr)[1]) == T * B
        assert sampler.stats().lost_trajectories == 2, "those that were running"


@pytest.mark.parametrize(
    ("game", "at", "lost", "agents"), [(FailingGame, 40, 2, ["a0", "a1"]), (FailingTurns, 43, 1, ["a1"])]
)
def test_agents_of_a_game_that_was_lost_are_told_from_those_of_the_next(
    game: Any, at: int, lost: int, agents: list[str], tmp_path: Path
) -> None:
    """Game `lost` of env_rank 0 dies with its worker, after `agents` have ended in it, in a batch before."""
    fault, found = Notebook(tmp_path).fault("kill", at), list[Any]()
    fns = [partial(game, fault if b == 0 else NEVER) for b in range(2)]
    with restarting_sampler("parallel", fns, batch_T=16, batch_B=2, n_workers=2, eval_n_envs=0) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        for itr in range(5):
            found += [(i.env_rank, i.number, i.agent_id) for i in sampler.obtain_samples(itr)[1]]
        assert sampler.stats().restarts == 1
    games = [[agent for *game, agent in found if game == [0, episode]] for episode in range(lost + 2)]
    assert games[lost] == agents
    assert games[lost + 1][-1] is None


class Mortal(CountingEnv):
    """The first that is told to die does."""

    def __init__(self, note: Path) -> None:
        super().__init__()
        self._note = note

    def die(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._note.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_call_after_an_evaluation_loses_no_evaluation(tmp_path: Path) -> None:
    with restarting_sampler("parallel", partial(Mortal, tmp_path / "dead")) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        sampler.obtain_samples(0)
        sampler.evaluate_agent(0)
        sampler.call("die")
        assert sampler.stats().restarts == 1
        assert sampler.stats().lost_trajectories == 2, "those that were running"


# ---- when it is enough ---------------------------------------------------------------------


def test_the_quota_ends_it_with_the_history() -> None:
    with restarting_sampler("parallel", CountingEnv, max_restarts=3) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        pids = []
        for itr in range(4):
            pids.append(sampler.worker_pids[1])
            psutil.Process(pids[-1]).kill()
            began = time.monotonic()
            if itr < 3:
                until(lambda known=itr: sampler.obtain_samples(0) and sampler.stats().restarts == known + 1)
        with pytest.raises(WorkerDiedError) as caught:
            while True:
                sampler.obtain_samples(10)
        note("quota used up: kill to error, s", time.monotonic() - began, ERROR_SECONDS)
    message = str(caught.value)
    assert message.startswith(f"worker 1 (pid {pids[3]}")
    assert "max_restarts=3 in 60 s are used up, earlier:" in message
    assert re.findall(r"^  [\d.]+ s ago: worker 1 \(pid (\d+)", message, re.MULTILINE) == [str(p) for p in pids[:3]]
