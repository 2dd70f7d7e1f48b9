"""Sentences follow the numbers: positive, negative, null, no interval, contradictory, missing."""

from __future__ import annotations

import math
import re

import mock_tables as mock
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satlens.report import words
from satlens.report.effects import Effect, Finding, effect, listed, percent, plain, signed

MINUS = "\N{MINUS SIGN}"
PAIR = ("satformer", "transformer")


def said(findings: list[Finding]) -> str:
    return "\n".join(findings)


# -- arms ------------------------------------------------------------------------------------------


def compared(*seeds: float) -> Finding:
    (finding,) = words.comparison(mock.comparison({PAIR: seeds}), {"noise_floor": 0.01})
    return finding


def test_a_better_arm_on_two_seeds_is_a_direction_and_not_a_result() -> None:
    finding = compared(-0.047, -0.045)
    assert finding.kind == "direction"
    assert finding.startswith(
        f"satformer ends 0.046 nats/token below transformer (better): mean of 2 paired seeds "
        f"({MINUS}0.047 and {MINUS}0.045), 95 % t interval [{MINUS}0.059, {MINUS}0.033]"
    )
    assert "the smallest p that a sign test can reach is 0.5" in finding
    assert finding.endswith("this is a direction, not a result.")


def test_flipping_the_sign_flips_the_words() -> None:
    finding = compared(0.047, 0.045)
    assert "satformer ends 0.046 nats/token above transformer (worse)" in finding
    assert "better" not in finding
    assert "[+0.033, +0.059]" in finding


def test_an_interval_that_covers_zero_establishes_nothing() -> None:
    finding = compared(-0.08, -0.01)
    assert finding.kind == "open"
    assert "no difference is established" in finding
    assert "covers 0" in finding
    assert "better" not in finding


def test_seeds_that_disagree_are_said_to_disagree() -> None:
    finding = compared(-0.04, 0.03, -0.05, -0.04, -0.06, -0.05)
    assert finding.kind == "open"
    assert "the seeds disagree in sign" in finding


def test_a_difference_below_the_noise_floor_means_nothing_even_if_seeds_agree() -> None:
    finding = compared(-0.0041, -0.0040, -0.0042, -0.0041, -0.0040, -0.0041)
    assert finding.kind == "open"
    assert "0.004 is below the noise floor of single runs at this scale (about 0.01" in finding


def test_six_agreeing_seeds_are_a_result_with_their_p() -> None:
    finding = compared(-0.05, -0.04, -0.06, -0.05, -0.045, -0.055)
    assert finding.kind == "found"
    assert "Sign test over 6 seeds: p = 0.031." in finding


def test_one_seed_has_no_interval() -> None:
    finding = compared(-0.05)
    assert finding.kind == "direction"
    assert "in the one seed that both have; one seed has no interval" in finding


def test_arms_are_ordered_by_their_loss_without_claiming_more() -> None:
    (finding,) = words.evaluation({"a": {0: 4.3, 1: 4.1}, "b": {0: 4.0, 1: 4.1}, "c": {}})
    assert "(means of 2 seeds): b 4.050 and a 4.200" in finding
    assert words.evaluation({}) == []


# -- ablation --------------------------------------------------------------------------------------


def ablated(total: float, gain: tuple[str, float] | None = ("transformer", -0.05), **options):
    return words.ablation(mock.ablation({"zero": total}, **options), {}, "satformer (seed 0)", gain)


def test_damage_null_and_improvement_read_differently() -> None:
    damage, null, better = ablated(0.08), ablated(0.004), ablated(-0.08)
    assert (
        "raises the held-out NLL by 0.080 nats/token, 95 % interval [+0.072, +0.088]" in damage[0]
    )
    assert damage[0].kind == "found"
    assert "has no effect that is established: +0.004 nats/token" in null[0]
    assert null[0].kind == "open"
    assert "lowers the held-out NLL by 0.080" in better[0]


def test_without_an_interval_nothing_is_established() -> None:
    table = mock.ablation({"zero": 0.08}).assign(
        dnll_low=np.nan, dnll_high=np.nan, p_adjusted=np.nan, flags="units<8"
    )
    findings = words.ablation(table, {})
    assert "with no interval: fewer than 8 documents, so nothing is established" in findings[0]
    assert {finding.kind for finding in findings} == {"open"}


def test_an_intervention_that_does_nothing_is_said_to_do_nothing() -> None:
    findings = ablated(0.0, half=0.0)
    assert [str(f) for f in findings] == [
        "satformer (seed 0): setting every gate to zero changes nothing at all."
    ]


