from __future__ import annotations

import math

import pytest
import torch
from small_runs import model_config, train_config

from satlens.data.dataset import PreparedDataset
from satlens.data.windows import Windows
from satlens.models.decoder import Decoder
from satlens.training.evaluation import evaluate, evaluation_slice


@pytest.fixture(scope="module")
def windows(dataset: PreparedDataset) -> Windows:
    return evaluation_slice(dataset, model_config(), train_config())


def moved(model: Decoder) -> Decoder:
    """The model away from its start, where gates and routes are not trivial."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def test_the_slice_keeps_to_its_budget_and_depends_on_nothing_else(
    dataset: PreparedDataset,
) -> None:
    for tokens in (40, 300, 900):
        first = evaluation_slice(dataset, model_config(), train_config(eval_tokens=tokens))
        assert 0.3 * tokens < first.n_tokens <= tokens
        other = evaluation_slice(
            dataset,
            model_config("rd-attnres", d_model=64),
            train_config(eval_tokens=tokens, seed=9, batch_size=1, grad_accum=1),
        )
        assert other.sha256 == first.sha256


def test_the_loss_is_the_mean_over_scored_tokens(windows: Windows) -> None:
    model = moved(Decoder(model_config(), seed=1))
    values = evaluate(model, windows, "fp32")
    total, count = 0.0, 0
    with torch.no_grad():
        for document in windows.documents:
            tokens = torch.from_numpy(document.tokens.astype("int64"))
            for start in range(0, len(tokens) - 1, 32):
                piece = tokens[start : start + 33]
                logits = model(piece[None, :-1])[0]
                picked = logits.log_softmax(-1).gather(1, piece[1:, None])
                total -= picked.double().sum().item()
                count += len(piece) - 1
    assert count == windows.n_tokens
    assert values["val_loss"] == pytest.approx(total / count, rel=1e-6)
    assert values == evaluate(model, windows, "fp32")


def test_gate_signals_equal_a_direct_count(windows: Windows) -> None:
    model = moved(Decoder(model_config("satformer"), seed=1))
    with torch.no_grad():
        # Head 1 of layer 2: both gate rows opposed, so one of the two heads is always closed.
        alpha = model.blocks[2].attn.values.alpha.weight
        alpha[1] = -alpha[0]
        model.blocks[1].attn.values.alpha.weight.zero_()
    values = evaluate(model, windows, "fp32")
    gates = {layer: [] for layer in (1, 2)}
    for batch in windows:
        _, cache = model.run_with_cache(batch.tokens, names_filter=lambda n: "v_gate" in n)
        for layer, found in gates.items():
            found.append(cache[f"blocks.{layer}.attn.hook_v_gate"][batch.valid])
    two = torch.cat(gates[2]).double()
    assert values["open_fraction/L2.attn.v"] == pytest.approx(0.5, abs=1e-12)
    assert values["gate_mean/L2.attn.v"] == pytest.approx(two.mean().item(), rel=1e-9)
    assert values["dead_heads/L2.attn.v"] == int((two > 0).sum(0).eq(0).sum())
    assert values["open_fraction/L1.attn.v"] == 0
    assert values["dead_heads/L1.attn.v"] == 2
    assert "open_fraction/L0.attn.v" not in values


def test_static_weights_are_reported_as_they_are(windows: Windows) -> None:
    model = Decoder(model_config("resformer-learnable"), seed=1)
    with torch.no_grad():
        model.blocks[2].attn.values.lambda1.fill_(0.25)
        model.blocks[2].attn.values.lambda2.fill_(-0.5)
    values = evaluate(model, windows, "fp32")
    assert values["lambda1/L2.attn.v"] == 0.25
    assert values["lambda2/L2.attn.v"] == -0.5
    assert values["lambda1/L1.attn.v"] == 0.5
    shared = evaluate(Decoder(model_config("resformer"), seed=1), windows, "fp32")
    # learnable_plus starts at L / (L - 1).
    assert shared["lambda1/L1.attn.v"] == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["resformer", "resformer-learnable"])
def test_static_weights_are_not_rounded_to_bf16(name: str, windows: Windows) -> None:
    model = moved(Decoder(model_config(name, n_layers=8), seed=1))
    single, mixed = (evaluate(model, windows, precision) for precision in ("fp32", "bf16"))
    static = [key for key in single if key.startswith("lambda")]
    assert len(static) == 14
    assert {key: mixed[key] for key in static} == {key: single[key] for key in static}
    if model.shared_lambda is not None:
        assert mixed["lambda1/L3.attn.v"] == model.shared_lambda()[2].item()


def test_route_entropy_is_log_n_at_the_start_and_less_later(windows: Windows) -> None:
    cfg = model_config("rd-attnres", block_size=2)
    model = Decoder(cfg, seed=1)
    n_sources = {s.name: len(s.sources) for s in model.sites if len(s.sources) > 1}
    values = evaluate(model, windows, "fp32")
    found = {k.removeprefix("route_entropy/"): v for k, v in values.items() if k != "val_loss"}
    assert found == pytest.approx({name: math.log(n) for name, n in n_sources.items()}, rel=1e-6)
    later = evaluate(moved(model), windows, "fp32")
    assert all(later[f"route_entropy/{name}"] < value for name, value in found.items())


def test_hooks_are_gone_and_gradients_untouched(windows: Windows) -> None:
    model = moved(Decoder(model_config("satformer"), seed=1))
    before = evaluate(model, windows, "bf16")
    assert all(not point._forward_hooks for point in model.hook_dict.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert evaluate(model, windows, "bf16") == before
