"""What the workers have sent: trajectory infos, also of evaluations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from penstock.buffers.object_pipe import ObjectMessage, Unreadable
from penstock.buffers.reports import in_one_line
from penstock.collectors import TrajInfo
from penstock.errors import ConfigError
from penstock.samplers.config import SamplerConfig
from penstock.workers.control import Command, ControlBlock
from penstock.workers.monitor import POLL_SECONDS

if TYPE_CHECKING:
    from penstock.samplers.run import Run

EVALUATION = -1  # in the place of a slot

#: Trajectories as the workers send them: records of `TrajInfo` itself, or one `ObjectMessage` for each other object.
Trajectories = list[Any]


def ends_of_trajectories(trajectories: Trajectories) -> list[tuple[int, int]]:
    """The last time step and the env_rank of each, in the order of the trajectory infos; with several agents, see
    `Seating.key` for the env_rank."""
    if trajectories and isinstance(trajectories[0], ObjectMessage):
        return [message[1:3] for message in trajectories]
    return [record[:2] for record in trajectories]


def in_order(trajectories: Trajectories) -> Trajectories:
    """`trajectories`, ordered by time step, then env_rank. The report of a game that was cut comes after the agents
    that have ended in its last step."""
    first = int(isinstance(trajectories[0], ObjectMessage))  # where the time step is

    def order(item: Any) -> tuple[int, int]:
        t, key = item[first : first + 2]
        return t, max(key, ~key)  # the key of a cut game is inverted, and that of a game is above those of its agents

    return sorted(trajectories, key=order)


def infos_from_messages(cls: type[TrajInfo], messages: Sequence[ObjectMessage]) -> list[TrajInfo]:
    """The trajectory infos of the user's class, in the order of the messages.

    Raises `ConfigError` naming the attribute that cannot be unpickled.
    """
    infos = []
    for _, t, env_rank, attributes in messages:
        if isinstance(attributes, Unreadable):
            raise ConfigError(
                f"the attribute {attributes.attribute!r} of a {cls.__name__} of env_rank {env_rank}, t={t}, cannot "
                f"be unpickled in the main process: {in_one_line(attributes.error)}"
            ) from attributes.error
        info = cls.restore(attributes)
        info.env_rank = env_rank
        infos.append(info)
    return infos


def evaluate(run: Run, itr: int) -> list[TrajInfo]:
    """See `Sampler.evaluate_agent`. No batch may run."""
    pool, config, control, during = run.pool, run.config, run.memory.control, f"evaluation, itr={itr}"
    run.schedule.pause(run, during)
    limit, until, interval = config.eval_max_trajectories, None, POLL_SECONDS
    if limit is not None:
        until, interval = partial(_stop_if_enough, control, len(run.plans), limit), _EVAL_POLL_SECONDS
    command, take = Command(itr, do_eval=True), partial(run.take_traj_infos, EVALUATION)
    run.metrics.evaluation = pool.run(command, during, take, until=until, poll_interval=interval)
    return run.metrics.evaluation


_EVAL_POLL_SECONDS = 0.005  # how soon an evaluation is ended once enough trajectories have finished


def _stop_if_enough(control: ControlBlock, n_workers: int, limit: int) -> Literal[False]:
    """End an evaluation when the workers have finished `limit` trajectories. The wait for them goes on."""
    if sum(control.n_results_by_rank(n_workers)) >= limit:
        control.stop_eval = True
    return False


def warn_if_unfinished(config: SamplerConfig, itr: int, n_finished: int) -> None:
    """Warn if an evaluation with `eval_episodes` has finished fewer. The warning names the line that called
    `evaluate_agent`."""
    wanted = config.eval_episodes
    if wanted is not None and n_finished < wanted:
        warnings.warn(
            f"evaluation, itr={itr}: {wanted - n_finished} of {wanted} episodes had not ended after "
            f"eval_max_steps={config.eval_max_steps} steps of all environments together",
            RuntimeWarning,
            stacklevel=3,
        )
