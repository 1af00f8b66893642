"""Batched environments: a worker has one, whose rows are its environments, and steps all of them by one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from penstock.buffers.tree import tree_leaves
from penstock.columns.batched_columns import REFUSALS, BatchedColumns
from penstock.columns.interface import snapshot
from penstock.envs.calls import EnvCall
from penstock.envs.checks import require_info, reset_with
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.infos import element, info_of, mask_name
from penstock.envs.rows import arrays_like
from penstock.envs.seeding import Purpose
from penstock.errors import ConfigError, SpaceError, brief
from penstock.vector.exchange import Exchange, Flags, Ids, Infos
from penstock.vector.step_memory import VectorMemory, copy_rows
from penstock.vector.step_program import RESTARTED, ResetMessage, VectorProgram
from penstock.workers.control import Command, Phase, Progress

_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")


class _Rows(BatchedColumns):
    """`BatchedColumns` whose resets have options."""

    options: dict[str, Any] | None = None

    def _reset(self, seed: Any) -> Any:
        try:
            result = self._reset_with(seed)
        except REFUSALS:
            mask = (self.options or {}).get("reset_mask")
            if mask is None or mask.all() or not hasattr(seed, "__len__"):
                raise
            # Some environments, such as ALE's, take seeds only for the rows that they reset.
            own = [each for each, is_reset in zip(seed, mask, strict=True) if is_reset]
            result = self._reset_with(type(seed)(own) if isinstance(seed, list) else np.array(own))
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpaceError(f"reset of {self.env} must return a tuple (observation, infos), got {brief(result)}")
        require_info(result[1], self.env_ranks[0], "reset")
        self.infos = result[1]
        return result

    def _reset_with(self, seed: Any) -> Any:
        return reset_with(self.env, seed, self.options and {**self.options})


@dataclass
class BatchProgram(VectorProgram):
    """The `VectorProgram` of batched environments."""

    def _build_envs(self, factories: Sequence[EnvFactory]) -> list[Any]:
        plan = self._plan
        first, *_ = plan.columns
        context = EnvContext(first, plan.worker_rank, self.build_seeds[first], Purpose.TRAIN)
        env = self._builder.build_batched(factories[0], len(plan.columns), context)
        self._columns = _Rows(env, plan.env_ranks, self._progress)
        if (mode := AutoresetMode(env.metadata["autoreset_mode"])) is not self.autoreset_mode:
            raise ConfigError(
                f"the batched environment of env_rank {first} has the autoreset mode {mode.name}, that of the example "
                f"environment, or the argument autoreset_mode, is {self.autoreset_mode.name}: they must be the same"
            )
        return [env]

    def _bind(self, memory: VectorMemory) -> None:
        own = self._rows
        self._action = arrays_like(self.action_space, own.action)
        self._reward, self._flags = own.reward, (own.terminated, own.truncated)
        self._observation = arrays_like(self.observation_space, own.observation[np.newaxis])
        self._final = own.final_observation
        self._last = arrays_like(self.observation_space, own.observation)
        # A worker that may be replaced writes no observation before a step is complete, as in `_bind_methods`.
        self._into = None if self.may_be_replaced else (self._observation, 0)
        self._begun: tuple[Any, Any] | None = None  # what the step after a replacement returns
        self._constant = np.zeros(len(self._reward), np.bool_), np.ones(len(self._reward), np.bool_)

    def run(self, command: Command) -> None:
        """As `VectorProgram.run`, for all rows at once."""
        if command.has_message:
            super().run(command)
        elif self._with_request():
            self._progress.enter(Phase.STEPPING)
            self._step_all()
            if self._one_by_one[0]:
                assert self._context.gate is not None
                self._context.gate.wake_main()

    def _step_all(self) -> None:
        columns = self._columns
        if self._unseeded:
            flags = self._cut()
        elif self._begun is not None:
            (columns.observations, columns.infos), self._begun = self._begun, None
            columns.rewards, flags = self._constant[0], self._constant[:1] * 2
        else:
            flags = columns.advance(snapshot(self._action), self._into)
        for name, own, given in zip(("terminated", "truncated"), self._flags, flags, strict=True):
            if np.shape(given) != own.shape or np.asarray(given).dtype.kind not in "biu":
                ranks = f"env_rank {columns.env_ranks[0]} to {columns.env_ranks[-1]}"
                raise SpaceError(
                    f"{name} of the batched environment ({ranks}) must be bools {own.shape}, got {brief(given)}"
                )
            own[...] = given
        if self.autoreset_mode is AutoresetMode.SAME_STEP and len(ended := np.logical_or(*self._flags).nonzero()[0]):
            self._final[ended] = columns.final_rows(ended, columns.infos.get("final_obs"))
        columns.write_step(self._observation, self._reward[np.newaxis], 0)
        self._send_infos(0)

    def _cut(self) -> Any:
        """The first step after a replacement: each episode ends where the worker before this one left it."""
        columns, last, (nowhere, everywhere) = self._columns, snapshot(self._last), self._constant
        self._begin_again()
        told = {RESTARTED: everywhere, mask_name(RESTARTED): everywhere}
        columns.rewards = nowhere
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            columns.infos = {**columns.infos, "final_obs": last, "final_info": told}
            return nowhere, everywhere
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._begun = snapshot(columns.observations), columns.infos
        columns.observations, columns.infos = last, told
        return nowhere, everywhere

    def _begin_again(self) -> None:
        """The first reset after a replacement, with other seeds than before. All rows are reset."""
        columns = self._columns
        self._unseeded = set(range(len(columns)))
        columns.options = None
        columns.reset_all([self._seed_of(i, None) for i in range(len(columns))])
        self._progress.enter(Phase.STEPPING)

    def _send_infos(self, row: int) -> None:
        """Send the infos with the reply of `row`, and reply. Final observations and their masks are in the rows."""
        if infos := self._columns.infos:
            if "env_id" in infos:  # ALE's name for the index of a row, here among those of all workers
                infos = {**infos, "env_id": infos["env_id"] + self._plan.columns.start}
            if self.autoreset_mode is AutoresetMode.SAME_STEP and "final_obs" in infos:
                infos = {key: value for key, value in infos.items() if key not in _FINAL}
                if final_info := self._columns.infos.get("final_info"):
                    infos["final_info"] = final_info
            self._record_info(row, "info", infos)
        self._reply()

    # ---- resetting and calling -------------------------------------------------------------

    def _reset(self, message: ResetMessage) -> None:
        columns, own, which = self._columns, self._plan.columns, self._with_request()
        if not which:
            return
        if lost := self._unseeded.difference(which):  # a reset of some rows needs one of all before
            self._begin_again()
        options = message.options[own.start]
        if options and "reset_mask" in options:
            options = {**options, "reset_mask": options["reset_mask"][own.start : own.stop]}
        columns.options = options
        columns.reset_all([self._seed_of(i, message.seeds[column]) for i, column in enumerate(own)])
        self._unseeded = lost
        self._begun = self._begun and (snapshot(columns.observations), {}) if len(which) < len(own) else None
        self._progress.words[Progress.PHASE] = Progress.IS_RESETTING  # errors in what follows belong to the reset
        self._reward[which] = self._flags[0][which] = self._flags[1][which] = 0
        others = np.setdiff1d(range(len(own)), which)
        kept = copy_rows(self._last, others)
        columns.write_observations(self._rows.observation)
        for _, row, last in tree_leaves(self._last, "", kept):
            if not lost and row[others].tobytes() != last.tobytes():
                raise ConfigError(
                    f"{columns.env} does not know the option reset_mask: it has reset rows that the mask leaves out. "
                    "Reset all environments at once"
                )
            row[others] = last
        self._send_infos(which[0])
        self._progress.enter(Phase.STEPPING)

    def _call(self, call: EnvCall, envs: Sequence[Any] | None = None) -> None:
        rank = self._plan.worker_rank
        self._perform(call, self._envs, range(rank, rank + 1), self._plan.env_ranks[:1])


class BatchExchange(Exchange):
    """The `Exchange` of batched environments: all rows of a worker reply together, and the first that was requested has
    the infos of all."""

    def __init__(
        self, memory: VectorMemory, program: BatchProgram, groups: Sequence[range], *, check_finite: bool
    ) -> None:
        super().__init__(memory, program, check_finite=check_finite)
        self._done = np.zeros(len(self.all), np.bool_)  # the rows that ended in the step that was taken last
        self._groups = groups
        self._group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])

    def together_with(self, which: Ids) -> Ids:
        return np.flatnonzero(np.isin(self._group_of, self._group_of[which]))

    @property
    def ready(self) -> Ids:
        ready = super().ready
        unready = np.setdiff1d(self.outstanding, ready)  # a worker may be writing the replies of its rows
        return np.setdiff1d(ready, self.together_with(unready)) if len(unready) else ready

    def _infos_of(self, is_new: Flags, has_info: Flags, ids: list[int]) -> Infos:
        """The infos of each worker that has sent some, with its first row."""
        self._done = is_new & (self.terminated | self.truncated) if self._same_step else np.zeros_like(is_new)
        return [(self._groups[self._group_of[i]].start, self._unpickled_infos(i)["info"]) for i in ids]

    def batched(self, infos: Infos, rows: Ids | None = None) -> dict[str, Any]:
        which = self.all if rows is None else rows
        merged: dict[str, Any] = {}
        if infos:
            own, starts = dict(infos), which.searchsorted([group.start for group in self._groups])
            parts = [
                (slice(at, at + len(group)), own.get(group.start, {}))
                for at, group in zip(starts.tolist(), self._groups, strict=True)
                if at < len(which) and which[at] == group.start
            ]
            merged = _merged(parts, len(which), "info")
        done = self._done[which]
        if ended := done.nonzero()[0].tolist():
            final = {"final_obs": np.full(len(which), None), "final_info": merged.get("final_info", {})}
            for k in ended:
                final["final_obs"][k] = copy_rows(self._final, int(which[k]))
            merged = {**merged, **final, "_final_obs": done, "_final_info": done.copy()}
        return merged

    def listed(self, infos: Infos) -> Infos:
        batched = self.batched(infos)
        return [(row, info) for row in range(len(self.all)) if (info := _row_of(batched, row))] if batched else []


def _merged(parts: Sequence[tuple[slice, Any]], n: int, name: str) -> Any:
    """Infos or final observations of some rows each, as one batch of `n` rows. Where an entry is missing, it is zero or
    None, and its mask is False."""
    (_, first), *_ = parts
    if isinstance(first, Mapping):
        merged = {}
        for key in dict.fromkeys(key for _, part in parts for key in part):
            own = [(rows, part[key]) for rows, part in parts if key in part]
            merged[key] = _merged(own, n, f"{name}[{key!r}]")
            mask = mask_name(str(key))
            if len(own) < len(parts) and not str(key).startswith("_") and all(mask not in part for _, part in parts):
                merged[mask] = _merged([(rows, True) for rows, _ in own], n, mask)
        return merged
    if isinstance(first, tuple):
        return tuple(_merged([(rows, part[i]) for rows, part in parts], n, name) for i in range(len(first)))
    arrays = [(rows, _as_rows(part, rows.stop - rows.start)) for rows, part in parts]
    (shape, *others), dtype = {array.shape[1:] for _, array in arrays}, np.result_type(*(array for _, array in arrays))
    if others:
        raise SpaceError(f"{name} must have the same shape in all workers, got {sorted((shape, *others))}")
    batch = np.full((n, *shape), None if dtype.hasobject else np.zeros((), dtype))
    for rows, array in arrays:
        batch[rows] = array
    return batch


def _as_rows(value: object, n: int) -> Any:
    """An array of `n` rows. What is none holds for each of them."""
    array = np.asarray(value)
    return array if array.shape[:1] == (n,) else np.broadcast_to(array, (n, *array.shape))


def _row_of(infos: Mapping[str, Any], b: int) -> dict[str, Any]:
    """The info of row b, with `final_obs` and `final_info` where its episode ended and it was reset at once."""
    info = info_of({key: value for key, value in infos.items() if key not in ("final_info", "_final_info")}, b)
    if "final_obs" in infos and infos["_final_obs"][b]:
        # Gymnasium's RecordEpisodeStatistics puts the statistics beside the infos of the reset.
        ended = {"episode": info.pop("episode")} if "episode" in info else {}
        final_info = {**info_of(infos.get("final_info", {}), b), **ended}
        info = {**info, "final_obs": element(infos["final_obs"], b), "final_info": final_info}
    return info
