"""Every parameter of every variant learns, but for a closed list of dead ones."""

from __future__ import annotations

import re

import pytest
from straight_line import random_model, random_tokens

from satlens.models.presets import VARIANTS

COMPOSED = [
    (stream, values)
    for stream in ("rd-attnres", "denseformer", "muddformer", "hyperconnections", "delta-attnres")
    for values in ("satformer", "resformer")
]
# A softmax over one source is 1 whatever the weights; a control switches w^v off.
DEAD = {
    "attnres": r"blocks\.0\.attn_read\..*",
    "attnres-full": r"blocks\.0\.attn_read\..*",
    "delta-attnres": r"blocks\.0\.attn_read\..*",
    "delta-attnres-full": r"blocks\.0\.attn_read\..*",
    "rd-attnres": r"blocks\.0\.attn_read\..*",
    "rd-attnres-average": r"blocks\.0\.attn_read\..*",
    "rd-attnres-tied": r"blocks\.0\.attn_read\..*|blocks\.\d+\.attn_read\.query_v",
    "rd-attnres-frozen-v": r"blocks\.0\.attn_read\..*|blocks\.\d+\.attn_read\.query_v",
}


@pytest.mark.parametrize(("name", "values"), [*((n, None) for n in VARIANTS), *COMPOSED])
def test_one_step_reaches_every_parameter_but_the_dead_ones(name, values):
    parts = {} if values is None else {"value_residual": values}
    model = random_model(name, **parts)
    model(random_tokens(), "loss").backward()
    dead = {key for key, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())}
    pattern = DEAD.get(name, "nothing")
    assert dead == {key for key, _ in model.named_parameters() if re.fullmatch(pattern, key)}
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_the_list_of_dead_parameters_names_variants_that_exist():
    assert set(DEAD) <= set(VARIANTS)
