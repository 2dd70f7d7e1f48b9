"""Generation: greedy is what full passes would choose, sampling what transformers would keep."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from straight_line import random_model, random_tokens

import satlens
from satlens.cli import main
from satlens.data.tokenizers import train_bpe
from satlens.errors import ConfigError, DataError
from satlens.models.generation import restrict
from satlens.models.presets import VARIANTS

TEXT = "the cat sat on the mat and the dog sat on the log"
GATE = "blocks.1.attn.hook_v_gate"


def text_model(name="satformer", dtype=torch.float64, **fields):
    model = random_model(name, dtype=dtype, d_vocab=270, n_ctx=64, **fields)
    model.tokenizer = train_bpe([TEXT], 270)
    return model


def greedy(model, tokens, n, **options):
    """The likeliest continuation, by a full pass over everything for each token."""
    with torch.no_grad():
        for _ in range(n):
            logits = model(tokens, **options)[:, -1]
            tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), 1)
    return tokens


# -- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_is_the_likeliest_token_each_time(name):
    model, tokens = random_model(name), random_tokens(2, 5)
    expected = greedy(model, tokens, 7)
    assert len(expected[:, 5:].unique()) > 1
    assert torch.equal(model.generate(tokens, 7), expected)


def test_a_row_depends_on_no_other_row():
    """Whatever the padding beside it."""
    model = text_model("rd-attnres", value_residual="satformer")
    texts = [TEXT, "the", "dog sat", TEXT[4:30]]
    assert model.generate(texts, 9) == [model.generate(text, 9) for text in texts]
    tokens = model.generate(texts, 9, return_type="tokens")
    assert tokens.shape[1] == model.to_tokens(TEXT).shape[1] + 9
    for row, text in zip(tokens, texts, strict=True):
        alone = model.generate(model.to_tokens(text), 9)[0]
        assert torch.equal(row[-len(alone) :], alone)


def test_ids_padded_on_the_left():
    model, tokens = random_model("satformer"), random_tokens(2, 6)
    mask = torch.tensor([[0, 0, 0, 0, 0, 1], [1] * 6])
    found = model.generate(tokens, 5, attention_mask=mask)
    assert torch.equal(found[:, :6], tokens)
    assert torch.equal(found[0, 5:], greedy(model, tokens[:1, 5:], 5)[0])
    assert torch.equal(found[1], greedy(model, tokens[1:], 5)[0])
    whole = torch.ones_like(tokens)
    assert torch.equal(model.generate(tokens, 5, attention_mask=whole), greedy(model, tokens, 5))


def test_text_in_text_out():
    model = text_model()
    ids = model.generate(model.to_tokens(TEXT), 6)
    assert model.generate(TEXT, 6) == model.to_string(ids)
    assert model.generate([TEXT], 6) == [model.to_string(ids)]
    assert torch.equal(model.generate(TEXT, 6, return_type="tokens"), ids)
    assert model.generate(model.to_tokens(TEXT), 6, return_type="text") == [model.to_string(ids)]
    assert model.generate(TEXT, 1).startswith(TEXT)
    assert model.generate(TEXT).startswith(TEXT)


def test_rows_end():
    model = text_model(seed=1)
    texts = ["the dog", "the cat sat"]
    free = [model.generate(model.to_tokens(text), 12)[0].tolist() for text in texts]
    n_prompt = [model.to_tokens(text).shape[1] for text in texts]
    end = free[0][n_prompt[0] + 3]
    stops = [
        row.index(end, n) if end in row[n:] else len(row)
        for row, n in zip(free, n_prompt, strict=True)
    ]
    new = [stop - n for stop, n in zip(stops, n_prompt, strict=True)]
    assert new[0] <= 3 and new[0] != new[1]
    found = model.generate(texts, 12, eos_token_id=end)
    assert found == [
        model.to_string(torch.tensor(row[:stop])) for row, stop in zip(free, stops, strict=True)
    ]
    tokens = model.generate(texts, 12, eos_token_id=[end, 3], return_type="tokens")
    assert tokens.shape[1] == max(n_prompt) + min(max(new) + 1, 12)
    filled = tokens[new.index(min(new)), max(n_prompt) + min(new) :]
    assert (filled == end).all() and len(filled) > 1


def test_the_tokenizers_end_of_text_ends_a_row():
    model = text_model()

    def end_after_two(tensor, hook):
        if tensor.shape[1] == 1:
            calls.append(tensor)
            tensor[:, :, 0] = 1e6 if len(calls) == 3 else -1e6

    calls = []
    with model.hooks([("hook_logits", end_after_two)]):
        tokens = model.generate(model.to_tokens(TEXT), 9)
    assert tokens[0, -1] == 0 and tokens.shape[1] == model.to_tokens(TEXT).shape[1] + 3
    calls = []
    with model.hooks([("hook_logits", end_after_two)]):
        assert model.generate(TEXT, 9) == model.to_string(tokens[:, :-1])
    calls = []
    with model.hooks([("hook_logits", end_after_two)]):
        assert len(model.generate(model.to_tokens(TEXT), 9, eos_token_id=None)[0]) == (
            tokens.shape[1] + 6
        )


# -- sampling -------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 3, 10, 99]),
    top_p=st.sampled_from([None, 0.01, 0.3, 0.9, 1.0]),
    ties=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_top_k_and_top_p_are_those_of_transformers(seed, temperature, top_k, top_p, ties):
    from transformers.generation import logits_process as theirs

    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(seed)) * 3
    if ties:
        logits = logits.round()
    warpers = [theirs.TemperatureLogitsWarper(temperature)]
    warpers += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [theirs.TopPLogitsWarper(top_p)] if top_p else []
    expected = logits
    for warper in warpers:
        expected = warper(torch.zeros(3, 1, dtype=torch.int64), expected)
    assert torch.equal(restrict(logits / temperature, top_k, top_p), expected)


def test_draws_follow_the_distribution():
    """One token after 6,000 equal prompts, against the exact probabilities (chi-square)."""
    from scipy.stats import chisquare

    model = random_model("satformer", dtype=torch.float32)
    prompt = random_tokens(1, 4)
    settings = {"temperature": 0.8, "top_k": 6}
    with torch.no_grad():
        p = restrict(model(prompt)[0, -1:] / 0.8, 6, None).softmax(-1)[0].double()
    n = 6_000
    drawn = model.generate(prompt.expand(n, -1), 1, do_sample=True, seed=0, **settings)[:, -1]
    counts = torch.bincount(drawn, minlength=len(p))
    assert counts[p == 0].sum() == 0
    kept = p > 0
    assert chisquare(counts[kept], n * p[kept] / p[kept].sum()).pvalue > 1e-3


def test_draws_are_reproducible():
    model, tokens = random_model("rd-attnres"), random_tokens(2, 4)

    def draw(**options):
        return model.generate(tokens, 12, do_sample=True, **options)

    first = draw(seed=3)
    assert torch.equal(first, draw(seed=3))
    assert torch.equal(first, draw(generator=torch.Generator().manual_seed(3)))
    assert not torch.equal(first, draw(seed=4))
    state = torch.get_rng_state()
    draw(seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(draw(), draw())
    assert torch.equal(draw(seed=1, top_k=1), model.generate(tokens, 12))
    assert torch.equal(draw(seed=1, temperature=1e-4), model.generate(tokens, 12))
    assert torch.equal(draw(seed=1, top_p=1e-6), model.generate(tokens, 12))


# -- hooks, interventions, modes ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["satformer", "rd-attnres", "muddformer", "hyperconnections"])
def test_what_hooks_see_is_one_pass_over_the_final_sequence(name):
    """Every position once, but for the last token, which nothing has read."""
    model, tokens = random_model(name), random_tokens(2, 5)
    names = [site.hook for site in model.sites] + ["hook_logits"]
    seen = {point: [] for point in names}
    with model.hooks([(names, lambda tensor, hook: seen[hook.name].append(tensor.clone()))]):
        final = model.generate(tokens, 6)
    with torch.no_grad():
        _, full = model.run_with_cache(final[:, :-1], names_filter=names)
    for point, parts in seen.items():
        assert (torch.cat(parts, 1) - full[point]).abs().max() < 1e-10, point


@pytest.mark.parametrize(
    ("name", "make"),
    [("satformer", satlens.ZeroGate), ("rd-attnres", satlens.UniformRoute)],
)
def test_generation_under_an_intervention(name, make):
    model, tokens = random_model(name), random_tokens(2, 5)
    clean = model.generate(tokens, 12)
    with satlens.intervene(model, make()):
        expected = greedy(model, tokens, 12)
        assert torch.equal(model.generate(tokens, 12), expected)
    assert not torch.equal(clean, expected)
    assert torch.equal(model.generate(tokens, 12), clean)


def test_text_under_an_intervention():
    model = text_model()
    with satlens.intervene(model, satlens.ZeroGate()), torch.no_grad():
        assert torch.equal(model(TEXT), model(model.to_tokens(TEXT)))


def test_modes():
    model, tokens = random_model("satformer"), random_tokens(2, 5)
    expected = model.generate(tokens, 8)
    for context in (satlens.attention("eager"), torch.inference_mode(), torch.enable_grad()):
        with context:
            found = model.generate(tokens, 8)
        assert torch.equal(found, expected) and not found.requires_grad
    assert torch.equal(model.train().generate(tokens, 8), expected)
    steps = []
    model.generate(tokens, 8, progress=lambda *step: steps.append(step))
    assert steps == [("generate", done, 8) for done in range(9)]


@pytest.mark.usefixtures("_as_outside_tests")
def test_a_compiled_model_generates_uncompiled():
    """Compiled code would be made for every length, and for every border of the logit lens."""
    model, tokens = random_model("satformer"), random_tokens(2, 5)
    expected, lens, calls = model.generate(tokens, 8), model.logit_lens(tokens), []

    def backend(graph, inputs):
        calls.append(graph)
        return graph

    model.compile(backend=backend)
    assert torch.equal(model.generate(tokens, 8), expected)
    assert torch.equal(model.logit_lens(tokens), lens)
    assert not calls
    with torch.no_grad():
        model(tokens)
    assert calls


# -- refusals -------------------------------------------------------------------------------------

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
REFUSED = {
    "no new tokens": (IDS, {"max_new_tokens": 0}, "max_new_tokens: must be positive, got 0"),
    "too many": (IDS, {"max_new_tokens": 62}, "3 prompt tokens and 62 new ones exceed n_ctx=64"),
    "temperature 0": (IDS, {"do_sample": True, "temperature": 0.0}, "temperature: must be pos"),
    "top_k 0": (IDS, {"do_sample": True, "top_k": 0}, "top_k: must be positive"),
    "top_p 0": (IDS, {"do_sample": True, "top_p": 0.0}, r"top_p: must lie in \(0, 1\]"),
    "top_p above 1": (IDS, {"do_sample": True, "top_p": 1.5}, r"top_p: must lie in \(0, 1\]"),
    "greedy temperature": (IDS, {"temperature": 0.5}, "temperature, top_k, top_p: .*do_sample"),
    "greedy top_k": (IDS, {"top_k": 5}, "do_sample"),
    "seed twice": (
        IDS,
        {"do_sample": True, "seed": 1, "generator": torch.Generator()},
        "seed, generator",
    ),
    "end outside": (IDS, {"eos_token_id": 270}, "eos_token_id: 270 is outside d_vocab=270"),
    "end by name": (IDS, {"eos_token_id": "</s>"}, "eos_token_id: must be ids, 'auto' or None"),
    "return type": (IDS, {"return_type": "str"}, "return_type: must be auto, tokens or text"),
    "right padding": (
        IDS,
        {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
        "attention_mask: .*pad on the left",
    ),
    "holes": (
        IDS,
        {"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])},
        "attention_mask: .*pad on the left",
    ),
    "mask shape": (IDS, {"attention_mask": torch.ones(2, 4)}, "attention_mask: expected the shape"),
    "one row of ids": (IDS[0], {}, r"tokens: expected \(batch, position\)"),
    "ids as floats": (IDS.float(), {}, "tokens: expected a tensor of int64 ids"),
    "ids outside": (IDS + 300, {}, "outside d_vocab"),
    "a list of ids": ([1, 2], {}, "prompt: expected a text, texts or a tensor of ids"),
    "no texts": ([], {}, "prompt: expected a text, texts or a tensor of ids"),
    "no text": (["the", ""], {}, "prompt: a text of no tokens"),
    "mask of texts": (["the"], {"attention_mask": IDS}, "attention_mask: goes with ids"),
}


@pytest.mark.usefixtures("_as_outside_tests")
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line(case):
    model = text_model()
    prompt, options, message = REFUSED[case]
    with pytest.raises((ConfigError, DataError), match=message) as error:
        model.generate(prompt, **options)
    assert "\n" not in str(error.value)


def test_no_tokenizer():
    model = random_model("satformer")
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        model.generate("the")
    with pytest.raises(TypeError):
        model.generate(IDS, num_beams=2)


# -- from the shell -------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    """A saved model, its folder, and a function from arguments to (code, stdout, stderr)."""
    model = text_model(dtype=torch.float32)
    satlens.save(model, tmp_path / "model")

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["satlens", "generate", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        return code or 0, *capsys.readouterr()

    return model, tmp_path / "model", run


def test_the_command(shell):
    model, folder, run = shell
    code, out, err = run(folder, TEXT, "--max-new-tokens", 8)
    assert code == 0, err
    assert out == model.generate(TEXT, 8) + "\n"
    sampling = ("--sample", "--temperature", 0.7, "--top-k", 9, "--top-p", 0.8, "--seed", 5)
    code, out, err = run(folder, TEXT, "--max-new-tokens", 8, *sampling, "--json")
    facts = json.loads(out)
    options = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "seed": 5}
    assert facts["text"] == model.generate(TEXT, 8, **options)
    assert {key: facts[key] for key in options} == options
    assert facts["sha256"]
    code, out, err = run(folder, TEXT, "--intervene", "zero-gate", "--max-new-tokens", 30)
    with satlens.intervene(model, satlens.ZeroGate()):
        assert out == model.generate(TEXT, 30) + "\n"
    assert out != model.generate(TEXT, 30) + "\n"


def test_the_command_under_several_interventions(shell):
    model, folder, run = shell
    texts = ("--intervene", "zero-gate:layer=1", "--intervene", "scale-gate:factor=2,layer=1")
    code, out, err = run(folder, TEXT, *texts, "--max-new-tokens", 8, "--json")
    assert code == 0, err
    assert json.loads(out)["intervention"] == "zero-gate:layer=1; scale-gate:layer=1,factor=2"
    with satlens.intervene(model, satlens.ZeroGate(layer=1)):
        assert json.loads(out)["text"] == model.generate(TEXT, 8)


def test_the_command_refuses_in_one_line(shell):
    model, folder, run = shell
    model.tokenizer = None
    satlens.save(model, folder.parent / "bare")
    for arguments, message in (
        ((folder.parent / "bare", TEXT), "bare: no tokenizer.json"),
        ((folder, TEXT, "--max-new-tokens", 64), "n_ctx=64"),
        ((folder, TEXT, "--top-k", 5), "--sample"),
        ((folder, TEXT, "--intervene", "close"), "intervention 'close': unknown kind"),
        ((folder, TEXT, "--intervene", "mean-gate"), "satlens.MeanGate"),
        ((folder, TEXT, "--intervene", "uniform-route"), "no routes"),
        ((folder, ""), "no tokens"),
    ):
        code, out, err = run(*arguments)
        assert code == 1 and not out
        assert len(err.strip().splitlines()) == 1 and message in err, err
