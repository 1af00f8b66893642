"""RaySampler gives what one machine gives: the same batches, calls, errors and evaluations."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import gymnasium as gym
import numpy as np
import psutil
import pytest
import threadpoolctl
import torch
from gymnasium import spaces

pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')

import ray

from penstock import (
    CategoricalPgAgent,
    ClusterError,
    ConfigError,
    EnvCallError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    SamplerStateError,
    SerialSampler,
    TrajInfo,
    WorkerError,
)
from penstock.buffers import PolicySamples
from penstock.distributed import RaySampler, placement
from penstock.distributed.placement import connect
from penstock.envs import CountingEnv, ScriptedGame, SlowEnv
from penstock.testing import Fault, faulty_env

from .. import models
from ..against_loop import compare
from ..samplers import digest_cases, test_equalities
from ..scale import scaled
from ..support import EVALUATING, assert_same, collect_with
from ..toy_games import Book, Published, TurnGame, Valuing, odd_or_even
from ..traces import TraceFile
from .ray_support import CARTPOLE, ray_sampler, rollouts

for module in (models, digest_cases, test_equalities):  # nodes cannot import them
    cloudpickle.register_pickle_by_value(sys.modules[module.__name__])

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(180), pytest.mark.slow]


class Own(TrajInfo):
    def __init__(self, discount: float = 1.0) -> None:
        super().__init__(discount)
        self.Last = 0.0

    def step(self, observation: Any, *rest: Any) -> None:
        super().step(observation, *rest)
        self.Last = float(observation[0])


def model_agent() -> CategoricalPgAgent:
    # In float64 the last bit, in which matrix products of other batch shapes may differ, decides nothing.
    return CategoricalPgAgent(lambda: models.CartPoleNet(8).double())


class Cost(ResetCollector):
    extra_fields: ClassVar[Any] = {"cost": np.float32(0), "position": spaces.Box(-9, 9, (2,), np.float32)}

    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        self.record_extra(t, cost=2 * self.samples.reward[t + 1])
        if t % 2:
            self.record_extra(t, position=self.samples.observation[t][:, :2])


@pytest.mark.parametrize("cls", [SerialSampler, GpuSampler])
def test_fields_of_a_collector_are_those_of_a_parallel_sampler(cls: Any) -> None:
    reference = rollouts(ParallelSampler, CARTPOLE, RandomAgent, collector_cls=Cost)
    found = rollouts(RaySampler, CARTPOLE, RandomAgent, n_shards=2, collector_cls=Cost, sampler_cls=cls)
    assert_same(reference, found)


SERIAL = {"sampler_cls": SerialSampler}
#: A kind of environment, its form, what is recorded, the number of shards, and what they are.
CELLS: list[tuple[str, str, str, int, dict[str, Any]]] = [
    ("single", "odd", "a diary", 1, {}),
    ("single", "", "counted episodes", 3, SERIAL),
    ("nested", "wait-reset", "env_info", 2, SERIAL),
    ("batched, SAME_STEP", "", "", 2, {}),
    ("lock-step", "", "long trajectories", 3, SERIAL),
    ("turns", "", "counted episodes", 2, {}),
    *scaled([(kind, "", "", 2, {}) for kind in test_equalities.KINDS], []),
]


@pytest.mark.parametrize(("kind", "form", "recorded", "n_shards", "shard"), CELLS)
@pytest.mark.filterwarnings("ignore:.*eval_max_steps.*:RuntimeWarning")
def test_batches_are_those_of_a_plain_loop(
    kind: str, form: str, recorded: str, n_shards: int, shard: dict[str, Any]
) -> None:
    env_fn, of_kind = test_equalities.KINDS[kind]
    env_fn = test_equalities.ODD[kind] if form == "odd" else env_fn
    agent = RandomAgent if kind in test_equalities.RANDOM_ONLY else digest_cases.Stateful
    options = {**of_kind, **test_equalities.FORMS[form], **test_equalities.RECORDED.get(recorded, {})}
    sizes: dict[str, Any] = {"batch_T": 5, "batch_B": 3, "n_batches": 3}
    compare(RaySampler, env_fn, agent, sampler={"n_shards": n_shards, "n_workers": 1, **shard}, **options, **sizes)


@pytest.mark.parametrize(
    ("model", "shard"),
    [
        ("categorical", {"sampler_cls": GpuSampler}),
        *((model, {}) for model in scaled(list(test_equalities.MODELS), ["recurrent categorical"])),
    ],
)
def test_agents_with_models_act_as_in_a_plain_loop(model: str, shard: dict[str, Any]) -> None:
    test_equalities.compare_model(model, RaySampler, {"n_shards": 3, "n_workers": 1, **shard})


class Listed(gym.Wrapper[Any, Any, Any, Any]):
    """An environment with an attribute, which can fail."""

    def __init__(self, number: int) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.number, self.fails = number, False

    def double(self) -> int:
        if self.number == 5:
            raise ValueError("five")
        return 2 * self.number

    def step(self, action: Any) -> Any:
        if self.fails:
            raise ArithmeticError("it fails")
        return super().step(action)


class Threads(CountingEnv):
    """Its observation is how many threads the numerical libraries of its process use: the fewest and the most."""

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        numbers = [torch.get_num_threads(), *(each["num_threads"] for each in threadpoolctl.threadpool_info())]
        observation[:] = min(numbers), max(numbers)
        return observation, *rest


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_environments_of_a_shard_have_one_thread(cls: Any) -> None:
    size = {"batch_T": 2, "batch_B": 2, "n_shards": 1, "n_workers": 2, "max_decorrelation_steps": 0}
    with RaySampler(partial(Threads, length=100), sampler_cls=cls, **size) as sampler:
        sampler.initialize(RandomAgent())
        assert sampler.obtain_samples(0)[0].env.observation[1].unique().tolist() == [1.0]


def note_puts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The policies and versions of the parameters that are put into Ray's object store from now on."""
    found, put = [], ray.put

    def noting(value: Any) -> Any:
        found.append(value[:2])
        return put(value)

    monkeypatch.setattr(ray, "put", noting)
    return found


