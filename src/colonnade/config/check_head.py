"""What [model] says of a head beside that of pre-training. Pure."""

from collections.abc import Iterator

from colonnade.config.schema import Config, MaskingConfig

Messages = Iterator[str]
FEWEST = {"classification": 1, "choice": 2}


def labels_of_the_head(config: Config) -> Messages:
    """A head with labels says how many, and another head has none."""
    model = config.model
    if model.kind != "bert":
        return
    fewest = FEWEST.get(model.head)
    if fewest is None and model.num_labels is not None:
        yield (
            f'model.num_labels = {model.num_labels} has no effect with model.head = "{model.head}". Leave it out, or '
            f"set model.head to {' or '.join(FEWEST)}."
        )
    if fewest is not None and (model.num_labels or 0) < fewest:
        now = "unset" if model.num_labels is None else model.num_labels
        yield (
            f'model.num_labels is {now}, and model.head = "{model.head}" needs {fewest} or more: the labels to tell '
            "apart (1: a score), or the texts to choose from. MNLI has 3 labels, RACE 4 texts."
        )


def masking_of_pretraining(config: Config) -> Messages:
    """[data.masking] says how texts are made for pre-training."""
    if config.model.kind == "bert" and config.model.head != "pretraining" and config.data.masking != MaskingConfig():
        yield (
            f'[data.masking] has no effect with model.head = "{config.model.head}", whose samples are examples as they '
            "are. Leave it out."
        )


HEAD_CHECKS = (
    (("model.kind", "model.head", "model.num_labels"), labels_of_the_head),
    (
        ("model.kind", "model.head", *(f"data.masking.{key}" for key in MaskingConfig.model_fields)),
        masking_of_pretraining,
    ),
)
