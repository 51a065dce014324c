"""Which files GPT-2's tokenizer is: a vocabulary and merges, by the names under which they are published."""

from pathlib import Path

_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


def find_pair(path: Path) -> tuple[Path, Path] | None:
    """(vocabulary, merges) of GPT-2's two files: `path` is their folder, one of them, or the prefix of `*-vocab.json`.
    None where there are not both, or where the folder has a tokenizer.json.
    """
    if (path / "tokenizer.json").is_file():
        return None
    folder = path if path.is_dir() else path.parent
    for vocab, merges in _PAIRS:
        named = path.is_dir() or path.name in (vocab, merges)
        if named and (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab, folder / merges
    prefix = str(path).removesuffix("-vocab.json").removesuffix("-merges.txt").removesuffix("-")
    vocab_path, merges_path = Path(f"{prefix}-vocab.json"), Path(f"{prefix}-merges.txt")
    return (vocab_path, merges_path) if vocab_path.is_file() and merges_path.is_file() else None
