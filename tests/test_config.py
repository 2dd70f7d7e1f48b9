"""Configurations: nothing is accepted that would have no effect, nothing sensible is refused."""

from __future__ import annotations

import pytest

from satlens.config import ModelConfig, StaticValueResidual, TrainConfig, make, to_dict
from satlens.errors import ConfigError
from satlens.models.presets import PRESETS, VARIANTS, change, config_for

MODES = ("identity", "constant", "sparse", "learnable", "learnable_plus")
SETTINGS = {
    "layers": ((1,), {"sparse"}),
    "weights": ((0.25, 1.0), {"constant", "sparse", "learnable"}),
    "lambda2_init": (0.25, {"learnable_plus"}),
    "last_k": (1, set(MODES) - {"sparse"}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("field", SETTINGS)
def test_settings_without_effect_are_refused(mode, field):
    value, modes = SETTINGS[field]
    needed = {"layers": (2,)} if mode == "sparse" else {}
    given = {**needed, "kind": "static", "mode": mode, field: value}
    if mode in modes:
        cfg = make(ModelConfig, {"value_residual": given}, "here")
        assert getattr(cfg.value_residual, field) == value
        # What a checkpoint stores, every field spelt out, is read back.
        assert make(ModelConfig, to_dict(cfg), "here") == cfg
    else:
        with pytest.raises(ConfigError, match=f"{field}: has no effect under mode {mode}, got"):
            make(ModelConfig, {"value_residual": given}, "here")


def test_sparse_needs_layers():
    with pytest.raises(ConfigError, match="layers: mode sparse needs some"):
        config_for("resformer", mode="sparse")
    assert config_for("resformer", mode="sparse", layers=(2,)).value_layers == (2,)


def test_every_named_model_survives_the_round_trip():
    for name in (*VARIANTS, *PRESETS):
        cfg = config_for(name)
        assert make(ModelConfig, to_dict(cfg), name) == cfg
    assert StaticValueResidual() == StaticValueResidual(mode="learnable_plus")


def test_fields_of_the_parts_may_be_given_flat_or_dotted():
    flat = config_for("rd-attnres", block_size=2, value_residual="satformer", gate="tanh")
    names = {"stream.block_size": 2, "value_residual.gate": "tanh"}
    assert config_for("rd-attnres", value_residual="satformer", **names) == flat
    assert change(config_for("rd-attnres"), {"value_residual": "satformer", **names}, "x") == flat
    narrow = change(config_for("transformer", d_mlp=96), {"d_model": 64}, "x")
    assert (narrow.d_model, narrow.d_mlp) == (64, 96)
    for bad in ("stream.blok_size", "streams.block_size", "blok_size"):
        with pytest.raises(ConfigError, match=f"x: unknown field .*{bad.split('.')[-1]}"):
            change(config_for("rd-attnres"), {bad: 2}, "x")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("2e5", 200_000), ("2E+5", 200_000), ("1.5e3", 1_500), (2e5, 200_000), ("4096", 4_096)],
)
def test_whole_numbers_in_any_spelling(given, meant):
    """YAML reads 2e5 as text."""
    cfg = make(TrainConfig, {"tokens": given, "milestones": (given,)}, "--set")
    assert (cfg.tokens, cfg.milestones) == (meant, (meant,))
    assert type(cfg.tokens) is int


@pytest.mark.parametrize("given", ["1.5e0", "2e-5", "1e999", "e5", "many", 2.5, "-2e5"])
def test_other_numbers_are_refused(given):
    with pytest.raises(ConfigError, match="--set: tokens: ") as error:
        make(TrainConfig, {"tokens": given}, "--set")
    assert "\n" not in str(error.value)
