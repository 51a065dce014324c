"""Messages, and what is stored: no credentials of URLs, no control characters."""

import errno
import os
import runpy
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade import errors
from colonnade.errors import (
    ColonnadeError,
    ConfigError,
    CopiesError,
    DataError,
    DiskError,
    credentials_in,
    hidden,
    mistake,
    name_of,
    not_installed,
    of_the_disk,
    without_credentials,
)
from tests.disks import room_for

SECRET = "s3cr3t"
URLS = {
    "https://user:s3cr3t@host/corpus": "https://…@host/corpus",
    "https://s3cr3t@host/corpus": "https://…@host/corpus",
    "https://host:8080/corpus?sig=s3cr3t&v=s3cr3t": "https://host:8080/corpus?sig=…&v=…",
    "https://host/corpus?s3cr3t": "https://host/corpus?…",
    "https://host/corpus#access_token=s3cr3t": "https://host/corpus#access_token=…",
    "s3://AKIA:s3cr3t/with/slashes@bucket/corpus": "s3://…@bucket/corpus",
    "s3://user:s3cr3t@s3cr3t@bucket/corpus": "s3://…@bucket/corpus",
    "s3://AKIA:s3cr3t/with@bucket/corpus?mail=ann@home": "s3://…@bucket/corpus?mail=…",
    "simplecache::s3://u:s3cr3t@bucket/corpus": "simplecache::s3://…@bucket/corpus",
    "s3:/u:s3cr3t@b/c": "s3:/…@b/c",
    "gs+x://u:s3cr3t@b/c.bin: there is none": "gs+x://…@b/c.bin: there is none",
    "'https://u:s3cr3t@h/c' and (s3://u:s3cr3t@b/c).": "'https://…@h/c' and (s3://…@b/c).",
}
HARMLESS = [
    "https://host:8080/corpus",
    "s3://bucket/a/b",
    "/home/a@b/c",
    "a?b=c",
    "x = 1 # y",
    "s3://b/a@v1/c",
    "https://host:8080/a@v1/c",
    "C:\\x",
]


@pytest.mark.parametrize("text", URLS)
def test_credentials_are_hidden(text: str) -> None:
    assert without_credentials(text) == URLS[text]
    assert without_credentials(URLS[text]) == URLS[text]
    assert str(DataError(text)) == URLS[text]
    assert any(SECRET in part for part in credentials_in(text))


@pytest.mark.parametrize("text", HARMLESS)
def test_what_has_none_stays(text: str) -> None:
    assert without_credentials(text) == hidden(text) == text and credentials_in(text) == []


def test_values_within_values() -> None:
    value: Any = {"blend": {"s3://k:s3cr3t@b/x": 0.5}, "files": ["https://h/x?t=s3cr3t", 3, None], "t": ("a", 1)}
    assert hidden(value) == {"blend": {"s3://…@b/x": 0.5}, "files": ["https://h/x?t=…", 3, None], "t": ("a", 1)}


@given(st.text(min_size=1), st.sampled_from(["https://u:{}@host/x", "s3://{}@bucket/x", "https://h/x?sig={}"]))
def test_a_value_that_is_a_url_hides_any_secret(secret: str, form: str) -> None:
    """Whatever characters it has; in a message, spaces and quotes end a URL."""
    marked = f"ZZ{secret}ZZ"
    if not set(marked) & set("?&;#/"):
        assert "ZZ" not in hidden(form.format(marked))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DataError("a\nb"), "a\nb"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "No space left on device. Fix that, and run the command again.",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/a"), "/a: Disk quota exceeded. Fix that, and run"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), "/a/b: Permission denied. Fix that, and run"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/a"), "/a: Is a directory. Fix that, and run"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/a"), "/a: File name too long. Fix that, and run"),
        (OSError(errno.EACCES, "Permission denied", "s3://u:s3cr3t@bucket/x"), "s3://…@bucket/x: Permission denied."),
        (
            OSError(errno.EMFILE, "Too many open files", "/a"),
            f"/a: Too many open files, more than the {getrlimit(RLIMIT_NOFILE)[0]:,} that this process may have (ulim",
        ),
        (OSError(errno.EIO, "Input/output error", "/a"), None),
        (OSError("no number"), None),
        (ValueError("ours"), None),
        (KeyboardInterrupt(), None),
    ],
    ids=repr,
)
def test_what_is_the_users_to_mend(error: BaseException, told: str | None) -> None:
    """Theirs, or their disk's; whatever else is raised is ours, with its traceback."""
    found = mistake(error)
    assert (found is None) if told is None else (found is not None and found.startswith(told))


