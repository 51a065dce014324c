"""Token files by URL: the same tokens, fetched once, and what is said when the storage fails."""

from __future__ import annotations

import errno
import http.server
import json
import mmap
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest

from colonnade import storage as storage_module
from colonnade.data import remote
from colonnade.data.datasets import open_datasets
from colonnade.data.gpt_dataset import TextSamples
from colonnade.data.indexed import TokenFile
from colonnade.data.remote import RemoteTokenFile, open_token_file
from colonnade.data.sidecar import Sidecar, read_sidecar, sidecar_path
from colonnade.errors import ConfigError, DataError, DiskError
from tests.data.sidecars import write_sidecar

Write = Callable[..., str]


@pytest.fixture
def storage() -> Iterator[Any]:
    """A storage in memory, emptied afterwards."""
    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def uploaded(write_tokens: Write, storage: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, TokenFile]:
    """A token file in the storage, cut in blocks of 64 bytes, and the same one on the disk."""
    monkeypatch.setattr(remote, "BLOCK", 64)
    monkeypatch.setattr(storage_module, "PAUSE", 0.0)
    prefix = write_tokens(70, 3, 128, 10)
    write_sidecar(prefix, Sidecar("0" * 64, 60_000, None, 4, 211, 900, ("a",)))
    for ending in (".bin", ".idx", ".json"):
        storage.put_file(prefix + ending, f"/bucket/corpus{ending}")
    return "memory://bucket/corpus", TokenFile(prefix)


def counted(monkeypatch: pytest.MonkeyPatch, storage: Any) -> list[str]:
    """The requests that the storage gets from now on: of which file, and from where on."""
    requests: list[str] = []
    original = type(storage).cat_file

    def cat_file(self: Any, path: str, **settings: Any) -> bytes:
        requests.append(f"{path} {settings.get('start')}")
        found: bytes = original(self, path, **settings)
        return found

    monkeypatch.setattr(type(storage), "cat_file", cat_file)
    return requests


def test_every_range_is_the_same(uploaded: tuple[str, TokenFile], tmp_path: Path) -> None:
    url, local = uploaded
    file = open_token_file(url, str(tmp_path / "cache"))
    assert isinstance(file, RemoteTokenFile)
    assert (file.num_tokens, file.num_documents, file.dtype, file.prefix) == (211, 4, local.dtype, url)
    for start in range(0, 211, 7):
        for count in (0, 1, 31, 32, 33, 211 - start):
            if start + count <= 211:
                assert file.read(start, count).tolist() == local.read(start, count).tolist()
    assert file.document(2).tolist() == local.document(2).tolist()
    assert read_sidecar(file) == read_sidecar(local)
    assert pickle.loads(pickle.dumps(file)).read(3, 4).tolist() == [3, 4, 5, 6]
    assert len(list((tmp_path / "cache").rglob("url"))) == 1, "another process reads the same copies"


