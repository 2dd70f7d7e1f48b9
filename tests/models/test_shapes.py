"""The shapes in the models' signatures are checked while tests run."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from satlens.models.streams.mixing import mix


def test_a_wrong_shape_is_refused_at_the_signature():
    sources = [torch.ones(2, 3, 4)] * 2
    assert mix(sources, torch.ones(2, 2, 3, 1)).shape == (2, 3, 4)
    with pytest.raises(TypeCheckError):
        mix(sources, torch.ones(2, 2, 5, 1))
