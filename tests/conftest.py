"""Settings of the whole suite."""

from hypothesis import settings

# A machine that is busy with something else is not a failure, so examples have no time limit of their own.
settings.register_profile("colonnade", deadline=None)
settings.load_profile("colonnade")
