"""How penstock installs: one top-level package, from a wheel, an sdist or a checkout, with and without links."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import penstock
from penstock.tools import doctor

from .scale import FULL, scaled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
#: Links to the folders of the code.
ROOMS = sorted(path.name for path in (ROOT / "src" / "penstock").iterdir() if path.is_symlink())
EXTENSIONS = ("agents/_drawing", "buffers/_native", "columns/_stepping", "learning/_native", "workers/_native")
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "src", *ROOMS)

HAS_COMPILER = (
    shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is not None
    and (Path(sysconfig.get_path("include")) / "Python.h").exists()
)

# Without torch, whose import takes seconds: processes, shared memory and the compiled part work.
SMALL_SAMPLE = """
import penstock
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv
for context in ("fork", "forkserver"):
    with ShmVectorEnv([CountingEnv] * 2, n_workers=2, context=context) as envs:
        envs.reset(seed=0)
        envs.step([0, 0])
print(penstock.__file__)
"""
# Two imports of torch: in this process, and in the spawned worker. A supervisor for a sampler would be the third.
# Only at full scale: daily, other tests run samplers of an installed package.
SAMPLE = (
    SMALL_SAMPLE
    + """
from penstock import ParallelSampler, RandomAgent
for method in ("fork", "spawn"):
    with ParallelSampler("CartPole-v1", batch_T=5, batch_B=1, start_method=method) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
