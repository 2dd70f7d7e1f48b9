"""Operations a token against torch's own counter, peaks against clocks, and their quotient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import satlens
from satlens.config import ModelConfig
from satlens.models.decoder import Decoder
from satlens.models.presets import config_for
from satlens.training.flops import flops_per_token, model_flops_utilisation
from satlens.training.hardware import CHIPS, peak_flops, peak_of

T, D, ROWS = 32, 32, 2


def small(name: str, **changes: Any) -> ModelConfig:
    sizes = {"n_layers": 3, "d_model": D, "n_heads": 4, "n_key_value_heads": 2, "n_ctx": T}
    return config_for(name, **{**sizes, "d_mlp": 64, "d_vocab": 96, **changes})


def counted(cfg: ModelConfig) -> float:
    """Operations of matrix products that torch sees in a step, a token.

    The explicit attention multiplies with every key and masks afterwards.
    """
    model, ids = Decoder(cfg, seed=0), torch.arange(ROWS * T).view(ROWS, T) % cfg.d_vocab
    with FlopCounterMode(display=False) as counter, satlens.attention("eager"):
        model(ids, "loss", targets=ids).backward()
    return counter.get_total_flops() / (ROWS * T)


def hidden_half(cfg: ModelConfig) -> float:
    """What the causal mask hides of the attention's products."""
    return 6 * cfg.n_layers * cfg.n_heads * cfg.d_head * T


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("transformer", {}),
        ("transformer", {"tied_embeddings": True}),
        ("resformer", {}),
        ("satformer", {}),
        ("denseformer", {}),
        ("muddformer", {}),
        ("muddformer-prepost", {}),
        ("hyperconnections", {}),
    ],
)
def test_formula_is_what_torch_counts(name: str, changes: dict[str, Any]) -> None:
    cfg = small(name, **changes)
    assert counted(cfg) == flops_per_token(cfg) + hidden_half(cfg)


@pytest.mark.parametrize("name", ["attnres", "attnres-full", "rd-attnres", "delta-attnres"])
def test_only_the_routes_dot_products_are_left_out(name: str) -> None:
    cfg = small(name)
    model = Decoder(cfg, seed=0)
    products = sum(len(site.sources) for site in model.sites if site.kind == "route")
    left_out = counted(cfg) - flops_per_token(cfg) - hidden_half(cfg)
    assert 0 < left_out <= products * 3 * 2 * D


def test_a_published_size_by_hand() -> None:
    cfg = config_for("satformer-small")
    layer = 4 * 768 * 768 + 3 * 768 * 3072
    matrices = 11 * layer + 10 * 768 * 12 + 32_000 * 768
    attention = 11 * 2 * 2 * 3 * 768 * 4096 / 2  # layers, products, multiply-add, passes, keys
    assert flops_per_token(cfg) == 6 * matrices + attention


@pytest.mark.parametrize("window", [1, 5, 31, 32, 100])
def test_a_window_shows_fewer_keys(window: int) -> None:
    cfg, whole = small("transformer", window_size=window), small("transformer")
    position = np.arange(T)
    seen = (position[:, None] >= position) & (position[:, None] - position < window)
    # The formula integrates over positions: half a key less where the window is still growing.
    keys = seen.sum(1).mean() - min(window, T) / (2 * T)
    attention = 12 * cfg.n_layers * cfg.n_heads * cfg.d_head
    of_weights = flops_per_token(whole) - attention * T / 2
    in_formula = (flops_per_token(cfg) - of_weights) / attention
    assert in_formula == pytest.approx(keys)
    if window >= T:
        assert flops_per_token(cfg) == flops_per_token(whole)


# Operations of dense bf16 products a multiprocessor and cycle, and the clock in MHz at which the
# maker rates them: white papers of GA100, GA102, AD102, GH100 and GB202, data sheets.
RATED = {
    "A100": (2048, 1410),
    "A30": (2048, 1440),
    "A10": (1024, 1695),
    "A40": (1024, 1740),
    "RTX A6000": (1024, 1800),
    "RTX 3090": (512, 1695),
    "RTX 3090 Ti": (512, 1860),
    "L4": (1024, 2040),
    "L40": (512, 2490),
    "L40S": (1024, 2490),
    "RTX 6000 Ada": (1024, 2505),
    "RTX 4090": (512, 2520),
    "H100 SXM": (4096, 1830),
    "H100 PCIe": (4096, 1620),
    "H200 SXM": (4096, 1830),
    "GH200": (4096, 1830),
    "B200": (8192, 1850),
    "RTX 5090": (512, 2407),
}


@pytest.mark.parametrize("name", RATED)
def test_peaks_follow_from_multiprocessors_and_clock(name: str) -> None:
    operations, clock = RATED[name]
    chip = CHIPS[name]
    assert chip.multiprocessors * operations * clock * 1e-6 == pytest.approx(
        chip.teraflops, rel=0.005
    )


def test_boards_of_less_power_are_rated_below_the_module() -> None:
    assert set(CHIPS) - set(RATED) == {"H100 NVL", "H200 NVL"}
    for name in ("H100 NVL", "H200 NVL"):
        assert CHIPS[name].teraflops == pytest.approx(1671 / 2, abs=1)  # half of the sparse figure


def test_a_name_belongs_to_one_chip() -> None:
    names = [name for chip in CHIPS.values() for name in chip.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "multiprocessors", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 989.4),
        ("NVIDIA H100 PCIe", 114, 756),
        ("NVIDIA A100-SXM4-40GB", 108, 312),
        ("A100-SXM4-80GB", 108, 312),  # drivers before 470
        ("NVIDIA L40S", 142, 362.05),
        ("NVIDIA L40", 142, 181.05),
        ("NVIDIA GeForce RTX 4090", 128, 165.2),
        # A slice, a custom A100 of 124 multiprocessors, and other chips of a similar name.
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, None),
        ("NVIDIA A100-SXM4-40GB", 14, None),
        ("NVIDIA A100-SXM-64GB", 124, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, None),
        ("NVIDIA GeForce RTX 4090 D", 114, None),
        ("NVIDIA A10G", 80, None),
        ("NVIDIA H20", 78, None),
        ("Tesla V100-SXM2-16GB", 80, None),  # has no bf16 products
        ("AMD Instinct MI300X", 304, None),
        ("", 0, None),
    ],
)
def test_only_what_is_known_for_sure_has_a_peak(
    name: str, multiprocessors: int, teraflops: float | None
) -> None:
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert peak_of(name, multiprocessors) == expected


def test_peak_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert peak_flops("cuda:1") == pytest.approx(989.4e12)
    assert peak_flops(torch.device("cpu")) is None


def test_utilisation() -> None:
    # Half of two devices' peak: 2 x 100 / 2 = 100 operations a second, 10 tokens of 10.
    assert model_flops_utilisation(10, 10, 2, 100) == 0.5
    assert model_flops_utilisation(10, 10, 2, None) is None
