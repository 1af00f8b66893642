"""The tables and the picture of `peers.py`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from peer_adapters import ALL, LARGE, ONE, WORKS
from turns import cell, spread

_MOST_STEAL, _MOST_OTHERS = 0.01, 0.05  # of the machine's CPU time; with more, a turn is disturbed

_SYNC, _SERIAL = "Gymnasium SyncVectorEnv", "penstock SerialSampler"
#: Aims: a contestant, another, how many times as fast the first should be, and whether this is for each of the cores.
AIMS: dict[str, list[tuple[str, str, float, bool]]] = {
    "random": [
        ("penstock ParallelSampler", _SERIAL, 0.95, True),
        ("penstock ShmVectorEnv", _SYNC, 1.35, False),
        ("penstock ParallelSampler, BatchedCartPole", "EnvPool (its own CartPole in C++)", 1.0, False),
        ("penstock ParallelSampler", "a loop in rlpyt's style", 1.5, False),
    ],
    "mlp": [
        ("penstock ParallelSampler", _SERIAL, 0.95, True),
        ("penstock ParallelSampler", "a loop in rlpyt's style", 1.5, False),
    ],
    "pixels": [
        ("penstock ParallelSampler", _SERIAL, 0.95, True),
        ("penstock ShmVectorEnv", _SYNC, 1.6, False),
    ],
    "sleeping": [
        ("penstock ParallelSampler", ALL, 0.95, False),
        ("penstock ShmVectorEnv, send and recv", ALL, 0.9, False),
    ],
    "central": [
        ("penstock GpuSampler", _SYNC, 0.7, True),
        ("penstock AlternatingSampler", _SYNC, 0.75, True),
    ],
    "short": [("penstock ParallelSampler", _SERIAL, 0.8, True)],
    "uneven": [
        ("penstock GpuSampler, min_ready=1", "TorchRL AsyncBatched", 1.0, False),
        ("penstock GpuSampler, min_ready=1", "TorchRL AsyncBatched, server process", 1.0, False),
    ],
    "pong": [
        ("penstock ParallelSampler", _SERIAL, 0.95, True),
        ("penstock ParallelSampler, AtariVectorEnv", "ALE AtariVectorEnv", 1.0, False),
    ],
    **{
        name: [("penstock ParallelSampler", _SYNC, 1.0, False), ("penstock GpuSampler", _SYNC, 1.0, False)]
        for name in LARGE
    },
}

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


def fastest(rounds: Rounds, names: Iterable[str]) -> str | None:
    """The one of these contestants with the highest speed, in relation to the bare loops in step."""
    speeds = {name: ratios(calmest(rounds, name, ALL), name, ALL, "in_step") for name in names}
    medians = {name: spread(padded(found))["median"] for name, found in speeds.items() if found}
    return max(medians, key=medians.__getitem__, default=None)


def does_same_work(name: str) -> bool:
    """Whether this contestant does the same work as most: bare loops record nothing, and EnvPool and batched
    environments are other environments."""
    return not (name.startswith(("bare", "EnvPool")) or "BatchedCartPole" in name or "AtariVectorEnv" in name)


def best_peer(rounds: Rounds) -> str | None:
    """The fastest contestant of another library."""
    names = {name for turns in rounds for name in turns}
    return fastest(rounds, sorted(name for name in names if does_same_work(name) and not name.startswith("penstock")))


def padded(figures: Sequence[float]) -> Sequence[float]:
    """At least two figures, which the quartiles need."""
    return figures if len(figures) > 1 else [*figures, *figures]


def is_quiet(turns: dict[str, Any], *names: str) -> bool:
    """Whether the turns of these contestants in this round were undisturbed."""
    n, found = os.cpu_count() or 1, [turns[name] for name in names if name in turns]
    return all(turn["steal"] <= _MOST_STEAL * n and turn["others"] <= _MOST_OTHERS * n for turn in found)


def calmest(rounds: Rounds, *names: str) -> Rounds:
    """The rounds in which these contestants took part undisturbed; if there are fewer than three, all."""
    chosen = [turns for turns in rounds if set(names) <= turns.keys()]
    quiet = [turns for turns in chosen if is_quiet(turns, *names)]
    return quiet if len(quiet) >= 3 else chosen


def figure(found: Sequence[float], form: str) -> str:
    """A table's cell; a dash if there are no figures."""
    return cell(found, form) if found else "-"