"""
)


FAST = {"CFLAGS": "-O0"}  # for the compiler: what is tested here is what is built, not how fast it is


def output_of(*command: object, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, **FAST, **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checkout(target: Path, *, links: bool) -> Path:
    """A copy of the sources, with the links to the rooms, or with the text files that git writes without links."""
    target.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
            shutil.copytree(source, target / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, target / name)
    for link in [] if links else [target / "src" / "penstock" / room for room in ROOMS]:
        content = str(link.readlink())
        link.unlink()
        link.write_text(content)
    return target


def build_wheel(source: Path, out: Path, **env: str) -> Path:
    """Daily without pip, which starts four interpreters; `test_an_editable_install_works` uses it."""
    if FULL:
        command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, source)
        output_of(*command, cwd=out.parent, **env)
    else:
        backend = f"import setuptools.build_meta as backend; backend.build_wheel({str(out)!r})"
        output_of(sys.executable, "-c", backend, cwd=source, **env)
    (wheel,) = out.glob("*.whl")
    return wheel


def modules(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def expected_modules(*, compiled: bool = True) -> set[str]:
    names = {f"penstock/{path.name}" for path in (ROOT / "src" / "penstock").glob("*.py")} | {"penstock/py.typed"}
    names |= {f"penstock/{room}/{path.name}" for room in ROOMS for path in (ROOT / room).glob("*.py")}
    names |= {"penstock/buffers/_native.pyi", "penstock/learning/_native.pyi"}
    parts = EXTENSIONS if compiled and HAS_COMPILER else ()
    return names | {f"penstock/{part}{sysconfig.get_config_var('EXT_SUFFIX')}" for part in parts}


@pytest.mark.parametrize(("links", "compiled"), [(True, True), (True, False), *scaled([(False, True)], [])])
def test_a_wheel_holds_penstock_and_nothing_else_and_works(tmp_path: Path, links: bool, compiled: bool) -> None:
    no_compiler = {} if compiled else {"CC": "/bin/false"}
    wheel = build_wheel(checkout(tmp_path / "checkout", links=links), tmp_path / "wheels", **no_compiler)
    assert modules(wheel) == expected_modules(compiled=compiled)
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (record,) = [name for name in archive.namelist() if name.endswith("top_level.txt")]
        assert archive.read(record).decode().split() == ["penstock"]
    sample = scaled(SAMPLE, SMALL_SAMPLE) if links else SMALL_SAMPLE
    assert str(site) in output_of(sys.executable, "-c", sample, cwd=tmp_path, PYTHONPATH=str(site))


@pytest.mark.skipif(not FULL, reason="full scale; `make dist` tries it too")
def test_a_wheel_built_from_an_sdist_is_the_same(tmp_path: Path) -> None:
    source = checkout(tmp_path / "checkout", links=True)
    output_of(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", tmp_path / "sdist", cwd=source)
    (sdist,) = (tmp_path / "sdist").glob("*.tar.gz")
    assert modules(build_wheel(sdist, tmp_path / "wheels")) == expected_modules()


def test_a_checkout_works_uninstalled(tmp_path: Path) -> None:
    source = checkout(tmp_path / "checkout", links=True)
    assert str(source) in output_of(sys.executable, "-c", SMALL_SAMPLE, cwd=tmp_path, PYTHONPATH=str(source / "src"))


@pytest.mark.parametrize("links", scaled([True, False], [False]))
def test_an_editable_install_works(tmp_path: Path, links: bool) -> None:
    source = checkout(tmp_path / "checkout", links=links)
    # A virtual environment with everything that is installed here, except penstock.
    output_of(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(output_of(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    for folder in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for entry in folder.iterdir():
            if "penstock" not in entry.name and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    install = ["-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation", "-e", source]
    output_of(
        sys.executable, *install, cwd=tmp_path, **scaled({}, {"CC": "/bin/false"})
    )  # the tests of wheels compile C
    assert str(source) in output_of(python, "-c", SAMPLE if links else SMALL_SAMPLE, cwd=tmp_path)
    top_level = {path.name for path in site.iterdir()} & set(ROOMS)
    assert not top_level


@pytest.mark.skipif(
    ROOT / "src" in Path(penstock.__file__).parents, reason="the tests run against the checkout, where nothing is built"
)
def test_the_installed_package_is_compiled_where_there_is_a_compiler() -> None:
    assert doctor.describe_machine()["compiled parts"] == "in use" or not HAS_COMPILER


def test_the_version_is_the_same_everywhere() -> None:
    places = {
        "setup.py": r'version="(.*)"',
        "src/penstock/__init__.py": r'__version__ = "(.*)"',
        "CITATION.cff": r"^version: (.*)$",
        "CHANGELOG.md": r"^## (\d\S*)",
    }
    found = {name: re.search(pattern, (ROOT / name).read_text(), re.MULTILINE) for name, pattern in places.items()}
    assert {name: match and match[1] for name, match in found.items()} == dict.fromkeys(places, penstock.__version__)


def test_the_installed_package_is_what_is_tested() -> None:
    top_level = Path(penstock.__file__).parent.parent
    assert not any((top_level / room / "__init__.py").exists() for room in ROOMS)


def test_no_room_has_a_circle_of_imports_and_no_two_files_have_one_name() -> None:
    """Imports inside functions do not count: some are needed, since zmq or Stable-Baselines3 may be missing, or since
    few samplers need a file. Nor do those for type checkers: a `Run` has a `Schedule`, whose methods get a `Run`."""
    root = Path(penstock.__file__).parent
    imports: dict[str, set[str]] = {}
    for path in root.glob("*/*.py"):
        if path.stem.startswith("__"):
            continue
        room = f"penstock.{path.parent.name}."
        tree = ast.parse(path.read_text(encoding="utf-8"))
        conditions = [node for node in tree.body if isinstance(node, ast.If)]
        blocks = [tree.body, *(node.body for node in conditions if ast.unparse(node.test) != "TYPE_CHECKING")]
        nodes = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
        imports[room + path.stem] = {node.module for node in nodes if node.module and node.module.startswith(room)}
    assert len(imports) > 100
    names = [module.rpartition(".")[2] for module in imports]
    assert sorted(names) == sorted(set(names))
    while free := {module for module, needed in imports.items() if not needed & imports.keys()}:
        for module in free:
            del imports[module]
    assert not imports


def test_the_recipe_for_conda_needs_what_setup_needs() -> None:
    keywords = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.keyword)]
    wanted = next(ast.literal_eval(node.value) for node in keywords if node.arg == "install_requires")
    recipe = (ROOT / ".ci/conda/recipe.yaml").read_text(encoding="utf-8")
    run = re.findall(r"    - (\S+) (>=\S+)", recipe.split("  run:\n")[1].split("\n\n")[0])
    assert {f"{name}{bound}".replace("pytorch", "torch") for name, bound in run} == {*wanted, "python>=3.10"}
    assert f'version: "{penstock.__version__}"' in recipe


def test_make_run_installs_no_more_than_it_runs_with(tmp_path: Path) -> None:
    """The environments and game engines of the tests are some 2 GB."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}"]
    run, test = (
        subprocess.run([*command, what], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for what in ("run", "test")
    )
    assert '".[bench]"' in run
    assert ".[dev]" not in run
    assert '".[dev]"' in test


def test_no_script_of_the_checks_names_the_host_of_a_package_archive() -> None:
    """They use what this system is set up with: a mirror, or an archive of its own."""
    hosts = re.compile(r"https?://|\b(?:debian|pypi|npmjs|ubuntu|pythonhosted)\.(?:org|com)\b")
    for path in [*(ROOT / ".ci").rglob("*"), ROOT / "Makefile"]:
        if path.is_file() and path.suffix != ".pyc":
            assert not hosts.findall(path.read_text(encoding="utf-8")), path
