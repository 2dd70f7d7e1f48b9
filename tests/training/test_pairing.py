from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import lines, model_config, train_config

from satlens.data.dataset import PreparedDataset
from satlens.errors import ConfigError
from satlens.training import check_paired, check_paired_runs, train
from satlens.training.loader import Loader
from satlens.training.run_folder import read_run

ARMS = ["transformer", "resformer", "satformer", "attnres", "rd-attnres"]


@pytest.fixture(scope="module")
def paired(
    dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Path], dict[str, list[list[torch.Tensor]]]]:
    """One run an arm, and the batches that each arm saw."""
    folder, seen, step = tmp_path_factory.mktemp("paired"), {}, Loader.step
    with pytest.MonkeyPatch.context() as patch:
        for name in ARMS:
            drawn: list[list[torch.Tensor]] = []

            def spy(*args, drawn=drawn):  # type: ignore[no-untyped-def]
                parts = step(*args)
                drawn.append([part.inputs for part in parts])
                return parts

            patch.setattr(Loader, "step", spy)
            cfg = train_config(4, seed=2, milestones=(0,))
            train(model_config(name), cfg, dataset, folder / name, progress="none", device="cpu")
            seen[name] = drawn
    return {name: folder / name for name in ARMS}, seen


def test_arms_share_initial_weights_data_order_and_evaluation_tokens(
    paired: tuple[dict[str, Path], dict[str, list[list[torch.Tensor]]]],
) -> None:
    from safetensors.torch import load_file

    folders, seen = paired
    weights = {
        name: load_file(path / "milestones" / "0" / "model.safetensors")
        for name, path in folders.items()
    }
    reference = weights["transformer"]
    for name in ARMS[1:]:
        for parameter, value in reference.items():
            assert torch.equal(weights[name][parameter], value), (name, parameter)
        for mine, first in zip(seen[name], seen["transformer"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True))
    assert len({read_run(path)["evaluation"]["sha256"] for path in folders.values()}) == 1
    rates = [[m["lr"] for m in lines(path, "train")] for path in folders.values()]
    assert all(rate == rates[0] for rate in rates)
    check_paired_runs(folders)


def test_arms_that_differ_elsewhere_are_refused_by_field() -> None:
    arms = {name: (model_config(name), train_config()) for name in ARMS}
    check_paired(arms)
    for change, message in [
        ((model_config("satformer", d_model=64), train_config()), r"model\.d_model: 64, but"),
        ((model_config("satformer", norm_eps=1e-5), train_config()), r"model\.norm_eps: 1e-05"),
        ((model_config("satformer"), train_config(lr=1e-3)), r"train\.lr: 0\.001, but .* 0\.003"),
        ((model_config("satformer"), train_config(seed=1)), r"train\.seed: 1, but transformer"),
    ]:
        with pytest.raises(ConfigError, match=rf"^satformer: {message}") as caught:
            check_paired({**arms, "satformer": change})
        assert "\n" not in str(caught.value)


def test_a_named_field_may_differ() -> None:
    arms = {
        "a": (model_config("transformer"), train_config()),
        "b": (model_config("transformer", d_mlp=64), train_config(lr=1e-3)),
    }
    check_paired(arms, differ=("d_mlp", "lr"))
    with pytest.raises(ConfigError, match=r"b: train\.lr"):
        check_paired(arms, differ=("d_mlp",))
    with pytest.raises(ConfigError, match=r"unknown field 'd_mpl' .did you mean 'd_mlp'"):
        check_paired(arms, differ=("d_mpl",))


def test_trained_runs_of_other_data_or_recipe_are_refused(
    paired: tuple[dict[str, Path], dict[str, list[list[torch.Tensor]]]],
    dataset: PreparedDataset,
    tmp_path: Path,
) -> None:
    folders, _ = paired
    cfg = train_config(4, seed=2, milestones=(0,), eval_tokens=40)
    train(model_config("satformer"), cfg, dataset, tmp_path / "x", progress="none", device="cpu")
    with pytest.raises(ConfigError, match=r"^x: train\.eval_tokens: 40, but transformer has 300"):
        check_paired_runs({"transformer": folders["transformer"], "x": tmp_path / "x"})
