"""A checkpoint from a stranger is harmless: whatever it says, it is read rightly or refused in one message."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from colonnade.checkpoint import confined
from colonnade.checkpoint.load import load
from colonnade.checkpoint.manifest import newest, read_manifest, verify
from colonnade.checkpoint.names import MANIFEST
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import save
from colonnade.checkpoint.schema import clip, first_fault
from colonnade.errors import CheckpointError
from tests.checkpoint import forging
from tests.checkpoint.grids import MODEL, model_shards, number

DATA = "__0_0.distcp"
Json = dict[str, Any]


def shards() -> list[Shard]:
    return model_shards({name: number(shape) for name, shape in MODEL.items()}, 0, 1)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("good"), 20, shards(), {"model": {"num_layers": 2}})


@pytest.fixture
def path(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / good.name)
    return tmp_path / good.name


def refused(path: Path) -> str:
    """The one message of all that read a checkpoint."""
    said = []
    for check_hashes in (True, False, None):
        with pytest.raises(CheckpointError) as caught:
            verify(path) if check_hashes is None else load(path, shards(), check_hashes=check_hashes)
        said.append(str(caught.value))
    assert len(set(said)) == 1, said
    assert len(said[0]) < 1500 and said[0].replace("\n", "").isprintable()
    return said[0]


def test_a_strangers_words_are_printable_on_one_line_and_short() -> None:
    assert clip("a\nb\t\r\x1b[2Jc é", 80) == "a\ufffdb\ufffd\ufffd\ufffd[2Jc é"
    assert clip("123456", 6) == "123456" and clip("1234567", 6) == "123456…"


def moved(path: Path, to: Path, name: str) -> None:
    """The tensors' file lies elsewhere, and the manifest leads there, hash and size and all."""
    shutil.move(path / DATA, to)

    def lead(content: Json) -> None:
        content["files"][name] = content["files"].pop(DATA)
        for tensor in content["tensors"].values():
            for piece in tensor["pieces"]:
                piece[2] = name

    forging.forge(path, lead)


@pytest.mark.parametrize("name", ["../secret", "sub/../../secret", "/absolute", "..", ".", "", "a/b", "a\0b", "a\nb"])
def test_names_lead_nowhere_else(path: Path, tmp_path: Path, name: str) -> None:
    name = f"{tmp_path}/secret" if name == "/absolute" else name
    moved(path, tmp_path / "secret", name)
    assert "says what no checkpoint of Colonnade can" in refused(path)


def fifo(at: Path, target: Path) -> None:
    os.mkfifo(at)


def listening(at: Path, target: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(at.parent)  # a socket's path may have 107 characters
        try:
            listener.bind(at.name)
        finally:
            os.chdir(before)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "a symbolic link": lambda at, target: at.symlink_to(target),
    "a FIFO": fifo,
    "a socket": listening,
    "a folder": lambda at, target: at.mkdir(),
}


@pytest.mark.parametrize("name", [DATA, MANIFEST])
@pytest.mark.parametrize("kind", KINDS)
def test_only_plain_files_are_read_and_nothing_blocks(path: Path, tmp_path: Path, kind: str, name: str) -> None:
    shutil.move(path / name, tmp_path / "elsewhere")
    KINDS[kind](path / name, tmp_path / "elsewhere")
    assert f"{path / name} is {kind}, and a checkpoint is read from plain files" in refused(path)
    with pytest.raises(CheckpointError, match=f"is {kind}"):
        newest(path.parent)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make devices")