def test_calls_parameters_statistics_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = model_agent()
    evaluation: dict[str, Any] = {"eval_n_envs": 3, "eval_max_steps": 6000, "eval_max_trajectories": 4}
    numbers = [{"number": i} for i in range(5)]
    with ray_sampler(Listed, env_kwargs=numbers, batch_T=10, batch_B=5, **evaluation) as sampler:
        with pytest.raises(SamplerStateError, match="expected now is initialize"):
            sampler.obtain_samples(0)
        example = sampler.initialize(agent, seed=0)
        puts = note_puts(monkeypatch)
        assert example.env.observation.shape == (4,)
        with pytest.raises(SamplerStateError, match="out of order"):
            sampler.wait_samples()

        assert sampler.get_attr("number") == [0, 1, 2, 3, 4]
        assert sampler.call("double") == [0, 2, 4, 6, 8]
        sampler.set_attr("number", [5, 6, 7, 8, 9])
        assert sampler.get_attr("number") == [5, 6, 7, 8, 9]
        assert sampler.get_attr("number", evaluation=True) == [0] * 3, "evaluation uses the first entry of the list"
        with pytest.raises(EnvCallError, match="env_rank 0 raised ValueError: five"):
            sampler.call("double")

        sampler.start_samples(0)
        samples, _ = sampler.wait_samples()
        assert (samples.agent.policy_version == 1).all()
        before = samples.agent.agent_info.value.clone()
        with torch.no_grad():
            agent.model.value.bias += 100.0
        samples, _ = sampler.obtain_samples(1)
        assert samples.agent.agent_info.value.max() < before.max() + 50, "nothing was published"
        assert puts == []
        agent.sync_shared_memory()
        agent.sync_shared_memory()
        for itr in (2, 3):
            samples, _ = sampler.obtain_samples(itr)
            assert samples.agent.agent_info.value.min() > 50
            assert (samples.agent.policy_version == 3).all()
        assert sampler.policy_version == 3
        assert 4 <= len(sampler.evaluate_agent(4)) <= 6, "the shards end after 3 and 2, or one more in a step of two"

        stats = sampler.stats()
        assert puts == [(0, 3)], "once for all shards, and never without a new version"
        assert [worker.env_ranks for worker in stats.workers] == [range(3), range(3, 5)]
        assert [worker.steps for worker in stats.workers] == [120, 80]
        pinned = [cpu for worker in stats.workers for cpu in worker.cpus]
        assert len(set(pinned)) == len(pinned), "the workers of two shards of a machine never share a CPU"
        assert [(shard.batches, shard.missing, shard.late) for shard in stats.shards] == [(4, 0, 0)] * 2
        figures = sampler.metrics()
        assert figures["sampler/env_steps"] == 200
        assert {"worker_0/idle_share", "worker_1/idle_share"} <= set(figures)
        assert figures["eval/trajectories"] >= 4
        with pytest.raises(ConfigError, match="RaySampler do not go together"):
            sampler.state_dict()
        with pytest.raises(ConfigError, match="RaySampler do not go together"):
            sampler.episode(0, 0)
        assert sampler.n_workers == 2
        assert len(sampler.worker_pids) == 2
        assert "shard 1 (node" in repr(sampler)

        sampler.set_attr("fails", [False] * 4 + [True])
        with pytest.raises(
            WorkerError, match=r"shard 1 \(node .*, env_rank 3 to 4, .*\): worker 0 .*it fails"
        ) as caught:
            sampler.obtain_samples(5)
        assert "ArithmeticError" in str(caught.value.__cause__ and caught.value.__cause__.__cause__)
        with pytest.raises(WorkerError, match="it fails"):
            sampler.obtain_samples(6)


