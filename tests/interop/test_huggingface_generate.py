"""transformers' generate on satlens models: its own Llama says what is right, then ours."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import satlens
from satlens.errors import DataError
from satlens.interop.huggingface import SatlensKVCache, to_hf

WAYS = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "top_k": 7, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "drawn beams": {"do_sample": True, "num_beams": 2, "top_k": 5},
    "ends": {"do_sample": False, "eos_token_id": 3, "pad_token_id": 3},
    "looked up": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "in chunks": {"do_sample": False, "prefill_chunk_size": 3},
}
STREAMS = ("satformer", "attnres", "rd-attnres", "denseformer", "muddformer", "hyperconnections")


@pytest.fixture
def padded(tokens):
    """Prompts of 4, 7 and 6 tokens."""
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    mask[2, :1] = 0
    return tokens, mask


def run(model, prompts, way, **options):
    tokens, mask = prompts
    if way == "looked up":  # one row at a time
        tokens, mask = tokens[1:2], mask[1:2]
    torch.manual_seed(4)
    settings = {"max_new_tokens": 9, **WAYS[way], **options}
    return model.generate(tokens, attention_mask=mask, **settings)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """transformers' Llama and the same weights in satlens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=32,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("llama")
    llama = LlamaForCausalLM(config).eval()
    llama.save_pretrained(folder)
    return llama, to_hf(satlens.load(folder))


@pytest.mark.parametrize("way", WAYS)
def test_a_llama_generates_the_same(way, llamas, padded):
    llama, ours = llamas
    expected = run(llama, padded, way)
    assert torch.equal(run(ours, padded, way), expected)
    if way not in ("looked up", "in chunks"):
        assert torch.equal(run(ours, padded, way, use_cache=False), expected)


@pytest.mark.parametrize("name", STREAMS)
def test_every_stream_generates_as_by_itself(name, build, padded):
    model = build(name)
    hf = to_hf(model)
    tokens, mask = padded
    expected = model.generate(tokens, 9, attention_mask=mask)
    for way in ("greedy", "in chunks"):
        assert torch.equal(run(hf, padded, way), expected)
    torch.manual_seed(4)
    drawn = model.generate(tokens, 9, attention_mask=mask, do_sample=True, top_k=7, temperature=0.8)
    assert torch.equal(run(hf, padded, "drawn"), drawn)
    assert torch.equal(run(hf, padded, "beams"), run(hf, padded, "beams", use_cache=False))


def test_a_cache_is_continued(build, tokens):
    model = build("satformer")
    hf, cache = to_hf(model), SatlensKVCache()
    some = hf.generate(tokens, max_new_tokens=4, do_sample=False, cache=cache)
    assert cache.get_seq_length() == len(cache.kv) == 10
    assert cache.batch_size == 3
    more = hf.generate(some, max_new_tokens=5, do_sample=False, cache=cache)
    assert torch.equal(more, model.generate(tokens, 9))
    cache.crop(-3)
    assert cache.get_seq_length() == 12
    with torch.no_grad():
        again = hf(more[:, 12:14], cache=cache).logits
    assert (again - model(more[:, :14])[:, -2:]).abs().max() < 1e-5
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 4]))
    assert cache.batch_size == 2
    with torch.no_grad():
        rows = hf(more[[0, 2], 14:15], past_key_values=cache).logits
    assert (rows - model(more[[0, 2], :15])[:, -1:]).abs().max() < 1e-5
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)


def test_other_caches_are_refused(build, tokens):
    hf = to_hf(build("satformer"))
    with pytest.raises(DataError, match="expected a SatlensKVCache, got DynamicCache"):
        hf.generate(tokens, max_new_tokens=2, cache=DynamicCache())
    with pytest.raises(ValueError, match="cache_implementation"):
        hf.generate(tokens, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(TypeError, match="inputs_embeds"):
        hf.generate(inputs_embeds=torch.zeros(1, 2, 16), max_new_tokens=2)
    with pytest.raises(DataError, match="exceed n_ctx=32"):
        hf.generate(tokens, max_new_tokens=40, do_sample=False)
