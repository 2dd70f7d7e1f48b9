"""The dictionary of V_1: planted directions come back, and groups of features are categories."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from planted import GATE, blank, documents, gated, tags_of, tiny

from satlens.analysis.categories import categories
from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.engine.stream import run
from satlens.analysis.tokens.features import ValueSample
from satlens.analysis.tokens.sae import SaeSettings, train_sae
from satlens.errors import AnalysisError

FAST = {"n_resamples": 99}
SMALL = SaeSettings(n_features=8, k=2, steps=100, batch_size=64)


@pytest.fixture(scope="module")
def docs():
    return documents()


@torch.no_grad()
def spelt_values(n_ctx=16):
    """SATFormer whose V_1 is a direction of its own for each of the 16 tokens.

    In layer 1 head 0 opens by GATE on tokens of class 0 alone, head 1 never.
    """
    model = blank(
        "satformer", n_layers=2, d_model=16, n_heads=2, d_vocab=16, n_ctx=n_ctx, norm_eps=0.0
    )
    model.embed.weight.copy_(4.0 * torch.eye(16))
    model.blocks[1].attn.values.alpha.weight[0, ::2] = GATE / 4.0
    model.blocks[0].attn.qkv.weight[32:] = torch.eye(16)
    return model


# -- the dictionary --------------------------------------------------------------------------------


def planted_dictionary(n_features, width, k, n=6000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(
        torch.randn(n_features, width, generator=generator), dim=1
    )
    active = torch.rand(n, n_features, generator=generator).topk(k, 1).indices
    code = torch.zeros(n, n_features)
    code.scatter_(1, active, 1 + torch.rand(n, k, generator=generator))
    return code @ directions, directions, code


@pytest.mark.parametrize("n_features", [16, 24])
def test_planted_directions_come_back(n_features):
    vectors, directions, code = planted_dictionary(16, 16, 2)
    settings = SaeSettings(n_features=n_features, k=2, steps=800, batch_size=256)
    sae = train_sae(vectors, settings)
    cosine = directions @ sae.decoder.T
    assert cosine.max(dim=1).values.min() > 0.95
    # The strongest feature of a vector is the planted one with the largest weight, by far.
    active = sae.active(vectors)
    strongest = cosine.argmax(dim=0)[active.feature[:, 0]]
    weight, planted = code.topk(2)
    clear = weight[:, 0] - weight[:, 1] > 0.3
    assert (strongest == planted[:, 0])[clear].float().mean() > 0.98
    assert (active.activation >= 0).all() and (active.activation.diff(dim=1) <= 0).all()
    error = (vectors - sae.reconstruct(active)).square().sum()
    assert 1 - error / (vectors - vectors.mean(0)).square().sum() > 0.95
    assert torch.linalg.vector_norm(sae.decoder, dim=1) == pytest.approx(torch.ones(n_features))


def test_the_seed_decides_the_dictionary():
    vectors, *_ = planted_dictionary(8, 8, 1, n=500)
    settings = {"n_features": 8, "k": 1, "steps": 20, "batch_size": 32}
    first, again = (train_sae(vectors, SaeSettings(**settings)) for _ in range(2))
    other = train_sae(vectors, SaeSettings(**settings, seed=1))
    assert torch.equal(first.decoder, again.decoder)
    assert not torch.equal(first.decoder, other.decoder)


def test_features_that_started_badly_are_revived():
    """A dictionary twice too large, of which the auxiliary loss leaves few unused."""
    vectors, *_ = planted_dictionary(8, 16, 1)
    sae = train_sae(vectors + 5.0, SaeSettings(n_features=16, k=1, steps=400, batch_size=256))
    active = sae.active(vectors + 5.0)
    used = active.feature[active.activation > 0].unique()
    assert len(used) >= 8


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"n_features": 4, "k": 8}, "k"),
        ({"steps": 0}, "steps"),
        ({"purity": 0.3}, "purity"),
        ({"learning_rate": 0.0}, "learning_rate"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, field):
    with pytest.raises(AnalysisError, match=f"sae: {field}:"):
        SaeSettings(**settings)


def test_values_without_variance_are_refused(docs):
    with pytest.raises(AnalysisError, match="same for every token"):
        categories(gated(), docs, tags=tags_of(docs), by="sae", sae=SMALL, **FAST)
    model = tiny("attnres", d_vocab=16)
    with pytest.raises(AnalysisError, match="no V_1"):
        categories(model, docs, tags=tags_of(docs), by="sae", **FAST)


# -- sampling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 8])
@torch.no_grad()
def test_evenly_spaced_tokens_are_sampled(docs, batch_size):
    model = tiny("satformer", d_vocab=16)
    windows = open_windows(model, docs, batch_size=batch_size)
    reducer = ValueSample(windows, 60, 8)
    run(model, windows, [reducer])
    rows = []
    for document in docs:
        for start in range(0, len(document.tokens) - 1, 16):
            piece = torch.from_numpy(document.tokens[start : start + 17][:-1])[None]
            _, cache = model.run_with_cache(piece)
            rows.append(cache["hook_v_first"][0, 1:].flatten(1).numpy())
    rows = np.concatenate(rows)
    every = -(-len(rows) // 60)
    np.testing.assert_allclose(reducer.sample.rows, rows[::every], rtol=1e-5, atol=1e-6)
    assert len(reducer.sample.rows) <= 60


# -- categories ------------------------------------------------------------------------------------


def test_groups_of_features_are_the_planted_classes(docs):
    settings = SaeSettings(n_features=32, k=1, steps=400, batch_size=64)
    result = categories(
        spelt_values(), docs, tags=tags_of(docs), by=("category", "sae"), sae=settings, **FAST
    )
    table = result.table.set_index(["by", "category", "head"])
    for name in ("semantic", "functional"):
        for column in ("mean", "open_fraction", "n_tokens", "n_documents"):
            ours = table[column]["sae", f"sae {name}", 0]
            assert ours == pytest.approx(table[column]["category", name, 0], rel=1e-12)
    contrast = result.part("categories_sae_contrasts").table.set_index("head")
    assert contrast["delta"][0] == pytest.approx(GATE, rel=1e-6)
    assert set(contrast["contrast"]) == {"sae semantic - sae functional"}
    features = result.part("categories_sae")
    assert features.summary["explained_variance"]["estimate"] == pytest.approx(1, abs=0.01)
    rows = features.table[features.table["n_tokens"] > 0]
    assert (rows["purity"] == 1).all()
    assert rows["n_tokens"].sum() == table["n_tokens"]["category", :, 0].sum()
    for row in rows.itertuples():
        tokens = {int(token) for token in row.top_tokens.split(" | ")}
        assert {token % 2 for token in tokens} == {0 if row.group == "sae semantic" else 1}
        assert row.mean == pytest.approx(GATE / 2 if row.group == "sae semantic" else 0, abs=1e-6)
    dead = features.table[features.table["purity"].isna()]
    assert set(dead["flags"]) <= {"dead"}
    assert features.summary["n_dead"] == len(dead)


def test_breakdowns_of_one_pass_are_those_of_single_passes(docs):
    model, tags = tiny("satformer", d_vocab=16), tags_of(docs)
    labels = []
    options = {"tags": tags, "drivers": False, **FAST}
    together = categories(
        model, docs, by=("upos", "category", "sae"), sae=SMALL, **options,
        progress=lambda label, done, total: labels.append(label),
    )  # fmt: skip
    assert set(labels) == {"categories", "categories-sae"}
    assert together.summary["by"] == ["upos", "category", "sae"]
    for by in ("upos", "category", "sae"):
        settings = {"sae": SMALL} if by == "sae" else {}
        alone = categories(model, docs, by=by, **settings, **options)
        rows = together.table[together.table["by"] == by].reset_index(drop=True)
        assert rows.equals(alone.table)
        assert alone.summary["by"] == by
        for part in alone.parts:
            assert together.part(part.name).table.equals(part.table)
    assert together.parts[0].name == "categories_contrasts"


def test_a_finished_pass_is_not_repeated(docs, tmp_path):
    model, tags = spelt_values(), tags_of(docs)
    options = {"tags": tags, "by": "sae", "sae": SMALL, "resume_dir": tmp_path, **FAST}
    first, forwards = categories(model, docs, **options), []
    again = categories(
        model, docs, **options,
        progress=lambda label, done, total: forwards.append(done < total),
    )  # fmt: skip
    assert not any(forwards)
    for ours, theirs in zip((first, *first.parts), (again, *again.parts), strict=True):
        assert ours.table.equals(theirs.table)


def test_top_tokens_are_spelt_on_one_line(docs):
    import satlens

    text = ["The state of the union\nis strong, and the union is old.\n" * 12] * 9
    model = satlens.load("tiny/satformer")
    result = categories(
        model, text, tagger="wordlist", by="sae", drivers=False,
        sae=SaeSettings(n_features=8, k=1, steps=30, batch_size=64), **FAST,
    )  # fmt: skip
    top = result.part("categories_sae").table["top_tokens"]
    assert not top.str.contains("\n").any()
    assert top.str.contains("state").any()
    assert json.loads(json.dumps(result.summary["sae"]["features"]))


def test_the_command_takes_breakdowns_groups_and_a_contrast(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from satlens.cli.options import app

    monkeypatch.setenv("SATLENS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "groups.yaml").write_text(
        "things: [NOUN, PROPN, NUM, VERB, ADJ, ADV, INTJ]\n"
        "rest: [DET, ADP, AUX, PRON, CCONJ, SCONJ, PART, PUNCT, SYM, SPACE, X]\n"
    )
    text = "The state of the union is strong, and the union of states is old. " * 9
    lines = [json.dumps({"text": text[:n]}) for n in (300, 400, 200)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    arguments = (
        f"categories tiny/satformer --data {tmp_path}/corpus.jsonl --json "
        "--tagger wordlist --by category --by sae --sae-features 8 --no-drivers "
        "--adjustment benjamini_hochberg --contrast things rest"
    )
    arguments = [*arguments.split(), "--groups", str(tmp_path / "groups.yaml")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["by"] == ["category", "sae"]
    assert set(summary["tokens"]) == {"things", "rest", "none"}
    assert summary["contrast"]["first"] == "things"
    assert summary["contrast"]["adjustment"].startswith("Benjamini-Hochberg")
    assert summary["sae"]["n_features"] == 8 and "drivers" not in summary


def test_an_unknown_adjustment_is_refused(docs):
    with pytest.raises(AnalysisError, match="adjustment: 'holm' is not max_t or"):
        categories(gated(), docs, tags=tags_of(docs), adjustment="holm")


def test_blank_values_have_no_categories(docs):
    model = blank("satformer", n_layers=2, d_model=8, n_heads=2, d_vocab=16, n_ctx=16)
    with pytest.raises(AnalysisError, match="same for every token"):
        categories(model, docs, tags=tags_of(docs), by="sae", sae=SMALL, **FAST)
