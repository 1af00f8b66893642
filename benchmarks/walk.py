"""Draws docs/pictures/walk.svg, the way of a batch through the files: `python benchmarks/walk.py`."""

from __future__ import annotations

from html import escape
from pathlib import Path

#: Each row of the picture: the file, what happens there, and whose process it is.
ROWS = (
    ("samplers/sampler.py", "obtain_samples: your call", "main"),
    ("samplers/schedule.py", "which batch is begun, which is finished", "main"),
    (
        "workers/pool.py, gates.py",
        "open the gates, wait for all workers",
        "main",
    ),
    ("workers/process.py", "the worker's loop, between two gates", "worker"),
    (
        "samplers/sampler_program.py",
        "the command: collect into this slot",
        "worker",
    ),
    (
        "collectors/collector.py",
        "for t: act, step, settle, write row t + 1",
        "worker",
    ),
    (
        "collectors/recorder.py",
        "agent.step; record actions, ends, rows",
        "worker",
    ),
    ("columns/*_columns.py", "step the environments; say what ended", "worker"),
    ("collectors/tracking.py", "send the finished trajectories", "worker"),
    ("samplers/batches.py", "the slot becomes your samples", "main"),
)
COLOURS = {"main": "#3A9D5D", "worker": "#4C78A8"}
X, WIDTH, HEIGHT, GAP = 2, 396, 42, 12


def picture() -> str:
    """The SVG."""
    total = 34 + len(ROWS) * (HEIGHT + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 {total}" width="560" height="{total * 7 // 5}" '
        'role="img" font-family="Helvetica, Arial, sans-serif" font-size="13" fill="currentColor">',
        "<title>Through which files one batch passes, from your call to your samples</title>",
        "<style>",
        "svg { color: #222831; }",
        "@media (prefers-color-scheme: dark) { svg { color: #d7dce3; } }",
        "</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z"/></marker></defs>',
        f'<text x="{X}" y="16"><tspan font-weight="bold" fill="{COLOURS["main"]}">main process</tspan>, '
        f'<tspan font-weight="bold" fill="{COLOURS["worker"]}">each worker</tspan></text>',
    ]
    for i, (file, what, whose) in enumerate(ROWS):
        y, colour = 26 + i * (HEIGHT + GAP), COLOURS[whose]
        lines += [
            f'<rect x="{X}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{colour}" fill-opacity="0.18" '
            f'stroke="{colour}"/>',
            f'<text x="{X + 8}" y="{y + 17}" font-size="12" font-weight="bold">{escape(file)}</text>',
            f'<text x="{X + 8}" y="{y + 34}" font-size="12">{escape(what)}</text>',
        ]
        if i:
            lines.append(
                f'<line x1="200" y1="{y - GAP + 1}" x2="200" y2="{y - 1}" stroke="currentColor" stroke-width="1.5" '
                'marker-end="url(#tip)"/>'
            )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs/pictures/walk.svg").write_text(picture(), encoding="utf-8")
