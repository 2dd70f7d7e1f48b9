"""The papers' own recipes: published sizes, schedules, decay; pairs that differ in nothing else."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from satlens.config import ModelConfig
from satlens.errors import ConfigError
from satlens.models.decoder import Decoder
from satlens.models.presets import config_for
from satlens.study import load_recipe, make_plan, model_config, study_steps, train_config
from satlens.study.addresses import configurations, configured, shipped_recipes
from satlens.training import check_paired
from satlens.training.optimiser import decay_groups, learning_rate, warmup_steps
from satlens.training.pairing import ARCHITECTURE
from satlens.training.plan import plan

# Parameters as published: the SATFormer repository's checkpoints and configs, and the tables of
# the RD-AttnRes paper (119.79 M and 343.04 M, with the output read).
PUBLISHED = {
    "satformer-small": {
        "transformer": 128_404_096,
        "resformer": 128_404_117,
        "satformer": 128_496_256,
        "denseformer": 128_404_173,
        "muddformer": 128_729_008,
        "hyperconnections": 128_522_940,
    },
    "satformer-medium": {
        "transformer": 334_798_080,
        "resformer": 334_798_115,
        "satformer": 335_076_608,
        "denseformer": 334_798_269,
        "muddformer": 335_849_700,
        "hyperconnections": 335_057_064,
    },
    "satformer-large": {
        "transformer": 766_440_320,
        "resformer": 766_440_357,
        "satformer": 767_103_872,
        "denseformer": 766_440_529,
        "muddformer": 768_164_456,
        "hyperconnections": 766_849_884,
    },
    "satformer-xl": {
        "transformer": 1_298_764_800,
        "resformer": 1_298_764_847,
        "satformer": 1_300_272_128,
    },
    "rd-attnres-s": {
        "attnres": 119_791_296,
        "rd-attnres": 119_800_512,
        "rd-attnres-tied": 119_800_512,
        "rd-attnres-average": 119_800_512,
        "rd-attnres-frozen-v": 119_800_512,
    },
    "rd-attnres-m": {
        "attnres": 343_039_424,
        "rd-attnres": 343_059_392,
        "rd-attnres-tied": 343_059_392,
        "rd-attnres-average": 343_059_392,
        "rd-attnres-frozen-v": 343_059_392,
    },
}
# Tokens, warm-up tokens, peak and final learning rate.
SCHEDULES = {
    "satformer-small": (5_000_000_000, 50_000_000, 2e-3, 2e-4),
    "satformer-medium": (10_000_000_000, 100_000_000, 1.5e-3, 1.5e-4),
    "satformer-large": (20_000_000_000, 200_000_000, 1e-3, 1e-4),
    "satformer-xl": (30_000_000_000, 300_000_000, 8e-4, 8e-5),
    "rd-attnres-s": (2_000_027_648, 40_000_553, 3e-4, 3e-5),
    "rd-attnres-m": (2_000_027_648, 40_000_553, 2e-4, 2e-5),
}
ARMS = [f"{recipe}/{arm}" for recipe, arms in PUBLISHED.items() for arm in arms]


@cache
def on_meta(cfg: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(cfg, seed=None)


@pytest.mark.parametrize("address", ARMS)
def test_every_arm_builds_at_its_published_size(address: str) -> None:
    recipe, arm = address.split("/")
    cfg = configured(address).model
    assert on_meta(cfg).n_parameters() == PUBLISHED[recipe][arm]
    size = recipe.rpartition("-")[2]
    assert cfg == config_for(f"{arm}-{size}")  # the preset of that name is the same model


def test_no_arm_goes_unchecked() -> None:
    for name, arms in PUBLISHED.items():
        assert list(load_recipe(name).arms) == list(arms)
    assert set(PUBLISHED) < set(shipped_recipes())


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_the_published_ones(name: str) -> None:
    tokens, warmup, peak, final = SCHEDULES[name]
    each = configurations(name)[0]
    cfg, made = each.train, plan(each.model, each.train)
    per_step = 512 * 4096 if name.startswith("satformer") else 32 * 1024
    assert (cfg.tokens, made.tokens_per_step) == (tokens, per_step)
    assert made.n_steps == tokens // per_step
    assert warmup_steps(made.n_steps, cfg) == round(warmup / per_step)
    rates = [learning_rate(step, made.n_steps, cfg) for step in range(made.n_steps)]
    assert max(rates) == rates[round(warmup / per_step) - 1] == pytest.approx(peak, rel=1e-12)
    assert rates[-1] == pytest.approx(final, rel=1e-12)
    assert (cfg.betas, cfg.weight_decay, cfg.clip) == ((0.9, 0.95), 0.1, 1.0)
    assert (cfg.schedule, cfg.precision, each.model.document_mask) == ("cosine", "bf16", False)
    if name.startswith("satformer"):
        assert cfg.grad_accum % 8 == 0  # 8 GPUs, as published


def test_rd_runs_five_seeds_and_keeps_four_milestones() -> None:
    for name in ("rd-attnres-s", "rd-attnres-m"):
        recipe = load_recipe(name)
        assert recipe.seed_numbers == (123, 2025, 2026, 3407, 7777)
        cfg = train_config(recipe, 2026)
        made = plan(model_config(recipe, "rd-attnres"), cfg)
        assert made.n_steps == 61_036
        assert made.milestones == {
            7_630: 250_000_000,
            15_259: 500_000_000,
            30_518: 1_000_000_000,
            61_036: 2_000_000_000,
        }
    assert configured("rd-attnres-s/attnres").train.seed == 123
    assert configured("rd-attnres-s/attnres", seed=7777).train.seed == 7777


@pytest.mark.parametrize("address", ["satformer-small/hyperconnections", "rd-attnres-s/rd-attnres"])
def test_decay_is_the_published_one(address: str) -> None:
    each = configured(address)
    groups = decay_groups(on_meta(each.model), each.train)
    excluded = [name for name, _ in groups["no_decay"]]
    if address.startswith("satformer"):
        assert excluded == []
    else:  # two queries and one gamma an attention read, one of each for the MLP's and the output's
        assert len(excluded) == 16 * 5 + 2
        assert all("read" in name for name in excluded)


@pytest.mark.parametrize("name", PUBLISHED)
def test_arms_pair_by_what_the_recipe_declares(name: str) -> None:
    found = configurations(name)
    arms = {each.name: (each.model, each.train) for each in found}
    check_paired(arms, differ=(*ARCHITECTURE, *found[0].differ))
    if "muddformer" in arms:
        with pytest.raises(ConfigError, match=r"^muddformer: model\.d_mlp: "):
            check_paired(arms)


def test_a_study_at_scale_is_planned_like_any_other(tmp_path) -> None:
    made = make_plan(load_recipe("rd-attnres-s"), tmp_path, seeds=2, workers=1)
    assert made.seed_numbers == (123, 2025)
    steps = {step.id: step for step in study_steps(made)}
    assert "train/rd-attnres/seed2025" in steps
    assert "train/rd-attnres/seed2026" not in steps
    assert steps["data"].params["corpus"] == "hf:HuggingFaceFW/fineweb-edu:sample-10BT"
    assert steps["data"].params["tokenizer_sample"] == 0.05
    with pytest.raises(ConfigError, match=r"^llama-2/tokenizer\.json: tokenizer: no such file$"):
        study_steps(load_recipe("satformer-small"))
