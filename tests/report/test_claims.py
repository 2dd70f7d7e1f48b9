"""Claims: verdicts follow from intervals and seeds, and turn when the numbers do."""

from __future__ import annotations

import mock_tables as mock
import pytest

from satlens.analysis.result import Result
from satlens.report.claims.claimed import CLAIMS
from satlens.report.claims.table import claims, sentences
from satlens.report.claims.verdicts import Measured, beside_published, judge, place
from satlens.report.collect import Run
from satlens.report.effects import Effect

ARMS = {"base": "transformer", "gated": "satformer", "static": "resformer", "rd": "rd-attnres"}


def run_of(tmp_path, n_seeds: int = 1, **results) -> Run:
    recipe = {"arms": {arm: {"variant": variant} for arm, variant in ARMS.items()}}
    run = Run(tmp_path, recipe=recipe, arms=list(ARMS))
    run.seeds = {arm: list(range(n_seeds)) for arm in ARMS}
    for key, result in results.items():
        if key in ("comparison", "curves", "bench"):
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
SHRINKS = "what separate routes gain shrinks"
SIX = (-0.06, -0.05, -0.055, -0.062, -0.058, -0.051)


def test_a_loss_claim_needs_seeds_that_can_settle_it(tmp_path):
    found = row_of(run_of(tmp_path, comparison=compared(*SIX)), LOWER)
    assert found["verdict"] == "holds here"
    assert found["n_seeds"] == 6
    assert found["value"] == pytest.approx(sum(SIX) / 6)
    assert (found["lowest"], found["highest"]) == (-0.062, -0.05)
    assert found["value_low"] < found["value"] < found["value_high"] < -0.01

    # With five, sign tests stay above 0.05 whatever the t interval says.
    five = row_of(run_of(tmp_path, comparison=compared(*SIX[:5])), LOWER)
    assert five["verdict"] == "undecided"
    assert five["value_high"] < -0.01
    assert five["flags"] == "too_few_seeds"
    assert "cannot reach p below 0.062" in five["reason"]


def test_flipped_signs_turn_the_verdict_and_the_words(tmp_path):
    for sign, says in ((1, "Holds here"), (-1, "Does not hold here")):
        run = run_of(tmp_path, comparison=compared(*(sign * x for x in SIX)))
        (said,) = [s for s in sentences(claims(run)) if LOWER in s]
        assert said.startswith(says)
        assert said.kind == "found"
        assert ("the opposite is found" in said) == (sign < 0)


def test_a_difference_within_the_noise_floor_does_not_hold(tmp_path):
    small = (-0.004, -0.003, -0.0035, -0.004, -0.003, -0.0035)
    found = row_of(run_of(tmp_path, comparison=compared(*small)), LOWER)
    assert found["verdict"] == "does not hold here"
    assert "opposite" not in found["reason"]


def test_every_checkpoint_has_to_show_it(tmp_path):
    both = run_of(tmp_path, 2, gated_ablation_0=ablated(0.05), gated_ablation_1=ablated(0.03))
    found = row_of(both, RELIES)
    assert found["verdict"] == "holds here"
    assert (found["value"], found["highest"], found["n_seeds"]) == (0.03, 0.05, 2)
    assert "too few seeds to speak about others" in found["reason"]
    mixed = run_of(tmp_path, 2, gated_ablation_0=ablated(0.05), gated_ablation_1=ablated(0.0))
    found = row_of(mixed, RELIES)
    assert found["verdict"] == "undecided"
    assert "shown by 1 and contradicted by 0 of 2 checkpoints" in found["reason"]
    opposed = run_of(tmp_path, 2, gated_ablation_0=ablated(0.05), gated_ablation_1=ablated(-0.05))
    found = row_of(opposed, RELIES)
    assert found["verdict"] == "undecided"
    assert "shown by 1 and contradicted by 1 of 2 checkpoints" in found["reason"]
    assert row_of(run_of(tmp_path), RELIES)["verdict"] == "not run"


