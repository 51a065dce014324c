"""What a run that diverges could not do: checks of [divergence]. Pure."""

from collections.abc import Callable, Iterator

from colonnade.config.schema import Config
from colonnade.config.thermometers import GROWING

Messages = Iterator[str]


def something_changes(config: Config) -> Messages:
    """A run that returns does something else than before: what is computed is a function of the place."""
    policy = config.divergence
    same_rates = policy.rate_factor is None and not policy.rewarm_steps
    if policy.then == "roll_back" and not policy.skip_batches and same_rates:
        yield (
            'divergence.then = "roll_back" with skip_batches = false, no rate_factor and no rewarm_steps would go the '
            "same way again, to the same divergence. Set skip_batches = true, rewarm_steps, or a rate_factor with "
            "rate_steps."
        )
    if policy.rate_factor is not None and not policy.rate_steps:
        yield (
            f"divergence.rate_factor = {policy.rate_factor:g} has no effect with rate_steps = 0: say for how many "
            "steps behind the divergence the learning rate stays lowered."
        )


def a_healthy_checkpoint_is_kept(config: Config) -> Messages:
    """Whenever a run diverges, one of the checkpoints that are kept was followed by enough steps without a sign."""
    policy, saves = config.divergence, config.checkpoint
    if policy.then != "roll_back":
        return
    if not saves.every:
        yield (
            'divergence.then = "roll_back" has nothing to return to with checkpoint.every = 0, which saves at the end '
            "only. Set checkpoint.every."
        )
        return
    back, why = policy.healthy_for + policy.patience, "divergence.healthy_for + patience"
    told = f"{policy.healthy_for} + {policy.patience}"
    if policy.growth is not None and policy.growth_steps > policy.patience:
        back, why = policy.healthy_for + policy.growth_steps, "divergence.healthy_for + growth_steps"
        told = f"{policy.healthy_for} + {policy.growth_steps}"
    keep = -(-back // saves.every) + 1
    if saves.keep < keep:
        yield (
            f"checkpoint.keep = {saves.keep} checkpoints, one every {saves.every} steps: right after a save, none of "
            f"them is {why} = {told} = {back} steps old, "
            f"so that a run that diverges then has nowhere to return to. Set checkpoint.keep = {keep}, or lower "
            "divergence.healthy_for."
        )


def thermometers_show_growth(config: Config) -> Messages:
    """There are readings in each of the windows that are compared."""
    policy, every = config.divergence, config.thermometers.every
    if policy.growth is None:
        return
    if unseen := [site for site in GROWING if site not in config.thermometers.sites]:
        yield (
            f"divergence.growth = {policy.growth:g} watches {' and '.join(GROWING)}, and thermometers.sites leaves out "
            f"{' and '.join(unseen)}. Put {'it' if len(unseen) == 1 else 'them'} in, or leave divergence.growth unset."
        )
    if policy.growth <= 1.0:
        yield f"divergence.growth = {policy.growth:g} is no growth: it is a factor. Use 4, or any number above 1."
    if not every:
        yield (
            f"divergence.growth = {policy.growth:g} compares what thermometers show, and thermometers.every = 0: none "
            "is read. Set thermometers.every = 10, or leave divergence.growth unset."
        )
    elif every * 8 > policy.growth_steps:
        yield (
            f"thermometers.every = {every} is more than an eighth of divergence.growth_steps = {policy.growth_steps}: "
            f"there would be windows without a reading. Use at most {policy.growth_steps // 8}, or a growth_steps of "
            f"{every * 8}."
        )


DIVERGENCE_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Config], Messages]], ...] = (
    (
        (
            "divergence.then",
            "divergence.skip_batches",
            "divergence.rate_factor",
            "divergence.rate_steps",
            "divergence.rewarm_steps",
        ),
        something_changes,
    ),
    (
        (
            "divergence.then",
            "divergence.healthy_for",
            "divergence.patience",
            "divergence.growth",
            "divergence.growth_steps",
            "checkpoint.every",
            "checkpoint.keep",
        ),
        a_healthy_checkpoint_is_kept,
    ),
    (
        ("divergence.growth", "divergence.growth_steps", "thermometers.every", "thermometers.sites"),
        thermometers_show_growth,
    ),
)
