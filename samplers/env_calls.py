"""The calls of a sampler on its environments, between two batches."""

from __future__ import annotations

import warnings
from abc import ABC
from typing import Any

from penstock.buffers.results import ObjectMessage
from penstock.envs.calls import EnvCall, results
from penstock.errors import ConfigError
from penstock.samplers.restoring import RestoringCalls
from penstock.samplers.results import answers_to


class EnvironmentCalls(RestoringCalls, ABC):
    """A part of `Sampler`."""

    def _finish_batches(self, pool: Any, occasion: str) -> None:
        """An evaluation or a call on the environments comes next: finish the batches that run."""

    def call(self, name: str, /, *args: Any, evaluation: bool = False, **kwargs: Any) -> list[Any]:
        """Call the method `name` of every training (or evaluation) environment, between two batches.

        Wrappers are searched from the outermost inwards. Returns the results by env_rank. Raises `EnvCallError` naming
        the environment if one raises; the sampler stays usable.
        """
        return self._call(EnvCall("call", name, evaluation, args, kwargs))

    def get_attr(self, name: str, /, *, evaluation: bool = False) -> list[Any]:
        """The attribute `name` of every environment; see `call`."""
        return self._call(EnvCall("get_attr", name, evaluation))

    def set_attr(self, name: str, /, value: Any, *, evaluation: bool = False) -> None:
        """Set the attribute `name` of every environment to `value`; a list or tuple has one value per environment.

        If an environment has no such attribute, it is created, and a `RuntimeWarning` names the nearest one. A worker
        that replaces another builds its environments again, without these values.
        """
        n_envs = self.config.eval_n_envs if evaluation else self.batch_B
        values = value if isinstance(value, list | tuple) else [value] * n_envs
        if len(values) != n_envs:
            raise ConfigError(f"set_attr({name!r}) got {len(values)} values for {n_envs} environments")
        found = self._call(EnvCall("set_attr", name, evaluation, values=values))
        if created := [(env_rank, near) for env_rank, (is_new, near) in enumerate(found) if is_new]:
            env_rank, near = created[0]
            hint = f"; did you mean {near!r}?" if near else ""
            warnings.warn(
                f"set_attr has created the attribute {name!r}: {len(created)} of {n_envs} environments did not have it "
                f"(the first is number {env_rank}){hint}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _call(self, call: EnvCall) -> list[Any]:
        return results(call, self._perform(call))

    def _perform(self, call: EnvCall) -> list[ObjectMessage]:
        """What the workers send for `call`."""
        with self._guard.require(call.verb, *self._idle_states):
            pool, occasion = self._require_pool(call.verb), f"{call.verb} {call.name!r} on the environments"
            self._finish_batches(pool, occasion)
            return answers_to(pool, call, occasion)
