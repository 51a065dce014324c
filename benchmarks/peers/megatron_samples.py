"""megatron.core.datasets' GPT samples of one token file: `benchmarks.samples_start` starts it as a process of its own.

    python -m benchmarks.peers.megatron_samples PREFIX --seq-length 1024 --samples 20000 --cache FOLDER

With an empty cache Megatron builds its three indices (documents, samples, shuffle) and writes them there; with a full
one it maps them.
"""

import logging
import warnings
from types import SimpleNamespace

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

from benchmarks.peers.sample_stopwatch import END_OF_DOCUMENT, VOCABULARY, measure, read_line  # noqa: E402


def main() -> None:
    line = read_line()
    tokenizer = SimpleNamespace(
        vocab_size=VOCABULARY, eod=END_OF_DOCUMENT, pad=-1, unique_identifiers={"class": "numbers"}
    )
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=line.seq_length,
        blend=([line.prefix], None),
        split="29,1,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=tokenizer,
        path_to_cache=line.cache,
    )

    def open_data() -> GPTDataset:
        """An epoch of training samples, and what is left for validation."""
        return BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()[0]

    measure(
        line,
        open_data,
        lambda data, index: data[index],
        lambda data, indices: default_collate([data[index] for index in indices]),
    )


if __name__ == "__main__":
    main()
