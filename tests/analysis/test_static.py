"""The best constant gates, against searches over whole evaluations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted import documents, tiny
from scipy import optimize

from satlens.analysis.evaluation import evaluate
from satlens.analysis.interventions.gates import FreezeGate, OpenGate, intervene
from satlens.analysis.interventions.means import fit_means
from satlens.analysis.interventions.static import fit_static
from satlens.errors import AnalysisError

GATE = "blocks.1.attn.hook_v_gate"


def test_the_best_constant_is_the_minimum_of_the_loss():
    """One gate: against a line search over whole evaluations with the gate held open."""
    fields = {"n_layers": 2, "n_heads": 2, "n_key_value_heads": 1}
    model, docs = tiny("satformer", **fields).double(), documents(d_vocab=32)

    def loss(value):
        with intervene(model, OpenGate(value=value)):
            return evaluate(model, docs, n_resamples=9).summary["nll"]["estimate"]

    expected = optimize.minimize_scalar(loss, bounds=(-5, 5), method="bounded")
    best = fit_static(model, docs)
    np.testing.assert_allclose(best[GATE], [expected.x], atol=2e-3)
    np.testing.assert_allclose(best.nll, expected.fun, atol=1e-7)
    np.testing.assert_allclose(best.nll_means, loss(float(fit_means(model, docs)[GATE][0])))
    np.testing.assert_allclose(best.nll_clean, evaluate(model, docs).summary["nll"]["estimate"])
    assert best.nll < best.nll_means
    assert best.converged
    assert best.n_tokens == sum(len(d.tokens) - 1 for d in docs)


def test_best_constants_are_stationary_and_are_put_there():
    model, docs = tiny("satformer").double(), documents(d_vocab=32, lengths=(40, 17, 31))
    best = fit_static(model, docs, batch_size=3)
    tokens = torch.from_numpy(docs[0].tokens[None, :16])
    with torch.no_grad(), intervene(model, FreezeGate(values=best)):
        _, cache = model.run_with_cache(tokens, names_filter=list(best))
    for hook in best:
        assert torch.equal(cache[hook], torch.from_numpy(best[hook]).expand_as(cache[hook]))

    def loss(values):
        with intervene(model, FreezeGate(values=values)):
            return evaluate(model, docs, n_resamples=9).summary["nll"]["estimate"]

    np.testing.assert_allclose(loss(best), best.nll, rtol=1e-9)
    for hook in best:
        for head in (0, 1):
            moved = [{**best}, {**best}]
            for values, step in zip(moved, (-0.05, 0.05), strict=True):
                values[hook] = best[hook] + step * np.eye(2)[head]
            assert min(map(loss, moved)) > best.nll
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_best_constants_of_a_static_residual():
    """A ResFormer's own weights are where the search begins."""
    model, docs = tiny("resformer"), documents(d_vocab=32)
    best = fit_static(model, docs, iterations=4)
    assert best.nll <= best.nll_clean + 1e-6
    assert best.nll_means == pytest.approx(best.nll_clean, abs=1e-6)


def test_a_killed_fit_continues_to_the_same_constants(monkeypatch, tmp_path):
    model, docs = tiny("satformer"), documents(d_vocab=32, lengths=(20, 17, 9))
    expected = fit_static(model, docs, iterations=5)
    calls, forward = [], type(model).forward

    def killed(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", killed)
    with pytest.raises(KeyboardInterrupt):
        fit_static(model, docs, iterations=5, resume_dir=tmp_path)
    n_before = len(calls)
    again = fit_static(model, docs, iterations=5, resume_dir=tmp_path)
    assert again.identity == expected.identity
    assert again.facts == expected.facts
    in_all = expected.n_evaluations + 2  # the means' pass and the clean one
    assert len(calls) == in_all + 1
    assert len(calls) - n_before == in_all - 7
    names = sorted(path.name.rsplit("-", 1)[0] for path in tmp_path.iterdir())
    assert names == ["means", "static"]
    fit_static(model, docs, iterations=5, resume_dir=tmp_path)
    assert len(calls) == in_all + 1


def test_a_token_budget_takes_the_beginnings_of_documents():
    model, docs = tiny("satformer"), documents(d_vocab=32)
    best = fit_static(model, docs, max_tokens=60, iterations=1)
    assert 40 < best.n_tokens <= 60
    with pytest.raises(AnalysisError, match="has no gates"):
        fit_static(tiny("rd-attnres"), docs)
    with pytest.raises(AnalysisError, match="one a head is needed, these are per position"):
        fit_static(model, docs, means=fit_means(model, docs, per="position"))