def test_six_checkpoints_have_to_show_it_over_seeds_too(tmp_path):
    def found(*costs: float):
        results = {f"gated_ablation_{k}": ablated(cost) for k, cost in enumerate(costs)}
        return row_of(run_of(tmp_path, 6, **results), RELIES)

    close = found(0.05, 0.051, 0.052, 0.049, 0.048, 0.05)
    assert close["verdict"] == "holds here"
    assert close["value"] == pytest.approx(0.05)
    assert close["covers"] == "other seeds"
    # Each is above zero for its own documents; one of them is far from the rest.
    apart = found(0.02, 0.02, 0.02, 0.02, 0.02, 1.0)
    assert apart["value_low"] < 0 < apart["lowest"]
    assert apart["verdict"] == "undecided"
    assert "over seeds the interval covers 0" in apart["reason"]


def test_arms_are_found_by_variant_and_absent_ones_claim_nothing(tmp_path):
    table = claims(run_of(tmp_path)).table
    assert set(table["arm"]) == {"gated", "static", "rd"}
    assert set(table["verdict"]) == {"not run"}
    assert table["reason"].str.len().min() > 0
    assert {s.kind for s in sentences(claims(run_of(tmp_path)))} == {"missing"}


def test_another_gate_function_does_not_speak_for_the_paper(tmp_path):
    run = run_of(tmp_path, comparison=compared(*SIX))
    run.arms.append("tanh")
    fields = {"value_residual": {"kind": "gated", "gate": "tanh"}}
    run.recipe["arms"]["tanh"] = {"variant": "satformer", "fields": fields}
    assert "tanh" not in set(claims(run).table["arm"])


def test_the_gap_in_training_is_that_of_paired_seeds(tmp_path):
    def logged(gap_early: float, gap_late: float) -> Result:
        rows = [
            {"arm": arm, "seed": seed, "step": step, "tokens": step, "val_loss": 5.0 + seed + gap}
            for seed in range(6)
            for arm, gaps in (("shared", (0, 0, 0)), ("rd", (9.0, gap_early, gap_late)))
            for step, gap in zip((0, 200, 1000), gaps, strict=True)
        ]
        frame = mock.counted(mock.pd.DataFrame(rows))
        return Result("curves", frame, keys=("seed", "step", "tokens"))

    for early, late, says in (
        (-0.065, -0.030, "holds here"),
        (-0.001, -0.04, "does not hold here"),
        (0.003, -0.05, "undecided"),  # no gain yet at the first evaluation
        (-0.0, 0.04, "undecided"),
    ):
        run = run_of(tmp_path, 6, curves=logged(early, late))
        run.arms.append("shared")
        run.recipe["arms"]["shared"] = {"variant": "attnres"}
        found = row_of(run, SHRINKS)
        assert found["value"] == pytest.approx(late - early)
        assert found["verdict"] == says
        # 200 of 1,000 tokens: the first evaluation after an eighth, as the data have it.
        assert "after 20 % of training" in found["reason"] + found["context"]
        assert ("no gain is established there" in found["reason"]) == (says == "undecided")


def timed(speed: float, half: float, again: float = 0.0) -> Result:
    frame = mock.bench()
    rows = frame["variant"] == "rd-attnres"
    frame.loc[rows, ["speed_ratio", "speed_ratio_low", "speed_ratio_high"]] = (
        speed,
        speed - half,
        speed + half,
    )
    control = frame["variant"].str.endswith("(again)")
    frame.loc[control, ["speed_ratio_low", "speed_ratio_high"]] = 1 - again, 1 + again
    return Result("bench", frame)


def test_timings_count_only_beyond_the_noise_of_the_machine(tmp_path):
    claim = "separate routes for values cost throughput"
    found = row_of(run_of(tmp_path, bench=timed(0.95, 0.01)), claim)
    assert found["verdict"] == "holds here"
    assert (found["value"], found["value_low"], found["value_high"]) == (0.95, 0.94, 0.96)
    assert found["beside_published"] == "a smaller difference than published"
    noisy = row_of(run_of(tmp_path, bench=timed(0.95, 0.01, again=0.06)), claim)
    assert noisy["verdict"] == "undecided"
    memory = row_of(run_of(tmp_path, bench=timed(0.95, 0.01)), "for values cost memory")
    assert (memory["value"], memory["covers"]) == (pytest.approx(1.07), "exact count")
    assert memory["verdict"] == "holds here"


