"""Replay: keeps the newest steps of a sampler, and draws batches of them for off-policy learners."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, overload

import numpy as np
from numpy.typing import NDArray

from penstock.arguments import between, integer, must_be, number, optional
from penstock.buffers import Samples
from penstock.buffers.ordering import fence
from penstock.errors import ConfigError, SamplerStateError, brief
from penstock.learning.appending import Appender, shape_of
from penstock.learning.checkpoint import read_index, read_priorities, read_steps, saved_shape, write_checkpoint
from penstock.learning.contents import Contents
from penstock.learning.feed import FeedingSampler, Ratio, ReplayFeed
from penstock.learning.options import Frames, Prioritized, Sequences
from penstock.learning.position_draws import DrawIndex, UniformDraw
from penstock.learning.priorities import PriorityDraw
from penstock.learning.replay_batches import ReplayBatch, SequenceBatch, SequenceReader, TransitionReader, move
from penstock.learning.ring import Estimate, Ring, Shape
from penstock.learning.sum_tree import SumTree
from penstock.learning.windows import Positions, WindowReader

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeVar

    Numbers = Tensor | NDArray[Any] | Sequence[float]  #: `[N]`
    Batch = TypeVar("Batch", bound=ReplayBatch | SequenceBatch, default=ReplayBatch)
else:
    from typing import TypeVar

    Batch = TypeVar("Batch")

_OPTIONS = {"prioritized": Prioritized, "sequences": Sequences, "frames": Frames}
_SETTINGS = ("capacity", "n_step", "discount", "max_truncations", "n_drawn")


@dataclass(frozen=True)
class _Storage:
    """What exists from the first batch on."""

    ring: Ring
    appender: Appender
    reader: TransitionReader | SequenceReader
    places: DrawIndex
    draw: UniformDraw | PriorityDraw


class Replay(Generic[Batch]):
    """A ring of the newest `capacity` steps, which any sampler's batches fill.

    Args:
        capacity: steps to keep, of all environments together. It is rounded up to whole rows of `B` steps.
        n_step: the length of n-step returns; shorter where an episode ends.
        discount: the factor for each time step between now and a later reward or value.
        prioritized: draw by priority instead of uniformly; see `Prioritized`.
        sequences: draw sequences instead of transitions; see `Sequences`.
        frames: observations are stacks of frames; keep each frame once. See `Frames`.
        file: keep the steps in this file, for replays that are larger than the memory. The file must not exist. Its
            name is removed at once, so nothing is left of it when the process ends: use `save` to keep the steps.
        max_truncations: final observations to keep. By default, one for each 32 steps. If there are more truncated
            episodes in the ring, windows that end with the oldest truncations are not drawn. `n_without_final` counts
            these truncations.
        seed: fixes the draws; None: a different seed each time.

    A step has an absolute position, its *index*: `step * B + b`, where `step` counts the rows since the first batch.
    Positions never repeat. `replay.update` with the index of a step that was overwritten in the meantime changes
    nothing, and is counted (`n_stale`).

    No window contains a row that is not in the ring, a row of another episode, or one that is not valid. A sequence may
    contain several episodes: `prev_done` is True where one begins.
    Memory is allocated at the first `append`, which raises `ConfigError` if there is not enough; see `estimate`.
    """

    if TYPE_CHECKING:  # what `sample` returns depends on `sequences`

        @overload
        def __init__(
            self: Replay[ReplayBatch],
            capacity: int,
            n_step: int = 1,
            discount: float = 0.99,
            prioritized: Prioritized | None = None,
            sequences: None = None,
            frames: Frames | None = None,
            file: str | os.PathLike[str] | None = None,
            *,
            max_truncations: int | None = None,
            seed: int | None = None,
        ) -> None: ...
        @overload
        def __init__(
            self: Replay[SequenceBatch],
            capacity: int,
            n_step: int = 1,
            discount: float = 0.99,
            prioritized: Prioritized | None = None,
            *,
            sequences: Sequences,
            frames: Frames | None = None,
            file: str | os.PathLike[str] | None = None,
            max_truncations: int | None = None,
            seed: int | None = None,
        ) -> None: ...

    def __init__(
        self,
        capacity: int,
        n_step: int = 1,
        discount: float = 0.99,
        prioritized: Prioritized | None = None,
        sequences: Sequences | None = None,
        frames: Frames | None = None,
        file: str | os.PathLike[str] | None = None,
        *,
        max_truncations: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.capacity = integer("capacity", capacity, 1)
        self.n_step, self.discount = integer("n_step", n_step, 1), number("discount", discount, 1.0)
        kinds = {"prioritized": Prioritized, "sequences": Sequences, "frames": Frames}
        for (name, cls), value in zip(kinds.items(), (prioritized, sequences, frames), strict=True):
            must_be(name, value, value is None or isinstance(value, cls), f"{cls.__name__}(...) or None")
        self.prioritized, self.sequences, self.frames, self.file = prioritized, sequences, frames, file
        self.max_truncations = optional(between(1))("max_truncations", max_truncations)
        must_be("file", file, isinstance(file, str | os.PathLike | None), "a path or None")
        self._beta = prioritized.beta if prioritized else 0.0
        self._alpha = prioritized.alpha if prioritized else 0.0
        #: Positions drawn so far.
        self.n_drawn = 0
        self._rng = np.random.default_rng(None if seed is None else integer("seed", seed, 0, None))
        self._storage: _Storage | None = None
        self._file_owner: int | None = None
        self._feeder: weakref.ref[ReplayFeed] | None = None  # so that no cycle keeps the memory
        self._has_warned = False
        self._last: Any = None  # the batch that was appended last

    # ---- append ----------------------------------------------------------------------------

    def append(self, samples: Samples, *, policy_version: int | Numbers | None = None, continues: bool = True) -> None:
        """Copy a batch `[T, B]` of a sampler into the ring.

        Append every batch, in order: each continues the episodes of the one before. If the first row does not follow
        the newest one (`prev_action` and `prev_reward` show it), or with `continues=False`, no window and no sequence
        crosses the gap.

        `policy_version`, one number or `[B]`, is kept for `sample(newer_than=...)`. It must not fall from batch to
        batch. The default is `samples.agent.policy_version`, or 0.

        Raises `ConfigError` if the ring does not fit into the memory, if the batch does not fit into the ring, or if a
        sampler's batch is appended twice in a row. Raises `SpaceError` if shapes or dtypes have changed, or if
        observations are no stacks of frames.
        """
        if self._feeder is not None:
            raise ConfigError("the workers of a sampler write into this replay: use another one for other batches")
        self._require_own("append")
        storage = self._storage = self._storage or self._allocate(self._shape_for(samples))
        batch = storage.appender.bind(samples)
        if samples is self._last and samples.batch is not None:  # a batch of a sampler, not the user's own arrays
            raise ConfigError(f"batch {samples.batch} is in the replay already: append each batch once")
        storage.appender.append(batch, policy_version, continues)
        self._last = samples
        self._warn_of_lost_finals()

    def _warn_of_lost_finals(self) -> None:
        if not self._has_warned and self.n_without_final:
            self._has_warned = True
            shape = self._require_storage("append").ring.shape
            warnings.warn(
                f"more than max_truncations={shape.n_finals} episodes in the replay were "
                "truncated: the oldest of these truncations are not drawn, since their final observations are gone. "
                "Raise max_truncations",
                RuntimeWarning,
                stacklevel=3,
            )

    def make_feed(self, sampler: FeedingSampler, ratio: Ratio | None, *, is_pinned: bool) -> ReplayFeed:
        """Link the replay with an `AsyncSampler`, which calls this. `is_pinned`: draws see whole batches that the
        learner has taken, and no others."""
        must_be("ratio", ratio, isinstance(ratio, Ratio | None), "a penstock.learning.Ratio or None")
        return ReplayFeed(sampler, self, ratio, is_pinned=is_pinned)

    def feed_from(
        self, feeder: ReplayFeed, samples: Samples, columns: Sequence[range], rows_ahead: int, spare_finals: int = 0
    ) -> Appender:
        """For `AsyncSampler`: from now on workers write into the ring, worker i into `columns[i]`. Returns their
        appender.

        `samples` `[T, B]` is an example. No worker is more than `rows_ahead` rows ahead of another. Each keeps
        `spare_finals` final observations more than its share.
        """
        if (before := self._live_feeder()) is not None and before.is_feeding:
            raise ConfigError("another sampler writes into this replay: shut it down first, or use another replay")
        shape, old = self._shape_for(samples), self._storage
        n, sizes = len(columns), tuple(map(len, columns))
        max_finals = -(-shape.max_finals // n) + spare_finals
        shape = replace(shape, n_writers=n, writer_columns=sizes, max_finals=max_finals, spare_finals=spare_finals)
        storage = self._allocate(shape, rows_ahead)
        if old is not None and old.ring.end:
            storage = self._move(old, storage)
        self._storage, self._feeder = storage, weakref.ref(feeder)
        return storage.appender

    @property
    def _batch_cls(self) -> type[Any]:
        return ReplayBatch if self.sequences is None else SequenceBatch

    def _stand_still(self) -> AbstractContextManager[None]:
        """A context in which no worker writes."""
        feeder = self._live_feeder()
        return nullcontext() if feeder is None else feeder.stand_still()

    def _live_feeder(self) -> ReplayFeed | None:
        return None if self._feeder is None else self._feeder()

    def _move(self, before: _Storage, storage: _Storage) -> _Storage:
        """`storage`, with the steps and priorities of `before`."""
        move(before.ring, storage.ring)
        if isinstance(before.draw, PriorityDraw) and isinstance(storage.draw, PriorityDraw):
            before.draw.catch_up()
            storage.draw.restore(before.draw.low, before.draw.high, before.draw.leaves())
            storage.draw.n_stale = before.draw.n_stale
        return replace(storage, appender=Appender(storage.ring, self.frames))

    def estimate(self, samples: Samples) -> Estimate:
        """The memory that this replay takes: print it. Nothing is allocated.

        `samples` is a batch, or what `sampler.initialize` returns: an example of one step.
        """
        shape = self._shape_for(samples)
        n_places = shape.T * shape.B // shape.state_every
        return Estimate.of(shape, SumTree.nbytes(n_places) if self.prioritized else 0)

    def _shape_for(self, samples: Samples) -> Shape:
        return shape_of(samples, self.capacity, self.frames, self.sequences, self.max_truncations)

    def _allocate(self, shape: Shape, rows_ahead: int | None = None) -> _Storage:
        """`rows_ahead`: how many rows writers in other processes may be ahead; None if this process writes."""
        ring = Ring(shape, shared=rows_ahead is not None, file=self.file)
        self._file_owner = None if self.file is None else os.getpid()
        # Stacks of frames and sequences are made of rows that follow each other.
        resumes = self.frames is None and self.sequences is None
        windows = WindowReader(ring, self.n_step, self.discount, resumes=resumes)
        reader: TransitionReader | SequenceReader
        if self.sequences is None:
            reader = TransitionReader(ring, windows, self.frames)
        else:
            reader = SequenceReader(ring, windows, self.frames, self.sequences)
        n_rows, ahead = reader.back + reader.ahead + 1, rows_ahead or 0
        if n_rows + ahead > shape.T:
            writers = f", and workers may be writing {ahead} others" if ahead else ""
            raise ConfigError(
                f"capacity={self.capacity} is {shape.T} rows of B={shape.B} steps, but a window has {n_rows} rows"
                f"{writers}: raise capacity"
            )
        places = DrawIndex(ring, reader)
        draw = UniformDraw(places) if self.prioritized is None else PriorityDraw(places, self.prioritized.min_priority)
        return _Storage(ring, Appender(ring, self.frames), reader, places, draw)

    # ---- sample ----------------------------------------------------------------------------

    def sample(self, n: int, *, newer_than: int | None = None, out: Batch | None = None) -> Batch:
        """A `ReplayBatch`, or with `sequences` a `SequenceBatch`, of `n` positions, as torch tensors.

        The batch has its own memory, which is not overwritten. `newer_than`: only steps of later policy versions.
        `out`: an earlier batch of the same size, whose memory is used again for the large fields.

        If the workers of an `AsyncSampler` write into this replay, this first waits as its `ratio` says, and raises a
        `SamplerBrokenError` if a worker has failed.

        Raises `SamplerStateError` if no step can be drawn yet.
        """
        n = integer("n", n, 1)
        if newer_than is not None and self.prioritized is not None:
            raise ConfigError("newer_than needs a replay without priorities: make it with prioritized=None")
        batch_cls = self._batch_cls
        if out is not None and not isinstance(out, batch_cls):
            raise ConfigError(f"out must be an earlier {batch_cls.__name__} of this replay or None, got {brief(out)}")
        if out is not None and len(out.index) != n:
            raise ConfigError(f"out has {len(out.index)} positions, but {n} are to be drawn: it must have as many")
        if (feeder := self._live_feeder()) is not None:
            feeder.before_sample(n)
            self._warn_of_lost_finals()
        storage = self._require_storage("sample")
        into: Any = None if out is None else out.numpy()
        while True:
            places = storage.draw.draw(n, self._rng, newer_than)
            positions = storage.places.positions(places)
            while (fields := storage.reader.read(positions, into)) is None:  # some places are not eligible
                places = storage.draw.redraw(places, self._rng, newer_than)
                positions = storage.places.positions(places)
            if self._is_whole(storage, positions):
                break
        fields["index"] = positions
        weight = storage.draw.weight(places, self.beta)
        if weight is not None:
            fields["weight"] = weight
        self.n_drawn += n
        batch: Any = batch_cls(fields).torch()
        return batch  # type: ignore[no-any-return]

    def _is_whole(self, storage: _Storage, positions: Positions) -> bool:
        """Whether no other process has overwritten these rows while they were read."""
        ring = storage.ring
        if not ring.is_shared:
            return True
        fence()
        is_eligible = storage.reader.eligible(positions).all()
        fence()
        first = ring.first
        oldest = int(positions.min()) // ring.B - storage.reader.back
        # As long as the ring has all rows, none has been overwritten. `oldest` may be less than 0 then.
        return bool(is_eligible) and (first == 0 or oldest >= first)

    def update(self, index: Numbers, priority: Numbers) -> None:
        """Set the priorities `[N]` of the positions `index` `[N]` of a batch: tensors or arrays.

        Of equal indices, the largest priority counts. A priority below `Prioritized.min_priority` counts as that. Steps
        that were overwritten in the meantime are left out, and counted in `n_stale`. Raises `ConfigError` for negative
        or infinite priorities, and where `priority ** alpha` is more than 1e290.
        """
        draw = self._require_storage("update").draw
        if not isinstance(draw, PriorityDraw):
            raise ConfigError("this replay has no priorities: make it with prioritized=Prioritized()")
        positions = _numbers("index", index, np.int64)
        priorities = _numbers("priority", priority, np.float64)
        if len(positions) != len(priorities):
            raise ConfigError(f"update got {len(positions)} indices and {len(priorities)} priorities")
        draw.update(positions, priorities, self.alpha)

    @property
    def contents(self) -> Contents[Batch]:
        """The rows that the replay holds, all positions that it could draw, and the batches at these positions."""
        storage, batch_cls = self._require_storage("contents"), self._batch_cls
        priorities = storage.draw if isinstance(storage.draw, PriorityDraw) else None
        return Contents(storage.places, priorities, batch_cls, self._stand_still)

    # ---- checkpoints -----------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the steps, the priorities, the counts and the state of the draws into `folder`.

        If this fails, or the process is killed meanwhile, the folder keeps the checkpoint that it had. Workers that
        write into the replay finish their batches first, and wait. Raises `ConfigError` if the folder cannot be
        written, for example because the disk is full.
        """
        with self._stand_still():
            self._save(_path(folder), self._require_storage("save"))

    def _save(self, folder: Path, storage: _Storage) -> None:
        draw, leaves, places = storage.draw, None, None
        if isinstance(draw, PriorityDraw):
            draw.catch_up()
            places, leaves = [draw.low, draw.high], draw.leaves()
        options = {name: getattr(self, name) for name in _OPTIONS}
        facts = {
            "options": {name: asdict(option) if option else None for name, option in options.items()},
            **{name: getattr(self, name) for name in _SETTINGS},
            "alpha": self.alpha,
            "beta": self.beta,
            "generator": self._rng.bit_generator.state,
            "n_stale": self.n_stale,
            "n_without_final": self.n_without_final,
            "places": places,
        }
        write_checkpoint(folder, storage.ring, facts, leaves)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        capacity: int | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> Replay[Any]:
        """The replay that was saved in `folder`. It draws what the saved one would have drawn next.

        With another `capacity`, it keeps as many of the newest steps as fit, and the draws may differ. The next batch
        that is appended is taken for the first one of a new sampler: no window crosses from the saved steps to it.

        Raises `ConfigError` if there is no checkpoint, if it is damaged, or if there is not enough memory.
        """
        index = read_index(path := _path(folder))
        saved = index["options"]
        arguments = {name: index[name] for name in ("capacity", "n_step", "discount", "max_truncations")}
        arguments |= {name: option(**saved[name]) if saved[name] else None for name, option in _OPTIONS.items()}
        if capacity is not None:
            arguments["capacity"] = capacity
        replay = cls(**arguments, file=file)
        replay._alpha, replay._beta, replay.n_drawn = index["alpha"], index["beta"], index["n_drawn"]
        replay._rng.bit_generator.state = index["generator"]
        every, B = index["state_every"], index["shape"]["B"]
        shape = saved_shape(index, -(-replay.capacity // (B * every)) * every)
        storage = replay._storage = replay._allocate(shape)
        read_steps(path, index, storage.ring)
        replay._has_warned = replay.n_without_final > 0
        if isinstance(storage.draw, PriorityDraw):
            storage.draw.n_stale = index["n_stale"]
            low, high = index["places"]
            storage.draw.restore(low, high, read_priorities(path, index))
        return replay

    def _require_storage(self, call: str) -> _Storage:
        if self._storage is None:
            raise SamplerStateError(f"replay.{call} came before the first replay.append")
        self._require_own(call)
        return self._storage

    def _require_own(self, call: str) -> None:
        """A fork shares the file, and would write into the rows of its parent, or read them while they change."""
        if self._file_owner not in (None, os.getpid()):
            raise SamplerStateError(
                f"replay.{call} was called in process {os.getpid()}, a fork of process {self._file_owner}, to which "
                "this replay and its file belong: make another replay here, or one without a file, which is copied"
            )

    # ---- counts and settings ---------------------------------------------------------------

    @property
    def n_steps(self) -> int:
        """Steps appended so far, whether they are still in the ring or not."""
        return 0 if self._storage is None else self._storage.ring.end * self._storage.ring.B

    @property
    def alpha(self) -> float:
        """The exponent of the priorities. If you set it, all priorities in the replay get the new exponent. This takes
        time in proportion to `capacity`. With an exponent of 0, all steps are drawn equally often."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        alpha = number("alpha", alpha)
        if self._storage is not None and isinstance(draw := self._storage.draw, PriorityDraw):
            draw.change_alpha(self._alpha, alpha)
        self._alpha = alpha

    @property
    def beta(self) -> float:
        """The exponent of the weights of a batch. You may set it at any time."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = number("beta", beta)

    def __repr__(self) -> str:
        options = {"n_step": self.n_step, "discount": self.discount}
        options |= {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        settings = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"<Replay({self.capacity}, {settings}) with {len(self)} steps>"

    def __len__(self) -> int:
        if self._storage is None:
            return 0
        ring = self._storage.ring
        return (ring.end - ring.first) * ring.B

    @property
    def is_ready(self) -> bool:
        """Whether there are complete windows. Even then, all of them may be ineligible, for example not valid."""
        if self._storage is None:
            return False
        low, high = self._storage.places.bounds()
        return high > low

    @property
    def nbytes(self) -> int:
        """Bytes of the ring, without the priorities. 0 before the first `append`."""
        return 0 if self._storage is None else sum(leaf.nbytes for _, leaf in self._storage.ring.arrays.leaves())

    @property
    def n_stale(self) -> int:
        """Priorities that `update` has left out, since their steps were overwritten."""
        draw = None if self._storage is None else self._storage.draw
        return draw.n_stale if isinstance(draw, PriorityDraw) else 0

    @property
    def n_without_final(self) -> int:
        """Truncated steps whose final observation was overwritten before the steps were. They are not drawn."""
        return 0 if self._storage is None else self._storage.ring.n_lost


def _numbers(name: str, values: object, dtype: type) -> NDArray[Any]:
    """A tensor's values without its graph and device, or an array or a list, as an array `[N]`."""
    on_cpu = values.detach().cpu().numpy() if hasattr(values, "detach") else values
    try:
        return np.ascontiguousarray(on_cpu, dtype).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} must be a tensor or an array of numbers [N], got {brief(values)}") from error


def _path(folder: object) -> Path:
    return Path(must_be("folder", folder, isinstance(folder, str | os.PathLike), "the path of a folder"))
