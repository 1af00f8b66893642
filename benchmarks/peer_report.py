"""The tables and the picture of `peers.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_adapters import ALL, ONE, WORKS
from turns import cell, spread

_MOST_STEAL = 0.01  # of the machine's CPU time; with more, a turn is disturbed
_N_SHOWN = 9  # bars in one part of the picture

Rounds = list[dict[str, Any]]


def values(rounds: Rounds, name: str, key: str) -> list[float]:
    """One figure of every turn of a contestant."""
    return [turns[name][key] for turns in rounds if name in turns]


def ratios(rounds: Rounds, name: str, other: str, key: str = "rate") -> list[float]:
    """The speed of a contestant divided by that of another in the same round."""
    return [turns[name]["rate"] / turns[other][key] for turns in rounds if name in turns and other in turns]


def cores(rounds: Rounds) -> list[float]:
    """The speed of the bare loops in all processes, divided by that of one bare loop."""
    return ratios(rounds, ALL, ONE)


def best_peer(rounds: Rounds) -> str | None:
    """The contestant of another library with the highest median speed. EnvPool has other environments."""
    names = {name for turns in rounds for name in turns if not name.startswith(("penstock", "bare", "EnvPool"))}
    return max(names, key=lambda name: spread(padded(values(rounds, name, "rate")))["median"], default=None)


def padded(figures: Sequence[float]) -> Sequence[float]:
    """At least two figures, which the quartiles need."""
    return figures if len(figures) > 1 else [*figures, *figures]


def is_quiet(turns: dict[str, Any], *names: str) -> bool:
    """Whether the turns of these contestants in this round were undisturbed."""
    most = _MOST_STEAL * (os.cpu_count() or 1)
    return all(turns[name]["steal"] <= most for name in names if name in turns)


def figure(found: Sequence[float], form: str) -> str:
    """A table's cell; a dash if there are no figures."""
    return cell(found, form) if found else "-"


def shares(rounds: Rounds, name: str) -> tuple[str, str]:
    """The ratio to the bare loops in step, in undisturbed and in disturbed rounds, with the number of rounds."""
    cells = []
    for wanted in (True, False):
        chosen = [turns for turns in rounds if is_quiet(turns, name, ALL) is wanted]
        found = ratios(chosen, name, ALL, "in_step")
        cells.append(f"{figure(found, '{:.2f}')}, n={len(found)}" if found else "-")
    return cells[0], cells[1]


def table(result: dict[str, Any]) -> list[str]:
    """The Markdown of one work."""
    work, rounds = WORKS[result["work"]], result["rounds"]
    peer = best_peer(rounds)
    size = f"{work.n_envs} environments, T = {work.T}, {work.n_workers} workers"
    found = cores(rounds)
    lines = [f"**{work.title}** ({size}). Cores: {figure(found, '{:.2f}')}."]
    if result["pause"]["pause"]:
        how = result["pause"]
        lines.append(f"The learner's pause between two batches: {how['pause']} s ({how['kind']}).")
    headings = (
        "contestant",
        "steps/s",
        "of the bare loops in step",
        "the same in disturbed rounds",
        f"of the best peer ({peer})",
        "CPU µs a step",
        "involuntary switches a second",
    )
    lines += ["", f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    names = dict.fromkeys(name for turns in rounds for name in turns)
    order = sorted(names, key=lambda name: -spread(padded(values(rounds, name, "rate")))["median"])
    for name in order:
        cells = [
            name,
            figure(values(rounds, name, "rate"), "{:,.0f}"),
            *shares(rounds, name),
            figure(ratios(rounds, name, peer), "{:.2f}") if peer else "-",
            figure(values(rounds, name, "cpu_us"), "{:.1f}"),
            figure(values(rounds, name, "switches"), "{:,.0f}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {name} took no part: {first_line(why)}" for name, why in result["missing"].items())]
    return lines


def first_line(text: str) -> str:
    """The first line of an error, at most 160 characters."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return line if len(line) <= 160 else f"{line[:155]} ..."


def tables(results: Sequence[dict[str, Any]], skipped: Path | None = None) -> str:
    """All tables, and the peers that are not installed."""
    lines = [line for result in results for line in [*table(result), ""]]
    if skipped is not None and skipped.exists() and (text := skipped.read_text(encoding="utf-8").strip()):
        lines += ["Not installed:", "", *(f"- {first_line(line)}" for line in text.splitlines())]
    return "\n".join(lines)


def draw(results: Sequence[dict[str, Any]], file: Path) -> None:
    """One part for each work: the speed of the fastest contestants in relation to the bare loops in step."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a fifth of the size
    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    import matplotlib.pyplot as plt

    n_rows = (len(results) + 1) // 2
    picture, parts = plt.subplots(n_rows, 2, figsize=(11, 2.6 * n_rows), squeeze=False, layout="constrained")
    for part in parts.flat[len(results) :]:
        part.axis("off")
    for part, result in zip(parts.flat, results, strict=False):
        rounds = result["rounds"]
        names = {name for turns in rounds for name in turns} - {ONE, ALL}
        every = {name: ratios(rounds, name, ALL, "in_step") for name in names}
        found = {name: spread(padded(figures)) for name, figures in every.items() if figures}
        order = sorted(found, key=lambda name: found[name]["median"])[-_N_SHOWN:]
        middle = [found[name]["median"] for name in order]
        errors = [
            [found[name]["median"] - found[name]["low"] for name in order],
            [found[name]["high"] - found[name]["median"] for name in order],
        ]
        colours = ["#1f6f8b" if name.startswith("penstock") else "#b8b8b8" for name in order]
        part.barh(order, middle, xerr=errors, color=colours, height=0.7, error_kw={"elinewidth": 0.8})
        part.axvline(1, color="black", linewidth=0.8)
        part.set_title(WORKS[result["work"]].title, fontsize=9)
        part.tick_params(labelsize=7)
        part.spines[["top", "right"]].set_visible(False)
    picture.suptitle(
        "Speed in relation to bare loops in step, which record nothing (median and middle half)", fontsize=9
    )
    picture.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(picture)
