"""Every key of a configuration: its type, its one default, its range and its meaning.

    Config ── model · parallel · data · train · optim · parts · lora · preferences · distillation · divergence ·
              thermometers · checkpoint · restarts · run

The text under a field is its documentation: `colonnade train --help` and docs/reference/config.md are made from
it. It starts with the unit in brackets where the value has one. Sections are frozen and strict: an unknown key, or
text where a number belongs, is an error. What follows from the values (head_dim, num_ranks, …) is a property or a
function, never a key. What a key is besides (may it change, does it identify the model) is marked in its annotation
(`nature.py`). Whether values go together is decided in `check.py`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from colonnade.config.corruption import MEAN_LENGTH, SHARE, Lengths
from colonnade.config.distillation import DistillationConfig
from colonnade.config.model import ModelConfig
from colonnade.config.nature import MAY_CHANGE, WHILE_RUNNING
from colonnade.config.parts import LoraConfig, PartsConfig
from colonnade.config.preferences import PreferencesConfig
from colonnade.config.restarts import RestartsConfig
from colonnade.config.saving import CheckpointConfig
from colonnade.config.section import (
    MOST,
    Count,
    CountOrZero,
    CountsOrZero,
    Fraction,
    NotNegative,
    Positive,
    Section,
    Size,
    Sizes,
    Text,
)
from colonnade.config.split import parse_split
from colonnade.config.thermometers import ThermometersConfig
from colonnade.config.tracking import TrackingConfig

WARMUP_STEPS = 100
"""[steps] Of the warm-up, where none is set."""
EVALUATE_EVERY = 500
"""[steps] Between evaluations, where none is set."""


class ParallelConfig(Section):
    """The layout: how many ranks, and what each of them holds. No layout changes the run's result."""

    MAY_CHANGE: ClassVar[bool] = True

    tp: Size = 1
    """[ranks] Tensor parallelism: every layer is cut in tp parts. Divides weights and their optimizer state by tp, at
    two all-reduces forward and two backward a layer: keep tp inside one machine."""
    pp: Size = 1
    """[ranks] Pipeline parallelism: the layers in pp stages, through which micro-batches flow. Divides weights by pp
    and sends only what crosses a cut. With few micro-batches in a step, ranks mostly wait for the pipeline to fill."""
    dp: Size = 1
    """[ranks] Data parallelism: dp copies of the model share each global batch, and sum gradients once a step."""
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """The order in which a stage runs its micro-batches: naive, one at a time through all stages; gpipe, all forward,
    then all backward; 1f1b, backward as early as possible, so that few activations live; interleaved, 1f1b over
    virtual_stages; zero_bubble, 1f1b whose weight gradients fill the waiting time."""
    virtual_stages: Size = 1
    """[chunks] Pieces of the model that each stage holds under schedule = "interleaved": waiting shrinks by this
    factor, transfers grow by it. The micro-batches of a step must be divisible by pp."""
    partition: Literal["layers", "parameters", "flops"] = "layers"
    """What is spread evenly over the stages: layers counts blocks, and the embedding and the head as one each;
    parameters counts their weights (memory), flops their arithmetic (time)."""
    cuts: Sizes = ()
    """[units] Explicit cuts in place of partition: the number of units (embedding, blocks, head) of each chunk in the
    order of the model, pp × virtual_stages numbers. Empty: as partition says."""
    sequence_parallel: bool = False
    """Cut the residual stream along the sequence over tp between the layers: less memory for activations, the same
    bytes sent. tp divides seq_length."""
    zero: Literal[0, 1, 2, 3] = 0
    """[stage] What the dp ranks share instead of each holding all of it: 0 nothing; 1 optimizer state and master
    weights; 2 also gradients; 3 also parameters, which are gathered layer by layer as they are needed."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in backward instead of kept: selective, the attention matrices; full, whole layers."""
    recompute_every: Size = 1
    """[layers] With recompute = "full": the residual stream is kept before every so many layers of a stage."""
    offload: bool = False
    """Keep optimizer state and master weights in CPU memory and update there. Needs 16-bit precision."""

    @property
    def num_ranks(self) -> int:
        """Ranks in all: tp × pp × dp."""
        return self.tp * self.pp * self.dp

    @property
    def recompute_group(self) -> int:
        """Layers that backward computes again together; 0: none."""
        return self.recompute_every if self.recompute == "full" else 0


