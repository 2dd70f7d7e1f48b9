"""What is put in the place of gates: means, donors and permutations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted import documents, tags_of, tiny, token_class

from satlens import processes
from satlens.analysis.engine import stream
from satlens.analysis.evaluation import evaluate
from satlens.analysis.interventions.donors import Donors, fit_donors
from satlens.analysis.interventions.gates import (
    MeanGate,
    ResampleGate,
    ShuffleGate,
    intervene,
)
from satlens.analysis.interventions.means import Means, fit_means
from satlens.analysis.interventions.routes import MeanRoute
from satlens.errors import AnalysisError, HookError
from satlens.models.cache import KVCache

TOKENS = torch.randint(0, 32, (3, 16), generator=torch.Generator().manual_seed(0))
GATE = "blocks.1.attn.hook_v_gate"


@torch.no_grad()
def gates(model, *interventions, tokens=TOKENS, hook=GATE, **kwargs):
    with intervene(model, *interventions):
        return model.run_with_cache(tokens, names_filter=hook, **kwargs)[1][hook]


def nll(model, docs, *interventions, **options):
    with intervene(model, *interventions):
        return evaluate(model, docs, n_resamples=99, **options).table["nll"].to_numpy()


def windows(docs, n_ctx=16):
    """(document, start, tokens) of every window, whose last token is only a target."""
    for document in docs:
        for start in range(0, len(document.tokens) - 1, n_ctx):
            yield document, start, document.tokens[start : start + n_ctx + 1][:-1]


def clean_weights(model, docs):
    """Hook -> weights of every window, one pass a window, float64."""
    hooks, found = [site.hook for site in model.sites], []
    for _, _, tokens in windows(docs):
        with torch.no_grad():
            _, cache = model.run_with_cache(torch.from_numpy(tokens)[None], names_filter=hooks)
        found.append({hook: cache[hook][0].double().numpy() for hook in hooks})
    return {hook: [one[hook] for one in found] for hook in hooks}


# -- means -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("satformer", "resformer", "attnres", "rd-attnres"),
        *("denseformer", "muddformer", "hyperconnections"),
    ],
)
def test_means_are_those_of_the_cache(name):
    model, docs = tiny(name), documents(d_vocab=32)
    overall, by_position = fit_means(model, docs), fit_means(model, docs, per="position")
    for hook, rows in clean_weights(model, docs).items():
        np.testing.assert_allclose(
            overall[hook], np.concatenate(rows).mean(0), rtol=1e-5, atol=1e-7, err_msg=hook
        )
        for place in range(16):
            there = np.stack([row[place] for row in rows if len(row) > place])
            np.testing.assert_allclose(
                by_position[hook][place], there.mean(0), rtol=1e-5, atol=1e-7, err_msg=hook
            )


def test_means_per_category_are_those_of_the_tokens():
    model, docs = tiny("satformer"), documents(d_vocab=32)
    tags = tags_of(docs)
    means = fit_means(model, docs, per="category", tags=tags)
    assert means.names == tags.categories.names
    kinds = np.concatenate([token_class(tokens) for _, _, tokens in windows(docs)])
    rows = np.concatenate(clean_weights(model, docs)[GATE])
    for kind, name in enumerate(("semantic", "functional")):
        code = means.names.index(name)
        np.testing.assert_allclose(means[GATE][code], rows[kinds == kind].mean(0), rtol=1e-5)
    # A category without tokens has the mean of all.
    np.testing.assert_allclose(means[GATE][means.names.index("none")], rows.mean(0), rtol=1e-5)


def test_means_do_not_depend_on_the_batch():
    model, docs = tiny("satformer"), documents(d_vocab=32)
    for per in ("head", "position", "category"):
        one, other = (
            fit_means(model, docs, per=per, tags=tags_of(docs), batch_size=size) for size in (1, 8)
        )
        for hook in one:
            np.testing.assert_allclose(one[hook], other[hook], rtol=1e-5)


def test_mean_interventions_put_the_means_there():
    for name, make, hook in (
        ("satformer", MeanGate, "blocks.2.attn.hook_v_gate"),
        ("rd-attnres", MeanRoute, "blocks.2.hook_route_mlp"),
    ):
        model, docs = tiny(name), documents(d_vocab=32)
        for per in ("head", "position"):
            means = fit_means(model, docs, per=per)
            found = gates(model, make(means=means), hook=hook)
            assert torch.equal(found, torch.from_numpy(means[hook]).float().expand_as(found))


def test_a_mean_per_category_follows_the_tags_of_what_runs():
    """Inside an analysis each token gets its category's mean, and the loss is that of this gate."""
    model, docs, pool = tiny("satformer"), documents(d_vocab=32), documents(d_vocab=32, seed=9)
    means = fit_means(model, pool, per="category", tags=tags_of(pool))
    tags = tags_of(docs)
    found = nll(model, docs, MeanGate(means=means, tags=tags), batch_size=3)
    codes = [means.names.index(name) for name in ("semantic", "functional")]
    by_class = {hook: torch.from_numpy(means[hook][codes]).float() for hook in means}
    expected, n = np.zeros(len(docs)), np.zeros(len(docs))
    for document, start, tokens in windows(docs):
        kind = torch.from_numpy(token_class(tokens))
        hooks = [
            (hook, lambda x, hook, kind=kind: by_class[hook.name][kind][None]) for hook in means
        ]
        targets = torch.from_numpy(document.tokens[start + 1 : start + 1 + len(tokens)])[None]
        with torch.no_grad():
            loss = model.run_with_hooks(
                torch.from_numpy(tokens)[None],
                return_type="loss",
                targets=targets,
                fwd_hooks=hooks,
                loss_per_token=True,
            )
        expected[int(document.id[1:])] += float(loss.sum())
        n[int(document.id[1:])] += targets.numel()
    np.testing.assert_allclose(found, expected / n, rtol=1e-5)


