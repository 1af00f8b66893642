"""Trajectory infos of the user's class, as the workers have sent them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.buffers.reports import in_one_line
from penstock.buffers.results import ObjectMessage, Unreadable
from penstock.collectors import TrajInfo
from penstock.errors import ConfigError


def infos_from_messages(cls: type[TrajInfo], messages: Sequence[ObjectMessage]) -> list[TrajInfo]:
    """The trajectory infos of the user's class, ordered by time step, then env_rank.

    Raises `ConfigError` naming the attribute that cannot be unpickled.
    """
    infos = []
    for _, t, env_rank, attributes in sorted(messages, key=lambda message: message[1:3]):
        if isinstance(attributes, Unreadable):
            raise ConfigError(
                f"the attribute {attributes.attribute!r} of a {cls.__name__} of env_rank {env_rank}, t={t}, cannot "
                f"be unpickled in the main process: {in_one_line(attributes.error)}"
            ) from attributes.error
        infos.append(cls.restore(attributes))
    return infos
