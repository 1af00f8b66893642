"""One worker's environments, as collectors use them: what steps and resets them, and what a step has done.

An *environment* is what is reset, seeded and counted: a single environment, a row of a batched one, or a game. A
*column* is a seat in it, and has cells in the batch. With one agent, both are the same. A column is *idle* if it does
not act in the next step: its environment is parked, its agent is absent, or the next step only resets it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.buffers.tree import map_tree
from penstock.envs.checks import Checks, check_row
from penstock.envs.infos import InfoWriter, element
from penstock.envs.rows import ColumnError, arrays_like, write_cell
from penstock.envs.state import StateKind, load_env
from penstock.errors import ConfigError, SpaceError, brief
from penstock.workers.control import Phase, Progress

if TYPE_CHECKING:
    from penstock.columns.log_writer import EpisodeLogWriter
    from penstock.columns.renewal import Renewals

#: Called for column b after each environment step: (b, observation acted on, action, reward,
#: terminated, truncated, info). Observation and action are copies made before the step.
StepHook = Callable[[int, Any, Any, Any, bool, bool, dict[str, Any]], None]
#: Called for column b at once with each info of a step or a reset that is not empty: (b, info). The environment may use
#: the same dict again. A batched environment gives the infos of all columns, with the first that it has reset, or 0.
InfoHook = Callable[[int, Any], None]

#: Called at once with each info of a step: what to keep of it, in memory that the environment does not have.
KeepInfo = Callable[[Mapping[str, Any]], Any]

#: The end of an episode in one column: (column, final observation, reward, terminated, truncated).
End = tuple[int, Any, float, bool, bool]


class Start(NamedTuple):
    """How an environment begins again: by a reset, or where a saved run has left it."""

    seed: int | None = None  #: for `env.reset`; None: not given
    options: dict[str, Any] | None = None  #: for `env.reset`; None: not given
    #: After the reset, make these steps: actions, and the rewards that they must bring, as `EpisodeLog.read` returns
    #: them. The episode is repeated.
    actions: tuple[Any, Any] | None = None
    #: In place of a reset, load this: what `penstock.envs.state.save_env` has returned, and what `Columns.save` has. A
    #: batched environment is loaded as a whole.
    state: tuple[StateKind, bytes, Any] | None = None
    #: From this reset on, episodes are numbered from 0, with the seeds of this generation of streams. None: go on.
    generation: int | None = None


class BatchedEnds:
    """The episodes that ended in one step of a batched environment."""

    __slots__ = ("columns", "done", "final", "observation", "reward", "terminated", "truncated")

    done: npt.NDArray[np.bool_]  #: `[B]`
    terminated: npt.NDArray[np.bool_]  #: `[B]`
    truncated: npt.NDArray[np.bool_]  #: `[B]`
    columns: npt.NDArray[np.intp]  #: `[k]`, ascending
    reward: npt.NDArray[Any]  #: `[k]`, of the last step
    observation: Any  #: `[k, ...]`, the final observations, as they are recorded
    final: Any  #: the final observations as the environment returned them, for all columns

    def finals(self) -> list[Any]:
        """The final observations one by one, in the environment's own structure."""
        return [element(self.final, b) for b in self.columns.tolist()]


