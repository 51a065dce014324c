"""Colonnade's GPT samples of one token file: `benchmarks.samples_start` starts it as a process of its own."""

from collections.abc import Sequence

from benchmarks.peers.sample_stopwatch import VOCABULARY, measure, read_line
from colonnade.data.datasets import Dataset, open_datasets
from colonnade.data.gpt_dataset import TextSamples
from colonnade.data.loader import Batch
from colonnade.tasks.gpt import LanguageModeling


def main() -> None:
    line = read_line()

    def open_data() -> Dataset:
        data = open_datasets(
            samples=TextSamples(),
            train=line.prefix,
            split=(29, 1, 0),
            seq_length=line.seq_length,
            vocab_size=VOCABULARY,
            seed=1,
        )
        return data.train

    def get_batch(data: Dataset, positions: Sequence[int]) -> Batch:
        return LanguageModeling().batch(data.rows(positions), positions)

    measure(line, open_data, lambda data, index: get_batch(data, [index]), get_batch)


if __name__ == "__main__":
    main()