def test_layers_and_heads_are_named_where_their_tests_say_so() -> None:
    text = said(ablated(0.08))
    assert "One layer at a time, zero: it costs in 5 of 7 layers (layers 3, 4, 5, 6 and 7)" in text
    assert "in layer 7, 95 % interval" in text
    assert "In the other 2 none is established." in text
    assert "it helps in 5 of 7 layers" in said(ablated(-0.08))
    assert "no effect is established in any of 7 layers" in said(ablated(0.0005))


def test_damage_stands_beside_the_gain_over_the_trained_baseline() -> None:
    assert "0.050 nats/token below the trained transformer" in said(ablated(0.08))
    assert "1.6 times that gain" in said(ablated(0.08))
    no_gain = ablated(1.14, ("transformer", 0.002))
    assert no_gain[-1].kind == "open"
    assert "shows reliance, not usefulness" in no_gain[-1]
    assert "no trained baseline was compared" in said(ablated(0.08, None))


# -- gates, routes ---------------------------------------------------------------------------------


def test_zeros_are_read_against_the_untrained_model() -> None:
    table = mock.gates()

    def zeros(zero: float, init: float = 0.5) -> Finding:
        return words.sparsity(table, mock.gate_summary(table, zero, init))[0]

    assert "56 % of cases" in zeros(0.56)
    assert "sparser than the untrained model (50 %)" in zeros(0.56)
    assert "less sparse than the untrained model (50 %)" in zeros(0.44)
    assert zeros(0.505).kind == "open"
    assert "training is not shown to have changed it" in zeros(0.505)


def test_dead_heads_are_counted_and_their_share_of_the_zeros_given() -> None:
    table = mock.gates(n_dead=2)
    text = said(words.sparsity(table, mock.gate_summary(table)))
    assert "2 of 28 heads never open on these tokens (untrained: 0) and hold 13 %" in text
    alive = mock.gates(n_dead=0)
    assert "None of 28 heads is dead" in said(words.sparsity(alive, mock.gate_summary(alive)))


def test_static_weights_get_no_statement_about_tokens() -> None:
    table = mock.gates(n_dead=0).assign(mean=-0.5)
    summary = {"gates": {**mock.gate_summary(table)["gates"], "static": True}}
    text = said(words.sparsity(table, summary, "resformer"))
    assert "one weight a layer, the same for every token" in text
    assert "negative in layers 1, 2" in text
    assert "exactly zero" not in text
    assert words.sparsity_effects(summary) is None


def test_routes_that_stayed_uniform_are_not_called_concentrated() -> None:
    table = mock.routes(mock.route_weights())
    assert "routes concentrate" in words.sparsity(table, mock.route_summary(0.8))[0]
    uniform = words.sparsity(table, mock.route_summary(0.995))[0]
    assert uniform.kind == "open"
    assert "not shown to differ from uniform" in uniform


def test_the_roles_of_routes_are_compared_by_their_intervals() -> None:
    table = mock.routes(mock.route_weights())

    def roles(qk: float, v: float) -> str:
        level = np.where(table["role"] == "v", v, qk)
        moved = mock.with_ends(table.assign(mass_embedding=level), "mass_embedding", 0.01)
        return said(words.sparsity(moved, mock.route_summary()))

    assert "than the query-key route in 7 and less in 0 of 7 layers" in roles(0.2, 0.5)
    assert "than the query-key route in 0 and less in 7 of 7 layers" in roles(0.5, 0.2)
    assert "no difference between the roles is established" in roles(0.3, 0.305)


# -- categories, divergence ------------------------------------------------------------------------


def contrasted(delta: np.ndarray, controlled: np.ndarray) -> list[Finding]:
    cells = mock.gate_cells(8, 4)
    return words.categories(mock.contrasts(cells, delta, controlled), {}, "satformer")


def test_category_contrasts_positive_negative_and_null() -> None:
    flat = np.zeros(28)
    some = flat.copy()
    some[[3, 4]] = 0.2
    up, down, null = contrasted(some, some), contrasted(-some, -some), contrasted(flat, flat)
    assert "semantic tokens get a larger gate than functional ones in 2 of 28 heads" in up[0]
    assert "semantic tokens get a smaller gate than functional ones in 2 of 28 heads" in down[0]
    assert null[0].kind == "open"
    assert "no head of 28 is found to tell semantic from functional tokens" in null[0]


def test_a_contrast_that_frequency_explains_is_not_claimed() -> None:
    some = np.zeros(28)
    some[:5] = 0.2
    gone, turned = contrasted(some, np.zeros(28)), contrasted(some, -some)
    assert gone[0].kind == "open"
    assert "5 of them no longer show it" in said(gone)
    assert "5 turn round" in said(turned)


