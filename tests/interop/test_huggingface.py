"""satlens models behind transformers' interface: files, losses, training switches."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import satlens
from satlens.errors import CheckpointError, ConfigError, DataError
from satlens.interop.huggingface import (
    SatlensConfig,
    SatlensForCausalLM,
    from_hf,
    to_hf,
    to_hf_tokenizer,
)
from satlens.models.presets import VARIANTS

TIED = ("satformer", "muddformer", "hyperconnections")


def same_weights(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_folders_open_on_both_sides(name, build, tokens, tmp_path):
    """Every weight equals the file's to the bit, whoever wrote it and whoever opens it."""
    model = build(name, tied_embeddings=name in TIED)
    to_hf(model).save_pretrained(tmp_path / "hf")
    satlens.save(model, tmp_path / "native")
    for folder, prefix in (("hf", "model."), ("native", "")):
        files = load_file(tmp_path / folder / "model.safetensors")
        ours = satlens.load(tmp_path / folder)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert files.keys() == {prefix + key for key in model.state_dict()}
        for key, tensor in model.state_dict().items():
            assert torch.equal(files[prefix + key], tensor), key
        for opened in (ours, from_hf(theirs)):
            same_weights(model, opened)
            assert opened.cfg == model.cfg
            assert not opened.training
        with torch.no_grad():
            assert torch.equal(theirs(tokens).logits, model(tokens))
            assert torch.equal(ours(tokens), model(tokens))
    assert ours.provenance["layout"] == "satlens"
    assert satlens.load(tmp_path / "hf").provenance["layout"] == "huggingface"


