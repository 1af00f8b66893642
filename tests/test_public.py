"""The public surface: what `import penstock` and each room offer, and what the import costs."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock
import penstock.distributed
from penstock import Sampler, errors, samplers
from penstock.samplers.config import SamplerOptions

ROOMS = [room.name for room in pkgutil.iter_modules(penstock.__path__) if room.ispkg]
MODULES = ("penstock", *(f"penstock.{room}" for room in ROOMS))

modules = pytest.mark.parametrize("module", [importlib.import_module(name) for name in MODULES], ids=MODULES)


def public_names(module: ModuleType) -> list[str]:
    """What `module` lists in `__all__`, except what needs an extra that is not installed. Without a list: nothing."""
    return [name for name in getattr(module, "__all__", ()) if not lacks_extra(module, name)]


def lacks_extra(module: ModuleType, name: str) -> bool:
    try:
        getattr(module, name)
    except ImportError:
        return True
    except AttributeError:
        return False  # the tests report it
    return False


def place(name: str) -> tuple[bool, bool, str]:
    """Constants first, then classes, then functions: the linter's order."""
    return not name.isupper(), not name[0].isupper(), name


@modules
def test_public_names_exist_and_are_sorted(module: ModuleType) -> None:
    names = public_names(module)
    assert names == sorted(set(names), key=place)
    for name in names:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        _ = module.NoSuchName


def test_completion_shows_the_public_names_and_no_others() -> None:
    assert {name for name in dir(penstock) if not name.startswith("__")} == set(penstock.__all__)


@modules
def test_a_module_offers_what_it_lists_and_nothing_else(module: ModuleType) -> None:
    ours = {
        name for name, value in vars(module).items() if str(getattr(value, "__module__", "")).startswith("penstock")
    }
    public = {name for name in ours if not name.startswith("_")}
    assert public <= set(public_names(module))


@modules
def test_every_public_class_and_function_has_a_docstring(module: ModuleType) -> None:
    public = {name: getattr(module, name) for name in public_names(module)}
    assert list(undocumented(public)) == []


def undocumented(public: dict[str, Any]) -> Iterator[str]:
    """Names of classes, methods and functions without a docstring. A method may inherit its docstring, a class not."""
    for name, value in public.items():
        if inspect.isclass(value):
            # A dataclass without a docstring gets its signature instead.
            if not value.__doc__ or "__doc__" not in vars(value) or value.__doc__.startswith(f"{value.__name__}("):
                yield name
            own = [key for key in vars(value) if not key.startswith("_") and inspect.isroutine(getattr(value, key))]
            yield from (f"{name}.{key}" for key in own if not inspect.getdoc(getattr(value, key)))
        elif inspect.isroutine(value) and not inspect.getdoc(value):
            yield name


@pytest.mark.parametrize("cls", [getattr(samplers, name) for name in samplers.__all__ if name.endswith("Sampler")])
def test_the_help_of_a_sampler_has_all_arguments(cls: type[Sampler]) -> None:
    text = inspect.getdoc(cls) or ""
    assert all(f"    {name}: " in text for name in ("env_fn", *SamplerOptions.__annotations__))


def test_every_error_is_one_of_the_tree() -> None:
    tree = {name: getattr(errors, name) for name in errors.__all__}
    assert all(issubclass(cls, errors.PenstockError) for cls in tree.values())
    assert all(name in penstock.__all__ for name in tree)
    for name in ("WorkerError", "WorkerDiedError", "WorkerTimeoutError"):
        assert issubclass(tree[name], errors.SamplerBrokenError)


@pytest.mark.parametrize("system", ["win32", "cygwin"])
def test_windows_is_refused_with_a_remedy(system: str) -> None:
    code = f"import sys; sys.platform = {system!r}; import penstock"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ImportError: penstock needs Linux or macOS. On Windows, use it in WSL 2. The page" in done.stderr
    (page,) = re.findall(r"The page (\S+) says why, under Systems", done.stderr)
    assert "## Systems" in (Path(__file__).parent.parent / page).read_text(encoding="utf-8")


def test_what_a_batch_needs_does_not_name_what_is_optional() -> None:
    """Not as text either, which import-linter does not see: a module to preload, for example. Docstrings may refer
    users there."""
    core = "buffers", "workers", "envs", "agents", "columns", "collectors", "samplers"
    named = re.compile(rf"penstock\.({'|'.join(set(ROOMS) - {*core})})\b")
    files = [path for room in core for path in (Path(penstock.__file__).parent / room).glob("*.py")]
    assert len(files) > 80
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                del node.body[0]
        assert (path.name, named.findall(ast.unparse(tree))) == (path.name, [])


def test_importing_penstock_imports_neither_torch_nor_what_many_machines_need() -> None:
    rooms = "penstock, penstock.workers.process, penstock.distributed, penstock.distributed"
    code = f"import sys, {rooms}; print({{'ray', 'zmq', 'msgpack', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.parametrize(
    ("name", "library"), [("ControlPanel", "zmq"), ("Connection", "msgpack"), ("RaySampler", "ray")]
)
def test_a_library_that_many_machines_need_and_is_missing_is_named(name: str, library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; from penstock.distributed import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    error = (
        f'ImportError: penstock.distributed.{name} needs {library}, which is not installed: pip install ".[cluster]"'
    )
    assert done.stderr.splitlines()[-1] == error
