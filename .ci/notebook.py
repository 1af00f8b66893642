"""Writes docs/first_run.ipynb, the notebook of docs/first_run.md: python .ci/notebook.py"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs/first_run.md"


def cells_of(page: str) -> list[dict[str, Any]]:
    """A cell of text for each part of the page, and a cell of code for each of its Python blocks."""
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(re.split(r"```python\n(.*?)```\n", page, flags=re.DOTALL)):
        if text := part.strip():
            code = {"cell_type": "code", "execution_count": None, "outputs": []} if number % 2 else {}
            cell = {
                "cell_type": "markdown",
                "id": f"cell-{number}",
                "metadata": {},
                "source": text.splitlines(True),
            }
            cells.append(cell | code)
    return cells


def notebook() -> str:
    """The notebook's file."""
    kernel = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    cells = cells_of(PAGE.read_text(encoding="utf-8"))
    content = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(), encoding="utf-8")
