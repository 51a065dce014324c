"""The keys of [model]: the transformer's shape, and what its layers are made of. See `schema.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import field_validator, model_validator

from colonnade.config.corruption import Lengths
from colonnade.config.nature import NOT_THE_MODEL, Of, Since
from colonnade.config.presets import PRESETS, with_preset
from colonnade.config.section import DEEPEST, LARGEST, Fraction, Positive, Section, Size, Text


class RotaryConfig(Section):
    """Rotary positions (model.position = "rotary"): queries and keys are turned by angles that grow with position."""

    base: Annotated[Positive, Since(10000.0)] = 10000.0
    """[1] The slowest turn takes about 2π · base tokens."""
    share: Annotated[Positive, Le(1.0), Since(1.0)] = 1.0
    """[1] Share of a head's features that is turned, the first of them (GPT-NeoX: 0.25). The rest know no position."""
    scaling: Annotated[Literal["none", "linear", "yarn", "llama3"], Since("none")] = "none"
    """How a model that was trained on original_length positions reads factor times as many: linear divides all
    angles; yarn and llama3 divide the slow ones alone, yarn with sharper attention."""
    factor: Annotated[Positive, Since(1.0)] = 1.0
    """[1] How many times longer the texts are. Needs scaling."""
    original_length: Annotated[Size | None, Since(None)] = None
    """[tokens] The length that the unscaled model was trained on. Needed by yarn and llama3."""
    low_frequency_factor: Annotated[Positive, Since(1.0)] = 1.0
    """[1] llama3: what turns less often than this in original_length is divided by factor."""
    high_frequency_factor: Annotated[Positive, Since(4.0)] = 4.0
    """[1] llama3: what turns more often than this in original_length is left as it is."""
    beta_fast: Annotated[Positive, Since(32.0)] = 32.0
    """[turns] yarn: what turns more often than this in original_length is left as it is."""
    beta_slow: Annotated[Positive, Since(1.0)] = 1.0
    """[turns] yarn: what turns less often than this in original_length is divided by factor."""

    def width_in(self, head_width: int) -> int:
        """Features that are turned of a head with so many: share of them, rounded down."""
        return int(round(head_width * self.share, 3))  # 100 × 0.58 is 57.99999999999999


