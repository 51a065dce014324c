"""What is imported to draw on terminals leaves the importing program as it was."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["corpus.run", "data.tokenize", "report.watch"])
def test_an_import_draws_nothing_from_the_programs_generator(module: str) -> None:
    code = f"import random; random.seed(1); import colonnade.{module}, rich.style; print(random.random())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert said == "0.13436424411240122\n"
