"""Text in and out of a model: no special tokens, no silent padding."""

from __future__ import annotations

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import satlens
from satlens.data.tokenizers import train_bpe
from satlens.errors import DataError

TEXT = "the cat sat on the mat"


@pytest.fixture
def model():
    tokenizer = train_bpe([TEXT], 270)
    # What Llama-style tokenizer.json files do unless told otherwise.
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    built = satlens.build("satformer", n_layers=2, d_model=16, n_heads=2, d_vocab=270, n_ctx=32)
    built.tokenizer = tokenizer
    return built


def test_no_special_token_is_added(model):
    assert model.tokenizer.encode(TEXT).ids[0] == 0
    ids = model.to_tokens(TEXT)
    assert ids.dtype == torch.int64
    assert not (ids == 0).any()
    assert model.to_string(ids) == TEXT
    assert "".join(model.to_str_tokens(TEXT)) == TEXT
    assert torch.equal(model.to_tokens([TEXT, TEXT]), ids.expand(2, -1))


def test_single_tokens(model):
    ids = model.to_tokens(TEXT)[0]
    first = model.to_str_tokens(TEXT)[0]
    assert model.to_single_token(first) == ids[0]
    direction = model.unembed.weight[ids[0]] * model.ln_final.weight
    assert torch.equal(model.tokens_to_residual_directions(first), direction)
    for text in (TEXT, ""):
        with pytest.raises(DataError, match="tokens, not one"):
            model.to_single_token(text)


def test_ragged_texts_are_refused(model):
    for call in (model.to_tokens, model):
        with pytest.raises(DataError, match="padding; pass them one by one") as error:
            call([TEXT, "the"])
        assert "\n" not in str(error.value)


@torch.no_grad()
def test_a_model_takes_text(model):
    ids = model.to_tokens(TEXT)
    assert torch.equal(model(TEXT), model(ids))
    assert torch.equal(model([TEXT, TEXT], "loss"), model(ids.expand(2, -1), "loss"))
    name = "blocks.1.attn.hook_v_gate"
    _, cache = model.run_with_cache(TEXT, names_filter=name)
    assert torch.equal(cache[name], model.run_with_cache(ids, names_filter=name)[1][name])


@pytest.mark.usefixtures("_as_outside_tests")
@pytest.mark.parametrize(
    "wrong", [[1, 2], None, 3, [], ["the", 3], torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool)]
)
def test_other_inputs_are_one_line(model, wrong):
    with pytest.raises(DataError, match="tokens: expected a tensor of int64 ids, or text, got"):
        model(wrong)


@pytest.mark.usefixtures("_as_outside_tests")
def test_empty_text_and_no_tokenizer(model):
    with pytest.raises(DataError, match="not empty"):
        model("")
    for wrong in ([], 3, None):
        with pytest.raises(DataError, match="text: expected a str or a list of str"):
            model.to_tokens(wrong)
    model.tokenizer = None
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        model(TEXT)
