"""What is left of a machine to this process by the control groups that it is in."""

import os
from collections.abc import Callable

import pytest

from colonnade import control_groups
from colonnade.control_groups import core_quota, memory_limits, num_cores, num_cores_to_run_on


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The files of the kernel: these and no others."""

    def tell(files: dict[str, str]) -> None:
        monkeypatch.setattr(control_groups, "lines_in", lambda path: files.get(str(path), "").splitlines())

    return tell


@pytest.mark.parametrize(("used", "free"), [(1000, 2000), (3000, 0), (3500, 0)])
def test_a_group_of_processes_may_take_what_is_left_below_its_limit(
    used: int, free: int, told: Callable[..., None]
) -> None:
    """Nothing where it has been lowered meanwhile."""
    told(
        {
            "/proc/self/cgroup": "0::/jobs/mine\n",
            "/sys/fs/cgroup/jobs/mine/memory.max": "3000\n",
            "/sys/fs/cgroup/jobs/mine/memory.current": f"{used}\n",
            "/sys/fs/cgroup/jobs/memory.max": "5000\n",
            "/sys/fs/cgroup/jobs/memory.current": "2500\n",
            "/sys/fs/cgroup/memory.max": "max\n",
            "/sys/fs/cgroup/memory.current": "4000\n",
        }
    )
    assert memory_limits() == [(free, 3000), (2500, 5000)]


@pytest.mark.parametrize(("used", "free"), [(63, 62), (64, 61), (70, 55), (20, 64)])
def test_what_files_have_in_memory_is_free(used: int, free: int, told: Callable[..., None]) -> None:
    """But for those of a file system in memory; numbers of used memory may be older than those of files."""
    told(
        {
            "/proc/self/cgroup": "0::/\n",
            "/sys/fs/cgroup/memory.max": str(64 << 30),
            "/sys/fs/cgroup/memory.current": str(used << 30),
            "/sys/fs/cgroup/memory.stat": (
                f"anon {1 << 30}\nfile {62 << 30}\nshmem {1 << 30}\n"
                f"inactive_file {60 << 30}\nactive_file {1 << 30}\nworkingset_refault_file 7\n"
            ),
        }
    )
    assert memory_limits() == [(free << 30, 64 << 30)]


VERSION_1 = "4:memory:/docker/7f\n3:cpuset:/\n1:cpu,cpuacct:/docker/7f\n0::/\n"


@pytest.mark.parametrize("place", ["", "/docker", "/docker/7f"])
def test_groups_of_version_1_have_limits_too(told: Callable[..., None], place: str) -> None:
    """A container calls its group as its host does, and shows it as the outermost one."""
    folder, inner = f"/sys/fs/cgroup/memory{place}", "/sys/fs/cgroup/memory/docker/7f"
    told(
        {
            "/proc/self/cgroup": VERSION_1,
            f"{inner}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{inner}/memory.usage_in_bytes": "4096\n",
            f"{folder}/memory.limit_in_bytes": "9000\n",
            f"{folder}/memory.usage_in_bytes": "5000\n",
            f"{folder}/memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 700\ntotal_active_file 50\n",
            "/sys/fs/cgroup/memory.max": "1\n",
        }
    )
    assert min(memory_limits()) == (4750, 9000)


def test_a_system_without_groups_has_no_limits(told: Callable[..., None]) -> None:
    told({})
    assert memory_limits() == [] and core_quota() is None


@pytest.mark.parametrize(("there", "cores"), [(7, 7), (None, 1)])
def test_cores_are_those_that_this_process_may_run_on_or_all_where_that_is_not_told(
    there: int | None, cores: int, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told({"/proc/self/cgroup": VERSION_1, "/sys/fs/cgroup/cpu.max": "max 100000\n"})
    monkeypatch.setattr(os, "cpu_count", lambda: there)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5}, raising=False)
    assert (num_cores(), num_cores_to_run_on()) == (3, 3)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert (num_cores(), num_cores_to_run_on()) == (cores, cores)


@pytest.mark.parametrize(
    ("files", "quota", "cores"),
    [
        ({"job/step/cpu.max": "max 100000", "job/cpu.max": "150000 100000"}, 1.5, 2),
        ({"job/step/cpu.max": "5000 100000", "job/cpu.max": "200000 100000"}, 0.05, 1),
        ({"job/step/cpu.max": "400000 100000"}, None, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, 3),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "25000"}, 2.0, 2),
    ],
    ids=["of a job", "less than a core", "more than its cores", "none in version 1", "version 1"],
)
def test_a_quota_of_time_is_as_many_cores_as_have_it(
    files: dict[str, str],
    quota: float | None,
    cores: int,
    told: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounded up: what is left of a core is used as well. Containers and batch systems set one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5}, raising=False)
    told(
        {
            "/proc/self/cgroup": "2:cpu,cpuacct:/docker/7f\n0::/job/step\n",
            **{f"/sys/fs/cgroup/{path}": f"{text}\n" for path, text in files.items()},
        }
    )
    assert (core_quota(), num_cores()) == (quota, cores)
    assert num_cores_to_run_on() == 3
