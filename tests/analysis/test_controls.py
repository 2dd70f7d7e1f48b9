"""The scorecard passes where analyses are right, and fails where they or the models are not."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy.special import betaincinv, log_softmax
from scipy.stats import entropy

import satlens
from satlens.analysis import divergence
from satlens.analysis.controls import (
    circuits,
    gates,
    learning,
    nulls,
    prices,
    routes,
    scorecard,
    trained,
)
from satlens.analysis.controls.checks import ROUNDING, Check, Reader, rate_check, table_of
from satlens.analysis.controls.languages import (
    FORGETFUL,
    INDUCTION,
    MEMORY,
    N_TOPICS,
    PERIODS,
    RECALL,
    balanced_memory,
    is_topic,
)
from satlens.analysis.controls.planted import gated, routed, tags_from, token_class
from satlens.analysis.controls.priced import GATES, Prices, closed, priced, priced_documents
from satlens.analysis.interventions.gates import ZeroGate, intervene
from satlens.analysis.result import Result
from satlens.cli import main
from satlens.errors import AnalysisError

OPTIONS = {"n_resamples": 1999}


def check(**fields) -> Check:
    kept = {"analysis": "a", "control": "c", "quantity": "q", "rule": "equal"}
    return Check(**{**kept, "planted": 1.0, "recovered": 1.0, **fields})


@pytest.mark.parametrize(
    ("fields", "passed"),
    [
        ({}, True),
        ({"recovered": 1.1, "tolerance": 0.05}, False),
        ({"recovered": 1.1, "tolerance": 0.2}, True),
        ({"rule": "at least", "recovered": 5.0}, True),
        ({"rule": "at least", "recovered": 0.9}, False),
        ({"rule": "at least", "recovered": 0.9, "tolerance": 0.2}, True),
        ({"rule": "at most", "recovered": -5.0}, True),
        ({"rule": "at most", "recovered": 1.1}, False),
        ({"rule": "covers", "recovered": 0.8, "low": 0.7, "high": 1.0}, True),
        ({"rule": "covers", "recovered": 0.8, "low": 0.7, "high": 0.99}, False),
        *(
            ({"rule": rule, "recovered": math.nan}, False)
            for rule in ("equal", "at least", "at most")
        ),
        ({"rule": "covers"}, False),
    ],
)
def test_rules(fields, passed):
    assert check(**fields).passed is passed


def test_rates_have_their_exact_interval():
    found = rate_check("a", "c", "q", 0.05, 3, 40)
    assert found.low == pytest.approx(betaincinv(3, 38, 0.005), rel=1e-7)
    assert found.high == pytest.approx(betaincinv(4, 37, 0.995), rel=1e-7)
    assert found.passed
    assert not rate_check("a", "c", "q", 0.05, 30, 40).passed


def test_a_reader_wants_one_row():
    table = table_of([check(), check(quantity="r")])
    with pytest.raises(AnalysisError, match="2 rows"):
        Reader("a", "c", table).row(rule="equal")


# -- planted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "control",
    [
        gates.sparsity_checks,
        gates.categories_checks,
        gates.evaluation_checks,
        routes.sparsity_checks,
        routes.divergence_checks,
        routes.effective_checks,
        prices.ablation_checks,
        prices.route_ablation_checks,
        prices.intervention_checks,
        prices.attribution_checks,
        prices.route_attribution_checks,
        circuits.circuits_checks,
    ],
)
def test_every_planted_number_comes_back(control):
    checks = list(control(**OPTIONS))
    assert len(checks) >= 2
    assert [c.quantity for c in checks if not c.passed] == []
    for c in checks:
        if c.rule == "equal" and c.quantity != "95th percentile":  # of a histogram
            assert c.tolerance <= max(1e-6, ROUNDING * abs(c.planted))


def test_patched_edges_come_back():
    assert [c.quantity for c in circuits.patching_checks() if not c.passed] == []


def test_a_gate_that_opens_otherwise_is_noticed(monkeypatch):
    def wrong():
        model = gated()
        with torch.no_grad():
            model.blocks[1].attn.values.alpha.weight.mul_(1.001)
        return model

    monkeypatch.setattr(gates, "gated", wrong)
    failed = {c.quantity for c in gates.sparsity_checks(**OPTIONS) if not c.passed}
    assert {"mean", "mean given open", "norm share"} <= failed
    assert "zero fraction" not in failed


def test_a_distance_in_place_of_a_divergence_is_noticed(monkeypatch):
    """The square root is a common mistake: scipy's jensenshannon is one."""
    right = divergence.jensen_shannon
    monkeypatch.setattr(divergence, "jensen_shannon", lambda *a: np.sqrt(right(*a)))
    failed = {c.quantity for c in routes.divergence_checks(**OPTIONS) if not c.passed}
    assert failed == {"of mean routes"}


