"""Reading and writing published layouts: keys, names, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import satlens
from satlens.checkpoints.layouts import layout_named, layout_of
from satlens.checkpoints.layouts.widths import width_before_reallocation
from satlens.config import ModelConfig, StaticValueResidual
from satlens.errors import CheckpointError, ConfigError
from satlens.models.decoder import Decoder
from satlens.models.presets import reallocated_widths

BASE = {
    "model_type": "SATFormer",
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_heads": 12,
    "vocab_size": 100,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
}


RELEASE = {
    "model_type": "muddformer",
    "dim": 2560,
    "n_layer": 32,
    "n_head": 32,
    "n_local_heads": 32,
    "head_dim": 80,
    "intermediate_size": 6912,
    "vocab_size": 50432,
    "expand_last": True,
    "round64": True,
}
OWN_MUDD = {"name": "muddformer", "shared_first_norm": True, "d_mlp": (0, 256)}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}


def read(config, **changes):
    config = {**config, **changes}
    return layout_of(config, "config.json").model_config(config, "config.json")


@pytest.mark.parametrize(
    ("hidden", "ratio", "width"),
    # 256 ceil(int(2 d r / 3) / 256), worked out by hand.
    [(768, 4, 2048), (768, None, 2048), (1024, 4, 2816), (2048, 4, 5632), (768, 8, 4096)],
)
def test_null_intermediate_size(hidden, ratio, width):
    cfg = read(BASE, hidden_size=hidden, num_heads=8, hidden_ratio=ratio, intermediate_size=None)
    assert cfg.d_mlp == width


def test_defaults_and_nulls():
    cfg = read(BASE, num_kv_heads=None, hidden_act="silu", fuse_norm=True, use_l2warp=True)
    assert cfg.n_key_value_heads == 12
    assert cfg.norm_eps == 1e-6
    assert cfg.qk_norm_eps == 1e-5
    assert not cfg.tied_embeddings
    assert not cfg.document_mask
    assert read(BASE, use_value_residual=False).variant == "transformer"
    assert read(BASE, value_residual_last_k=9).value_layers == (1,)
    assert read(BASE, value_residual_proj_bias=True).value_residual.bias


def test_qk_norm_keeps_its_own_eps():
    assert read(BASE, qk_norm=True, norm_eps=1e-3).qk_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # satformer/xl.json of the SATFormer repository.
        ({"hidden_size": 2048, "num_heads": 24}, "hidden_size=2048.*num_heads=24"),
        ({"num_kv_heads": 5}, "num_heads=12.*num_kv_heads=5"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling"),
        ({"elementwise_affine": False}, "elementwise_affine"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attn": {"layers": [1]}}, "attn"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"rope_theta": None}, "rope_theta"),
        ({"value_residual_gate": "swish"}, "value_residual_gate"),
        ({"value_residual_last_k": 0}, "last_k"),
        ({"model_type": "denseformer", "dwa_period": 0}, "dwa_period"),
        ({"model_type": "denseformer", "dwa_dilation": 0}, "dwa_dilation"),
        ({"model_type": "muddformer", "num_ways": 3}, "num_ways"),
        ({"model_type": "dhc", "expansion_rate": 0}, "expansion_rate"),
        ({"model_type": "dhc", "hc_norm_type": "batch"}, "hc_norm_type"),
        ({"model_type": "transformer", "attn_res_block_size": 12}, "attn_res_block_size.*layers"),
        ({"model_type": "gpt2"}, "model_type: 'gpt2'"),
        ({"model_type": "rd_attnres"}, "attnres_block_size"),
        ({"model_type": "transformer", "attnres_block_size": 0}, "block_size"),
        (
            {"model_type": "transformer", "attnres_block_size": 2, "route_control": "tied"},
            "route_control",
        ),
        (
            {"model_type": "rd_attnres", "attnres_block_size": 2, "route_control": "x"},
            "route_control",
        ),
    ],
)  # fmt: skip
def test_refused_configs(changes, named):
    with pytest.raises((ConfigError, CheckpointError), match=named) as error:
        read(BASE, **changes)
    assert str(error.value).startswith("config.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_heads", "vocab_size"])
def test_missing_sizes_are_named(key):
    with pytest.raises(ConfigError, match=key):
        read({k: v for k, v in BASE.items() if k != key})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mlp_bias": True}, "mlp_bias"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": "default"}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_parameters": {"factor": 2.0}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"is_causal": False}, "is_causal"),
        ({"rope_parameters": {"rope_type": "default", "full_attention": {}}}, "rope_parameters"),
        ({"num_attention_heads": 5}, "hidden_size=32.*num_attention_heads=5"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4.*num_key_value_heads=3"),
        ({"model_type": "qwen3", **WINDOW, "max_window_layers": 1}, "max_window_layers"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "x"]}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ],
)
def test_refused_llama_and_qwen3_configs(changes, named):
    with pytest.raises(ConfigError, match=named):
        read(LLAMA, **changes)


def test_qwen3_defaults_and_windows():
    cfg = read(LLAMA, model_type="qwen3", rms_norm_eps=1e-4)
    assert (cfg.d_head, cfg.n_ctx, cfg.window_size) == (128, 32_768, None)
    assert cfg.qk_norm
    assert cfg.qk_norm_eps == 1e-4
    assert read(LLAMA, model_type="qwen3", **WINDOW, max_window_layers=0).window_size == 7
    assert read(LLAMA, model_type="qwen3", **WINDOW, max_window_layers=2).window_size is None


# -- MUDDFormer, which two layouts call by one name ------------------------------------------------


def test_dim_tells_the_release_from_the_satformer_repository():
    assert layout_of(RELEASE, "config.json").name == "muddformer_release"
    assert layout_of({**BASE, "model_type": "muddformer"}, "").name == "satformer_repo"


def test_the_released_model():
    cfg = read(RELEASE)
    # 128 round(6912 (i / 31 + 0.5) / 128) for layers 0, 1, 30 and 31.
    assert [cfg.d_mlp_of(i) for i in (0, 1, 30, 31)] == [3456, 3712, 10112, 10368]
    assert cfg.qk_norm_eps == cfg.norm_eps == 1e-6
    assert cfg.stream.shared_first_norm
    with torch.device("meta"):
        assert 2.7e9 < Decoder(cfg, seed=None).n_parameters() < 2.9e9
    assert read(RELEASE, n_local_heads=-1).n_key_value_heads == 32


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dense_type": "l"}, "dense_type"),
        ({"dense": False}, "dense"),
        ({"dynamic_dense": False}, "dynamic_dense"),
        ({"sepln": False}, "sepln"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"head_dim": 64}, "dim=2560.*n_head=32.*head_dim=64"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"hidden_size": 12}, "hidden_size"),
    ],
)
def test_refused_releases(changes, named):
    with pytest.raises(ConfigError, match=named):
        read(RELEASE, **changes)


def test_widths_of_the_satformer_repository():
    mudd = {**BASE, "model_type": "muddformer", "num_hidden_layers": 3}
    # round(3072 f) for f = 1/2, 1, 3/2, then (x + 127) // 256 x 256.
    assert read(mudd, intermediate_size=3072).d_mlp == (1536, 3072, 4608)
    assert read(mudd, intermediate_size=3072, param_realloc=False).d_mlp == 3072
    assert read(mudd, intermediate_size=64).d_mlp == 256
    # Without a width, 2/3 of 4 d is rounded to the nearest multiple of 256, not upwards.
    wide = {"hidden_size": 2048, "num_heads": 16, "hidden_ratio": 4, "param_realloc": False}
    assert read(mudd, **wide).d_mlp == 5376
    assert read(mudd, **{**wide, "hidden_ratio": None}).d_mlp == 5632
    assert read(mudd, **{**wide, "hidden_ratio": None, "param_realloc": True}).d_mlp == 5632


@pytest.mark.parametrize("form", ["satformer_repo", "release"])
@pytest.mark.parametrize("width", [100, 1000, 3072, 6912])
@pytest.mark.parametrize("n_layers", [1, 2, 5, 32])
def test_reallocation_is_undone(form, width, n_layers):
    widths = reallocated_widths(width, n_layers, form)
    cfg = ModelConfig(n_layers=n_layers, d_mlp=widths)
    found = width_before_reallocation(cfg, form)
    assert found is not None
    assert reallocated_widths(found, n_layers, form) == widths
    if width == 3072:
        assert found == 3072


def test_a_fused_projection_of_hyper_connections(golden, tmp_path):
    folder = copy(golden, "satformer-repo-hyperconnections-gqa", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("dynamic_beta_proj")]:
        alpha = name.replace("beta", "alpha")
        both = torch.cat((tensors.pop(name)[:, None], tensors.pop(alpha)), 1)
        tensors[name.replace("beta_proj", "fused_proj")] = both.contiguous()
    save_file(tensors, folder / "model.safetensors")
    assert_same(satlens.load(folder), satlens.load(golden / folder.name))


def test_llama_rope_and_head_width():
    assert read(LLAMA, rope_theta=5e5).rope_theta == 5e5
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    assert read(LLAMA, rope_parameters=parameters).rope_theta == 5e5
    assert read(LLAMA, rope_parameters={"rope_theta": 5e5}).rope_theta == 5e5
    assert read(LLAMA, head_dim=16).d_head == 16


@pytest.mark.parametrize(
    ("layout", "build", "named"),
    [
        ("satformer_repo", {"name": "attnres"}, "stream"),
        ("satformer_repo", {"name": "resformer-identity"}, "value_residual.mode"),
        ("satformer_repo", {"name": "transformer", "d_head": 6}, "d_head"),
        ("satformer_repo", {"name": "transformer", "d_mlp": (8, 0)}, "d_mlp"),
        ("satformer_repo", {"name": "transformer", "qk_norm": True, "qk_norm_eps": 0}, "qk_norm"),
        ("satformer_repo", {"name": "resformer", "n_layers": 1}, "n_layers"),
        ("fla", {"name": "satformer"}, "value_residual"),
        ("fla", {"name": "attnres", "route_bias": True}, "stream.route_bias"),
        ("fla", {"name": "rd-attnres", "output_read": False}, "stream.output_read"),
        ("fla", {"name": "rd-attnres", "own_value_gamma": True}, "stream.own_value_gamma"),
        ("satformer_repo", {"name": "denseformer", "value_residual": "satformer"}, "value_resid"),
        ("satformer_repo", {"name": "delta-attnres"}, "stream"),
        ("satformer_repo", {"name": "muddformer", "round64": True}, "stream.round64"),
        ("satformer_repo", {"name": "muddformer", "d_mlp": (256, 264)}, "d_mlp"),
        ("muddformer_release", {"name": "transformer"}, "stream"),
        ("muddformer_release", {"name": "muddformer"}, "stream.shared_first_norm"),
        ("muddformer_release", {**OWN_MUDD, "pre_post_norm": True}, "stream.pre_post_norm"),
        ("muddformer_release", {**OWN_MUDD, "d_mlp": 96}, "d_mlp"),
        ("muddformer_release", {**OWN_MUDD, "tied_embeddings": True}, "tied_embeddings"),
        ("muddformer_release", {**OWN_MUDD, "qk_norm": True}, "qk_norm_eps"),
        ("hf_llama", {"name": "transformer", "qk_norm": True}, "qk_norm"),
        ("hf_llama", {"name": "transformer", "window_size": 4}, "window_size"),
        ("hf_llama", {"name": "transformer", "d_model": 18, "d_head": 4}, "n_heads"),
        ("hf_llama", {"name": "resformer-identity"}, "value_residual.*resformer_release"),
        ("hf_llama", {"name": "resformer"}, "value_residual"),
        ("hf_qwen3", {"name": "transformer"}, "qk_norm"),
        ("hf_qwen3", {"name": "transformer", "qk_norm": True}, "qk_norm_eps"),
        ("hf_qwen3", {"name": "denseformer"}, "stream"),
        ("resformer_release", {"name": "transformer"}, "value_residual.*'none'"),
        ("resformer_release", {"name": "resformer"}, "value_residual.*'learnable_plus'"),
        ("attnres_community", {"name": "transformer"}, "stream"),
        ("attnres_community", {"name": "attnres", "block_size": 3}, "stream.block_size"),
        ("attnres_community", {"name": "rd-attnres"}, "stream.own_value_gamma"),
        ("attnres_community", {"name": "rd-attnres-tied"}, "stream.control"),
        ("huggingface", {"name": "transformer"}, "layout: 'huggingface' cannot be written"),
        ("nowhere", {"name": "transformer"}, "layout: 'nowhere'"),
    ],
)  # fmt: skip
def test_what_a_layout_cannot_express(layout, build, named, tmp_path):
    model = satlens.build(**{"n_layers": 2, "d_model": 16, "n_heads": 4, "d_vocab": 11, **build})
    with pytest.raises(ConfigError, match=named):
        satlens.save(model, tmp_path / "out", layout=layout)
    assert list(tmp_path.iterdir()) == []


def test_training_has_no_place_in_foreign_layouts(tiny, tmp_path):
    with pytest.raises(ConfigError, match="training"):
        satlens.save(tiny, tmp_path / "out", training={}, layout="satformer_repo")


@pytest.mark.parametrize("bias", [False, True])
def test_fused_rows_are_joined_and_split_exactly(bias):
    model = satlens.build(
        "satformer", n_layers=2, d_model=16, n_heads=4, n_key_value_heads=2, d_mlp=24, d_vocab=11,
        qkv_bias=bias, init="normal_0.02",
    )  # fmt: skip
    state = model.state_dict()
    layout = layout_named("satformer_repo")
    config, tensors = layout.write(model.cfg, state)
    qkv = state["blocks.1.attn.qkv.weight"]
    assert torch.equal(tensors["model.layers.1.attn.q_proj.weight"], qkv[:16])
    assert torch.equal(tensors["model.layers.1.attn.k_proj.weight"], qkv[16:24])
    assert torch.equal(tensors["model.layers.1.attn.v_proj.weight"], qkv[24:])
    mlp = state["blocks.0.mlp.gate_up.weight"]
    assert torch.equal(tensors["model.layers.0.mlp.gate_proj.weight"], mlp[:24])
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], mlp[24:])
    assert ("model.layers.0.attn.k_proj.bias" in tensors) == bias
    back = layout.gather(layout.model_config(config, "config.json"), tensors, "model.safetensors")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def copy(golden, name, tmp_path):
    target = tmp_path / name
    shutil.copytree(golden / name, target)
    return target


def test_latest_folder_with_compiled_names(golden, tmp_path):
    folder = copy(golden, "satformer-repo-satformer-gqa", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors["model.embeddings.weight"]  # tied: torch.save keeps both
    torch.save({f"_orig_mod.{k}": v for k, v in tensors.items()}, folder / "pytorch_model.bin")
    assert_same(satlens.load(folder), satlens.load(golden / folder.name))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        satlens.load(folder)


def test_sharded_files(golden, tmp_path):
    folder = copy(golden, "fla-attnres-block4", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({k: tensors[k] for k in part}, folder / file)
    table = {k: file for file, part in halves.items() for k in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    model = satlens.load(folder)
    assert_same(model, satlens.load(golden / folder.name))
    index.write_text(json.dumps({"weight_map": {**table, names[0]: "../b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"weight_map: '../b.safetensors'"):
        satlens.load(folder)
    index.write_text(json.dumps({"weight_map": table}))
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        satlens.load(folder)


def test_old_llama_buffers_are_known(golden, tmp_path):
    folder = copy(golden, "resformer-release-baseline", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    assert_same(satlens.load(folder), satlens.load(golden / folder.name))


def test_mixed_dtypes_lose_no_bit(golden, tmp_path):
    folder = copy(golden, "satformer-repo-satformer-gqa", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    mixed = {k: v if "norm" in k else v.bfloat16() for k, v in tensors.items()}
    save_file(mixed, folder / "model.safetensors")
    model = satlens.load(folder)
    assert model.dtype == torch.float32
    assert torch.equal(model.embed.weight, mixed["model.embeddings.weight"].float())
    assert torch.equal(model.ln_final.weight, tensors["model.norm.weight"])
    assert satlens.load(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_resformer_keys_survive(tmp_path):
    residual = StaticValueResidual(lambda2_init=0.25, last_k=2)
    model = satlens.build("transformer", n_layers=4, d_model=16, d_vocab=11, value_residual={
        "kind": "static", "lambda2_init": 0.25, "last_k": 2,
    })  # fmt: skip
    satlens.save(model, tmp_path / "final", layout="satformer_repo")
    again = satlens.load(tmp_path / "final")
    assert again.cfg.value_residual == residual
    assert again.cfg.value_layers == (2, 3)
    assert_same(again, model)


def assert_same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
