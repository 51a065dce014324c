"""What is installed with `pip install colonnade` alone is enough for everything but what an extra is named for."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.lowest import PYPROJECT, pins

SOURCE = Path(__file__).parents[1] / "src" / "colonnade"
NEEDS_DATA = ("colonnade.corpus", "colonnade.data.cleaning", "colonnade.data.overlap", "colonnade.data.token_stages")
NEEDS_LM_EVAL = ("colonnade.lm_eval.model",)
NEEDS_TRITON = ("colonnade.triton_kernels",)
"""Comes with torch for CUDA, and is done without elsewhere (`gpu_kernels.py`)."""

PROGRAM = """
import importlib, re, sys
from importlib import metadata

# what the package itself requires, and what that requires in turn, without extras
def required(name, found):
    for line in metadata.requires(name) or []:
        other = re.match(r"[\\w.-]+", line)[0].replace("_", "-").lower()
        if "extra ==" not in line and other not in found:
            found.add(other)
            try:
                required(other, found)
            except metadata.PackageNotFoundError:
                pass
    return found

own = {name.replace("_", "-").lower() for name in required("colonnade", {"colonnade"})}
for module, packages in metadata.packages_distributions().items():
    if module not in sys.modules and not any(name.replace("_", "-").lower() in own for name in packages):
        sys.modules[module] = None  # importing it fails
assert sys.modules.get("datatrove", "") is None and sys.modules.get("transformers", "") is None

for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(module, error)
"""


def modules() -> list[str]:
    """All of the package, but those that run when they are imported."""
    names = (".".join(("colonnade", *file.relative_to(SOURCE).with_suffix("").parts)) for file in SOURCE.rglob("*.py"))
    return sorted(name.removesuffix(".__init__") for name in names if not name.endswith("__main__"))


@pytest.mark.slow
def test_the_package_alone_imports_everything_but_what_extras_are_for() -> None:
    others = [name for name in modules() if not name.startswith((*NEEDS_DATA, *NEEDS_LM_EVAL, *NEEDS_TRITON))]
    answer = subprocess.run([sys.executable, "-c", PROGRAM, *others], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (0, ""), answer.stdout + answer.stderr
    assert len(others) > 300


def test_every_package_has_an_oldest_version_and_is_installed_in_none_that_is_older() -> None:
    """`constraints.txt` has what `make` installs."""
    given = (PYPROJECT.parent / "constraints.txt").read_text().splitlines()
    installed = dict(line.split("==") for line in given if not line.startswith("#"))
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for line in [*pins(), *pins(*extras)]:
        name, oldest = re.fullmatch(r"([\w-]+)==([\d.]+)", line).groups()  # type: ignore[union-attr]
        assert numbers(installed[name]) >= numbers(oldest), line
    assert pins("zstd", "ray") == ["zstandard==0.22", "ray==2.40"]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