class ModelConfig(Section):
    """The transformer: its shape, and what its layers are made of."""

    kind: Literal["gpt", "bert", "t5"] = "gpt"
    """The model: gpt is a left-to-right language model; bert reads a text from both sides, and is trained to guess
    masked words and which of two texts came first; t5 reads a text with its encoder and writes another with its
    decoder, and is trained to write what was cut out. With t5, keys that are unset are T5's: position relative, norm
    rmsnorm, bias false, activation relu, norm_epsilon 1e-6, init_std 1."""
    head: Annotated[
        Literal["pretraining", "classification", "choice", "spans", "none", "preferences"],
        Since("pretraining"),
        Of(("gpt", "bert")),
    ] = "pretraining"
    """What a model ends with. preferences is gpt's: the same weights learn which of two answers is preferred
    ([preferences]), from token files of `colonnade data examples preferences`. Of a bert: pretraining guesses masked
    words and the order of two texts; classification gives num_labels logits of a text or two, or a score where
    num_labels = 1; choice gives each of num_labels texts a logit, and the highest is the answer; both read the first
    position through the pooler. spans finds the run of a text that answers a question, by two logits at every position.
    These three are trained on examples that `colonnade data examples` wrote. none is an encoder with its pooler alone,
    as some are published: it makes vectors of texts, another head can begin from it, and it is not trained."""
    num_labels: Annotated[Size | None, Since(None), Of(("bert",))] = None
    """[labels] Of head classification, 1 for a score (regression by mean squared error); of head choice, the texts to
    choose from."""
    preset: Annotated[Text | None, NOT_THE_MODEL] = None
    """A published model's shape, by name. Keys of [model] that are written beside it take precedence."""
    num_layers: Annotated[Size, Le(DEEPEST)] = 12
    """[layers] Transformer layers; of t5, the encoder's. Parameters, memory and time grow in proportion."""
    num_decoder_layers: Annotated[Size | None, Le(DEEPEST), Since(None), Of(("t5",))] = None
    """[layers] The decoder's. Unset: num_layers."""
    hidden_size: Size = 768
    """[features] Width of the residual stream. Parameters and time grow with its square."""
    num_heads: Size = 12
    """[heads] Attention heads of a layer. Divides hidden_size, and parallel.tp divides it."""
    num_key_value_heads: Annotated[Size | None, Since(None)] = None
    """[heads] Heads of keys and values, each shared by num_heads ÷ num_key_value_heads queries (grouped-query
    attention). Unset: num_heads. parallel.tp divides it, or is a multiple of it: then ranks have copies."""
    head_dim: Annotated[Size | None, Since(None)] = None
    """[features] Width of one attention head. Unset: hidden_size ÷ num_heads."""
    ffn_hidden_size: Size | None = None
    """[features] Inner width of the MLP. Unset: 4 × hidden_size. parallel.tp divides it."""
    seq_length: Size = 1024
    """[tokens] Length of a training sample, and the number of learned positions: the longest text that fits. Of t5, the
    length of what the encoder reads."""
    decoder_seq_length: Annotated[Size | None, NOT_THE_MODEL, Of(("t5",))] = None
    """[tokens] Length of what the decoder writes in a training sample. Unset: what span corruption as published makes
    of the text that fills seq_length, 114 beside 512. Samples are padded up to it, or cut shorter to fit."""
    vocab_size: Size | None = None
    """[tokens] Rows of the vocabulary, without any padding. Unset: the tokenizer's."""
    dropout: Annotated[Fraction, NOT_THE_MODEL] = 0.0
    """[probability] Dropout after the embedding and before each residual addition. 0 is faster, and right where no
    text is read more than a few times; 0.1 was usual when it was."""
    attention_dropout: Annotated[Fraction, NOT_THE_MODEL] = 0.0
    """[probability] Dropout of the attention weights. 0 is faster, as attention then runs in one kernel."""
    position: Annotated[Literal["learned", "alibi", "rotary", "relative"], Since("learned")] = "learned"
    """How positions enter: learned is one trained vector for each of seq_length positions; alibi lowers each attention
    score in proportion to the distance between the two tokens; rotary turns queries and keys, so that a score depends
    on the distance; relative is t5's: a trained number for each head and range of distances is added to the score.
    alibi and rotary have no weights, and read texts longer than seq_length, as relative does."""
    relative_buckets: Annotated[int, Ge(4), Le(LARGEST), Since(32), Of(("t5",))] = 32
    """[ranges] Of distances that have a number of their own; even. The encoder has half of them for either side."""
    relative_distance: Annotated[Size, Since(128), Of(("t5",))] = 128
    """[tokens] From this distance on, all share one range. Below, ranges grow with the distance."""
    rotary: RotaryConfig = RotaryConfig()
    window: Annotated[Size | None, Since(None)] = None
    """[tokens] Sliding window: a token sees itself and the window - 1 tokens before it. Unset: all before it."""
    query_key_norm: Annotated[bool, Since(False)] = False
    """Normalise each head's queries and keys before their product: steadier training at high learning rates."""
    bias: Annotated[bool, Since(True)] = True
    """Linear layers and normalisations add a bias."""
    query_key_value_bias: Annotated[bool | None, Since(None), Of(("gpt", "bert"))] = None
    """The linear layers of queries, keys and values add a bias, whatever the others do (Qwen 2). Unset: as bias."""
    embedding_norm: Annotated[bool, Since(False)] = False
    """A LayerNorm right after the embedding (BLOOM, YaLM): steadier training of very large models."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """The normalisation layer: rmsnorm divides by the root of the mean square, without a mean or a bias."""
    norm_epsilon: Positive = 1e-5
    """[variance] Added to the variance in each normalisation, so that no division is by zero."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "relu", "geglu_tanh"] = "gelu"
    """The MLP's non-linearity: gelu is exact; gelu_tanh is the approximation that GPT-2's published weights use; relu
    is T5's; swiglu multiplies SiLU of one linear layer with another (LLaMA), and geglu_tanh gelu_tanh (T5 1.1), so that
    the MLP has three matrices."""
    norm_position: Annotated[Literal["pre", "post"], Since("pre")] = "pre"
    """Where the normalisation stands: pre is before attention and MLP, with the residual around both; post is after
    each residual addition, as in the first BERT, and trains less steadily when deep."""
    parallel_residual: Annotated[bool, Since(False), Of(("gpt", "bert"))] = False
    """Attention and MLP of a layer read the same stream, each through its norm, and both are added to it (GPT-NeoX).
    Off: the MLP reads what attention has added to."""
    fp32_residual: Annotated[bool, NOT_THE_MODEL] = False
    """Keep the residual stream in fp32 under 16-bit precision (YaLM). Doubles the memory of what layers hand on."""
    tie_embeddings: bool = True
    """Use the token embedding as the output layer too (t5: on a stream divided by √hidden_size). false adds
    vocab_size × hidden_size parameters."""
    token_types: Annotated[int, Ge(2), Le(LARGEST), Since(2), Of(("bert",))] = 2
    """[types] Rows of the table that tells the first text of a sample from the second."""
    init_std: Annotated[Positive, NOT_THE_MODEL] = 0.02
    """[standard deviation] Initial weights are normal with this width; those that write to the residual stream have it
    divided by √(2 × num_layers). Of t5, a factor on the published widths, which follow from the sizes: unset, 1."""

    @model_validator(mode="before")
    @classmethod
    def fill_from_preset(cls, given: Any) -> Any:
        return with_preset(given) if isinstance(given, dict) else given

    @field_validator("preset")
    @classmethod
    def preset_is_known(cls, preset: str | None) -> str | None:
        if preset is not None and preset not in PRESETS:
            raise ValueError(f"there is no preset {preset!r}")
        return preset

    @property
    def ffn(self) -> int:
        """Inner width of the MLP: ffn_hidden_size, or 4 × hidden_size."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def head_width(self) -> int:
        """Width of one attention head: head_dim, or hidden_size ÷ num_heads."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_width(self) -> int:
        """Features of a head that rotary positions turn."""
        return self.rotary.width_in(self.head_width)

    @property
    def has_query_key_value_bias(self) -> bool:
        """Whether queries, keys and values have a bias: query_key_value_bias, or bias."""
        return self.bias if self.query_key_value_bias is None else self.query_key_value_bias

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values: num_key_value_heads, or num_heads."""
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def kind_and_head(self) -> tuple[str, str]:
        """What statements, samples and tasks are chosen by."""
        return self.kind, self.head

    @property
    def ties_output(self) -> bool:
        """Whether there is an output layer that is the token table."""
        return self.tie_embeddings and self.head in ("pretraining", "preferences")

    @property
    def sequences(self) -> int:
        """Sequences of a sample: the texts to choose from, the two answers of a preference, else 1."""
        if self.head == "preferences":
            return 2
        return (self.num_labels or 1) if self.head == "choice" else 1

    @property
    def sample_length(self) -> int:
        """[tokens] Of a sample, over all its sequences."""
        return self.seq_length * self.sequences

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only itself and what is before it."""
        return self.kind == "gpt"

    @property
    def is_gated(self) -> bool:
        """Whether one linear layer of the MLP gates another."""
        return self.activation in ("swiglu", "geglu_tanh")

    @property
    def decoder_layers(self) -> int:
        """Layers of a second stack: 0 where a model has one stack."""
        if self.kind != "t5":
            return 0
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def decoder_length(self) -> int:
        """Length of the second stack's sequences: decoder_seq_length, or that of span corruption as published. 0 where
        a model has one stack.
        """
        if self.kind != "t5":
            return 0
        if self.decoder_seq_length is not None:
            return self.decoder_seq_length
        published = Lengths()
        return published.widths(max(published.text(self.seq_length), 2))[1]

    @property
    def num_units(self) -> int:
        """What a pipeline cuts between: layers, the embedding of each stack, and the head."""
        return self.num_layers + 2 + (self.decoder_layers + 1 if self.decoder_layers else 0)