class MaskingConfig(Section):
    """Samples of a masked model (model.kind = "bert"): two texts of one document, with words to guess."""

    pairs: Literal["order", "next"] = "order"
    """The second task: order asks which of two consecutive texts came first (ALBERT, Megatron-LM); next asks whether
    the second follows the first, or is from elsewhere (the first BERT)."""
    share: Annotated[float, Gt(0), Lt(1)] = 0.15
    """[share of the tokens] To be guessed: as whole words, of which 80 % are hidden, 10 % replaced and 10 % left."""
    longest: Size = 3
    """[words] Side by side that are hidden together at most; n words with a chance in proportion to 1/n."""
    short: Fraction = 0.1
    """[probability] Samples that are cut to a random length, so that short texts are known too."""


class CorruptionConfig(Section):
    """Samples of an encoder and a decoder (model.kind = "t5"): spans of a text are cut out, and are what the decoder
    has to write."""

    share: Annotated[float, Gt(0), Lt(1)] = SHARE
    """[share of the tokens] That are cut out."""
    mean_length: Size = MEAN_LENGTH
    """[tokens] Mean length of a span."""

    @property
    def lengths(self) -> Lengths:
        """How long sequences become."""
        return Lengths(self.share, self.mean_length)


class DataConfig(Section):
    """Token files, named by the prefix that their .bin and .idx share, relative to the current folder."""

    train: Text | None = None
    """Token file to train on. Needed by `train`; `colonnade data tokenize` makes one."""
    validation: Text | None = None
    """Token file for the evaluations during training. Unset: the second part of data.train, cut off by data.split."""
    test: Text | None = None
    """Token file kept aside: not read in training. Unset: the third part of data.train, cut off by data.split."""
    tokenizer: Text | None = None
    """Tokenizer that made the token files: a tokenizer.json, BERT's vocab.txt, a SentencePiece *.model, or a folder
    with one of them or with GPT-2's encoder.json and vocab.bpe (or vocab.json and merges.txt). It is kept in every
    checkpoint, so that generating needs no other file."""
    split: Text = "29:1:0"
    """[proportions] Shares of data.train's documents for train:validation or train:validation:test. A part that has a
    token file of its own takes no share."""
    order: Literal["epoch", "all_epochs"] = "epoch"
    """The order of samples: epoch shuffles each epoch afresh, so that a longer run keeps its past; all_epochs shuffles
    the samples of data.epochs epochs as one."""
    epochs: Count | None = None
    """[epochs] Length of order = "all_epochs", which needs it; unset otherwise. A run that would take more than these
    samples is refused."""
    blend: Annotated[dict[Text, Positive] | None, WHILE_RUNNING] = None
    """Several token files to train on in place of data.train, each with a number whose meaning is blend_by's. Every
    part of the run, however short, has them in these proportions to less than a sample."""
    blend_by: Literal["samples", "tokens", "epochs", "temperature"] = "samples"
    """What the numbers of blend are: samples and tokens, shares of either, in any unit; epochs, how often each file is
    read, and a run that would take more is refused; temperature, factors on tokens^(1/temperature) of each file."""
    temperature: Positive | None = None
    """[1] For blend_by = "temperature", which needs it: 1 mixes in proportion to size, larger values give small files
    a larger share, and a very large one gives all the same."""
    documents: Literal["joined", "separate"] = "joined"
    """Whether a token sees the document before its own: joined is GPT-2's way; separate restarts positions and cuts
    attention at every document, and counts no loss for the first token of the next one."""
    packing: Literal["stream", "best_fit", "whole"] = "stream"
    """How documents fill samples: stream cuts the text wherever a sample ends; best_fit puts whole documents together
    so that few are cut; whole cuts none that fits into a sample, and fills samples up with padding, as conversations
    need it. best_fit and whole need documents = "separate"."""
    too_long: Literal["cut", "truncate", "drop"] = "cut"
    """What becomes of a document that is longer than a sample with packing = "whole": cut, its parts are documents of
    their own; truncate, what is behind a sample's length is left out; drop, all of it is."""
    loss_on: Literal["all", "answers"] = "all"
    """Which tokens count in the loss: answers are what the assistant says in token files of conversations (`colonnade
    data examples chat`)."""
    no_loss_on: CountsOrZero = ()
    """[token ids] Tokens whose prediction does not count in the loss."""
    questions: Annotated[Text | None, MAY_CHANGE] = None
    """File of SQuAD (.json) whose questions a head spans answers at each evaluation: exact match and F1 in metrics."""
    revision: Literal[1, 2] = 1
    """[number] How samples are made and files mixed: 2 is what is told of them here, 1 what earlier versions did.
    Unset, `train` takes 2, and goes on with 1 where a run began so."""
    masking: MaskingConfig = MaskingConfig()
    corruption: CorruptionConfig = CorruptionConfig()
    cache: Annotated[Text | None, MAY_CHANGE] = None
    """Folder for copies of token files that are named by URL (s3://, gs://, https://, …): all of the
    index, and tokens as they are read. Needs room for the file, and the package of that kind of storage."""

    @property
    def shares(self) -> tuple[float, float, float]:
        """The parts of data.train for (train, validation, test), 0 for a part with a token file of its own."""
        train, validation, test = parse_split(self.split)
        return train, 0.0 if self.validation else validation, 0.0 if self.test else test