def shares(rounds: Rounds, name: str, other: str) -> tuple[str, str]:
    """The ratio of two speeds, in undisturbed and in disturbed rounds, with the number of rounds."""
    cells = []
    for wanted in (True, False):
        chosen = [turns for turns in rounds if is_quiet(turns, name, other) is wanted]
        found = ratios(chosen, name, other)
        cells.append(f"{figure(found, '{:.2f}')}, n={len(found)}" if found else "-")
    return cells[0], cells[1]


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """The Markdown of the fastest of penstock's contestants for each work, beside the best peer. As in `aims`, the
    ratios are from undisturbed rounds, if there are at least three."""
    headings = (
        "work",
        "penstock",
        "of the bare loops in step",
        "CPU µs a step",
        "best peer",
        "of it",
        "its CPU µs a step",
    )
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    for result in results:
        rounds = result["rounds"]
        names = {name for turns in rounds for name in turns if name.startswith("penstock") and does_same_work(name)}
        name, peer = fastest(rounds, sorted(names)), best_peer(rounds)
        if name is None or peer is None:
            continue
        cells = (
            WORKS[result["work"]].title,
            name.removeprefix("penstock "),
            figure(ratios(calmest(rounds, name, ALL), name, ALL, "in_step"), "{:.2f}"),
            figure(values(calmest(rounds, name), name, "cpu_us"), "{:.1f}"),
            peer,
            figure(ratios(calmest(rounds, name, peer), name, peer), "{:.2f}"),
            figure(values(calmest(rounds, peer), peer, "cpu_us"), "{:.1f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def aims(results: Sequence[dict[str, Any]]) -> list[str]:
    """The Markdown of all aims. "Slowest tenth": of all turns, in relation to the median turn."""
    headings = ("work", "contestant", "in relation to", "aim", "speed", "rounds, undisturbed", "slowest tenth")
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    for result in results:
        rounds = result["rounds"]
        for name, other, aim, is_per_core in AIMS[result["work"]]:
            chosen = calmest(rounds, name, other, *((ONE, ALL) if is_per_core else ()))
            found = ratios(chosen, name, other)
            if is_per_core:
                found = [ratio / n for ratio, n in zip(found, cores(chosen), strict=True)]
            if found:
                n_quiet = sum(is_quiet(turns, name, other) for turns in chosen)
                rates = sorted(values(rounds, name, "rate"))
                slowest = rates[len(rates) // 10] / spread(padded(rates))["median"]
                per = f"{other}, times the cores" if is_per_core else other
                numbers = f"{aim:g}", figure(found, "{:.2f}"), f"{len(found)}, {n_quiet}", f"{slowest:.2f}"
                lines.append(f"| {' | '.join((result['work'], name, per, *numbers))} |")
    return lines


def in_relation(rounds: Rounds, name: str, kind: str) -> list[float]:
    """What a contestant keeps of its speed with pauses, divided by what the bare loops keep in the same round."""
    paused = f"{name}, {kind}", f"{ALL}, {kind}"
    chosen = calmest(rounds, name, ALL, *paused)
    kept, bare = (ratios(chosen, one, other) for one, other in zip(paused, (name, ALL), strict=True))
    return [ratio / other for ratio, other in zip(kept, bare, strict=True)]


def only_paused(result: dict[str, Any], kind: str) -> dict[str, Any]:
    """The turns of one kind of pause alone, by the names of the contestants."""
    suffix = f", {kind}"
    rounds = [
        {name.removesuffix(suffix): turn for name, turn in turns.items() if name.endswith(suffix)}
        for turns in result["rounds"]
    ]
    return {**result, "rounds": rounds}


def pauses(result: dict[str, Any]) -> list[str]:
    """The Markdown of one work that was measured with pauses."""
    rounds = result["rounds"]
    headings = (
        f"contestant, and what the learner does for {result['pause']} s",
        "steps/s",
        "of back to back",
        "the same in disturbed rounds",
        "of back to back, in relation to the bare loops",
        "CPU µs a step",
        "sleeps per 1,000 steps",
        "migrations per 1,000 steps",
        "steal and other programs, CPUs",
    )
    lines = [f"**{WORKS[result['work']].title}**", "", f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    for name in sorted({name for turns in rounds for name in turns}):
        base, _, kind = name.rpartition(", ")
        is_paused = kind in ("sleep", "work")
        taken = [a + b for a, b in zip(values(rounds, name, "steal"), values(rounds, name, "others"), strict=True)]
        cells = [
            name,
            figure(values(rounds, name, "rate"), "{:,.0f}"),
            *(shares(rounds, name, base) if is_paused else ("1", "1")),
            figure(in_relation(rounds, base, kind), "{:.2f}") if is_paused else "1",
            figure(values(rounds, name, "cpu_us"), "{:.1f}"),
            figure(values(rounds, name, "sleeps"), "{:,.2f}"),
            figure(values(rounds, name, "migrations"), "{:.3f}"),
            figure(taken, "{:.2f}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def table(result: dict[str, Any]) -> list[str]:
    """The Markdown of one work. As in the picture, figures are from undisturbed rounds, if there are at least three."""
    work, rounds = WORKS[result["work"]], result["rounds"]
    size = f"{work.n_envs} environments, T = {work.T}, {work.n_workers} workers"
    lines = [f"**{work.title}** ({size}). Cores: {figure(cores(calmest(rounds, ONE, ALL)), '{:.2f}')}."]
    headings = ("contestant", "steps/s", "of the bare loops", "CPU µs a step", "undisturbed")
    lines += ["", f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    for name in reversed(rates(rounds)):
        chosen = calmest(rounds, name)
        found = ratios(calmest(rounds, name, ALL), name, ALL, "in_step")
        n_quiet = sum(is_quiet(turns, name) for turns in chosen)
        cells = [
            name,
            figure(values(chosen, name, "rate"), "{:,.0f}"),
            f"{spread(padded(found))['median']:.2f}" if found else "-",
            f"{spread(padded(values(chosen, name, 'cpu_us')))['median']:.1f}",
            f"{n_quiet}/{len(values(rounds, name, 'rate'))}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {name} took no part: {first_line(why)}" for name, why in result["missing"].items())]
    return lines


def rates(rounds: Rounds) -> dict[str, float]:
    """The median steps per second of each contestant, ascending."""
    names = {name for turns in rounds for name in turns}
    found = {name: spread(padded(values(calmest(rounds, name), name, "rate")))["median"] for name in names}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def first_line(text: str) -> str:
    """The first line of an error, at most 160 characters."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return line if len(line) <= 160 else f"{line[:155]} ..."


def tables(results: Sequence[dict[str, Any]], skipped: Path | None, libraries: dict[str, str]) -> str:
    """All tables, the versions of the libraries, and the peers that are not installed."""
    lines = [line for result in results for line in [*(pauses if result["pause"] else table)(result), ""]]
    back_to_back = [result for result in results if not result["pause"]]
    if back_to_back:
        lines += [*summary(back_to_back), "", *aims(back_to_back), ""]
    if paused := [result for result in results if result["pause"]]:
        for kind in ("sleep", "work"):
            lines += [f"With pauses ({kind}):", "", *aims([only_paused(result, kind) for result in paused]), ""]
    if libraries:
        lines += ["| library | version |", "| --- | --- |"]
        lines += [*(f"| {name} | {version} |" for name, version in libraries.items()), ""]
    if skipped is not None and skipped.exists() and (text := skipped.read_text(encoding="utf-8").strip()):
        lines += ["Not installed:", "", *(f"- {first_line(line)}" for line in text.splitlines())]
    return "\n".join(lines)


#: The bars of the short picture: the fastest of penstock and of four peers.
_SHORT = (
    "penstock ParallelSampler",
    "a loop in rlpyt's style",
    "EnvPool (its own CartPole in C++)",
    "Gymnasium SyncVectorEnv",
    "SB3 DummyVecEnv",
)
_GREY, OWN, OTHER = "#808080", "#0f9d8c", "#9aa5b1"  # can be read on white and on black


def draw(results: Sequence[dict[str, Any]], file: Path, only: str | None = None) -> None:
    """One panel for each work: the steps per second of all contestants, the fastest at the top. With `only`, the panel
    of this work, with the bars in `_SHORT`."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a fifth of the size
    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    import matplotlib.pyplot as plt

    shown = [result for result in results if only in (None, result["work"]) and any(result["rounds"])]
    panels = [rates(result["rounds"]) for result in shown]
    if only:
        panels = [{name: rate for name, rate in panel.items() if name in _SHORT} for panel in panels]
    heights = [len(panel) + 2 for panel in panels]
    picture, parts = plt.subplots(
        len(panels), 1, figsize=(5, 0.5 * sum(heights)), squeeze=False, layout="constrained", height_ratios=heights
    )
    for part, result, panel in zip(parts.flat, shown, panels, strict=True):
        names = list(panel)
        middle = list(panel.values())
        colours = [OWN if name.startswith("penstock") else OTHER for name in names]
        bars = part.barh(range(len(names)), middle, color=colours, height=0.38)
        part.bar_label(bars, [f"{rate:,.0f}" for rate in middle], padding=4, color=_GREY, fontsize=12)
        part.set_title(f"{WORKS[result['work']].title}:\nsteps per second", fontsize=13, loc="left", color=_GREY)
        for place, name in enumerate(names):  # above its bar: beside it, a phone would have no room for the bar
            part.text(0, place + 0.28, name, fontsize=12, color=_GREY)
        part.set_xticks([])
        part.set_yticks([])
        part.set_xlim(0, 1.25 * max(middle))
        part.set_ylim(-0.5, len(names) - 0.2)  # room for the first name, below the title
        part.spines[:].set_visible(False)
    picture.savefig(file, transparent=True, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(picture)