def test_what_means_per_category_need():
    model, docs = tiny("satformer"), documents(d_vocab=32)
    tags = tags_of(docs)
    means = fit_means(model, docs, per="category", tags=tags)
    assert MeanGate(means=fit_means(model, docs)).causal
    assert not MeanGate(means=means).causal
    for one, message in (
        (MeanGate(means=means), "need the tags"),
        (MeanGate(means=means, tags=tags), "inside an analysis"),
        (MeanGate(means=Means(means, "category", ("a", "b")), tags=tags), "the means have a, b"),
        (MeanGate(means={}), "nothing for blocks"),
        (MeanGate(means={GATE: [0.1] * 3}, layer=1), "has 2 weights, got .3."),
        (MeanGate(means={GATE: [[0.1] * 2]}, layer=1), "has 2 weights, got .1, 2."),
    ):
        with pytest.raises(AnalysisError, match=message):
            gates(model, one)
    with (
        intervene(model, MeanGate(means=means, tags=tags)),
        pytest.raises(HookError, match="later"),
    ):
        model(TOKENS, past=KVCache())
    with pytest.raises(AnalysisError, match="other documents"):
        fit_means(model, docs, per="category", tags=tags_of(docs[1:]))
    with pytest.raises(AnalysisError, match="need tags"):
        fit_means(model, docs, per="category")
    with pytest.raises(AnalysisError, match="per: 'layer' is not one of head, position, category"):
        fit_means(model, docs, per="layer")


def test_positions_count_from_the_start_of_a_document():
    """Behind padding, and after another document in the same row."""
    model = tiny("satformer")
    ramp = np.stack([np.arange(12.0)] * 2, -1)
    one = MeanGate(means=Means({GATE: ramp}, "position"), layer=1)
    mask = torch.ones_like(TOKENS)
    mask[1, :5] = 0
    padded = gates(model, one, attention_mask=mask)
    assert padded[0, :, 0].tolist() == [*range(12), 11, 11, 11, 11]
    assert padded[1, 5:, 0].tolist() == list(range(11))
    packed = torch.tensor([[0] * 7 + [1] * 4 + [2] * 5] * 3)
    found = gates(model, one, documents=packed)
    assert found[0, :, 1].tolist() == [*range(7), *range(4), *range(5)]


# -- donors ----------------------------------------------------------------------------------------


