"""What ``satlens info`` tells of a checkpoint, and ``satlens convert``, from the shell."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import satlens
from satlens.checkpoints.info import inspect
from satlens.checkpoints.unusual import dead_parameters
from satlens.cli import main
from satlens.errors import ConfigError
from satlens.models.decoder import Decoder

RECIPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 18,
    "num_heads": 16,
    "num_kv_heads": 4,
    "qk_norm": True,
    "intermediate_size": 4096,
    "tie_word_embeddings": True,
}


def cli(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["satlens", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


def write_recipe(folder, name, **overrides):
    file = folder / "medium.json"
    model = {"config_class_name": name, "config_overrides": {**RECIPE, **overrides}}
    file.write_text(json.dumps({"model": model, "training": {"dtype": "bfloat16"}}))
    return file


def says(facts, *words):
    """The one sentence on what is unusual that has all these words."""
    (sentence,) = [s for s in facts["unusual"] if all(word in s for word in words)]
    return sentence


# -- facts -----------------------------------------------------------------------------------------


def test_facts_of_a_golden_folder(golden, monkeypatch, capsys):
    folder = golden / "satformer-repo-satformer-last2-bias"
    code, out, err = cli(monkeypatch, capsys, "info", folder, "--json")
    assert (code, err) == (0, "")
    facts, model = json.loads(out), satlens.load(folder)
    assert facts["layout"] == "satformer_repo"
    assert facts["architecture"] == "satformer"
    assert facts["model"]["value_residual"]["last_k"] == 2
    assert facts["parameters"]["total"] == model.n_parameters()
    assert sum(v for k, v in facts["parameters"].items() if k != "total") == model.n_parameters()
    assert facts["sites"]["names"] == [site.name for site in model.sites]
    assert facts["sha256"]["checkpoint"] == model.provenance["sha256"]
    assert facts["weights"] == {
        "files": ["model.safetensors"],
        "tensors": {"float32": len(load_file(folder / "model.safetensors"))},
    }
    says(facts, "2 KV heads for 4 query heads")
    says(facts, "layers 1 are not mixed with V_1")
    says(facts, "no tokenizer.json")


def test_facts_for_a_reader(golden, folder, monkeypatch, capsys):
    code, out, _ = cli(monkeypatch, capsys, "info", folder)
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["layout"] == "satlens"
    assert lines["training"] == "steps=3, tokens=48"
    assert lines["sites"] == "2 gates, 0 routes"
    assert "padded vocabulary" in out
    assert max(map(len, out.splitlines())) < 200
    told = cli(
        monkeypatch, capsys, "info", golden / "resformer-release-identity",
        "--value-residual", "identity",
    )[1]  # fmt: skip
    assert "resformer" in told
    assert "mode=identity" in told


def test_a_configuration_alone(golden, tmp_path):
    source = golden / "muddformer-release-fp32rope"
    whole, file = inspect(source), inspect(source / "config.json")
    shutil.copy(source / "config.json", tmp_path)
    folder = inspect(tmp_path)
    for facts in (file, folder):
        assert facts["parameters"] == whole["parameters"]
        assert facts["weights"] is None
        assert facts["unusual"][0].startswith("no weights")
    assert not any("no weights" in sentence for sentence in whole["unusual"])
    assert "layers 0" in says(whole, "zero-width MLPs")
    says(whole, "MLP widths differ by layer, 0 to 256")


def test_damage_is_one_line(folder, monkeypatch, capsys):
    (folder / "model.safetensors").write_bytes(b"\x80\x04nothing")
    code, out, err = cli(monkeypatch, capsys, "info", folder)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "model.safetensors" in err


# -- what is unusual -------------------------------------------------------------------------------


def test_the_grouped_baseline_of_the_satformer_repository(tmp_path):
    facts = inspect(write_recipe(tmp_path, "TransformerConfig"))
    says(facts, "4 KV heads for 16 query heads", "rivals", "full attention")
    rival = inspect(write_recipe(tmp_path, "SATFormerConfig", num_kv_heads=None))
    assert rival["parameters"]["total"] == 335_076_608
    assert not any("KV heads" in sentence for sentence in rival["unusual"])
    plain = inspect(write_recipe(tmp_path, "TransformerConfig", num_kv_heads=None))
    assert plain["parameters"]["total"] == 334_798_080
    earlier = inspect(write_recipe(tmp_path, "GatedResFormerConfig", num_kv_heads=None))
    assert earlier["model"] == rival["model"]


def test_a_recipe_that_cannot_be_built(tmp_path):
    recipe = write_recipe(tmp_path, "SATFormerConfig", hidden_size=2048, num_heads=24)
    with pytest.raises(ConfigError, match=r"medium\.json: .*hidden_size=2048.*num_heads=24"):
        inspect(recipe)


def test_scalars_that_half_precision_froze(golden, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(golden / "satformer-repo-resformer-gqa", folder)
    tensors = load_file(folder / "model.safetensors")
    assert not any("half" in s for s in inspect(folder)["unusual"])
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    tensors["model.lambda_manager.lambda_scale"].fill_(4.0)
    save_file(tensors, folder / "model.safetensors")
    facts = inspect(folder)
    says(facts, "static weights stored in half precision", "lambda2")
    says(facts, "shared_lambda.scale is exactly its start, 4")
    assert facts["weights"]["tensors"] == {"bfloat16": len(tensors)}


def test_untrained_weights_and_copies(tmp_path):
    sizes = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_vocab": 19, "d_mlp": 8}
    for name, word in (
        ("rd-attnres", "mlp_read.query"),
        ("denseformer", "depth_weights"),
        ("muddformer", "w2.weight"),
        ("hyperconnections", "dynamic_alpha"),
    ):
        model = satlens.build(name, **sizes)
        satlens.save(model, tmp_path / name)
        says(inspect(tmp_path / name), "still at their start", word)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        satlens.save(model, tmp_path / name, replace=True)
        assert not any("at their start" in s for s in inspect(tmp_path / name)["unusual"])
    closed = satlens.build("satformer", **sizes)
    with torch.no_grad():
        closed.blocks[1].attn.values.alpha.weight.zero_()
        closed.unembed.weight.copy_(closed.embed.weight)
    facts = inspect(satlens.save(closed, tmp_path / "closed"))
    says(facts, "gate projections that are all zero, so closed for good under relu", "blocks.1")
    says(facts, "untied, but the unembedding equals")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("satformer", {}),
        ("muddformer", {"d_mlp": (0, 8, 8)}),
        ("attnres", {"d_mlp": (8, 0, 8), "route_bias": True}),
        ("rd-attnres", {"own_value_gamma": True}),
        ("rd-attnres-tied", {}),
        ("rd-attnres-frozen-v", {"block_size": 1}),
        ("delta-attnres", {}),
        ("hyperconnections", {"d_mlp": (8, 8, 0)}),
    ],
)
def test_dead_parameters_are_those_without_a_gradient(name, fields):
    sizes = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_vocab": 19, "d_mlp": 8}
    model: Decoder = satlens.build(name, **{**sizes, **fields})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model(torch.arange(18).view(2, 9), "loss").backward()
    found = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert sorted(dead_parameters(model.cfg)) == sorted(found)


# -- conversion ------------------------------------------------------------------------------------


def test_there_and_back(golden, tmp_path, monkeypatch, capsys):
    source = golden / "satformer-repo-muddformer-gqa"
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    code, out, _ = cli(monkeypatch, capsys, "convert", source, ours, "--to", "satlens")
    assert (code, out.strip()) == (0, str(ours))
    assert cli(monkeypatch, capsys, "convert", ours, theirs, "--to", "satformer-repo")[0] == 0
    before, after = (load_file(f / "model.safetensors") for f in (source, theirs))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_training_facts_and_tokenizer_come_along(folder, tmp_path, monkeypatch, capsys):
    kept = tmp_path / "kept"
    assert cli(monkeypatch, capsys, "convert", folder, kept, "--to", "satlens")[0] == 0
    assert satlens.load(kept).provenance["training"] == {"steps": 3, "tokens": 48}
    theirs = tmp_path / "theirs"
    code, _, err = cli(monkeypatch, capsys, "convert", folder, theirs, "--to", "satformer_repo")
    assert code == 0
    assert "no place for training.json" in err
    assert not (theirs / "training.json").exists()
    assert satlens.load(theirs).tokenizer is not None


def test_an_identity_model_is_said_to_be_one(golden, tmp_path, monkeypatch, capsys):
    source, out = golden / "resformer-release-identity", tmp_path / "ours"
    told = ("--value-residual", "identity")
    assert cli(monkeypatch, capsys, "convert", source, out, "--to", "satlens", *told)[0] == 0
    assert satlens.load(out).cfg.variant == "resformer"
    back = ("convert", out, tmp_path / "back", "--to", "resformer-release")
    code, _, err = cli(monkeypatch, capsys, *back)
    assert code == 0
    assert "--value-residual identity" in err
    code, _, err = cli(monkeypatch, capsys, "convert", out, tmp_path / "x", "--to", "hf-llama")
    assert code == 1
    assert "value_residual" in err


def test_what_cannot_be_expressed_writes_nothing(golden, folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    cases = [
        (golden / "rd-attnres-decoupled", "satformer-repo", "stream"),
        (golden / "satformer-repo-muddformer-gqa", "muddformer-release", "stream.pre_post_norm"),
        (golden / "satformer-repo-transformer-gqa", "hf-qwen3", "qk_norm_eps"),
        (folder, "nowhere", "layout: 'nowhere'"),
        (tmp_path / "absent", "satlens", "absent"),
    ]
    for source, layout, named in cases:
        code, stdout, err = cli(monkeypatch, capsys, "convert", source, out, "--to", layout)
        assert (code, stdout) == (1, ""), layout
        assert named in err
        assert err.startswith("satlens: error: ")
        assert err.count("\n") == 1
    assert [f.name for f in tmp_path.iterdir()] == ["final"]
    code, _, err = cli(monkeypatch, capsys, "convert", folder, folder, "--to", "satlens")
    assert code == 1
    assert "exists already" in err


def test_what_a_layout_does_not_keep_is_said(tmp_path, monkeypatch, capsys):
    satlens.save(satlens.build("transformer", n_layers=1, d_model=16), tmp_path / "ours")
    arguments = ("convert", tmp_path / "ours", tmp_path / "theirs", "--to", "hf-llama")
    code, _, err = cli(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "hf-llama layout does not keep init: 'fan_in' reads back as 'normal_0.02'" in err
    assert "hf-llama layout does not keep document_mask: True reads back as False" in err
    model = satlens.load(tmp_path / "theirs")
    tokens = torch.arange(20).view(2, 10)
    (note,) = [n for n in satlens.routes(model, tokens).notes if "hf_llama layout does not" in n]
    assert "init=normal_0.02" in note