def test_what_is_here_is_not_fetched_again(
    uploaded: tuple[str, TokenFile], storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = uploaded
    requests = counted(monkeypatch, storage)
    file = open_token_file(url, str(tmp_path))
    assert [request.split()[0] for request in requests] == ["/bucket/corpus.idx", "/bucket/corpus.json"]
    file.read(40, 10)
    assert requests[2:] == ["/bucket/corpus.bin 64"]
    file.read(33, 31)
    again = open_token_file(url, str(tmp_path))
    again.read(35, 2)
    assert len(requests) == 3
    assert not list(tmp_path.rglob("*.partial"))


def test_a_file_that_was_replaced_is_fetched_anew(
    uploaded: tuple[str, TokenFile], write_tokens: Write, storage: Any, tmp_path: Path
) -> None:
    url, _ = uploaded
    open_token_file(url, str(tmp_path)).read(0, 10)
    other = write_tokens(50, name="other")
    for ending in (".bin", ".idx"):
        storage.put_file(other + ending, f"/bucket/corpus{ending}")
    storage.rm("/bucket/corpus.json")
    assert open_token_file(url, str(tmp_path)).num_tokens == 50


@pytest.mark.parametrize("on_web", [False, True])
def test_what_was_replaced_beside_the_same_tokens_is_fetched_anew(
    uploaded: tuple[str, TokenFile],
    write_tokens: Write,
    storage: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_web: bool,
) -> None:
    """An index of other documents, another sidecar, and none."""
    if on_web:
        on_the_web(monkeypatch, storage, {}, ())
    url, _ = uploaded
    cache = str(tmp_path / "cache")
    found = [read_sidecar(open_token_file(url, cache))]
    other = write_tokens(3, 70, 128, 10, name="other")
    storage.put_file(f"{other}.idx", "/bucket/corpus.idx")
    assert open_token_file(url, cache).lengths.tolist() == [3, 70, 128, 10]
    write_sidecar(other, Sidecar("1" * 64, 60_000, None, 4, 211, 900, ("b",)))
    storage.put_file(f"{other}.json", "/bucket/corpus.json")
    found.append(read_sidecar(open_token_file(url, cache)))
    storage.rm("/bucket/corpus.json")
    found.append(read_sidecar(open_token_file(url, cache)))
    assert [each and each.tokenizer_sha256 for each in found] == ["0" * 64, "1" * 64, None]


def test_a_block_that_is_cut_short_is_fetched_again(uploaded: tuple[str, TokenFile], tmp_path: Path) -> None:
    url, local = uploaded
    open_token_file(url, str(tmp_path)).read(0, 211)
    for block in tmp_path.rglob("blocks/*"):
        block.write_bytes(block.read_bytes()[:10])
    assert open_token_file(url, str(tmp_path)).read(0, 211).tolist() == local.read(0, 211).tolist()


@pytest.mark.parametrize(("given", "size"), [("less", 62), ("more", 66), ("all", 2 * 211)])
def test_a_block_of_another_size_is_refused(
    given: str,
    size: int,
    uploaded: tuple[str, TokenFile],
    storage: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the file was replaced by a shorter one since it was opened, or the server knows no parts of files."""
    url, _ = uploaded
    file, original = open_token_file(url, str(tmp_path)), type(storage).cat_file

    def other(own: Any, path: str, start: int, end: int) -> bytes:
        if given == "all":
            return original(own, path)  # type: ignore[no-any-return]
        return original(own, path, start=start, end=end + (2 if given == "more" else -2))  # type: ignore[no-any-return]

    monkeypatch.setattr(type(storage), "cat_file", other)
    with pytest.raises(
        DataError, match=rf"corpus\.bin gave {size} bytes where 64 from 64 on were asked for: it was replaced"
    ):
        file.read(40, 3)
    assert not list(tmp_path.rglob("blocks/*"))


def test_copies_are_of_one_url_and_one_size_whatever_a_storage_says_of_versions(
    uploaded: tuple[str, TokenFile], write_tokens: Write, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers may give the same name to versions of different files."""
    url, local = uploaded
    monkeypatch.setattr(remote, "_version", lambda *_: "1")
    assert open_token_file(url, str(tmp_path)).read(0, 3).tolist() == [0, 1, 2]
    other = write_tokens(70, 3, 128, 10, name="other", vocab_size=2)
    for ending in (".bin", ".idx"):
        storage.put_file(other + ending, f"/bucket/other{ending}")
    assert open_token_file("memory://bucket/other", str(tmp_path)).read(0, 3).tolist() == [0, 1, 0]
    longer = write_tokens(70, 3, 128, 10, 5, name="longer")
    for ending in (".bin", ".idx"):
        storage.put_file(longer + ending, f"/bucket/corpus{ending}")
    storage.rm("/bucket/corpus.json")
    assert open_token_file(url, str(tmp_path)).num_tokens == local.num_tokens + 5


def test_no_credentials_of_a_url_are_kept_beside_the_copies(
    uploaded: tuple[str, TokenFile], storage: Any, tmp_path: Path
) -> None:
    _, local = uploaded
    for ending in (".bin", ".idx"):
        storage.put_file(local.prefix + ending, f"/me:pass123@bucket/corpus{ending}")
    open_token_file("memory://me:pass123@bucket/corpus", str(tmp_path / "cache"))
    (named,) = (tmp_path / "cache").glob("*/url")
    assert named.read_text().endswith("@bucket/corpus") and "pass123" not in named.read_text()


def test_a_run_reads_by_url(uploaded: tuple[str, TokenFile], tmp_path: Path) -> None:
    url, local = uploaded
    settings: dict[str, Any] = {"split": (1, 0, 0), "seq_length": 8, "vocab_size": 60_000, "seed": 1}
    by_url = open_datasets(samples=TextSamples(), train=url, cache=str(tmp_path), **settings).train
    by_path = open_datasets(samples=TextSamples(), train=local.prefix, **settings).train
    assert np.array_equal(by_url.rows(range(20)).tokens, by_path.rows(range(20)).tokens)


class StorageFault(Exception):
    """What a storage's package raises, which need be no OSError."""


def test_connections_that_fail(
    uploaded: tuple[str, TokenFile], storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked four times in all, ever later, whatever kind of error its package raises."""
    url, _ = uploaded
    file = open_token_file(url, str(tmp_path))
    original, faults, waits = type(storage).cat_file, list[Exception](), list[float]()

    def flaky(self: Any, path: str, **settings: Any) -> bytes:
        if faults:
            raise faults.pop()
        found: bytes = original(self, path, **settings)
        return found

    monkeypatch.setattr(type(storage), "cat_file", flaky)
    monkeypatch.setattr(storage_module, "PAUSE", 0.5)
    monkeypatch.setattr(storage_module.time, "sleep", waits.append)
    faults += [StorageFault("slow down"), ConnectionResetError("reset by peer"), StorageFault("slow down")]
    assert file.read(0, 3).tolist() == [0, 1, 2]
    assert waits == [0.5, 1.0, 2.0]
    faults[:] = [StorageFault()] * 5
    with pytest.raises(DataError, match="cannot be read after 4 attempts: StorageFault"):
        file.read(100, 3)
    assert len(faults) == 1


def test_a_server_that_is_not_reached_is_no_wrong_data(
    uploaded: tuple[str, TokenFile], storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has made steps waits for it as for a disk. It may be said as if there were no such file."""
    url, _ = uploaded
    file = open_token_file(url, str(tmp_path))
    for error in (ConnectionResetError("reset by peer"), FileNotFoundError(url)):

        def away(*_: Any, error: Exception = error, **__: Any) -> bytes:
            raise error from TimeoutError("no answer")

        monkeypatch.setattr(type(storage), "cat_file", away)
        with pytest.raises(DiskError, match=r"corpus cannot be reached after 4 attempts: (reset by peer|no answer)\."):
            file.read(100, 3)


def test_nor_is_one_over_http_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at a port that was free a moment ago."""
    pytest.importorskip("aiohttp", reason="fsspec needs it for http")
    monkeypatch.setattr(storage_module, "PAUSE", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DiskError, match=rf"^http://127\.0\.0\.1:{port}/corpus cannot be reached after 4 attempts: "):
        open_token_file(f"http://127.0.0.1:{port}/corpus", str(tmp_path))


class WebServer(http.server.BaseHTTPRequestHandler):
    """Files by their paths, ranges of them too. Before each of `faults` is over an answer is one of these: a status,
    nothing (0), or half of what was asked for (-1).
    """

    files: ClassVar[dict[str, bytes]] = {}
    faults: ClassVar[dict[str, list[int]]] = {}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        waiting = self.faults.get(self.path, [])
        fault, content = waiting.pop() if waiting else 200, self.files.get(self.path)
        if fault == 0:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if content is None or fault > 200:
            self.send_error(404 if content is None else fault)
            return
        asked = self.headers.get("Range", f"bytes=0-{len(content)}").removeprefix("bytes=").split("-")
        part = content[int(asked[0]) : int(asked[1]) + 1]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", "one")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part[: len(part) // 2] if fault == -1 else part)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def web(uploaded: tuple[str, TokenFile], storage: Any) -> Iterator[str]:
    """The URL of the same token file on a web server."""
    pytest.importorskip("aiohttp", reason="fsspec needs it for http")
    WebServer.faults.clear()
    for ending in (".bin", ".idx", ".json"):
        WebServer.files[f"/corpus{ending}"] = storage.cat_file(f"/bucket/corpus{ending}")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WebServer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/corpus"
        server.shutdown()
        thread.join()


FAULTS = pytest.mark.parametrize("fault", [503, 0, -1])


@FAULTS
@pytest.mark.parametrize("ending", [".bin", ".idx", ".json"])
def test_a_web_server_that_fails_for_a_while_is_asked_again(
    web: str, uploaded: tuple[str, TokenFile], tmp_path: Path, fault: int, ending: str
) -> None:
    """Whichever of the files it is asked for: without the sidecar tokens would have another meaning."""
    WebServer.faults[f"/corpus{ending}"] = [fault] * 3
    file = open_token_file(web, str(tmp_path))
    assert file.read(0, 211).tolist() == uploaded[1].read(0, 211).tolist()
    assert read_sidecar(file) == read_sidecar(uploaded[1])
    assert not WebServer.faults[f"/corpus{ending}"]


@FAULTS
@pytest.mark.parametrize("ending", [".bin", ".idx", ".json"])
def test_one_that_goes_on_to_fail_is_no_wrong_data(web: str, tmp_path: Path, fault: int, ending: str) -> None:
    WebServer.faults[f"/corpus{ending}"] = [fault] * 99
    with pytest.raises(DiskError, match=r"/corpus cannot be reached after 4 attempts: "):
        open_token_file(web, str(tmp_path)).read(0, 211)


def test_a_file_without_a_sidecar_on_a_web_server_has_none(web: str, tmp_path: Path) -> None:
    del WebServer.files["/corpus.json"]
    assert read_sidecar(open_token_file(web, str(tmp_path))) is None


def test_mistakes(uploaded: tuple[str, TokenFile], storage: Any, tmp_path: Path) -> None:
    url, _ = uploaded
    with pytest.raises(DataError, match=r"is a URL, but data.cache is not set"):
        open_token_file(url)
    with pytest.raises(DataError, match=r"Check the URL, which has no \.bin"):
        open_token_file(url + "-not", str(tmp_path))
    with pytest.raises(DataError, match=r"cannot be opened.*Install"):
        open_token_file("nosuchkind://bucket/corpus", str(tmp_path))
    storage.pipe_file("/bucket/corpus.bin", b"short")
    with pytest.raises(DataError, match="is cut short: 5 bytes"):
        open_token_file(url, str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*data.cache elsewhere") as refused:
        open_token_file(url, str(tmp_path / "file"))
    assert not isinstance(refused.value, DiskError), "another place is to be named, whatever the disk does"
    assert json.loads(sidecar_path(uploaded[1].prefix).read_text())["documents"] == 4


def test_a_cache_on_a_file_system_that_maps_no_files_is_told_as_such(
    uploaded: tuple[str, TokenFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*words: Any, **more: Any) -> Any:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(mmap, "mmap", no_file)
    with pytest.raises(
        DataError, match=r"tokens\.idx lies on .* as they are read here\. Set data\.cache to a folder on "
    ):
        open_token_file(uploaded[0], str(tmp_path))


def on_the_web(monkeypatch: pytest.MonkeyPatch, storage: Any, said: dict[str, str], of: tuple[str, ...]) -> None:
    """The storage answers as a server over HTTP, which says this of the files with these endings."""
    web = type(storage)
    monkeypatch.setattr(web, "protocol", ("http", "https"))
    monkeypatch.setattr(web, "ukey", lambda self, path: path)

    def info(self: Any, path: str, **_: Any) -> dict[str, Any]:
        if path not in self.store:
            raise FileNotFoundError(path)
        return {"size": len(self.store[path].getvalue()), **(said if path.endswith(of) else {})}

    monkeypatch.setattr(web, "info", info)


def tagged_on_the_web(monkeypatch: pytest.MonkeyPatch, storage: Any, tags: dict[str, str]) -> None:
    """The same; `tags`: the version of each file, by the last four characters of its name."""
    on_the_web(monkeypatch, storage, {}, ())
    unnamed = type(storage).info
    monkeypatch.setattr(
        type(storage), "info", lambda self, path, **_: {**unnamed(self, path), "ETag": tags.get(path[-4:])}
    )


@pytest.mark.parametrize(
    ("header", "of"),
    [
        ("ETag", (".bin", ".idx", ".json")),
        ("Last-Modified", (".bin", ".idx", ".json")),
        (None, ()),
        ("ETag", (".idx", ".json")),
    ],
    ids=["ETag", "Last-Modified", "nothing", "of all but the tokens"],
)
def test_a_file_that_was_replaced_on_a_web_server(
    uploaded: tuple[str, TokenFile],
    write_tokens: Write,
    storage: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    header: str | None,
    of: tuple[str, ...],
) -> None:
    """Over HTTP a storage's own key is the URL alone; of the same size, tokens came out of the old copy."""
    said = {header: "first"} if header else {}
    on_the_web(monkeypatch, storage, said, of)
    url, local = uploaded
    before = open_token_file(url, str(tmp_path / "cache"))
    assert before.read(0, local.num_tokens).tolist() == local.read(0, local.num_tokens).tolist()
    requests = counted(monkeypatch, storage)
    open_token_file(url, str(tmp_path / "cache")).read(0, local.num_tokens)
    assert len(requests) == (0 if len(of) == 3 else 4), "an unchanged file is read from its copy"
    tokens = bytearray(storage.cat_file("/bucket/corpus.bin"))
    tokens[-1] ^= 1
    storage.pipe_file("/bucket/corpus.bin", bytes(tokens))
    said |= {header: "second"} if ".bin" in of else {}
    after = open_token_file(url, str(tmp_path / "cache"))
    assert after.read(0, local.num_tokens).tobytes() == bytes(tokens)


def test_an_index_that_was_replaced_alone_on_a_web_server(
    uploaded: tuple[str, TokenFile], write_tokens: Write, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, in other documents."""
    (url, local), tags = uploaded, {".bin": "tokens", ".idx": "first", "json": "sidecar"}
    tagged_on_the_web(monkeypatch, storage, tags)
    assert open_token_file(url, str(tmp_path)).lengths.tolist() == local.lengths.tolist() == [70, 3, 128, 10]
    storage.put_file(write_tokens(3, 70, 128, 10) + ".idx", "/bucket/corpus.idx")
    tags[".idx"] = "second"
    assert open_token_file(url, str(tmp_path)).lengths.tolist() == [3, 70, 128, 10]


def test_a_sidecar_that_was_replaced_alone_on_a_web_server(
    uploaded: tuple[str, TokenFile], storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (url, local), tags = uploaded, {".bin": "tokens", ".idx": "index", "json": "first"}
    tagged_on_the_web(monkeypatch, storage, tags)
    cache = str(tmp_path / "cache")
    found = [read_sidecar(open_token_file(url, cache))]
    write_sidecar(local.prefix, Sidecar("1" * 64, 60_000, None, 4, 211, 900, ("b",)))
    storage.put_file(f"{local.prefix}.json", "/bucket/corpus.json")
    tags["json"] = "second"
    found.append(read_sidecar(open_token_file(url, cache)))
    assert [each and each.tokenizer_sha256 for each in found] == ["0" * 64, "1" * 64]


def test_a_version_on_a_web_server_that_says_none_is_told_by_both_ends_of_the_tokens_alone(
    uploaded: tuple[str, TokenFile], storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their size, the whole of them is not fetched for it."""
    (url, local), sizes = uploaded, list[int]()
    on_the_web(monkeypatch, storage, {}, ())
    monkeypatch.setattr(remote, "_PROBE", 16)
    original = type(storage).cat_file

    def cat_file(self: Any, path: str, **settings: Any) -> bytes:
        found: bytes = original(self, path, **settings)
        if path.endswith(".bin"):
            sizes.append(len(found))
        return found

    tokens = bytearray(storage.cat_file("/bucket/corpus.bin"))
    monkeypatch.setattr(type(storage), "cat_file", cat_file)
    for at in (None, 0, 15, -16, -1):
        if at is not None:
            tokens[at] ^= 1
            storage.pipe_file("/bucket/corpus.bin", bytes(tokens))
        sizes.clear()
        file = open_token_file(url, str(tmp_path))
        assert sizes == [16, 16]
        assert file.read(0, local.num_tokens).tobytes() == bytes(tokens)