def test_devices_are_not_opened(path: Path) -> None:
    (path / DATA).unlink()
    try:
        os.mknod(path / DATA, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero never ends
    except PermissionError:
        pytest.skip("no devices may be made here")
    assert "is a device" in refused(path)


def test_a_tensor_file_that_is_not_listed(path: Path) -> None:
    forging.forge(path, lambda content: content["files"].pop(DATA))
    assert f"lies in {DATA}, which is not among the files" in refused(path)


def tensor(content: Json) -> Json:
    found: Json = content["tensors"]["embedding.weight"]
    return found


def put(value: object, *keys: Any) -> Callable[[Json], None]:
    def change(content: Json) -> None:
        at: Any = content
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    return change


def pieces(content: Json) -> list[Any]:
    """Of all tensors, in the order of the file."""
    return sorted((piece for each in content["tensors"].values() for piece in each["pieces"]), key=lambda each: each[3])


T = ("tensors", "embedding.weight")
P = (*T, "pieces", 0)
FORGED: dict[str, tuple[Callable[[Json], object], str]] = {
    "no tensors": (lambda c: c.pop("tensors"), "Field required (at tensors)"),
    "no pieces": (lambda c: tensor(c).pop("pieces"), "Field required (at tensors.embedding.weight.pieces)"),
    "step is text": (put("20", "step"), "valid integer (at step)"),
    "step is true": (put(True, "step"), "valid integer (at step)"),
    "step is negative": (put(-1, "step"), "greater than or equal to 0 (at step)"),
    "step is huge": (put(10**4000, "step"), "(at step)"),
    "metadata is a list": (put([], "facts"), "valid dictionary (at facts)"),
    "model is a list": (put([1], "facts", "model"), 'model" in it is no table (at facts)'),
    "files are null": (put(None, "files"), "(at files)"),
    "a size is a number": (put(0.5, "files", DATA, "size"), "valid integer (at files"),
    "a hash is short": (put("0", "files", DATA, "sha256"), "(at files"),
    "a tensor's name": (lambda c: c["tensors"].update({"a\x1b[31m": tensor(c)}), "should match pattern"),
    "tensors are a list": (put([], "tensors"), "(at tensors)"),
    "unknown dtype": (put("float8_e4m3fn", *T, "dtype"), "(at tensors.embedding.weight.dtype)"),
    "a dtype that is none": (put("load", *T, "dtype"), "(at tensors.embedding.weight.dtype)"),
    "a shard of three": (lambda c: tensor(c)["pieces"][0].pop(), "(at tensors.embedding.weight.pieces.0"),
    "a piece that is text": (put("[[0, 0]]", *P), "(at tensors.embedding.weight.pieces.0"),
    "negative offsets": (put([-1, 0], *P, 0), "greater than or equal to 0"),
    "other dims": (put([0], *P, 0), "has other dims than its shape"),
    "beyond the tensor": (put([1, 0], *P, 0), "reaches beyond [51, 8]"),
    "a huge tensor": (put([10**12, 8], *T, "shape"), "do not cover it"),
    "a huge piece": (
        lambda c: (put([10**12, 8], *T, "shape")(c), put([10**12, 8], *P, 1)(c)),
        "and its numbers alone 32000000000000",
    ),
    "a long piece": (put(10**9, *P, 4), "has 1000000000 bytes, and its numbers alone 1632"),
    "a gap": (put([50, 8], *P, 1), "do not cover it, each element once"),
    "twice": (lambda c: tensor(c)["pieces"].append(tensor(c)["pieces"][0]), "do not cover it, each element once"),
    "no piece at all": (put([], *T, "pieces"), "do not cover it, each element once"),
    "behind the end": (put(10**9, *P, 3), "which has"),
    "a byte behind the end": (
        lambda c: put(c["files"][DATA]["size"] - tensor(c)["pieces"][0][4] + 1, *P, 3)(c),
        "embedding.weight ends at byte",
    ),
    "far behind the end": (put(2**62, *P, 3), "which has"),
    "too many dims": (put([1] * 17, *T, "shape"), "(at tensors.embedding.weight.shape)"),
    "the same bytes": (lambda c: c["tensors"].update(copy=tensor(c)), "two tensors share bytes of __0_0.distcp"),
    "one byte of another's": (
        lambda c: pieces(c)[-1].__setitem__(3, pieces(c)[-1][3] - 1),
        "two tensors share bytes of __0_0.distcp",
    ),
    "deep metadata": (
        lambda c: c["facts"].update(x=json.loads("[" * 400 + "]" * 400)),
        "(at facts.x.",
    ),
    "version is true": (put(True, "version"), "is in checkpoint format True"),
    "version is a book": (put("x" * 10**6, "version"), "is in checkpoint format 'xxx"),
    "another step": (put(21, "step"), "Rename it to step_00000021"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_manifests(path: Path, name: str) -> None:
    change, said = FORGED[name]
    forging.forge(path, change)
    assert said in refused(path)


def test_where_a_fault_is_is_printable_too() -> None:
    class Part(BaseModel):
        sizes: dict[str, int]

    with pytest.raises(ValidationError) as caught:
        Part.model_validate({"sizes": {"a\x1b[31m" + "b" * 100: "many"}})
    told = first_fault(caught.value)
    assert "(at sizes.a\ufffd[31mb" in told and told.isprintable() and len(told) < 250


@pytest.mark.parametrize("name", ["kept", "step_20", "step_00000021.old"])
def test_a_checkpoint_may_have_a_name_that_is_no_steps(path: Path, name: str) -> None:
    """Who keeps one beside a run gives it a name of its own."""
    path = path.rename(path.parent / name)
    verify(path)
    assert load(path, shards()).step == 20


def test_numbers_that_lie_behind_their_piece(path: Path) -> None:
    """An archive says itself where its numbers begin: in the length of an entry's name."""
    content = bytearray((path / DATA).read_bytes())
    header = content.rindex(b"PK\x03\x04", 0, content.index(b"/data/0"))
    content[header + 26 : header + 28] = b"\xff\xff"
    (path / DATA).write_bytes(content)
    forging.list_again(path, DATA)
    with pytest.raises(CheckpointError, match="cannot be read from it \\(its numbers end behind it\\)"):
        load(path, shards())


def test_every_shard_of_a_tensor_is_looked_at(tmp_path: Path) -> None:
    """Not the first alone."""
    x = number((6, 4))
    two = [Shard("x", (6, 4), (row, 0), x[row : row + 3]) for row in (0, 3)]
    path = save(tmp_path, 20, two, {})
    assert len(read_manifest(path).tensors["x"].shards) == 2
    content = forging.content_of(path)
    for place in (0, 1):
        for change, said in ((put(10**9, 4), "and its numbers alone 48"), (put([0], 0), "has other dims than its")):
            forged = json.loads(json.dumps(content))
            change(forged["tensors"]["x"]["pieces"][place])
            forging.write(path, forged)
            with pytest.raises(CheckpointError, match=said):
                read_manifest(path)


def test_shards_may_lie_in_a_file_in_any_order(path: Path) -> None:
    """And be listed in any: only what they share is looked for."""
    content = forging.content_of(path)
    content["tensors"] = dict(reversed(content["tensors"].items()))
    forging.write(path, content)
    numbers = read_anyway(path)
    assert numbers is not None and all(torch.equal(x, s.data) for x, s in zip(numbers, shards(), strict=True))


def test_an_archive_of_a_kind_that_zipfile_does_not_know(path: Path) -> None:
    content = bytearray((path / DATA).read_bytes())
    place = 0
    while (place := content.find(b"PK\x01\x02", place)) >= 0:
        content[place + 6 : place + 8] = b"\xff\x00"  # the version that it takes to read an entry
        place += 4
    (path / DATA).write_bytes(content)
    forging.list_again(path, DATA)
    with pytest.raises(
        CheckpointError, match="cannot be read from it \\(no archive where it should be: zip file version"
    ):
        load(path, shards())


def test_an_archive_whose_entries_lie_behind_the_files_end(path: Path) -> None:
    content = bytearray((path / DATA).read_bytes())
    place = 0
    while (place := content.find(b"PK\x01\x02", place)) >= 0:
        content[place + 42 : place + 46] = (1 << 30).to_bytes(4, "little")  # where an entry begins
        place += 4
    (path / DATA).write_bytes(content)
    forging.list_again(path, DATA)
    with pytest.raises(CheckpointError, match="cannot be read from it \\(the file ends too early\\)"):
        load(path, shards())


@pytest.mark.parametrize("rows", [50, 52])
def test_numbers_of_another_shape_than_is_said(path: Path, rows: int) -> None:
    """A little less or more: what lies around the numbers would hide it."""

    def change(content: Json) -> None:
        put([rows, 8], *T, "shape")(content)
        put([rows, 8], *P, 1)(content)

    forging.forge(path, change)
    wanted = [Shard("embedding.weight", (rows, 8), (0, 0), torch.zeros(rows, 8))]
    with pytest.raises(CheckpointError, match=rf"\({51 * 8 * 4} bytes, not those of \({rows}, 8\) in torch.float32\)"):
        load(path, wanted, unread=("",))


TEXTS = {
    "duplicated key": (lambda text: text[:-1] + b', "step": 3}', "the key 'step' stands twice"),
    "invalid UTF-8": (lambda text: text.replace(b"colonnade", b"colonnade\xff"), "it is not text"),
    "deep nesting": (lambda text: b"[" * 100_000, "it is nested too deeply"),
    "deep tables": (lambda text: b'{"a":' * 100_000, "it is nested too deeply"),
    "deep and closed": (lambda text: text[:-1] + b', "x":' + b"[" * 600 + b"]" * 600 + b"}", "does not match its hash"),
    "huge number": (lambda text: text.replace(b"20", b"9" * 5000), "Exceeds the limit"),
    "nothing": (lambda text: b"", "it is not JSON"),
    "zeros": (lambda text: bytes(len(text)), "it is not JSON"),
    "a list": (lambda text: b"[" + text + b"]", "is not a checkpoint of Colonnade"),
    "infinity": (lambda text: text.replace(b'"step": 20', b'"step": Infinity'), "does not match its hash"),
    "surrogate": (lambda text: text.replace(b'"step"', b'"\\ud800"'), "does not match its hash"),
    "no hash": (lambda text: text.rpartition(b',\n"sha256"')[0] + b"}", "does not match its hash"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_no_manifests(path: Path, name: str) -> None:
    change, said = TEXTS[name]
    (path / MANIFEST).write_bytes(change((path / MANIFEST).read_bytes()))
    assert said in refused(path)


def test_a_manifest_that_is_too_long_is_not_read(path: Path) -> None:
    """A file with holes takes no room on the disk, and would take it in memory."""
    os.truncate(path / MANIFEST, 1 << 42)
    assert "has 4,398,046,511,104 bytes, and no checkpoint of Colonnade has one of more than" in refused(path)


def test_a_renamed_checkpoint_is_not_the_newest(path: Path) -> None:
    """Names decide which one is the newest, so that one must not carry another's."""
    path.rename(path.with_name("step_00000030"))
    with pytest.raises(CheckpointError, match=r"step_00000030 holds the checkpoint of step 20.*Rename it to step_0+20"):
        newest(path.parent)
    path.with_name("step_00000030").rename(path.with_name("mine"))
    load(path.with_name("mine"), shards())  # any other name says nothing of its step
    for before, name in (("mine", "step_20_copy"), ("step_20_copy", "step_best"), ("step_best", "step_30")):
        path.with_name(before).rename(path.with_name(name))
        load(path.with_name(name), shards())


# --- anything at all --------------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([2**63, -(2**63)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(content: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in entries:
        yield (*at, key)
        yield from places(value, (*at, key))


def read_anyway(path: Path) -> list[torch.Tensor] | None:
    """What a checkpoint gives, or None where it is refused. Anything else that is raised is a failure."""
    found = model_shards({name: torch.zeros(shape) for name, shape in MODEL.items()}, 0, 1)
    try:
        load(path, found)
    except CheckpointError:
        return None
    return [shard.data for shard in found]


fuzz = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@fuzz
@given(data=st.data())
def test_any_change_to_a_manifest_is_refused_or_changes_no_number(path: Path, good: Path, data: st.DataObject) -> None:
    content = forging.content_of(good)
    way = data.draw(st.sampled_from(sorted(places(content), key=str)))
    at: Any = content
    for key in way[:-1]:
        at = at[key]
    if data.draw(st.booleans()):
        del at[way[-1]]
    else:
        at[way[-1]] = data.draw(ANYTHING | st.integers(0, 100_000))
    forging.write(path, content)
    numbers = read_anyway(path)
    if numbers is not None:
        assert all(torch.equal(x, shard.data) for x, shard in zip(numbers, shards(), strict=True))


@pytest.mark.slow
@fuzz
@given(data=st.data())
def test_any_change_to_a_tensor_file_is_refused_or_read(path: Path, good: Path, data: st.DataObject) -> None:
    """The hash is made right again. What lies around the numbers (lengths, offsets, names of a zip archive) may lie."""
    content = bytearray((good / DATA).read_bytes())
    stored = [each for tensor in read_manifest(good).tensors.values() for each in tensor.shards]
    for _ in range(data.draw(st.integers(1, 4))):
        shard = data.draw(st.sampled_from(stored))
        back = data.draw(st.integers(1, 400))  # a zip archive's directory stands at its end
        place = shard.start + shard.length - back
        change = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 4, b"\xff" * 8, bytes(8)]))
        content[place : min(place + len(change), shard.start + shard.length)] = change[:back]
    (path / DATA).write_bytes(content)
    forging.list_again(path, DATA)
    numbers = read_anyway(path)
    assert numbers is None or [x.shape for x in numbers] == [shard.data.shape for shard in shards()]


def test_a_file_that_becomes_another_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a look at it and its opening, a name can be given to something else."""
    file = tmp_path / MANIFEST
    os.mkfifo(file)
    monkeypatch.setattr(confined, "plain_size", lambda path: 1)
    with pytest.raises(CheckpointError, match="is a FIFO"):
        confined.read_plain(file, 1)


# --- links among a run's own checkpoints ------------------------------------------------------------------------------


def linked(folder: Path, name: str, to: Path) -> None:
    """A folder that was moved to another disk, with a link in its place."""
    to.mkdir()
    (to / "precious").write_text("data")
    (folder / name).symlink_to(to)


@pytest.mark.parametrize("name", ["step_00000010", ".step_00000010.deleted", ".step_00000030.partial"])
def test_a_link_goes_and_what_it_points_to_stays(path: Path, tmp_path: Path, name: str) -> None:
    linked(path.parent, name, tmp_path / "other disk")
    for step in (30, 40):
        save(path.parent, step, shards(), {}, keep=1)
        assert [p.name for p in path.parent.glob("*step*")] == [f"step_{step:08d}"]
    assert (tmp_path / "other disk" / "precious").read_text() == "data"


@pytest.mark.parametrize("target", ["other disk", "nowhere"])
def test_a_link_under_the_name_of_the_new_checkpoint(path: Path, tmp_path: Path, target: str) -> None:
    linked(path.parent, "step_00000030", tmp_path / "other disk")
    if target == "nowhere":
        shutil.rmtree(tmp_path / "other disk")
    assert newest(save(path.parent, 30, shards(), {}).parent) == path.parent / "step_00000030"
    assert not (path.parent / "step_00000030").is_symlink()
    assert target == "nowhere" or (tmp_path / "other disk" / "precious").read_text() == "data"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "does not exist, or not any more"),
        ("file", "is not a folder, so it is not a whole checkpoint"),
        ("file/within", "does not exist, so it is not a whole checkpoint"),
        ("folder", "has no manifest.json, so it is not a whole checkpoint"),
    ],
)
def test_what_is_no_folder_of_a_checkpoint(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert refused(tmp_path / name).startswith(f"{tmp_path / name} {said}")
