"""What [distillation] goes with. Pure."""

from collections.abc import Iterator

from colonnade.config.distillation import DistillationConfig
from colonnade.config.schema import Config

KINDS, LABELS = ("gpt", "bert"), ("classification", "choice")


def teacher_is_of_use(config: Config) -> Iterator[str]:
    """A teacher says which token is likely, to a model that tells tokens."""
    chosen, model = config.distillation, config.model
    if chosen.teacher is None:
        if chosen != DistillationConfig():
            yield "[distillation] has no effect without distillation.teacher. Name a teacher, or leave the section out."
        return
    labelled = model.kind == "bert" and model.head in LABELS
    if not labelled and (model.kind not in KINDS or model.head != "pretraining"):
        yield (
            f'distillation.teacher is set, and model.kind = "{model.kind}" with model.head = "{model.head}" is not '
            'taught by one: that takes a gpt or a bert with model.head = "pretraining", or a bert with '
            '"classification" or "choice". Leave [distillation] out.'
        )
    if labelled and model.head == "classification" and model.num_labels == 1:
        yield (
            "distillation.teacher is set, and model.num_labels = 1 is a score, which has no probability to learn from. "
            "Use a head with labels, or leave [distillation] out."
        )
    if labelled and chosen.top_k is not None:
        yield (
            f'distillation.top_k = {chosen.top_k} is of tokens, and model.head = "{model.head}" has none. Leave it '
            "out: the teacher runs beside the student."
        )
    if chosen.alpha == 0.0 and not chosen.student_layers:
        yield "distillation.alpha = 0 leaves the teacher out. Use more than 0, or leave [distillation] out."
    if chosen.store is not None and chosen.top_k is None:
        yield (
            f'distillation.store = "{chosen.store}" has no effect without distillation.top_k, as a teacher that runs '
            "beside the student stores nothing. Leave it out, or set top_k."
        )
    if chosen.top_k is not None and config.curriculum.tokens:
        yield (
            f"distillation.top_k = {chosen.top_k} does not go with curriculum.tokens, whose samples have several "
            "lengths. Leave top_k out, so that the teacher runs beside the student, or the curriculum."
        )
    if chosen.top_k is not None and model.vocab_size is not None and chosen.top_k > model.vocab_size:
        yield (
            f"distillation.top_k = {chosen.top_k} is more than the vocabulary's {model.vocab_size:,} tokens. Use "
            "fewer; 16 to 128 are usual."
        )


def layers_are_matched(config: Config) -> Iterator[str]:
    """Hidden states are compared pair by pair, between models that run side by side."""
    chosen, model = config.distillation, config.model
    mine, theirs = list(chosen.student_layers), list(chosen.teacher_layers)
    if chosen.teacher is None:
        return
    if len(mine) != len(theirs):
        yield (
            f"distillation.student_layers = {mine} and distillation.teacher_layers = {theirs} are to be compared in "
            "pairs: give as many of the one as of the other."
        )
    if not mine and not theirs:
        if (chosen.hidden_weight, chosen.teacher_hidden_size) != (1.0, None):
            yield (
                "distillation.hidden_weight and distillation.teacher_hidden_size have no effect without "
                "distillation.student_layers. Name layers, or leave them out."
            )
        return
    if model.kind != "bert":
        yield (
            f'distillation.student_layers = {mine}, and model.kind = "{model.kind}": hidden states are those of a '
            "bert. Leave both lists of layers out."
        )
    if len(set(mine)) < len(mine):
        yield (
            f"distillation.student_layers = {mine} names a layer twice: each can be like one layer alone. Name it once."
        )
    if any(layer >= model.num_layers for layer in mine):
        yield (
            f"distillation.student_layers = {mine}, and the student's layers are 0 … {model.num_layers - 1} "
            f"(model.num_layers = {model.num_layers}). Use these."
        )
    if chosen.top_k is not None:
        yield (
            f"distillation.top_k = {chosen.top_k} stores tokens, and distillation.student_layers = {mine} asks for "
            "hidden states. Leave top_k out, so that the teacher runs beside the student, or the layers."
        )


DISTILLATION_CHECKS = (
    (
        (
            "model.kind",
            "model.num_layers",
            *(
                f"distillation.{key}"
                for key in (
                    *("teacher", "student_layers", "teacher_layers"),
                    *("hidden_weight", "teacher_hidden_size", "top_k"),
                )
            ),
        ),
        layers_are_matched,
    ),
    (
        (
            "model.kind",
            "model.head",
            "model.num_labels",
            "model.vocab_size",
            "curriculum.tokens",
            *(f"distillation.{key}" for key in DistillationConfig.model_fields),
        ),
        teacher_is_of_use,
    ),
)