def test_pieces_are_handed_over_as_they_come() -> None:
    agent = model_agent()
    n_pieces = 12
    with RaySampler(CARTPOLE, batch_T=8, batch_B=5, n_shards=2, n_workers=1, sampler_cls=SerialSampler) as sampler:
        sampler.initialize(agent, seed=3)
        pieces = []
        for piece in sampler.pieces(itr=10, max_in_flight=2, max_staleness=1):
            assert piece.samples.env.observation.shape == (8, len(piece.env_ranks), 4)
            assert (piece.samples.agent.policy_version == piece.policy_version).all()
            assert 0 <= piece.staleness <= 1
            pieces.append(piece)
            if len(pieces) % 4 == 0:
                with torch.no_grad():
                    agent.model.value.bias += 1.0
                agent.sync_shared_memory()
            with pytest.raises(SamplerStateError, match="the next piece"):
                sampler.obtain_samples(0)
            if len(pieces) == n_pieces:
                break
        for shard, env_ranks in enumerate((range(3), range(3, 5))):
            own = [piece for piece in pieces if piece.shard == shard]
            assert own
            assert all(piece.env_ranks == env_ranks for piece in own)
            assert [piece.policy_version for piece in own] == sorted(piece.policy_version for piece in own)
        assert max(piece.policy_version for piece in pieces) > 1
        stats = sampler.stats()
        assert sum(shard.batches for shard in stats.shards) == n_pieces
        _, infos = sampler.obtain_samples(50)
        assert isinstance(infos, list)

        # Its pieces are the columns of the batches that obtain_samples would have given.
        own = [piece for piece in pieces if piece.shard == 0 and piece.policy_version == 1]
        assert [piece.itr for piece in own] == list(range(10, 10 + len(own)))
        reference, _ = rollouts(SerialSampler, CARTPOLE, model_agent, iterations=1, seed=3, batch_T=8, batch_B=5)
        np.testing.assert_array_equal(own[0].samples.env.observation, reference[0].env.observation[:, :3])


