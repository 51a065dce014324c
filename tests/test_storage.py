"""Object storages by their URLs: names, what each kind is opened with, and how often one is asked."""

import errno
import socket
from pathlib import Path
from typing import Any, NoReturn

import fsspec.core
import pytest
from fsspec import AbstractFileSystem

from colonnade import storage
from colonnade.errors import ConfigError
from colonnade.storage import as_given, below, is_remote, is_there, not_here, open_storage, reason, retry, unreached


def test_a_folder_of_a_url_comes_before_its_options() -> None:
    assert below("s3://bucket/runs", "books") == "s3://bucket/runs/books"
    assert below("https://host/runs/?signature=a/b", "books") == "https://host/runs/books?signature=a/b"


@pytest.mark.parametrize("url", ["s3://bucket/a", "file:///mnt/a", "FILE:///mnt/a", "local:///mnt/a", "az://a/b"])
def test_a_path_that_was_made_of_a_url_is_told_as_that_url(url: str) -> None:
    assert as_given(Path(url)) == url == as_given(url)
    assert is_remote(url) and "It is a URL" in not_here(Path(url))


@pytest.mark.parametrize("path", ["a/b", "/mnt/a", "a:/b", "1a://b", "//mnt/a"])
def test_a_path_is_no_url(path: str) -> None:
    assert as_given(path) == path and not_here(path) == ""


def test_storages_have_what_large_files_need_where_they_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **options: (opened.append(options), url))
    for url in ("s3://bucket/a", "s3a://bucket/a", "file:///a", "local:///a", "gs://bucket/a"):
        open_storage(url, ConfigError, "leave it out", to_write=True)
        open_storage(url, ConfigError, "leave it out")
    few, folders = {"max_concurrency": 2}, {"auto_mkdir": True}
    assert opened == [few, {}, few, {}, folders, {}, folders, {}, {}, {}]


@pytest.mark.parametrize("error", [ImportError("Please install s3fs"), ValueError("Protocol not known: s4")])
def test_a_kind_of_storage_that_cannot_be_opened_says_what_to_install(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(url: str) -> NoReturn:
        raise error

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(ConfigError, match=rf"cannot be opened: {error}\. Install .*s3fs.*, or leave it out\.$"):
        open_storage("s4://bucket/a", ConfigError, "leave it out")


def test_an_error_without_words_is_told_by_its_kind() -> None:
    assert reason(TimeoutError(), "s3://bucket") == "TimeoutError"


def test_a_storage_that_fails_is_asked_again_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", slept.append)
    answers: list[Exception | str] = [ConnectionError("1"), RuntimeError("2"), OSError("3"), "here it is"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert retry(ask) == "here it is" and slept == [0.5, 1.0, 2.0]
    answers += [ConnectionError(str(attempt)) for attempt in range(9)]
    with pytest.raises(ConnectionError, match=r"^3$"):
        retry(ask)
    assert slept == [0.5, 1.0, 2.0] * 2, "nobody waits behind the last attempt"


class OfAPackage(Exception):
    """A kind of its own, which is no OSError."""


class ClientConnection(OSError):
    """One that is."""


@pytest.mark.parametrize(
    "said",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        ClientConnection(errno.ECONNREFUSED, "Connect call failed"),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        TimeoutError("no answer"),
    ],
    ids=["refused", "refused, of a package's kind", "no such host", "no answer"],
)
def test_a_server_that_is_not_reached_is_asked_again_though_what_comes_of_it_says_that_nothing_is_there(
    monkeypatch: pytest.MonkeyPatch, said: OSError
) -> None:
    """As fsspec does over HTTP, by its cause; and where a package raises its own while it handles that."""
    slept: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", slept.append)

    def ask() -> NoReturn:
        raise FileNotFoundError("http://host/a") from said

    with pytest.raises(FileNotFoundError) as told:
        retry(ask)
    assert slept == [0.5, 1.0, 2.0] and unreached(told.value) is said
    try:
        try:
            raise said
        except OSError:
            raise OfAPackage  # noqa: B904
    except OfAPackage as error:
        assert unreached(error) is said
    assert unreached(said) is said


def answered(**told: Any) -> Exception:
    """What a package raises of an answer over HTTP."""
    error = OfAPackage()
    vars(error).update(told)
    return error


def by_boto(status: int) -> Exception:
    return answered(response={"ResponseMetadata": {"HTTPStatusCode": status}})


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_server_that_is_too_busy_to_answer_is_not_reached(status: int) -> None:
    """As packages tell of it."""
    by_name = (answered(status=status), answered(status_code=status), answered(code=status))
    for error in (*by_name, answered(status="UNAVAILABLE", code=status), by_boto(status)):
        assert unreached(error) is error


@pytest.mark.parametrize(
    "error",
    [
        *(FileNotFoundError("a"), OSError(errno.EIO, "I/O"), OfAPackage(), ValueError()),
        *(answered(status=403), answered(code="503"), answered(response="503"), answered(response={}), by_boto(404)),
    ],
)
def test_what_a_server_answers_is_no_server_that_is_not_reached(error: Exception) -> None:
    assert unreached(error) is None


@pytest.mark.parametrize("kind", ["ClientConnectionError", "ServerDisconnectedError", "ClientPayloadError"])
def test_an_answer_that_breaks_off_is_told_of_the_connection(kind: str) -> None:
    """By the names that aiohttp has for it. What a package has dealt with is no reason of what it raises then."""
    broken = type(kind, (Exception,), {})()
    numbers = (errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
    for error in (broken, answered(status=503), *(ClientConnection(number, "a") for number in numbers)):
        missing = FileNotFoundError("http://host/a")
        missing.__cause__ = error
        assert unreached(missing) is error
        missing = FileNotFoundError("http://host/a")
        missing.__context__, missing.__suppress_context__ = error, True
        assert unreached(missing) is None


@pytest.mark.parametrize(
    "error",
    [
        *(OfAPackage(), PermissionError("Forbidden"), TimeoutError()),
        *(ClientConnection(number, "a") for number in (errno.EIO, errno.EACCES)),
    ],
)
def test_a_storage_that_cannot_tell_whether_a_file_is_there_does_not_say_that_none_is(error: Exception) -> None:
    """Most say so if they are asked whether it exists."""
    missing = [FileNotFoundError("a"), NotADirectoryError("a")]
    missing += [ClientConnection(number, "a") for number in (errno.ENOENT, errno.ENOTDIR)]
    told: list[Exception | dict[str, Any]] = [{"name": "a"}, *missing, error]

    class Told(AbstractFileSystem):  # type: ignore[misc]
        def info(self, path: str, **more: Any) -> dict[str, Any]:
            answer = told.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    assert [is_there(Told(), "a") for _ in range(5)] == [True, *[False] * 4]
    with pytest.raises(type(error)):
        is_there(Told(), "a")
    told.append(error)
    assert Told().exists("a") is False


def test_what_is_not_there_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: pytest.fail("it waited"))

    def ask() -> NoReturn:
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError, match="gone"):
        retry(ask)