def test_divergence_is_read_against_the_untrained_routes() -> None:
    table = mock.divergence()
    differ = words.divergence(table, mock.divergence_summary(0.2))
    assert "differ: mean JS divergence 0.200 nats a token" in differ[0]
    same = words.divergence(mock.divergence(level=0.0), mock.divergence_summary(0.0, 0.001))
    assert same[0].kind == "open"
    assert "are not told apart" in same[0]


def test_overlapping_layers_do_not_stand_out() -> None:
    table = mock.divergence()
    wide = mock.with_ends(table, "js_token", 0.3)
    assert "no layer stands out" in said(words.divergence(wide, mock.divergence_summary()))
    assert "no layer stands out" not in said(words.divergence(table, mock.divergence_summary()))


def test_several_seeds_are_told_in_one_sentence() -> None:
    cells, some = mock.gate_cells(8, 4), np.zeros(28)
    some[:3] = (0.2, 0.2, -0.2)
    tables = {0: mock.contrasts(cells, some, some), 1: mock.contrasts(cells, some, 0 * some)}
    (finding,) = words.categories_across("satformer", tables)
    assert finding.kind == "open"
    assert "3 of 28 (2 upwards), seed 0 and 0 of 28 (0 upwards), seed 1" in finding
    table = mock.divergence()
    same = (table, mock.divergence_summary(0.2))
    (both,) = words.divergence_across("rd", {0: same, 1: same})
    assert both.kind == "found"
    assert "differ in both seeds" in both
    (one,) = words.divergence_across("rd", {0: same, 1: (table, mock.divergence_summary(0.0))})
    assert one.kind == "open"
    assert "differ in 1 of 2 seeds" in one


# -- seeds and what is missing ---------------------------------------------------------------------


def across(*effects: Effect) -> Finding:
    (finding,) = words.across_seeds(
        "Zeroing", dict(enumerate(effects)), up="hurts", down="helps", unit="nats/token"
    )
    return finding


UP, DOWN = Effect(value=0.1, low=0.05, high=0.15), Effect(value=-0.1, low=-0.15, high=-0.05)
FLAT, BARE = Effect(value=0.01, low=-0.02, high=0.04), Effect(value=0.1)


@pytest.mark.parametrize(
    ("effects", "kind", "words_of_it"),
    [
        ((UP, UP), "found", "Zeroing hurts in both seeds: +0.100 [+0.050, +0.150], seed 0"),
        ((DOWN, DOWN), "found", "Zeroing helps in both seeds"),
        ((UP, DOWN), "open", "the seeds contradict each other"),
        ((UP, FLAT), "open", "Zeroing hurts in 1 of 2 seeds; in the others no effect"),
        ((FLAT, FLAT), "open", "no effect is established, every interval covers 0"),
        ((BARE,), "open", "too few documents for an interval: +0.100 (no interval), seed 0"),
        ((UP,), "found", "hurts in the one seed measured"),
    ],
)
def test_seeds_that_agree_disagree_or_say_nothing(effects, kind, words_of_it) -> None:
    finding = across(*effects)
    assert finding.kind == kind
    assert words_of_it in finding


def test_what_is_missing_is_named_once_a_reason() -> None:
    absent = [
        ("sparsity", "satformer", 1, "planned and not run"),
        ("curves", None, None, "planned and not run"),
    ]
    (finding,) = words.missing(absent)
    assert finding.kind == "missing"
    assert finding.startswith("Planned and not run: sparsity of satformer (seed 1) and curves.")


# -- numbers ---------------------------------------------------------------------------------------


@given(st.floats(-10, 10), st.floats(0, 5), st.floats(0, 5))
def test_a_verdict_has_the_sign_of_the_whole_interval(value, below, above) -> None:
    found = Effect(value=value, low=value - below, high=value + above)
    if found.verdict == "positive":
        assert found.low > 0
    elif found.verdict == "negative":
        assert found.high < 0
    else:
        assert found.low <= 0 <= found.high


@given(st.floats(-100, 100).filter(lambda x: abs(x) > 1e-7))
def test_a_number_that_is_not_zero_is_not_written_as_zero(value: float) -> None:
    assert float(signed(value).replace(MINUS, "-")) != 0
    assert re.fullmatch(r"[+\N{MINUS SIGN}]\d+\.\d+", signed(value))


def test_formats() -> None:
    assert (signed(-0.0456), plain(4.2, 2), signed(math.nan)) == (f"{MINUS}0.046", "4.20", "n/a")
    assert (percent(0.563), percent(0.003), percent(0.0)) == ("56 %", "0.3 %", "0 %")
    assert (percent(0.9999), percent(1e-5), percent(1.0)) == ("> 99.9 %", "< 0.1 %", "100 %")
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert effect({"x": 1.0, "x_low": None}, "x").verdict == "no_interval"
