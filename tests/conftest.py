"""Settings of the whole suite."""

import torch
from hypothesis import settings

# A machine that is busy with something else is not a failure, so examples have no time limit of their own.
settings.register_profile("colonnade", deadline=None)
settings.load_profile("colonnade")

# One thread: tensors here are tiny, and threads that wait for a core of a busy machine cost more than they bring.
torch.set_num_threads(1)
