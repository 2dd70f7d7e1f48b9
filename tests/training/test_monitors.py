"""What a run notices about itself: spikes, parameters that never move, where its time goes."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from small_runs import model_config
from torch import nn

from satlens.models.decoder import Decoder
from satlens.training.frozen import FrozenParameters, _random_weights, checksum
from satlens.training.monitors import Stopwatch
from satlens.training.spikes import LIMIT, NEEDED, WINDOW, SpikeLog, median_and_scale

CPU = torch.device("cpu")

# -- spikes ----------------------------------------------------------------------------------------


def logged(losses: list[float], log_every: int = 10, grad_accum: int = 1) -> list[dict]:
    """Spike lines of a run with these losses; the gradient norm of step k is k."""
    log, lines = SpikeLog(CPU, log_every), []
    for step, loss in enumerate(losses):
        log.add(step, torch.tensor(loss), torch.tensor(float(step)))
        if (step + 1) % log_every == 0 or step + 1 == len(losses):
            lines += log.drain(step + 1, grad_accum)
    return lines


def noise(n: int, scale: float = 0.02, seed: int = 0) -> list[float]:
    return (3 + scale * np.random.default_rng(seed).standard_normal(n)).tolist()


def test_a_spike_is_named_with_its_step_batches_and_norm() -> None:
    losses = noise(200)
    losses[150] = 4.5
    (line,) = logged(losses, grad_accum=4)
    median = np.median(losses[150 - WINDOW : 150])
    deviation = np.median(np.abs(losses[150 - WINDOW : 150] - median))
    assert line == {
        "kind": "spike",
        "step": 151,
        "micro_batches": [600, 603],
        "loss": 4.5,
        "grad_norm": 150.0,
        "median": pytest.approx(median),
        "scale": pytest.approx(1.4826 * deviation),
    }


def test_the_scale_is_the_standard_deviation_of_normal_losses() -> None:
    _, scale = median_and_scale(noise(20_000))
    assert scale == pytest.approx(0.02, rel=0.03)


def test_noise_and_a_falling_loss_are_no_spikes() -> None:
    assert logged(noise(5000)) == []
    steps = np.arange(2000)
    falling = 3 + 7 * np.exp(-steps / 100) + 0.05 * np.random.default_rng(1).standard_normal(2000)
    assert logged(falling.tolist()) == []


def test_spikes_do_not_hide_each_other() -> None:
    losses = noise(200)
    for step in (140, 141, 142, 160):
        losses[step] = 5.0
    assert [line["step"] for line in logged(losses)] == [141, 142, 143, 161]


def test_the_threshold_is_at_six_scales() -> None:
    losses = noise(WINDOW)
    median, scale = median_and_scale(losses)
    assert logged([*losses, median + 0.999 * LIMIT * scale]) == []
    assert len(logged([*losses, median + 1.001 * LIMIT * scale])) == 1


def test_few_losses_are_not_enough_to_judge() -> None:
    assert logged([*noise(NEEDED - 1), 9.0]) == []
    assert len(logged([*noise(NEEDED), 9.0])) == 1


def test_a_loss_that_stands_still_may_flutter() -> None:
    assert logged([3.0] * 100 + [3.0 + 1e-6]) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_left_out(bad: float) -> None:
    losses = noise(200)
    clean = logged([*losses[:150], 4.5, *losses[150:]])
    losses[100:100] = [bad] * 5
    dirty = logged([*losses[:155], 4.5, *losses[155:]])
    assert [(x["median"], x["scale"], x["step"]) for x in dirty] == [
        (x["median"], x["scale"], x["step"] + 5) for x in clean
    ]
    log = SpikeLog(CPU, 200)
    for step, loss in enumerate([*noise(150), 4.5]):
        log.add(step, torch.tensor(loss), torch.tensor(bad))
    assert log.drain(151, 1)[0]["grad_norm"] is None


@pytest.mark.parametrize("stop", [7, 40, 149, 151])
def test_an_interrupted_run_writes_the_same_lines(stop: int) -> None:
    losses = noise(200)
    losses[70] = losses[150] = 4.5
    expected = logged(losses)
    assert len(expected) == 2
    log, lines = SpikeLog(CPU, 10), []
    for step, loss in enumerate(losses):
        if step == stop:  # another process, with what was saved
            saved = {name: tensor.clone() for name, tensor in log.tensors.items()}
            log = SpikeLog(CPU, 10)
            for name, tensor in log.tensors.items():
                tensor.copy_(saved[name])
        log.add(step, torch.tensor(loss), torch.tensor(float(step)))
        if (step + 1) % 10 == 0:
            lines += log.drain(step + 1, 1)
    assert lines == expected


# -- frozen parameters -----------------------------------------------------------------------------


def steps_of(model: Decoder, n: int, lr: float) -> list[list[str]]:
    """Names of frozen parameters after each of n steps of AdamW."""
    frozen = FrozenParameters(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    ids = torch.arange(2 * 32).view(2, 32) % model.cfg.d_vocab
    found = []
    for _ in range(n):
        model(ids, "loss", targets=ids.roll(1)).backward()
        optimiser.step()
        optimiser.zero_grad()
        found.append(frozen.names())
    return found


def test_dead_parameters_are_named_and_only_they() -> None:
    """The first read of a depth stream has one source: its route gets no gradient."""
    at_first, then = steps_of(Decoder(model_config("attnres"), seed=0), 2, 1e-3)
    # Queries start at zero and hide the keys' norm from the first step, not from the second.
    assert all(name.endswith((".query", ".gamma")) for name in at_first)
    assert then == ["blocks.0.attn_read.query", "blocks.0.attn_read.gamma"]


def test_scalars_in_bf16_do_not_move() -> None:
    """Near 0.5 bf16 has a number every 2^-9 below and 2^-8 above: a step of 3e-4 is rounded off."""
    cfg = model_config("resformer-learnable")
    scalars = [
        name for name, _ in Decoder(cfg, seed=0).named_parameters() if ".values.lambda" in name
    ]
    assert len(scalars) == 4
    frozen = steps_of(Decoder(cfg, seed=0).bfloat16(), 5, 3e-4)[-1]
    assert set(scalars) <= set(frozen)
    assert steps_of(Decoder(cfg, seed=0), 5, 3e-4)[-1] == []


def test_all_are_frozen_at_first_and_one_bit_tells() -> None:
    model = Decoder(model_config(), seed=0)
    frozen, names = FrozenParameters(model), [name for name, _ in model.named_parameters()]
    assert frozen.names() == names
    weight = model.blocks[1].mlp.down.weight
    with torch.no_grad():
        weight.view(-1)[17] = torch.nextafter(weight.view(-1)[17], torch.tensor(9.0))
    assert set(names) - set(frozen.names()) == {"blocks.1.mlp.down.weight"}


def test_weights_that_move_by_the_same_step_do_not_cancel() -> None:
    """Ones that become 1 + e and 1 - e in any proportion: what a norm does at Adam's first step."""
    weights = _random_weights(64, CPU)
    start = checksum(torch.ones(64), weights)
    for up in range(65):
        moved = torch.ones(64)
        moved[:up] += 3e-3
        moved[up:] -= 3e-3
        assert checksum(moved, weights) != start
    assert checksum(torch.ones(64), weights) == start


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_checksum_in_chunks_knows_the_order(dtype: torch.dtype) -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = _random_weights(64, CPU)
    whole = checksum(numbers, weights)
    assert checksum(numbers.view(10, 100), weights) == whole
    assert checksum(numbers.roll(64), weights) != whole
    # By Python's own integers, modulo 2^64.
    width = numbers.element_size()
    integers = np.frombuffer(numbers.view(torch.uint8).numpy().tobytes(), f"<i{width}")
    total = 0
    for start in range(0, 1000, 64):
        part = zip(integers[start : start + 64].tolist(), weights.tolist(), strict=False)
        total = total * 0x9E3779B97F4A7C15 + sum(x * w for x, w in part)
    assert whole.item() % 2**64 == total % 2**64


def test_parameters_of_a_plain_module_and_empty_shards() -> None:
    module = nn.ParameterDict({"a": nn.Parameter(torch.zeros(0)), "b": nn.Parameter(torch.ones(2))})
    frozen = FrozenParameters(module)
    with torch.no_grad():
        module["b"].add_(1)
    assert frozen.names() == ["a"]


# -- time ------------------------------------------------------------------------------------------


def test_shares_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.5, 2.0, 6.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(lambda speed: speed / 1000)
    with watch.part("data"):
        pass  # 0.5 s
    with watch.part("evaluation"):
        pass  # 4 s
    assert watch.drain(600) == {
        "seconds": 10.0,
        "data_seconds": 0.5,
        "evaluation_seconds": 4.0,
        "saving_seconds": 0.0,
        "tokens_per_second": 100.0,
        "data_wait": round(0.5 / 6, 6),
        "mfu": 0.1,
    }


def test_no_utilisation_on_an_unknown_device() -> None:
    assert Stopwatch().drain(100)["mfu"] is None
