"""What is closed at the end of a `with` statement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing(ABC):
    """Use it in a `with` statement, or call `close`."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
