"""`make mutants`: plants each fault of `mutants.txt` in a copy of penstock, and says which of them no test notices.

The tests must pass without a fault, and each line that is changed must stand in its file exactly once: otherwise
nothing is tried. Everything happens in a temporary folder. A copy of the checkout is changed there, built, C included,
and tested. A test that does not end has noticed the fault too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Refused(Exception):
    """Something from which nothing can be learned."""


class Mutant(NamedTuple):
    what: str
    file: str
    before: str
    after: str
    tests: list[str]
    survives: str  #: why no test notices it, if that is known

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def parse(text: str) -> list[Mutant]:
    mutants = []
    for entry in re.split(r"\n\s*\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip()):
        found = re.fullmatch(r"(.+)\n(\S+)\n- (.+)\n\+ (.+)\n(tests/.+)(?:\nsurvives: (.+))?", entry)
        if found is None:
            raise Refused(f"an entry has the wrong form:\n{entry}")
        what, file, before, after, tests, survives = found.groups("")
        mutants.append(Mutant(what, file, before, after, tests.split(), survives))
    return mutants


def copy_checkout(root: Path, target: Path) -> None:
    """The files of the checkout as they are now, those that git would add included."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")[:-1]:
        if os.path.lexists(root / name):  # not removed since
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)


def with_fault(mutant: Mutant, folder: Path) -> str:
    """The file with the fault. Raises `Refused` if the file has the line never or several times."""
    text = path.read_text() if (path := folder / mutant.file).exists() else ""
    changed, n = re.subn(rf"(?m)^(\s*){re.escape(mutant.before)}$", lambda line: line[1] + mutant.after, text)
    if n != 1:
        raise Refused(f"{mutant}: this line stands {n} times in the file, not once: {mutant.before}")
    if path.suffix == ".py":
        try:
            compile(changed, mutant.file, "exec")
        except SyntaxError as error:
            raise Refused(f"{mutant}: {error}") from None
    return changed


def build(folder: Path, changed: str = "") -> None:
    """Build what has changed, in `folder`. Raises `Refused` if something cannot be compiled that could before."""
    compiled = list((folder / "build" / "lib").rglob("*.so"))
    for path in compiled:  # it would stay if the changed file cannot be compiled
        if changed.endswith((".c", ".h")) and path.parent.name == Path(changed).parent.name:
            path.unlink()
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", "build", "--build-lib", "build/lib"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode or not all(path.exists() for path in compiled):
        raise Refused(f"the package cannot be built:\n{done.stderr[-2000:]}")


def run_tests(folder: Path, limit: float | None, *arguments: str) -> str:
    """Which test has failed; an empty text if all have passed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(folder / "build" / "lib")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each module is compiled once, for all copies
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(command, cwd=folder, env=environ, stdout=output, stderr=output, timeout=limit)
        except subprocess.TimeoutExpired:
            return f"the limit of {limit:g} s"
        output.seek(0)
        text = output.read()
    failed = [*re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE), f"code {done.returncode}: {text[-300:]}"]
    return "" if done.returncode == 0 else failed[0] + (", which did not end in time" if "Timeout (>" in text else "")


def survives(mutant: Mutant, base: Path, limit: float) -> bool:
    """Plant the fault in a copy of `base`, and print what its tests say. Returns whether it lives and should not."""
    began, kind = time.monotonic(), "lives" if mutant.survives else "LIVES"
    with tempfile.TemporaryDirectory(dir=base.parent) as name:
        folder = Path(name) / "copy"
        shutil.copytree(base, folder, symlinks=True)
        (folder / mutant.file).write_text(with_fault(mutant, base))
        try:
            build(folder, mutant.file)
            kind = "died" if (why := run_tests(folder, limit, *mutant.tests)) else kind
        except Refused as error:
            kind, why = "REFUSED", str(error)
    why = why or mutant.survives or f"no test notices it in {' '.join(mutant.tests)}"
    print(f"{kind:8}{time.monotonic() - began:4.0f} s  {mutant}\n{'':16}{why}", flush=True)
    return kind.isupper()


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Which faults do the tests not notice?")
    parser.add_argument("words", nargs="*", help="only the faults whose file or description has one of these words")
    parser.add_argument("--limit", type=float, default=300, help="seconds that the tests of a fault may take")
    parser.add_argument("--jobs", type=int, default=2, help="how many faults at once")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, ThreadPoolExecutor(options.jobs) as pool:
        base = Path(name) / "base"
        copy_checkout(root, base)
        try:
            mutants = parse((base / "tests" / "mutants.txt").read_text())
            for mutant in mutants:
                with_fault(mutant, base)
            mutants = [own for own in mutants if not options.words or any(word in str(own) for word in options.words)]
            build(base)
            tests = {name for mutant in mutants for name in mutant.tests}
            if failed := run_tests(base, None, "-n", str(options.jobs), "--dist", "loadgroup", *sorted(tests)):
                raise Refused(f"a test fails without a fault: {failed}")
        except Refused as error:
            print(f"REFUSED {error}")
            return 1
        print(f"The tests pass without a fault. {len(mutants)} faults follow.", flush=True)
        living = list(pool.map(lambda own: survives(own, base, options.limit), mutants))
    print(f"{sum(living)} of {len(mutants)} faults live, and should not.")
    print(*(f"  {mutant}" for mutant, lives in zip(mutants, living, strict=True) if lives), sep="\n")
    return int(any(living))


if __name__ == "__main__":
    sys.exit(main())
