"""Games that return something wrong in one step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from penstock.envs.toy import ScriptedGame

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

LONG: Any = [{}] * 30
Spoil = Callable[[Any, list[Any]], Any]


class Spoiled(ScriptedGame):
    """Its step number `at` returns what `spoil(game, [observations, rewards, ...])` returns."""

    def __init__(self, spoil: Spoil | None = None, at: int = 3, script: Any = LONG, **kwargs: Any) -> None:
        super().__init__(script=script, **kwargs)
        self._spoil, self._at = spoil, at

    def step(self, actions: dict[str, Any]) -> Any:
        results = [*super().step(actions)]
        if self._spoil is None or self.t != self._at:
            return tuple(results)
        spoiled = self._spoil(self, results)
        return tuple(results) if spoiled is None else spoiled


def put(part: int, value: Any) -> Spoil:
    """In place of one of the five dicts."""

    def spoil(game: Any, results: list[Any]) -> None:
        results[part] = value

    return spoil


def give(part: int, value: Any, agent: str = "a1") -> Spoil:
    """In place of what one dict has for an agent."""

    def spoil(game: Any, results: list[Any]) -> None:
        results[part] = {**results[part], agent: value}

    return spoil


def leave_out(*parts: int, agent: str = "a1") -> Spoil:
    def spoil(game: Any, results: list[Any]) -> None:
        for part in parts:
            results[part] = {key: value for key, value in results[part].items() if key != agent}

    return spoil


def vanish(game: Any, results: list[Any]) -> None:
    game.agents = [agent for agent in game.agents if agent != "a1"]


def all_of(*spoils: Spoil) -> Spoil:
    def spoil(game: Any, results: list[Any]) -> None:
        for each in spoils:
            each(game, results)

    return spoil
