"""Object storages by their URLs, through `fsspec`: opening one, asking it again where a connection fails, hidden keys.

s3://bucket/runs/books    needs s3fs        gs://…  gcsfs        az://…  adlfs        file:///…, memory://…  nothing
"""

import errno
import importlib
import re
import socket
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from colonnade.errors import HIDDEN, ColonnadeError, credentials_in

ATTEMPTS = 4
PAUSE = 0.5
"""[seconds] Before the second attempt, doubled for each that follows."""
_S3 = {"max_concurrency": 2}  # parts of 50 MB of a file that are in memory; of itself s3fs takes 10
WRITING: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"file": {"auto_mkdir": True}, "local": {"auto_mkdir": True}, "s3": _S3, "s3a": _S3}
)
"""Options of storages that are written to, by the kind of URL."""
_URL = re.compile(r"^([A-Za-z][\w+.\-]+:)(//?)")  # paths make one slash of two, and of three
_HERE = ("file:", "local:")  # whose URLs have three
_UNREACHED = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT}
    | {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN}
)
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})
"""What some kinds of storage raise, as smb, in an OSError of their own that is no FileNotFoundError."""
_BUSY = frozenset({429, 500, 502, 503, 504})
"""What a server over HTTP, or a gateway before it, answers that may answer otherwise in a while."""
_BROKEN_OFF = frozenset({"ClientConnectionError", "ServerDisconnectedError", "ClientPayloadError"})
"""What aiohttp, by which most kinds of storage are reached, raises of a connection that ends within an answer."""
Answer = TypeVar("Answer")


def is_remote(name: str) -> bool:
    """Whether what a user has named is a URL."""
    return "://" in name


def not_here(path: object) -> str:
    """What to do with a URL where something on this machine is asked for, a sentence with a space before; empty for
    what is none."""
    if not _URL.match(str(path)):
        return ""
    return (
        " It is a URL, and what is named has to be on this machine: copy what is there first (`aws s3 cp --recursive`, "
        "`gcloud storage cp -r`, …)."
    )


def as_given(path: object) -> str:
    """A path in words; where it was made of a URL, that URL."""

    def as_url(found: re.Match[str]) -> str:
        return found[1] + ("///" if found[2] == "/" and found[1].lower() in _HERE else "//")

    return _URL.sub(as_url, str(path))


def below(url: str, name: str) -> str:
    """The URL of a folder in a folder."""
    place, mark, more = url.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{more}"


def open_storage(url: str, refused: type[ColonnadeError], otherwise: str, *, to_write: bool = False) -> tuple[Any, str]:
    """The storage that a URL is of, and the path in it. `refused` where it is of no known kind, or where that kind's
    package is missing; the message ends with `otherwise`. `to_write`: with what each kind needs for large files.
    """
    options = WRITING.get(url.partition("://")[0], {}) if to_write else {}
    try:
        storage, path = importlib.import_module("fsspec.core").url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise refused(
            f"{url} cannot be opened: {reason(error, url)}. Install the package of its kind of storage (s3fs, gcsfs, "
            f"aiohttp, …), or {otherwise}."
        ) from None
    return storage, path


def reason(error: BaseException, url: str) -> str:
    """What a library says, without the credentials of the URL, which it may have taken apart."""
    text = str(error) or type(error).__name__
    for secret in credentials_in(url):
        for known in (secret, unquote(secret)):
            for spelling in (known, quote(known), quote(known, safe="")):
                text = text.replace(spelling, HIDDEN)
    return text


def unreached(error: BaseException) -> BaseException | None:
    """What says that a server cannot be reached now (no connection, no such host, no answer or half of one, too busy),
    of an error and those that it was raised for; None where nothing does. Over HTTP fsspec tells of it as a
    FileNotFoundError.
    """
    found: BaseException | None = error
    while found is not None:
        is_one = isinstance(found, ConnectionError | TimeoutError | socket.gaierror) or _status(found) in _BUSY
        is_one = is_one or type(found).__name__ in _BROKEN_OFF
        if is_one or (isinstance(found, OSError) and found.errno in _UNREACHED):
            return found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return None


def _status(error: BaseException) -> int | None:
    """What a server has answered over HTTP, where an error tells it: aiohttp's, Azure's, Google's, or botocore's."""
    answer = getattr(error, "response", None)
    told = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    known = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((each for each in known if type(each) is int), told)


def is_there(storage: Any, path: str) -> bool:
    """Whether a storage has a file. What keeps it from telling is raised: of most, `exists` would say that there is
    none.
    """
    try:
        storage.info(path)
    except OSError as error:
        says_so = isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno in _MISSING
        if not says_so or unreached(error) is not None:
            raise
        return False
    return True


def retry(ask: Callable[[], Answer]) -> Answer:
    """What a storage answers. It is asked again, later each time, unless it says that there is no such file; what it
    raises at the last attempt is raised.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return ask()
        except Exception as error:
            is_missing = isinstance(error, FileNotFoundError) and unreached(error) is None
            if is_missing or attempt == ATTEMPTS:
                raise
            time.sleep(PAUSE * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")
