"""What a user waits for before the first step: the download, the import, and the start of two workers.

    python benchmarks/installing.py                 prints a table in Markdown

For each library that is installed here: the size of its own wheel, as pip downloads it, without dependencies; then, in
new Python processes that take turns, the seconds of `import`, and the seconds from the start of Python to the end of
the first step of eight CartPole environments in parallel. penstock has two workers for them, EnvPool two threads, and
the others a process for each environment. Medians and ranges.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: For each library: its name in the index, what is imported, and a program that makes the first step.
LIBRARIES = {
    "penstock, vector environment": (
        "penstock",
        "import penstock.vector",
        "from penstock.vector import ShmVectorEnv\n"
        "envs = ShmVectorEnv(['CartPole-v1'] * 8, n_workers=2)\n"
        "envs.reset(seed=0)\nenvs.step(envs.action_space.sample())\nenvs.close()",
    ),
    "penstock, sampler": (
        "penstock",
        "from penstock import ParallelSampler",
        "from penstock import ParallelSampler, RandomAgent\n"
        "with ParallelSampler('CartPole-v1', batch_T=1, batch_B=8, n_workers=2) as sampler:\n"
        "    sampler.initialize(RandomAgent(), seed=0)\n    sampler.obtain_samples(0)",
    ),
    "Gymnasium, AsyncVectorEnv": (
        "gymnasium",
        "import gymnasium.vector",
        "import gymnasium as gym\nenvs = gym.make_vec('CartPole-v1', 8, vectorization_mode='async')\n"
        "envs.reset(seed=0)\nenvs.step(envs.action_space.sample())\nenvs.close()",
    ),
    "Stable-Baselines3, SubprocVecEnv": (
        "stable-baselines3",
        "from stable_baselines3.common.vec_env import SubprocVecEnv",
        "import gymnasium as gym, numpy as np\nfrom stable_baselines3.common.vec_env import SubprocVecEnv\n"
        "envs = SubprocVecEnv([lambda: gym.make('CartPole-v1')] * 8)\n"
        "envs.reset()\nenvs.step(np.zeros(8, int))\nenvs.close()",
    ),
    "EnvPool": (
        "envpool",
        "import envpool",
        "import envpool, numpy as np\nenvs = envpool.make_gymnasium('CartPole-v1', num_envs=8, num_threads=2)\n"
        "envs.reset()\nenvs.step(np.zeros(8, np.int32))\nenvs.close()",
    ),
    "TorchRL, ParallelEnv": (
        "torchrl",
        "import torchrl.envs",
        "from torchrl.envs import GymEnv, ParallelEnv\nenvs = ParallelEnv(8, lambda: GymEnv('CartPole-v1'))\n"
        "envs.rollout(1)\nenvs.close()",
    ),
    "tianshou, SubprocVectorEnv": (
        "tianshou",
        "import tianshou.env",
        "import gymnasium as gym, numpy as np\nfrom tianshou.env import SubprocVectorEnv\n"
        "envs = SubprocVectorEnv([lambda: gym.make('CartPole-v1')] * 8)\n"
        "envs.reset()\nenvs.step(np.zeros(8, int))\nenvs.close()",
    ),
}
MAIN = "if __name__ == '__main__':\n"


def seconds(program: str) -> float:
    """How long a new Python takes for this program. Raises `CalledProcessError` if it fails."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(MAIN + "".join(f"    {line}\n" for line in program.split("\n")), encoding="utf-8")
        subprocess.run([sys.executable, "-W", "ignore", path], check=True, capture_output=True, timeout=120)
    return time.perf_counter() - began


def megabytes(package: str, wheels: Path) -> str:
    """The size of the wheel that pip downloads, or that lies in the folder `wheels`."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    found = [path for path in wheels.glob(f"{package}-*x86_64.whl") if f"-{tag}-" in path.name]
    if not found:
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
            if subprocess.run(pip, check=False, capture_output=True).returncode:
                return "?"
            found = list(Path(folder).iterdir())
            return f"{found[0].stat().st_size / 1e6:.1f}"
    return f"{found[0].stat().st_size / 1e6:.1f}"


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", metavar="LIBRARY", help="parts of names; default: all")
    parser.add_argument("--repeats", type=int, default=7, help="processes for each figure")
    parser.add_argument("--wheels", type=Path, default=Path("dist"), help="where the wheels of `make dist` are")
    parser.add_argument("--json", type=Path, help="write the seconds of all processes to this file")
    args = parser.parse_args()
    here = {
        name: entry
        for name, entry in LIBRARIES.items()
        if importlib.util.find_spec(entry[1].split()[1].split(".")[0]) is not None
        and (args.libraries is None or any(part in name for part in args.libraries))
    }
    times: dict[str, dict[str, list[float]]] = {name: {"import": [], "first step": []} for name in here}
    for turn in range(args.repeats + 1):  # the first turn fills caches of files
        for name, (_, *programs) in here.items():
            for kept, program in zip(times[name].values(), programs, strict=True):
                taken = seconds(program)
                if turn:
                    kept.append(taken)
    print("| library | wheel, MB | import, s | first step, s |\n| --- | ---: | ---: | ---: |")
    for name, (package, *_) in here.items():
        print(f"| {name} | {megabytes(package, args.wheels)} | {' | '.join(map(shown, times[name].values()))} |")
    if args.json is not None:
        args.json.write_text(json.dumps(times, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
