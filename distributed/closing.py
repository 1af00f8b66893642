"""The base of objects that a `with` statement closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing(ABC):
    """`close` is called at the end of the `with` statement."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
