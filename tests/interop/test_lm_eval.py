"""satlens models in lm-eval: against its Hugging Face backend, closed forms, what is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from tokenizers import processors

import satlens
from satlens.data.tokenizers import train_bpe
from satlens.errors import AnalysisError, ConfigError, DataError, HookError
from satlens.interop.huggingface import to_hf
from satlens.interop.lm_eval import SatlensLM, main
from satlens.interop.lm_eval.requests import Requests, key_of

CONTEXTS = ["the cat sat on", "a dog barked at the cat ", "", "the dog, the mat and\na cat:", "at"]
CONTINUATIONS = [" the mat", " a cat on the mat, at the dog", "s", " barked"]
TEXTS = ["the cat sat on the mat. " * 9, "a dog barked", "\N{DOG FACE} at the mat\n" * 5]
TOLERANCE = 1e-5


def instance(kind, *arguments, task="made_up", question=0):
    return Instance(kind, {}, arguments, 0, (task, question, 1))


PAIRS = [
    instance("loglikelihood", context, rest, question=i)
    for i, context in enumerate(CONTEXTS)
    for rest in CONTINUATIONS
]
ROLLING = [instance("loglikelihood_rolling", text) for text in TEXTS]
PROMPTS = [
    instance("generate_until", context, {"until": stops, "max_gen_toks": 9, "do_sample": False})
    for context in CONTEXTS
    for stops in (["\n"], ["e", "zz"])
    if context
]


@pytest.fixture
def model(build, tokenizer):
    def make(name="satformer", **fields):
        made = build(name, **{"d_vocab": 260, "n_ctx": 48, **fields})
        made.tokenizer = tokenizer
        return made

    return make


def answers(lm):
    """Of all kinds of requests: log-probabilities, whether they are the likeliest, texts."""
    pairs = lm.loglikelihood(PAIRS, disable_tqdm=True)
    rolling = lm.loglikelihood_rolling(ROLLING, disable_tqdm=True)
    texts = lm.generate_until(PROMPTS, disable_tqdm=True)
    return [value for value, _ in pairs] + rolling, [greedy for _, greedy in pairs], texts


def largest_difference(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


# -- the same numbers as others --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["satformer", "rd-attnres", "muddformer"])
def test_the_exported_model_under_the_hugging_face_backend_gives_the_same(name, model, tmp_path):
    from lm_eval.models.huggingface import HFLM

    ours = model(name)
    to_hf(ours).save_pretrained(tmp_path)
    theirs = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=3)
    values, greedy, texts = answers(SatlensLM(model=ours, batch_size=3))
    others, others_greedy, others_texts = answers(theirs)
    # HFLM adds up in fp32.
    assert values == pytest.approx(others, rel=1e-6, abs=TOLERANCE)
    assert greedy == others_greedy
    assert texts == others_texts and any(texts)


@pytest.mark.parametrize("name", ["satformer", "rd-attnres", "hyperconnections"])
def test_neither_batch_size_nor_padding_moves_a_score(name, model):
    ours = model(name)
    alone = answers(SatlensLM(model=ours, batch_size=1))
    for side in ("left", "right"):
        values, greedy, texts = answers(SatlensLM(model=ours, batch_size=8, padding_side=side))
        assert largest_difference(values, alone[0]) < TOLERANCE
        assert (greedy, texts) == alone[1:]


def test_greedy_texts_are_those_of_generate(model):
    ours = model()
    prompts = [instance("generate_until", c, {"until": [], "max_gen_toks": 9}) for c in CONTEXTS]
    found = SatlensLM(model=ours).generate_until([p for p in prompts if p.args[0]], True)
    expected = ours.generate([c for c in CONTEXTS if c], 9)
    assert [c + text for c, text in zip(filter(None, CONTEXTS), found, strict=True)] == expected


def test_an_intervention_acts_in_every_kind_of_request(model):
    ours = model()
    gate = satlens.ZeroGate(layer=1, head=0)
    with satlens.intervene(ours, gate):
        expected = answers(SatlensLM(model=ours))
    assert answers(SatlensLM(model=ours, intervene=gate)) == expected
    assert answers(SatlensLM(model=ours, intervene="zero-gate:layer=1,head=0")) == expected
    assert largest_difference(answers(SatlensLM(model=ours))[0], expected[0]) > 0.01
    with pytest.raises(HookError, match="layer 7"):
        SatlensLM(model=ours, intervene=satlens.ZeroGate(layer=7))


# -- closed forms ----------------------------------------------------------------------------------


def test_a_uniform_model_gives_every_token_log_vocabulary_in_nats(model, tokenizer):
    ours = model(d_vocab=300)
    with torch.no_grad():
        ours.unembed.weight.zero_()
    lm = SatlensLM(model=ours, batch_size=3)
    n_tokens = [len(tokenizer.encode(text).ids) for text in TEXTS]
    assert max(n_tokens) > 2 * ours.cfg.n_ctx
    expected = [-n * math.log(300) for n in n_tokens]
    assert lm.loglikelihood_rolling(ROLLING, True) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("max_length", [1, 2, 5, 8])
def test_windows_score_every_token_once_after_all_that_fits(tokenizer, max_length):
    text = "the cat sat on the mat"
    tokens = tokenizer.encode(text).ids
    for n in range(len(tokens) + 1):
        part = tokenizer.decode(tokens[:n])
        requests = Requests(tokenizer, max_length)
        (scoring,) = requests.texts([instance("loglikelihood_rolling", part)])
        assert [t for row in scoring.rows for t in row.targets] == tokens[:n]
        stream, end = [0, *tokens[:n]], 0
        for row in scoring.rows:
            end += len(row.targets)
            assert list(row.inputs) == stream[max(0, end - max_length) : end]


def test_choices_of_one_token_are_read_once(model):
    ours, read = model(), []
    ours.embed.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[0]))
    choices = [instance("loglikelihood", "the cat sat", rest) for rest in ("a", "e", "t", "n")]
    found = SatlensLM(model=ours).loglikelihood(choices, True)
    assert read == [1]
    logits = ours("the cat sat")[0, -1].log_softmax(-1)
    expected = [logits[ours.to_single_token(c.args[1])].item() for c in choices]
    assert [value for value, _ in found] == pytest.approx(expected, abs=1e-6)


# -- tokens ----------------------------------------------------------------------------------------


def test_a_bos_token_is_added_as_the_tokenizer_or_the_option_says():
    tokenizer = train_bpe(["the cat sat"], 260)
    ids = tuple(tokenizer.encode("the cat").ids)

    def inputs(**options):
        requests = Requests(tokenizer, 32, **options)
        (scoring,) = requests.pairs([instance("loglikelihood", "the cat", "s")])
        (rolling,) = requests.texts([instance("loglikelihood_rolling", "the cat")])
        return scoring.rows[0].inputs, rolling.rows[0].inputs

    assert inputs() == (ids, (0, *ids[:-1]))
    assert inputs(add_bos_token=True, prefix_token_id=7) == ((7, *ids), (7, *ids[:-1]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="the $A", special_tokens=[("the", 3)]
    )
    assert inputs() == ((3, *ids), (3, *ids[:-1]))
    assert inputs(add_bos_token=False) == (ids, (3, *ids[:-1]))


def test_a_special_token_spelt_in_a_text_is_text(model):
    lm = SatlensLM(model=model())
    assert 0 not in lm.tok_encode("<|endoftext|>")
    (scoring,) = lm.requests.pairs([instance("loglikelihood", "<|endoftext|>", " a")])
    assert 0 not in scoring.rows[0].inputs


# -- requests that are too long --------------------------------------------------------------------

LONG = instance("loglikelihood", "the cat sat on the mat" * 9, " at a dog", question=7)
LONG_PROMPT = instance("generate_until", "a dog barked " * 20, {"max_gen_toks": 4}, question=8)
SHORT = instance("loglikelihood", "the cat", " sat")


def test_too_long_is_an_error_before_anything_is_scored(model):
    ours, read = model(), []
    ours.register_forward_pre_hook(lambda *_: read.append(0))
    lm = SatlensLM(model=ours)
    for request, answer in ((LONG, lm.loglikelihood), (LONG_PROMPT, lm.generate_until)):
        with pytest.raises(DataError, match=rf"^made_up: question {request.doc_id}: .*truncation"):
            answer([SHORT, request] if request is LONG else [request])
        with pytest.raises(DataError, match=f"question {request.doc_id}"):
            lm.check([SHORT, request])
    assert read == []


def test_skipped_requests_have_no_answer_and_are_counted(model):
    lm = SatlensLM(model=model(), truncation="skip")
    (value, greedy), (other, _) = lm.loglikelihood([LONG, SHORT], True)
    assert math.isnan(value) and greedy is False and math.isfinite(other)
    assert lm.generate_until([LONG_PROMPT], True) == [""]
    n_short = len(lm.tok_encode("the cat sat"))
    assert lm.counts == {"requests": 3, "tokens": n_short, "truncated": 0, "skipped": 2}
    assert lm.skipped == {key_of(LONG), key_of(LONG_PROMPT)}


def test_truncated_requests_keep_their_latest_tokens_and_are_counted(model):
    ours = model()
    lm = SatlensLM(model=ours, truncation="truncate", max_length=20)
    ((value, _),) = lm.loglikelihood([LONG], True)
    whole = torch.tensor([lm.tok_encode("".join(LONG.args))[-21:]])
    n = len(lm.tok_encode("".join(LONG.args))) - len(lm.tok_encode(LONG.args[0]))
    expected = -ours(whole, "loss", loss_per_token=True)[0, -n:].sum().item()
    assert value == pytest.approx(expected, abs=TOLERANCE)
    (text,) = lm.generate_until([LONG_PROMPT], True)
    kept = torch.tensor([lm.tok_encode(LONG_PROMPT.args[0])[-16:]])
    assert text == ours.to_string(ours.generate(kept, 4)[0, 16:])
    assert lm.counts == {"requests": 2, "tokens": 21 + 16, "truncated": 2, "skipped": 0}
    assert lm.truncated == {key_of(LONG), key_of(LONG_PROMPT)}
    long_continuation = instance("loglikelihood", "a", LONG.args[0])
    with pytest.raises(DataError, match=r"continuation of \d+ tokens exceeds the context of 20"):
        lm.loglikelihood([long_continuation])


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "auto"}, "batch_size: must be a positive whole number, got 'auto'"),
        ({"padding_side": "both"}, "padding_side: must be one of left, right"),
        ({"truncation": "cut"}, "truncation: must be one of error, skip, truncate"),
        ({"max_length": 49}, "max_length: 49 exceeds n_ctx=48"),
        ({"path": "somewhere"}, "path, model: give one of them"),
    ],
)
def test_impossible_options(options, message, model):
    with pytest.raises(ConfigError, match=message):
        SatlensLM(**{"model": model(), **options})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True, "temperature": 1.0}, "question 0: do_sample: answers are the likel"),
        ({"num_beams": 4}, "question 0: num_beams: not a setting of greedy generation"),
        ({}, "question 0: max_gen_toks: 256 new tokens leave no room in the context of 48"),
    ],
)
def test_impossible_generation_settings(settings, message, model):
    with pytest.raises(ConfigError, match=message):
        SatlensLM(model=model()).generate_until([instance("generate_until", "a", settings)])


def test_what_cannot_be_scored(model):
    ours = model()
    with pytest.raises(DataError, match="made_up: question 0: its continuation has no tokens"):
        SatlensLM(model=ours).loglikelihood([instance("loglikelihood", "the cat", "")])
    with torch.no_grad():
        ours.embed.weight.fill_(math.nan)
    with pytest.raises(AnalysisError, match="question 0: the log-probability is not finite"):
        SatlensLM(model=ours).loglikelihood([SHORT], True)
    ours.tokenizer = None
    with pytest.raises(DataError, match=r"model: no tokenizer\.json"):
        SatlensLM(model=ours)


# -- as lm-eval finds it ---------------------------------------------------------------------------


def test_it_is_registered_and_takes_lm_eval_s_arguments(model, tmp_path):
    satlens.save(model(), tmp_path / "checkpoint")
    arguments = {"path": str(tmp_path / "checkpoint"), "truncation": "skip", "dtype": "float64"}
    lm = get_model("satlens").create_from_arg_obj(arguments, {"batch_size": "2", "device": "cpu"})
    assert isinstance(lm, SatlensLM)
    assert (lm.batch_size, lm.requests.truncation, lm.model.dtype) == (2, "skip", torch.float64)
    text = f"path={tmp_path / 'checkpoint'},max_length=9,intervene=zero-gate:layer=1:head=0"
    lm = get_model("satlens").create_from_arg_string(text, {"device": "cuda:0"})
    assert lm.max_length == 9
    assert lm.interventions == (satlens.ZeroGate(layer=1, head=0),)
    assert lm.get_model_info()["model_sha"] == lm.model.provenance["sha256"]


def test_errors_of_the_command_are_one_line(monkeypatch, capsys):
    def fail():
        raise ConfigError("truncation: not that one")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", fail)
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == "satlens: error: truncation: not that one\n"


@pytest.mark.slow
def test_the_command_of_lm_eval_knows_satlens_models(model, tmp_path):
    satlens.save(model(), tmp_path / "checkpoint")
    rows = [{"context": "the cat", "choices": [" sat", " barked"], "answer": 0}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "made_up",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "made_up.yaml").write_text(json.dumps(task))
    arguments = f'path={tmp_path / "checkpoint"},intervene="zero-gate:layer=1,head=0"'
    command = [sys.executable, "-m", "satlens.interop.lm_eval", "--model", "satlens"]
    command += ["--model_args", arguments, "--tasks", "made_up", "--include_path", tmp_path]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_DATASETS_OFFLINE": "1"}
    subprocess.run([*command, "--output_path", tmp_path / "out"], check=True, env=environment)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    config = json.loads(results.read_text())["config"]
    assert config["request_counts"]["requests"] == 2
    assert config["interventions"][0]["head"] == 0


def test_without_lm_eval_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from satlens.errors import SatlensError\n"
        "try:\n    import satlens.interop.lm_eval\n"
        "except SatlensError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "lm_eval: not installed; pip install 'satlens[eval]'"
