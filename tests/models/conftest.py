"""Shared by the model tests: one thread, for predictable times; passes without shape checks."""

from __future__ import annotations

import jaxtyping
import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _as_outside_tests():
    """Run-time shape checks cannot be compiled, and forestall the model's own."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
