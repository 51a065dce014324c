"""Which rank is where, what crosses ranks, and what is random: the only folder that talks to other processes."""
