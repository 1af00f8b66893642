"""A batch `[T, B]` as the user sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

import numpy as np

from penstock.arguments import one_of
from penstock.buffers.named import FixedFields, NamedArrays, _make, copied, map_leaves
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import map_tree
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import Self

_Named = TypeVar("_Named", bound=NamedArrays)
PER_COLUMN = ("bootstrap_obs", "bootstrap_value")  # fields without a dimension of time


class _StepFields(FixedFields):
    """Fields `[T, B, ...]`, and one field `[B, ...]` about the time after the last row.

    An index of time does not apply to this field. It is left out of a part that ends before the last row.
    """

    __slots__ = ()
    _after_last: ClassVar[str]

    def _field_index(self, name: str, loc: Any) -> Any:
        if name != self._after_last:
            return loc
        has_columns = isinstance(loc, tuple) and len(loc) > 0 and loc[0] is not Ellipsis
        return loc[1:] if has_columns else ...

    def _without(self, loc: object) -> Any:
        """These fields, without the one after the last row if `loc` cuts rows off the end."""
        if self._after_last not in self._values or isinstance(loc, str):
            return self
        rows = loc[0] if isinstance(loc, tuple) and loc else loc
        if isinstance(rows, slice):
            n = next((len(leaf) for name, leaf in self.leaves() if name.split(".")[0] != self._after_last), 0)
            start, stop, step = rows.indices(n)
            if step == 1 and stop == n > start:
                return self
        elif rows is Ellipsis or rows is None or isinstance(rows, int | np.integer):
            return self
        return _make(type(self), {name: value for name, value in self._values.items() if name != self._after_last})

    @overload
    def __getitem__(self, loc: str) -> Any: ...
    @overload
    def __getitem__(self, loc: object) -> Self: ...
    def __getitem__(self, loc: object) -> Any:
        kept = self._without(loc)
        return super().__getitem__(loc) if kept is self else kept[loc]

    def __setitem__(self, loc: object, value: object) -> None:
        kept = self._without(loc)
        if kept is self:
            super().__setitem__(loc, value)
            return
        if isinstance(value, _StepFields):
            value = {name: part for name, part in value.items() if name != self._after_last}
        kept[loc] = value


class EnvSamples(_StepFields):
    """What the environments reported. Fields are `[T, B, ...]`, except `bootstrap_obs`, which is `[B, ...]`."""

    __slots__ = ()
    _after_last = "bootstrap_obs"
    _remedies: ClassVar[Mapping[str, str]] = {
        "final_obs": "make the sampler with record_final_obs=True",
        "env_info": "make the sampler with env_info=[...], the names of entries of info",
        "extra": "declare extra_fields in the class of the collector",
    }
    observation: Any  #: what the agent acted on at step t
    reward: Tensor  #: float32, for the action taken at t
    prev_reward: Tensor  #: `reward` one step earlier; row 0 is from before the batch
    terminated: Tensor  #: bool, Gymnasium's
    truncated: Tensor  #: bool, Gymnasium's
    done: Tensor  #: bool, terminated or truncated
    prev_done: Tensor  #: bool, `done` one valid step earlier; in row 0, True where an episode starts
    #: bool, False where the environment waited for a reset (`WaitResetCollector`) or was only reset (a batched one in
    #: the mode NEXT_STEP), or a seat was idle, or has made fewer decisions than there are rows
    valid: Tensor
    env_info: NamedArrays  #: the chosen entries of `info`; field `_name` is True where the environment returned `name`
    extra: NamedArrays  #: what the collector has written: the fields that its class declares in `extra_fields`
    final_obs: Any  #: the true last observation where `done`, zero elsewhere
    bootstrap_obs: Any  #: `[B, ...]`, the observation after the last step; that of the next episode after an end

    @property
    def global_state(self) -> Any:
        """The state of the whole environment `[T, B, ...]`, if the sampler was made with `global_state=True`: an entry
        of the observations."""
        return self.observation.global_state

    @property
    def next_observation(self) -> Any:
        """The observation after each action `[T, B, ...]`: `final_obs` where the episode ended. A copy.

        Raises `ConfigError` if the sampler does not record `final_obs`, or if rows were cut off the end.
        """
        if "bootstrap_obs" not in self:
            raise ConfigError(
                "the observation after the last row is not in these samples: an index has cut rows off the end, or "
                "joined the dimensions. Take next_observation or transitions() of the whole batch, or of whole columns"
            )
        done = self.done
        if "final_obs" not in self and bool(done.any()):
            raise ConfigError(
                "an episode ended in this batch, and its last observation was not recorded: make the sampler with "
                "record_final_obs=True"
            )
        final = self.final_obs if "final_obs" in self else self.observation

        def following(observation: Any, after: Any, last: Any) -> Any:
            rows = _concatenated([observation[1:], after[None]])
            ended = done.reshape(*done.shape, *[1] * (rows.ndim - done.ndim))
            return last.where(ended, rows) if _is_tensor(rows) else np.where(ended, last, rows)

        return map_tree(following, self.observation, self.bootstrap_obs, final)


class AgentSamples(_StepFields):
    """What the agent did. Fields are `[T, B, ...]`, except `bootstrap_value`, which is `[B]`."""

    __slots__ = ()
    _after_last = "bootstrap_value"
    _remedies: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("bootstrap_value", "final_value"), "call sampler.initialize(agent, bootstrap_value=True)"
    )
    action: Any  #: the action taken at t
    prev_action: Any  #: `action` one step earlier; row 0 is from before the batch
    agent_info: NamedArrays  #: what `agent.step` returned beside the action
    bootstrap_value: Tensor  #: `[B]`, value of the observation after the last step
    final_value: Tensor  #: value of `final_obs` where truncated and not terminated, zero elsewhere
    policy_version: Tensor  #: int64, the version of the parameters that acted; the same in all rows of a column


class Transitions(FixedFields):
    """N steps with what came after them. Every field is `[N, ...]`."""

    __slots__ = ()
    observation: Any  #: what the agent acted on
    action: Any  #: the action it took
    reward: Tensor  #: float32, for this action
    next_observation: Any  #: the observation after the action: `final_obs` where the episode ended
    discount: Tensor  #: float32, the factor of the value of `next_observation`: 0 where terminated
    terminated: Tensor  #: bool, Gymnasium's
    truncated: Tensor  #: bool, Gymnasium's
    agent_info: NamedArrays  #: what `agent.step` returned beside the action
    env_info: NamedArrays  #: only if the samples have it
    extra: NamedArrays  #: the same for the fields of a collector


@dataclass(slots=True)
class BatchStatus:
    """The number of a batch, and whether its memory still holds it. The sampler writes it, and `Samples` shows it."""

    batch: int | None  #: None: memory that was not handed out
    valid_until: int | None
    is_current: bool = True
    n_seats: int | None = None  #: as in `SampleSpec`


class Samples(FixedFields):
    """One batch: `samples.env` and `samples.agent`. An index applies to all fields: `samples[t0:t1, 3]`.

    The arrays are views of the buffer that the workers write into. A later batch overwrites them: see `is_current` and
    `valid_until`. `samples.copy()` copies the arrays.

    A learner adds its own fields with `with_targets`, and takes the batch apart with `flatten`, `minibatches`,
    `sequences` or `transitions`. `bootstrap_obs` and `bootstrap_value` belong to the end of the batch. So a part
    without its last row, and what these four methods return, does not contain them.
    """

    __slots__ = ("_status",)
    if TYPE_CHECKING:
        _status: BatchStatus | None
    env: EnvSamples
    agent: AgentSamples
    targets: NamedArrays  #: `[T, B, ...]`, what `with_targets` has added

    # ---- for learners ----------------------------------------------------------------------

    def with_targets(self, **targets: Any) -> Samples:
        """The same samples, with these arrays `[T, B, ...]` in `samples.targets`. Earlier targets stay.

        Every index and method applies to them too: `samples.with_targets(advantage=advantage).minibatches(8)`."""
        shape = tuple(self.env.valid.shape)
        for name, leaf in NamedArrays(targets).leaves():
            if not hasattr(leaf, "shape"):
                raise ConfigError(f"target {name} must be an array {list(shape)}, it is a {type(leaf).__name__}")
            if tuple(leaf.shape[: len(shape)]) != shape:
                raise ConfigError(f"target {name} must be an array {list(shape)}, it has {list(leaf.shape)}")
        joined = {**dict(self._values.get("targets", NamedArrays()).items()), **targets}
        new: Samples = _make(type(self), {**self._values, "targets": NamedArrays(joined)})
        return with_status(new, self.status)

    def select(self, *names: str) -> Samples:
        """Only these fields: `samples.select("env.observation", "agent.action")`, and always `env.valid` and `targets`.

        Fewer fields make copies, minibatches and `to(device)` faster. Raises `ConfigError` for an unknown name.
        """
        paths = {path for path, _ in self.leaves()}
        for name in names:
            if not any(path == name or path.startswith(f"{name}.") for path in paths):
                raise ConfigError(f"select: there is no field {name!r}; there are {', '.join(sorted(paths))}")

        kept_names = (*names, "env.valid", "targets")
        if any(name.startswith("agent.agent_info.prev_rnn_state") for name in names):
            kept_names += ("agent.agent_info.has_rnn_state",)  # for the check of `sequences`

        def part_of(node: _Named, prefix: str) -> _Named:
            kept = {}
            for key, value in node.items():
                path = f"{prefix}{key}"
                if any(path == name or path.startswith(f"{name}.") for name in kept_names):
                    kept[key] = value
                elif isinstance(value, NamedArrays) and any(name.startswith(f"{path}.") for name in names):
                    kept[key] = part_of(value, f"{path}.")
            return _make(type(node), kept)

        parts = {key: part_of(part, f"{key}.") for key, part in self.items()}
        return with_status(_make(type(self), parts), self.status)

    def flatten(self) -> Samples:
        """The valid steps as rows: every field is `[N, ...]`. Step t of column b comes before step t of column b + 1.

        If every step is valid, these are views of the same memory. Otherwise they are copies.
        """
        T, B = _dimensions(self, "flatten")
        rows = _per_step(self, lambda leaf: leaf.reshape(T * B, *leaf.shape[2:]))
        valid = rows.env.valid
        return with_status(rows, self.status) if bool(valid.all()) else rows[valid]

    def minibatches(
        self, n: int, rng: np.random.Generator | torch.Generator | None = None, *, length: int | None = None
    ) -> Iterator[Samples]:
        """The valid steps in random order, in `n` parts `[N / n, ...]`. Copies. Sizes differ by one at most.

        With `length`, the parts consist of whole sequences: `[length, N / n, ...]`, see `sequences`.
        `rng` is a generator of numpy or torch. None takes torch's global generator, as `torch.randperm` does.
        """
        whole = self.flatten() if length is None else self.sequences(length)
        valid = whole.env.valid
        size, unit = valid.shape[-1], "steps" if length is None else "sequences"
        if not (_is_integer(n) and 1 <= n <= size):
            raise ConfigError(
                f"the number of minibatches must be an integer from 1 to the {size} {unit} that there are, got {n!r}"
            )
        whole = _make(type(whole), whole._values)  # without its status, since its parts are copies
        return (whole[part] if length is None else whole[:, part] for part in _shuffled(size, rng, valid, n))

    def sequences(self, length: int) -> Samples:
        """Every column cut into sequences of `length` rows: `[length, N, ...]`, for recurrent models.

        `initial_state` is the recurrent state before their first row. An episode may end within a sequence: reset the
        state where `env.done`. Steps that are not valid stay in their sequence. Sequences without a valid step are left
        out. `length` must divide T. With `length=T` these are views of the same memory.

        Raises `ConfigError` if these rows have no recorded state (`record_state="batch"` of the agent).
        """
        T, B = _dimensions(self, "sequences")
        if not _is_integer(length) or length < 1 or T % length:
            raise ConfigError(
                f"the length of sequences must be an integer that divides the {T} rows of these samples, got {length!r}"
            )
        n = T // length
        if n == 1:
            cut = with_status(_per_step(self, lambda leaf: leaf), self.status)
        else:
            _require_states(self, length)
            cut = _per_step(
                self,
                lambda leaf: (
                    leaf.reshape(n, length, *leaf.shape[1:]).swapaxes(0, 1).reshape(length, n * B, *leaf.shape[2:])
                ),
            )
        has_steps = cut.env.valid.any(0)
        return cut if bool(has_steps.all()) else cut[:, has_steps]

    @property
    def initial_state(self) -> Any:
        """The recurrent state before the first row `[B, ...]`, as the agent recorded it."""
        info = self.agent.agent_info
        if "prev_rnn_state" not in info:
            raise ConfigError('no recurrent state was recorded: use a recurrent agent with record_state="step"')
        return info.prev_rnn_state[0]

    def transitions(self, discount: float = 1.0) -> Transitions:
        """The valid steps as rows, with the observation and the discount after each of them.

        The target of a value is `reward + discount * value(next_observation)`. `discount` is 0 where the episode
        terminated, and the given number everywhere else, also where it was truncated. There, `next_observation` is the
        last observation of the episode.

        Raises `ConfigError` if the sampler does not record `final_obs`.
        """
        T, B = _dimensions(self, "transitions")
        env, agent = self.env, self.agent
        discounts = copied(env.reward)
        discounts[...] = discount
        discounts[env.terminated] = 0
        steps = Transitions(
            observation=env.observation,
            action=agent.action,
            reward=env.reward,
            next_observation=env.next_observation,
            discount=discounts,
            terminated=env.terminated,
            truncated=env.truncated,
            agent_info=agent.agent_info,
            **{name: env[name] for name in ("env_info", "extra") if name in env},
        )
        rows = steps.map(lambda leaf: leaf.reshape(T * B, *leaf.shape[2:]))
        valid = env.valid.reshape(T * B)
        return rows if bool(valid.all()) else rows[valid]

    def by_env(self, n_seats: int | None = None) -> Samples:
        """Samples of several agents, with a dimension for each: views `[T, environments, n_seats, ...]` of the same
        memory. Fields without a dimension of time are `[environments, n_seats, ...]`.

        A copy does not know `n_seats`, the agents in each environment: then give it. Raises `ConfigError` if their
        number differs between environments, and for samples of one agent.
        """
        _, B = _dimensions(self, "by_env")
        known = None if self.status is None else self.status.n_seats
        n = known if n_seats is None else n_seats
        if not _is_integer(n) or n is None or n < 1 or B % n or known not in (None, n):
            why = {None: "is not known", 0: "differs between environments"}.get(n, f"cannot be {n!r}")
            raise ConfigError(
                f"by_env needs the same number of agents in each environment. For these {B} columns it {why}"
            )

        def divided(name: str, field: Any) -> Any:
            at = int(name not in PER_COLUMN)
            return map_leaves(lambda leaf: leaf.reshape(*leaf.shape[:at], B // n, n, *leaf.shape[at + 1 :]), field)

        parts = {
            name: _make(type(part), {key: divided(key, field) for key, field in part.items()})
            for name, part in self.items()
        }
        return with_status(_make(type(self), parts), self.status)

    def to(self, device: str | int | torch.device) -> Samples:
        """The same samples as torch tensors on `device`. On the CPU nothing is copied. Raises `ConfigError` if torch
        cannot move them there."""
        import torch

        try:
            target = torch.device(device)
            moved = self.map(lambda leaf: torch.as_tensor(leaf).to(target))
        except (AssertionError, ImportError, RuntimeError) as error:  # there is none, or no memory is left there
            raise ConfigError(
                f'the samples cannot be moved to device="{device}": {in_one_line(error)}. Give a device that this '
                'machine and this build of torch have, such as "cpu"'
            ) from error
        return with_status(moved, self.status) if target.type == "cpu" else moved

    @staticmethod
    def cat(parts: Sequence[Samples], dim: Literal["T", "B"] = "T") -> Samples:
        """These samples as one, in new memory: fields `[sum of T, B, ...]` for "T", `[T, sum of B, ...]` for "B".

        Along T, `bootstrap_obs` and `bootstrap_value` are those of the last part, so each part must begin where the one
        before it ends. Rows that `flatten` has returned are joined in any order. All parts need the same fields. A
        synchronous sampler overwrites a batch with the next one: give copies, `[first.copy(), second]`.

        Raises `ConfigError` for parts that do not fit together, and for those that a later batch has overwritten.
        """
        one_of("dim", dim, ("T", "B"))
        axis = "TB".index(dim)
        _require_fit(parts, axis)

        def joined(name: str, key: str) -> Any:
            has_rows = key not in PER_COLUMN
            own = parts if has_rows or axis else parts[-1:]
            return _joined([part[name][key] for part in own], axis if has_rows else 0)

        last: Samples = parts[-1]
        fields = {
            name: _make(type(node), {key: joined(name, key) for key, _ in node.items()}) for name, node in last.items()
        }
        return _make(type(last), fields)

    # ---- validity --------------------------------------------------------------------------

    @property
    def status(self) -> BatchStatus | None:
        """The number and the validity of the batch whose memory this is; None for a copy."""
        return getattr(self, "_status", None)

    @property
    def batch(self) -> int | None:
        """The number of the batch, counted from 0; None for a copy."""
        status = self.status
        return None if status is None else status.batch

    @property
    def is_current(self) -> bool:
        """Whether the arrays still hold this batch. Always True for a copy."""
        return self.status is None or self.status.is_current

    @property
    def valid_until(self) -> int | None:
        """The number of the batch that ends the validity of this one. The batch is valid until a synchronous sampler
        begins that batch, or until an asynchronous sampler hands it out. None for a copy, and while `hold` keeps it."""
        return None if self.status is None else self.status.valid_until

    @overload
    def __getitem__(self, loc: str) -> Any: ...
    @overload
    def __getitem__(self, loc: object) -> Self: ...
    def __getitem__(self, loc: object) -> Any:
        part = super().__getitem__(loc)
        return with_status(part, self.status) if isinstance(part, Samples) else part

    def torch(self) -> Samples:
        return with_status(super().torch(), self.status)

    def numpy(self) -> Samples:
        return with_status(super().numpy(), self.status)


class PolicySamples(NamedArrays):
    """One batch of several policies: the `Samples` `[T, seats, ...]` of each, by its name (`batch.speaker`).

    `sampler.seats()` says which agents of which environments the columns are. The policies have different numbers of
    columns, so indices are for the samples of one policy.
    """

    __slots__ = ()

    def __getitem__(self, loc: Any) -> Any:
        if isinstance(loc, tuple) and len(loc) > 1:
            raise ConfigError(
                f"policies have different columns: index the samples of one, for example {self._example()}"
            )
        return super().__getitem__(loc)

    def __getattr__(self, name: str) -> Any:
        if name not in self and not name.startswith("_") and hasattr(Samples, name):
            raise AttributeError(
                f"only the samples of one policy have {name}: take those of one, such as {self._example()}.{name}"
            )
        return super().__getattr__(name)

    def _example(self) -> str:
        return f"batch.{next(iter(self.keys()))}"

    @property
    def batch(self) -> int | None:
        """The number of the batch, counted from 0; None for a copy."""
        number: int | None = self.values()[0].batch
        return number

    @property
    def is_current(self) -> bool:
        """Whether the arrays still hold this batch. Always True for a copy."""
        return bool(self.values()[0].is_current)

    @property
    def valid_until(self) -> int | None:
        """See `Samples.valid_until`."""
        until: int | None = self.values()[0].valid_until
        return until

    def torch(self) -> PolicySamples:
        return PolicySamples({name: own.torch() for name, own in self.items()})


def parts_of(samples: Samples | PolicySamples) -> Sequence[Samples]:
    """The samples of each policy."""
    return [samples] if isinstance(samples, Samples) else samples.values()


def for_each_policy(make: Callable[[Samples], Samples], samples: Samples | PolicySamples) -> Any:
    """What `make` returns for the samples of each policy."""
    if isinstance(samples, Samples):
        return make(samples)
    return PolicySamples({name: make(own) for name, own in samples.items()})


# ---- pieces ----------------------------------------------------------------------------------------


def _is_tensor(leaf: object) -> bool:
    """Whether `leaf` is a torch tensor, without an import of torch."""
    return hasattr(leaf, "detach")


def _concatenated(parts: list[Any], axis: int = 0) -> Any:
    """The arrays or tensors one after the other, in new memory."""
    if _is_tensor(parts[0]):
        import torch

        return torch.cat(parts, axis)
    return np.concatenate(parts, axis)


def _joined(nodes: list[Any], axis: int) -> Any:
    """Arrays, or named arrays of the same structure, one after the other, in new memory."""
    if not isinstance(first := nodes[0], NamedArrays):
        return _concatenated(nodes, axis)
    return _make(type(first), {key: _joined([node[key] for node in nodes], axis) for key, _ in first.items()})


def _require_fit(parts: Any, axis: int) -> None:
    """Raise `ConfigError` unless `Samples.cat` can join these parts."""
    if not (isinstance(parts, Sequence) and parts):
        raise ConfigError("cat needs a list of samples")
    if stale := [i for i, part in enumerate(parts) if not part.is_current]:
        raise ConfigError(f"cat: a later batch has overwritten part {stale[0]}: keep a copy() of each batch before it")

    def shapes(part: Samples) -> dict[str, Any]:
        found = {}
        for path, leaf in part.leaves():
            has_rows = path.split(".")[1] not in PER_COLUMN
            if has_rows or axis:
                at = axis if has_rows else 0
                found[path] = _is_tensor(leaf), *leaf.shape[:at], *leaf.shape[at + 1 :]
        return found

    for i, part in enumerate(parts):
        if axis:
            _dimensions(part, "cat along B")
        if other := sorted(dict(shapes(part).items() ^ shapes(parts[0]).items())):
            raise ConfigError(
                f"cat: {other[0]} of part {i} is not as in part 0: all parts need the same fields, of the same sizes "
                f'beside dim="{"TB"[axis]}", all as numpy arrays or all as tensors'
            )
        if i and not axis and not _follows(parts[i - 1], part):
            raise ConfigError(
                f'cat along T: part {i} does not begin where part {i - 1} ends. Join them along "B", or join the rows '
                "of each: with_targets(...).flatten()"
            )


def _follows(before: Samples, after: Samples) -> bool:
    """Whether `after` begins where `before` ends, as far as these samples show it."""
    own, env = before.env, after.env
    names = "observation", "prev_done", "done", "bootstrap_obs"
    if env.valid.ndim < 2 or any(name not in node for name in names for node in (own, env)):
        return True
    goes_on, ended = env.valid[0] & ~env.prev_done[0], own.done[-1] | ~own.valid[-1]
    if bool((goes_on & ended).any() | (env.valid[0] & ~goes_on & ~ended).any()):
        return False
    pairs = zip(NamedArrays(o=own.bootstrap_obs).leaves(), NamedArrays(o=env.observation).leaves(), strict=True)
    differ = ((end[goes_on] != begin[0][goes_on]) & (end[goes_on] == end[goes_on]) for (_, end), (_, begin) in pairs)
    return not any(bool(each.any()) for each in differ)


def _dimensions(samples: Samples, call: str) -> tuple[int, int]:
    """T and B. Raises `ConfigError` if an index has removed one of them."""
    shape = tuple(samples.env.valid.shape)
    if len(shape) != 2:
        raise ConfigError(f"{call} needs samples with the dimensions [T, B], these have {list(shape)}")
    return shape[0], shape[1]


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _per_step(samples: Samples, fn: Callable[[Any], Any]) -> Samples:
    """`fn` of every array `[T, B, ...]`. The arrays without a dimension of time are left out."""
    parts = {
        name: _make(type(part), {key: map_leaves(fn, value) for key, value in part.items() if key not in PER_COLUMN})
        for name, part in samples.items()
    }
    return _make(type(samples), parts)


def with_status(samples: Samples, status: BatchStatus | None) -> Samples:
    """A new object with the same arrays and this status."""
    new: Samples = object.__new__(type(samples))
    object.__setattr__(new, "_values", samples._values)
    object.__setattr__(new, "_status", status)  # also None: a slot that is not set takes 2 us to read
    return new


def _shuffled(size: int, rng: object, like: Any, n: int) -> Any:
    """The numbers below `size` in random order, in `n` parts. They index arrays of the kind of `like`."""
    if isinstance(rng, np.random.Generator):
        order: Any = rng.permutation(size)
        if not _is_tensor(like):
            return np.array_split(order, n)
        import torch

        return torch.from_numpy(order).to(like.device).tensor_split(n)
    import torch

    if not (rng is None or isinstance(rng, torch.Generator)):
        raise ConfigError(f"rng must be a numpy or torch Generator, or None, got {rng!r}")
    drawn = torch.randperm(size, generator=rng)
    return drawn.to(like.device).tensor_split(n) if _is_tensor(like) else np.array_split(drawn.numpy(), n)


def _require_states(samples: Samples, length: int) -> None:
    """Raise if the agent says that it has not recorded its recurrent state where sequences start."""
    info = samples.agent.agent_info
    if "has_rnn_state" not in info:  # recorded at each step, or not at all
        return
    within = ~samples.env.prev_done[length::length] & samples.env.valid[length::length]
    if bool((within & ~info.has_rnn_state[length::length]).any()):
        raise ConfigError(
            f"sequences of {length} rows need the recurrent state at their start, but only row 0 has it: make the "
            'agent with record_state="step"'
        )
