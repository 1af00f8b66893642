"""From a sampler's batch to the rows of a replay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.buffers import NamedArrays, Samples
from penstock.buffers.named import ArrayTree, map_leaves
from penstock.errors import ConfigError, SpaceError
from penstock.learning.compiled import PYTHON, compiled
from penstock.learning.observations import check_frames, newest_frames
from penstock.learning.options import Frames, Sequences
from penstock.learning.ring import (
    BEGINS,
    CUT,
    PARTIAL,
    RESUMES,
    TERMINATED,
    TRUNCATED,
    VALID,
    Ring,
    Shape,
    lacks_next,
    leaves,
)

STATE = "prev_rnn_state"  # the field of agent_info
HAS_STATE = "has_rnn_state"  # where the agent has recorded it; not there if it does so at each step
MORE = ("env_info", "extra")  # fields of `samples.env` that are kept as they are
_CHECKED = 0.01  # the share of rows whose frames are compared, after the first batch


def array(leaf: object) -> npt.NDArray[Any]:
    """A tensor's memory as an array, an array as it is."""
    return leaf.numpy() if hasattr(leaf, "numpy") else np.asarray(leaf)


def arrays(tree: object) -> Any:
    """`tree` with arrays as leaves; nothing is copied."""
    return map_leaves(array, tree)


def require_samples(samples: object) -> None:
    """Raise `ConfigError` if this is something else."""
    if not hasattr(samples, "env"):
        kind = type(samples).__name__
        raise ConfigError(
            f"a replay takes samples, got a {kind}: obtain_samples returns (samples, traj_infos). With several "
            "policies, give the samples of one"
        )


