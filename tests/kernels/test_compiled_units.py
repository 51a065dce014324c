"""The compiled kernels as processors with units for 16 bits run them, on any processor.

There brgemm, torch's innermost kernel, reads pairs of 16-bit numbers as they are. Here it is replaced by plain loops
that read the same layout, and all tests of the kernels are run on what is compiled so.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colonnade.kernels import compiled
from tests.kernels.loaded import load, shared_folder

ROOT = Path(__file__).parents[2]
LOOPS = """
#include <bit>
#include <cstdint>
#include <c10/util/Half.h>
#include <c10/util/BFloat16.h>

namespace loops {

// c [m, n] = a b, or += a b: b as rows, or of 16 bits as [k / 2, n, 2].
template <typename T>
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const T* a, const T* b,
            float* c) {
  constexpr int64_t PAIRED = sizeof(T) == 2 ? 2 : 1;
  for (int64_t i = 0; i < m; ++i) {
    float* sums = c + i * ldc;
    for (int64_t j = 0; j < n && !add; ++j) sums[j] = 0.0f;
    for (int64_t p = 0; p < k; ++p) {  // numbers of a row of b lie side by side
      const float factor = float(a[i * lda + p]);
      const T* row = b + p / PAIRED * ldb * PAIRED + p % PAIRED;
      for (int64_t j = 0; j < n; ++j) sums[j] += factor * float(row[j * PAIRED]);
    }
  }
}
}  // namespace loops
"""
RUN = """
import sys
from pathlib import Path
import pytest
from colonnade.kernels import compiled
compiled.SOURCE = Path(sys.argv[1])
sys.exit(pytest.main([*sys.argv[2:], "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "slow or not slow"]))
"""


@pytest.mark.slow
def test_they_are_right_where_16_bits_are_multiplied_as_they_are(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    load(shared_folder(tmp_path_factory))  # skips where nothing can be compiled
    text, place = compiled.SOURCE.read_text(), "at::native::cpublas::brgemm("
    assert text.count(place) == 2, "a product, and whether there are units"
    source = tmp_path / compiled.SOURCE.name
    source.write_text(LOOPS + text.replace(place, "loops::brgemm("))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN,
            str(source),
            "--basetemp",
            str(tmp_path / "tests"),
            "tests/kernels/test_compiled.py",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-400:]
