"""The main process's side of a vector environment's memory: it writes requests and takes replies and infos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from penstock.buffers.object_pipe import MessageKind, ObjectMessage, Unreadable
from penstock.buffers.ordering import fence
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import map_tree, tree_leaves
from penstock.envs.checks import Checks, check_row
from penstock.envs.rows import ColumnError, arrays_like, in_range
from penstock.errors import EnvCallError, SpaceError, brief
from penstock.vector.objects import ObjectParts
from penstock.vector.step_memory import VectorMemory, copy_rows
from penstock.vector.step_program import VectorProgram
from penstock.vector.vector_infos import (
    FINAL_INFO,
    FINAL_OBS,
    INFO,
    Infos,
    batch_infos,
    listed_infos,
    merged_batches,
    unpickled,
    unreadable,
)

Ids = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
_FINITE = Checks(check_finite=True)


class Exchange:
    """Counts the requests to each environment, and the replies that were taken.

    There are two tables. Environments of several agents have several rows, neighbours, one for each seat; others have
    one. Batched environments, of which a worker has one, reply together: `groups` are those of each worker. The first
    of them that was requested has the infos of all.
    """

    def __init__(
        self, memory: VectorMemory, program: VectorProgram, groups: Sequence[range], *, check_finite: bool
    ) -> None:
        self._check_finite = check_finite
        self._rows = rows = memory.rows.arrays
        self._same_step = program.autoreset_mode is AutoresetMode.SAME_STEP
        self._action = arrays_like(program.action_space, rows.action)
        self._objects = memory.objects
        self._observation_parts = ObjectParts(program.observation_space)
        self._action_parts = ObjectParts(program.action_space)
        self._requested, self._replied, self._info_seq = rows.requested, rows.replied, rows.info_seq
        self._wake_at = rows.wake_at
        self._taken = np.zeros(len(rows.requested), np.int64)  # the last request whose reply was taken
        self._inbox: dict[int, Mapping[Any, Any]] = {}  # infos that have arrived, by environment
        self._observation = arrays_like(program.observation_space, rows.observation)
        self._space = program.observation_space
        self._final = arrays_like(program.observation_space, rows.final_observation)
        self.reward, self.terminated, self.truncated = rows.reward, rows.terminated, rows.truncated
        self.all: Ids = np.arange(len(rows.requested))
        everywhere, self._has_seats = range(len(self.all)), program.seats is not None
        #: The name of each row in errors. As a number, it is the row's environment.
        self.ranks: Sequence[int] = everywhere if program.seats is None else program.seats.ranks(0, everywhere)
        self._env_of, self._all_rows = np.array(self.ranks, np.intp), np.arange(len(self.ranks))
        self._is_batched, self._groups = program.is_batched, groups
        self._group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        # Of batched environments: the rows that have ended in the step that was taken last, and were reset at once.
        self._ended = self.all[:0]
        names = ("valid", "alive", "late_reward") if self._has_seats else ()
        self._states = [(name, "_" + name, rows[name]) for name in names]
        self._everywhere = np.ones(len(self.ranks), np.bool_)
        self._everywhere.flags.writeable = False

    def rows_of(self, which: Ids) -> Ids:
        """The rows of the environments `which`."""
        if not self._has_seats:
            return which
        if which is self.all:
            return self._all_rows
        first, stop = (self._env_of.searchsorted(which, side).tolist() for side in ("left", "right"))
        return np.concatenate([which[:0], *map(np.arange, first, stop)])

    def together_with(self, which: Ids) -> Ids:
        """The other environments that one call steps together with `which`."""
        return np.setdiff1d(np.flatnonzero(np.isin(self._group_of, self._group_of[which])), which)

    def outstanding_of(self, which: Ids) -> Ids:
        """The environments in `which` with a request whose reply was not taken."""
        busy: Ids = which[self._requested[which] != self._taken[which]]
        return busy

    def states(self, rows: Ids | None = None) -> dict[str, npt.NDArray[Any]]:
        """What the infos always say of these rows, or of all."""
        states, where = dict[str, npt.NDArray[Any]](), slice(None) if rows is None else rows
        for name, mask_name, values in self._states:
            states[name], states[mask_name] = values[where].copy(), self._everywhere[where]
        return states

    # ---- requests ----------------------------------------------------------------------------

    def put_actions(self, actions: Any, which: Ids | slice = slice(None)) -> None:
        """Write `actions`, batched as Gymnasium does it, for the environments `which`. Raises `SpaceError`."""
        if self._action_parts:
            actions = self._put_objects(actions, self.all[which])
        _put(self._action, actions, which if isinstance(which, slice) else self.rows_of(which))

    def _put_objects(self, actions: object, ids: Ids) -> Any:
        """Write the parts without a fixed shape: each is a sequence of `n` objects. Returns the actions with
        placeholders in their places."""
        assert self._objects is not None
        rest, objects = self._action_parts.take_out(actions, np.zeros(len(ids), np.int64))
        for part in objects:
            if not isinstance(part, Sequence | np.ndarray) or isinstance(part, str) or len(part) != len(ids):
                raise SpaceError(
                    f"each part of the actions without a fixed shape must be a sequence of {len(ids)} objects, got "
                    f"{brief(part)}"
                )
        try:
            for i, parts in zip(ids.tolist(), zip(*objects, strict=True), strict=bool(objects)):
                self._objects.write_action(i, list(parts))
        except Exception as error:  # pickling runs the user's code, which may raise anything
            raise SpaceError(
                f"action has an object that cannot be sent to the workers: {in_one_line(error)}"
            ) from error
        return rest

    def put_seeds(self, seeds: Sequence[int | None], which: Ids) -> None:
        """Note the seeds of a reset, for workers that may replace others."""
        self._rows.seed[which] = [-1 if seeds[i] is None else seeds[i] % 2**63 for i in which]

    def request(self, which: Ids | slice = slice(None), *, one_by_one: bool = False) -> None:
        """Publish a request to the environments `which`; its data are written. Open the gates then."""
        self._wake_at[0] = one_by_one  # 1: each reply wakes this process, until `when_ready` says how many must come
        fence()
        self._requested[which] += 1

    @property
    def outstanding(self) -> Ids:
        """The environments with a request whose reply was not taken."""
        return np.flatnonzero(self._requested != self._taken)

    @property
    def ready(self) -> Ids:
        """The outstanding environments that have replied."""
        replied = self._replied
        ready = np.flatnonzero((replied == self._requested) & (replied != self._taken))
        fence()
        if self._is_batched and len(unready := np.setdiff1d(self.outstanding, ready)):
            return np.setdiff1d(ready, self.together_with(unready))  # a worker may be writing the replies of its rows
        return ready

    def when_ready(self, n: int) -> Callable[[], bool]:
        """Let workers wake this process once `n` of the outstanding environments have replied. Returns a function that
        says whether they have."""
        # The workers do not know which replies were taken, so they count those too.
        self._wake_at[0] = n + np.count_nonzero(self._requested == self._taken)
        return lambda: len(self.ready) >= n

    def is_answered(self) -> bool:
        """Whether there is a reply to each request."""
        is_answered = bool((self._replied == self._requested).all())
        fence()
        return is_answered

    # ---- replies -----------------------------------------------------------------------------

    def take(self, which: Ids, receive_infos: Callable[[], None]) -> Infos:
        """Take the replies of `which`. Returns the infos of replies that were not taken before, by row; with
        `final_obs` and `final_info` where an episode ended and the environment was reset at once.

        Raises `EnvCallError` for an info that cannot be unpickled, `SpaceError` for data that `check_finite` refuses.
        """
        requested, is_new = self._requested, self._taken != self._requested
        if which is not self.all:
            is_wanted = np.zeros(len(requested), np.bool_)
            is_wanted[which] = True
            is_new &= is_wanted
        has_info = is_new & (self._info_seq == requested)
        np.copyto(self._taken, requested, where=is_new)
        ids = has_info.nonzero()[0].tolist()  # a third of the time of numpy's functions `any` and `flatnonzero`
        if ids:
            receive_infos()
        infos = self._infos_of(is_new, ids) if ids or self._same_step else []
        if self._check_finite:
            self._require_finite(self.rows_of(np.flatnonzero(is_new)))
        return infos

    def _infos_of(self, is_new: Flags, ids: list[int]) -> Infos:
        """The infos of replies that are new, by row. The environments `ids` have sent some."""
        ended = (self.terminated | self.truncated).nonzero()[0] if self._same_step else self.all[:0]
        if len(ended):
            ended = ended[is_new[self._env_of[ended]]]
        if self._is_batched:
            self._ended, batches = ended, Infos()
            for e in ids:
                parts = {kind: info for (_, kind), info in self._unpickled_infos(e).items()}
                final = {"final_info": parts[FINAL_INFO]} if FINAL_INFO in parts else {}
                batches.append((self._groups[self._group_of[e]].start, {**parts.get(INFO, {}), **final}))
            return batches
        if not ids and not len(ended):  # the ordinary step
            return []
        sent = dict([entry for e in ids for entry in self._unpickled_infos(e).items()])
        infos = {row: info for (row, kind), info in sent.items() if kind == INFO}
        for row in ended.tolist():
            # The worker has pickled the observation if the shared memory cannot keep its types.
            kept = sent.get((row, FINAL_OBS))
            final_obs = copy_rows(self._final, row) if kept is None else kept[FINAL_OBS]
            infos[row] = {"final_obs": final_obs, "final_info": sent.get((row, FINAL_INFO), {}), **infos.get(row, {})}
        return sorted(infos.items())

    def _require_finite(self, rows: Ids) -> None:
        require_finite(self.reward, rows, "reward", self.ranks)
        require_finite(self._observation, rows, "observation", self.ranks)
        if self._same_step:
            ended = rows[self.terminated[rows] | self.truncated[rows]]
            require_finite(self._final, ended, "final_obs", self.ranks)
        if self._has_seats:
            require_finite(self._rows.late_reward, rows, "late_reward", self.ranks)

    def observations(self, which: Ids | slice = slice(None), *, copy: bool = True) -> Any:
        """The last observations in the rows `which`, batched as Gymnasium does it."""
        batch = copy_rows(self._observation, which) if copy else self._observation
        if not self._observation_parts:
            return batch
        objects = [self._objects_of(i) for i in self.all[which].tolist()]
        return self._observation_parts.put_in(batch, zip(*objects, strict=True))

    def _objects_of(self, i: int) -> list[Any]:
        assert self._objects is not None
        try:
            objects = self._objects.read_observation(i, int(self._requested[i]))
        except Exception as error:  # unpickling runs the user's code, which may raise anything
            raise unreadable("observation", i, error) from error
        return self._observation_parts.defaults() if objects is None else objects

    def drop(self, which: Ids) -> None:
        """Drop the replies of `which`."""
        self._taken[which] = self._requested[which]

    def batched(self, infos: Infos, rows: Ids | None = None) -> dict[str, Any]:
        """What `take` has returned, batched as Gymnasium does it, for all rows or for these; with their `states`."""
        if self._is_batched:
            which = self._all_rows if rows is None else rows
            return merged_batches(infos, self._groups, which, self._ended, self._final, self._space)
        if rows is None:
            batch = batch_infos(infos, len(self.ranks))
        else:
            positions = {row: k for k, row in enumerate(rows.tolist())}
            batch = batch_infos([(positions[row], info) for row, info in infos], len(rows))
        return {**batch, **self.states(rows)} if self._has_seats else batch

    def listed(self, infos: Infos) -> Infos:
        """What `take` has returned, by row."""
        return listed_infos(self.batched(infos), len(self.ranks)) if self._is_batched else infos

    def put_infos(self, messages: Sequence[ObjectMessage]) -> None:
        """Keep the infos among the messages of a worker. Others are results of an interrupted call."""
        for kind, _, i, infos in messages:
            if kind is MessageKind.INFO and not isinstance(infos, Unreadable):
                self._inbox[i] = infos

    def _unpickled_infos(self, e: int) -> dict[tuple[int, str], Any]:
        """What environment e has sent, by row and kind."""
        if e not in self._inbox:
            raise EnvCallError(
                f"the info of env_rank {e} is lost: an exception of a signal handler interrupted an earlier call. "
                "The results of this step are lost too. The next step works"
            )
        return {key: unpickled(info, e) for key, info in self._inbox.pop(e).items()}


def require_finite(arrays: object, which: Ids, name: str, ranks: Sequence[int]) -> None:
    """Raise `SpaceError` for the first NaN or inf in the rows `which` of `arrays`."""
    rows = map_tree(lambda array: array[np.newaxis, which], arrays)
    try:
        check_row(_FINITE, None, rows, 0, (), name)
    except ColumnError as error:
        raise error.with_env_rank(ranks[which[error.column]]) from None


def _put(rows: object, actions: object, which: Ids | slice) -> None:
    for name, row, value in tree_leaves(rows, "action", actions):
        wanted = row.shape if isinstance(which, slice) else (len(which), *row.shape[1:])
        array = np.asarray(value)
        has_dtype = array.dtype == row.dtype
        is_cast = has_dtype or (array.dtype.kind != "b" and np.can_cast(array.dtype, row.dtype, "same_kind"))
        fits = array.shape == wanted and is_cast
        if fits and not has_dtype and row.dtype.kind in "iu" and not in_range(array, row.dtype):
            raise SpaceError(f"{name} has values from {array.min()} to {array.max()}, which {row.dtype} cannot hold")
        if not fits:
            raise SpaceError(
                f"{name} must have shape {wanted} and dtype {row.dtype}, "
                f"got shape {array.shape} and dtype {array.dtype}"
            )
        row[which] = array
