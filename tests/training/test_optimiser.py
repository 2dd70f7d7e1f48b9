from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from satlens.config import TrainConfig
from satlens.models.build import build
from satlens.training.monitors import Counters
from satlens.training.optimiser import (
    ADAM_EPS,
    clip_gradients,
    decay_groups,
    learning_rate,
    make_optimiser,
)

VARIANTS = ["transformer", "resformer", "resformer-learnable", "satformer", "attnres", "rd-attnres"]


def test_cosine_values_match_the_closed_form() -> None:
    cfg = TrainConfig(lr=2.0, warmup=0.1, min_lr_ratio=0.1)
    rates = [learning_rate(step, 100, cfg) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * k for k in range(1, 11)])
    # (t - W) / (N - W) is 1/3, 1/2, 2/3 and 1 at t = 40, 55, 70, 100.
    assert rates[39] == pytest.approx(2.0 * (0.1 + 0.9 * 0.75))
    assert rates[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[69] == pytest.approx(2.0 * (0.1 + 0.9 * 0.25))
    assert rates[99] == pytest.approx(0.2)


def test_wsd_holds_the_peak_and_falls_linearly_over_the_last_fifth() -> None:
    cfg = TrainConfig(lr=1.0, warmup=0.05, min_lr_ratio=0.0, schedule="wsd")
    rates = [learning_rate(step, 100, cfg) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(rates[4:80]) == {1.0}
    assert rates[80:] == pytest.approx([1 - k / 20 for k in range(1, 21)], abs=1e-12)


@given(
    n=st.integers(1, 300),
    warmup=st.floats(0, 0.99),
    floor=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "wsd"]),
)
def test_schedules_rise_to_the_peak_then_fall_to_the_floor(
    n: int, warmup: float, floor: float, schedule: str
) -> None:
    cfg = TrainConfig(lr=1.0, warmup=warmup, min_lr_ratio=floor, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(step, n, cfg) for step in range(n)]
    top = max(round(warmup * n) - 1, 0)
    assert all(a <= b for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[top:]))
    assert max(rates) <= 1 + 1e-12
    warm_only, no_decay = round(warmup * n) == n, schedule == "wsd" and round(n / 5) == 0
    if not warm_only and not no_decay:
        assert rates[-1] == pytest.approx(floor, abs=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_decay_groups_hold_every_parameter_once_and_only_matrices_decay(name: str) -> None:
    model = build(name, n_layers=3, d_model=32, qk_norm=True, qkv_bias=True)
    groups = decay_groups(model, TrainConfig())
    names = [n for group in groups.values() for n, _ in group]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    endings = ("embed.weight", "qkv.weight", ".o.weight", "gate_up.weight", "down.weight")
    for n, _ in groups["decay"]:
        assert n.endswith(endings), n
    for n, _ in groups["no_decay"]:
        assert not n.endswith(endings), n


def test_no_decay_is_what_the_recipe_lists() -> None:
    model = build("rd-attnres", value_residual="satformer", n_layers=3, d_model=32)
    routes = {n for n, _ in decay_groups(model, TrainConfig(no_decay=("routes",)))["no_decay"]}
    assert routes == {n for n, _ in model.named_parameters() if "_read." in n}
    assert not decay_groups(model, TrainConfig(no_decay=()))["no_decay"]
    optimiser = make_optimiser(model, TrainConfig(no_decay=("routes",), weight_decay=0.3))
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.3, 0.0]


def test_decay_reaches_exactly_the_decaying_group() -> None:
    model = build("satformer", n_layers=2, d_model=32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    cfg = TrainConfig(lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    make_optimiser(model, cfg).step()
    decaying = {n for n, _ in decay_groups(model, cfg)["decay"]}
    for n, p in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if n in decaying else 1.0
        torch.testing.assert_close(p.detach(), before[n] * factor)


@pytest.mark.parametrize("limit", [None, 1e3, 1.0])
def test_a_step_is_that_of_torchs_clipping(limit: float | None) -> None:
    """The norm is that before clipping; the step, AdamW's on gradients that torch has clipped."""
    ours, theirs = (build("transformer", n_layers=1, d_model=32) for _ in range(2))
    cfg = TrainConfig(weight_decay=0.0)
    for model in (ours, theirs):
        generator = torch.Generator().manual_seed(0)
        for parameter in list(model.parameters())[:4]:
            parameter.grad = 0.1 * torch.randn(parameter.shape, generator=generator)
    optimiser = make_optimiser(ours, cfg)
    norm = clip_gradients(optimiser, ours.parameters(), limit)
    plain = torch.optim.AdamW(theirs.parameters(), cfg.lr, cfg.betas, ADAM_EPS, 0.0, fused=False)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit or math.inf)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for each in (optimiser, plain):
        each.step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7, msg=name)
        if mine in optimiser.state:
            moments = optimiser.state[mine]["exp_avg_sq"], plain.state[other]["exp_avg_sq"]
            torch.testing.assert_close(*moments, rtol=1e-5, atol=1e-12, msg=name)


def test_a_blocked_update_changes_neither_weights_nor_moments() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimiser = torch.optim.AdamW([weight], lr=0.1, fused=True)
    counters = Counters(torch.device("cpu"), "skip")

    def step(number: int, grad: float) -> None:
        weight.grad = torch.full((3,), grad)
        counters.add(number, torch.tensor(1.0), weight.grad.norm())
        optimiser.found_inf = counters.blocked  # type: ignore[attr-defined]
        optimiser.step()

    step(0, 1.0)
    weights = weight.detach().clone()
    state = {key: value.clone() for key, value in optimiser.state[weight].items()}
    step(1, float("nan"))
    assert torch.equal(weight, weights)
    for key, value in optimiser.state[weight].items():
        assert torch.equal(value, state[key]), key
    step(2, 1.0)
    assert not torch.equal(weight, weights)
    line = counters.drain()
    assert line["skipped_steps"] == 1
    assert line["loss"] == 1.0