class CurriculumConfig(Section):
    """Sequences and batches that start small and grow. Three lists of equal length, a place a phase; empty: none."""

    tokens: CountsOrZero = ()
    """[tokens] Where each phase begins, counted from the start of the run: 0 first, and rising. A phase begins at the
    first step from there on at which whole samples are used up. Of a sample with several sequences, as of the heads
    choice and preferences, the tokens of one count."""
    seq_length: Sizes = ()
    """[tokens] Sequence length of each phase: a divisor of model.seq_length; the last is model.seq_length. Samples of
    that length are cut in pieces, so that every token is used once an epoch. With data.packing = "whole", and for
    model.head = "preferences", all are model.seq_length, so that batches alone grow."""
    global_batch_size: Sizes = ()
    """[sequences] Global batch of each phase, in sequences of its length; the last is train.global_batch_size."""

    def other_than(self, seq_length: int) -> int | None:
        """[tokens] The length of the first phase that has not this one; None where there is none."""
        return next((each for each in self.seq_length if each != seq_length), None)


class TrainConfig(Section):
    """The length of the run, its batches, its number format and what it reports."""

    seed: CountOrZero = 1234
    """[number] The source of all randomness: initial weights, the order of samples, dropout."""
    init_from: Text | None = None
    """A checkpoint, a run or a folder of Hugging Face whose weights (no more) the run's first start takes."""
    init_from_resize: bool = False
    """The weights of init_from may have a vocabulary or learned positions of another number: rows that both have are
    taken, others of the run are drawn. Another tokenizer must have the same tokens under the ids that both have."""
    steps: Annotated[Count, MAY_CHANGE, WHILE_RUNNING]
    """[steps] Optimizer steps of the whole run, counted from its first start."""
    epochs: Annotated[Positive | None, MAY_CHANGE] = None
    """[epochs] Passes over the training data in the place of steps, which then follow when a run is started: as many as
    so many samples take, rounded up, or down where the data end with them. Without effect where steps is set."""
    patience: Annotated[CountOrZero, MAY_CHANGE, WHILE_RUNNING] = 0
    """[evaluations] The run ends after so many evaluations in a row without a lower validation loss than the lowest
    before (early stopping). 0: it goes on to the last step."""
    global_batch_size: Annotated[Size, WHILE_RUNNING]
    """[samples] Samples of one optimizer step over all ranks. Divisible by micro_batch_size × parallel.dp."""
    micro_batch_size: Annotated[Size, MAY_CHANGE]
    """[samples] Samples that one rank computes at once. Changes memory and speed, never the result."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Number format of the computation. Unset, `train` takes bf16 where it computes on GPUs and fp32 on CPUs. bf16 and
    fp16 keep weights, gradient sums and optimizer state in fp32; fp16 scales the loss so that small gradients survive;
    fp64 is for comparing layouts."""
    loss_scale: Positive = 4294967296.0
    """[1] fp16: what the loss is multiplied with at the start. Halved when a gradient overflows (that step is skipped
    on all ranks), doubled after loss_scale_window steps without."""
    loss_scale_window: Count = 1000
    """[steps] fp16: steps without overflow after which the loss scale is doubled."""
    min_loss_scale: Positive = 1.0
    """[1] fp16: an overflow at this loss scale ends the run."""
    reduce_precision: Literal["fp32", "16-bit"] = "fp32"
    """Number format in which gradients cross ranks under bf16 or fp16: 16-bit is the compute format, halves the bytes,
    and rounds."""
    gradient_clip: Annotated[NotNegative, WHILE_RUNNING] = 1.0
    """[gradient norm] Gradients with a larger global norm are scaled down to it. 0: off."""
    log_every: Annotated[Count, MAY_CHANGE, WHILE_RUNNING] = 10
    """[steps] Steps between progress lines. metrics.jsonl has every step."""
    evaluate_every: Annotated[CountOrZero | None, MAY_CHANGE, WHILE_RUNNING] = None
    """[steps] Steps between evaluations on the validation part; the last step is evaluated too. 0: never. Unset: 500,
    where there is a validation part."""
    evaluate_at_start: Annotated[bool, MAY_CHANGE] = False
    """Evaluate before step 1 too: where a run starts from, and whether evaluation works before hours have passed. Its
    numbers are in events.jsonl."""
    evaluate_samples: Annotated[Size, MAY_CHANGE, WHILE_RUNNING] = 256
    """[samples] At most this many validation samples are read in an evaluation, always the same ones. Of data.blend,
    those of each data set are read once more, for a loss of its own."""
    threads: Annotated[CountOrZero, MAY_CHANGE] = 0
    """[threads] CPU threads of a rank. 0: what OMP_NUM_THREADS says, else the machine's cores, or as many as
    a control group gives the time of, shared evenly by its ranks. torchrun sets OMP_NUM_THREADS to 1 for several ranks
    by itself: there, 1 counts as unset."""
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = "auto"
    """Where to compute. auto: cuda where there is a GPU for each rank, else cpu."""
    products: Annotated[Literal["auto", "blas", "onednn", "native", "compiled"], MAY_CHANGE] = "auto"
    """What multiplies matrices on a CPU. auto: of each kind of product what is fastest on this processor, measured at
    the start and kept when the run goes on there; blas and onednn: always that library, in fp32 (bf16 and fp16 are
    widened); native: bf16 or fp16 as they are; compiled: so too, and fp32, attention and what 16 bits sum in fp32 by
    kernels that are compiled on this machine, which takes a C++ compiler. fp32 stays fp32 with each. On CUDA, and in
    fp64, there is no choice."""
    deterministic: Annotated[bool, MAY_CHANGE] = False
    """On CUDA, only kernels that add in a fixed order, so that a run that was stopped and goes on is equal to
    the bit to one that was not. Slower: attention's backward adds its parts one after the other. CPUs always do."""
    timeout: Annotated[Positive, MAY_CHANGE] = 1800.0
    """[seconds] A rank that waits longer for the others ends the run, and says who waits for whom, in which
    operation."""

    @property
    def evaluation_interval(self) -> int:
        """[steps] evaluate_every, or what stands in its place."""
        return EVALUATE_EVERY if self.evaluate_every is None else self.evaluate_every

    def num_microbatches(self, dp: int) -> int:
        """Micro-batches that each of dp ranks computes in one optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * dp)


class OptimConfig(Section):
    """The optimizer and its learning rate: a linear warm-up, then a decay to a floor."""

    name: Literal["adamw", "lamb"] = "adamw"
    """The optimizer: adamw is Adam with decoupled weight decay; lamb scales each weight's step to the weight's own
    norm, for very large batches."""
    learning_rate: Annotated[Positive, WHILE_RUNNING]
    """[1] The highest learning rate, reached at the end of the warm-up."""
    min_learning_rate: Annotated[NotNegative | None, WHILE_RUNNING] = None
    """[1] The floor: the learning rate at the end of the decay and after it. Unset: a tenth of learning_rate."""
    warmup_steps: CountOrZero | None = None
    """[steps] The learning rate rises from 0 in a straight line over these steps. Unset: 100, or decay_steps where that
    is set to less."""
    warmup_tokens: CountOrZero | None = None
    """[tokens] The warm-up in tokens in the place of steps: the first step by which so many are used up ends it."""
    decay_start: Annotated[CountOrZero | None, MAY_CHANGE, WHILE_RUNNING] = None
    """[steps] The learning rate stays at its highest up to this step, and decays then (warm-up, stable, decay). Unset:
    the decay begins with the end of the warm-up."""
    decay_start_tokens: Annotated[CountOrZero | None, MAY_CHANGE, WHILE_RUNNING] = None
    """[tokens] The same in tokens."""
    decay_steps: Annotated[Count | None, WHILE_RUNNING] = None
    """[steps] The step at which the decay ends, counted from the start of the run. Unset: train.steps; set it if the
    run may be lengthened later."""
    decay_tokens: Annotated[Count | None, WHILE_RUNNING] = None
    """[tokens] The end of the decay in tokens in the place of steps."""
    decay: Annotated[Literal["cosine", "linear", "constant"], WHILE_RUNNING] = "cosine"
    """The curve from learning_rate down to min_learning_rate. constant: none, learning_rate is kept."""
    rewarm_at: Annotated[CountOrZero | None, MAY_CHANGE, WHILE_RUNNING] = None
    """[steps] Behind this step the learning rate rises once more, from min_learning_rate to learning_rate, and decays
    again: for a run that goes on with more data after its decay."""
    rewarm_steps: Annotated[Count, MAY_CHANGE, WHILE_RUNNING] = 100
    """[steps] How long that rise takes."""
    weight_decay: Annotated[NotNegative, WHILE_RUNNING] = 0.1
    """[1] Each step weights shrink by learning_rate × weight_decay; biases and normalisations do not."""
    beta1: Fraction = 0.9
    """[1] Decay of the running mean of gradients."""
    beta2: Fraction = 0.95
    """[1] Decay of the running mean of squared gradients. 0.999 averages over a thousand steps, and answers late
    where gradients grow."""
    epsilon: Positive = 1e-8
    """[gradient] Added to the denominator of each update."""

    @property
    def floor(self) -> float:
        """min_learning_rate, or a tenth of learning_rate."""
        return self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate

    @property
    def warmup(self) -> int:
        """warmup_steps, or what stands in its place."""
        if self.warmup_steps is not None or self.warmup_tokens is not None:
            return self.warmup_steps or 0
        return WARMUP_STEPS if self.decay_steps is None else min(WARMUP_STEPS, self.decay_steps)

    def decay_end(self, steps: int) -> int:
        """The step at which the decay ends in a run of `steps`."""
        return steps if self.decay_steps is None else self.decay_steps


class DivergenceConfig(Section):
    """When a run counts as diverged, and what it does then."""

    MAY_CHANGE: ClassVar[bool] = True

    then: Annotated[Literal["stop", "roll_back"], WHILE_RUNNING] = "stop"
    """What a run does that has diverged: stop ends it with an explanation; roll_back returns to the newest healthy
    checkpoint, does there what the keys below say, and goes on by itself."""
    spike: Annotated[NotNegative, WHILE_RUNNING] = 0.0
    """[deviations] A loss counts as a sign where it exceeds the median of the last `window` losses by more than so many
    of their standard deviations (estimated by the median absolute deviation, and 1 % of the median at least). 10 is
    common. 0: only a loss or gradient that is not finite counts."""
    window: Size = 100
    """[steps] Losses from which a spike is told. Until there are so many, none is."""
    patience: Annotated[Size, WHILE_RUNNING] = 5
    """[steps] So many signs in a row are a divergence; single ones, which training passes by itself, are not."""
    healthy_for: Annotated[CountOrZero, WHILE_RUNNING] = 20
    """[steps] A checkpoint counts as healthy if at least so many steps without a sign followed it: what ends in a spike
    may have begun earlier."""
    growth: Positive | None = None
    """[factor] A thermometer (the largest attention logit or value of the residual stream of a block) is a sign where
    it stays more than so many times as large as growth_steps before. 4 finds slow growth that the loss does not show
    yet. Unset: thermometers are no signs. Needs thermometers.every."""
    growth_steps: Annotated[int, Ge(8), Le(MOST)] = 2000
    """[steps] Over which a thermometer is compared with itself; an eighth of it is how long it has to stay."""
    growth_after: CountOrZero = 2000
    """[steps] Up to here thermometers are no signs: in the beginning of a run everything grows."""
    skip_batches: bool = True
    """Pass over the batches between the checkpoint and the divergence, and go on with those behind them."""
    rate_factor: Annotated[float, Gt(0), Lt(1)] | None = None
    """[1] The learning rate is multiplied with it after a rollback, and once more for each further try. Unset: it is
    not lowered."""
    rate_steps: CountOrZero = 0
    """[steps] How long after the step of the divergence the rate stays lowered."""
    rewarm_steps: CountOrZero = 0
    """[steps] Behind a rollback the learning rate rises again from 0 in a straight line over so many steps."""
    tries: Count = 3
    """[rollbacks] From about the same place. A run that diverges once more ends."""


class RunConfig(Section):
    """Where a run writes."""

    MAY_CHANGE: ClassVar[bool] = True

    folder: Text
    """Folder of the run, made when missing, relative to the current folder: configuration, metrics, checkpoints."""
    time_limit: Positive | None = None
    """[seconds] The run ends after the first step that ends later than this, counted from before its first step, with
    everything saved and exit status 99. Where `train` starts ranks again, time goes on; torchrun begins anew. Leave
    room for a step and a save before the limit of a batch system."""
    heartbeat: Annotated[NotNegative, WHILE_RUNNING] = 0.0
    """[seconds] heartbeat.json in the run's folder is written anew after a step, when the last one is so old: step and
    time, for whoever watches from outside. 0: it is not written."""
    slow_ranks_every: CountOrZero = 100
    """[steps] After so many steps, ranks that do the same work are compared, and slow ones named. 0: never."""
    slow_ranks_factor: Annotated[float, Gt(1)] = 1.5
    """[factor] A rank is slow that computes so many times as long as the median of the others that do the same work."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too. Needs the extra `track`."""


class Config(Section):
    """One run: the whole of what `colonnade train` reads. A field is a section of the TOML file."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    train: TrainConfig
    optim: OptimConfig
    parts: PartsConfig = PartsConfig()
    lora: LoraConfig = LoraConfig()
    preferences: PreferencesConfig = PreferencesConfig()
    distillation: DistillationConfig = DistillationConfig()
    divergence: DivergenceConfig = DivergenceConfig()
    thermometers: ThermometersConfig = ThermometersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    restarts: RestartsConfig = RestartsConfig()
    run: RunConfig
    tracking: TrackingConfig = TrackingConfig()
