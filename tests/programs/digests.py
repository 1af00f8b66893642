"""Prints a digest of what each kind of run gives. Argument: a list of [kind, start method], as JSON."""

import hashlib
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from penstock import AlternatingSampler, AsyncSampler, GpuSampler, ParallelSampler, SerialSampler, evaluate
from penstock.envs.toy import ScriptedGame
from penstock.learning import Replay
from penstock.vector import Sb3VecEnv, ShmVectorEnv

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.evaluation.reach import TASKS, Reach, vla
from tests.samplers.digest_cases import Stateful, Walk, rows_of, update_tree
from tests.support import EVALUATING, collect_with
from tests.toy_games import TurnGame


def sampled(cls: Any, method: Any, env_fn: Any = Walk, **options: Any) -> Any:
    """Batches, trajectories and evaluations."""
    how: dict[str, Any] = {} if cls is SerialSampler else {"n_workers": 2, "start_method": method}
    found = collect_with(cls, env_fn, Stateful(), **how, **EVALUATING, **options)
    return [({} if batch is None else dict(batch.leaves()), infos) for batch, infos in found]


def stepped(envs: Any) -> Any:
    """What a vector environment returns."""
    rng = np.random.default_rng(0)
    with envs:
        return [envs.reset(seed=5), *(envs.step(rng.integers(3, size=4)) for _ in range(80))]


def stepped_by_sb3(method: Any) -> Any:
    envs, rng = Sb3VecEnv([Walk] * 4, method, n_workers=2), np.random.default_rng(0)
    try:
        envs.seed(5)
        return [envs.reset(), *(envs.step(rng.integers(3, size=4)) for _ in range(80))]
    finally:
        envs.close()


def drawn(method: Any) -> Any:
    """What a replay in a file gives, which a sampler fills."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(100, 2, file=os.path.join(folder, "steps"), max_truncations=99, seed=0)
        with ParallelSampler(Walk, batch_T=9, batch_B=4, n_workers=2, start_method=method) as sampler:
            sampler.initialize(Stateful(), seed=7)
            for itr in range(6):
                replay.append(sampler.obtain_samples(itr)[0])
                found.append({name: leaf.numpy() for name, leaf in replay.sample(16).leaves()})
    return found


def evaluated(method: Any) -> Any:
    given: Any = {"success": "is_success", "tasks": TASKS, "episodes": 2, "n_workers": 2, "start_method": method}
    return [vars(episode) for episode in evaluate(vla, Reach, **given).episodes]


KINDS: Any = {
    "SerialSampler": partial(sampled, SerialSampler),
    "ParallelSampler": partial(sampled, ParallelSampler),
    "GpuSampler": partial(sampled, GpuSampler),
    "GpuSampler, server process": partial(sampled, GpuSampler, server="process"),
    "AlternatingSampler": partial(sampled, AlternatingSampler),
    "AsyncSampler": partial(sampled, AsyncSampler, n_slots=2),
    "AsyncSampler, server process": partial(sampled, AsyncSampler, n_slots=2, server="process"),
    "agents in lock-step": partial(sampled, ParallelSampler, env_fn=partial(ScriptedGame, 4)),
    "agents in turns": partial(sampled, ParallelSampler, env_fn=partial(TurnGame, 3)),
    "batched": partial(sampled, ParallelSampler, env_fn=rows_of(AutoresetMode.SAME_STEP), batched=True),
    "ShmVectorEnv": lambda method: stepped(ShmVectorEnv([Walk] * 4, n_workers=2, context=method)),
    "Sb3VecEnv": stepped_by_sb3,
    "replay in a file": drawn,
    "evaluate": evaluated,
}

if __name__ == "__main__":
    for kind, method in json.loads(sys.argv[1]):
        digest = hashlib.sha256()
        update_tree(digest, KINDS[kind](method))
        print(f"{kind}, {method}: {digest.hexdigest()}", flush=True)
