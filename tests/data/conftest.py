"""A small prepared corpus, made once."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from satlens.data.dataset import PreparedDataset
from satlens.data.prepare import prepare

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "that",
    "is",
    "was",
    "he",
    "for",
    "it",
    "with",
    "as",
    "his",
    "on",
    "be",
    "at",
    "by",
    "I",
    "this",
    "had",
    "not",
    "are",
    "but",
    "from",
    "river",
    "mountain",
    "cold",
    "walked",
    "slowly",
    "quickly",
    "red",
    "house",
    "letter",
    "Senate",
    "war",
    "peace",
    "treaty",
    "gold",
    "1848",
    "café",
    "“quoted”",
    "—",
    "emoji😀",
    "naïve",
    "日本",
    "don't",
    "we've",
]


def make_text(generator: random.Random, n_words: int) -> str:
    words = [generator.choice(WORDS) for _ in range(n_words)]
    for k in range(9, len(words), 10):
        words[k] += ".\n\n" if generator.random() < 0.3 else "."
    return " ".join(words)


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents of 1 to 300 words; ids carry their cluster."""
    generator = random.Random(7)
    path = tmp_path_factory.mktemp("corpus") / "small.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        for k in range(60):
            record = {
                "id": f"book{k % 5}-{k:04d}",
                "text": make_text(generator, generator.randint(1, 300)),
                "cluster": f"author{k % 3}",
            }
            stream.write(json.dumps(record, ensure_ascii=k % 2 == 0) + "\n")
    return path


@pytest.fixture(scope="session")
def prepared(jsonl: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return prepare(jsonl, tmp_path_factory.mktemp("prepared") / "small", vocab_size=400)


@pytest.fixture(scope="module")
def without_fsync() -> Iterator[None]:
    """Not waiting for the disk: what tests kill is a process, not a machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