def shape_of(
    samples: Samples, capacity: int, frames: Frames | None, sequences: Sequences | None, max_truncations: int | None
) -> Shape:
    """The shape of the ring for batches such as `samples` `[T, B]`, or for one step.

    Raises `ConfigError` if there are `frames` and the observations have another shape.
    """
    require_samples(samples)
    is_batch = len(samples.env.reward.shape) == 2
    B = samples.env.reward.shape[1] if is_batch else 1

    def example(tree: object) -> Any:
        return map_leaves(lambda leaf: np.zeros(leaf.shape[2 if is_batch else 0 :], leaf.dtype), arrays(tree))

    every = sequences.state_every if sequences else 1
    T = -(-capacity // (B * every)) * every
    observation = example(samples.env.observation)
    if frames is not None:
        if not isinstance(observation, np.ndarray) or observation.shape[:1] != (frames.n,):
            form = "several arrays" if isinstance(observation, NamedArrays) else f"of shape {observation.shape}"
            raise ConfigError(
                f"frames={frames} needs observations of shape ({frames.n}, ...), but they are {form}: remove frames, "
                "or stack frames as Gymnasium's FrameStackObservation does"
            )
        observation = observation[-1]
    info = samples.agent.agent_info
    return Shape(
        T=T,
        B=B,
        observation=observation,
        action=example(samples.agent.action),
        more=NamedArrays({name: example(samples.env[name]) for name in MORE if name in samples.env}) or None,
        state=example(info[STATE]) if sequences and STATE in info else None,
        state_every=every,
        max_finals=max_truncations or max(-(-T * B // 32), B),
    )


@compiled
def pack_flags(
    valid: npt.NDArray[Any],
    terminated: npt.NDArray[Any],
    truncated: npt.NDArray[Any],
    begins: npt.NDArray[Any],
    out: npt.NDArray[Any],
) -> int:
    """Write the flags of a row of the ring into `out` `[T, B]`, from arrays of bools. Returns how many steps were
    truncated only, and have no next observation in the rows. The compiled function returns -1 if it does not know the
    layout of the arrays."""
    out[...] = 0
    for bit, flag in enumerate((valid, terminated, truncated, begins)):
        out |= (flag != 0).view(np.uint8) << np.uint8(bit)
    return int(np.count_nonzero(lacks_next(out)))


@compiled
def same_rows(
    kept: Iterable[Any], rows: Iterable[npt.NDArray[Any]], row: int, column: int, prev_done: npt.NDArray[Any]
) -> bool:
    """Whether row 0 of the arrays `rows` `[T, b, ...]` has the same bytes as row `row` of the arrays `kept`
    `[T, B, ...]` from `column` on, wherever `prev_done[0]` is False. False may also mean that the function does not
    know the layout, or has compared all columns."""
    columns = slice(column, column + prev_done.shape[1])
    return all(of[0].tobytes() == there[row, columns].tobytes() for of, there in zip(rows, kept, strict=True))


class BoundBatch(NamedTuple):
    """The arrays of a batch `[T, B]` that was checked; the memory is that of the samples."""

    observation: Any
    final_obs: Any  # or None
    reward: Any
    rows: tuple[Any, ...]  # the arrays to keep of observation and action
    before: tuple[Any, ...]  # previous reward and action
    flags: tuple[Any, ...]  # valid, terminated, truncated, prev_done
    state: Any  # or None
    has_state: Any  # or None: every row has one
    policy_version: Any  # or None


class Appender:
    """Writes the batches of one writer into the ring, and checks that they fit."""

    def __init__(self, ring: Ring, frames: Frames | None, writer: int = 0) -> None:
        self.ring, self._frames, self._writer = ring, frames, writer
        # What the ring has when the first batch of a sampler comes.
        self._first_step, self._first_version = ring.end, 0
        if ring.end and ring.is_shared:
            self._first_version = int(ring.arrays.policy_version[(ring.end - 1) % ring.T].max())
        self._columns = ring.columns(writer)
        self._layouts = {"observation": _layout(ring.shape.observation), "action": _layout(ring.shape.action)}
        for name, tree in (ring.shape.more or NamedArrays()).items():
            self._layouts[name] = _layout(tree)
        if frames is not None:
            self._layouts["observation"] = [(path, (frames.n, *of), t) for path, of, t in self._layouts["observation"]]
        self._bound: tuple[Any, Any, BoundBatch] | None = None
        self._is_first = True
        # Of each column: its newest step, and whether no batch was lost since.
        n = self._columns.stop - self._columns.start
        self._newest, self._is_known = np.full(n, -1), np.zeros(n, np.bool_)
        self._flags, self._versions = np.empty((0, 0), np.uint8), np.empty((0, 0), np.int32)  # of the last batch
        self._version: Any = None  # which the last batch had
        self._row_before: Any = None  # of batches of one row: the observations of the last one, if it was kept
        self._rng = np.random.default_rng(0)  # rows to check; draws do not depend on it

    def of_writer(self, writer: int) -> Appender:
        """The appender of another writer of the same ring."""
        appender = Appender(self.ring, self._frames, writer)
        appender._first_step, appender._first_version = self._first_step, self._first_version
        return appender

    def has_batch(self, number: int, batch_T: int) -> bool:
        """Whether this writer, or the one that it replaces, has written batch `number` of its sampler."""
        return self.end > self._first_step + number * batch_T

    @property
    def end(self) -> int:
        """The step that the next batch begins with."""
        return self.ring.written(self._writer)

    def bind(self, samples: Samples) -> BoundBatch:
        """The arrays of `samples` `[T, B]`. Raises `SpaceError` or `ConfigError` if they do not fit the ring."""
        require_samples(samples)
        env, agent = samples.env, samples.agent
        if self._bound is not None and self._bound[0] is env and self._bound[1] is agent:
            return self._bound[2]
        self._require_shape(samples)
        info, has_states = agent.agent_info, self.ring.shape.state is not None
        observation, reward = arrays(env.observation), array(env.reward)
        kept = observation if self._frames is None else newest_frames(observation)
        batch = BoundBatch(
            observation=observation,
            final_obs=arrays(env.final_obs) if "final_obs" in env else None,
            reward=reward,
            rows=(*leaves(kept), *leaves(arrays(agent.action)), *self._more(env)),
            before=(array(env.prev_reward), *leaves(arrays(agent.prev_action))),
            flags=tuple(array(leaf) for leaf in (env.valid, env.terminated, env.truncated, env.prev_done)),
            state=arrays(info[STATE]) if has_states else None,
            has_state=array(info[HAS_STATE]) if has_states and HAS_STATE in info else None,
            policy_version=array(agent.policy_version) if "policy_version" in agent else None,
        )
        if samples.batch is not None:  # the next batch of the sampler has the same arrays
            self._bound = env, agent, batch
        return batch

    def _more(self, env: Any) -> tuple[Any, ...]:
        return tuple(leaf for name in self.ring.more for leaf in leaves(arrays(env[name])))

    def append(self, batch: BoundBatch, policy_version: object, continues: bool) -> None:
        """Write one batch. `policy_version` None: that of the samples. `continues`: whether it follows the batch before
        without a gap."""
        if self._flags.shape != batch.reward.shape:
            self._flags, self._versions = (np.empty(batch.reward.shape, dtype) for dtype in (np.uint8, np.int32))
            self._version = None
        flags, prev_done = self._flags, batch.flags[3]
        arguments = (*batch.flags, flags)
        n_truncated = pack_flags(*arguments)
        if n_truncated < 0:
            n_truncated = PYTHON["pack_flags"](*arguments)
        before = self.ring.arrays.flags[self._last_row] if self.end else None
        starts, is_continued = prev_done[:1], not self._is_first and continues
        resumes = np.zeros(len(prev_done[0]), np.bool_)
        if before is not None and not (was_valid := before & VALID != 0).all():
            starts = starts | ~was_valid
            resumes = ~was_valid & ~prev_done[0] & batch.flags[0][0]
            flags[0, resumes] |= np.uint8(BEGINS | PARTIAL)
            resumes &= self._is_known
        if not (is_continued := is_continued and self._is_continued(batch, starts, resumes)):
            flags[0] |= np.where(prev_done[0], np.uint8(BEGINS), np.uint8(BEGINS | PARTIAL))
            self._is_known[:] = False
        elif resumes.any():
            flags[0, resumes] |= np.uint8(RESUMES)
        self._note_newest(flags)
        flags[:-1][_goes_on(flags[:-1]) & (flags[1:] & VALID == 0)] |= np.uint8(CUT)
        finals = self._finals(batch, flags) if n_truncated else None
        if self._frames is not None:
            check_frames(self._frames, batch.observation, batch.final_obs, flags, self._rows_to_check(len(flags)))
            self._check_one_row(batch.observation, flags)
            finals = None if finals is None else finals[:, -1]
        self._set_versions(batch.policy_version if policy_version is None else policy_version)
        state = None if batch.state is None else self._states(batch, flags)
        self.ring.write((flags, batch.reward, self._versions, *batch.rows), finals, self._writer, state)
        if before is not None and is_continued:
            before[_goes_on(before) & (flags[0] & VALID == 0)] |= np.uint8(CUT)
        self._is_first = False

    def _require_shape(self, samples: Samples) -> None:
        """Raise `ConfigError` if the batch has too many rows or other columns than the ring, and `SpaceError` if the
        fields have other shapes or dtypes."""
        shape = self.ring.shape
        if len(samples.env.reward.shape) != 2:
            raise ConfigError("a replay takes batches [T, B]: append the samples as the sampler has returned them")
        batch_T, batch_B = samples.env.reward.shape
        expected_B = self._columns.stop - self._columns.start
        if batch_B != expected_B:
            raise ConfigError(f"the batch has {batch_B} columns, the replay {expected_B}: use one replay per sampler")
        if batch_T > shape.T:
            raise ConfigError(
                f"a batch of {batch_T} x {batch_B} steps does not fit into capacity={shape.T * shape.B}: raise "
                "capacity, or lower batch_T"
            )
        more = [(name, samples.env[name]) for name in MORE if name in samples.env and name in self._layouts]
        missing = [name for name in MORE if name in self._layouts and name not in samples.env]
        if missing:
            raise SpaceError(
                f"these samples have no env.{missing[0]}, which the first batch had: append batches of one sampler, or "
                "use one replay per sampler"
            )
        for name, given in [("observation", samples.env.observation), ("action", samples.agent.action), *more]:
            layout, expected = _layout(arrays(given), 2), self._layouts[name]
            if layout != expected:
                raise SpaceError(f"the {name} of this batch is {layout}, that of the first batch was {expected}")

    def _note_newest(self, flags: npt.NDArray[np.uint8]) -> None:
        is_valid = flags & VALID != 0
        has_steps = is_valid.any(0)
        newest = self.end + len(flags) - 1 - is_valid[::-1].argmax(0)
        self._newest, self._is_known = np.where(has_steps, newest, self._newest), self._is_known | has_steps

    def _is_continued(self, batch: BoundBatch, starts: npt.NDArray[Any], resumes: npt.NDArray[np.bool_]) -> bool:
        """Whether row 0 follows the newest row of the ring, as far as its previous action and reward show it. Columns
        in which `starts` `[1, b]` are left out, unless it `resumes` `[b]` their newest step."""
        row, columns = self._last_row
        resumes = resumes & (self._newest >= self.end - self.ring.T)
        if resumes.any():
            at = self._newest[resumes] % self.ring.T, np.flatnonzero(resumes) + columns.start
            if any(
                (cells[0, resumes] != kept[at]).any() for cells, kept in zip(batch.before, self.ring.kept, strict=True)
            ):
                return False
        if same_rows(self.ring.kept, batch.before, row, columns.start, starts):  # most often, and quicker
            return True
        return all(
            ((before[0] == kept[row, columns])[~starts[0]]).all()
            for before, kept in zip(batch.before, self.ring.kept, strict=True)
        )

    @property
    def _last_row(self) -> tuple[int, slice]:
        """The index of the newest row of this writer."""
        return (self.end - 1) % self.ring.T, self._columns

    def _set_versions(self, version: Any) -> None:
        """Write the versions to keep into `_versions`: a number, or `[B]` or `[T, B]` of them. None is 0."""
        version = 0 if version is None else version
        if not isinstance(version, int):
            version = array(version)
            if version.ndim == 2 and version.strides[0] == 0:
                version = version[0]  # all rows are the same
            version = version.astype(np.int32)
        key = version if isinstance(version, int) else version.tobytes()
        if key == self._version:
            return
        versions = version + self._first_version
        if self.end and np.less(versions, self.ring.arrays.policy_version[self._last_row]).any():
            raise ConfigError(
                f"policy_version={version} is lower than that of the batch before: versions must not fall. After "
                "replay.load, add the version that the earlier run had reached"
            )
        self._versions[...], self._version = versions, key

    def _finals(self, batch: BoundBatch, flags: npt.NDArray[np.uint8]) -> Any:
        """The final observations of the truncated steps `[n, ...]`."""
        if batch.final_obs is None:
            raise ConfigError(
                "an episode was truncated, but the samples have no final_obs, whose value would be needed: make the "
                "sampler with record_final_obs=True"
            )
        return batch.final_obs[np.nonzero(lacks_next(flags))]

    def _rows_to_check(self, batch_T: int) -> npt.NDArray[np.intp]:
        if self._is_first or batch_T == 1:
            return np.arange(1, batch_T)
        return self._rng.integers(1, batch_T, max(1, round(_CHECKED * batch_T)))

    def _check_one_row(self, stacks: npt.NDArray[Any], flags: npt.NDArray[np.uint8]) -> None:
        """Compare the only row of a batch with the row before, if that was kept. Keep this one now and then."""
        assert self._frames is not None
        if len(flags) != 1:
            self._row_before = None
            return
        if self._row_before is not None and not (flags & PARTIAL).any():
            check_frames(self._frames, np.concatenate([self._row_before, stacks]), None, flags[[0, 0]], [1])
        is_kept = self._is_first or self._rng.random() < _CHECKED
        self._row_before = stacks.copy() if is_kept else None

    def _states(self, batch: BoundBatch, flags: npt.NDArray[np.uint8]) -> Any:
        """The states of the steps that are multiples of `state_every`. Raises `ConfigError` if the agent has not
        recorded them in the first batch."""
        every = self.ring.shape.state_every
        first = -self.end % every
        kept = map_leaves(lambda leaf: leaf[first::every], batch.state)
        if self._is_first and batch.has_state is not None and first + every < len(flags):
            rows = slice(first + every, None, every) if first == 0 else slice(first, None, every)
            goes_on = (flags[rows] & (BEGINS | VALID)) == VALID
            if (goes_on & ~batch.has_state[rows]).any():
                raise ConfigError(
                    f"only row 0 of the batch has a recurrent state: with state_every={every}, make the agent with "
                    'record_state="step", or set state_every=batch_T'
                )
        return kept


def _goes_on(flags: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Where a row is a step that does not end its episode."""
    goes_on: npt.NDArray[np.bool_] = (flags & (VALID | TERMINATED | TRUNCATED)) == VALID
    return goes_on


def _layout(tree: ArrayTree, n_leading: int = 0) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Name, shape and dtype of each leaf, without the leading dimensions."""
    leaves = tree.leaves() if isinstance(tree, NamedArrays) else [("", tree)]
    return [(path, leaf.shape[n_leading:], leaf.dtype) for path, leaf in leaves]
