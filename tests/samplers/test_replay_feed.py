"""AsyncSampler with a replay: the workers write into it, and the ratio holds both sides."""

from __future__ import annotations

import itertools
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation, TransformObservation
from torch import Tensor, nn

from penstock import (
    AsyncSampler,
    ConfigError,
    NamedArrays,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    SamplerState,
    SamplerStateError,
    WorkerError,
)
from penstock.envs import CountingEnv, SlowEnv
from penstock.learning import Frames, Prioritized, Ratio, Replay, Sequences, feed
from penstock.samplers import Ahead

from ..learning.streams import storage_of
from ..scale import pairs, scaled
from ..support import assert_same
from ..toy_games import Published
from .async_support import Delayed, TabularAgent
from .started import check_refused, started

T, B = 4, 5
LENGTH = 5

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]
SERVERS = (None, "process")


def begin(replay: Replay, env_fn: Any = CountingEnv, ratio: Ratio | None = None, agent: Any = None, **more: Any) -> Any:
    options = {"batch_T": T, "batch_B": B, "n_workers": 2, "seed": 1, **more}
    return started(env_fn, agent, AsyncSampler, replay=replay, ratio=ratio, **options)


def check_transitions(replay: Replay, batch: Any, truncates: bool = False) -> None:
    """The environment is a `CountingEnv`."""
    count, discount = batch.observation[:, 1].int(), torch.tensor(replay.discount, dtype=torch.float64)
    steps = torch.minimum(torch.full_like(count, replay.n_step), LENGTH - count)
    return_ = torch.zeros(len(count), dtype=torch.float64)
    for k in range(replay.n_step):
        return_ += torch.where(k < steps, discount**k * (count + 1 + k), 0.0)
    assert torch.equal(batch.return_, return_.float())
    terminates = (count + steps == LENGTH) & (not truncates)
    assert torch.equal(batch.discount, torch.where(terminates, 0.0, (discount**steps).float()))
    after = batch.observation + torch.stack([torch.zeros_like(steps), steps], -1)
    after[terminates] = 0
    assert torch.equal(batch.next_observation, after)


# ---- what is in the replay -----------------------------------------------------------------------


