"""What a number was measured on: processor, memory, versions, commit.

python -m benchmarks.hardware        all that, and what the processor can do: a few seconds
"""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
WIDEST = {"amx_bf16": "amx", "avx512_bf16": "avx512-bf16", "avx512f": "avx512", "avx2": "avx2"}
"""What a processor multiplies with, the fastest first: in its flags, and in names of files."""


def describe() -> dict[str, object]:
    flags = set(_cpuinfo("flags").split())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "has": [flag for flag in FLAGS if flag in flags],
        "has_not": [flag for flag in FLAGS if flag not in flags],
        "memory_gb": round(pages / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit(),
    }


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def machine_name() -> str:
    """A short name for file names: `intel-xeon-2cores-amx`, `amd-epyc-2cores-avx2`.

    Processors of one name differ in what they multiply with, so the widest of it is part of the name.
    """
    name = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", " ", cpu_name())
    words = re.findall(r"[a-z0-9]+", name.lower())
    flags = _cpuinfo("flags").split()
    widest = [name for flag, name in WIDEST.items() if flag in flags][:1]
    return "-".join([*words, f"{describe()['cores']}cores", *widest])


def commit(tree: Path = ROOT) -> str:
    """The commit of a tree, `+ changes` where it differs from that by more than results."""
    changes = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    answers = [_git(tree, "rev-parse", "--short=12", "HEAD"), _git(tree, *changes)]
    return (answers[0] or "none") + (" + changes" if answers[1] else "")


def in_one_line() -> str:
    """The same for a page: processor, versions, commit, and how many programs were at work in the last minute."""
    found = describe()
    has = ", ".join(flag for flag in FLAGS if flag in _cpuinfo("flags").split())
    versions = f"Python {found['python']}, torch {found['torch']}, commit {found['commit']}"
    return f"{found['cpu']}, {found['cores']} cores ({has}), {versions}, load {os.getloadavg()[0]:.2f} at the start"


def command_line() -> str:
    """How this program was started: the module's name instead of its path, no folders of this machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"-m {spec.name}" if spec else sys.argv[0]
    return " ".join(["python", program, *(re.sub(r"(^|=)/\S*/", r"\1…/", word) for word in sys.argv[1:])])


def _git(tree: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git here: the commit is unknown
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), "")


def main() -> None:
    from benchmarks.limits import described, measured  # which imports torch: not everyone's who asks for the commit

    for name, value in describe().items():
        print(f"{name:<10} {', '.join(value) if isinstance(value, list) else value}")
    print(described(measured()))


if __name__ == "__main__":
    main()
