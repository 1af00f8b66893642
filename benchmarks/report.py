"""Report on a run of examples/ppo.py: returns, steps per second, and a picture of how the workers spent their time.

    python benchmarks/report.py runs/cartpole

Writes learning_curve.svg and timeline.svg into the run's folder, and measures the ceiling. With several runs, for
example of different seeds, the learning curve shows all of them. All else is about the first one:

    for seed in 0 1 2; do python examples/ppo.py --seed $seed --out runs/$seed; done
    python benchmarks/report.py runs/0 runs/1 runs/2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table
from throughput import measure_pair

matplotlib.use("Agg")  # before pyplot: there may be no screen
from matplotlib import pyplot as plt

# Okabe and Ito's colours, for colour-blind readers.
TRAIN_RETURN, EVAL_RETURN = "#56B4E9", "#0072B2"
SPANS = {
    "sampling": "#BBBBBB",
    "training": "#E69F00",
    "collecting": "#009E73",
    "acting": "#D55E00",
    "stepping": "#56B4E9",
}
ZOOM_SPANS = 24  # in the timeline's last panel: acting and stepping of 12 time steps
GREY = "#808080"  # can be read on white and on black: the pictures have no background
STYLE = {
    "font.size": 12,
    "svg.fonttype": "none",  # text stays text
    "savefig.transparent": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#80808040",
    "legend.frameon": False,
}

# ---- figures -----------------------------------------------------------------------------------


def read_progress(run_dir: Path) -> npt.NDArray[np.void]:
    """The rows of progress.csv. In rows without an evaluation, `eval_return_mean` is NaN."""
    return np.atleast_1d(np.genfromtxt(run_dir / "progress.csv", delimiter=",", names=True))


def plot_learning_curve(run_dirs: Sequence[Path], config: dict[str, Any]) -> None:
    """Written into the first folder."""
    runs = [read_progress(run_dir) for run_dir in run_dirs]
    figure, axes = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    axes.axhline(config["goal"], color=GREY, linestyle="--", linewidth=1)
    axes.annotate(f"goal {config['goal']:g}", (0, config["goal"]), (4, 4), textcoords="offset points", color=GREY)
    if len(runs) == 1:
        (progress,) = runs
        label = f"training, last {config['batch_B']} episodes"
        axes.plot(progress["steps"], progress["train_return_mean"], color=TRAIN_RETURN, label=label)
        _draw_evaluations(axes, progress, marker="o", markersize=4, label="evaluation")
        title = f"seed {config['seed']}"
    else:
        _draw_spread(axes, runs)
        title = f"{len(runs)} runs"
    axes.set(xlabel="environment steps", ylabel="mean return", xlim=(0, None))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
    axes.set_title(f"PPO on {config['env_id']}, {title}")
    axes.grid()
    axes.legend(loc="lower right")
    figure.savefig(run_dirs[0] / "learning_curve.svg")
    plt.close(figure)


def _draw_evaluations(axes: Axes, progress: npt.NDArray[np.void], **style: Any) -> None:
    evaluated = np.isfinite(progress["eval_return_mean"])
    axes.plot(progress["steps"][evaluated], progress["eval_return_mean"][evaluated], color=EVAL_RETURN, **style)


def _draw_spread(axes: Axes, runs: Sequence[npt.NDArray[np.void]]) -> None:
    """The evaluations of each run; their mean, and from the smallest to the largest, until the first run ends."""
    for i, progress in enumerate(runs):
        _draw_evaluations(axes, progress, linewidth=0.7, alpha=0.6, label=None if i else "evaluations of each run")
    evaluated = [progress[np.isfinite(progress["eval_return_mean"])] for progress in runs]
    steps = np.unique(np.concatenate([rows["steps"] for rows in evaluated]))
    steps = steps[steps <= min(rows["steps"][-1] for rows in evaluated)]
    curves = np.array([np.interp(steps, rows["steps"], rows["eval_return_mean"]) for rows in evaluated])
    axes.plot(steps, curves.mean(0), color=EVAL_RETURN, linewidth=2, label="their mean, until the first run ends")
    axes.fill_between(
        steps, curves.min(0), curves.max(0), color=EVAL_RETURN, alpha=0.2, linewidth=0, label="their range"
    )


def plot_timeline(run_dir: Path) -> None:
    """The last iteration, its batch, and the beginning of the batch. A worker waits in the gaps of its lane."""
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    # Begin and end of each span, in ms.
    spans = [(e["tid"], e["cat"], e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in events if "dur" in e]
    *_, name, origin, _ = last = max((s for s in spans if s[2].startswith("wait for itr")), key=lambda span: span[3])
    training = max((s for s in spans if s[2] == "training"), key=lambda span: span[3])
    batches = sorted(s for s in spans if s[1:3] == ("batch", name.removeprefix("wait for ")))
    rows = [[s for s in spans if s[:2] == (b[0], "row") and b[3] <= s[3] < b[4]] for b in batches]
    ends = training[4] - origin, last[4] - origin, min(sorted(own)[:ZOOM_SPANS][-1][4] for own in rows) - origin
    figure, panels = plt.subplots(3, 1, figsize=(5.4, 4.2 + 1.1 * len(rows)), layout="constrained")
    for axes, end in zip(panels, ends, strict=True):
        lanes = [[("sampling", *last[3:]), ("training", *training[3:])]]
        if axes is panels[0]:  # single rows would be too thin to see
            lanes += [[("collecting", *batch[3:])] for batch in batches]
        else:
            lanes += [[span[2:] for span in own] for own in rows]
        names = []
        for i, (lane, batch) in enumerate(zip(lanes, [last, *batches], strict=True)):
            for name, colour in SPANS.items():
                bars = [(begin - origin, ended - begin) for kind, begin, ended in lane if kind == name]
                # Hundreds of bars as shapes would make a large file.
                axes.broken_barh(bars, (i - 0.35, 0.7), color=colour, linewidth=0, rasterized=len(bars) > 50)
            idle = 1 - (min(batch[4] - origin, end) - max(batch[3] - origin, 0)) / end
            names.append(f"worker {i - 1}, idle {idle:.0%}" if i else "main process")
        axes.set_yticks(range(len(lanes)), names)
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.set_xlim(0, end)
    panels[0].set(title="One iteration: sampling, then training")
    panels[1].set(title="Its sampling: workers fill their columns")
    panels[2].set(title=f"The first {ends[2]:.1f} ms: acting and stepping", xlabel="milliseconds")
    handles = [Patch(color=colour, label=name) for name, colour in SPANS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=3)
    figure.savefig(run_dir / "timeline.svg", dpi=200)
    plt.close(figure)


# ---- text --------------------------------------------------------------------------------------


def print_report(console: Console, summary: dict[str, Any], rates: dict[str, list[float]] | None) -> None:
    config = summary["config"]
    verdict = "[green]reached[/]" if summary["goal_reached"] else "[red]missed[/]"
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        "goal", f"{verdict}: mean evaluation return {summary['eval_return_mean']:.0f}, goal {config['goal']:g}"
    )
    grid.add_row(
        "effort", f"{summary['total_steps']:,} steps in {summary['seconds']:.1f} s, workers' start-up included"
    )
    grid.add_row("sampling", f"{summary['sampling_steps_per_second']:,.0f} steps/s")
    grid.add_row("overall", f"{summary['steps_per_second']:,.0f} steps/s, with training and evaluation")
    if rates is not None:
        pairs = zip(rates["ParallelSampler"], rates["ceiling"], strict=True)
        turns = sorted((own / bare, own, bare) for own, bare in pairs)
        spread = f"{turns[0][0]:.1%} to {turns[-1][0]:.1%} in {len(turns)} turns"
        share, own, bare = turns[len(turns) // 2]
        grid.add_row("share", f"{share:.1%} of the ceiling ({spread})")
        grid.add_row("", f"{own:,.0f} of {bare:,.0f} steps/s, without training")
    console.print(f"\n[bold]PPO on {config['env_id']}, seed {config['seed']}", grid, "", sep="\n", highlight=False)


def measure_rates(console: Console, summary: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Sampler and ceiling in turns: figures from different minutes cannot be compared."""
    config = summary["config"]
    with console.status("measuring the ceiling"):
        return measure_pair(config["batch_B"], config["batch_T"], len(summary["workers"]), seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="a folder given to examples/ppo.py --out")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds per turn of the ceiling's measurement; 0 skips it"
    )
    arguments = parser.parse_args()
    run_dir: Path = arguments.run_dirs[0]
    summary = json.loads((run_dir / "summary.json").read_text())
    console = Console()
    rates = measure_rates(console, summary, arguments.seconds) if arguments.seconds > 0 else None
    print_report(console, summary, rates)
    with plt.rc_context(STYLE):  # type: ignore[arg-type]
        plot_learning_curve(arguments.run_dirs, summary["config"])
        plot_timeline(run_dir)
    console.print(f"see {run_dir / 'learning_curve.svg'} and {run_dir / 'timeline.svg'}")


if __name__ == "__main__":
    main()
