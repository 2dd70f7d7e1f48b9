"""Claims: verdicts follow from intervals and seeds, and turn when the numbers do."""

from __future__ import annotations

import mock_tables as mock
import pytest

from satlens.analysis.result import Result
from satlens.report.claims import CLAIMS, claims, sentences, verdict
from satlens.report.collect import Run
from satlens.report.effects import Effect

ARMS = {"base": "transformer", "gated": "satformer", "static": "resformer", "rd": "rd-attnres"}


def run_of(tmp_path, n_seeds: int = 1, **results) -> Run:
    recipe = {"arms": {arm: {"variant": variant} for arm, variant in ARMS.items()}}
    run = Run(tmp_path, recipe=recipe, arms=list(ARMS))
    run.seeds = {arm: list(range(n_seeds)) for arm in ARMS}
    for key, result in results.items():
        if key == "comparison":
            run.study[key] = result
        else:
            arm, analysis, seed = key.rsplit("_", 2)
            run.results[arm, int(seed), analysis] = result
    return run


def compared(*seeds: float) -> Result:
    return Result("comparison", mock.comparison({("gated", "base"): seeds}))


def ablated(cost: float, half: float = 0.01) -> Result:
    summary = {"overall": {"gate.zero": mock.cell(cost, half)}}
    return Result("ablation", mock.ablation({"zero": cost}, 4, 2), summary=summary)


def row_of(run: Run, claim: str):
    table = claims(run).table
    rows = table[table["claim"].str.contains(claim, regex=False)]
    assert len(rows) == 1
    return rows.iloc[0]


LOWER = "gated access to V_1 lowers the loss"
RELIES = "the trained model relies on its gates"


def test_a_loss_claim_needs_seeds_that_can_settle_it(tmp_path):
    six = (-0.06, -0.05, -0.055, -0.062, -0.058, -0.051)
    found = row_of(run_of(tmp_path, comparison=compared(*six)), LOWER)
    assert found["verdict"] == "appears"
    assert found["n_seeds"] == 6
    assert found["value"] == pytest.approx(sum(six) / 6)
    assert (found["lowest"], found["highest"]) == (-0.062, -0.05)
    assert found["value_low"] < found["value"] < found["value_high"] < -0.01

    two = row_of(run_of(tmp_path, comparison=compared(-0.06, -0.061)), LOWER)
    assert two["verdict"] == "undecided"
    assert two["value_high"] < -0.01
    assert two["flags"] == "too_few_seeds"


def test_flipped_signs_turn_the_verdict_and_the_words(tmp_path):
    six = [-0.06, -0.05, -0.055, -0.062, -0.058, -0.051]
    for sign, says in ((1, "Appears"), (-1, "Does not appear")):
        run = run_of(tmp_path, comparison=compared(*(sign * x for x in six)))
        (said,) = [s for s in sentences(claims(run)) if LOWER in s]
        assert said.startswith(says)
        assert said.kind == "found"


def test_a_difference_within_the_noise_floor_does_not_appear(tmp_path):
    small = (-0.004, -0.003, -0.0035, -0.004, -0.003, -0.0035)
    found = row_of(run_of(tmp_path, comparison=compared(*small)), LOWER)
    assert found["verdict"] == "does not appear"


def test_every_checkpoint_has_to_show_it(tmp_path):
    both = run_of(tmp_path, 2, gated_ablation_0=ablated(0.05), gated_ablation_1=ablated(0.03))
    found = row_of(both, RELIES)
    assert found["verdict"] == "appears"
    assert (found["value"], found["highest"], found["n_seeds"]) == (0.03, 0.05, 2)
    mixed = run_of(tmp_path, 2, gated_ablation_0=ablated(0.05), gated_ablation_1=ablated(0.0))
    assert row_of(mixed, RELIES)["verdict"] == "undecided"
    assert row_of(run_of(tmp_path), RELIES)["verdict"] == "not measured"


def test_arms_are_found_by_variant_and_absent_ones_claim_nothing(tmp_path):
    table = claims(run_of(tmp_path)).table
    assert set(table["arm"]) == {"gated", "static", "rd"}
    assert set(table["verdict"]) == {"not measured"}
    assert {s.kind for s in sentences(claims(run_of(tmp_path)))} == {"missing"}


@pytest.mark.parametrize("side", [1, -1])
def test_verdicts_of_intervals(side):
    claim = next(c for c in CLAIMS if c.side == side and c.margin > 0)
    m = claim.margin

    def of(low, high):
        ends = sorted((side * low, side * high))
        return verdict(claim, [Effect(value=sum(ends) / 2, low=ends[0], high=ends[1])])

    assert of(2 * m, 3 * m) == "appears"
    assert of(m / 2, 3 * m) == "undecided"
    assert of(-m, m / 2) == "does not appear"
    assert of(-3 * m, -2 * m) == "does not appear"
    assert verdict(claim, [Effect(value=2 * m)]) == "undecided"
    assert verdict(claim, []) == "not measured"


def test_the_weakest_category_contrast_needs_adjusted_significance(tmp_path):
    cells = mock.gate_cells(4, 2)
    delta = mock.np.linspace(0.05, 0.2, len(cells))
    table = mock.contrasts(cells, delta, delta)
    quiet = table.assign(p_controlled_adjusted=0.5)
    for frame, expected in ((table, "appears"), (quiet, "undecided")):
        part = Result("categories_contrasts", frame)
        result = Result("categories", mock.categories(cells), parts=(part,))
        run = run_of(tmp_path, gated_categories_0=result)
        assert row_of(run, "category of a token")["verdict"] == expected
