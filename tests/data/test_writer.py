"""Writing token files: whole or not at all; merging."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colonnade.atomic import remove_partial
from colonnade.data import indexed as indexed_module
from colonnade.data import writer as writer_module
from colonnade.data.indexed import HEADER, TokenFile, bin_path, idx_path
from colonnade.data.sidecar import ANSWERS, ExampleFields, Sidecar, merge_sidecars, read_sidecar
from colonnade.data.writer import TokenFileWriter, check_lengths, check_prefix, held, merge
from colonnade.errors import DataError, LockError
from tests.data.sidecars import write_sidecar
from tests.disks import room_for

Write = Callable[..., str]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_has_its_name_before_the_end(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "new", np.dtype("<u2")) as writer:
        writer.add_document([1, 2, 3])
        assert not {"new.bin", "new.idx"} & set(files(tmp_path))
    assert files(tmp_path) == ["new.bin", "new.idx"]


def test_folders_that_are_not_there_are_made(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "some" / "where" / "new", np.dtype("<u2")) as writer:
        writer.add_document([1, 2, 3])
    assert files(tmp_path / "some" / "where") == ["new.bin", "new.idx"]


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<i4", "<i8"])
def test_documents_of_any_type_are_read_back(tmp_path: Path, dtype: str) -> None:
    with TokenFileWriter(tmp_path / "file", np.dtype(dtype)) as writer:
        for document in ([1, 2, 3], [4], [5, 6]):
            writer.add_document(document)
    file = TokenFile(tmp_path / "file")
    assert [file.document(number).tolist() for number in range(3)] == [[1, 2, 3], [4], [5, 6]]
    assert file.dtype == np.dtype(dtype) and file.document_starts(0, 6).tolist() == [0, 3, 4]


def test_a_failure_leaves_nothing_and_keeps_the_old(tmp_path: Path, write_tokens: Write) -> None:
    prefix = write_tokens(5, name="old")
    with pytest.raises(KeyboardInterrupt), TokenFileWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_document([1, 2, 3])
        raise KeyboardInterrupt
    assert files(tmp_path) == ["old.bin", "old.idx"]
    assert TokenFile(prefix).document(0).tolist() == [0, 1, 2, 3, 4]


def test_a_full_disk_at_the_end_leaves_nothing_and_keeps_the_old(
    tmp_path: Path, write_tokens: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_tokens(5, name="old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"), TokenFileWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_document([1, 2, 3])
    assert files(tmp_path) == ["old.bin", "old.idx"]
    assert TokenFile(prefix).num_tokens == 5


def test_an_old_file_is_replaced_as_a_whole(tmp_path: Path, write_tokens: Write) -> None:
    prefix = write_tokens(5, name="old")
    (tmp_path / "old.json").write_text("of the old one")
    with TokenFileWriter(prefix, np.dtype("<i4")) as writer:
        writer.add_document([70_000])
    assert files(tmp_path) == ["old.bin", "old.idx"]
    assert TokenFile(prefix).document(0).tolist() == [70_000]


def test_no_index_stands_beside_tokens_that_are_not_its_own(
    tmp_path: Path, write_tokens: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two names: better no index than the old one."""
    prefix, rename = write_tokens(5, name="old"), Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt), TokenFileWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_document([1, 2, 3])
    assert files(tmp_path) == ["old.bin"]


def test_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to write"), TokenFileWriter(tmp_path / "new", np.dtype("<u2")):
        pass
    assert files(tmp_path) == []


def test_the_smallest_and_the_largest_id_of_a_dtype_are_written(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "new", np.dtype("<u2")) as writer:
        writer.add_document([0, 65_535])
    assert TokenFile(tmp_path / "new").document(0).tolist() == [0, 65_535]


@pytest.mark.parametrize("token", [-1, 65_536])
def test_ids_never_wrap_around(tmp_path: Path, token: int) -> None:
    with (
        pytest.raises(DataError, match="do not fit into uint16"),
        TokenFileWriter(tmp_path / "new", np.dtype("<u2")) as writer,
    ):
        writer.add_document([0, token])
    assert files(tmp_path) == []


def test_many_documents_at_once(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "many", np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(6, dtype=np.uint16), np.array([1, 0, 5]))
        writer.add_documents(np.arange(2, dtype=np.uint16), np.array([2]))
    file = TokenFile(tmp_path / "many")
    assert [file.document(index).tolist() for index in range(4)] == [[0], [], [1, 2, 3, 4, 5], [0, 1]]


