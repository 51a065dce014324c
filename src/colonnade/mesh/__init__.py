"""Which rank is where, and what crosses ranks: every byte that does is named and counted here."""
