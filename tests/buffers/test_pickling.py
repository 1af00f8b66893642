"""What penstock sends to another process: functions and classes of a script, with any version of cloudpickle."""

from __future__ import annotations

import linecache
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.buffers import pickling

CELL = "<cell 7>"
LINES = ["def broken():\n", "    return [1 / 0 for _ in range(2)]  # the wrong line\n"]


def defined_in(source: list[str], file: str) -> Callable[[], Any]:
    """The function `broken` of a main module, in which a notebook too defines its functions."""
    module: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("".join(source), file, "exec"), module)
    found: Callable[[], Any] = module["broken"]
    return found


def test_a_function_that_was_sent_says_in_which_line_of_the_script_it_fails(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("".join(LINES))
    sent = pickling.dumps(defined_in(LINES, str(script)))
    assert b"the wrong line" not in sent, "the other process can read the file"
    with pytest.raises(ZeroDivisionError) as caught:
        pickle.loads(sent)()
    *_, inner = traceback.extract_tb(caught.value.__traceback__)
    assert (inner.filename, inner.lineno) == (str(script), 2)
    assert inner.line == LINES[1].strip()


def test_the_lines_of_a_notebooks_cell_are_sent_since_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, CELL, (sum(map(len, LINES)), None, LINES, CELL))  # as IPython does
    sent = pickling.dumps(defined_in(LINES, CELL))
    monkeypatch.delitem(linecache.cache, CELL)  # as in another process
    broken = pickle.loads(sent)
    with pytest.raises(ZeroDivisionError) as caught:
        broken()
    shown = "".join(traceback.format_exception(caught.value))
    assert f'File "{CELL}", line 2, in broken\n    return [1 / 0 for _ in range(2)]  # the wrong line\n' in shown


@pytest.mark.skipif(sys.version_info < (3, 14), reason="older versions evaluate annotations earlier")
def test_annotations_that_only_type_checkers_know_are_sent_as_text() -> None:
    source = ["def broken(level: Config.level = 3, *, names: list[Config] | None = None) -> Config:\n", "    'Says.'\n"]
    source += ["    return level\n", "broken.seen = True\n"]
    broken = pickle.loads(pickling.dumps(defined_in(source, "<string>")))
    assert (broken(), broken.__doc__, broken.seen, broken.__name__) == (3, "Says.", True, "broken")
    texts = {"level": "Config.level", "names": "list[Config] | None", "return": "Config"}
    assert broken.__annotations__ == texts
    assert broken.__kwdefaults__ == {"names": None}
