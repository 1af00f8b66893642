"""What an experiment does after faults: lineages of parameters, restarts as steps, silent workers, schedules."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import AgentStep, NamedArrays, RandomAgent, RequestError, SerialSampler
from penstock.distributed import (
    Actors,
    ActorWorker,
    Batch,
    ControlPanel,
    Experiment,
    InferenceClient,
    Policies,
    PolicyWorker,
    PollResult,
    RunState,
    SampleConsumer,
    SampleProducer,
    Status,
    TrainerWorker,
    Training,
    Worker,
)
from penstock.distributed.actor_worker import StreamAgent
from penstock.distributed.launched import LaunchedThread
from penstock.distributed.names import NameClient
from penstock.distributed.parameters import ParameterClient
from penstock.distributed.pieces import piece_of

from ..scale import scaled
from .support import MAKES, SAMPLER, need, wait_until
from .test_experiment import Publisher, Steps, experiment, joined, panel, recurrent_agent, start

__all__ = ["joined", "panel"]

pytestmark = [pytest.mark.timeout(scaled(7200, 200)), pytest.mark.usefixtures("forked_workers"), pytest.mark.slow]


# ---- parts, as threads ---------------------------------------------------------------------


class ReportsItr(RandomAgent):
    """`agent_info.itr` is the `itr` of the agent's schedules."""

    itr = -1

    def sample_mode(self, itr: int) -> None:
        self.itr = itr

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(step.action, NamedArrays(itr=np.full(len(prev_reward), self.itr)))


def plan_of(agent: Any = RandomAgent) -> Any:
    return experiment(agent=agent).plan()


def test_a_piece_of_another_lineage_or_of_a_newer_version_is_stale(panel: ControlPanel, joined: Any) -> None:
    plan = plan_of()
    start(panel, trainer=partial(TrainerWorker, Training(Steps, max_staleness=1), plan))
    client, producer = ParameterClient(joined[1], "policy"), SampleProducer(*joined, "train", credit=100)
    client.first(lambda: False)
    lineage, number = client.version
    assert (lineage > 0, number) == (True, 1)
    with SAMPLER() as sampler:
        sampler.initialize(plan.agent(), seed=0)
        samples, infos = sampler.obtain_samples(0)
        foreign = lineage + 1, 1
        for version in (foreign, foreign, (lineage, 2), (lineage, -1), (lineage, 1), (lineage, 1)):
            assert producer.put(piece_of(samples.numpy().copy(), infos, version, "test"), 10)
    wait_until(lambda: panel.stats()["trainer/0"].get("version") == 3)
    assert panel.stats()["trainer/0"]["stale"] == 4, "two foreign ones, a newer one, an old one"


def pieces_of(actor: str, sampler: Any, plan: Any, version: tuple[int, int]) -> Any:
    with sampler() as made:
        made.initialize(plan.agent(), seed=0)
        samples, infos = made.obtain_samples(0)
        return piece_of(samples.numpy().copy(), infos, version, actor)


UNFIT: dict[str, Callable[[Any], Any]] = {
    "no dict": lambda piece: "nonsense",
    "no samples": lambda piece: {**piece, "samples": {}},
    "a list": lambda piece: {**piece, "samples": {**piece["samples"], "env": [1]}},
    "a field less": lambda piece: {**piece, "samples": {**piece["samples"], "agent": {}}},
    "a number": lambda piece: {**piece, "samples": {**piece["samples"], "agent": {"action": 3}}},
    "policies": lambda piece: {**piece, "policies": ["main"]},
    "infos": lambda piece: {**piece, "infos": {"Return": np.zeros((2, 2))}},
    "version": lambda piece: {**piece, "version": "1"},
    "large version": lambda piece: {**piece, "version": 2**63},
    "actor": lambda piece: {**piece, "actor": None},
}


