"""What a checkpoint's metadata tells of its run, checked: the manifest only knows that it is JSON.

A checkpoint may be a stranger's, so what is taken from it has the type and the range that it must have.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from colonnade.checkpoint.confined import read_plain
from colonnade.checkpoint.manifest import Manifest, check_hash, remedy
from colonnade.checkpoint.names import Count
from colonnade.checkpoint.schema import first_fault
from colonnade.config.load import loads
from colonnade.config.schema import Config
from colonnade.data.identity import DataIdentity
from colonnade.errors import CheckpointError
from colonnade.kernels.choice import Kernel, Use
from colonnade.train.base import BaseMetadata
from colonnade.train.change import Change
from colonnade.train.rollback import Rollback

MOST_BYTES = 1 << 28  # of a configuration or a tokenizer

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ScaleMetadata(BaseModel):
    """Of the loss scale of an fp16 run."""

    value: Finite
    good_steps: Count


class ModelMetadata(BaseModel):
    """Of the model: what its configuration does not say. The rest of them is held against that."""

    vocab_size: Annotated[Count, Field(ge=1)]


class DataMetadata(BaseModel):
    """Of a token file: a `DataIdentity`."""

    tokens: Count
    documents: Count
    sequences: Count
    dtype: Annotated[str, Field(pattern=r"^u?int\d{1,2}$")]
    index_bytes: Count
    index_sha256: Sha256
    blocks: Annotated[str, Field(pattern=r"^[0-9a-f]{16}( [0-9a-f]{16})+$")]

    def identity(self) -> DataIdentity:
        return DataIdentity.from_json(self.model_dump())


class ProductMetadata(BaseModel):
    """By what matrices were multiplied, and where that was decided."""

    precision: str
    kernels: dict[Use, Kernel]
    processor: str
    torch: str
    how: str
    compiled: str = ""
    """Which version of the compiled kernels, where there were any. Was not written at first."""


class PublishedMetadata(BaseModel):
    """What others say of weights that they have published."""

    model_config = ConfigDict(frozen=True)

    begin: Count | None = None
    """The token that begins a text."""
    ends: tuple[Count, ...] = ()
    """Those that end one, in their order."""
    pad: Count | None = None
    """The one that fills texts up to a length."""
    sampling: dict[str, bool | int | float] = {}
    """How text is sampled: numbers of generation_config.json by their keys."""


class MergedMetadata(BaseModel):
    """Of the run whose adapters were merged into these weights."""

    head: str | None = None
    """Its model.head. Was not written at first."""


class WatchMetadata(BaseModel):
    """Of the losses that tell a divergence: a `LossWatch`."""

    losses: list[Annotated[float, Field(allow_inf_nan=False)]]
    signs: Count
    windows: dict[str, list[tuple[Count, Annotated[float, Field(allow_inf_nan=False)]]]] = {}
    growth_steps: Count | None = None
    without_loss: Count = 0


class RunMetadata(BaseModel):
    """Of a run at the step of its checkpoint. What came after the first checkpoints has what held until then."""

    model_config = ConfigDict(frozen=True)

    step: Count
    samples: Count
    model: ModelMetadata
    skipped_steps: Count = 0
    global_batch_size: Count | None = None
    optimizer: str = "adamw"
    frozen: tuple[str, ...] = ()
    """Weights of which there are no moments."""
    base: BaseMetadata | None = None
    """Where the rest of the weights is; None: they are all here."""
    loss_scale: ScaleMetadata | None = None
    tokenizer_sha256: str | None = None
    end_of_document: Count | None = None
    """The token behind each document, as the token files say it, else the weights that the run began from, else the
    tokenizer; None: there is none, or nobody wrote it down."""
    labels: tuple[str, ...] = ()
    """Names of what a classifier tells apart, from 0 on; none where they are unknown."""
    published: PublishedMetadata | None = None
    """With the weights that the run began from; None: it began from none that were published."""
    data: dict[str, DataMetadata] | None = None
    """By the key of the configuration that names the file; None: nobody wrote it down."""
    questions: Sha256 | None = None
    """Of data.questions; None: there are none, or nobody wrote it down."""
    products: ProductMetadata | None = None
    """None: there was no choice, or nobody wrote it down."""
    rollbacks: list[Rollback] = []
    """That the run has made on its way here."""
    changes: list[Change] = []
    """Of its configuration, that it has made on its way here."""
    merged_from: MergedMetadata = MergedMetadata()
    watch: WatchMetadata = WatchMetadata(losses=[], signs=0)

    @field_validator("loss_scale", mode="before")
    @classmethod
    def _constant(cls, written: object) -> object:
        return written or None  # a scale that is constant is written as {}


def metadata_of(path: Path, manifest: Manifest) -> RunMetadata:
    """The metadata of the checkpoint in folder `path`. CheckpointError if no run of Colonnade has written it."""
    try:
        metadata = RunMetadata.model_validate(manifest.metadata)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} has metadata that no run of Colonnade writes: {first_fault(error)}. {remedy(path)}"
        ) from None
    if metadata.step != manifest.step:
        raise CheckpointError(
            f"{path} is damaged: its manifest says step {manifest.step}, its metadata says {metadata.step}. "
            f"{remedy(path)}"
        )
    return metadata


def config_of(path: Path, manifest: Manifest) -> Config:
    """The configuration in the checkpoint in folder `path`. CheckpointError if it is not what was written there."""
    file = path / "config.toml"
    if file.name not in manifest.files:
        raise CheckpointError(
            f"{path} has no config.toml, so its model is unknown. Name a checkpoint that `colonnade train` wrote."
        )
    check_hash(path, manifest, file.name)
    try:
        return loads(read_plain(file, MOST_BYTES).decode(), source=str(file))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is damaged: it is not text ({error.reason}). {remedy(path)}") from None
