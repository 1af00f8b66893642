"""What does not go together: the one table that the errors come from. docs/samplers.md has the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.errors import ConfigError

TURNS, BATCHED = "games in turns", "batched environments"
JOINT, RENEWAL, BATCH_STATE = "a joint agent", 'on_game_failure="renew"', 'record_state="batch"'
SEEDED, PLAN, INFO_MASK = "seed_episodes=True", "episode_plan", 'mask_key="info.NAME"'
UNRECORDED = "a policy that is not recorded (record)"
POLICIES, LAG, WRITTEN_REPLAY = "several policies", "AsyncSampler(lag=1)", "a replay into which workers write"
SERVER = 'an inference server (GpuSampler, AlternatingSampler, AsyncSampler(server="process"))'
EPISODE, STATES = "episode()", "state_dict() and load_state_dict()"
SERVER_PROCESS = 'server="process" (with state_dict())'
ASYNC, RAY = "AsyncSampler", "RaySampler"
JOINT_VALUES = "a joint agent's bootstrap_value=True"
RECURRENT, NO_FINAL_OBS = "a recurrent agent", "record_final_obs=False"
CHOSEN, IN_STEP, NEW_CHOOSER = "policy_of with game or rng", "agents that all act in each step", "set_policy_of"
RESTART, NODE_RESTART = 'on_worker_failure="restart"', 'on_node_failure="restart"'
FIRST_READY, WAITING = "min_ready or max_wait", "WaitResetCollector"
ALTERNATING = "AlternatingSampler"
MIXED_BATCHES = 'AsyncSampler(server="process") with min_ready or max_wait, without lag'


class Row(NamedTuple):
    """Each of the `features` is refused with each of the `others`."""

    features: tuple[str, ...]
    others: tuple[str, ...]
    reason: str
    instead: str


TABLE = (
    Row(
        (TURNS,),
        (JOINT,),
        "a joint agent acts for all agents of a game together, but in turns one agent decides at a time",
        "Use an agent that is not joint",
    ),
    Row(
        (PLAN, SEEDED),
        (BATCHED, TURNS, UNRECORDED, RAY),
        "the log of an episode has the recorded actions of all agents in each step, in memory of this machine, and "
        "each episode needs a reset with a seed of its own",
        "Leave it out: a SerialSampler with the same seed makes the same episodes again",
    ),
    Row(
        (BATCHED,),
        (RENEWAL, INFO_MASK, WAITING),
        "one row of it cannot be built again, be wrapped, or wait for its reset without the others",
        'Use single environments. ResetCollector works, and a mask in the observations: mask_key="observation.NAME"',
    ),
    Row(
        (POLICIES,),
        (SERVER, LAG, WRITTEN_REPLAY),
        "each of these serves one agent",
        "Use a ParallelSampler, or an AsyncSampler without them, and append batch.NAME to a replay of each policy",
    ),
    Row(
        (EPISODE, STATES),
        (ASYNC, RAY, SERVER_PROCESS),
        "the workers are ahead of the batch that you have, or the state is in a process that cannot be asked for it",
        'Use a SerialSampler, a ParallelSampler, or server="caller"',
    ),
    Row(
        (JOINT_VALUES,),
        (RECURRENT, SERVER, NO_FINAL_OBS),
        "the value at the end of an episode is that of all agents together, and the worker computes it from final_obs",
        "Leave one of them out",
    ),
    Row(
        (CHOSEN,),
        (IN_STEP,),
        "there a seat keeps its policy for the whole run",
        "Let policy_of depend on agent_id and env_rank only, or use games in turns (AECEnv)",
    ),
    Row(
        (NEW_CHOOSER,),
        (RESTART, NODE_RESTART),
        "what is built again would begin with the first policy_of",
        'Use "raise" in place of "restart"',
    ),
    Row(
        (BATCH_STATE,),
        (MIXED_BATCHES,),
        "the environments do not begin a batch together",
        'Make the agent with record_state="step", or give lag=1',
    ),
    Row(
        (ALTERNATING,),
        (FIRST_READY,),
        "it acts for one half of the workers, then for the other",
        "Use a GpuSampler",
    ),
)
NAMES = frozenset(name for row in TABLE for name in (*row.features, *row.others))


def refuse(asked: Mapping[str, object]) -> None:
    """Raise `ConfigError` if two things are asked for that do not go together. `asked` has for names of the table
    whether each is asked for."""
    assert asked.keys() <= NAMES, asked.keys() - NAMES
    for row in TABLE:
        for feature in row.features:
            for other in row.others:
                if asked.get(feature) and asked.get(other):
                    raise ConfigError(f"{feature} and {other} do not go together: {row.reason}. {row.instead}")


def as_table() -> str:
    """The table of the documentation, in Markdown."""

    def code(names: tuple[str, ...]) -> str:
        return ", ".join(name if " " in name else f"`{name}`" for name in names)

    head = "| this | does not go together with | because | do this |\n| --- | --- | --- | --- |\n"
    rows = [f"| {code(row.features)} | {code(row.others)} | {row.reason} | {row.instead} |\n" for row in TABLE]
    return head + "".join(rows)
