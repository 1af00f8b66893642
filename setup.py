"""Build script: the metadata, and the map from the folders at the top level to the `penstock` package."""

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

try:
    import numpy
except ImportError:  # only possible without build isolation
    numpy = None

HERE = Path(__file__).parent
ROOMS = (
    "buffers",
    "workers",
    "envs",
    "agents",
    "columns",
    "collectors",
    "samplers",
    "vector",
    "learning",
    "games",
    "distributed",
    "evaluation",
    "testing",
    "tools",
)

# src/penstock/ holds relative links to the rooms. A checkout without symbolic links has text files there instead. Then
# each room is mapped from the top level. Either way, `penstock` is the only package that is installed.
package_dir = {"": "src"}
for room in ROOMS:
    if not (HERE / "src" / "penstock" / room).is_dir():
        package_dir[f"penstock.{room}"] = room

# The innermost loops, and the waits, in C. Without a C compiler they run in Python, with the same results but slower
# (benchmarks/native.py).
EXTENSIONS = []
if numpy is not None and not sysconfig.get_config_var("Py_GIL_DISABLED"):  # the C code relies on the GIL
    EXTENSIONS = [
        Extension(
            f"penstock.{room}.{files[0]}",
            [f"{room}/{file}.c" for file in files],
            depends=headers,  # setuptools takes them into the sdist too
            include_dirs=[numpy.get_include()],
            # Sums must be equal to Python's and to numpy's, to the last bit.
            extra_compile_args=["-ffp-contract=off"] if os.name == "posix" else [],
            optional=True,
        )
        for room, files, headers in (
            ("buffers", ["_native"], ["buffers/_native.h", "buffers/_cells.h"]),
            ("workers", ["_native"], []),
            ("agents", ["_drawing"], ["buffers/_native.h"]),
            ("columns", ["_stepping"], ["buffers/_native.h", "buffers/_cells.h"]),
            ("learning", ["_native", "_rows"], ["learning/_native.h"]),
        )
    ]

BENCH = ["rich>=13", "matplotlib>=3.7"]
# Environments for the tests.
ATARI = ["ale-py>=0.10", "opencv-python-headless>=4.8"]
MUJOCO = ["gymnasium[mujoco]>=1.1"]
DM_CONTROL = [
    # dm_control needs labmaze, which has no wheels from Python 3.13 on.
    "shimmy[dm-control]>=2.0; python_version < '3.13'",
    # dm_control reads a field that MuJoCo 4 has removed.
    "mujoco<4; python_version < '3.13'",
    # Later versions do not support Python 3.10, and pip needs many minutes to find that out.
    "etils<1.14; python_version < '3.11'",
]
# It has builds for these versions of Python, and takes some 700 MB.
ENVPOOL = ["envpool>=1.2; python_version >= '3.11' and python_version < '3.15'"]
JAX = ["jax>=0.4.30"]  # examples/jax_ppo.py
SB3 = ["stable-baselines3>=2.4"]
VIZDOOM = ["vizdoom>=1.3,<1.4"]  # a real game engine, for the tests and examples/vizdoom_match.py
PETTINGZOO = ["pettingzoo>=1.25", "mpe2>=1.0", "chess>=1.9"]  # chess: for the game of that name
VIDEO = ["moviepy>=1.0.3"]  # RecordedEpisode.film writes with it
DOCS = ["mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.26"]
# The control plane over sockets, and Ray for many machines.
WIRE = ["pyzmq>=25", "msgpack>=1.0"]
CLUSTER = ["ray>=2.59,<2.61", *WIRE]  # tests/distributed runs with 2.60; the tests of RaySampler ran with 2.59 too
# Where the figures of an experiment may go, besides files.
METRICS = ["tensorboard>=2.15", "prometheus-client>=0.19"]
DEV = [
    # pytest-xdist 3.8 ignores its groups under pytest 9.2: tests that lease ports would disturb each other.
    "pytest>=8,<9.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "coverage>=7.10",
    "hypothesis>=6.100",
    "ruff>=0.8",
    "mypy>=1.13",
    "import-linter>=2.1",
    "pre-commit>=3.5",
    "types-psutil",
    "setuptools>=69",
    "wheel",
    "build>=1.2",
    "playwright>=1.45",  # it drives the Chromium that is installed; `playwright install` is not needed
    "pillow>=10",  # looks at screenshots
    "joblib>=1.3",  # its processes are one more place where users start samplers
    *ATARI,
    *MUJOCO,
    *DM_CONTROL,
    *ENVPOOL,
    *SB3,
    *PETTINGZOO,
    *VIZDOOM,
    "minari>=0.5.3",  # a page writes a dataset for it
    "h5py>=3.8",  # minari reads and writes with it
    "supersuit>=3.9",  # its vector environments are the oracle of those of several agents
    *DOCS,
    *WIRE,
    *METRICS,
]

setup(
    name="penstock",
    version="0.2.0",
    description="Sample reinforcement-learning environments in parallel, straight into shared memory.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The penstock developers",
    license="Apache-2.0",
    keywords=["reinforcement learning", "gymnasium", "pytorch", "parallel sampling", "shared memory"],
    python_requires=">=3.10",
    package_dir=package_dir,
    packages=["penstock", *(f"penstock.{room}" for room in ROOMS)],
    package_data={
        "penstock": ["py.typed"],
        "penstock.buffers": ["_native.pyi"],
        "penstock.learning": ["_native.pyi"],
    },
    ext_modules=EXTENSIONS,
    zip_safe=False,
    install_requires=[
        "numpy>=1.25",
        "torch>=2.1",
        "psutil>=5.9",
        "fasteners>=0.18",
        "cloudpickle>=2.2",
        "threadpoolctl>=3.5",  # older ones do not find the OpenBLAS of numpy 2
        "gymnasium>=1.1",
    ],
    extras_require={
        "bench": BENCH,
        "atari": ATARI,
        "mujoco": MUJOCO,
        "dm_control": DM_CONTROL,
        "envpool": ENVPOOL,
        "jax": JAX,
        "sb3": SB3,
        "pettingzoo": PETTINGZOO,
        "video": VIDEO,
        "docs": DOCS,
        "cluster": CLUSTER,
        "metrics": METRICS,
        "dev": DEV + BENCH,
    },
    entry_points={"console_scripts": ["penstock = penstock.__main__:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
