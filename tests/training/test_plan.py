"""Dry runs: what is counted, and that estimates of memory are what a real pass allocates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_runs import model_config, train_config
from torch import Tensor

from satlens.config import ModelConfig
from satlens.errors import ConfigError
from satlens.models import loss as losses
from satlens.models.attention import attention
from satlens.models.decoder import Decoder
from satlens.models.layers import at_least_fp32, rope_table
from satlens.training import describe
from satlens.training.flops import flops_per_token
from satlens.training.memory import activation_bytes, state_bytes

SIZES = {"n_layers": 4, "d_model": 128, "n_heads": 2, "n_key_value_heads": 2, "n_ctx": 128}


def sized(name: str, d_vocab: int = 1024) -> ModelConfig:
    return model_config(name, **SIZES, d_vocab=d_vocab)


def allocated_by_a_real_pass(model: Decoder, rows: int) -> int:
    """Peak of what the allocator hands out beyond weights and gradients, seen by the profiler."""
    ids = torch.zeros(rows, model.cfg.n_ctx, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True) as profile:
        with attention("fused"), torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, "loss", targets=ids)
        loss.backward()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    alive = peak = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("transformer", False),
        ("transformer", True),
        ("satformer", False),
        ("rd-attnres", True),
        ("hyperconnections", False),
        ("muddformer-prepost", True),
    ],
)
def test_activations_are_those_of_a_real_pass(
    name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_gpu(logits: Tensor, targets: Tensor, per_token: bool) -> Tensor:
        return F.cross_entropy(at_least_fp32(logits), targets)

    monkeypatch.setattr(losses, "negative_log_likelihood", on_a_gpu)
    cfg = sized(name)
    model = Decoder(cfg, seed=0)
    model.gradient_checkpointing = checkpointing
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model(torch.zeros(1, 2, dtype=torch.int64), "loss").backward()  # what is made once
    real = allocated_by_a_real_pass(model, rows=8)
    assert activation_bytes(cfg, 8, checkpointing=checkpointing) == pytest.approx(real, rel=0.02)


def test_measuring_leaves_no_trace() -> None:
    cfg = sized("satformer")
    activation_bytes(cfg, 1)
    assert rope_table.cache_info().currsize == 0
    ids = torch.arange(32)[None]
    assert torch.isfinite(Decoder(cfg, seed=0)(ids)).all()


def test_activations_grow_with_rows_and_shrink_under_checkpointing() -> None:
    cfg = sized("satformer", d_vocab=64)
    two, four = (activation_bytes(cfg, rows) for rows in (2, 4))
    copies = 2 * Decoder(cfg).n_parameters()  # bf16 copies of weights do not grow
    assert two < four < 2 * two
    assert 2 * two - four <= copies
    assert activation_bytes(cfg, 4, checkpointing=True) < four / 2


def test_state_is_whole_under_ddp_and_shared_out_under_fsdp() -> None:
    model = Decoder(sized("transformer"), seed=None)
    n = model.n_parameters()
    ddp, fsdp = (train_config(grad_accum=8, strategy=kind) for kind in ("ddp", "fsdp"))
    assert state_bytes(model, ddp) == state_bytes(model, fsdp) == (16 * n, 0)
    assert state_bytes(model, ddp, 8) == (16 * n, 0)
    assert state_bytes(model, ddp, 4) == (16 * n, 4 * n)
    state, gathered = state_bytes(model, fsdp, 4)
    assert state == 4 * n
    block = sum(p.numel() for p in model.blocks[0].parameters())
    assert gathered == 8 * (n - 2 * block)  # two of four blocks at work


def test_facts_follow_from_the_configs() -> None:
    cfg, recipe = model_config("satformer"), train_config(20, grad_accum=4, warmup=0.1)
    facts = describe(cfg, recipe, processes=4, gpu="A100", mfu=0.5)
    assert facts["flops"] == flops_per_token(cfg) * facts["tokens"]
    assert (facts["n_steps"], facts["warmup_steps"]) == (20, 2)
    assert facts["gpu_hours"] == pytest.approx(facts["flops"] / (312e12 * 0.5) / 3600)
    assert facts["hours"] == facts["gpu_hours"] / 4
    assert "activation_bytes" not in facts
    measured = describe(cfg, recipe, activations=True)
    parts = ("state_bytes", "gathered_bytes", "activation_bytes")
    assert measured["total_bytes"] == sum(measured[part] for part in parts)
    assert measured["other_activation_bytes"] != measured["activation_bytes"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes": 3}, "grad_accum: 3 processes do not share out 2 micro-batches"),
        ({"gpu": "H1000"}, "gpu: 'H1000' is none of A100, "),
        ({"mfu": 0.0}, r"mfu: must lie in \(0, 1\], got 0"),
        ({"mfu": 40.0}, r"mfu: must lie in \(0, 1\], got 40"),
    ],
)
def test_impossible_assumptions_are_one_line(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(model_config(), train_config(), **settings)