def test_no_code_travels(build, tmp_path):
    to_hf(build("satformer")).save_pretrained(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_a_folder_saved_in_parts(build, tmp_path):
    model = build("rd-attnres")
    to_hf(model).save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    same_weights(model, satlens.load(tmp_path))
    same_weights(model, from_hf(SatlensForCausalLM.from_pretrained(tmp_path)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype, build, tmp_path):
    model = build("satformer")
    satlens.save(model, tmp_path / "wide")
    cast = SatlensForCausalLM.from_pretrained(tmp_path / "wide", dtype=dtype, device_map="cpu")
    same_weights(model.to(dtype), from_hf(cast))
    cast.save_pretrained(tmp_path / "cast")
    same_weights(model, from_hf(AutoModelForCausalLM.from_pretrained(tmp_path / "cast")))
    assert AutoConfig.from_pretrained(tmp_path / "cast").dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fresh_weights_are_our_own(dtype):
    """from_config starts where satlens.build does, whatever torch's default dtype."""
    expected = satlens.build("hyperconnections", n_layers=2, dtype=dtype, seed=3)
    config = SatlensConfig.of(expected.cfg)
    fresh = AutoModelForCausalLM.from_config(config, dtype=dtype, seed=3)
    same_weights(expected, from_hf(fresh))


def test_a_state_dict_in_memory(build):
    hf = to_hf(build("resformer-learnable"))
    again = SatlensForCausalLM.from_pretrained(
        None, config=hf.config, state_dict=dict(hf.state_dict())
    )
    same_weights(from_hf(hf), from_hf(again))


@pytest.mark.parametrize("side", ["hf", "native"])
def test_incomplete_files_are_refused(side, build, tmp_path):
    model = build("attnres")
    to_hf(model).save_pretrained(tmp_path / "hf")
    satlens.save(model, tmp_path / "native")
    (tmp_path / "native" / "manifest.json").unlink()
    config = json.loads((tmp_path / side / "config.json").read_text())
    # As a tool that knows nothing of manifests would leave it.
    (tmp_path / side / "config.json").write_text(json.dumps({"transformers_version": "", **config}))
    file = tmp_path / side / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("blocks.1.attn_read.query"))
    gone = tensors.pop(name)
    extra = {**tensors, name: gone, "surprise": gone.clone()}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks tensors: model\.blocks\.1\.attn_read\.query"):
        SatlensForCausalLM.from_pretrained(tmp_path / side)
    save_file(extra, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="unknown tensors: surprise"):
        SatlensForCausalLM.from_pretrained(tmp_path / side)


def test_the_manifest_is_checked(build, tmp_path):
    satlens.save(build("satformer"), tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: sha256 differs"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a")


def test_configurations(build):
    model = build("muddformer", d_mlp=(20, 24, 0), value_residual="satformer")
    config = SatlensConfig.of(model.cfg)
    again = SatlensConfig.from_dict(json.loads(config.to_json_string()))
    assert again.to_satlens() == model.cfg
    assert again.model == config.model
    assert (config.hidden_size, config.vocab_size, config.num_hidden_layers) == (16, 29, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 6)
    assert config.max_position_embeddings == 32
    with pytest.raises(ConfigError, match=r"model: n_layers: must be positive"):
        SatlensConfig(model={"n_layers": 0})
    with pytest.raises(CheckpointError, match="version: 9 is newer"):
        SatlensConfig(model={}, version=9)
    with pytest.raises(CheckpointError, match="format: expected 'satlens'"):
        SatlensConfig(model={}, format="other")


# -- the model -------------------------------------------------------------------------------------


def test_losses(build, tokens):
    """Labels are shifted by the model, -100 is skipped, the mean is over what is scored."""
    model = build("satformer")
    hf = to_hf(model)
    output = hf(tokens, labels=tokens)
    assert (output.loss - model(tokens, return_type="loss")).abs() < 1e-6
    labels = tokens.clone()
    labels[0, :4] = -100
    logits = output.logits[:, :-1].reshape(-1, 29)
    summed = functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum")
    scored = (labels[:, 1:] != -100).sum()
    assert (hf(tokens, labels=labels).loss - summed / scored).abs() < 1e-6
    assert (hf(tokens, labels=labels, num_items_in_batch=5).loss - summed / 5).abs() < 1e-5
    loss, logits = hf(tokens, labels=labels, return_dict=False)
    assert loss.ndim == 0
    assert torch.equal(logits, output.logits)
    gradient = torch.autograd.grad(hf(tokens, labels=tokens).loss, model.embed.weight)[0]
    expected = torch.autograd.grad(model(tokens, return_type="loss"), model.embed.weight)[0]
    assert (gradient - expected).abs().max() < 1e-6


def test_padding_and_kept_logits(build, tokens):
    model = build("rd-attnres")
    hf = to_hf(model)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    with torch.no_grad():
        padded = hf(tokens, attention_mask=mask).logits
        assert torch.equal(padded, model(tokens, attention_mask=mask))
        assert (padded[1, 3:] - model(tokens[1:2, 3:])[0]).abs().max() < 1e-5
        assert torch.equal(hf(tokens, logits_to_keep=2).logits, model(tokens)[:, -2:])
        places = torch.tensor([0, 3])
        assert torch.equal(hf(tokens, logits_to_keep=places).logits, model(tokens)[:, places])
        kept = hf(tokens, attention_mask=mask, use_cache=True, logits_to_keep=1)
        assert kept.logits.shape == (3, 1, 29)
        assert (kept.logits[:, 0] - padded[:, -1]).abs().max() < 1e-5


def test_eager_attention_on_request(build, tokens, tmp_path):
    model = build("satformer")
    satlens.save(model, tmp_path / "a")
    eager = SatlensForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="eager")
    with torch.no_grad(), satlens.attention("eager"):
        expected = model(tokens)
    with torch.no_grad():
        assert torch.equal(eager(tokens).logits, expected)
        assert torch.equal(to_hf(model)(tokens).logits, model(tokens))
    with pytest.raises(ValueError, match="Flash Attention"):
        SatlensForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="flash_attention_2")


