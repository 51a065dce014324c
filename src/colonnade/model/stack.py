"""An embedding, blocks and a head: what models of every family are, as a list of *units*.

A pipeline cuts between units, and a rank builds only its own. What ownership (data parallelism) works on are
*buckets*: each unit has one, and the token table one of its own, because a tied head needs it too. Which buckets a unit
multiplies with is the architecture's statement (`architecture/`).

A weight's logical name is its bucket's name and its name in there. It says nothing of ranks: a last stage with tied
embeddings has a token table of its own, under the same name and with the same initial numbers as the first stage's.
"""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from colonnade.architecture.matching import TO_TEACHER
from colonnade.architecture.sites import EMBEDDING, FINAL_NORM
from colonnade.architecture.stack import TABLE
from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.model import ModelConfig
from colonnade.kernels.dropout import dropout
from colonnade.mesh.collectives import all_gather
from colonnade.model.inputs import Inputs
from colonnade.model.matching import matched
from colonnade.model.model import Transformer
from colonnade.model.norm import norm_of
from colonnade.model.position import Positions
from colonnade.model.transformer import Block, residual_dtype
from colonnade.randomness import Purpose
from colonnade.tensor_parallel.cross_entropy import local_logits, output_loss, token_guesses
from colonnade.tensor_parallel.distillation import SoftTargets, distilled_loss
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding, are_tokens
from colonnade.tensor_parallel.linear import ReplicatedLinear
from colonnade.tensor_parallel.parallel import Parallel


class Embedding(nn.Module):
    """Tokens into the residual stream, with learned positions and types of tokens where the model has them."""

    def __init__(self, model: ModelConfig, vocab_size: int, parallel: Parallel, *, token_types: int) -> None:
        super().__init__()
        self.drop, self.parallel, self.fp32_residual = model.dropout, parallel, model.fp32_residual
        h = model.hidden_size
        self.tokens = VocabParallelEmbedding(vocab_size, h, parallel)
        self.positions = Positions(model.seq_length, h) if model.position == "learned" else None
        self.types = Positions(token_types, h) if token_types else None
        self.norm = norm_of(model, parallel.products) if model.embedding_norm else None

    def forward(self, inputs: Inputs) -> Tensor:
        """[s, b, h], or [s/tp, b, h] under sequence parallelism."""
        assert inputs.tokens is not None, "the embedding reads tokens"
        x = self.tokens(inputs.tokens)
        x = x.to(residual_dtype(x.dtype, self.fp32_residual))
        first = self.parallel.first_position(len(x))
        mine = slice(first, first + len(x))
        if self.positions is not None:
            x = self.positions(x, inputs.first_position + first if inputs.positions is None else inputs.positions[mine])
        if self.types is not None:
            assert inputs.types is not None, "and their types"
            x = self.types(x, inputs.types[mine])
        if self.norm is not None:
            x = self.norm(x, x.dtype)
        x = dropout(x, self.drop, inputs.masks, Purpose.EMBEDDING_DROPOUT, first=first)
        self.parallel.probe.see(EMBEDDING, x)
        return x


