"""A small prepared corpus, and one thread so that runs repeat to the bit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
import torch

from satlens.data.dataset import PreparedDataset
from satlens.data.prepare import prepare


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """40 documents of 20 to 200 words, where every word decides which three may follow it."""
    generator = random.Random(11)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(60)]
    folder = tmp_path_factory.mktemp("training-corpus")
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as stream:
        for k in range(40):
            place, text = generator.randrange(60), []
            for _ in range(generator.randint(20, 200)):
                text.append(words[place])
                place = (7 * place + generator.randrange(3)) % 60
            stream.write(json.dumps({"id": f"doc-{k:03d}", "text": " ".join(text)}) + "\n")
    return prepare(folder / "corpus.jsonl", folder / "prepared", vocab_size=300)
