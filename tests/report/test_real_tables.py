"""The tables that the analyses make are those that figures and words read."""

from __future__ import annotations

import pytest
import torch

import satlens
from satlens.analysis.ablation import ablate
from satlens.analysis.attribution import attribute
from satlens.analysis.categories import categories
from satlens.analysis.circuits import circuits
from satlens.analysis.divergence import divergence
from satlens.analysis.evaluation import evaluate
from satlens.analysis.result import Result
from satlens.analysis.routes import routes
from satlens.analysis.sparsity import sparsity
from satlens.data.tokenizers import train_bpe
from satlens.models.initialise import family
from satlens.plotting import figure_for, picture_bytes
from satlens.report import words
from satlens.report.findings.routes import untrained

TEXTS = [
    f"The {noun} of the old house was {verb} by a man in {year}, and they said so."
    for noun in ("roof", "door", "garden", "wall")
    for verb in ("painted", "seen", "sold")
    for year in (1901, 1950)
]
OPTIONS = {"n_resamples": 99}


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 300)


VARIANTS = [
    *("satformer", "resformer", "attnres", "rd-attnres", "delta-attnres"),
    *("denseformer", "muddformer", "muddformer-prepost", "hyperconnections"),
]


@pytest.fixture(params=VARIANTS)
def model(request, tokenizer):
    torch.manual_seed(0)
    fields = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_vocab": 300, "n_ctx": 32}
    made = satlens.build(request.param, **fields).eval()
    made.tokenizer = tokenizer
    with torch.no_grad():
        for name, weight in made.named_parameters():
            routed = family(name) in ("gates", "routes") and not name.endswith("gamma")
            if routed:
                weight += 0.3 * torch.randn_like(weight)
    return made


def drawn(result: Result) -> None:
    """The figure of the result and of each part."""
    parts = {part.name: part.table for part in result.parts}
    for each in (result, *result.parts):
        figure = figure_for(each.name, each.table, each.summary, parts)
        assert picture_bytes(figure, dpi=40)


def test_every_analysis_is_drawn_and_put_into_words(model) -> None:
    found = sparsity(model, TEXTS, **OPTIONS)
    drawn(found)
    assert words.sparsity(found.table, found.summary)
    for stat in ("mass_embedding", "effective_sources", "normalised_entropy", "content_dependence"):
        overall = found.summary.get("routes", {}).get("overall", {}).get(stat, {}).get("estimate")
        if overall is not None:
            # The untrained mean weighs reads as the summary of the trained model does.
            swapped = found.table.assign(**{f"{stat}_init": found.table[stat]})
            mean = untrained({0: Result("sparsity", swapped)}, stat)[0]
            assert mean == pytest.approx(overall, abs=1e-9)

    found = ablate(model, TEXTS, **OPTIONS)
    drawn(found)
    said = words.ablation(found.table, found.summary)
    assert said
    effects = {(target, kind.split()[0]) for target, kind in words.ablation_effects(found.table)}
    assert effects <= {
        ("gate", "zero"),
        ("gate", "mean"),
        ("gate", "shuffle"),
        ("route", "zero"),
        ("route", "uniform"),
        ("route", "mean"),
        ("route", "mask"),
        ("route", "tie_v"),
    }
    assert not any("the intervention" in sentence for sentence in said)

    found = evaluate(model, TEXTS, **OPTIONS)
    drawn(found)


def test_effective_routes_are_drawn_and_put_into_words(model) -> None:
    found = routes(model, TEXTS, **OPTIONS)
    drawn(found)
    said = "\n".join(words.routes(found.table, found.summary))
    assert ("same for every token" in said) == found.summary["static"]
    assert ("differ between channels" in said) == getattr(model.cfg.stream, "pre_post_norm", False)
    assert ("no component is subtracted" in said) == (not found.summary["signed"])
    assert "add up to every read within" in said


@pytest.mark.parametrize("model", VARIANTS[:5], indirect=True)
def test_categories_are_drawn_and_put_into_words(model) -> None:
    found = categories(model, TEXTS, tagger="wordlist", **OPTIONS)
    drawn(found)
    table = found.part("categories_contrasts").table
    assert words.categories(table, found.summary)
    single = table["flags"].str.contains("single_source")
    assert single.sum() == sum(s.kind == "route" and len(s.sources) == 1 for s in model.sites)
    assert words.categories_across("arm", {0: table})


def test_divergence_is_drawn_and_put_into_words(tokenizer) -> None:
    model = satlens.build("rd-attnres", n_layers=3, d_model=16, n_heads=2, d_vocab=300, n_ctx=32)
    model.tokenizer = tokenizer
    found = divergence(model.eval(), TEXTS, **OPTIONS)
    drawn(found)
    said = words.divergence(found.table, found.summary)
    # Both routes start uniform, so nothing tells them apart.
    assert said[0].kind == "open"
    assert "are not told apart" in said[0]


def test_drivers_are_put_into_words_with_their_sign(tokenizer) -> None:
    model = satlens.build("satformer", n_layers=3, d_model=16, n_heads=2, d_vocab=300, n_ctx=32)
    model.tokenizer = tokenizer
    found = categories(model.eval(), TEXTS, tagger="wordlist", **OPTIONS)
    (said,) = words.drivers(found.summary)
    pooled = found.summary["drivers"]["pooled"]["gate"]
    assert all(f"{cell['estimate']:.2f}".replace("-", "") in said for cell in pooled.values())
    assert words.drivers({}) == []


@pytest.mark.parametrize("model", VARIANTS[:4], indirect=True)
def test_mass_and_cost_are_drawn_and_put_into_words(model) -> None:
    found = attribute(model, TEXTS, **OPTIONS)
    drawn(found)
    said = words.attribution(found.table, found.summary)
    kinds = {site.kind for site in model.sites}
    assert sum("over" in sentence and "rank correlation" in sentence for sentence in said) >= len(
        kinds
    )
    assert any(sentence.startswith("Predicted from one backward pass") for sentence in said)


@pytest.mark.parametrize("model", VARIANTS[:2], indirect=True)
def test_circuits_are_drawn_and_put_into_words(model) -> None:
    found = circuits(model, TEXTS, n_induction=8, **OPTIONS)
    assert picture_bytes(found.figure(), dpi=40)
    said = words.circuits(found.table, found.summary)
    assert said[0].startswith("model: V_1 has ")
    assert "random tokens that repeat" in said[-1]