class Head(nn.Module):
    """What every head has: the final norm (of pre-norm models), and the output layer, whose weight is the token table
    where that is tied.

    Post-norm models end with their last block's own norm, and have none here, as GPT-1 and BERT.
    """

    def __init__(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, tied: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__()
        self.parallel, self.vocab_size = parallel, vocab_size
        self.norm = norm_of(model, parallel.products) if model.norm_position == "pre" else None
        self.output = tied or VocabParallelEmbedding(vocab_size, model.hidden_size, parallel)

    def normed(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h] in the output layer's type: what the head multiplies."""
        if self.norm is None:
            return x.to(self.output.weight.dtype)
        y: Tensor = self.norm(x)
        self.parallel.probe.see(FINAL_NORM, y)
        return y

    def loss_of(
        self,
        y: Tensor,
        labels: Tensor,
        loss_weights: Tensor,
        bias: Tensor | None = None,
        *,
        soft: SoftTargets | None = None,
    ) -> Tensor:
        """Of what the output layer reads, [s, b, h] (sequence parallel: [s/tp, b, h]), and labels [s, b]:
        Σ loss_weights · token loss, []. `soft`: what a teacher says, whose divergence is added.
        """
        assert are_tokens(labels, self.vocab_size, loss_weights), (
            f"a label that counts is outside of the vocabulary, 0 … {self.vocab_size - 1}: its loss_mask is not 0"
        )
        if soft is not None:
            return distilled_loss(
                y,
                self.output.weight,
                labels,
                loss_weights,
                soft,
                bias=bias,
                tp=self.parallel.tp,
                vocab_size=self.vocab_size,
                sequence_parallel=self.parallel.sequence_parallel,
                products=self.parallel.products,
            )
        return output_loss(
            y,
            self.output.weight,
            labels,
            loss_weights,
            bias=bias,
            tp=self.parallel.tp,
            vocab_size=self.vocab_size,
            sequence_parallel=self.parallel.sequence_parallel,
            products=self.parallel.products,
        )

    def read_by_output(self, x: Tensor) -> Tensor:
        """Whole stream [s, b, h] -> what the output layer multiplies, [s, b, h]"""
        return self.normed(x)

    @property
    def output_bias(self) -> Tensor | None:
        """[v/tp] Of the output layer, where it has one."""
        return None

    def guesses_of(self, y: Tensor, labels: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of what the output layer reads, whole, [s, b, h], and labels [s, b]: each token's loss, and whether its label
        is likeliest, [s, b]
        """
        return token_guesses(
            y,
            self.output.weight,
            labels,
            bias=bias,
            tp=self.parallel.tp,
            vocab_size=self.vocab_size,
            products=self.parallel.products,
        )

    def logits_of(self, y: Tensor) -> Tensor:
        """Of what the output layer reads, whole, [s, b, h]: this rank's real rows of the logits, [s, b, ≤ v/tp] in
        fp32.
        """
        parallel = self.parallel
        return local_logits(
            y, self.output.weight, tp=parallel.tp, vocab_size=self.vocab_size, products=parallel.products
        )

    def gathered(self, local: Tensor) -> Tensor:
        """Each rank's real rows of the vocabulary, [≤ v/tp, …] -> all of them on every rank, [v, …]."""
        padding = self.output.weight.shape[0] - len(local)  # only the last ranks have some: real rows stay side by side
        padded = nn.functional.pad(local, (*[0, 0] * (local.ndim - 1), 0, padding), value=float("-inf"))
        return all_gather(padded, self.parallel.tp)[: self.vocab_size].contiguous()


class Stack(Transformer):
    """Embedding, blocks, head, or those of them that a rank has. The token table is cut over tp; so is every block.

    Under sequence parallelism the gradients of weights whose `Placement.dim` is None are partial sums over tp. `units`:
    None, or the names of those to build, in the order of the model. `token_types`: how many types tokens have, 0: none.
    """

    embedding: Embedding
    head: nn.Module

    def __init__(
        self,
        model: ModelConfig,
        vocab_size: int,
        parallel: Parallel,
        *,
        units: Sequence[str] | None = None,
        token_types: int = 0,
    ) -> None:
        super().__init__(model, vocab_size, parallel, units=units)
        held = self.held
        if any(unit.reads_tokens for unit in held):
            self.embedding = Embedding(model, vocab_size, parallel, token_types=token_types)
        self.blocks = nn.ModuleDict(
            {str(unit.layer): Block(model, unit.layer, parallel) for unit in held if unit.layer is not None}
        )
        if any(unit.is_loss for unit in held):
            self.head = self.make_head(model, self._table_module() if self.tied else None)

    @abstractmethod
    def make_head(self, model: ModelConfig, tied: VocabParallelEmbedding | None) -> nn.Module:
        """The last unit; `tied`: the token table, where this rank has it already."""

    @abstractmethod
    def losses(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        """The losses of a micro-batch, [] each, given what the last block hands on: those that `Unit.losses` names."""

    def train_as(self, architecture: Architecture) -> None:
        """As `Transformer.train_as`, and add the maps to a teacher's hidden states that the statement has."""
        stated = architecture.weights()
        for layer, block in self.blocks.items():
            weight = stated.get(f"blocks.{layer}.{TO_TEACHER}.weight")
            if weight is not None:
                out_size, in_size = weight.shape
                block.add_module(TO_TEACHER, ReplicatedLinear(in_size, out_size, self.parallel, bias=False))
        super().train_as(architecture)

    def _module_of(self, unit: Unit) -> nn.Module:
        if unit.reads_tokens:
            return self.embedding
        return self.head if unit.is_loss else self.blocks[str(unit.layer)]

    def _run(self, unit: str, carry: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """One unit: the residual stream, (x,), into the next one's; the embedding reads none, (); the head returns the
        losses.
        """
        stated = self.stated[unit]
        if stated.reads_tokens:
            return (self.embedding(inputs),)
        (x,) = carry
        if stated.is_loss:
            return self.losses(x, inputs)
        assert inputs.caches is None or inputs.documents is None, "a text that goes on from a cache is one document"
        assert inputs.caches is None or not self.parallel.sequence_parallel, "a cache has whole sequences"
        cache = None if inputs.caches is None else inputs.caches[unit]
        block = self.blocks[str(stated.layer)]
        out = block(x, inputs.masks, cache, pairs=inputs.pairs.tensor(), positions=inputs.positions)
        if inputs.hidden is not None:
            out = matched(out, unit, inputs.hidden, getattr(block, TO_TEACHER, None), self.parallel)
        return (out,)

    def carry_buffers(self, inputs: Inputs, into: str) -> tuple[Tensor, ...]:
        """The residual stream; the first unit takes nothing."""
        if self.stated[into].is_first:
            return ()
        assert inputs.tokens is not None, "every stage is told the tokens"
        return (self.stream_buffer(inputs.tokens, fp32=self.fp32_residual),)

    def residual(self, carry: tuple[Tensor, ...]) -> Tensor:
        """The whole residual stream on every tp rank, without gradient: (x,) between two units -> [s, b, h]."""
        (x,) = carry
        return self.parallel.gather(x)

    def bucket_modules(self) -> dict[str, nn.Module]:
        """The modules whose weights make this rank's buckets, by bucket, in the order of a forward pass.

        A weight belongs to the first bucket that has it. Buckets without weights of their own are left out.
        """
        units = self.units()
        table = self._table_module()
        found = ({} if table is None else {TABLE: table}) | units
        return {name: module for name, module in found.items() if name == TABLE or _has_own(module, table)}

    def _table_module(self) -> VocabParallelEmbedding | None:
        """The token table of this rank, where it has one."""
        if hasattr(self, "embedding"):
            return self.embedding.tokens
        if not self.tied or not hasattr(self, "head"):
            return None
        assert isinstance(self.head, Head), "what ties the token table has an output layer"
        return self.head.output


def _has_own(module: nn.Module, table: nn.Module | None) -> bool:
    """Whether `module` has weights besides the table's."""
    shared = set() if table is None else {id(weight) for weight in table.parameters()}
    return any(id(weight) not in shared for weight in module.parameters())