@pytest.mark.parametrize("side", [1, -1])
def test_verdicts_of_intervals(side):
    claim = next(c for c in CLAIMS if c.side == side and c.margin > 0 and c.at == 0)
    m = claim.margin

    def of(low, high):
        ends = sorted((side * low, side * high))
        found = Effect(value=sum(ends) / 2, low=ends[0], high=ends[1])
        assert judge(claim, [Measured(0, found)]).verdict == place(claim, found)
        return place(claim, found)

    assert of(2 * m, 3 * m) == "holds here"
    assert of(m / 2, 3 * m) == "undecided"
    assert of(-m, m / 2) == "does not hold here"
    assert of(-3 * m, -2 * m) == "does not hold here"
    assert place(claim, Effect(value=2 * m)) == "undecided"
    assert judge(claim, []).verdict == "not run"


def test_what_is_published_is_beside_ours_only_in_the_same_unit():
    (claim,) = [c for c in CLAIMS if "end below a shared route" in c.text]
    ours = Effect(value=-0.04, low=-0.05, high=-0.02)
    assert beside_published(claim, ours) == "interval covers the published value"
    assert beside_published(claim, Effect(value=-0.01)) == "a smaller difference than published"
    assert beside_published(claim, Effect(value=0.04)) == "opposite to the published value"
    assert beside_published(claim, Effect(value=-0.1)) == "a larger difference than published"
    # Two scales, -0.0301 (S) and -0.0247 (M), and an interval that ends between them.
    assert beside_published(claim, Effect(value=-0.02, low=-0.027, high=-0.013)) == (
        "S: a smaller difference than published, M: interval covers the published value"
    )
    memory = [c for c in CLAIMS if "memory" in c.text]
    assert [beside_published(c, Effect(value=1.0, low=1.0, high=1.0)) for c in memory] == [""] * 3
    (static,) = [c for c in CLAIMS if "static value residuals lower" in c.text]
    assert beside_published(static, ours) == ""


def test_the_largest_category_contrast_needs_adjusted_significance(tmp_path):
    cells = mock.gate_cells(4, 2)
    delta = mock.np.linspace(0.05, 0.2, len(cells))
    table = mock.contrasts(cells, delta, delta)
    quiet = table.assign(p_controlled_adjusted=0.5)
    for frame, expected in ((table, "holds here"), (quiet, "undecided")):
        part = Result("categories_contrasts", frame)
        result = Result("categories", mock.categories(cells), parts=(part,))
        run = run_of(tmp_path, gated_categories_0=result)
        assert row_of(run, "category of a token")["verdict"] == expected


# -- what an untrained model would show too --------------------------------------------------------

HEADS = "access is specific to heads"


def shared(trained: float, untrained: float | None, half: float = 0.001) -> Result:
    """Gates whose variance lies so far between heads, and did so before training."""
    rest = {"layers": 0.1, "tokens": 0.5}
    gates = {
        "variance_shares": {"heads": trained, **rest},
        "variance_share_intervals": {"heads": mock.cell(trained, half)},
    }
    if untrained is not None:
        gates["variance_shares_init"] = {"heads": untrained, **rest}
    return Result("sparsity", mock.gates(4, 2), summary={"gates": gates})


def test_heads_that_differ_before_training_are_no_finding(tmp_path):
    def found(trained: float, untrained: float | None):
        return row_of(run_of(tmp_path, gated_sparsity_0=shared(trained, untrained)), HEADS)

    assert found(0.025, 0.023)["verdict"] == "does not hold here"
    grown = found(0.042, 0.023)
    assert grown["verdict"] == "holds here"
    assert grown["value"] == pytest.approx(0.019)
    assert grown["context"] == "trained 4.2 %, untrained 2.3 %"
    assert found(0.042, None)["verdict"] == "not run"