def test_donors_are_windows_of_the_documents():
    model, docs = tiny("satformer"), documents(d_vocab=32)
    donors = fit_donors(model, docs, batch_size=3)
    assert donors.valid.sum(1).tolist() == [min(16, len(d.tokens) - 1) for d in docs]
    rows = clean_weights(model, docs)
    starts = [(document.id, start) for document, start, _ in windows(docs)]
    for number, (document, length) in enumerate(zip(docs, donors.valid.sum(1), strict=True)):
        mine = [k for k, (name, _) in enumerate(starts) if name == document.id]
        for hook in donors:
            found = donors[hook][number, :length]
            near = [k for k in mine if len(rows[hook][k]) == length]
            assert any(np.allclose(found, rows[hook][k], rtol=1e-5, atol=1e-6) for k in near)
    # Which window it is depends on the seed; how many documents there are, on n.
    other = fit_donors(model, docs, seed=1)
    assert any(not np.array_equal(donors[hook], other[hook]) for hook in donors)
    assert fit_donors(model, docs, n=4).valid.shape == (4, 16)
    assert donors.identity != other.identity == fit_donors(model, docs, seed=1).identity


def test_parts_of_a_pass_over_donors_add_up(monkeypatch, tmp_path):
    """Each of two processes has its batches; a finished pass runs no forward again."""
    model, docs = tiny("satformer"), documents(d_vocab=32)
    whole = fit_donors(model, docs, batch_size=3, resume_dir=tmp_path)
    merged = []
    monkeypatch.setattr(processes, "check_equal", lambda *_: None)
    monkeypatch.setattr(stream, "merge", lambda sums: merged.append(sums["rows"]))
    for rank in (0, 1):
        monkeypatch.setattr(processes, "world", lambda rank=rank: processes.World(rank, 2))
        fit_donors(model, docs, batch_size=3)
    one, other = merged
    one.merge(other)
    assert one.donors().identity == whole.identity
    assert np.array_equal(one.donors().valid, whole.valid)
    monkeypatch.undo()
    monkeypatch.setattr(type(model), "forward", None)
    assert fit_donors(model, docs, batch_size=3, resume_dir=tmp_path).identity == whole.identity


def test_every_gate_comes_from_the_same_place_of_one_donor():
    model, docs = tiny("satformer"), documents(d_vocab=32, lengths=(17,) * 7, seed=4)
    donors = fit_donors(model, docs)
    hooks = [site.hook for site in model.sites]
    with torch.no_grad(), intervene(model, ResampleGate(donors=donors, seed=2)):
        _, cache = model.run_with_cache(TOKENS, names_filter=hooks)
    together = np.concatenate([donors[hook] for hook in hooks], -1)
    found = torch.cat([cache[hook] for hook in hooks], -1).numpy()
    for row, place in np.ndindex(3, 16):
        assert (together[:, place] == found[row, place]).all(-1).any()


def test_draws_are_uniform_over_the_donors_that_reach_a_position():
    valid = np.arange(10)[None] < np.array([10, 3, 10, 7, 10])[:, None]
    donors = Donors({GATE: np.zeros((5, 10, 2))}, valid)
    position, tokens = np.meshgrid(np.arange(14), np.arange(4000), indexing="ij")
    drawn, at = donors.draw(tokens, position, 0)
    assert at[:, 0].tolist() == [*range(10), 9, 9, 9, 9]
    for place in range(10):
        counts = np.bincount(drawn[place], minlength=5)
        reach = valid[:, place]
        assert (counts[~reach] == 0).all()
        n = reach.sum()
        # Four standard deviations of a binomial.
        assert np.abs(counts[reach] - 4000 / n).max() < 4 * np.sqrt(4000 * (n - 1)) / n
    same = (drawn[0] == donors.draw(tokens, position, 1)[0][0]).double().mean()
    assert abs(float(same) - 1 / 5) < 0.03
    assert abs(float((drawn[0] == drawn[1]).double().mean()) - 1 / 5) < 0.03


def test_draws_depend_on_seed_position_and_token_alone():
    model, docs = tiny("satformer"), documents(d_vocab=32)
    donors = fit_donors(model, documents(d_vocab=32, seed=9))
    one = ResampleGate(donors=donors, seed=1)
    scores = [nll(model, docs, one, batch_size=size) for size in (1, 4, 64)]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)
    np.testing.assert_allclose(scores[0], scores[2], rtol=1e-5)
    other = nll(model, docs, ResampleGate(donors=donors, seed=2))
    assert np.abs(scores[0] - other).max() > 1e-4
    whole = gates(model, one)
    mask = torch.ones(1, 16, dtype=torch.int64)
    mask[:, :6] = 0
    padded = torch.cat((TOKENS[:1, :6], TOKENS[:1, :10]), 1)
    assert torch.equal(gates(model, one, tokens=padded, attention_mask=mask)[:, 6:], whole[:1, :10])


