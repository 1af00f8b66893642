"""Contestants that take turns in one run, and the tables of their figures. Imports no penstock."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

Figures = dict[str, list[float]]
CAPTION = "median (middle half of the turns); ratios are taken turn by turn"


def take_turns(contestants: Mapping[str, Any], repeats: int, seconds: float) -> Figures:
    """Environment steps per second of every contestant, `repeats` times, in random order."""
    figures: Figures = {name: [] for name in contestants}
    try:
        for contestant in contestants.values():
            contestant.batch()
        for repeat in range(repeats):
            for name in np.random.default_rng(repeat).permutation(list(contestants)):
                began, steps = time.monotonic(), 0
                while time.monotonic() - began < seconds:
                    steps += contestants[name].batch()
                figures[name].append(steps / (time.monotonic() - began))
    finally:
        for contestant in contestants.values():
            contestant.close()
    return figures


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Each turn's figure divided by the other's in the same turn."""
    return [value / other for value, other in zip(values, others, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and the two quartiles: half of the values lie between these. A single value is all three."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"median": median, "low": low, "high": high}


def cell(values: Sequence[float], form: str) -> str:
    """A table's cell: the median, and the middle half if there are several values."""
    if len(values) < 2:
        return form.format(values[0])
    parts = spread(values)
    return f"{form.format(parts['median'])} ({form.format(parts['low'])} to {form.format(parts['high'])})"


def show(title: str, figures: Figures, yardstick: str | None) -> None:
    """Print the figures as a table: steps per second and ratios to the contestant `yardstick`. Without one, the
    figures are microseconds per time step."""
    table = Table(title=title, caption=CAPTION)
    for heading in ("", "steps/s" if yardstick else "µs a time step", *([f"of {yardstick}"] if yardstick else [])):
        table.add_column(heading, justify="right" if heading else "left")
    for name, values in figures.items():
        row = [cell(values, "{:,.0f}" if yardstick else "{:.1f}")]
        if yardstick:
            row.append(cell(ratios(values, figures[yardstick]), "{:.3f}"))
        table.add_row(name, *row)
    Console(width=120).print(table)


def machine() -> dict[str, Any]:
    """What the figures were taken on, for the JSON file."""
    return {
        "machine": {
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in ("numpy", "torch", "gymnasium")},
    }
