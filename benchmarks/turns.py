"""Contestants that take turns in one run, and the table of what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from throughput import spread

Figures = dict[str, list[float]]


def take_turns(contestants: Mapping[str, Any], repeats: int, seconds: float) -> Figures:
    """Environment steps per second of every contestant, `repeats` times, in turn."""
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


def show(title: str, figures: Figures, yardstick: str | None) -> None:
    """Print medians and middle halves; with a `yardstick`, also each contestant's ratio to it. Without, the figures
    are microseconds a time step."""
    table = Table(title=title, caption="median (middle half of the turns); ratios are taken turn by turn")
    for heading in ("", "steps/s" if yardstick else "µs a time step", *([f"of {yardstick}"] if yardstick else [])):
        table.add_column(heading, justify="right" if heading else "left")
    for who, values in figures.items():
        cells = [_cell(values, "{:,.0f}" if yardstick else "{:.1f}")]
        if yardstick:
            ratios = [value / other for value, other in zip(values, figures[yardstick], strict=True)]
            cells.append(_cell(ratios, "{:.3f}"))
        table.add_row(who, *cells)
    Console(width=120).print(table)


def _cell(values: Sequence[float], form: str) -> str:
    if len(values) < 2:
        return form.format(values[0])
    parts = spread(values)
    return f"{form.format(parts['median'])} ({form.format(parts['low'])} to {form.format(parts['high'])})"