def test_offsets_are_right_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_module, "_CHUNK", 3)
    with TokenFileWriter(tmp_path / "many", np.dtype("<u2")) as writer:
        for length in range(1, 11):
            writer.add_document([length] * length)
    file = TokenFile(tmp_path / "many")
    assert [set(file.document(index).tolist()) for index in range(10)] == [{length} for length in range(1, 11)]


def sidecar(documents: int, tokens: int, *, tokenizer: str = "a" * 64, source: str = "x.txt") -> Sidecar:
    return Sidecar(tokenizer, 60_000, 0, documents, tokens, 3 * tokens, (source,))


def test_merge(tmp_path: Path, write_tokens: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_CHUNK", 4)
    first, second = write_tokens(5, 6, name="first"), write_tokens(9, name="second")
    write_sidecar(first, sidecar(2, 11, source="1.txt"))
    write_sidecar(second, sidecar(1, 9, source="2.txt"))
    merge([first, second], tmp_path / "both")
    file = TokenFile(tmp_path / "both")
    assert [len(file.document(index)) for index in range(3)] == [5, 6, 9]
    assert file.read(0, 20).tolist() == [*range(11), *range(9)]
    assert read_sidecar(file) == Sidecar("a" * 64, 60_000, 0, 3, 20, 60, ("1.txt", "2.txt"))


def test_what_one_of_merged_files_does_not_know_is_unknown() -> None:
    one, other = sidecar(1, 5), replace(sidecar(1, 5), sentences=True)
    both = merge_sidecars([("a", other), ("b", one), ("c", other)])
    assert both is not None and both.end_of_document == 0 and both.sentences is None
    assert both.documents == 3 and merge_sidecars([("a", one), ("b", None)]) is None
    alike = merge_sidecars([("a", other), ("b", other)])
    assert alike is not None and alike.sentences is True


def test_documents_of_other_kinds_are_not_merged() -> None:
    text, unknown = replace(sidecar(1, 5), sentences=False), sidecar(1, 5)
    apart, bare = replace(text, sentences=True), replace(text, end_of_document=None)
    for others, said in (
        ([apart], "b keeps sentences apart, a has a single sequence in each document"),
        ([unknown, apart], "c keeps sentences apart, a has a single sequence"),
        ([bare], "a has the end-of-document token 0 behind each document, b does not"),
        ([replace(text, end_of_document=9)], "behind each document, . [09]: .* Tokenize both again"),
        ([None, bare], "a has the end-of-document token 0 behind each document, c does not"),
    ):
        for turn in (1, -1):
            with pytest.raises(DataError, match=said):
                merge_sidecars(list(zip("abc", (text, *others), strict=False))[::turn])


def test_merge_is_the_same_as_writing_at_once(tmp_path: Path, write_tokens: Write) -> None:
    parts = [write_tokens(5, 6, name="first"), write_tokens(9, name="second")]
    merge(parts, tmp_path / "both")
    with TokenFileWriter(tmp_path / "once", np.dtype("<u2")) as writer:
        for part in map(TokenFile, parts):
            for document in range(part.num_documents):
                writer.add_document(part.document(document))
    for path in (bin_path, idx_path):
        assert path(tmp_path / "both").read_bytes() == path(tmp_path / "once").read_bytes()


def test_merge_refuses(tmp_path: Path, write_tokens: Write) -> None:
    first, second, wide = write_tokens(5, name="a"), write_tokens(5, name="b"), write_tokens(5, name="c", dtype="<i4")
    with pytest.raises(DataError, match="only files of one dtype"):
        merge([first, wide], tmp_path / "both")
    with pytest.raises(DataError, match="among the files to merge"):
        merge([first, second], first)
    with pytest.raises(DataError, match="no token files"):
        merge([], tmp_path / "both")
    write_sidecar(first, sidecar(1, 5))
    write_sidecar(second, sidecar(1, 5, tokenizer="b" * 64))
    with pytest.raises(DataError, match="made with another tokenizer"):
        merge([first, second], tmp_path / "both")
    assert not (tmp_path / "both.bin").exists()


def test_a_part_without_a_sidecar_does_not_keep_the_others_from_being_compared() -> None:
    text, other = sidecar(1, 5), sidecar(1, 5, tokenizer="b" * 64)
    chats = replace(text, examples=ExampleFields("chat", ANSWERS, ("given", "answered")))
    for last, said in ((other, "c was made with another tokenizer"), (chats, "c holds examples of chat, a text")):
        with pytest.raises(DataError, match=said):
            merge_sidecars([("a", text), ("b", None), ("c", last)])


def test_merge_refuses_an_input_as_its_output_however_it_is_written(
    tmp_path: Path, write_tokens: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write_tokens(5, name="a"), write_tokens(6, name="b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for output in ("a", "./a", "link/b", Path("a"), tmp_path / "b"):
        with pytest.raises(DataError, match="among the files to merge"):
            merge([first, second], output)
    assert TokenFile(first).num_tokens == 5 and TokenFile(second).num_tokens == 6


def test_a_sidecar_must_fit_its_tokens(write_tokens: Write) -> None:
    prefix = write_tokens(5, 6)
    assert read_sidecar(TokenFile(prefix)) is None
    write_sidecar(prefix, sidecar(2, 12))
    with pytest.raises(DataError, match=r"2 documents and 12 tokens, but .* has 2 and 11"):
        read_sidecar(TokenFile(prefix))
    for content in (
        "",
        "[]",
        "{}",
        '{"sources": 1}',
        '{"tokenizer_sha256": "x", "sources": []}',
        "[" * 2000 + "]" * 2000,
    ):
        Path(f"{prefix}.json").write_text(content)
        with pytest.raises(DataError, match=r"does not describe a token file \(.+ \(at [a-z]+[ a-z_0-9]*\)\)\. Remove"):
            read_sidecar(TokenFile(prefix))
    write_sidecar(prefix, sidecar(3, 11))
    with pytest.raises(DataError, match=r"3 documents and 11 tokens, but .* has 2 and 11"):
        read_sidecar(TokenFile(prefix))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(("tokens", "11"), ("documents", None), ("vocab_size", None), ("end_of_document", "2"), ("sources", "a")),
        *(("examples.options", []), ("examples.labels", [1]), ("examples.scale", "1"), ("examples", "squad")),
        *(("examples.more", 1), ("more", 1)),
    ],
)
def test_what_a_sidecar_says_is_of_its_kind(write_tokens: Write, place: str, value: object) -> None:
    prefix = write_tokens(5, 6)
    examples = ExampleFields("squad", "spans", ("question", "context"), options={"doc_stride": 5})
    write_sidecar(prefix, replace(sidecar(2, 11), examples=examples))
    assert read_sidecar(TokenFile(prefix)) is not None
    path = Path(f"{prefix}.json")
    content = json.loads(path.read_text())
    section, _, name = place.rpartition(".")
    (content[section] if section else content)[name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"\.json does not describe a token file .*\(at {place}"):
        read_sidecar(TokenFile(prefix))


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    """Temporary names carry the process, so that two programs that write one prefix end with one whole file."""
    writer, other = (TokenFileWriter(tmp_path / "new", np.dtype("<u2")) for _ in range(2))
    assert len(files(tmp_path)) == 2 and all(name.startswith(f"new.bin.{os.getpid()}-") for name in files(tmp_path))
    writer.discard()
    other.discard()
    assert files(tmp_path) == []


def test_what_a_killed_writer_has_left_is_known_as_such(tmp_path: Path) -> None:
    """Where a folder is cleared of it: that of a cleaning run has token files too."""
    left = TokenFileWriter(tmp_path / "new", np.dtype("<u2"))
    remove_partial(tmp_path)
    assert files(tmp_path) == []
    left.discard()


@pytest.mark.parametrize("count", [200, 20_000])
def test_a_disk_that_is_full_leaves_nothing_and_is_named(tmp_path: Path, count: int) -> None:
    """Also where tokens that wait to be written are refused once more when the file is closed."""
    with (
        room_for(100),
        pytest.raises(OSError, match=r"File too large: '.*new\.bin'"),
        TokenFileWriter(tmp_path / "new", np.dtype("<u2")) as writer,
    ):
        writer.add_document(range(count))
    assert files(tmp_path) == []


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_prefix_that_is_a_files_name_is_refused(tmp_path: Path, write_tokens: Write, ending: str) -> None:
    with pytest.raises(DataError, match=rf"out{ending}{ending} would be made of it\. Write --output {tmp_path}/out\.$"):
        check_prefix(tmp_path / f"out{ending}")
    first = write_tokens(5, name="a")
    with pytest.raises(DataError, match="would be made of it"):
        merge([first], tmp_path / f"out{ending}")
    check_prefix(tmp_path / "out.v2")


def test_a_merged_file_knows_its_tokenizer_where_all_parts_do(tmp_path: Path, write_tokens: Write) -> None:
    first, second = write_tokens(5, 6, name="a"), write_tokens(9, name="b")
    write_sidecar(first, sidecar(2, 11))
    assert merge([first, second], tmp_path / "both") == [str(second)]
    assert read_sidecar(TokenFile(tmp_path / "both")) is None
    write_sidecar(second, sidecar(1, 9))
    assert merge([first, second], tmp_path / "both") == []
    found = read_sidecar(TokenFile(tmp_path / "both"))
    assert found is not None and (found.documents, found.tokens) == (3, 20)
    assert found.tokenizer_sha256 == sidecar(1, 9).tokenizer_sha256
    with pytest.raises(DataError, match=r"both\.bin and .*both\.idx and .*both\.json exist already\. .*--overwrite"):
        merge([first], tmp_path / "both", overwrite=False)


def test_files_of_different_formats_are_not_joined(tmp_path: Path, write_tokens: Write) -> None:
    first, second = write_tokens(5, name="a"), write_tokens(9, name="b")
    fields = ExampleFields("squad", "spans", ("question", "context"))
    write_sidecar(first, replace(sidecar(1, 5), examples=fields))
    for other, holds in ((replace(fields, format="mnli"), "examples of mnli"), (None, "text")):
        write_sidecar(second, replace(sidecar(1, 9), examples=other))
        with pytest.raises(DataError, match=rf"b holds {holds}, .*a examples of squad: their documents mean different"):
            merge([first, second], tmp_path / "both")


def test_joining_replaces_no_file_of_its_names_unless_it_is_said(tmp_path: Path, write_tokens: Write) -> None:
    first = write_tokens(5, name="a")
    for ending in (".bin", ".idx", ".json"):
        (tmp_path / f"precious{ending}").write_bytes(b"mine")
        with pytest.raises(DataError, match=rf"precious{ending} exists already\. .*--overwrite"):
            merge([first], tmp_path / "precious", overwrite=False)
        assert (tmp_path / f"precious{ending}").read_bytes() == b"mine"
        (tmp_path / f"precious{ending}").unlink()


def test_a_link_that_leads_nowhere_is_not_replaced_either(tmp_path: Path, write_tokens: Write) -> None:
    (tmp_path / "out.bin").symlink_to(tmp_path / "on a disk that is not mounted")
    with pytest.raises(DataError, match=r"out\.bin exists already"):
        merge([write_tokens(5, name="a")], tmp_path / "out", overwrite=False)
    assert (tmp_path / "out.bin").is_symlink()


@pytest.mark.parametrize("output", ["", ".", "..", "mine/", "mine/."])
def test_an_output_without_a_name_is_refused(
    output: str, tmp_path: Path, write_tokens: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_tokens(5, name="a")
    before = files(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no name stands there\. Write --output .*NAME\."):
        merge([first], output)
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["a", "a[1]", "a*", "a?"])
def test_only_its_own_leftovers_are_removed(tmp_path: Path, name: str) -> None:
    """Whatever characters a prefix has; another run may be writing beside it."""
    endings = (".bin", ".idx", ".json", ".rejected.jsonl")
    own = {f"{name}{ending}.{pid}-0123abcd.partial" for ending in endings for pid in (1, 23)}
    others = {
        f"{other}{ending}.1-0123abcd.partial" for other in ("a1", "ab", "b", f"{name}2") for ending in endings
    } - own
    others |= {f"{name}.bin", f"{name}.txt.1-0123abcd.partial", f"{name}.bin.1-0123abcd.of-mine.partial"}
    for path in own | others:
        (tmp_path / path).touch()
    with held(tmp_path / name, "colonnade data merge", overwrite=True):
        assert set(files(tmp_path)) == others | {f"{name}.lock"}
    assert set(files(tmp_path)) == others


def test_only_one_command_at_a_time_makes_the_files_of_a_prefix(tmp_path: Path, write_tokens: Write) -> None:
    """The second one is told who does, and does not find out at the end what the first has made."""
    first = write_tokens(5, name="a")
    with held(tmp_path / "out", "colonnade data tokenize", overwrite=False):
        for overwrite in (False, True):
            with pytest.raises(LockError) as caught:
                merge([first], tmp_path / "out", overwrite=overwrite)
            said, out = str(caught.value), tmp_path / "out"
            assert said.startswith(f"{out} is in use by `colonnade data tokenize --output {out}`, process ")
            assert said.endswith(" or choose another output.")
    merge([first], tmp_path / "out", overwrite=False)
    assert files(tmp_path) == ["a.bin", "a.idx", "out.bin", "out.idx"]


@pytest.mark.parametrize("what", ["replaced", "shorter", "removed", "written to", "longer at the same time"])
def test_files_that_change_while_they_are_joined_are_refused(
    tmp_path: Path, write_tokens: Write, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """No mixture of both, and nothing under the names of the output that does not fit."""
    monkeypatch.setattr(writer_module, "_CHUNK", 4)
    first, second = write_tokens(8, name="first"), write_tokens(30, name="second")
    for path in tmp_path.iterdir():
        os.utime(path, ns=(1, 1))
    other = write_tokens(4 if what == "shorter" else 30, name="other")
    add, calls = TokenFileWriter.add_documents, list[int]()

    def meanwhile(writer: TokenFileWriter, *given: Any, **more: Any) -> None:
        add(writer, *given, **more)
        calls.append(1)
        if len(calls) != 6:  # three pieces of the first one, and of the second the index and two pieces
            return
        if what == "removed":
            bin_path(second).unlink()
        elif what == "written to":
            bin_path(second).write_bytes(bytes(60))
        elif what == "longer at the same time":  # the clock of a file system may be too coarse to tell
            bin_path(second).write_bytes(bin_path(second).read_bytes() + bytes(2))
            os.utime(bin_path(second), ns=(1, 1))
        else:
            bin_path(other).replace(bin_path(second))

    with monkeypatch.context() as patch, pytest.raises(DataError, match="second was replaced or written to while it"):
        patch.setattr(TokenFileWriter, "add_documents", meanwhile)
        merge([first, second], tmp_path / "both")
    assert len(calls) >= 6 and not [name for name in files(tmp_path) if name.startswith("both")]


def test_tokens_that_do_not_fit_their_index_are_not_joined(tmp_path: Path, write_tokens: Write) -> None:
    """The end of a damaged index, which is all of it that is looked at when it is opened, may fit."""
    prefix = write_tokens(5, 6, name="damaged")
    content = bytearray(idx_path(prefix).read_bytes())
    content[HEADER.size : HEADER.size + 4] = (4).to_bytes(4, "little")
    idx_path(prefix).write_bytes(content)
    with pytest.raises(DataError, match=r"sequence 1 has 6 tokens from byte 10 on, and those before it end at byte 8"):
        merge([prefix], tmp_path / "both")
    assert files(tmp_path) == ["damaged.bin", "damaged.idx"]


def test_tokens_that_do_not_fit_their_lengths_are_not_written(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"both cannot be made: 11 tokens in 2 sequences came for an index of 10 in 2"),
        TokenFileWriter(tmp_path / "both", np.dtype("<u2")) as writer,
    ):
        writer.add_documents(np.arange(11, dtype=np.uint16), np.array([4, 6]))
    assert files(tmp_path) == []


class Endless:
    """Tokens that take no memory: only their number is looked at before they are refused."""

    dtype = np.dtype("<u2")


def test_a_document_that_is_too_long_for_the_format(tmp_path: Path) -> None:
    """Lengths are int32: 2^31 would come back as a negative number, and one token less is the longest."""
    check_lengths("x", [5, (1 << 31) - 1])
    with TokenFileWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add_document([1, 2])
        with pytest.raises(DataError, match=r"x, after 1 document: a document, .* has 2,147,483,648 tokens"):
            writer.add_documents(Endless(), np.array([5, 1 << 31]))  # type: ignore[arg-type]
    assert TokenFile(tmp_path / "x").num_tokens == 2