@pytest.mark.parametrize(
    "number",
    [
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
    ],
    ids=errno.errorcode.get,
)
def test_what_a_disk_refuses_is_one_message(number: int) -> None:
    said = f"/a: {os.strerror(number)}. Fix that, and run the command again."
    assert mistake(OSError(number, os.strerror(number), "/a")) == said


def test_the_limit_of_open_files_is_the_one_that_holds_and_not_the_one_that_may_be_asked_for() -> None:
    soft, hard = getrlimit(RLIMIT_NOFILE)
    lower = 4_000 if soft == RLIM_INFINITY else soft - 1
    setrlimit(RLIMIT_NOFILE, (lower, hard))
    try:
        told = mistake(OSError(errno.EMFILE, "Too many open files"))
    finally:
        setrlimit(RLIMIT_NOFILE, (soft, hard))
    assert told is not None and f"more than the {lower:,} that this process may have" in told


def test_the_limit_of_a_files_size_is_named_where_there_is_one() -> None:
    with room_for(204_800):
        told = mistake(OSError(errno.EFBIG, "File too large", "/a"))
    assert told == (
        "/a: File too large, more than the 204,800 bytes that a file of this process may have (ulimit -f). "
        "Fix that, and run the command again."
    )


def test_how_to_install_what_is_missing_is_said_alike() -> None:
    """A name that a shell would take for a pattern in quotes."""
    assert not_installed("x = 1", "fsspec") == (
        "x = 1 needs the package fsspec, which is not installed. Run `pip install fsspec`."
    )
    assert not_installed("data report", "ftfy", "colonnade[data]", "leave it").endswith(
        "Run `pip install 'colonnade[data]'`, or leave it."
    )


def test_copies_that_differ_say_what_each_rank_sees() -> None:
    seen = [{"blocks.0": "a"}, {"blocks.0": "b"}]
    assert CopiesError("they differ", seen).by_rank == tuple(seen) and CopiesError("they differ").by_rank == ()


def test_parts_of_a_url_are_hidden_one_by_one_longest_first() -> None:
    assert credentials_in("s3://user:s3cr3tly@b/x?sig=abcdef&v=1") == ["user:s3cr3tly", "s3cr3tly", "abcdef"]


def test_no_control_characters_in_messages() -> None:
    assert str(ColonnadeError("seen\rhidden")) == "seen�hidden", "a terminal would show the end alone"
    assert str(ColonnadeError(ValueError("of another kind"))) == "of another kind" and str(ColonnadeError()) == ""
    assert str(ColonnadeError("a\x1b[31m\tb\nc\x00\u202ed")) == "a�[31m\tb\nc��d"


def test_what_a_disk_may_get_over_is_an_error_of_its_own() -> None:
    full, forbidden = (OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EACCES))
    assert [type(of_the_disk("x", each)) for each in (full, forbidden)] == [DiskError, ConfigError]
    errors = [full, forbidden, DiskError("x"), ConfigError("x"), ValueError("x"), TimeoutError("x")]
    assert [*map(name_of, errors)] == [
        *("DiskError", "PermissionError", "DiskError", "ConfigError", "ValueError", "TimeoutError")
    ]


def test_a_call_that_a_file_system_lacks_is_known_by_both_numbers_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("ENOTSUP", 45), ("EOPNOTSUPP", 102)):
        monkeypatch.setattr(errno, name, number)
    assert runpy.run_path(errors.__file__)["NOT_OFFERED"] == {errno.EINVAL, errno.ENOSYS, 45, 102}
