"""Which files a tokenizer is: GPT-2's vocabulary and merges, by the names under which they are published, and what lies
beside a vocabulary and says how its text is treated.
"""

from pathlib import Path

_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
CONFIG, NAMES, ADDED, MODEL = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"
JINJA, BY_NAME = "chat_template.jinja", "additional_chat_templates"


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


def files_beside(vocabulary: Path) -> tuple[Path, ...]:
    """CONFIG, NAMES, ADDED and MODEL of a vocabulary's folder, whether or not they are there. None for a vocabulary
    that is named by a prefix (`*-vocab.txt`), one of several in its folder, nor for a tokenizer.json.
    """
    named = vocabulary.name in ("vocab.txt", *(vocab for vocab, _ in _PAIRS)) or vocabulary.suffix == ".model"
    return tuple(vocabulary.parent / name for name in (CONFIG, NAMES, ADDED, MODEL)) if named else ()


def templates_in(folder: Path) -> tuple[Path, ...]:
    """The chat templates that newer folders have in files of their own: JINJA, and others by name in BY_NAME. What is
    hidden there are attributes, of macOS.
    """
    return tuple(path for path in (folder / JINJA, *sorted((folder / BY_NAME).glob("[!.]*.jinja"))) if path.is_file())
