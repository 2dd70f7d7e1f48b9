"""The plain formulations that benchmarks time against compute the same, gradients included."""

from __future__ import annotations

import pytest
import streams
from plain import PLAIN, plain_model
from straight_line import random_model, random_tokens

from satlens.analysis.efficiency import saved_bytes

CASES = [
    ("denseformer", {}),
    ("denseformer", {"dilation": 2, "period": 2}),
    ("muddformer", {"shared_first_norm": True, "expand_last": True, "round64": True}),
    ("muddformer-prepost", {}),
    ("hyperconnections", {"n_streams": 3}),
    ("hyperconnections", {"norm": "layer", "tanh": False}),
    ("hyperconnections-static", {}),
    ("delta-attnres", {"block_size": 2}),
    ("delta-attnres-full", {}),
]


def test_every_case_has_its_kind():
    kinds = {random_model(name, **fields).cfg.stream.kind for name, fields in CASES}
    assert kinds == set(PLAIN)


@pytest.mark.parametrize(("name", "fields"), CASES, ids=str)
def test_plain_is_ours(name, fields):
    ours = random_model(name, value_residual="satformer", qk_norm=True, n_layers=4, **fields)
    plain = plain_model(ours.cfg).double()
    assert type(plain.blocks[0]) is not type(ours.blocks[0])
    plain.load_state_dict(ours.state_dict())
    tokens, found = random_tokens(), {}
    for form, model in (("ours", ours), ("plain", plain)):
        logits, loss = model(tokens, return_type="both")
        loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters()}
        found[form] = {"logits": logits.detach(), **gradients}
    assert found["ours"].keys() == found["plain"].keys()
    for key, value in found["plain"].items():
        mine = found["ours"][key]
        if value is None or mine is None:
            left = mine if value is None else value
            assert left is None or not left.any(), key
        else:
            assert (mine - value).abs().max() < 1e-11, key


def test_ours_saves_less():
    """The benchmark's arms: what a training step keeps for its backward pass."""
    sizes = {"d_model": 64, "n_layers": 4, "n_ctx": 64, "d_vocab": 64}
    arms = streams.make_arms(list(streams.VARIANTS), batch_size=2, **sizes)
    saved = {row: saved_bytes(arm.model, arm.loss) for row, arm in arms.items()}
    for variant in streams.VARIANTS:
        assert saved[variant] <= saved[streams.plain_name(variant)], variant


def test_the_benchmark_prints_a_row_a_variant(capsys):
    streams.main(["delta-attnres"], d_model=32, n_layers=2, n_ctx=16, batch_size=1, rounds=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["transformer (again)", "delta-attnres"]
    assert "speed / plain" in lines[0] and "saved / plain" in lines[0]
