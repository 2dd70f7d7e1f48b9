"""Shared by the interop tests: one thread, no progress bars, a small model of every variant."""

from __future__ import annotations

import pytest
import torch
from transformers.utils import logging

import satlens
from satlens.data.tokenizers import train_bpe

SIZES = {
    "n_layers": 3,
    "d_model": 16,
    "n_heads": 4,
    "n_key_value_heads": 2,
    "d_head": 6,
    "d_mlp": 20,
    "d_vocab": 29,
    "n_ctx": 32,
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _no_progress_bars():
    logging.disable_progress_bar()


@pytest.fixture
def build():
    """A variant in eval mode with every parameter moved off its start."""

    def make(name, **fields):
        model = satlens.build(name, **{**SIZES, **fields}).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.dtype), alpha=0.2)
        return model

    return make


@pytest.fixture
def tokens():
    return torch.randint(0, SIZES["d_vocab"], (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def tokenizer():
    return train_bpe(["the cat sat on the mat", "a dog barked at the cat"], 260)
