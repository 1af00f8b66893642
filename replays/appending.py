"""From a sampler's batch to the rows of a replay."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers import NamedArrays
from penstock.buffers.named import map_leaves
from penstock.errors import ConfigError, SpaceError
from penstock.replays.observations import check_frames, newest_frames
from penstock.replays.options import Frames, Sequences
from penstock.replays.ring import BEGINS, PARTIAL, VALID, Ring, Shape, lacks_next

STATE = "prev_rnn_state"  # the field of agent_info
_CHECKED = 0.01  # the share of rows whose frames are compared, after the first batch


def array(leaf: Any) -> npt.NDArray[Any]:
    """A tensor's memory as an array, an array as it is."""
    return leaf.numpy() if hasattr(leaf, "numpy") else np.asarray(leaf)


def arrays(tree: Any) -> Any:
    """`tree` with arrays as leaves; nothing is copied."""
    return map_leaves(array, tree)


def shape_of(
    samples: Any, capacity: int, frames: Frames | None, sequences: Sequences | None, max_truncations: int | None
) -> Shape:
    """The shape of the ring for batches such as `samples` `[T, B]`, or for one step.

    Raises `ConfigError` if there are `frames` and the observations have another shape.
    """
    is_batch = len(samples.env.reward.shape) == 2
    B = samples.env.reward.shape[1] if is_batch else 1

    def example(tree: Any) -> Any:
        return map_leaves(lambda leaf: np.zeros(leaf.shape[2 if is_batch else 0 :], leaf.dtype), arrays(tree))

    every = sequences.state_every if sequences else 1
    T = -(-capacity // (B * every)) * every
    observation = example(samples.env.observation)
    if frames is not None:
        if not isinstance(observation, np.ndarray) or observation.shape[:1] != (frames.n,):
            found = "several arrays" if isinstance(observation, NamedArrays) else f"of shape {observation.shape}"
            raise ConfigError(
                f"frames={frames} needs observations of shape ({frames.n}, ...), but they are {found}: remove frames, "
                "or stack frames as Gymnasium's FrameStackObservation does"
            )
        observation = observation[-1]
    info = samples.agent.agent_info
    return Shape(
        T=T,
        B=B,
        observation=observation,
        action=example(samples.agent.action),
        state=example(info[STATE]) if sequences and STATE in info else None,
        state_every=every,
        max_finals=max_truncations or max(-(-T * B // 32), B),
    )


class Appender:
    """Writes batches into the ring, and checks that they fit."""

    def __init__(self, ring: Ring, frames: Frames | None) -> None:
        self._ring, self._frames = ring, frames
        self.n_without_final = 0
        self._layouts = {"observation": _layout(ring.shape.observation), "action": _layout(ring.shape.action)}
        if frames is not None:
            self._layouts["observation"] = [(path, (frames.n, *of), t) for path, of, t in self._layouts["observation"]]
        self._is_first = True
        self._rng = np.random.default_rng(0)  # rows to check; draws do not depend on it

    def append(self, samples: Any, policy_version: Any, continues: bool) -> None:
        """Write one batch. `continues`: whether it follows the batch before without a gap."""
        env, agent = samples.env, samples.agent
        self._require_shape(samples)
        reward, prev_done, action = array(env.reward), array(env.prev_done), arrays(agent.action)
        flags = array(env.valid).astype(np.uint8)
        for bit, name in enumerate(("terminated", "truncated", "prev_done"), 1):
            flags |= array(env[name]).view(np.uint8) << np.uint8(bit)
        if self._is_first or not (continues and self._is_continued(env, arrays(agent.prev_action), prev_done)):
            flags[0] |= np.where(prev_done[0], np.uint8(BEGINS), np.uint8(BEGINS | PARTIAL))

        observation = arrays(env.observation)
        final_obs = arrays(env.final_obs) if "final_obs" in env else None
        finals = self._finals(final_obs, observation, flags)
        if self._frames is not None:
            check_frames(self._frames, observation, final_obs, flags, self._rows_to_check(len(reward)))
            observation, finals = newest_frames(observation), finals[:, -1]
        fields = {
            "observation": observation,
            "action": action,
            "reward": reward,
            "flags": flags,
            "policy_version": self._versions(policy_version, reward.shape),
        }
        if self._ring.shape.state is not None:
            fields["state"] = self._states(arrays(agent.agent_info[STATE]), flags)
        n_lost = self._ring.write(NamedArrays(fields), finals)
        self._is_first = False
        if n_lost and not self.n_without_final:
            warnings.warn(
                f"more than max_truncations={self._ring.shape.max_finals} episodes in the replay were truncated: the "
                "oldest of these truncations are not drawn, since their final observations are gone. Raise "
                "max_truncations",
                RuntimeWarning,
                stacklevel=3,
            )
        self.n_without_final += n_lost

    def _require_shape(self, samples: Any) -> None:
        """Raise `ConfigError` if the batch has too many rows or other columns than the ring, and `SpaceError` if the
        fields have other shapes or dtypes."""
        shape = self._ring.shape
        batch_T, batch_B = samples.env.reward.shape
        if batch_B != shape.B:
            raise ConfigError(f"the batch has {batch_B} columns, the replay {shape.B}: use one replay per sampler")
        if batch_T > shape.T:
            raise ConfigError(
                f"a batch of {batch_T} x {batch_B} steps does not fit into capacity={shape.T * shape.B}: raise "
                "capacity, or lower batch_T"
            )
        for name, given in (("observation", samples.env.observation), ("action", samples.agent.action)):
            found, expected = _layout(arrays(given), 2), self._layouts[name]
            if found != expected:
                raise SpaceError(f"the {name} of this batch is {found}, that of the first batch was {expected}")

    def _is_continued(self, env: Any, prev_action: Any, prev_done: Any) -> bool:
        """Whether row 0 follows the newest row of the ring, as far as its previous action and reward show it."""
        follows, arrays_, last = ~prev_done[0], self._ring.arrays, self._last_row
        same = (array(env.prev_reward)[0] == arrays_.reward[last])[follows].all()
        return bool(same) and _same(prev_action, arrays_.action, last, follows)

    @property
    def _last_row(self) -> int:
        return (self._ring.end - 1) % self._ring.T

    def _versions(self, version: Any, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        version = np.asarray(array(version), np.int32)
        if self._ring.end and (version < self._ring.arrays.policy_version[self._last_row]).any():
            raise ConfigError(
                f"policy_version={version} is lower than that of the batch before: versions must not fall. After "
                "replay.load, add the version that the earlier run had reached"
            )
        return np.broadcast_to(version, shape)

    def _finals(self, final_obs: Any, observation: Any, flags: npt.NDArray[np.uint8]) -> Any:
        """The final observations of the truncated steps `[n, ...]`."""
        t, b = np.nonzero(lacks_next(flags))
        if final_obs is None:
            if t.size:
                raise ConfigError(
                    "an episode was truncated, but the samples have no final_obs, whose value would be needed: make "
                    "the sampler with record_final_obs=True"
                )
            final_obs = observation
        return final_obs[t, b]

    def _rows_to_check(self, batch_T: int) -> npt.NDArray[np.intp]:
        if self._is_first or batch_T == 1:
            return np.arange(1, batch_T)
        return self._rng.integers(1, batch_T, max(1, round(_CHECKED * batch_T)))

    def _states(self, state: Any, flags: npt.NDArray[np.uint8]) -> Any:
        """The states of the steps that are multiples of `state_every`. Raises `ConfigError` if the agent does not seem
        to record them: they are all zero in the first batch."""
        every = self._ring.shape.state_every
        first = -self._ring.end % every
        kept = map_leaves(lambda leaf: leaf[first::every], state)
        if self._is_first and first + every < len(flags):
            rows = slice(first + every, None, every) if first == 0 else slice(first, None, every)
            goes_on = (flags[rows] & (BEGINS | VALID)) == VALID
            leaves = [leaf for _, leaf in state.leaves()] if isinstance(state, NamedArrays) else [state]
            if goes_on.any() and not any(leaf[rows][goes_on].any() for leaf in leaves):
                raise ConfigError(
                    f"the recurrent states are all zero inside the batch: with state_every={every}, make the agent "
                    'with record_state="step", or set state_every=batch_T'
                )
        return kept


def _layout(tree: Any, n_leading: int = 0) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Name, shape and dtype of each leaf, without the leading dimensions."""
    leaves = tree.leaves() if isinstance(tree, NamedArrays) else [("", tree)]
    return [(path, leaf.shape[n_leading:], leaf.dtype) for path, leaf in leaves]


def _same(rows: Any, kept: Any, last: int, where: npt.NDArray[np.bool_]) -> bool:
    """Whether row 0 of every leaf is equal to row `last` of `kept` in the columns `where`."""
    if isinstance(rows, NamedArrays):
        return all(_same(part, kept[name], last, where) for name, part in rows.items())
    return bool((rows[0] == kept[last])[where].all())