@pytest.mark.parametrize(("server", "truncates"), pairs(SERVERS, [False, True]))
def test_the_replay_holds_what_the_environments_did(server: Any, truncates: bool, tmp_path: Path) -> None:
    """Evaluations, calls and pauses change nothing in it."""
    file = tmp_path / "steps" if truncates else None
    replay = Replay(B * 80, 3, 1.0, file=file, max_truncations=B * 40, seed=0)
    options: dict[str, Any] = {"eval_n_envs": 2, "eval_max_steps": 40, "server": server}
    with begin(replay, partial(CountingEnv, truncate=truncates), Ratio(4), **options) as sampler:
        for itr in range(60):
            batch = replay.sample(64)
            check_transitions(replay, batch, truncates)
            # One stream for each column: nothing is missing and nothing comes twice.
            step, b = batch.index // B, batch.index % B
            assert torch.equal(batch.observation[:, 0] * LENGTH + batch.observation[:, 1], step.float())
            rows = replay.contents.rows()
            assert rows.valid.all()
            assert (rows.reward == rows.observation[..., 1] + 1).all()
            newest = replay.contents.index[-9:]
            assert replay.contents.read(newest).index.tolist() == newest.tolist()
            assert sampler.state is SamplerState.RUNNING
            if itr % 6 == 5:
                assert len(sampler.evaluate_agent(itr)) == 2 * (20 // LENGTH)
                assert sampler.get_attr("length") == [LENGTH] * B
            if itr % 18 == 17:
                sampler.pause()
                sampler.resume()
        infos = sampler.take_traj_infos()
        assert {info.Length for info in infos} == {LENGTH}
        assert sampler.metrics()["train/Length_mean"] == LENGTH
        assert set(b.tolist()) == set(range(B))
    assert replay.n_steps > B * 80, "the ring has wrapped"


def test_the_same_steps_as_with_append() -> None:
    replay, other = Replay(B * 80, seed=0), Replay(B * 80, seed=0)
    with begin(replay, ratio=Ratio(1, min_steps=B * 20)) as sampler:
        replay.sample(1)
        sampler.pause()
    with started(CountingEnv, batch_T=T, batch_B=B, seed=1) as serial:
        while other.n_steps < replay.n_steps:
            other.append(serial.obtain_samples(0)[0])
    assert len(replay.contents.index) > 50
    found, wanted = (each.contents.read(each.contents.index) for each in (replay, other))
    assert_same(found, wanted)


def test_sequences_with_stored_states() -> None:
    class Memory(nn.Module):
        state_shape = (2,)

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, observation: Tensor, action: Tensor, reward: Tensor, state: Tensor) -> tuple[Tensor, ...]:
            return self.layer(observation), observation[:, 0], observation + 0.25

    replay = Replay(B * 64, sequences=Sequences(6, 2, 2), prioritized=Prioritized(), seed=0)
    with begin(replay, ratio=Ratio(2), agent=RecurrentCategoricalPgAgent(Memory)):
        for _ in range(50):
            batch = replay.sample(16)
            replay.update(batch.index, torch.rand(16))
            assert (batch.index // B % 2 == 0).all()
            # The state is made of the observation before. Where an episode begins, it is 0.
            before = batch.observation[0] - torch.tensor([0.0, 1.0]) + 0.25
            assert torch.equal(batch.state, torch.where(batch.prev_done[0][:, None], 0.0, before))
            moved = (batch.observation[1:] - batch.observation[:-1]).sum(-1)
            assert (moved[~batch.prev_done[1:]] == 1).all()


def test_frames_and_what_is_no_stack() -> None:
    def stacked() -> Any:
        return FrameStackObservation(CountingEnv(), 3)

    def backwards() -> Any:
        return TransformObservation(stacked(), lambda stack: stack[::-1].copy(), None)

    replay = Replay(B * 60, 2, 1.0, frames=Frames(3), seed=0)
    with begin(replay, stacked, Ratio(1)):
        for _ in range(20):
            oldest, _, newest = replay.sample(16).observation[..., 1].unbind(1)
            assert torch.equal(oldest, (newest - 2).clamp(min=0))
    replay = Replay(B * 60, 2, 1.0, frames=Frames(3))
    with begin(replay, backwards, Ratio(1)), pytest.raises(WorkerError, match="is no stack"):
        replay.sample(16)


def test_policy_versions_and_newer_than() -> None:
    agent, replay = Published(), Replay(B * 60, seed=0)
    with begin(replay, ratio=Ratio(4), agent=agent) as sampler:
        for itr in itertools.count():
            replay.sample(32)
            agent.publish()
            # If the machine is busy, the workers may be in step with the learner for some time.
            if itr >= 40 and sampler.stats().lag.max > 0:  # type: ignore[union-attr]
                break
        sampler.pause()
    versions = replay.contents.rows().policy_version
    assert (np.diff(versions, axis=0) >= 0).all()
    newest = int(versions[:-1].max())  # of the last row, no window is complete
    batch = replay.sample(50, newer_than=newest - 1)
    assert (versions.reshape(-1)[batch.index - B * replay.contents.steps.start] == newest).all()
    assert (batch.action == (newest - 1) % 3).all()  # version v acts with the number v - 1


# ---- the ratio -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("env_seconds", "learn_seconds"), [(0.002, 0.0), (0.0, 0.004), (0.0005, 0.001)])
def test_the_draws_stay_within_the_slack(env_seconds: float, learn_seconds: float) -> None:
    n, per_step, min_steps = 16, 2.0, 2 * T * B
    replay = Replay(B * 200, seed=0)
    slack = per_step * T * B + n
    with begin(replay, partial(SlowEnv, env_seconds), Ratio(per_step, min_steps=min_steps)) as sampler:
        for itr in range(60):
            replay.sample(n)
            ahead = replay.n_drawn - (replay.n_steps - min_steps) * per_step
            assert -slack - per_step * T * B <= ahead <= slack, itr  # a batch may have been completed since
            time.sleep(learn_seconds)
        sampler.pause()
        assert replay.n_drawn - (replay.n_steps - min_steps) * per_step >= -slack


def test_a_batch_that_becomes_complete_while_the_learner_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its two looks, all batches become complete, and the ratio allows no further one."""
    take = Ahead.pass_on

    def take_all(ahead: Ahead, run: Any, feed: Any, awaited: int = 0) -> None:
        if ahead.open:
            run.pool.wait_for(ahead.open[-1].opening, "the test")
        take(ahead, run, feed, awaited)

    monkeypatch.setattr(Ahead, "pass_on", take_all)
    replay = Replay(B * 400, seed=0)
    with begin(replay, ratio=Ratio(1.0)):
        for _ in range(50):
            replay.sample(32)


def test_without_a_ratio_the_workers_continue_with_each_draw() -> None:
    replay = Replay(B * 400, seed=0)
    with begin(replay) as sampler:
        for _ in range(5):
            replay.sample(1000)
            sampler.pause()
            sampler.resume()
        assert replay.n_steps >= 5 * 2 * T * B


# ---- other calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [10, 10_000])
def test_trajectories_arrive_once_or_are_dropped_and_counted(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_MOST_INFOS", most)
    replay = Replay(B * 80, seed=0)
    with begin(replay, ratio=Ratio(1)) as sampler:
        taken = []
        for itr in range(100):
            replay.sample(40)
            if itr % 7 == 0:
                taken.append(len(sampler.take_traj_infos()))
        sampler.pause()
        taken.append(len(sampler.take_traj_infos()))
        n_dropped = sampler.stats().dropped_trajectories
        assert sum(taken) + n_dropped == replay.n_steps // B // LENGTH * B
        assert max(taken) == 10 if most == 10 else n_dropped == 0


def test_a_paused_sampler_and_one_that_was_shut_down() -> None:
    replay = Replay(B * 80, seed=0)
    with begin(replay, ratio=Ratio(1)) as sampler:
        replay.sample(40)
        sampler.pause()
        with pytest.raises(SamplerStateError, match=r"paused.*Call resume\(\) first"):
            while True:
                replay.sample(40)
        sampler.resume()
        replay.sample(40)
    assert sampler.state is SamplerState.CLOSED
    for _ in range(10):
        check_transitions(replay, replay.sample(40))  # it keeps what it has


@pytest.mark.parametrize(("options", "truncates"), pairs([{}, {"prioritized": Prioritized()}], [False, True]), ids=str)
def test_save_while_the_workers_run_and_go_on_with_another_sampler(
    tmp_path: Path, options: dict[str, Any], truncates: bool
) -> None:
    env_fn = partial(CountingEnv, truncate=truncates)
    replay = Replay(B * 60, 2, 1.0, **options, max_truncations=B * 30, seed=0)
    with begin(replay, env_fn, Ratio(2), n_workers=3) as sampler:
        for _ in range(20):
            replay.sample(40)
        replay.save(tmp_path)
        assert sampler.state is SamplerState.RUNNING
        sampler.pause()
    loaded = Replay.load(tmp_path)
    assert len(loaded) > 0
    draws = [loaded.sample(50) for _ in range(8)]
    for batch in draws:
        check_transitions(loaded, batch, truncates)
    loaded, n_steps = Replay.load(tmp_path), loaded.n_steps
    with begin(loaded, env_fn, Ratio(2)) as sampler:
        while loaded.n_steps < n_steps + 100 * B:
            batch = loaded.sample(50)
            check_transitions(loaded, batch, truncates)
        assert (batch.index >= n_steps).any()
    # The replay of a sampler that was shut down serves another one.
    with begin(loaded, env_fn, Ratio(2), n_workers=1) as sampler:
        for _ in range(20):
            check_transitions(loaded, loaded.sample(50), truncates)


def test_lost_final_observations_are_counted_and_warned_of() -> None:
    replay = Replay(B * 60, max_truncations=B, seed=0)
    with begin(replay, partial(CountingEnv, truncate=True), Ratio(2)):
        while not replay.n_without_final:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                check_transitions(replay, replay.sample(16), truncates=True)
        if not caught:  # lost after the draw had begun
            with pytest.warns(RuntimeWarning, match="max_truncations"):
                replay.sample(16)
        for _ in range(60):  # no further warning
            check_transitions(replay, replay.sample(16), truncates=True)


# ---- lag=1: the draws are the same whatever the timing, and those of a serial loop ---------------

N_DRAWS, BATCH = 60, 16
RATIO = Ratio(1.0, T * B, BATCH, min_steps=2 * T * B)


def make_replay(max_truncations: int) -> Replay:
    # The ring wraps several times.
    return Replay(B * 6 * T, 2, 0.9, Prioritized(), max_truncations=max_truncations, seed=3)


def learn(replay: Replay, agent: TabularAgent) -> dict[str, Any]:
    """Draw, and train in a way that the draw alone determines. Returns what was drawn."""
    batch = replay.sample(BATCH)
    replay.update(batch.index, batch.return_.abs() + 0.1)
    agent.weights = agent.weights + 0.01 * np.tanh(batch.observation.double().mean(0).numpy())
    agent.sync_shared_memory()
    return {name: leaf.numpy().tobytes() for name, leaf in batch.leaves()} | {"n_steps": replay.n_steps}


def asynchronous(max_truncations: int = 10_000, **options: Any) -> list[dict[str, Any]]:
    replay, agent = make_replay(max_truncations), TabularAgent()

    def env_fn() -> Any:
        return Delayed(CountingEnv(truncate=True), 0.004)

    with begin(replay, env_fn, RATIO, agent, lag=1, **options) as sampler:
        drawn = [learn(replay, agent) for _ in range(N_DRAWS)]
        sampler.take_traj_infos()
        assert replay.n_steps > 2 * replay.capacity
        if max_truncations < 10_000:
            assert replay.n_without_final
    return drawn


@pytest.fixture(scope="module")
def serial() -> list[dict[str, Any]]:
    """The next batch is collected as soon as the ratio allows it, and appended when no draw is possible without it."""
    replay, agent, drawn = make_replay(10_000), TabularAgent(), []
    waiting: NamedArrays | None = None

    def show() -> None:
        if replay.n_steps:
            ring = storage_of(replay).ring
            end = ring.written(0)
            ring.pin(end, end + (0 if waiting is None else T))

    env_fn = partial(CountingEnv, truncate=True)
    with started(env_fn, agent, batch_T=T, batch_B=B, seed=1, bootstrap_value=False) as sampler:
        for _ in range(N_DRAWS):
            while True:
                if waiting is None and RATIO.may_append(replay):
                    waiting = sampler.obtain_samples(0)[0].copy()
                    show()
                if RATIO.may_sample(replay):
                    break
                assert waiting is not None
                replay.append(waiting)
                waiting = None
                show()
            drawn.append(learn(replay, agent))
    return drawn


SETTINGS = scaled([(1, 2, None), (3, 4, None), (2, 3, "process")], [(3, 4, None), (2, 3, "process")])


@pytest.mark.parametrize(("n_workers", "n_slots", "server"), SETTINGS)
def test_the_draws_are_those_of_a_serial_loop(serial: Any, n_workers: int, n_slots: int, server: Any) -> None:
    drawn = asynchronous(n_workers=n_workers, n_slots=n_slots, server=server)
    for k, (found, expected) in enumerate(zip(drawn, serial, strict=True)):
        assert found == expected, f"draw {k}"


@pytest.mark.filterwarnings("ignore:more than max_truncations")
def test_the_draws_are_the_same_when_final_observations_are_lost() -> None:
    assert asynchronous(10) == asynchronous(10)


# ---- what is refused -----------------------------------------------------------------------------


def test_calls_that_do_not_fit() -> None:
    replay = Replay(B * 80, seed=0)
    options: dict[str, Any] = {"batch_T": T, "batch_B": B, "replay": replay}
    with AsyncSampler(CountingEnv, ratio=Ratio(1), **options) as sampler:
        sampler.initialize(RandomAgent(), seed=1)
        with pytest.raises(SamplerStateError, match=r"replay\.sample was called out of order.*start"):
            replay.sample(1)
        sampler.start()
        for call in (lambda: sampler.obtain_samples(0), sampler.poll_samples, lambda: sampler.hold().__enter__()):
            with pytest.raises(SamplerStateError, match=r"workers write into a replay: call replay\.sample"):
                call()
        samples = sampler.run.batches.views[0]
        with pytest.raises(ConfigError, match="workers of a sampler write into this replay"):
            replay.append(samples)
        check_refused(CountingEnv, "another sampler writes into this replay", cls=AsyncSampler, **options)
        replay.sample(10)
    with started(CountingEnv, cls=AsyncSampler) as without, pytest.raises(SamplerStateError, match="needs a replay"):
        without.take_traj_infos()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": Ratio(1)}, "ratio needs a replay"),
        ({"replay": Replay(1000), "lag": 1}, "give ratio"),
        ({"replay": 1000}, "must be a Replay, as docs/replay.md makes one"),
        ({"replay": Replay(1000), "ratio": 8}, "must be a penstock.learning.Ratio"),
        ({"replay": Replay(1000), "ratio": Ratio(1, 7)}, "batch_steps=7.*has 20"),
        ({"replay": Replay(1000), "ratio": Ratio(1, batch_size=10, slack=14.5)}, "of their sum, 15"),
        ({"replay": Replay(B * 12)}, "workers may be writing 12 others: raise capacity"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], message: str) -> None:
    check_refused(CountingEnv, message, cls=AsyncSampler, **{"batch_T": T, "batch_B": B, "n_workers": 2, **options})


def test_a_slack_that_is_too_small_for_the_draw() -> None:
    replay = Replay(B * 80)
    with begin(replay, ratio=Ratio(1, slack=29)), pytest.raises(ConfigError, match="sum, 30"):
        replay.sample(40)
