"""Rows, minibatches, sequences and transitions: every step is there once, with what belongs to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.buffers import NamedArrays, Samples, SamplesBuffer, SampleSpec
from penstock.buffers.named import map_leaves
from penstock.buffers.samples import BatchStatus, with_status
from penstock.errors import ConfigError

torch = pytest.importorskip("torch")

T, B = 6, 4
FINAL = 60_000  # needs the highest bit of 16
STATE = NamedArrays(h=np.zeros(2, np.float32), c=np.zeros(2, np.float32))

both = pytest.mark.parametrize("kind", ["numpy", "torch"])


def batch(
    kind: str,
    *,
    ends: Any = (),
    invalid: Any = (),
    final_obs: bool = True,
    state: bool = False,
    row_0_only: bool = False,
    dtype: Any = np.int64,
) -> Samples:
    """A batch in which everything says where it is: 100 t + b. The observation after the last row says 100 T + b."""
    info = NamedArrays(value=np.zeros((), np.float32), **({"prev_rnn_state": STATE} if state else {}))
    if row_0_only:
        info = NamedArrays({**dict(info.items()), "has_rnn_state": np.zeros((), np.bool_)})
    observation = NamedArrays(camera=np.zeros((2, 3), np.uint8), number=np.zeros((), dtype))
    spec = SampleSpec(observation, np.zeros((), np.int64), info, bootstrap_value=True, final_obs=final_obs)
    buffer = SamplesBuffer(spec, T, B, shared=False)
    (arrays,) = buffer.slots
    where = 100 * np.arange(T + 1)[:, None] + np.arange(B)
    arrays.observation.number[...] = where
    arrays.observation.camera[...] = where[:, :, None, None] % 251
    for name in ("action", "reward"):
        arrays[name][1:] = where[:-1]
    for _, leaf in arrays.agent_info.leaves():
        leaf[...] = where[:-1].reshape(T, B, *(1,) * (leaf.ndim - 2)) + 1
    if row_0_only:
        arrays.agent_info.has_rnn_state[1:] = False
    arrays.policy_version[...] = np.arange(B)
    arrays.bootstrap_value[...] = 7
    for t, b, flag in ends:
        arrays.done[t + 1, b] = arrays[flag][t, b] = True
        if final_obs:
            arrays.final_obs.number[t, b] = where[t, b] + FINAL
    for t, b in invalid:
        arrays.valid[t, b] = False
    (samples,) = buffer.batches
    samples = with_status(samples, BatchStatus(3, 4))
    return samples if kind == "numpy" else samples.torch()


def as_array(leaf: Any) -> Any:
    return np.asarray(leaf)


# ---- flatten and select ----------------------------------------------------------------------------


@both
def test_flatten_has_every_step_once_and_views_where_all_are_valid(kind: str) -> None:
    samples = batch(kind)
    rows = samples.flatten()
    where = (100 * np.arange(T)[:, None] + np.arange(B)).ravel()
    np.testing.assert_array_equal(rows.env.observation.number, where)
    np.testing.assert_array_equal(rows.agent.action, where)
    np.testing.assert_array_equal(rows.agent.policy_version, np.tile(np.arange(B), T))
    assert rows.env.observation.camera.shape == (T * B, 2, 3)
    assert {leaf.shape[0] for _, leaf in rows.leaves()} == {T * B}
    samples.env.reward[2, 1] = -5
    assert rows.env.reward[2 * B + 1] == -5, "a view"
    assert (rows.batch, rows.valid_until) == (3, 4)


@both
def test_flatten_leaves_out_what_is_not_valid_and_copies(kind: str) -> None:
    samples = batch(kind, invalid=[(1, 2), (5, 0)])
    rows = samples.flatten()
    assert set(as_array(rows.agent.action).tolist()) == {
        100 * t + b for t in range(T) for b in range(B) if (t, b) not in {(1, 2), (5, 0)}
    }
    samples.env.reward[...] = -5
    assert (as_array(rows.env.reward) >= 0).all()
    assert rows.batch is None
    assert rows.is_current


@both
def test_select_keeps_what_is_named_and_whether_it_is_valid(kind: str) -> None:
    samples = batch(kind).with_targets(advantage=batch(kind).env.reward)
    part = samples.select("env.observation.number", "agent.agent_info", "env.reward")
    assert [path for path, _ in part.leaves()] == [
        "env.observation.number",
        "env.reward",
        "env.valid",
        "agent.agent_info.value",
        "targets.advantage",
    ]
    assert part.batch == 3
    assert part.flatten().env.reward.shape == (T * B,)
    with pytest.raises(ConfigError, match=r"select: there is no field 'env\.rewards'; there are .*env\.reward"):
        samples.select("env.rewards")


# ---- minibatches -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("n", [1, 5, 22])
@pytest.mark.parametrize("seed", [None, "numpy", "torch"])
def test_minibatches_have_every_valid_step_once(kind: str, n: int, seed: Any) -> None:
    def rng() -> Any:
        torch.manual_seed(1)
        return {"numpy": np.random.default_rng(1), "torch": torch.Generator().manual_seed(1), None: None}[seed]

    samples = batch(kind, invalid=[(1, 2), (5, 0)])
    samples = samples.with_targets(advantage=samples.env.reward * 2)
    parts = list(samples.minibatches(n, rng()))
    sizes = [len(part.env.reward) for part in parts]
    assert len(parts) == n
    assert max(sizes) - min(sizes) <= 1
    actions = [x for part in parts for x in as_array(part.agent.action).tolist()]
    assert sorted(actions) == sorted(as_array(samples.flatten().agent.action).tolist())
    assert actions != sorted(actions)
    for part in parts:
        np.testing.assert_array_equal(as_array(part.targets.advantage), 2 * as_array(part.agent.action))
        np.testing.assert_array_equal(as_array(part.env.observation.number), as_array(part.agent.action))
        assert part.batch is None
    again = [x for part in samples.minibatches(n, rng()) for x in as_array(part.agent.action).tolist()]
    assert again == actions


def test_minibatches_draw_as_torch_randperm_does() -> None:
    torch.manual_seed(5)
    wanted = torch.randperm(T * B).chunk(4)
    torch.manual_seed(5)
    found = [part.agent.action for part in batch("torch").minibatches(4)]
    flat = batch("torch").agent.action.flatten()
    assert all(torch.equal(a, flat[b]) for a, b in zip(found, wanted, strict=True))


@both
def test_minibatches_of_whole_sequences(kind: str) -> None:
    samples = batch(kind, state=True)
    parts = list(samples.minibatches(4, np.random.default_rng(0), length=3))
    assert [tuple(part.env.reward.shape) for part in parts] == [(3, 2)] * 4
    starts = []
    for part in parts:
        actions = as_array(part.agent.action)
        np.testing.assert_array_equal(actions, actions[0] + 100 * np.arange(3)[:, None])
        np.testing.assert_array_equal(as_array(part.initial_state.h)[:, 0], actions[0] + 1)
        starts += actions[0].tolist()
    assert sorted(starts) == sorted(100 * t + b for t in (0, 3) for b in range(B))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        *((lambda s, n=n: s.minibatches(n), f"from 1 to the 24 steps.*, got {n!r}") for n in (0, 25, 2.0, "2", True)),
        (lambda s: s.minibatches(2, 7), "rng must be a numpy or torch Generator, or None, got 7"),
        *((lambda s, n=n: s.sequences(n), f"divides the 6 rows of these samples, got {n}") for n in (0, 4, 7, 3.0)),
        (lambda s: s[2].flatten(), r"flatten needs samples with the dimensions \[T, B\], these have \[4\]"),
        (lambda s: s[2].transitions(), r"transitions needs samples with the dimensions \[T, B\], these have \[4\]"),
    ],
)
def test_what_cannot_be_done_is_named(call: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        call(batch("torch"))


# ---- sequences -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("length", [1, 2, 6])
def test_sequences_are_rows_of_one_column_with_the_state_at_their_start(kind: str, length: int) -> None:
    samples = batch(kind, state=True)
    cut = samples.sequences(length)
    actions = as_array(cut.agent.action)
    assert actions.shape == (length, T * B // length)
    np.testing.assert_array_equal(actions, actions[0] + 100 * np.arange(length)[:, None])
    assert sorted(actions[0].tolist()) == sorted(100 * t + b for t in range(0, T, length) for b in range(B))
    for leaf in cut.initial_state.values():
        np.testing.assert_array_equal(as_array(leaf), np.repeat(actions[0][:, None] + 1, 2, 1))
    assert cut.batch == (3 if length == T else None)


@both
def test_sequences_without_a_valid_step_are_left_out(kind: str) -> None:
    samples = batch(kind, invalid=[(3, 1), (4, 1), (5, 1), (5, 2)])
    cut = samples.sequences(3)
    assert sorted(as_array(cut.agent.action)[0].tolist()) == [0, 1, 2, 3, 300, 302, 303]
    assert as_array(~cut.env.valid).sum() == 1


@both
def test_sequences_need_the_state_where_they_start(kind: str) -> None:
    samples = batch(kind, state=True, row_0_only=True)
    assert samples.sequences(T).initial_state.h.shape == (B, 2)
    with pytest.raises(ConfigError, match=r'only row 0 has it: make the agent with record_state="step"'):
        samples.sequences(2)
    with pytest.raises(ConfigError, match=r"only row 0 has it"):
        samples.select("env", "agent.agent_info.prev_rnn_state").sequences(2)
    with pytest.raises(ConfigError, match=r"no recurrent state was recorded"):
        _ = batch(kind).initial_state


@both
def test_recorded_states_may_all_be_zero(kind: str) -> None:
    samples = batch(kind, state=True)
    map_leaves(lambda leaf: leaf.__setitem__(..., 0), samples.agent.agent_info.prev_rnn_state)
    assert (as_array(samples.sequences(2).initial_state.h) == 0).all()


# ---- transitions -----------------------------------------------------------------------------------

ENDS = [(1, 0, "terminated"), (2, 1, "truncated"), (T - 1, 2, "terminated"), (T - 1, 3, "truncated")]


@both
@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.uint32, np.uint64])
def test_transitions_never_show_another_episodes_observation(kind: str, dtype: Any) -> None:
    steps = batch(kind, ends=ENDS, invalid=[(3, 1), (4, 1), (5, 1)], dtype=dtype).transitions(0.9)
    assert as_array(steps.next_observation.number).dtype == dtype
    assert steps.observation.camera.shape == (T * B - 3, 2, 3)
    assert not {301, 401, 501} & set(as_array(steps.action).tolist())
    ended = {(t, b): flag for t, b, flag in ENDS}
    for i, action in enumerate(as_array(steps.action).tolist()):
        t, b = divmod(action, 100)
        flag = ended.get((t, b))
        assert int(steps.observation.number[i]) == action
        assert int(steps.next_observation.number[i]) == (action + FINAL if flag else action + 100)
        assert float(steps.discount[i]) == pytest.approx(0.0 if flag == "terminated" else 0.9)
        assert (bool(steps.terminated[i]), bool(steps.truncated[i])) == (flag == "terminated", flag == "truncated")
        assert float(steps.agent_info.value[i]) == action + 1
    assert str(steps.discount.dtype).endswith("float32")


@both
def test_next_observation_is_a_copy_in_the_structure_of_the_space(kind: str) -> None:
    samples = batch(kind, ends=ENDS)
    following = samples.env.next_observation
    following.number[...] = 0
    assert int(samples.env.observation.number[1, 1]) == 101
    assert following.camera.shape == (T, B, 2, 3)
    column = samples[2:, 1:3].env.next_observation
    assert as_array(column.number[-1]).tolist() == [100 * T + 1, 502 + FINAL]


@both
def test_next_observation_says_what_is_missing(kind: str) -> None:
    samples = batch(kind, ends=ENDS)
    for part in (samples[:3], samples[::2], samples.flatten()):
        with pytest.raises(ConfigError, match="an index has cut rows off the end, or joined"):
            _ = part.env.next_observation
    with pytest.raises(ConfigError, match="record_final_obs=True"):
        batch(kind, ends=ENDS, final_obs=False).transitions()
    whole = batch(kind, final_obs=False).env.next_observation
    assert as_array(whole.number[-1]).tolist() == [100 * T + b for b in range(B)]


# ---- targets, devices, dicts -----------------------------------------------------------------------


@both
def test_targets_follow_every_index_and_stay_beside_those_that_were_there(kind: str) -> None:
    samples = batch(kind)
    more = samples.with_targets(advantage=samples.env.reward).with_targets(return_=samples.env.reward + 1)
    assert more.targets.keys() == ("advantage", "return_")
    assert more[2, 1].targets.return_ == 202
    assert more.batch == 3
    assert "targets" not in samples
    with pytest.raises(ConfigError, match=r"target wrong must be an array \[6, 4\], it has \[5, 4\]"):
        samples.with_targets(wrong=samples.env.reward[1:])
    with pytest.raises(ConfigError, match=r"target wrong must be an array \[6, 4\], it is a list"):
        samples.with_targets(wrong=[1])


def test_to_a_device() -> None:
    samples = batch("numpy")
    here = samples.to("cpu")
    here.env.reward[0, 0] = 77
    assert samples.env.reward[0, 0] == 77, "nothing is copied on the CPU"
    assert here.batch == 3
    there = samples.to("meta")
    assert {leaf.device.type for _, leaf in there.leaves()} == {"meta"}
    assert there.env.observation.camera.shape == (T, B, 2, 3)
    assert there.batch is None


@pytest.mark.parametrize("device", ["cuda", "cuda:7", 3, "mps", "hpu", "nonsense"])
def test_a_device_that_this_machine_does_not_have_is_named(device: Any) -> None:
    if str(device).startswith("cuda") and torch.cuda.device_count() > 7:
        pytest.skip("it has this device")
    device = "cuda:99" if torch.cuda.is_available() and device in ("cuda", 3) else device
    with pytest.raises(ConfigError, match=rf'cannot be moved to device="{device}": .* Give a device that this machine'):
        batch("numpy").to(device)


def test_to_dict_is_what_torch_saves_and_loads_without_code(tmp_path: Any) -> None:
    samples = batch("torch")
    torch.save(samples.to_dict(), tmp_path / "samples.pt")
    loaded = torch.load(tmp_path / "samples.pt", weights_only=True)
    assert torch.equal(loaded["env"]["observation"]["camera"], samples.env.observation.camera)
    assert torch.equal(loaded["agent"]["bootstrap_value"], samples.agent.bootstrap_value)


# ---- joining ---------------------------------------------------------------------------------------


def following(first: Samples) -> Samples:
    """A batch that begins where `first` ends, with other numbers in all other fields."""
    after = first.copy()
    for path, leaf in after.leaves():
        if "final_obs" in path:
            leaf[...] = leaf + 1
        elif "observation" in path:
            at = path.replace("env.observation", "bootstrap_obs").split(".")
            leaf[0] = first.env[at[0]][at[1]]
        elif leaf.ndim > 1 and "bootstrap_obs" not in path and leaf.dtype not in (np.bool_, torch.bool):
            leaf[...] = leaf + 5000
    after.env.bootstrap_obs.number[...] = 9999
    after.agent.bootstrap_value[...] = 8
    return after


@both
@pytest.mark.parametrize("dim", ["T", "B"])
def test_joined_batches_have_each_field_as_torch_cat_joins_it(kind: str, dim: Any) -> None:
    ends = [(2, 1, "truncated"), (5, 0, "terminated")]
    parts = [batch(kind, ends=ends, invalid=[(1, 2)], state=True).with_targets(mine=np.full((T, B), 3.0))]
    if kind == "torch":
        parts = [parts[0].torch()]
    parts[0].env.prev_done[0, 3] = False
    parts.append(following(parts[0]))
    parts[1].env.prev_done[0, 0] = True
    parts.append(parts[1][:, :3] if dim == "B" else following(parts[1])[:4])
    parts[-1].env.prev_done[0, 0] = True
    joined, axis = Samples.cat(parts, dim=dim), "TB".index(dim)
    fields, found = [dict(part.torch().leaves()) for part in parts], dict(joined.torch().leaves())
    paths = fields[-1]  # along T, the last one says which there are: here its last rows are cut off
    assert list(found) == list(paths)
    for path in paths:
        has_rows = "bootstrap" not in path
        wanted = torch.cat([field[path] for field in fields], axis if has_rows else 0)
        assert found[path].dtype == wanted.dtype
        assert torch.equal(found[path], wanted), path
    assert joined.is_current
    assert joined.batch is None
    kept = {path: leaf.clone() for path, leaf in found.items()}
    for part in parts:
        part.env.reward[...] = -1
    assert all(torch.equal(leaf, kept[path]) for path, leaf in found.items())


@both
def test_along_the_time_what_comes_after_the_last_row_is_that_of_the_last_batch(kind: str) -> None:
    first = batch(kind)
    second = following(first)
    joined = Samples.cat([first[:4], first[4:], second])
    assert joined.env.bootstrap_obs.number.tolist() == [9999] * B
    assert joined.agent.bootstrap_value.tolist() == [8] * B
    second.env.bootstrap_obs.number[...] = 1
    assert joined.env.bootstrap_obs.number.tolist() == [9999] * B
    rows = Samples.cat([second.flatten(), first.flatten()])
    assert rows.env.reward.shape == (2 * T * B,)
    same = Samples.cat([first])
    assert all((one == other).all() for (_, one), (_, other) in zip(same.leaves(), first.leaves(), strict=True))


@pytest.mark.parametrize(
    ("parts", "dim", "problem"),
    [
        (lambda a, b: [], "T", "needs a list of samples"),
        (lambda a, b: a, "T", "needs a list of samples"),
        (lambda a, b: iter([a, b]), "T", "needs a list of samples"),
        (lambda a, b: [a, b], "x", "dim must be one of T, B"),
        (lambda a, b: [b, a], "T", "part 1 does not begin where part 0 ends"),
        (lambda a, b: [a, b[:, :2]], "T", r"agent.action of part 1 is not as in part 0: .*dim=.T"),
        (lambda a, b: [a, b[:3]], "B", r"agent.action of part 1 is not as in part 0: .*dim=.B"),
        (lambda a, b: [a.flatten(), a.flatten()], "B", "needs samples with the dimensions"),
        (lambda a, b: [a, b.select("env.reward")], "T", "agent.action of part 1 is not as in part 0"),
        (lambda a, b: [a, b.torch()], "T", "all as numpy arrays or all as tensors"),
        (lambda a, b: [with_status(a, BatchStatus(3, 4, is_current=False)), b], "T", "overwritten part 0"),
    ],
)
def test_batches_that_do_not_fit_together_are_not_joined(parts: Any, dim: Any, problem: str) -> None:
    first = batch("numpy")
    with pytest.raises(ConfigError, match=problem):
        Samples.cat(parts(first, following(first)), dim)


def test_a_batch_after_a_lost_episode_does_not_follow() -> None:
    first = batch("numpy", ends=[(T - 1, 2, "terminated")])
    second = following(first)
    second.env.prev_done[0] = [False, False, True, False]
    Samples.cat([first, second])
    for starts in ([True, False, True, False], [False] * 4):
        second.env.prev_done[0] = starts
        with pytest.raises(ConfigError, match="does not begin where"):
            Samples.cat([first, second])
