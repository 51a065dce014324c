"""How fast are documents tokenized, beside datatrove's tokenizer on the same files?

    python -m benchmarks.tokenize_speed INPUT.jsonl[.gz|.xz …] --tokenizer TOKENIZER.json [--workers 2] [--rounds 3]
        [--cut 5000] [--peer-python PYTHON]

The input is written out as plain .jsonl, one file a worker (datatrove shares out whole files), and both write
Megatron's .bin/.idx from it, in turns; the best and all rounds are told, and written to
`results/tokenize-<date>-<machine>.md`. Imports are not counted, starting worker processes is. `--cut` cuts documents
into pieces of about so many characters (at a line's end): books into something of the size of web pages. datatrove
runs under `--peer-python`, an interpreter that has it installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import tokenizers

from benchmarks import hardware
from colonnade.corpus.documents import read_documents
from colonnade.data.bundle import books
from colonnade.data.indexed import TokenFile
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.train_tokenizer import train_tokenizer

RESULTS = Path(__file__).resolve().parent / "results"
PEER = """
import json, sys, time
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

if __name__ == "__main__":
    folder, output, tokenizer, workers = sys.argv[1:]
    executor = LocalPipelineExecutor(
        pipeline=[
            JsonlReader(folder),
            MegatronDocumentTokenizer(
                output_folder=output, tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>"
            ),
        ],
        tasks=int(workers), workers=int(workers), logging_dir=output + "-logs",
    )
    started = time.perf_counter()
    executor.run()
    print("SECONDS", time.perf_counter() - started)
"""


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents, size = write_parts(arguments.input, folder / "text", arguments.workers, arguments.cut)
        tokenizer_file = folder / "tokenizer.json"
        if arguments.tokenizer is None:
            train_tokenizer([books()], tokenizer_file, 8_192, progress=False)
        else:
            Tokenizer.load(arguments.tokenizer).save(tokenizer_file)
        text = setting(arguments, documents, size)
        rounds: dict[str, list[float]] = {"colonnade": [], "datatrove": []}
        for number in range(arguments.rounds):
            seconds, tokens = run_ours(folder, number, tokenizer_file, arguments.workers)
            rounds["colonnade"].append(seconds)
            peer = run_peer(folder, number, tokenizer_file, arguments)
            if peer is not None:
                rounds["datatrove"].append(peer[0])
                print(f"round {number + 1}: {tokens:,} tokens here, {peer[1]:,} from datatrove")
    text += "| | documents/s | MB/s | seconds of each round |\n|---|---|---|---|\n"
    text += "".join(row(who, times, documents, size) for who, times in rounds.items())
    print(text)
    path = RESULTS / f"tokenize-{datetime.now().date()}-{hardware.machine_name()}.md"
    path.write_text(text, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="*", default=[str(books())], help="default: the bundled stories")
    parser.add_argument("--tokenizer", help="default: a BPE of 8,192 entries trained on the bundled stories")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cut", type=int, default=0, help="characters a document; 0: as they are")
    parser.add_argument("--peer-python", default=sys.executable, help="a Python that has datatrove")
    return parser.parse_args()


def write_parts(inputs: list[str], folder: Path, parts: int, cut: int) -> tuple[int, int]:
    """Write the documents to `parts` files, in turns; returns how many and their bytes of text."""
    folder.mkdir()
    documents = size = 0
    files = [(folder / f"{part:03}.jsonl").open("w", encoding="utf-8") for part in range(parts)]
    for text in read_documents(inputs):
        for piece in cut_text(text, cut):
            files[documents % parts].write(json.dumps({"text": piece}, ensure_ascii=False) + "\n")
            documents, size = documents + 1, size + len(piece.encode())
    for file in files:
        file.close()
    return documents, size


def cut_text(text: str, cut: int) -> Iterator[str]:
    """Pieces of about `cut` characters that end with a line."""
    while cut and len(text) > cut:
        end = text.find("\n", cut) + 1 or len(text)
        yield text[:end]
        text = text[end:]
    if text:
        yield text


def run_ours(folder: Path, number: int, tokenizer_file: Path, workers: int) -> tuple[float, int]:
    """Seconds, and how many tokens."""
    output = folder / f"ours-{number}"
    tokenizer = Tokenizer.load(tokenizer_file)
    started = time.perf_counter()
    report = tokenize_files([folder / "text"], output, tokenizer, workers=workers, progress=False)
    return time.perf_counter() - started, report.tokens


def run_peer(
    folder: Path, number: int, tokenizer_file: Path, arguments: argparse.Namespace
) -> tuple[float, int] | None:
    """The same for datatrove; None where it does not run."""
    script, output = folder / "peer.py", folder / f"theirs-{number}"
    script.write_text(PEER)
    command = [arguments.peer_python, script, folder / "text", output, tokenizer_file, str(arguments.workers)]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    seconds = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("SECONDS")]
    if done.returncode or not seconds:
        print(f"datatrove did not run under {arguments.peer_python}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return None
    tokens = sum(TokenFile(path.with_suffix("")).num_tokens for path in output.rglob("*.idx"))
    return seconds[0], tokens


def setting(arguments: argparse.Namespace, documents: int, size: int) -> str:
    """What was measured, on what, beside what."""
    versions = subprocess.run(
        [arguments.peer_python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=False
    ).stdout
    peers = [line for line in versions.splitlines() if line.split("==")[0] in ("datatrove", "tokenizers")]
    cut = f", cut to pieces of {arguments.cut:,} characters" if arguments.cut else ""
    machine, names = hardware.describe(), ", ".join(Path(name).name for name in arguments.input)
    return (
        f"# Tokenizing\n\n{machine['cpu']}, {machine['cores']} cores; Python {platform.python_version()}, "
        f"tokenizers {tokenizers.__version__}, commit {machine['commit']}; beside {', '.join(peers) or 'nothing'}.\n"
        f"{names}{cut}: {documents:,} documents, {size / 1e6:.1f} MB of text; {arguments.workers} workers. "
        f"Best of {arguments.rounds} rounds.\n\n"
    )


def row(who: str, times: list[float], documents: int, size: int) -> str:
    if not times:
        return f"| {who} | not run | | |\n"
    best = min(times)
    rounds = " ".join(f"{seconds:.2f}" for seconds in times)
    return f"| {who} | {documents / best:,.0f} | {size / best / 1e6:.1f} | {rounds} |\n"


if __name__ == "__main__":
    main()