def test_gradient_checkpointing(build, tokens):
    model = build("satformer").train()
    hf = to_hf(model)
    assert hf.training
    plain = torch.autograd.grad(hf(tokens, labels=tokens).loss, list(model.parameters()))
    hf.activation_checkpointing_enable()
    assert model.gradient_checkpointing
    assert hf.is_activation_checkpointing
    calls = []
    forward = model.blocks[1].mlp.forward
    model.blocks[1].mlp.forward = lambda y: calls.append(1) or forward(y)
    again = torch.autograd.grad(hf(tokens, labels=tokens).loss, list(model.parameters()))
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    hf.activation_checkpointing_disable()
    assert not model.gradient_checkpointing
    for options in (
        {"every_n_layers": 2},
        {"offload": True},
        {"activation_checkpointing_kwargs": {"use_reentrant": True}},
    ):
        with pytest.raises(ConfigError, match="gradient_checkpointing"):
            hf.activation_checkpointing_enable(**options)


def test_hooks_and_interventions_work_inside(build, tokens):
    model = build("satformer")
    hf = to_hf(model)
    with torch.no_grad(), satlens.intervene(from_hf(hf), satlens.ZeroGate()):
        zeroed = hf(tokens).logits
    with torch.no_grad():
        assert (zeroed - hf(tokens).logits).abs().max() > 1e-3
        expected = model.run_with_hooks(
            tokens,
            fwd_hooks=[(lambda n: n.endswith("hook_v_gate"), lambda t, hook: torch.zeros_like(t))],
        )
    assert torch.equal(zeroed, expected)


def test_what_is_not_offered(build, tokens):
    model = build("satformer")
    hf = to_hf(model)
    assert hf.get_input_embeddings() is model.embed
    assert hf.get_output_embeddings() is model.unembed
    assert to_hf(build("satformer", tied_embeddings=True)).get_output_embeddings() is None
    assert hf.resize_token_embeddings(29) is model.embed
    for call in (
        lambda: hf.resize_token_embeddings(31),
        lambda: hf.set_input_embeddings(torch.nn.Embedding(31, 16)),
        lambda: hf.set_output_embeddings(torch.nn.Linear(16, 31)),
        lambda: hf(tokens, output_hidden_states=True),
        lambda: hf(tokens, output_attentions=True),
        lambda: from_hf(model),
    ):
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(DataError, match="input_ids: missing"):
        hf()
    with pytest.raises(DataError, match="tokenizer: this model has none"):
        to_hf_tokenizer(model)
    with pytest.raises(TypeError):
        hf(tokens, position_ids=tokens)


# -- tokenizers ------------------------------------------------------------------------------------


def test_tokenizers_travel(build, tokenizer, tmp_path):
    model = build("satformer", d_vocab=260)
    model.tokenizer = tokenizer
    hf = to_hf(model)
    hf.save_pretrained(tmp_path / "hf")
    satlens.save(model, tmp_path / "native")
    text = "the cat barked"
    expected = model.to_tokens(text)[0].tolist()
    for folder in ("hf", "native"):
        opened = SatlensForCausalLM.from_pretrained(tmp_path / folder)
        assert opened.generation_config.eos_token_id == 0
        for other in (from_hf(opened), satlens.load(tmp_path / folder)):
            assert other.to_tokens(text)[0].tolist() == expected
        assert AutoTokenizer.from_pretrained(tmp_path / folder)(text)["input_ids"] == expected
    short = model.to_tokens("a cat")[0].tolist()
    batch = to_hf_tokenizer(model)(["a cat", text], padding=True, return_tensors="pt")
    missing = len(expected) - len(short)
    assert batch["attention_mask"][0].tolist() == [0] * missing + [1] * len(short)
    assert batch["input_ids"].tolist() == [[0] * missing + short, expected]
    with torch.no_grad():
        logits = hf(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits
        alone = model(text)
    assert (logits[1] - alone[0]).abs().max() < 1e-5