def test_a_token_never_gets_the_weights_of_its_own_document():
    """Two documents, each the other's only donor; a third is in another corpus."""
    model, docs = tiny("satformer"), documents((30, 17), d_vocab=32)
    donors = fit_donors(model, docs)
    seen = []

    def keep(weights, hook):
        seen.append(weights.clone())

    with intervene(model, ResampleGate(donors=donors)), model.hooks([(GATE, keep)]):
        evaluate(model, docs, n_resamples=9, batch_size=8)
    (found,) = seen  # windows: two of the first document, one of the second
    for row, other in ((0, 1), (1, 1), (2, 0)):
        n = (13, 16)[row != 1]
        assert np.array_equal(found[row, :n].numpy(), donors[GATE][other, :n])


def test_donors_left_out_of_a_draw():
    valid = np.arange(10)[None] < np.array([10, 3, 7, 10])[:, None]
    donors = Donors({GATE: np.zeros((4, 10, 2))}, valid)
    position, tokens = np.meshgrid(np.arange(10), np.arange(2000), indexing="ij")
    every, _ = donors.draw(tokens.T, position.T, 0, np.full(2000, -1))
    assert torch.equal(every, donors.draw(tokens.T, position.T, 0)[0])
    for own in range(4):
        drawn, at = donors.draw(tokens.T, position.T, 0, np.full(2000, own))
        assert at[0].tolist() == list(range(10))
        for place in range(10):
            others = [k for k in range(4) if valid[k, place] and k != own]
            counts = np.bincount(drawn[:, place], minlength=4)
            assert counts[others].sum() == 2000
            assert counts[others].min() > 2000 / len(others) - 100
    alone = Donors({}, np.ones((1, 4), dtype=bool))
    with pytest.raises(AnalysisError, match="a document is its only donor"):
        alone.draw(tokens, position, 0, np.zeros(10, dtype=np.int64))


def test_what_donors_need():
    model = tiny("satformer")
    with pytest.raises(AnalysisError, match="has no access sites"):
        fit_donors(tiny("transformer"), documents(d_vocab=32))
    with pytest.raises(AnalysisError, match="n: must be positive"):
        fit_donors(model, documents(d_vocab=32), n=0)
    with pytest.raises(AnalysisError, match="no document has a real token"):
        Donors({}, np.zeros((2, 3), dtype=bool))
    empty = Donors({}, np.ones((2, 3), dtype=bool))
    with pytest.raises(AnalysisError, match="nothing for the 2 weights of blocks"):
        gates(model, ResampleGate(donors=empty))


# -- permutations ----------------------------------------------------------------------------------


def test_shuffle_permutes_real_tokens_within_a_context():
    model = tiny("satformer")
    packed = torch.zeros_like(TOKENS)
    packed[0, 10:] = -1
    clean = gates(model, documents=packed)
    edited = gates(model, ShuffleGate(seed=1), documents=packed)
    assert torch.equal(clean[0, 10:], edited[0, 10:])
    for row, n in ((0, 10), (1, 16)):
        before, after = clean[row, :n], edited[row, :n]
        assert not torch.equal(before, after)
        assert torch.equal(before.sort(0).values, after.sort(0).values)
        # Heads move together.
        assert set(map(tuple, after.tolist())) == set(map(tuple, before.tolist()))


def test_shuffle_depends_on_seed_and_content_alone():
    model, docs = tiny("satformer"), documents(d_vocab=32)
    scores = [nll(model, docs, ShuffleGate(seed=1), batch_size=size) for size in (1, 4, 64)]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)
    np.testing.assert_allclose(scores[0], scores[2], rtol=1e-5)
    assert np.abs(scores[0] - nll(model, docs, ShuffleGate(seed=2))).max() > 1e-4


def test_shuffle_is_the_same_inside_and_outside_of_an_analysis():
    model, docs = tiny("satformer"), documents(d_vocab=32, lengths=(11,) * 8)
    inside = nll(model, docs, ShuffleGate(seed=1))
    rows = torch.from_numpy(np.stack([d.tokens for d in docs]))
    with torch.no_grad(), intervene(model, ShuffleGate(seed=1)):
        outside = model(rows[:, :-1], return_type="loss", targets=rows[:, 1:], loss_per_token=True)
    np.testing.assert_allclose(inside, outside.mean(1), rtol=1e-5)