def test_a_slow_shard_is_left_out() -> None:
    seconds = [0.002] * 3 + [0.1]
    options: dict[str, Any] = {"n_shards": 4, "sampler_cls": SerialSampler, "max_decorrelation_steps": 0}
    with ray_sampler(
        SlowEnv, env_kwargs=[{"seconds": each} for each in seconds], batch_T=10, min_ready=3, **options
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        itr = 0
        while sampler.stats().shards[3].late == 0:  # until the slow shard has answered
            samples, infos = sampler.obtain_samples(itr)
            itr += 1
            assert samples.env.valid[:, :3].all()
            assert not samples.env.valid[:, 3].any()
            assert not samples.env.observation[:, 3].any()
            assert all(info.Length for info in infos)
        *others, slow = sampler.stats().shards
        assert (slow.batches, slow.missing) == (0, itr)
        assert itr > 1
        assert all((shard.batches, shard.missing) == (itr, 0) for shard in others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_shards": 4}, "n_shards must be at most 3"),
        ({"n_shards": 0}, "n_shards must be an integer of at least 1"),
        ({"on_node_failure": "ignore"}, "on_node_failure must be one of raise, restart"),
        ({"min_ready": 0}, "min_ready must be an integer of at least 1, got 0"),
        ({"min_ready": 0.9}, "min_ready must be an integer of at least 1, got 0.9"),
        ({"min_shards": 0, "on_node_failure": "restart"}, "min_shards must be an integer of at least 1, got 0"),
        ({"min_shards": 1}, 'min_shards needs on_node_failure="restart"'),
        ({"sampler_cls": RaySampler}, "A shard cannot be a RaySampler: for groups of nodes, give each learner its own"),
        ({"sampler_cls": int}, "sampler_cls must be a synchronous sampler class"),
        ({"sampler_options": {"min_redy": 1}}, "no argument 'min_redy'"),
        ({"n_shard": 2}, "no argument 'n_shard'"),
        ({"seed_episodes": True}, "seed_episodes=True and RaySampler do not go together"),
        ({"episode_plan": print}, "episode_plan and RaySampler do not go together"),
        ({"unavailable_timeout": 0}, "unavailable_timeout must be a positive number"),
        ({"resources": {"GPU": -1}}, r"resources\['GPU'\] must be a finite number of at least 0, got -1"),
        ({"resources": {"GPU": float("nan")}}, r"resources\['GPU'\] must be a finite number of at least 0, got nan"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaySampler(CARTPOLE, **{"batch_T": 2, "batch_B": 3, **arguments})


def test_what_does_not_fit_the_cluster_is_refused() -> None:
    lock = threading.Lock()
    for env_fn, options, error in (
        (CARTPOLE, {"min_ready": 3}, "min_ready must be at most n_shards=2, got 3"),
        (lambda: CARTPOLE() if lock else None, {}, "env_fn cannot be pickled for the workers"),
    ):
        with ray_sampler(env_fn, **options) as sampler, pytest.raises(ConfigError, match=error):
            sampler.initialize(RandomAgent())


def listener(answer: bytes) -> tuple[str, socket.socket]:
    """The address of a server that sends `answer` to whoever connects, and the server."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                link, _ = server.accept()
                link.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}", server


def test_an_address_where_no_ray_answers_is_refused_soon(ray_cluster: Any) -> None:
    silent, http = listener(b""), listener(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    for address in (closed, silent[0], http[0], "127.0.0.1", "127.0.0.1:port", "[::1]:1", "192.0.2.1:6379", ""):
        began = time.monotonic()
        with pytest.raises(ConfigError, match=re.escape(f"no Ray cluster answers at RAY_ADDRESS={address}: ")):
            placement._join(address)
        assert time.monotonic() - began < 5.0
    for _, server in (silent, http):
        server.close()
    placement._await_answer(ray_cluster.address)


def test_a_ray_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def fail(*_: object, _temp_dir: str = "", **__: object) -> None:
        if _temp_dir:
            started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", _temp_dir]))
        raise Exception("The current node timed out during startup. This could happen")

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(placement.ray, "init", fail)
    before = dict(os.environ)
    with pytest.raises(ClusterError, match=r"Ray could not be started on this machine: .*The current node timed out"):
        placement._start(1)
    assert [psutil.pid_exists(process.pid) for process in started] == [False]
    started[0].wait(0)  # so that it is not warned of
    assert os.listdir(tmp_path) == []
    assert dict(os.environ) == before
    monkeypatch.setattr(placement, "_await_answer", lambda address: None)
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at RAY_ADDRESS=192\.0\.2\.1:6379: "):
        placement._join("192.0.2.1:6379")


def test_a_cluster_that_the_program_has_joined_goes_before_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    connect(1)()
    assert ray.is_initialized()


def test_a_cluster_without_a_token_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_has_token", lambda: False)
    with pytest.warns(RuntimeWarning, match="has no token"):
        connect(1)


def test_the_page_of_the_cluster_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/cluster.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "docs/cluster.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("torch.Size([32, 8, 4])")


# ---- environments with several agents ------------------------------------------------------


def alone(agent_id: str, env_rank: int) -> str:
    """The first shards have no seat of the policy "odd"."""
    return "odd" if (agent_id, env_rank) == ("a1", 6) else "even"


def drawn(agent_id: str, env_rank: int, rng: np.random.Generator) -> str:
    return "even" if rng.random() < 0.3 + 0.1 * env_rank else "odd"


def two(cls: type[Any] = Book) -> dict[str, Any]:
    return {"even": cls(), "odd": cls()}


# Shards have different numbers of agents, so the keys of their records must be of one kind.
GAMES: dict[str, Any] = {"env_kwargs": [{"k": k} for k in (3, 4, 2, 3, 1, 5, 3)]}
TURNS: dict[str, Any] = {"env_kwargs": [{"k": k} for k in (3, 2, 1, 4, 2, 3, 2)]}
COUNTED = {"eval_episodes": 6, "eval_max_steps": 2_000}
#: An environment, agents, options, and options of the shards. A shard may have no seat of a policy, or of any that is
#: recorded. The largest game in turns is in one shard: the seats of all shards are numbered with it.
ROWS: dict[str, tuple[Any, Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "one policy": (ScriptedGame, RandomAgent, {**GAMES, "global_state": True, **COUNTED}, {}),
    "two policies": (ScriptedGame, two, {**GAMES, "policy_of": odd_or_even}, {"sampler_cls": ParallelSampler}),
    "a lonely seat": (ScriptedGame, two, {**GAMES, "policy_of": alone, "n_slots": 2}, {}),
    "only it is recorded": (ScriptedGame, two, {**GAMES, "policy_of": alone, "record": ["odd"]}, {}),
    "turns": (TurnGame, Valuing, {**TURNS, **COUNTED}, {}),
    "turns, two policies": (
        TurnGame,
        partial(two, Valuing),
        {**TURNS, "policy_of": drawn, "eval_env_kwargs": {"k": 4}},
        {"sampler_cls": ParallelSampler},
    ),
}


@pytest.mark.parametrize("n_shards", scaled([1, 2, 3], [3]))
@pytest.mark.parametrize("row", ROWS)
def test_seats_and_policies_of_shards_are_those_of_one_machine(row: str, n_shards: int) -> None:
    """Rows, open decisions, values after the last row, and the numbers of the games."""
    env_fn, make_agents, own, of_shards = ROWS[row]
    options = {"batch_B": 7, **EVALUATING, **own}
    wanted = collect_with(ParallelSampler, env_fn, make_agents(), n_workers=2, **options)
    options |= {"n_workers": 1, "n_shards": n_shards, "sampler_cls": SerialSampler, **of_shards}
    assert_same(wanted, collect_with(RaySampler, env_fn, make_agents(), **options), but="policy_version")
    batches = [batch for batch, _ in wanted if batch is not None]
    seen = {info.get("agent_id") for _, infos in wanted for info in infos}
    assert ("a4" if env_fn is ScriptedGame else "a3") in seen, "the largest game"
    policies = options.get("record", ["even", "odd"]) if "policy_of" in own else [None]
    for policy in policies:
        valid = [(batch if policy is None else batch[policy]).env.valid for batch in batches]
        assert sum(each.sum() for each in valid) > 10
        assert not all(each.all() for each in valid)


def test_pieces_have_the_seats_of_their_shard() -> None:
    with RaySampler(ScriptedGame, batch_T=20, batch_B=4, n_shards=2, n_workers=1) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for piece, _ in zip(sampler.pieces(), range(4), strict=False):
            assert piece.samples.by_env().env.reward.shape == (20, 2, 3)
            assert {info.env_rank for info in piece.traj_infos} <= set(piece.env_ranks)
        assert sampler.stats().late_rewards > 0
        assert sampler.metrics()["sampler/agent_steps"] > 0


def test_each_policy_has_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent when they are new: those of a frozen opponent never again."""
    agents: dict[str, Any] = two(Published)
    agents["odd"].number = np.array(2)
    with RaySampler(ScriptedGame, batch_T=3, batch_B=2, n_shards=2, n_workers=1) as sampler:
        sampler.initialize(agents, policy_of=odd_or_even, seed=0)
        puts, before = note_puts(monkeypatch), sampler.metrics()
        for itr in range(4):
            samples, _ = sampler.obtain_samples(itr)
            assert isinstance(samples, PolicySamples)
            assert sampler.policy_version == {"even": itr + 1, "odd": 1}
            for name, number in (("even", itr), ("odd", 2)):
                own = samples[name]
                assert (own.agent.policy_version == sampler.policy_version[name]).all()
                assert (own.agent.agent_info.number[own.env.valid] == number).all()
            agents["even"].publish()
        assert puts == [(0, 2), (0, 3), (0, 4)]
        figures = sampler.metrics()
        assert figures.keys() == before.keys()
        assert (figures["sampler/policy_version/even"], figures["sampler/policy_version/odd"]) == (4, 1)
        assert figures["sampler/agent_steps"] > 0
        agents["odd"].publish()
        pieces, versions = [], []
        for piece in sampler.pieces(max_staleness=None):
            pieces.append(piece)
            number, valid = piece.samples.odd.agent.agent_info.number, piece.samples.odd.env.valid
            assert (number[valid] == piece.policy_version["odd"] + 1).all()
            assert piece.samples.odd.by_env().env.reward.shape == (3, 1, 1)
            assert piece.samples.even.by_env().env.reward.shape == (3, 1, 2)
            assert piece.staleness == len(versions) - (piece.policy_version["even"] - 5)
            versions.append(piece.policy_version)
            if len(pieces) == 12:
                break
            agents["even"].publish()
        assert versions[-1]["odd"] == 2
        assert sampler.policy_version == versions[-1]


def test_a_lost_shard_loses_the_seats_of_all_policies() -> None:
    with RaySampler(ScriptedGame, batch_T=20, batch_B=3, n_shards=2, n_workers=1, on_node_failure="restart") as sampler:
        agents: dict[str, Any] = two(Published)
        sampler.initialize(agents, policy_of=odd_or_even, seed=0)
        sampler.obtain_samples(0)
        for agent in agents.values():
            agent.publish()
        ray.kill(sampler.run.pool.shards[1].actor)  # type: ignore[union-attr]
        samples, _ = sampler.obtain_samples(1)
        for name, n in (("even", 6), ("odd", 3)):
            own = samples[name]
            assert own.env.valid.shape == (20, n)
            assert own.env.valid[:, -n // 3 :].any(), "the columns of the new shard"
            assert (own.agent.agent_info.number[own.env.valid] == 1).all(), "the new shard has the newest of both"
        assert sampler.stats().shards[1].lost_trajectories == 3


def test_policy_of_can_be_changed_while_games_run() -> None:
    options: dict[str, Any] = {"batch_T": 10, "batch_B": 4, "n_shards": 2, "n_workers": 1}
    with RaySampler(partial(TurnGame, 2), **options) as sampler:
        sampler.initialize(two(RandomAgent), policy_of=lambda agent_id, game: "even", seed=0)
        running = [0] * 4
        for info in sampler.obtain_samples(0)[1]:
            if info.agent_id is None:
                running[info.env_rank] = info.number + 1
        sampler.set_policy_of(lambda agent_id: "odd")
        infos = [info for itr in range(1, 8) for info in sampler.obtain_samples(itr)[1] if info.agent_id is not None]
        for info in infos:
            assert info.policy == ("even" if info.number <= running[info.env_rank] else "odd")
        assert {info.policy for info in infos} == {"even", "odd"}
    with RaySampler(partial(TurnGame, 2), on_node_failure="restart", **options) as sampler:
        sampler.initialize(two(RandomAgent), policy_of=lambda agent_id, game: "even", seed=0)
        with pytest.raises(ConfigError, match='set_policy_of and on_node_failure="restart" do not go together'):
            sampler.set_policy_of(lambda agent_id: "odd")


@pytest.mark.parametrize(
    ("agents", "options", "message"),
    [
        (RandomAgent(), {"eval_n_envs": 1, "eval_max_trajectories": 2}, "counts the games of an evaluation with"),
        (two(RandomAgent), {"sampler_cls": GpuSampler}, "shard [01] .*: several policies and an inference server"),
    ],
)
def test_what_shards_cannot_do_is_refused(agents: Any, options: dict[str, Any], message: str) -> None:
    with (
        RaySampler(ScriptedGame, batch_T=5, batch_B=2, n_shards=2, n_workers=1, **options) as sampler,
        pytest.raises(ConfigError, match=message),
    ):
        sampler.initialize(agents, policy_of=odd_or_even if isinstance(agents, dict) else None, seed=0)


def test_a_trace_shows_the_driver_and_the_workers_of_all_shards(tmp_path: Path) -> None:
    """All on the driver's clock: what a worker does for a batch lies within the driver's wait for it."""
    with ray_sampler(partial(SlowEnv, 1e-3), max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(5):
            sampler.obtain_samples(itr)
            with sampler.mark("update"):
                time.sleep(0.01)
        stats, trace = sampler.stats(), TraceFile(sampler.trace(tmp_path / "trace.json"))
        assert [run["kind"].partition(" ")[0] for run in trace.runs] == ["RaySampler", "shard", "shard"]
        assert [run["workers"] for run in trace.runs[1:]] == [[{"env_ranks": [0, 2]}], [{"env_ranks": [2, 4]}]]
        waits = {s["name"]: s for s in trace.track("main process") if s["cat"] == "wait"}
        for shard, worker in enumerate(stats.workers, start=1):
            within = trace.runs[shard]["clock_within_us"]
            assert 0 < within < 0.1e6
            shown = sum(s["dur"] for s in trace.track("worker 0", shard) if s["name"] == "stepping") / 1e6
            assert shown == pytest.approx(worker.stepping + worker.resetting, rel=0.02)
            for itr in range(5):
                (batch,) = (s for s in trace.track("worker 0", shard) if s["name"] == f"itr {itr}")
                wait = waits[f"wait for itr {itr}"]
                assert waits.get(f"start itr {itr}", wait)["ts"] - within <= batch["ts"]
                assert batch["ts"] + batch["dur"] <= wait["ts"] + wait["dur"] + within
        assert len(trace.track("marks")) == 5
    closed = TraceFile(sampler.trace(tmp_path / "closed.json"))
    assert len(closed.runs) == 1, "the shards have ended"


def test_a_slow_batch_of_a_shard_writes_a_trace(tmp_path: Path) -> None:
    slow = Fault("delay", at=23 * 2 + 1, seconds=1.5, marker=str(tmp_path / "marker"), spare_pid=os.getpid())
    with ray_sampler(faulty_env(CountingEnv, slow), batch_T=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.trace_when_slow(tmp_path / "slow", least=1.0)
        for itr in range(25):
            sampler.obtain_samples(itr)
    (path,) = (tmp_path / "slow").iterdir()
    assert len(TraceFile(path).named("itr 23")) == 2