@pytest.mark.parametrize("is_first", [False, True])
def test_pieces_that_do_not_fit_those_of_the_run_are_dropped_and_their_actors_end(
    panel: ControlPanel, joined: Any, is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The actor with the lowest number is right, whoever comes first. The trainer goes on."""
    plan = plan_of()
    start(panel, trainer=partial(TrainerWorker, Training(Steps, batch=2), plan))
    client = ParameterClient(joined[1], "policy")
    client.first(lambda: False)
    good = pieces_of("actor/0", SAMPLER, plan, client.version)
    longer = partial(SerialSampler, "CartPole-v1", batch_T=16, batch_B=4)
    other = partial(SerialSampler, "MountainCar-v0", batch_T=8, batch_B=4)
    makers: dict[str, Any] = {"longer": longer, "other": other}
    unfit = {
        name: pieces_of("actor/1", sampler, plan_of() if name == "longer" else other_plan(other), client.version)
        for name, sampler in makers.items()
    }
    unfit |= {name: change(good) for name, change in UNFIT.items()}

    def put(piece: Any) -> SampleProducer:
        producer = SampleProducer(*joined, "train", credit=100)
        assert producer.put(piece, 10)
        return producer

    def n_unfit() -> int:
        return int(panel.stats()["trainer/0"].get("unfit", 0))

    if is_first:  # one that waits for a second piece is dropped as soon as the right one comes
        put(unfit.pop("longer"))
    put(good)
    wait_until(lambda: n_unfit() == is_first)
    for piece in unfit.values():
        with pytest.raises(RequestError, match=r"does not fit those of actor/0|is no piece of samples"):
            put(piece).flush(10)
    wait_until(lambda: n_unfit() == len(unfit) + is_first)
    assert panel.stats()["trainer/0"]["version"] == 1
    put(good)
    wait_until(lambda: panel.stats()["trainer/0"]["version"] == 2)
    said = [record.getMessage() for record in caplog.records if "a piece of actor/1" in record.getMessage()]
    assert len(said) == (1 if is_first else 2)
    assert panel.get_worker_status("trainer/0") is Status.RUNNING


def other_plan(sampler: Any) -> Any:
    return Experiment("other", RandomAgent, Actors(1, sampler), Training(Steps), seed=0).plan()


def test_a_piece_is_as_old_as_the_oldest_parameters_that_have_acted_in_it() -> None:
    class Streamed(RandomAgent):
        number = 10

        def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
            self.number += 1
            version = np.full((len(prev_reward), 2), (7, self.number))
            return AgentStep(super().step(observation, prev_action, prev_reward).action, {"stream_version": version})

    with SAMPLER() as sampler:
        sampler.initialize(Streamed(), seed=0)
        samples, infos = sampler.obtain_samples(0)
        first, last = samples.agent.agent_info.stream_version[[0, -1], 0, 1].tolist()
        piece = piece_of(samples.numpy().copy(), infos, (0, 0), "test")
    assert first < last
    assert (piece["lineage"], piece["version"]) == (7, first)


@pytest.mark.parametrize("inference", [None, "policy"])
def test_nobody_acts_before_the_first_parameters_and_schedules_follow_the_version(
    panel: ControlPanel, joined: Any, inference: str | None
) -> None:
    plan = plan_of(ReportsItr)

    class Trained(Publisher):
        def _configure(self) -> None:
            super()._configure()
            self.register_handler("publish", self.publish)

        def publish(self, version: int) -> None:
            super().publish(version + 10)

    consumer = SampleConsumer(*joined, "train", "test")
    policy: dict[str, Any] = {"policy": partial(PolicyWorker, Policies(1), plan)} if inference else {}
    start(panel, trainer=partial(Trained, plan), **policy)
    start(panel, actor=partial(ActorWorker, Actors(1, SAMPLER, inference), plan))
    versions: list[int] = []

    def take() -> int:
        agent = consumer.get(20)["samples"]["agent"]
        assert (agent["agent_info"]["itr"] == agent["policy_version"] - 1).all()
        versions.extend(np.unique(agent["policy_version"]).tolist())
        return versions[-1]

    assert take() == 11
    panel.request("trainer/0", "publish", version=30)
    wait_until(lambda: take() == 40, 20)
    assert set(versions) == {11, 40}


def test_a_malformed_request_fails_alone(panel: ControlPanel, joined: Any) -> None:
    start(panel, trainer=partial(Publisher, plan_of()), policy=partial(PolicyWorker, Policies(1), plan_of()))
    wire, names = joined
    good: dict[str, Any] = {
        "kind": "step",
        "env_ranks": np.arange(2),
        "starts": np.ones(2, np.bool_),
        "observation": np.zeros((2, 4), np.float32),
        "prev_action": np.zeros(2, np.int64),
        "prev_reward": np.zeros(2, np.float32),
    }
    bad: list[Any] = [
        *({key: value for key, value in good.items() if key != name} for name in good),
        {**good, "kind": "jump"},
        {**good, "env_ranks": np.array([0, 99])},
        {**good, "env_ranks": np.array([-1, 0])},
        {**good, "env_ranks": np.array([1, 1])},
        {**good, "env_ranks": 5},
        {**good, "starts": np.ones(3, np.bool_)},
        {**good, "observation": np.zeros((2, 5), np.float32)},
        {**good, "observation": {"x": np.zeros((2, 4), np.float32)}},
        {**good, "prev_action": np.zeros(2)},
        {**good, "prev_reward": None},
    ]
    client = InferenceClient(wire, names, "policy", "actor/0")
    assert client.ask(good)["action"].shape == (2,)
    peer = names.reach(names.get("policies/policy/policy/0"))
    session = {"session": "x", "generation": 0}
    asked = [(peer.ask({**message, **session}, 10), peer.ask({**good, **session}, 10)) for message in bad]
    asked.append((peer.ask("nonsense", 10), peer.ask({**good, **session, "generation": 7}, 10)))
    for refused, answered in asked:
        with pytest.raises(RequestError, match="this is no request to a policy worker"):
            refused.result()
        assert answered.result()["action"].shape == (2,)
    assert panel.get_worker_status("policy/0") is Status.RUNNING


def test_a_replaced_actor_and_another_policy_worker_have_new_random_streams(panel: ControlPanel, joined: Any) -> None:
    """And they are those of an agent inside the actor: of SeedSequence, with the generation."""
    plan = plan_of()
    start(panel, trainer=partial(Publisher, plan), policy=partial(PolicyWorker, Policies(1), plan))
    _, names = joined
    actions = {}
    for generation in (0, 1, 2):
        own = panel.connection.wire()  # each is a process of its own
        client = InferenceClient(own, names, "policy", f"actor/{generation}", generation=generation)
        for acting in (StreamAgent(client, RandomAgent()), plan.agent()):
            with SAMPLER() as sampler:
                sampler.generation = client.generation << 16
                sampler.initialize(acting, seed=plan.seed, world_size=2)
                actions[generation, type(acting)] = sampler.obtain_samples(0)[0].numpy().copy().agent.action
        own.close()
        assert (actions[generation, StreamAgent] == actions[generation, RandomAgent]).all()
    for one, other in ((0, 1), (1, 2)):
        assert (actions[one, RandomAgent] != actions[other, RandomAgent]).any()


@pytest.mark.parametrize(
    ("n_actors", "n_trainers", "batch", "max_staleness"), [(1, 1, 3, 0), (3, 1, 2, 1), (1, 2, 2, 0), (2, 2, 3, 0)]
)
def test_actors_are_held_back_and_nobody_waits_for_ever(
    panel: ControlPanel, n_actors: int, n_trainers: int, batch: int, max_staleness: int
) -> None:
    class Learns(Steps):
        def step(self, batch: Batch) -> None:
            time.sleep(0.02)

    class Rank(TrainerWorker):
        """One of several trainers: all are of one lineage."""

        def _staleness(self, piece: Any) -> float:
            return super()._staleness(piece) if n_trainers == 1 else 0.0

    plan, training = plan_of(), Training(Learns, batch=batch, max_staleness=max_staleness)
    makers = Experiment("test", RandomAgent, Actors(n_actors, SAMPLER), training, seed=0).makers(plan)
    trainers = {f"trainer{i}": partial(Rank, training, plan) for i in range(n_trainers)}
    start(panel, **trainers, **{f"actor{i}": makers[f"actor/{i}"] for i in range(n_actors)})
    wait_until(lambda: all(panel.stats()[f"{name}/0"].get("version", 0) >= scaled(30, 12) for name in trainers), 60)
    if n_trainers == 1:
        figures = panel.stats()["trainer0/0"]
        n_trained = batch * (figures["version"] - 1)
        assert figures["stale"] <= (n_trained + figures["stale"]) / 4, "few pieces were sampled in vain"


def test_paused_means_that_no_poll_runs_and_the_figures_are_of_the_last_one(panel: ControlPanel) -> None:
    go = threading.Event()

    class Slow(Worker):
        n = 0

        def _poll(self) -> PollResult:
            assert go.wait(20)
            self.n += 1
            return PollResult(sample_count=1)

        def _stats(self) -> dict[str, float]:
            return {"n": self.n}

    worker = Slow()
    start(panel, slow=lambda: worker)
    wait_until(lambda: "in _poll" in panel.request("slow/0", "stacks"))
    assert panel.request("slow/0", "pause") == "PAUSING"
    wait_until(lambda: panel.stats()["slow/0"]["status"] == "PAUSING")
    go.set()
    wait_until(lambda: panel.stats()["slow/0"]["status"] == "PAUSED")
    assert (panel.stats()["slow/0"]["n"], panel.stats()["slow/0"]["polls"], worker.n) == (1, 1, 1)


# ---- recurrent state is lost with the policy worker that had it --------------------------


def unexpected_starts(pieces: list[Any], model: Any) -> list[int]:
    """The pieces in which new episodes begin, although those of the piece before have not ended. Checks all rows: each
    observation and recorded state follows from the row before, also across pieces."""
    state = torch.zeros(4, 8, dtype=torch.float64)
    breaks, before = [], pieces[0]["samples"]["env"]
    for i, piece in enumerate(pieces):
        env, recorded = piece["samples"]["env"], piece["samples"]["agent"]["agent_info"]["prev_rnn_state"]
        starts = env["prev_done"][0]
        if i and (starts & ~before["done"][-1]).any():
            assert starts.all()
            breaks.append(i)
        if i:
            assert (env["observation"][0] == before["bootstrap_obs"])[~starts].all()
        assert env["valid"].all()
        for t in range(len(env["reward"])):
            state = torch.where(torch.from_numpy(env["prev_done"][t].copy())[:, None], 0.0, state)
            np.testing.assert_allclose(recorded[t], state, atol=1e-5)
            with torch.no_grad():
                state = model(torch.from_numpy(env["observation"][t].astype(np.float64)), None, None, state)[2]
        before = env
    return breaks


@pytest.mark.parametrize("make", scaled(MAKES, ("local",)))
def test_episodes_of_a_recurrent_agent_end_with_its_policy_worker(make: str, request: pytest.FixtureRequest) -> None:
    need(make, request)
    plan = plan_of(recurrent_agent)
    with ControlPanel("test", wire=make) as panel:
        start(panel, publisher=partial(Publisher, plan))
        policies = panel.launch(partial(PolicyWorker, Policies(1), plan), 2, name="policy")
        panel.connect(policies, timeout=60)
        acting = Actors(1, SAMPLER, inference="policy")
        actor = LaunchedThread(lambda: ActorWorker(acting, plan), panel.connection, "actor/0")
        wire = panel.connection.wire()
        consumer = SampleConsumer(wire, NameClient(wire, panel.connection.address), "train", "test")
        panel.connect(["actor/0"])
        for name in (*policies, "actor/0"):  # to be configured, the actor needs a policy worker that runs
            panel.request(name, "configure")
            panel.request(name, "start")

        def n_truncated() -> int:
            return int(panel.stats(["actor/0"], timeout=10)["actor/0"].get("truncated", 0))

        pieces = [consumer.get(20) for _ in range(8)]
        assert n_truncated() == 0

        def n_rows(name: str) -> int:
            return int(panel.stats([name], timeout=10)[name].get("samples", 0))

        wait_until(lambda: any(map(n_rows, policies)))
        asked = max(policies, key=n_rows)
        if make == "local":
            panel.request(asked, "exit")
        else:
            os.kill(panel.pid(asked), signal.SIGKILL)
        while n_truncated() == 0:
            pieces.append(consumer.get(20))
        pieces += [consumer.get(20) for _ in range(8)]  # two may have waited
        assert n_truncated() == 4
        panel.request("actor/0", "exit")
        assert actor.wait(10)
        wire.close()
    assert len(unexpected_starts(pieces, plan.agent().model)) == 1
    assert any(piece["samples"]["env"]["prev_done"][1:].any() for piece in pieces), "some episodes end by themselves"


# ---- runs ----------------------------------------------------------------------------------


def test_a_failing_configure_during_a_restart_is_tried_again_and_versions_do_not_fall(tmp_path: Path) -> None:
    calls, versions = Counter[str](), list[int]()

    def fail_at(what: str, *numbers: int) -> None:
        """Raise in these calls of `what`."""
        calls[what] += 1
        if calls[what] in numbers:
            raise RuntimeError(f"{what} {calls[what]}")

    class Trainer(Steps):
        def step(self, batch: Batch) -> None:
            fail_at("step", 6)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            fail_at("load", 1)  # the first restart fails too

    def make_sampler() -> SerialSampler:
        fail_at("sampler", 4)  # 1: the example; 2, 3: the actors
        return SAMPLER()

    def is_over(state: RunState) -> bool:
        versions.append(state.version)
        return state.version >= 12 and run.restarts["trainer/0"] == 2

    training = Training(Trainer, batch=2, max_staleness=4, checkpoint=tmp_path / "trainer.pt", save_every=1)
    made = Experiment("test", RandomAgent, Actors(2, make_sampler), training, seed=0)
    with made.run(max_restarts=3) as run:
        assert run.wait(is_over, timeout=60).version >= 12
        assert run.restarts == {"trainer/0": 2, "actor/0": 0, "actor/1": 0}
    assert versions == sorted(versions)
    assert min(versions) >= 1
