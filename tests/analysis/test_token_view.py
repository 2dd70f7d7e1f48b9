"""A token view holds what other analyses measure, token by token, and what one forward gives."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from planted import documents, tiny

import satlens
from satlens.analysis import token_view as module
from satlens.analysis.evaluation import bits_per_byte, evaluate, scored_bytes
from satlens.analysis.interventions.gates import ShuffleGate, ZeroGate
from satlens.analysis.interventions.routes import ZeroRoute
from satlens.analysis.result import Result
from satlens.analysis.token_view import token_view
from satlens.cli import main
from satlens.data.categories import UPOS, make_categories
from satlens.data.dataset import DocumentTokens
from satlens.data.token_text import Spelling
from satlens.data.tokenizers import encode, train_bpe
from satlens.data.windows import Windows, as_documents
from satlens.errors import AnalysisError, ConfigError

TEXT = "The cat sat — on\r\nthe <b>mat</b> 😺 & the\tdog\u200f עם!\n"
TEXTS = [TEXT * 2, "A cat, a dog and the mat. " * 9, TEXT]
TOKENIZER = train_bpe([*TEXTS] * 3, 300)
OFFLINE = {"tagger": "wordlist"}


@cache
def reader(name: str, **fields):
    """A random model of texts."""
    model = tiny(name, d_vocab=300, **fields)
    model.tokenizer = TOKENIZER
    return model


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SATLENS_CACHE", str(tmp_path / "cache"))


def channels_of(result: Result) -> tuple[pd.DataFrame, np.ndarray]:
    channels = result.part("token_channels").table
    values = result.part("token_values").table
    return channels, values[list(channels["channel"])].to_numpy(float)


@pytest.mark.parametrize("name", ["satformer", "rd-attnres", "muddformer", "transformer"])
def test_losses_are_those_of_an_evaluation(name):
    model = reader(name)
    view = token_view(model, TEXTS, **OFFLINE)
    expected = evaluate(model, TEXTS, n_resamples=20)
    table = view.table
    sums = table.groupby("document", sort=False)["nll"].mean().to_numpy()
    assert sums == pytest.approx(expected.table["nll"].to_numpy(), rel=1e-5)
    assert table["n_tokens"].sum() == expected.summary["n_tokens"] == view.summary["n_scored"]
    assert view.summary["nll"] == pytest.approx(expected.summary["nll"]["estimate"], rel=1e-5)
    assert table["nll"].isna().equals(table["position"] == 0)
    assert "dnll" not in table and view.summary["intervention"] is None


def test_losses_under_an_intervention_are_those_of_an_evaluation_inside_it():
    model = reader("satformer")
    for edit in (ZeroGate(layer=(1, 2)), ShuffleGate(seed=4)):  # the second reads later tokens
        table = token_view(model, TEXTS, interventions=[edit], **OFFLINE).table
        with satlens.intervene(model, edit):
            expected = evaluate(model, TEXTS, n_resamples=20).table["nll"]
        found = table.groupby("document", sort=False)["nll_intervened"].mean().to_numpy()
        assert found == pytest.approx(expected.to_numpy(), rel=1e-5)
        assert table["dnll"].equals(table["nll_intervened"] - table["nll"])
        assert table["dnll"].abs().max() > 1e-3
    text = token_view(model, TEXTS, interventions="zero-gate:layer=1+2", **OFFLINE)
    assert text.summary["intervention"] == "zero-gate:layer=1+2"


def test_what_changes_nothing_changes_no_loss():
    """To the bit: a view shows zeros as zeros."""
    view = token_view(reader("satformer"), TEXTS, interventions="scale-gate:factor=1", **OFFLINE)
    assert (view.table["dnll"].dropna() == 0).all() and view.summary["dnll"] == 0


def test_static_weights_are_said_not_to_vary():
    static, _ = channels_of(token_view(reader("resformer"), TEXTS, **OFFLINE))
    assert len(static) and not static["varies"].any()
    assert static["min"].equals(static["max"])
    moving, _ = channels_of(token_view(reader("satformer"), TEXTS, **OFFLINE))
    assert moving["varies"].all()


@pytest.mark.parametrize("name", ["satformer", "rd-attnres", "muddformer", "hyperconnections"])
def test_values_are_those_of_one_forward_over_each_context(name):
    model = reader(name)
    view = token_view(model, TEXTS, **OFFLINE)
    channels, values = channels_of(view)
    sites = {site.name: site for site in model.sites}
    n_ctx, first = model.cfg.n_ctx, 0
    for ids in encode(TOKENIZER, TEXTS):
        for start in range(0, len(ids), n_ctx):
            piece = torch.from_numpy(ids[start : start + n_ctx])[None]
            _, cache_ = model.run_with_cache(piece, names_filter=[s.hook for s in model.sites])
            for k, row in channels.iterrows():
                site = sites[row["site"]]
                labels = [source.label for source in site.sources]
                column = row["head"] if row["kind"] == "gate" else labels.index(row["source"])
                expected = cache_[site.hook][0, :, int(column)].numpy()
                found = values[first + start : first + start + len(expected), k]
                assert found == pytest.approx(expected, abs=1e-5)
        first += len(ids)
    assert first == len(values) == view.summary["n_tokens"]
    counted = (view.table["flags"] == "").to_numpy()
    assert channels["mean"].to_numpy() == pytest.approx(values[counted].mean(0), abs=1e-6)
    assert channels["zero_fraction"].to_numpy() == pytest.approx((values[counted] == 0).mean(0))
    assert np.float32(channels["max"]).tolist() == np.float32(values.max(0)).tolist()
    shown = {*channels["site"]} | view.summary["left_out"].keys()
    assert shown == sites.keys()


def test_tokens_are_the_text_whatever_is_in_it():
    view = token_view(reader("satformer"), TEXTS, **OFFLINE)
    for number, text in enumerate(TEXTS):
        own = view.table[view.table["document"] == str(number)]
        raw = b""
        for token in own["token"]:
            while token:
                if token[0] == "‹" and token[3:4] == "›":
                    raw, token = raw + bytes([int(token[1:3], 16)]), token[4:]
                else:
                    raw, token = raw + token[0].encode(), token[1:]
        assert raw.decode() == text
    assert (view.table["position"] % 16 == 0).equals(view.table["flags"] == "first")
    assert {*view.table["category"]} >= {"semantic", "functional", "structural"}


def test_a_view_comes_back_from_its_files(tmp_path):
    view = token_view(
        reader("satformer"), [*TEXTS, "a\rb \r"], interventions="zero-gate", **OFFLINE
    )
    view.save(tmp_path, figures=False)
    back = Result.load(tmp_path, "token_view")
    pd.testing.assert_frame_equal(back.table, view.table, check_exact=True)
    for part in view.parts:
        pd.testing.assert_frame_equal(back.part(part.name).table, part.table, check_exact=True)
    assert back.summary == view.summary
    # Each number is written as the float32 that it is.
    line = part.csv().decode().splitlines()[1].split(",")
    assert all(len(cell.lstrip("-")) <= 14 for cell in line), line
    view.figure()


def test_what_is_not_zero_stays_so():
    values = np.array([[0.0, -0.0, 1e-300, -1e-300, 0.1, np.nan]])
    found = module.value_table(
        values,
        pd.DataFrame({"channel": [f"c{k}" for k in range(6)]}),
        pd.DataFrame({"document": ["d"], "position": 0, "n_documents": 1, "n_tokens": 1}).assign(
            flags=""
        ),
    )[[f"c{k}" for k in range(6)]].to_numpy()[0]
    assert (found == 0).tolist() == [True, True, False, False, False, False]
    assert found[2] > 0 > found[3] and found[4] == 0.1 and np.isnan(found[5])


def test_a_budget_takes_documents_by_a_hash_and_cuts_the_last():
    model = reader("satformer")
    every = token_view(model, TEXTS, max_tokens=10_000, **OFFLINE)
    sizes = every.table.groupby("document").size()
    some = token_view(model, TEXTS, max_tokens=int(sizes.max()) + 5, **OFFLINE)
    assert len(some.table) == sizes.max() + 5
    assert len(some.summary["documents"]) < 3 or sizes.min() < 5
    merged = some.table.merge(every.table, on=["document", "position", "token", "token_id"])
    assert len(merged) == len(some.table)  # prefixes of documents
    assert merged["nll_x"].to_numpy() == pytest.approx(merged["nll_y"], rel=1e-4, nan_ok=True)
    one = token_view(model, TEXTS, max_documents=1, **OFFLINE)
    assert one.summary["documents"][0] in some.summary["documents"]


def test_layers_are_chosen_or_thinned_to_what_a_page_holds(monkeypatch):
    model = reader("rd-attnres")
    third = token_view(model, TEXT, layers=[2], **OFFLINE)
    channels, _ = channels_of(third)
    assert {*channels["layer"]} == {2}
    monkeypatch.setattr(module, "MAX_VALUES", third.summary["n_tokens"] * 10)
    thinned = token_view(model, TEXT, **OFFLINE)
    kept = {*channels_of(thinned)[0]["layer"]}
    assert max(kept) == max(site.layer for site in model.sites) and 0 < len(kept) < 4
    assert any("numbers" in why for why in thinned.summary["left_out"].values())
    with pytest.raises(AnalysisError, match="layers: 9 has no gates"):
        token_view(model, TEXT, layers=[9], **OFFLINE)


def test_tokens_without_a_tokenizer_have_numbers_for_names(rng):
    model = tiny("satformer")
    view = token_view(model, rng.integers(0, 32, (2, 20)))
    assert view.table["token"].tolist() == [f"‹#{k}›" for k in view.table["token_id"]]
    assert {*view.table["category"]} == {"none"}
    assert "No categories: the data has no tokenizer." in view.notes


def test_special_tokens_are_shown_but_not_scored():
    model = reader("satformer")
    (ids,) = encode(TOKENIZER, ["the cat"])
    given = [DocumentTokens("d", None, np.array([*ids, 0, *ids]), "the cat<|endoftext|>the cat")]
    table = token_view(model, given, **OFFLINE).table
    special = table["token_id"] == 0
    assert table["token"][special].tolist() == ["<|endoftext|>"]
    assert table["flags"][special].tolist() == ["special"] and table["nll"][special].isna().all()
    assert table["category"][special].tolist() == ["structural"]


def test_own_categories():
    others = [tag for tag in UPOS[1:-1] if tag != "NOUN"]
    groups = make_categories({"nouns": ("NOUN",), "rest": tuple(others)})
    view = token_view(reader("satformer"), TEXT, groups=groups, **OFFLINE)
    assert {*view.table["category"]} == {"nouns", "rest"}


def test_refusals():
    gates = reader("satformer")
    with pytest.raises(AnalysisError, match="max_tokens: at least 2"):
        token_view(gates, TEXT, max_tokens=1)
    with pytest.raises(ConfigError, match="unknown kind"):
        token_view(gates, TEXT, interventions="close")
    with pytest.raises(AnalysisError, match="no routes"):
        token_view(gates, TEXT, interventions=ZeroRoute())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in gates.modules())


def test_the_command(tmp_path, monkeypatch, capsys):
    model = reader("satformer")
    satlens.save(model, tmp_path / "model")
    command = [str(tmp_path / "model"), "--data", TEXT, "--tagger", "wordlist", "--json"]
    options = ["--intervene", "zero-gate:layer=2", "--layer", "2", "--max-tokens", "12"]
    out = ["--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["satlens", "token-view", *command, *options, *out])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    summary = json.loads(capsys.readouterr().out)
    expected = token_view(
        model, TEXT, interventions=ZeroGate(layer=2), layers=[2], max_tokens=12, **OFFLINE
    )
    assert summary == expected.summary
    written = Result.load(tmp_path / "out", "token_view").table
    pd.testing.assert_frame_equal(written, expected.table)


# -- bits per byte ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [257, 300])
def test_bits_per_byte_of_a_model_that_knows_nothing(size):
    """Each token costs log2 V bits whatever it is; where tokens are bytes that is a byte's."""
    tokenizer = train_bpe(TEXTS * 3, size)
    model = tiny("transformer", d_vocab=size)
    model.tokenizer = tokenizer
    model.unembed.weight.data.zero_()
    result = evaluate(model, TEXTS, n_resamples=20)
    table, summary = result.table, result.summary
    first = [encode(tokenizer, [text])[0][0] for text in TEXTS]
    spelt = [len(tokenizer.decode([k]).encode()) for k in first]
    expected = [len(t.encode()) - n for t, n in zip(TEXTS, spelt, strict=True)]
    assert table["n_bytes"].tolist() == expected
    bits = np.log2(size) * table["n_tokens"] / np.array(expected)
    assert table["bits_per_byte"].to_numpy() == pytest.approx(bits.to_numpy(), rel=1e-5)
    total = np.log2(size) * summary["n_tokens"] / sum(expected)
    assert summary["bits_per_byte"]["estimate"] == pytest.approx(total, rel=1e-5)
    assert summary["n_bytes"] == sum(expected)
    if size == 257:
        assert summary["bits_per_byte"]["estimate"] == pytest.approx(np.log2(257), rel=1e-5)


@pytest.mark.parametrize("size", [257, 280, 300])
def test_uniform_bytes_are_eight_bits_however_they_are_cut(size):
    tokenizer = train_bpe(TEXTS * 3, size)
    windows = Windows(as_documents(TEXTS, tokenizer), n_ctx=16)
    lengths = [Spelling(tokenizer).lengths(document) for document in windows.documents]
    nats = [np.log(256) * own[1:].sum() for own in lengths if own is not None]
    bits = bits_per_byte(nats, scored_bytes(windows, tokenizer))
    assert bits == pytest.approx([8, 8, 8])
    assert np.isnan(bits_per_byte([1.0], [0])).all()


def test_no_bits_per_byte_without_a_tokenizer():
    result = evaluate(tiny("transformer"), documents(), n_resamples=20)
    assert result.summary["bits_per_byte"] is None and result.table["n_bytes"].isna().all()
    assert any("No bits per byte" in note for note in result.notes)
