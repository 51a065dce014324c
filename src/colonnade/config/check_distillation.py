"""What [distillation] goes with. Pure."""

from collections.abc import Iterator

from colonnade.config.distillation import DistillationConfig
from colonnade.config.schema import Config

KINDS = ("gpt", "bert")


def teacher_is_of_use(config: Config) -> Iterator[str]:
    """A teacher says which token is likely, to a model that tells tokens."""
    chosen, model = config.distillation, config.model
    if chosen.teacher is None:
        if chosen != DistillationConfig():
            yield "[distillation] has no effect without distillation.teacher. Name a teacher, or leave the section out."
        return
    if model.kind not in KINDS or model.head != "pretraining":
        yield (
            f'distillation.teacher is set, and model.kind = "{model.kind}" with model.head = "{model.head}" is not '
            'taught by one: that takes a gpt or a bert with model.head = "pretraining". Leave [distillation] out.'
        )
    if chosen.alpha == 0.0:
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


DISTILLATION_CHECKS = (
    (
        (
            "model.kind",
            "model.head",
            "model.vocab_size",
            "curriculum.tokens",
            *(f"distillation.{key}" for key in DistillationConfig.model_fields),
        ),
        teacher_is_of_use,
    ),
)
