"""What [model] says of a head beside that of pre-training. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from colonnade.config.preferences import PreferencesConfig
from colonnade.config.schema import Config, MaskingConfig

Messages = Iterator[str]
TEXT_KEYS = ("documents", "packing", "no_loss_on", "too_long", "loss_on")
"""Keys of [data] about text that goes on."""
FEWEST = {"classification": 1, "choice": 2}


def nothing_to_train(content: Mapping[str, Any]) -> Messages:
    """A run has a loss. Of a configuration as it is written: a checkpoint may have an encoder alone."""
    model = content.get("model")
    chosen = model.get("head") if isinstance(model, Mapping) else None
    if chosen == "none":
        yield (
            'model.head = "none" is an encoder that makes vectors of texts: it has no loss to train with. Set '
            'model.head to "pretraining", "classification", "choice" or "spans"; train.init_from takes its weights.'
        )


def labels_of_the_head(config: Config) -> Messages:
    """A head with labels says how many, and another head has none."""
    model = config.model
    if model.kind != "bert":
        if model.kind == "gpt" and model.head not in ("pretraining", "preferences"):
            yield f'model.head = "{model.head}" is for model.kind = "bert". Use "pretraining" or "preferences".'
        return
    if model.head == "preferences":
        yield 'model.head = "preferences" is for model.kind = "gpt", which writes answers. Leave it out.'
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


def questions_of_spans(config: Config) -> Messages:
    """Questions are answered by a head that can, when a run is evaluated."""
    if config.data.questions is None:
        return
    if config.model.head != "spans":
        yield (
            f'data.questions = "{config.data.questions}" has no effect with model.head = "{config.model.head}", which '
            "answers none. Leave it out."
        )
    elif config.train.evaluate_every == 0:
        yield (
            f'data.questions = "{config.data.questions}" has no effect with train.evaluate_every = 0: nothing is '
            "evaluated. Leave it out, or set evaluate_every."
        )


def masking_of_pretraining(config: Config) -> Messages:
    """[data.masking] says how texts are made for pre-training."""
    if config.model.kind == "bert" and config.model.head != "pretraining" and config.data.masking != MaskingConfig():
        yield (
            f'[data.masking] has no effect with model.head = "{config.model.head}", whose samples are examples as they '
            "are. Leave it out."
        )


def preferences_have_a_reference(config: Config) -> Messages:
    """Preferences are learned beside the weights that a run begins from, of pairs as they are."""
    wanted, chosen = config.model.head == "preferences", config.preferences
    if not wanted and chosen != PreferencesConfig():
        yield f'[preferences] has no effect with model.head = "{config.model.head}". Leave it out.'
    if not wanted:
        return
    if config.train.init_from is None:
        yield (
            'train.init_from is unset, and model.head = "preferences" holds the model to the weights that it names: '
            "without them nothing says what answers are likely. Name a model that was fine-tuned on conversations."
        )
    length = config.model.seq_length
    shorter = config.curriculum.other_than(length)
    if shorter is not None:
        yield (
            f"curriculum.seq_length has {shorter} beside model.seq_length = {length}, and model.head = "
            f'"preferences" has pairs of one length. Set all of curriculum.seq_length to {length}, so that batches '
            "alone grow."
        )
    for key in (*TEXT_KEYS,):
        if getattr(config.data, key) != type(config.data).model_fields[key].default:
            yield (
                f'data.{key} = {getattr(config.data, key)!r} has no effect with model.head = "preferences", whose '
                "samples are pairs of answers. Leave it out."
            )
    if chosen.loss == "ipo" and chosen.label_smoothing:
        yield (
            f'preferences.label_smoothing = {chosen.label_smoothing} has no effect with preferences.loss = "ipo". '
            "Leave it out."
        )


HEAD_CHECKS = (
    (
        (
            "model.head",
            "train.init_from",
            "model.seq_length",
            "curriculum.seq_length",
            *(f"preferences.{key}" for key in PreferencesConfig.model_fields),
            *(f"data.{key}" for key in TEXT_KEYS),
        ),
        preferences_have_a_reference,
    ),
    (("model.kind", "model.head", "model.num_labels"), labels_of_the_head),
    (
        ("model.kind", "model.head", *(f"data.masking.{key}" for key in MaskingConfig.model_fields)),
        masking_of_pretraining,
    ),
    (("model.head", "data.questions", "train.evaluate_every"), questions_of_spans),
)
