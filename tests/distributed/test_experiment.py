"""Experiments: actors, policy workers and a trainer, as threads, over sockets, and as processes that are killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    ClusterError,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    RequestError,
    SerialSampler,
)
from penstock.__main__ import main
from penstock.agents import AgentStep
from penstock.buffers import PolicySamples
from penstock.distributed import (
    Actors,
    ActorWorker,
    AgentPlan,
    Batch,
    ControlPanel,
    Experiment,
    InferenceClient,
    Policies,
    PolicyWorker,
    PollResult,
    RunState,
    SampleConsumer,
    TrainerWorker,
    Training,
    Worker,
)
from penstock.distributed.actor_worker import StreamAgent
from penstock.distributed.names import NameClient
from penstock.distributed.parameters import ParameterServer, read_parameters
from penstock.distributed.pieces import batch_of
from penstock.distributed.wire import Node
from penstock.envs import ScriptedGame

from ..models import Gru, Net, small_model
from ..scale import FULL, scaled
from ..toy_games import Published, TurnGame, odd_or_even
from ..traces import TraceFile
from .support import MAKES, SAMPLER, Bomb, need, needs_zmq, wait_until

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.slow]

ASYNC = partial(AsyncSampler, "CartPole-v1", batch_T=8, batch_B=4)
ROWS = 2 * 8 * 4  # of a batch of two pieces


class CountingTrainer:
    """Adds 1 to every parameter at each step, and checks its batches."""

    def __init__(self, agent: Any) -> None:
        self.agent, self.n_rows, self.most_stale = agent, 0, 0

    def step(self, batch: Batch) -> Mapping[str, float]:
        env, agent = batch.samples.env, batch.samples.agent
        self.most_stale = max(self.most_stale, 1 + self.n_rows // ROWS - int(batch.versions.min()))
        assert env.observation.shape[:2] == env.reward.shape == agent.policy_version.shape
        assert agent.bootstrap_value.shape == env.reward.shape[1:]
        assert batch.versions.min() <= int(agent.policy_version.min())
        time.sleep(scaled(0, 0.03))  # slower daily: other tests need the CPUs
        self.agent.write_parameters({name: value + 1 for name, value in self.agent.read_parameters().items()})
        self.n_rows += env.reward.numel()
        return {"rows": self.n_rows, "most_stale": self.most_stale}

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.n_rows, "most_stale": self.most_stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_rows, self.most_stale = state["rows"], state["most_stale"]


def experiment(inference: str | None = "policy", agent: Any = None, **training: Any) -> Experiment:
    return Experiment(
        "test",
        agent or partial(CategoricalPgAgent, small_model),
        Actors(2, SAMPLER, inference=inference),
        Training(CountingTrainer, batch=2, **training),
        Policies(1) if inference else None,
        seed=3,
    )


class Pictures(gym.Env[Any, Any]):
    """Each picture has one value: the number of its step."""

    observation_space, action_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros((64, 64, 3), np.uint8), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full((64, 64, 3), self.t, np.uint8), float(self.t), False, self.t == 20, {}


class PictureTrainer:
    """Checks its pictures."""

    def __init__(self, agent: Any) -> None:
        pass

    def step(self, batch: Batch) -> None:
        pictures = batch.samples.env.observation.flatten(2).float()
        assert (pictures.min(2).values == pictures.max(2).values).all()
        assert (pictures[1:, :, 0] == (batch.samples.env.reward[:-1] * ~batch.samples.env.done[:-1])).all()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_large_pieces_arrive_whole_on_ray(ray_cluster: Any) -> None:
    made = Experiment(
        "pictures",
        RandomAgent,
        Actors(2, partial(SerialSampler, Pictures, batch_T=32, batch_B=12, max_decorrelation_steps=0)),
        Training(PictureTrainer, batch=2),
        seed=0,
    )
    with made.run(wire="ray") as run:
        assert run.wait(lambda s: s.version >= 6, timeout=120).version >= 6
        assert run.restarts == dict.fromkeys(run.restarts, 0)


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("pickle was used")


def unpickling_nothing() -> Any:
    """An agent. From now on, nothing is unpickled in the process of this worker, except a checkpoint."""
    for name in ("load", "loads"):
        setattr(pickle, name, refuse)
    with contextlib.suppress(AssertionError):  # not with pytest, which each worker would import
        raise RuntimeError(f"pickle works: {pickle.loads(b'N.')}")
    return CategoricalPgAgent(small_model)


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses and ports at which these processes, and those that they have started, can be reached."""
    processes = [each for pid in pids for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    found = [c for process in processes for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    return {(connection.laddr.ip, connection.laddr.port) for connection in found}


@pytest.mark.parametrize("wire", [make for make in MAKES if make != "local"])
def test_an_experiment_goes_on_after_its_workers_were_killed(
    wire: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need(wire, request)
    options: dict[str, Any] = {"checkpoint": tmp_path / "trainer.pt", "save_every": 1, "max_staleness": 6}
    versions, told = list[float](), list[RunState]()
    before = listening([os.getpid()]) if wire == "zmq" else set()  # Ray may be in this process

    def reaches(version: int, state: RunState) -> bool:
        versions.extend([state.trainer["version"]] if "version" in state.trainer else [])
        return state.version >= version

    with experiment(agent=unpickling_nothing if wire == "zmq" else None, **options).run(wire=wire) as run:
        version = run.wait(partial(reaches, 3), timeout=60, metrics=told.append).version
        assert told[-1].version == version, "the last state is taken too"
        for name in scaled(("policy/0", "actor/1", "trainer/0"), ("policy/0", "trainer/0")):
            os.kill(run.panel.pid(name), signal.SIGKILL)
            state = run.wait(
                lambda s, n=name, v=version: reaches(v + 3, s) and run.restarts[n] == 1 and "rows" in s.trainer,
                timeout=60,
            )
            assert run.restarts[name] == 1
            assert state.version >= version + 3
            assert state.trainer["largest_staleness"] <= 6
            version = state.version
        assert versions == sorted(versions), "a trainer that was started again goes on from its checkpoint"
        assert state.trainer["rows"] == ROWS * (state.version - 1)
        assert state.trainer["most_stale"] <= 6
        if wire == "zmq":
            new = listening([os.getpid(), *map(run.panel.pid, run.restarts)]) - before
            assert {address for address, _ in new} == {"127.0.0.1"}
    assert set(run.restarts.values()) == {0, 1}


@pytest.mark.parametrize("wire", ["local", "zmq"])
def test_a_trace_shows_the_workers_of_all_actors_on_one_clock(
    wire: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """`penstock top --trace` writes it while they sample. An actor in this process may have its sampler traced too."""
    need(wire, request)
    made, file = list[ParallelSampler](), tmp_path / "trace.json"

    new = partial(ParallelSampler, "CartPole-v1", batch_T=8, batch_B=4, n_workers=2)

    def keep() -> ParallelSampler:
        made.append(new())
        return made[-1]

    agent, training = partial(CategoricalPgAgent, small_model), Training(CountingTrainer, batch=2)
    began = time.time_ns()
    with Experiment("test", agent, Actors(2, keep if wire == "local" else new), training, seed=3).run(wire=wire) as run:
        run.wait(lambda state: state.version >= 4, timeout=60)
        pids = [run.panel.pid(f"actor/{i}") for i in (0, 1)] if wire == "zmq" else [os.getpid()] * 2
        assert main(["top", *map(str, dict.fromkeys(pids)), "--trace", str(file)]) == 0
        ended = time.time_ns()
        for sampler in made[1:]:  # the first one was only looked at
            own = TraceFile(sampler.trace(tmp_path / "own.json"))
            assert len([s for s in own.track("worker 1") if s["name"].startswith("itr ")]) > 1
    trace = TraceFile(file)
    assert [run["kind"] for run in trace.runs] == ["ParallelSampler"] * 2
    assert sorted(run["workers"][1]["env_ranks"] for run in trace.runs) == [[2, 4], [6, 8]]
    assert [run["pid"] % (1 << 22) for run in trace.runs] == pids
    assert len({pid for run in trace.runs for pid in run["pids"]}) == 4
    for i, rank in product((0, 1), (0, 1)):
        spans = trace.track(f"worker {rank}", i)
        assert len([s for s in spans if s["name"].startswith("itr ")]) > 1
        assert began <= trace.base + 1e3 * min(s["ts"] for s in spans)
        assert trace.base + 1e3 * max(s["ts"] + s["dur"] for s in spans) <= ended


@pytest.fixture
def panel() -> Iterator[ControlPanel]:
    with ControlPanel("test") as made:
        yield made


@pytest.fixture
def joined(panel: ControlPanel) -> Iterator[tuple[Node, NameClient]]:
    """A wire, and the names of the panel."""
    wire = panel.connection.wire()
    yield wire, NameClient(wire, panel.connection.address)
    wire.close()


class Publisher(Worker):
    """Publishes the first parameters, in place of a trainer."""

    def __init__(self, plan: AgentPlan) -> None:
        self.plan = plan

    def _configure(self) -> None:
        self.server = ParameterServer(self.wire, self.names, "policy")
        self.publish(1)

    def publish(self, version: int) -> None:
        self.server.publish(version, read_parameters(self.plan.agent()))

    def _poll(self) -> PollResult:
        return PollResult()


def configure(panel: ControlPanel, make: Callable[[], Worker], name: str = "trainer") -> None:
    """Launch and configure a worker `name/0`."""
    panel.launch(make, name=name)
    panel.connect([f"{name}/0"])
    panel.request(f"{name}/0", "configure")


def start(panel: ControlPanel, **makers: Callable[[], Worker]) -> None:
    """Start a worker `name/0` for each of these, one after another."""
    for name, make in makers.items():
        configure(panel, make, name)
        panel.request(f"{name}/0", "start")


# Some episodes end by themselves, the others are truncated: in one step several, and some columns twice in a batch.
SHORT: Any = {"batch_T": 16, "batch_B": 4, "env_kwargs": {"max_episode_steps": 7}}
SAMPLERS = {
    "serial": partial(SerialSampler, "CartPole-v1", **SHORT),
    "gpu": partial(GpuSampler, "CartPole-v1", n_workers=2, **SHORT),
    "first ready": partial(GpuSampler, "CartPole-v1", n_workers=2, min_ready=2, **SHORT),
    "alternating": partial(AlternatingSampler, "CartPole-v1", n_workers=2, **SHORT),
}


recurrent_agent = partial(RecurrentCategoricalPgAgent, partial(Gru, 4, 2))


@pytest.mark.parametrize(
    ("kind", "agent"),
    [("first ready", "random"), *((kind, agent) for kind in SAMPLERS for agent in ("feedforward", "recurrent"))],
)
def test_an_inference_stream_gives_the_samples_of_an_agent_in_the_actor(
    panel: ControlPanel, joined: Any, kind: str, agent: str
) -> None:
    """The values of truncated episodes too: of some columns, and of more rows than there are columns."""
    feedforward = partial(CategoricalPgAgent, small_model)
    make: Any = {"random": RandomAgent, "feedforward": feedforward, "recurrent": recurrent_agent}[agent]
    plan = experiment(agent=make).plan()
    start(panel, trainer=partial(Publisher, plan), policy=partial(PolicyWorker, Policies(1), plan))
    batches = []
    for acting in (StreamAgent(InferenceClient(*joined, "policy", "actor/0"), make()), make()):
        with SAMPLERS[kind if isinstance(acting, StreamAgent) else "serial"]() as sampler:
            sampler.initialize(acting, seed=plan.seed, bootstrap_value=True, world_size=2)
            batches.append([sampler.obtain_samples(itr)[0].numpy().copy() for itr in range(6)])
    for streamed, inline in zip(*batches, strict=True):
        for field in ("observation", "reward", "done", "final_obs"):
            assert (streamed.env[field] == inline.env[field]).all(), field
        assert (streamed.agent.action == inline.agent.action).all()
        np.testing.assert_allclose(streamed.agent.bootstrap_value, inline.agent.bootstrap_value, rtol=1e-5)
        np.testing.assert_allclose(streamed.agent.final_value, inline.agent.final_value, rtol=1e-5)
    n_truncated = [int(batch.env.truncated.sum()) for batch in batches[0]]
    assert max(n_truncated) > 4
    assert min(n_truncated) > 0


def test_a_piece_does_not_change_with_the_next_batch(panel: ControlPanel) -> None:
    plan = experiment(None).plan()
    worker = ActorWorker(Actors(1, SAMPLER), plan)
    start(panel, trainer=partial(Publisher, plan))
    configure(panel, lambda: worker, "actor")  # it does not start, so this thread may use its sampler
    piece = worker._collect()
    assert piece is not None
    before = pickle.dumps(piece)
    worker._collect()
    assert pickle.dumps(piece) == before


def test_a_policy_worker_acts_for_no_more_environments_than_max_batch(panel: ControlPanel, joined: Any) -> None:
    sizes = list[int]()

    class Counts(RandomAgent):
        def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
            sizes.append(len(prev_reward))
            return super().step(observation, prev_action, prev_reward)

    plan = replace(experiment(agent=Counts).plan(), n_envs=14)
    start(panel, trainer=partial(Publisher, plan))
    configure(panel, partial(PolicyWorker, Policies(1, max_batch=5), plan), "policy")
    _, names = joined
    server, worker = (names.reach(names.get(key)) for key in ("policies/policy/policy/0", "workers/policy/0"))
    first, answers = 0, list[Any]()
    for n in (2, 2, 2, 7, 1):  # they wait together, since the worker has not started
        rows = {"observation": np.zeros((n, 4), np.float32), "prev_action": np.zeros(n, np.int64)}
        rows |= {"env_ranks": np.arange(first, first + n), "starts": np.ones(n, np.bool_)}
        rows |= {"prev_reward": np.zeros(n, np.float32)}
        answers.append(server.ask({"kind": "step", "session": "a", "generation": 0, **rows}, 60))
        first += n
    assert worker.ask({"command": "ping"}, 60).result() == "pong"  # through the same connection: the others are there
    panel.request("policy/0", "start")
    assert [len(answer.result()["action"]) for answer in answers] == [2, 2, 2, 7, 1]
    assert sizes == [4, 2, 7, 1], "one request may be larger"


#: One policy plays games in turns: some rows are not valid.
TURNS = Experiment(
    "turns",
    partial(CategoricalPgAgent, partial(Net, 4, 3, 0)),
    Actors(2, partial(SerialSampler, TurnGame, batch_T=8, batch_B=4)),
    Training(CountingTrainer, batch=2),
    seed=3,
)


def two_agents() -> dict[str, Any]:
    return {"even": Published(), "odd": Published()}


class TwoTrainer:
    """After each step, the number of "even" is one larger, and that of "odd" two. It checks who has acted."""

    def __init__(self, agents: dict[str, Any]) -> None:
        self.agents = agents

    def step(self, batch: Batch) -> Mapping[str, float]:
        time.sleep(scaled(0, 0.03))  # slower daily: other tests need the CPUs
        assert isinstance(batch.samples, PolicySamples)
        for (name, own), factor, n in zip(batch.samples.items(), (1, 2), (2, 1), strict=True):
            assert own.env.reward.shape == (8, 2 * 4 * n), "2 pieces of 4 games"
            acted, valid = own.agent.agent_info.number, own.env.valid
            assert (acted[valid] == factor * (own.agent.policy_version[valid] - 1)).all(), name
            self.agents[name].number = np.array(self.agents[name].number + factor)
        return {name: float(agent.number) for name, agent in self.agents.items()}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to restore but the agents."""


TWO = Experiment(
    "policies",
    two_agents,
    Actors(2, partial(SerialSampler, ScriptedGame, batch_T=8, batch_B=4), policy_of=odd_or_even),
    Training(TwoTrainer, batch=2, max_staleness=6),
    seed=3,
)


@pytest.mark.parametrize("wire", [make for make in MAKES if FULL or make != "local"])
def test_several_policies_play_in_the_actors(wire: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The parameters of all policies are one version, and a new run continues with those of all."""
    need(wire, request)
    saved = replace(TWO, training=replace(TWO.training, checkpoint=tmp_path / "trainer.pt"))
    version = 1
    for _ in range(2):
        with saved.run(wire=wire) as run:
            state = run.wait(lambda s, v=version: s.version >= v + 4, timeout=60)
            assert state.version >= version + 4
            version = state.version
            assert (state.trainer["even"], state.trainer["odd"]) == (version - 1, 2 * (version - 1))
            assert run.restarts == dict.fromkeys(run.restarts, 0)
        version = int(torch.load(tmp_path / "trainer.pt", weights_only=False)["version"])


def by_policy(samples: Any) -> dict[str, Any]:
    return dict(samples.items()) if isinstance(samples, PolicySamples) else {"": samples}


@pytest.mark.parametrize(("made", "record"), [(experiment(None), None), (TURNS, None), (TWO, None), (TWO, ["odd"])])
def test_pieces_joined_along_the_environments_are_batches_of_the_sampler(
    panel: ControlPanel, joined: Any, made: Experiment, record: Any
) -> None:
    actors, plan = replace(made.actors, record=record), made.plan()
    consumer = SampleConsumer(*joined, "train", "test")
    start(panel, trainer=partial(Publisher, plan), actor=partial(ActorWorker, actors, plan, world_size=2))
    batch: Any = batch_of([consumer.get(20) for _ in range(6)])
    joint, infos = by_policy(batch.samples), list[Any]()
    with actors.make_sampler() as sampler:
        arguments = {"policy_of": actors.policy_of, "record": record, "bootstrap_value": True, "world_size": 2}
        sampler.initialize(plan.agent(), seed=plan.seed, **arguments)
        for i in range(6):
            samples, found = sampler.obtain_samples(i)
            infos += found
            assert list(by_policy(samples)) == list(joint)
            for name, own in by_policy(samples).items():
                n = own.env.reward.shape[1]
                part = joint[name][:, n * i : n * (i + 1)]
                for (path, left), (_, right) in zip(part.leaves(), own.leaves(), strict=True):
                    assert (left == right).all(), path
                assert (part.env.next_observation == own.env.next_observation).all()
    for policy in (None, "even", "odd") if made is TWO else (None,):
        returns = [info.Return for info in infos if made is not TWO or info.policy == policy]
        assert batch.infos["Return" if policy is None else f"{policy}/Return"].tolist() == returns != []


@pytest.mark.parametrize(
    ("saved", "owner", "error"),
    [
        (
            dict.fromkeys(["even", "azure"]),
            None,
            r"it is of the policies \['even', 'azure'\], and make_agent returns \['even', 'odd'\]",
        ),
        (None, None, "Error"),  # an empty file
        (Bomb, None, "Weights only load failed"),
        ({}, 65534, "it belongs to user 65534, and must be your own"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_named_and_no_code_in_it_is_run(
    panel: ControlPanel, tmp_path: Path, saved: Any, owner: int | None, error: str
) -> None:
    path = tmp_path / "trainer.pt"
    path.touch()
    if saved is not None:
        agent = Bomb(tmp_path / "ran") if saved is Bomb else saved
        torch.save({"version": 5, "agent": agent, "trainer": {}}, path)
    if owner is not None:
        if os.getuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(path, owner, -1)
    with pytest.raises(RequestError, match=rf"checkpoint='.*trainer\.pt' cannot be loaded: .*{error}"):
        configure(panel, partial(TrainerWorker, replace(TWO.training, checkpoint=path), TWO.plan()))
    assert not (tmp_path / "ran").exists()


class StatefulTrainer(CountingTrainer):
    """Saves what `state` is, and loads it again."""

    state: Any = None
    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        StatefulTrainer.loaded = state["state"]


def saving(path: Path, *, trust: bool = False) -> Callable[[], Worker]:
    plan = experiment(agent=RandomAgent).plan()
    return partial(TrainerWorker, Training(StatefulTrainer, checkpoint=path, trust_checkpoint=trust), plan)


def save(panel: ControlPanel, path: Path, name: str = "trainer", *, trust: bool = False) -> None:
    """Run a trainer, which loads its checkpoint if there is one, and saves itself at its end."""
    configure(panel, saving(path, trust=trust), name)
    panel.request(f"{name}/0", "exit")
    wait_until(lambda: panel.has_ended(f"{name}/0"))


@pytest.fixture
def _no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sets in `StatefulTrainer` goes with it."""
    monkeypatch.setattr(StatefulTrainer, "state", None)
    monkeypatch.setattr(StatefulTrainer, "loaded", None)


@pytest.mark.usefixtures("_no_state")
def test_a_trainers_state_of_arrays_comes_back_and_no_link_is_followed(panel: ControlPanel, tmp_path: Path) -> None:
    path, victim = tmp_path / "trainer.pt", tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".trainer.pt.part").symlink_to(victim)
    wanted = {"random": np.random.RandomState(3).get_state(), "best": np.float64(0.5), "rows": [torch.ones(2)]}
    StatefulTrainer.state = wanted
    for name in ("first", "second"):
        save(panel, path, name)
    assert victim.read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir() if "trainer" in each.name] == ["trainer.pt"]
    loaded = StatefulTrainer.loaded
    assert loaded["best"] == 0.5
    assert loaded["rows"][0].tolist() == [1.0, 1.0]
    assert loaded["random"][0] == "MT19937"
    assert (loaded["random"][1] == wanted["random"][1]).all()


@pytest.mark.usefixtures("_no_state")
def test_a_checkpoint_that_is_trusted_may_have_code_and_another_owner(panel: ControlPanel, tmp_path: Path) -> None:
    path = tmp_path / "trainer.pt"
    StatefulTrainer.state = {"folder": tmp_path, "rows": np.arange(3)}
    for name in ("first", "second"):
        save(panel, path, name, trust=True)
        if os.getuid() == 0:  # only root can give a file to another user
            os.chown(path, 65534, -1)
    assert StatefulTrainer.loaded["folder"] == tmp_path
    assert StatefulTrainer.loaded["rows"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (Bomb, "['state'], a Bomb"),
        (lambda folder: [1, {"best": (0.5, folder)}], "['state'][1]['best'][1], a PosixPath"),
        (lambda folder: {Path("a"): 1}, "its keys"),
    ],
)
@pytest.mark.usefixtures("_no_state")
def test_a_trainers_state_that_could_not_be_loaded_is_refused_when_it_is_saved(
    panel: ControlPanel, tmp_path: Path, make: Any, culprit: str
) -> None:
    StatefulTrainer.state = make(tmp_path / "ran")
    save(panel, tmp_path / "trainer.pt")
    facts = panel.stats(["trainer/0"])["trainer/0"]
    assert facts["status"] == "ERROR"
    assert "state_dict of the trainer must return numbers" in facts["text"]
    assert f"Convert {'' if culprit == 'its keys' else 'state_dict()'}{culprit}, or use" in facts["text"]
    assert [*tmp_path.iterdir()] == []


class FullDiskTrainer(CountingTrainer):
    """From its third step on, its process cannot write long files."""

    def step(self, batch: Batch) -> Mapping[str, float]:
        figures = super().step(batch)
        if self.n_rows >= 3 * ROWS:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return figures

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ballast": torch.zeros(10_000)}


@needs_zmq
@pytest.mark.parametrize("save_every", [2, 10**6])
def test_a_full_disk_is_named_and_the_old_checkpoint_stays(tmp_path: Path, save_every: int) -> None:
    path = tmp_path / "trainer.pt"
    training = Training(FullDiskTrainer, batch=2, checkpoint=path, save_every=save_every)
    error, run = r"trainer/0 .*checkpoint='.*/trainer.pt' cannot be written: File too large", None
    with pytest.raises(ClusterError, match=error):  # while the run starts, in its middle, or at its end
        run = replace(experiment(None), training=training).run(wire="zmq", max_restarts=0)
        with run:
            run.wait(lambda state: state.version >= 5, timeout=60)
            assert save_every > 2
    if run is not None:
        run.close()  # again
    assert [each.name for each in tmp_path.iterdir()] == (["trainer.pt"] if save_every == 2 else [])
    if save_every == 2:
        assert torch.load(path, weights_only=True)["version"] == 2


@needs_zmq
def test_what_cannot_be_pickled_for_a_process_is_named() -> None:
    lock = threading.Lock()

    def make() -> CategoricalPgAgent:
        with lock:
            return CategoricalPgAgent(small_model)

    with pytest.raises(ConfigError, match=r"^what makes .*/0 cannot be pickled for its process: .*variable 'lock'"):
        experiment(agent=make).run(wire="zmq")


def test_one_example_environment_of_several_agents_is_built() -> None:
    built = list[ScriptedGame]()

    def make() -> ScriptedGame:
        built.append(ScriptedGame())
        return built[-1]

    plan = replace(
        TWO, actors=replace(TWO.actors, make_sampler=partial(SerialSampler, make, batch_T=8, batch_B=4))
    ).plan()
    assert (plan.observation_space, plan.action_space) == (TWO.plan().observation_space, TWO.plan().action_space)
    assert len(built) == 1


def test_a_number_of_numpy_is_a_parameter_and_another_value_is_named() -> None:
    agent: Any = Published()
    agent.number = np.float64(0.5)
    found = read_parameters(agent)
    assert found == {"number": 0.5}
    assert isinstance(found["number"], np.ndarray)
    agent.number = 0.5
    with pytest.raises(ConfigError, match=r"read_parameters of Published must return numpy arrays, got .*'number'"):
        read_parameters(agent)


class Broken(RandomAgent):
    def step(self, *inputs: Any) -> Any:
        raise SystemExit("the model is broken")


def test_a_policy_worker_that_fails_while_actors_start_ends_the_run() -> None:
    """The actors wait for its first actions, and would wait for two minutes."""
    made = replace(experiment("policy"), make_agent=Broken)
    with pytest.raises(ClusterError, match=r"worker policy/0 has failed 2 times in a row.*: .*model is broken"):
        made.run(wire="local", max_restarts=1).close()


def test_agents_that_do_not_fit_the_environments_are_refused() -> None:
    plan = replace(experiment(None), make_agent=lambda: {"main": RandomAgent()}).plan()
    with pytest.raises(
        ConfigError, match="make_agent must return an Agent, or for environments of several agents a dict"
    ):
        plan.agent()
    scripted: Any = {"even": RandomAgent(), "odd": len}
    with pytest.raises(ConfigError, match=r"Wrap a function of your own: FunctionAgent\(function\)"):
        replace(TWO, make_agent=lambda: scripted).plan().agent()
    with pytest.raises(ConfigError, match="policy_of returned 'a0' for env_rank 0"):
        replace(TWO, actors=replace(TWO.actors, policy_of=None)).plan()
    with pytest.raises(ConfigError, match=r"make_agent returned a dict: use Training\(count=1\)"):
        replace(TWO, training=replace(TWO.training, count=2)).plan()
    asked = replace(TWO, actors=replace(TWO.actors, inference="policy"), policies=Policies(1))
    with pytest.raises(ConfigError, match="policy workers act for environments of one agent, and env_fn returns one"):
        asked.run()


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"make_agent": 5}, "make_agent must be a class or a function, got 5"),
        ({"actors": Actors(1, SAMPLER())}, "make_sampler must be a class or a function, got <SerialSampler"),
        ({"actors": Actors(1, ASYNC, inference="policy")}, "returned an AsyncSampler"),
        ({"actors": Actors(0, SAMPLER)}, "the number of actors must be an integer of at least 1, got 0"),
        ({"training": Training(CountingTrainer, batch=0)}, "batch of Training must be an integer of at least 1, got 0"),
        ({"training": Training(CountingTrainer, save_every=0)}, "save_every must be an integer of at least 1, got 0"),
        ({"policies": Policies(0)}, "the number of policies must be an integer of at least 1, got 0"),
        ({"policies": Policies(1, max_delay=-1)}, "max_delay must be a number of seconds, 0 or more, got -1"),
        ({"policies": Policies(1, max_delay=float("nan"))}, "max_delay must be a number of seconds, .*, got nan"),
        ({"policies": Policies(1, max_delay=float("inf"))}, "max_delay must be finite, or .* full batch, got inf"),
        ({"seed": "x"}, "seed must be an integer of at least 0, got 'x'"),
        ({"policies": None}, "no policies for the inference stream 'policy'"),
        ({"actors": Actors(1, SAMPLER), "policies": Policies(1, stream="a")}, "the stream 'a', the actors ask None"),
        ({"actors": Actors(1, SAMPLER, samples="a"), "policies": None}, "fill 'a', the trainer reads 'train'"),
    ],
)
def test_wrong_parts_are_refused_before_anything_starts(parts: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        replace(experiment(), **parts).run()


class Steps:
    """A trainer that does nothing, and cannot save itself."""

    def __init__(self, agent: Any) -> None:
        pass

    def step(self, batch: Batch) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "checkpoint", "error"),
    [
        (Steps, "trainer.pt", "no method state_dict, load_state_dict: make_trainer has returned a Steps"),
        (lambda agent: None, None, "the trainer has no method step: make_trainer has returned a NoneType"),
        (CountingTrainer, "missing/trainer.pt", r"the folder of checkpoint='.*' does not exist: make it first"),
    ],
)
def test_a_trainer_that_could_not_step_or_save_is_refused(
    panel: ControlPanel, tmp_path: Path, make: Any, checkpoint: str | None, error: str
) -> None:
    plan = experiment(agent=RandomAgent).plan()
    path = checkpoint and tmp_path / checkpoint
    with pytest.raises(RequestError, match=error):
        configure(panel, partial(TrainerWorker, Training(make, checkpoint=path), plan))


def test_an_agent_of_a_stream_cannot_go_into_workers() -> None:
    client = InferenceClient(None, None, "policy", "actor/0")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot go into other processes"):
        pickle.dumps(client)
