"""Shared by the checkpoint tests: golden folders and a small model of every variant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import satlens
from satlens.data.tokenizers import train_bpe

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def golden():
    return GOLDEN


@pytest.fixture(scope="session")
def tokenizer():
    return train_bpe(["the cat sat on the mat", "a dog barked at the cat"], 260)


@pytest.fixture
def tiny(tokenizer):
    model = satlens.build("satformer", n_layers=3, d_model=16, n_heads=4, n_key_value_heads=2)
    model.tokenizer = tokenizer
    return model


@pytest.fixture
def folder(tiny, tmp_path):
    """A saved checkpoint of our own layout."""
    return satlens.save(tiny, tmp_path / "final", training={"steps": 3, "tokens": 48})