def test_a_verdict_about_categories_says_what_it_has_to_be_read_with(tmp_path):
    cells = mock.gate_cells(4, 2)
    delta = mock.np.linspace(0.05, 0.2, len(cells))
    part = Result("categories_contrasts", mock.contrasts(cells, delta, delta))
    result = Result("categories", mock.categories(cells), parts=(part,))
    run = run_of(tmp_path, gated_categories_0=result)
    assert row_of(run, "category of a token")["context"].startswith("an untrained gate reads its")


@pytest.mark.parametrize(
    ("r", "verdict", "context"),
    [
        (0.44, "holds here", "above 0 in 1 of 1 checkpoint"),
        (-0.44, "holds here", "below 0 in 1 of 1 checkpoint"),
        (0.02, "holds here", ""),
        (-0.8, "does not hold here", "below 0 in 1 of 1 checkpoint"),
        (0.48, "undecided", "above 0 in 1 of 1 checkpoint"),
    ],
)
def test_a_weak_correlation_is_weak_whatever_its_sign(tmp_path, r, verdict, context):
    summary = {"by_kind": {"gate": {"mass_dnll": mock.cell(r, 0.05)}}}
    result = Result("attribution", mock.attribution(), summary=summary)
    table = claims(run_of(tmp_path, gated_attribution_0=result)).table
    (found,) = table[table["quantity"].str.endswith("over the gates of satformer")].to_dict(
        "records"
    )
    assert (found["verdict"], found["value"]) == (verdict, pytest.approx(abs(r)))
    assert found["value_low"] == pytest.approx(max(0.0, abs(r) - 0.05))
    said = f"the correlation itself is {context}, by intervals over documents" if context else ""
    assert found["context"] == said


# -- single checkpoints ----------------------------------------------------------------------------


def test_the_weakest_checkpoint_is_the_one_whose_interval_comes_nearest(tmp_path):
    run = run_of(tmp_path, 2, gated_ablation_0=ablated(0.09, 0.01))
    run.results["gated", 1, "ablation"] = ablated(0.1, 0.099)
    assert row_of(run, RELIES)["value"] == 0.1
    run = run_of(tmp_path, 2, gated_ablation_0=ablated(-0.05, 0.001))
    run.results["gated", 1, "ablation"] = ablated(-0.06, 0.059)
    found = row_of(run, RELIES)
    assert (found["verdict"], found["value"]) == ("does not hold here", -0.06)


def test_an_undefined_checkpoint_is_said(tmp_path):
    nothing = Result(
        "ablation",
        mock.ablation({"zero": 0.0}, 4, 2),
        summary={"overall": {"gate.zero": {"estimate": None, "low": None, "high": None}}},
    )
    run = run_of(tmp_path, 2, gated_ablation_0=ablated(0.05), gated_ablation_1=nothing)
    assert row_of(run, RELIES)["reason"].endswith("; not defined in 1 more")


def test_the_smallest_p_of_four_seeds_is_an_eighth(tmp_path):
    found = row_of(run_of(tmp_path, comparison=compared(*SIX[:4])), LOWER)
    assert "cannot reach p below 0.125" in found["reason"]


def test_seeds_that_disagree_hold_nothing(tmp_path):
    seeds = (*SIX[:5], 0.002)
    found = row_of(run_of(tmp_path, comparison=compared(*seeds)), LOWER)
    assert found["value_high"] < -0.01
    assert found["verdict"] == "undecided"
    assert "below 0 in 5 of 6 seeds" in found["reason"]


def test_apart_from_zero_is_not_beyond_the_margin(tmp_path):
    seeds = (-0.055, -0.022, -0.019, -0.002, -0.037, -0.015)
    found = row_of(run_of(tmp_path, comparison=compared(*seeds)), LOWER)
    assert found["value_low"] < -0.01 < found["value_high"] < 0
    assert found["verdict"] == "undecided"
    assert found["reason"] == (
        "apart from 0 by its interval, but not shown to exceed the margin of 0.01; "
        "below 0 in 6 of 6 seeds"
    )
