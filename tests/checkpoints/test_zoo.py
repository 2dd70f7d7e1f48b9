"""The models that ship with the package: complete, of the recorded recipe, small, and trained."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import satlens
from satlens.checkpoints.zoo import replace_zoo, zoo_entry, zoo_names
from satlens.config import TrainConfig, make
from satlens.errors import CheckpointError
from satlens.study import load_recipe, model_config, train_config

RECIPE = load_recipe("zoo")
TEXT = "Fellow-Citizens of the Senate and House of Representatives: the state of the Union is good."
LARGEST = 60e6


def test_one_model_an_arm_of_the_recipe_in_a_small_download():
    assert zoo_names() == sorted(f"tiny/{arm}" for arm in RECIPE.arms)
    folder = zoo_entry("tiny/satformer").parent
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < LARGEST


@pytest.mark.parametrize("arm", RECIPE.arms)
def test_each_opens_offline_and_is_what_its_recipe_says(arm, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", None)
    model = satlens.load(f"tiny/{arm}")
    assert model.cfg == model_config(RECIPE, arm)
    training = model.provenance["training"]
    assert training["tokens"] == train_config(RECIPE, 0).tokens
    assert make(TrainConfig, training["config"], "training.json") == train_config(RECIPE, 0)
    with torch.no_grad():
        # Far below chance, log V = 7.6 nats, on the opening words of its corpus.
        assert model(model.to_tokens(TEXT), "loss") < math.log(model.cfg.d_vocab) - 3


def test_unknown_names_are_one_line_with_those_there_are(tmp_path):
    with pytest.raises(CheckpointError, match=r"tiny/satformr: the zoo has .*tiny/satformer"):
        satlens.load("tiny/satformr")
    with pytest.raises(CheckpointError, match=r"no train/\*/seed0/final"):
        replace_zoo(Path(tmp_path))
