"""A batch in the shapes that learners use: rows, sequences, minibatches and transitions. Arrays and tensors alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from penstock.buffers.named import NamedArrays, _make, copied, map_leaves
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.buffers.samples import BatchStatus, EnvSamples, Samples

_Named = TypeVar("_Named", bound=NamedArrays)
PER_COLUMN = ("bootstrap_obs", "bootstrap_value")  # fields without a dimension of time


class Transitions(NamedArrays):
    """N steps with what came after them. Every field is `[N, ...]`."""

    __slots__ = ()
    if TYPE_CHECKING:  # a misspelt field is an error
        __getattr__: ClassVar[None]  # type: ignore[assignment, misc]
    observation: Any  #: what the agent acted on
    action: Any  #: the action it took
    reward: Tensor  #: float32, for this action
    next_observation: Any  #: the observation after the action: `final_obs` where the episode ended
    discount: Tensor  #: float32, the factor of the value of `next_observation`: 0 where terminated
    terminated: Tensor  #: bool, Gymnasium's
    truncated: Tensor  #: bool, Gymnasium's
    agent_info: NamedArrays  #: what `agent.step` returned beside the action


def is_tensor(leaf: Any) -> bool:
    """Whether `leaf` is a torch tensor, without an import of torch."""
    return hasattr(leaf, "detach")


def concatenated(parts: list[Any]) -> Any:
    """The arrays or tensors one after the other, in new memory."""
    if is_tensor(parts[0]):
        import torch

        return torch.cat(parts)
    return np.concatenate(parts)


def dimensions(samples: Samples, call: str) -> tuple[int, int]:
    """T and B. Raises `ConfigError` if an index has removed one of them."""
    shape = tuple(samples.env.valid.shape)
    if len(shape) != 2:
        raise ConfigError(f"{call} needs samples with the dimensions [T, B], these have {list(shape)}")
    return shape[0], shape[1]


def selected(samples: Samples, names: tuple[str, ...]) -> Samples:
    """The fields with these dotted paths, and `env.valid`."""
    paths = {path for path, _ in samples.leaves()}
    for name in names:
        if not any(path == name or path.startswith(f"{name}.") for path in paths):
            raise ConfigError(f"select: there is no field {name!r}; there are {', '.join(sorted(paths))}")

    kept_names = (*names, "env.valid", "targets")

    def part_of(node: _Named, prefix: str) -> _Named:
        kept = {}
        for key, value in node.items():
            path = f"{prefix}{key}"
            if any(path == name or path.startswith(f"{name}.") for name in kept_names):
                kept[key] = value
            elif isinstance(value, NamedArrays) and any(name.startswith(f"{path}.") for name in names):
                kept[key] = part_of(value, f"{path}.")
        return _make(type(node), kept)

    return _make(type(samples), {key: part_of(part, f"{key}.") for key, part in samples.items()})


def flattened(samples: Samples) -> Samples:
    """`Samples.flatten`."""
    T, B = dimensions(samples, "flatten")
    rows = _per_step(samples, lambda leaf: leaf.reshape(T * B, *leaf.shape[2:]))
    valid = rows.env.valid
    return with_status(rows, samples.status) if bool(valid.all()) else rows[valid]


def sequences(samples: Samples, length: int) -> Samples:
    """`Samples.sequences`."""
    T, B = dimensions(samples, "sequences")
    if not _is_integer(length) or length < 1 or T % length:
        raise ConfigError(
            f"the length of sequences must be an integer and must divide the {T} rows of these samples, got {length!r}"
        )
    n = T // length
    if n == 1:
        cut = with_status(_per_step(samples, lambda leaf: leaf), samples.status)
    else:
        _require_states(samples, length)
        cut = _per_step(
            samples,
            lambda leaf: (
                leaf.reshape(n, length, *leaf.shape[1:]).swapaxes(0, 1).reshape(length, n * B, *leaf.shape[2:])
            ),
        )
    has_steps = cut.env.valid.any(0)
    return cut if bool(has_steps.all()) else cut[:, has_steps]


def minibatches(samples: Samples, n: int, rng: Any, length: int | None) -> Iterator[Samples]:
    """`Samples.minibatches`."""
    whole = samples.flatten() if length is None else samples.sequences(length)
    valid = whole.env.valid
    size, unit = valid.shape[-1], "steps" if length is None else "sequences"
    if not (_is_integer(n) and 1 <= n <= size):
        raise ConfigError(
            f"the number of minibatches must be an integer from 1 to the {size} {unit} that there are, got {n!r}"
        )
    whole = _make(type(whole), whole._values)  # without its status, since its parts are copies
    return (whole[part] if length is None else whole[:, part] for part in _shuffled(size, rng, valid, n))


def transitions(samples: Samples, discount: float) -> Transitions:
    """`Samples.transitions`."""
    T, B = dimensions(samples, "transitions")
    env, agent = samples.env, samples.agent
    discounts = copied(env.reward)
    discounts[...] = discount
    discounts[env.terminated] = 0
    steps = Transitions(
        observation=env.observation,
        action=agent.action,
        reward=env.reward,
        next_observation=next_observation(env),
        discount=discounts,
        terminated=env.terminated,
        truncated=env.truncated,
        agent_info=agent.agent_info,
    )
    rows = steps.map(lambda leaf: leaf.reshape(T * B, *leaf.shape[2:]))
    valid = env.valid.reshape(T * B)
    return rows if bool(valid.all()) else rows[valid]


def next_observation(env: EnvSamples) -> Any:
    """`EnvSamples.next_observation`."""
    if "bootstrap_obs" not in env:
        raise ConfigError(
            "the observation after the last row is not in these samples: an index has cut rows off the end, or joined "
            "the dimensions. Take next_observation or transitions() of the whole batch, or of whole columns"
        )
    done = env.done
    if "final_obs" not in env and bool(done.any()):
        raise ConfigError(
            "an episode ended in this batch, and its last observation was not recorded: make the sampler with "
            "record_final_obs=True"
        )
    final = env.final_obs if "final_obs" in env else env.observation

    def following(observation: Any, after: Any, last: Any) -> Any:
        rows = concatenated([observation[1:], after[None]])
        rows[done] = last[done]
        return rows

    return _map_together(following, env.observation, env.bootstrap_obs, final)


# ---- pieces ----------------------------------------------------------------------------------------


def _is_integer(value: Any) -> bool:
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
    new = _make(type(samples), samples._values)
    if status is not None:
        object.__setattr__(new, "_status", status)
    return new


def _map_together(fn: Callable[..., Any], first: Any, *others: Any) -> Any:
    if not isinstance(first, NamedArrays):
        return fn(first, *others)
    return _make(
        type(first), {name: _map_together(fn, part, *(other[name] for other in others)) for name, part in first.items()}
    )


def _shuffled(size: int, rng: Any, like: Any, n: int) -> Any:
    """The numbers below `size` in random order, in `n` parts. They index arrays of the kind of `like`."""
    if isinstance(rng, np.random.Generator):
        order: Any = rng.permutation(size)
        if not is_tensor(like):
            return np.array_split(order, n)
        import torch

        return torch.from_numpy(order).to(like.device).tensor_split(n)
    import torch

    if not (rng is None or isinstance(rng, torch.Generator)):
        raise ConfigError(f"rng must be a numpy or torch Generator, or None, got {rng!r}")
    drawn = torch.randperm(size, generator=rng)
    return drawn.to(like.device).tensor_split(n) if is_tensor(like) else np.array_split(drawn.numpy(), n)


def _require_states(samples: Samples, length: int) -> None:
    """Raise unless the recurrent state was recorded where sequences start."""
    info = samples.agent.agent_info
    if "prev_rnn_state" not in info:
        return
    within = ~samples.env.prev_done[length::length] & samples.env.valid[length::length]
    leaves = [leaf for _, leaf in NamedArrays(state=info.prev_rnn_state).leaves()]
    if bool(within.any()) and not any(bool((leaf[length::length][within] != 0).any()) for leaf in leaves):
        raise ConfigError(
            f"sequences of {length} rows need the recurrent state at their start, but only row 0 has it: make the "
            'agent with record_state="step"'
        )
