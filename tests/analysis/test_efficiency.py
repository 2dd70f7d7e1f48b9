"""The bench: what it counts exactly; its timings only for their shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import satlens
from satlens.analysis import efficiency
from satlens.analysis.efficiency import bench, saved_bytes, training_speed
from satlens.config import TrainConfig
from satlens.errors import AnalysisError, ConfigError
from satlens.models.presets import config_for
from satlens.training.flops import flops_per_token

TINY = {"d_model": 32, "n_layers": 2, "n_ctx": 16}


@pytest.mark.parametrize("tied", [False, True])
def test_operations_counted_by_hand(tied: bool) -> None:
    model = satlens.build(
        "transformer", **TINY, n_heads=4, d_mlp=64, d_vocab=100, tied_embeddings=tied
    )
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 100 * 32
    attention = 2 * 3 * 2 * 2 * 32 * 16 / 2  # layers, passes, products, 2 D T / 2
    assert flops_per_token(model.cfg) == 6 * matrices + attention


MATRICES = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 100 * 32
OF_STREAMS = {
    # C n D and (C n)^2 at layer 1 (C = 4, n = 2), then at the end (C = 1, n = 3)
    "muddformer-prepost": 8 * 32 + 8 * 8 + 3 * 32 + 3 * 3,
    "hyperconnections": 4 * 4 * 32 * 6,  # sublayers, streams, D, n + 2 columns
    "hyperconnections-static": 0,
    "rd-attnres": 0,
    "denseformer": 0,
    "satformer": 4 * 32,  # a gate a head in layer 1
}


@pytest.mark.parametrize("name", OF_STREAMS)
def test_only_matrix_products_are_counted(name: str) -> None:
    model = satlens.build(name, **TINY, n_heads=4, d_mlp=64, d_vocab=100)
    assert flops_per_token(model.cfg, 0) == 6 * (MATRICES + OF_STREAMS[name])


def test_saved_bytes_counts_a_storage_once_and_no_parameter() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(5, 8)

    def run() -> torch.Tensor:
        y = layer(x)  # saves x and the weight
        return (y.view(10, 4) * y.view(10, 4)).sum()  # saves one storage, twice

    assert saved_bytes(layer, run) == 2 * 5 * 8 * 4  # type: ignore[arg-type]


def test_table() -> None:
    before = torch.get_num_threads()
    seen = []
    result = bench(
        variants=("satformer", "attnres", "rd-attnres"),
        steps=2,
        batch_size=1,
        d_vocab=64,
        progress=lambda *step: seen.append(step),
        **TINY,
    )
    table = result.to_frame().set_index(["variant", "reference"])
    assert torch.get_num_threads() == before
    assert seen == [("bench", 1, 2), ("bench", 2, 2)]
    assert ("rd-attnres", "attnres") in table.index
    own = table.loc[("transformer", "transformer")]
    assert own["speed_ratio"] == own["memory_ratio"] == 1
    assert table.loc[(efficiency.CONTROL, "transformer"), "memory_ratio"] == 1
    assert (table["speed_ratio_low"] <= table["speed_ratio_high"]).all()
    assert np.isfinite(table.loc[("satformer", "transformer"), "capture_ratio"])
    assert result.summary["ratios"].keys() >= {"satformer / transformer", "rd-attnres / attnres"}
    assert "noise floor" in " ".join(result.notes)


def test_peak_is_not_a_number_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "has_bf16", lambda: False)
    result = bench(variants=(), steps=2, batch_size=1, d_vocab=64, **TINY)
    assert result.to_frame()["peak_fraction"].isna().all()
    assert any("n/a" in note for note in result.notes)


def test_training_speed_is_positive() -> None:
    cfg = config_for("attnres", d_vocab=64, **TINY)
    assert training_speed(cfg, TrainConfig(batch_size=1, n_threads=1), steps=1) > 0


def test_faults_name_the_field() -> None:
    with pytest.raises(AnalysisError, match="steps"):
        bench(steps=1)
    with pytest.raises(ConfigError, match="precision"):
        bench(precision="fp8")
    with pytest.raises(ConfigError, match="satfromer"):
        bench(variants=("satfromer",), steps=2, **TINY)
