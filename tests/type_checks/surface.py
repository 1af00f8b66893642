"""What a type checker knows of penstock. `make check` runs mypy on this file, and pyright if it is installed; nobody
imports it.

Each line with `type: ignore` must be an error: an unused comment is one itself.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import assert_type

from penstock import (
    Agent,
    AgentStep,
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    FunctionAgent,
    GpuSampler,
    NamedArrays,
    ParallelSampler,
    Samples,
    SerialSampler,
    TrajInfo,
)
from penstock.buffers import AgentSamples, EnvSamples
from penstock.collectors import EvalCollector, ResetCollector
from penstock.columns import Columns, Events, Start
from penstock.envs import BatchedCartPole, SameStep, ScriptedGame
from penstock.learning import (
    Frames,
    Prioritized,
    Replay,
    ReplayBatch,
    SequenceBatch,
    Sequences,
    Steps,
    gae,
    n_step_return,
    vtrace,
)
from penstock.vector import ShmVectorEnv


def fields_of_a_batch(samples: Samples) -> None:
    assert_type(samples.env, EnvSamples)
    assert_type(samples.agent, AgentSamples)
    for tensor in (samples.env.reward, samples.env.prev_reward, samples.env.terminated, samples.env.truncated):
        assert_type(tensor, Tensor)
    for tensor in (samples.env.done, samples.env.prev_done, samples.env.valid):
        assert_type(tensor, Tensor)
    for tensor in (samples.agent.bootstrap_value, samples.agent.final_value, samples.agent.policy_version):
        assert_type(tensor, Tensor)
    assert_type(samples.env.env_info, NamedArrays)
    assert_type(samples.agent.agent_info.value, Any)
    assert_type(samples.targets.advantage, Any)
    samples.env.rewards  # type: ignore[attr-defined]
    samples.env.observationn  # type: ignore[attr-defined]
    samples.agent.actions  # type: ignore[attr-defined]
    samples.envs  # type: ignore[attr-defined]


def an_index_keeps_the_class(samples: Samples) -> None:
    assert_type(samples[3], Samples)
    assert_type(samples[:, 1:4], Samples)
    assert_type(samples.env[:, 3], EnvSamples)
    assert_type(samples.env[2:].reward, Tensor)
    assert_type(samples.copy(), Samples)
    assert_type(samples.flatten().agent, AgentSamples)


def parts_of_a_batch(samples: Samples) -> None:
    for part in samples.minibatches(4):
        assert_type(part.env.valid, Tensor)
    steps = samples.transitions(0.99)
    assert_type(steps.discount, Tensor)
    steps.next_obs  # type: ignore[attr-defined]
    samples.minibatches(n_minibatches=4)  # type: ignore[call-arg]
    samples.sequences("16")  # type: ignore[arg-type]


def targets(samples: Samples, log_ratio: Tensor, steps: Steps[Tensor]) -> None:
    assert_type(gae(samples, 0.99, 0.95), tuple[Tensor, Tensor])
    assert_type(n_step_return(steps, 3, 0.99), Tensor)
    assert_type(vtrace(samples, log_ratio, 0.99), tuple[Tensor, Tensor])
    gae(samples, 0.99)  # type: ignore[call-overload]
    gae(samples, discount=0.99, lam=0.95)  # type: ignore[call-overload]


def arguments(model: Any) -> None:
    with ParallelSampler("CartPole-v1", batch_T=4, batch_B=2) as sampler:
        assert_type(sampler, ParallelSampler)
        samples, infos = sampler.obtain_samples(0)
        assert_type(samples, Samples)
        assert_type(infos, list[TrajInfo])
        sampler.initialize(CategoricalPgAgent(model), sead=0)  # type: ignore[call-arg]
    ParallelSampler("CartPole-v1", batch_T=4, batch_B=2, num_workers=3)  # type: ignore[call-arg]
    ParallelSampler("CartPole-v1", batch_T=4, batch_B="2")  # type: ignore[arg-type]
    GpuSampler("CartPole-v1", batch_T=4, batch_B=2, typo=3)  # type: ignore[call-arg]
    GpuSampler("CartPole-v1", batch_T=4, batch_B=2, server="gpu")  # type: ignore[arg-type]
    AsyncSampler("CartPole-v1", batch_t=4, batch_B=2)  # type: ignore[call-arg]
    SerialSampler("CartPole-v1", batch_t=4, batch_B=2)  # type: ignore[call-arg]
    AlternatingSampler("CartPole-v1", batch_T=4, batch_B=2, min_ready=0.5)  # type: ignore[call-arg]
    AlternatingSampler("CartPole-v1", batch_B=2)  # type: ignore[call-arg]
    SerialSampler("CartPole-v1", batch_T=4, batch_B=2)
    GpuSampler("CartPole-v1", batch_T=4, batch_B=2, min_ready=0.5, server="process", debug=True)
    AlternatingSampler("CartPole-v1", batch_T=4, batch_B=2, overlap=False)
    CategoricalPgAgent(model, greedy=True)  # type: ignore[call-arg]
    FunctionAgent(AgentStep, params=3)  # type: ignore[call-arg]


def choices() -> None:
    ParallelSampler("CartPole-v1", batch_T=4, batch_B=2, on_worker_failure="restrat")  # type: ignore[arg-type]
    ParallelSampler("CartPole-v1", batch_T=4, batch_B=2, start_method="frok")  # type: ignore[arg-type]
    Frames(4, "rest")  # type: ignore[arg-type]
    ShmVectorEnv("CartPole-v1", num_envs=8, n_worker=2)  # type: ignore[arg-type]
    ShmVectorEnv(BatchedCartPole, num_envs="8")  # type: ignore[arg-type]
    ShmVectorEnv([ScriptedGame] * 2)
    ShmVectorEnv([int] * 2)  # type: ignore[arg-type]
    ShmVectorEnv(["CartPole-v1"] * 2, autoreset_mode="SAMESTEP")  # type: ignore[arg-type]
    ShmVectorEnv(["CartPole-v1"] * 2, context="frok")  # type: ignore[arg-type]


def replays(samples: Samples) -> None:
    replay = Replay(1000, prioritized=Prioritized())
    batch = replay.sample(3)
    assert_type(batch, ReplayBatch)
    assert_type(batch.weight, Tensor)
    assert_type(Replay(1000, sequences=Sequences(8)).sample(3), SequenceBatch)
    assert_type(replay.contents.read([3]), ReplayBatch)
    assert_type(Replay(1000, sequences=Sequences(8)).contents.read(batch.index), SequenceBatch)
    batch.retrun_  # type: ignore[attr-defined]
    replay.append(3)  # type: ignore[arg-type]
    replay.update("x", batch.weight)  # type: ignore[arg-type]
    replay.append(samples)
    replay.update(batch.index, batch.weight)


# ---- what users override, with the types of their own data ------------------------------------


Floats = npt.NDArray[np.float32]


class OwnAgent(Agent):
    def step(self, observation: dict[str, Floats], prev_action: Floats, prev_reward: Floats) -> AgentStep:
        return AgentStep(observation["position"])

    def value(self, observation: dict[str, Floats], prev_action: Floats, prev_reward: Floats) -> Floats:
        return prev_reward


class OwnCollector(ResetCollector):
    def act(self, t: int) -> None:
        assert_type(self.columns, Columns)
        super().act(t)

    def begin_episodes(self, events: Events, going: Sequence[int]) -> Sequence[Sequence[int]]:
        return self.columns.reset(events.over, [Start(seed=e, options={"level": 1}) for e in events.over])


class OwnEvaluation(EvalCollector):
    def begin_evaluation(self) -> None:
        super().begin_evaluation()

    def must_stop(self) -> bool:
        return super().must_stop() or self.progress.stop_eval


class OwnTrajInfo(TrajInfo):
    def terminate(self, final_observation: Floats) -> None: ...


class OwnEnv(SameStep):
    def advance(self, actions: Floats) -> tuple[Floats, Floats, Floats, Floats, dict[str, Any]]:
        return actions, actions, actions, actions, {}