class PolicyEvents:
    """What one step has done to the columns of one policy. Columns are indices, ascending.

    A column that has ended, or was cut, is idle until it joins again. It may join in the same step.
    """

    __slots__ = ("cut", "ended", "ends", "joined", "late")

    ended: Any  #: the columns whose episode has ended: a list or an array
    ends: Any  #: how: a list of `End`, or `BatchedEnds`; None: nothing has ended
    joined: Sequence[int]  #: the columns in which an episode begins with this step's observation
    cut: Sequence[int]  #: the columns whose game has failed: this step has no result
    late: Sequence[tuple[int, float]]  #: pairs (column, reward): rewards for agents that do not act

    def __init__(
        self,
        ended: Any = None,
        ends: Any = None,
        joined: Sequence[int] = (),
        cut: Sequence[int] = (),
        late: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.ended, self.ends, self.joined, self.cut = [] if ended is None else ended, ends, joined, cut
        self.late = late


class Events:
    """What one step has done. Columns use one object for all steps: who keeps it must copy it."""

    __slots__ = ("cut", "late", "over", "policies")

    over: Any  #: the environments whose episode or game has ended: `reset` or `park` them before the next step
    cut: Sequence[int]  #: those of them whose game has failed
    policies: Sequence[PolicyEvents]  #: one for each policy
    late: Sequence[tuple[int, float]]  #: pairs (environment, reward): rewards for agents that do not act

    def __init__(
        self,
        over: Any,
        policies: Sequence[PolicyEvents],
        cut: Sequence[int] = (),
        late: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.over, self.policies, self.cut, self.late = over, policies, cut, late


class PolicyColumns:
    """The columns `[B]` of one policy in one worker: what a recorder reads and writes.

    Raises `SpaceError`, with the field and the env_rank, for data that do not fit. `arrays` are arrays `[T, B, ...]`,
    nested as `arrays_like` returns them.
    """

    env_ranks: Sequence[Any]  #: of the columns, ascending; as text, that of a seat names its agent too
    observation_space: gym.Space[Any]  #: of one column
    action_space: gym.Space[Any]
    checks: Checks  #: the optional checks to make
    #: The current ones: a list of elements, or a batch. After the last row of `into`, and between two batches, they are
    #: in memory that nobody else can change. If `written_row` has them, this is stale.
    observations: Any
    written_row = -1  #: the row of `into` that has the current observations already; -1: none
    rewards: Any  #: those of the last step: a list or an array; zero where idle, from the row after the end on
    #: By column, what `keep_info` has returned for the last step; of a batched environment, its infos of the last step.
    infos: Any
    idle: list[int]  #: the columns that do not act in the next step, ascending
    progress: Progress
    on_step: StepHook | None = None
    on_info: InfoHook | None = None
    keep_info: KeepInfo | None = None
    into: Any = None

    def __len__(self) -> int:
        return len(self.env_ranks)

    def watch(
        self,
        on_step: StepHook | None,
        *,
        keep_info: KeepInfo | None = None,
        into: Any = None,
        on_info: InfoHook | None = None,
    ) -> None:
        """Call `on_step` after each step of a column. Keep in `infos` what `keep_info` returns for the info of each
        step: it is called at once, since the environment may use the memory of its info again. Call `on_info` with each
        info.

        `into` `[T + 1, B, ...]` is nested as `arrays_like` returns it: a step may write the observations into a row of
        it. With one row alone, it is no batch that a learner gets."""
        self.on_step, self.keep_info, self.into, self.on_info = on_step, keep_info, into, on_info
        self.watched()

    def watched(self) -> None:
        """`watch` was called: choose what each step does."""

    def current(self, column: int) -> Any:
        """The current observation of this column."""
        return element(self.observations, column)

    def write_observations(self, row: Any) -> None:
        """Write the current observations into `row` `[B, ...]`, as the samples record observations."""
        self.write_row(arrays_like(self.observation_space, row[np.newaxis]), 0)

    def write_rewards(self, row: Any) -> None:
        """Write the rewards of the last step into `row` `[B]`."""

    def not_finite(self, column: int, reward: object) -> SpaceError:
        """The error for a reward that is NaN or inf."""
        problem = f"must be finite (check_finite=True), got {brief(reward)}"
        return self.with_env_rank(column, ColumnError(column, "the reward", problem))

    def write_step(self, arrays: Any, rewards: Any, t: int) -> None:
        """Write the current observations into row t of `arrays`, and the rewards into row t of `rewards` `[T, B]`."""
        if t != self.written_row:
            self.write_row(arrays, t)
        self.write_rewards(rewards[t])

    def write_final(self, arrays: Any, t: int, column: int, observation: Any) -> None:
        """Write the final observation of column's episode into `[t, column]`."""
        self._write_one(arrays, t, column, observation, "the final observation")

    def write_infos(self, writer: InfoWriter, t: int) -> None:
        """Write the entries of the infos of the last step into row t."""

    def blank_idle(self, row: Any) -> None:
        """The row `[B, ...]` of observations is written, or there is none (None): from now on the rewards of idle
        columns are zero."""

    def end_batch(self) -> None:
        """The batch is complete, and the learner gets its memory next: keep the current observations elsewhere."""

    def take_begun(self, joined: Sequence[int]) -> Sequence[int]:
        """All columns of the games that have begun since the last call, those of absent agents too. `joined` are the
        columns in which episodes begin."""
        return joined

    def check_final(self, column: int, observation: Any) -> None:
        """Raise `SpaceError` unless the final observation of column's episode fits its space."""

    def check_column(self, column: int) -> None:
        """Raise `SpaceError` unless column's current observation and reward fit."""

    def write_row(self, arrays: object, t: int) -> None:
        """Write the current observations into row t."""

    def _write_one(self, arrays: object, t: int, column: int, observation: object, name: str) -> None:
        try:
            write_cell(arrays, t, column, observation, name)
            if self.checks:
                cells = map_tree(lambda array: array[:, column : column + 1], arrays)
                check_row(self.checks, self.observation_space, cells, t, [observation], name)
        except ColumnError as error:
            raise self.with_env_rank(column, error) from None

    def with_env_rank(self, column: int, error: ColumnError) -> SpaceError:
        """`error` with the column's env_rank, which is also written into the progress row."""
        self.progress.at_env(self.env_ranks[column])
        return error.with_env_rank(self.env_ranks[column])


class Columns(ABC):
    """One worker's environments, of any kind. The loops know nothing else of them.

    Three rules: what has ended in row t is idle from row t + 1 on, until it joins. Columns never reset on their own
    account: `Events.over` asks the loop. Final observations are valid until `reset`, so the loop records ends first.
    """

    envs: Sequence[Any]  #: what was built: for calls and attributes
    env_ranks: Sequence[int]  #: of the environments `[E]`
    policies: Sequence[PolicyColumns]  #: the columns of each policy that plays here
    waiting: list[int]  #: environments that are parked, ascending
    progress: Progress
    can_step_one = True  #: whether an environment can be stepped, and reset with a seed, without the others
    keeps_seeds = False  #: whether an environment that was built again gets the seed of its `Start`
    evaluation = 0  #: the number of the running evaluation, from 1; 0: training
    #: The numbers of the rows of a batch with so many rows. In turns: of its rounds, as many as it needs.
    rounds: Callable[[int], Iterable[int]] = range
    n_rounds: int | None = None  #: in turns: the rounds of this batch so far
    log_writer: EpisodeLogWriter | None = None  #: seeds the episodes, and keeps their actions
    renewals: Renewals | None = None  #: builds environments again whose game has failed
    #: What an environment raises whose game has failed; () if a failure is a failure of the worker.
    renewable: tuple[type[Exception], ...] = ()
    #: Called with the old environment and the one that was loaded in its place.
    when_replaced: Callable[[Any, Any], None] | None = None

    @abstractmethod
    def reset(self, envs: Sequence[int], starts: Sequence[Start] | None = None) -> Sequence[Sequence[int]]:
        """Begin episodes in `envs`, ascending, and only there. Returns the columns that join, for each policy. Without
        `starts`, an environment that resets itself after an end is left alone: it joins in the events of a step. Raises
        `ConfigError` for what this kind of environment cannot do."""

    @abstractmethod
    def park(self, envs: Sequence[int]) -> None:
        """These environments are over: leave them, idle, until `reset`."""

    @abstractmethod
    def step(self, actions: Sequence[Any], row: int | None = None, which: int | None = None) -> Events | None:
        """Step each environment that is not parked, or only `which`. `actions` has a row `[B, ...]` for each policy.
        With `row`, observations may be written into this row of `into`. Returns None if nothing has ended or joined."""

    def save(self, e: int) -> Any:
        """What to give back in `Start.state` so that environment e continues as it is now; of a batched one, all rows.
        Raises `ConfigError` if this kind of environment cannot be saved."""
        raise ConfigError(f"environments in {type(self).__name__} cannot be saved")

    @abstractmethod
    def _use(self, e: int, env: Any) -> None:
        """Step `env` in the place of environment e from now on."""

    def _saved(self, e: int, start: Start) -> Any:
        """What `save` has returned, if `start` says that environment e continues a saved run: it is loaded here. None:
        it does not, or its episode is repeated."""
        if start.generation is not None and self.log_writer is not None:
            self.log_writer.restart(e, start.generation)
        if start.state is None:
            return None
        kind, data, saved = start.state
        if (new := load_env(env := self.envs[e], kind, data)) is not env:
            if self.when_replaced is not None:
                self.when_replaced(env, new)
            self._use(e, new)
        return saved

    def _renew(self, e: int, error: Exception, *, is_cut: bool) -> None:
        """The game of environment e has failed with `error`: build it again."""
        if self.renewals is None or self.renewals.is_exhausted:
            raise error
        self._use(e, self.renewals.renew(e, self.envs[e], error, is_cut=is_cut))

    def _seed_after_renewal(self, e: int, seed: int | None) -> int | None:
        """The seed of the next reset. The first one of a new environment waits for its game."""
        if self.renewals is None or (first_seed := self.renewals.first_seeds.pop(e, None)) is None:
            return seed
        self.progress.words[Progress.PHASE] = Phase.RENEWING
        return first_seed if seed is None or not self.keeps_seeds else seed

    @abstractmethod
    def columns_of(self, e: int) -> Sequence[Sequence[int]]:
        """The columns of environment e, for each policy."""


NO_LEGAL_ACTION = "allows no action, but the episode has not ended: end the episode, or allow an action"
NOT_FLAGS = "must be 1 where an action is legal and 0 elsewhere, but has other numbers"


def require_masks(columns: PolicyColumns, is_wrong: npt.NDArray[np.bool_], problem: str) -> None:
    """Raise `SpaceError` with the env_rank for the first column that is not idle and whose mask `is_wrong` `[B]`."""
    for column in np.flatnonzero(is_wrong).tolist():
        if column not in columns.idle:
            raise mask_error(columns, column, problem)


def mask_error(columns: PolicyColumns, column: int, problem: str) -> SpaceError:
    """The error for the mask of this column."""
    return columns.with_env_rank(column, ColumnError(column, "the action mask", problem))