def test_a_route_that_is_pulled_otherwise_is_noticed(monkeypatch):
    def wrong(**fields):
        model = routed(**fields)
        with torch.no_grad():
            model.blocks[1].attn_read.query_v.mul_(1.01)
        return model

    monkeypatch.setattr(routes, "routed", wrong)
    for control in (routes.sparsity_checks, routes.effective_checks):
        assert sum(not c.passed for c in control(**OPTIONS)) >= 4


def test_prices_are_those_of_the_model():
    """The table against the model itself, in float64, and against scipy."""
    docs = priced_documents((30, 17, 41))
    prices_of, model = Prices(docs), priced().double()
    windows = [d.tokens[k : k + 17] for d in docs for k in range(0, len(d.tokens) - 1, 16)]

    def log_p():
        rows = [torch.from_numpy(w[:-1])[None] for w in windows]
        with torch.no_grad():
            return np.concatenate([log_softmax(model(r)[0].numpy(), axis=-1) for r in rows])

    targets = np.concatenate([w[1:] for w in windows])
    clean = log_p()
    with intervene(model, ZeroGate(head=3)):
        edited = log_p()
    rows = np.arange(len(targets))
    cost = (clean - edited)[rows, targets].mean()
    assert prices_of.cost(closed(3)) == pytest.approx(cost, rel=1e-7)
    kl = entropy(np.exp(clean), np.exp(edited), axis=1).mean()
    assert prices_of.kl(closed(3)) == pytest.approx(kl, rel=1e-7)
    moved = (clean.argmax(1) != edited.argmax(1)).mean()
    assert prices_of.changed(closed(3)) == moved
    assert prices_of.cost(GATES) == 0


# -- chance ----------------------------------------------------------------------------------------


def test_shuffled_labels_pass_and_true_ones_do_not(monkeypatch):
    assert all(c.passed for c in nulls.shuffled_labels(20))

    def true_labels(docs, sides, *names):
        return tags_from(docs, [token_class(d.tokens) for d in docs], *names)

    monkeypatch.setattr(nulls, "tags_from", true_labels)
    assert not any(c.passed for c in nulls.shuffled_labels(5))


# -- languages -------------------------------------------------------------------------------------


def test_entropies_count_the_sequences():
    """Where all sequences are equally likely the entropy is the log of their number."""
    numbers = {
        MEMORY: N_TOPICS * 14**7,
        FORGETFUL: N_TOPICS * (14 * N_TOPICS) ** 7,
        RECALL: math.perm(16, 5) / 16 * 16**5 * 5**10,
    }
    for language, number in numbers.items():
        assert language.floor * (language.length - 1) == pytest.approx(math.log(number), rel=1e-12)


def test_the_entropy_of_induction_is_that_of_the_best_predictor():
    """Predict token by token, with the periods that are still possible, over many sequences."""
    sequences = INDUCTION.draw(np.random.default_rng(0), 400)
    nats = []
    for row in sequences:
        possible, total = set(PERIODS), 0.0
        for t in range(1, len(row)):
            p_next = {}
            for period in possible:
                fresh = t < period
                for token in range(16):
                    p = 1 / (16 - t) * (token not in row[:t]) if fresh else token == row[t - period]
                    p_next[token] = p_next.get(token, 0) + p / len(possible)
            total -= math.log(p_next[row[t]])
            possible = {
                p
                for p in possible
                if (t < p and row[t] not in row[:t]) or (t >= p and row[t] == row[t - p])
            }
        nats.append(total / (len(row) - 1))
    error = np.std(nats) / math.sqrt(len(nats))
    assert abs(np.mean(nats) - INDUCTION.floor) < 4 * error


@pytest.mark.parametrize("language", [MEMORY, FORGETFUL, RECALL, INDUCTION])
def test_sequences_fit_their_language(language):
    drawn = language.draw(np.random.default_rng(1), 50)
    assert drawn.shape == (50, language.length)
    assert drawn.min() >= 0
    assert drawn.max() < language.d_vocab


