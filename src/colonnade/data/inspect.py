"""What a token file holds, for `colonnade data inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colonnade.data.indexed import TokenFile, bin_path, idx_path
from colonnade.data.sidecar import read_sidecar
from colonnade.errors import hidden


def inspect(prefix: str | Path) -> dict[str, Any]:
    """Counts and sizes, and from the sidecar (None without one) the tokenizer: ready for JSON."""
    file = TokenFile(prefix)
    file.check_index()
    sidecar = read_sidecar(file)
    return {
        "prefix": hidden(str(prefix)),
        "documents": file.num_documents,
        "sequences": file.num_sequences,
        "tokens": file.num_tokens,
        "dtype": str(file.dtype),
        "bytes": file.num_bytes,
        "index_bytes": idx_path(prefix).stat().st_size,
        "files": [str(bin_path(prefix)), str(idx_path(prefix))],
        "mean_document_length": file.num_tokens / file.num_documents,
        "vocab_size": sidecar.vocab_size if sidecar else None,
        "end_of_document": sidecar.end_of_document if sidecar else None,
        "tokenizer_sha256": sidecar.tokenizer_sha256 if sidecar else None,
        "text_bytes": sidecar.text_bytes if sidecar else None,
        "bytes_per_token": sidecar.text_bytes / sidecar.tokens if sidecar else None,
        "examples": sidecar.examples.format if sidecar and sidecar.examples else None,
        "labels": list(sidecar.examples.labels) if sidecar and sidecar.examples else None,
        "sources": list(sidecar.sources) if sidecar else None,
    }
