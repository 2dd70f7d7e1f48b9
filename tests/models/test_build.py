"""Fresh models: where they are put."""

from __future__ import annotations

import pytest
import torch

import satlens
from satlens.errors import ConfigError
from satlens.models.build import checked_device

FIELDS = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_vocab": 29}


@pytest.mark.parametrize(
    "name", ["gpu", "cuda:9", "cuda:-2", "", "cpu:x", "xla", "hpu", "cuda:99999"]
)
def test_devices_that_are_not_there_are_one_line(name):
    with pytest.raises(ConfigError, match="device: ") as error:
        satlens.build("transformer", device=name, **FIELDS)
    assert "\n" not in str(error.value)


def test_loading_and_training_check_it_too(tmp_path):
    model = satlens.build("transformer", **FIELDS)
    path = satlens.save(model, tmp_path / "saved")
    with pytest.raises(ConfigError, match="device: 'gpu' is no device"):
        satlens.load(path, device="gpu")
    with pytest.raises(ConfigError, match="device: 'cuda:9' is not there"):
        satlens.train(model.cfg, satlens.TrainConfig(), None, tmp_path / "run", device="cuda:9")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_cuda_without_cuda():
    with pytest.raises(ConfigError, match="device: 'cuda' is not there, torch finds 0 CUDA"):
        checked_device("cuda")


def test_devices_that_are_there():
    assert satlens.build("transformer", device="cpu", **FIELDS).device.type == "cpu"
    assert satlens.build("transformer", device=torch.device("meta"), **FIELDS).device.type == "meta"
