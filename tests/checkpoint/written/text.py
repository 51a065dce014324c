"""The text that the checkpoints beside this file were trained on, to standard output."""

import random

TEXT = "the a ship sea captain saw went old white whale night morning boat men said and of to in wind"

words, draws = TEXT.split(), random.Random(7)
for _ in range(60):
    print(" ".join(draws.choice(words) for _ in range(draws.randint(5, 30))) + ".\n")