def test_every_key_of_recall_keeps_its_value():
    for row in RECALL.draw(np.random.default_rng(2), 20):
        keys, values = row[::2], row[1::2]
        assert len(set(keys[:5])) == 5
        told = dict(zip(keys[:5], values[:5], strict=True))
        assert [told[key] for key in keys[5:]] == values[5:].tolist()


def test_balanced_sequences_have_every_topic_over_the_same_noise():
    rows = balanced_memory(3).reshape(3, N_TOPICS, -1)
    for group in rows:
        assert sorted(group[:, 1]) == list(range(N_TOPICS))
        rest = ~is_topic(group[0])
        assert (group[:, rest] == group[0, rest]).all()
        assert (group[:, ~rest] == group[:, 1:2]).all()


# -- trained ---------------------------------------------------------------------------------------


def test_gates_are_the_only_way_for_what_is_remembered():
    model = learning.learn(MEMORY, "satformer", 20, silence=learning.only_through_gates)
    rows = torch.from_numpy(balanced_memory(1)[:2, :-1])
    differ = (rows[0] == rows[1]).nonzero()[:, 0]  # where the current token is the same
    with torch.no_grad():
        open_gates = model(rows)
        with intervene(model, ZeroGate()):
            shut = model(rows)
    later = differ[differ > 1]
    assert torch.equal(shut[0, later], shut[1, later])
    assert not torch.equal(open_gates[0, later], open_gates[1, later])


def test_training_is_repeatable():
    first, second = (learning.learn(RECALL, "satformer", 3) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_memory_is_learnt_and_its_worth_found():
    checks = list(trained.memory_checks(150, **OPTIONS))
    assert [f"{c.control}: {c.quantity}" for c in checks if not c.passed] == []
    assert {c.rule for c in checks} == {"at least", "at most", "equal"}


def test_what_is_not_learnt_fails():
    checks = list(trained.memory_checks(5, **OPTIONS))
    failed = {(c.analysis, c.rule) for c in checks if not c.passed}
    assert ("evaluate", "at most") in failed
    assert ("ablate", "at least") in failed


# -- the scorecard ---------------------------------------------------------------------------------


def test_a_scorecard_counts_and_survives_its_files(tmp_path):
    missed = check(quantity="missed", recovered=1.5, analysis="b")
    result = scorecard.scorecard([check(), check(planted=0.0, recovered=0.0), missed], full=False)
    assert result.summary["n_checks"] == 3
    assert result.summary["n_passed"] == 2
    assert result.summary["failed"] == ["b: c: missed"]
    assert result.summary["by_analysis"]["b"] == {"passed": 0, "checks": 1}
    assert result.table["passed"].tolist() == [True, True, False]
    assert result.table["flags"].tolist() == ["", "", "failed"]
    result.save(tmp_path)
    assert Result.load(tmp_path, "controls").to_frame().equals(result.to_frame())
    assert (tmp_path / "controls.png").stat().st_size > 5_000


@pytest.mark.parametrize("recovered", [1.0, 1.5])
def test_the_command_fails_when_a_number_is_missed(recovered, tmp_path, monkeypatch, capsys):
    controls = [lambda: iter([check(recovered=recovered)])]
    monkeypatch.setattr(scorecard, "_controls", lambda full: controls)
    monkeypatch.setattr("sys.argv", ["satlens", "controls", "--out", str(tmp_path), "--json"])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (tmp_path / "controls.csv").exists()
    assert json.loads(out)["n_checks"] == 1
    assert code == (0 if recovered == 1.0 else 1)
    if code:
        errors = [line for line in err.splitlines() if line.startswith("satlens: error: ")]
        assert errors == ["satlens: error: controls: 1 of 1 checks failed: a: c: q"]


def test_a_run_takes_one_thread_and_gives_the_others_back(monkeypatch):
    seen = []

    def control():
        seen.append(torch.get_num_threads())
        return iter([check()])

    monkeypatch.setattr(scorecard, "_controls", lambda full: [control, control])
    before, calls = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        result = satlens.controls(progress=lambda *call: calls.append(call))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]
    assert calls == [("controls", k, 2) for k in range(3)]
    assert len(result.table) == 2
