"""`python -m penstock` prints the version and what this machine offers to a sampler."""

from __future__ import annotations

from penstock import __version__
from penstock.samplers.machine import describe_machine


def main() -> None:
    """Print one line per fact."""
    print(f"penstock {__version__}")
    for name, value in describe_machine().items():
        print(f"{name:>24}  {value}")


if __name__ == "__main__":
    main()
