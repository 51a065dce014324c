"""Requests to a model that stays: continuations to score, texts to write. All ranks of its layout answer together.

A request and its answer are plain data, so that they can cross a pipe (`ranks.py`):

    {"score": [[context ids, target ids], …], "batch_size": 32}         [[loss in nats, greedy], …]
    {"write": [{"prompt": ids, "tokens": 64, "until": ["\\n"], …}, …]}    [text, …]
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from colonnade.errors import ConfigError
from colonnade.evaluation.continuations import Continuation, score
from colonnade.generation.sample import generate
from colonnade.generation.sampling import Sampling
from colonnade.generation.stream import stream_text
from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.mesh import Mesh
from colonnade.serving.trained import Trained

Request = Mapping[str, Any]


@dataclass(frozen=True)
class Writing:
    """A prompt, and how it is gone on from."""

    prompt: Sequence[int]
    tokens: int
    """At most so many are added."""
    until: Sequence[str] = ()
    """The text ends before the first of these."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def answer(trained: Trained, mesh: Mesh, request: Request) -> list[Any]:
    """What is asked for, on every rank; every rank calls this with the same request."""
    if "score" in request:
        return _scores(trained, mesh, request["score"], request["batch_size"])
    return _texts(trained, mesh, [Writing(**each) for each in request["write"]])


def _scores(trained: Trained, mesh: Mesh, wanted: Sequence[Sequence[Sequence[int]]], batch_size: int) -> list[Any]:
    continuations = [Continuation(context, target) for context, target in wanted]
    found = score(trained.left_to_right, continuations, mesh=mesh, hidden=trained.hidden, batch_size=batch_size)
    return [[loss, greedy] for loss, greedy in zip(found.losses.tolist(), found.greedy.tolist(), strict=True)]


def _texts(trained: Trained, mesh: Mesh, wanted: Sequence[Writing]) -> list[str]:
    """Text after text, the dp ranks taking turns. Gathers all texts."""
    mine = range(mesh.data.rank, len(wanted), mesh.data.size)
    written = {number: _text(trained, wanted[number]) for number in mine}
    together: dict[str, str] = {}
    for theirs in gather_texts(json.dumps(written), mesh.world):
        together |= json.loads(theirs)
    return [together[str(number)] for number in range(len(wanted))]


def _text(trained: Trained, wanted: Writing) -> str:
    model = trained.left_to_right
    if model.longest is not None and len(wanted.prompt) + wanted.tokens > model.longest + 1:
        raise ConfigError(
            f"{wanted.tokens:,} new tokens behind a prompt of {len(wanted.prompt):,} do not fit into the model's "
            f"{model.longest:,} positions. Ask for fewer."
        )
    text = ""
    for text in _growing(trained, wanted):
        if (cut := cut_at_first(text, wanted.until)) != text:
            return cut
    return text


def _growing(trained: Trained, wanted: Writing) -> Iterator[str]:
    """What is written, token by token, whole each time."""
    text = ""
    sampling = Sampling(wanted.temperature, wanted.top_k, wanted.top_p, wanted.seed)
    made = generate(
        trained.stages,
        [wanted.prompt],
        max_new_tokens=wanted.tokens,
        stop=trained.stop,
        **asdict(sampling),
    )
    for delta in stream_text(made, trained.tokenizer):
        text += delta.text
        yield text


def cut_at_first(text: str, ends: Sequence[str]) -> str:
    """A text up to the first of `ends` in it; an empty one ends nothing."""
    found = [at for end in ends if end and (at := text.find(end)) >= 0]
    return text[: min(found)] if found else text
