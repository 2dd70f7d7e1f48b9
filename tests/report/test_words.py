"""Sentences follow the numbers: positive, negative, null, no interval, contradictory, missing."""

from __future__ import annotations

import math
import re

import mock_tables as mock
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satlens.report import caveats, words
from satlens.report.effects import Effect, Finding, effect, listed, percent, plain, signed, tenths

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


def test_other_documents_get_a_whole_sentence() -> None:
    table = mock.comparison({PAIR: (-0.05, -0.04)})
    table = mock.with_ends(table.assign(difference_documents=-0.045), "difference_documents", 0.005)
    (finding,) = words.comparison(table, {})
    assert (
        f"For these very checkpoints on other documents it is {MINUS}0.045 nats/token, "
        f"95 % interval [{MINUS}0.050, {MINUS}0.040]." in finding
    )


def test_five_seeds_have_intervals_over_seeds_and_documents_too() -> None:
    table = mock.comparison({PAIR: (-0.05, -0.04, -0.06, -0.05, -0.045)})
    for name, half in (("difference_percentile", 0.006), ("difference_hierarchical", 0.02)):
        table = mock.with_ends(table.assign(**{name: -0.05}), name, half)
    (finding,) = words.comparison(table, {})
    assert (
        f"Percentile bootstrap over seeds: 95 % interval [{MINUS}0.056, {MINUS}0.044]; over other "
        f"seeds and other documents at once: 95 % interval [{MINUS}0.070, {MINUS}0.030]." in finding
    )


def test_one_seed_has_no_interval() -> None:
    finding = compared(-0.05)
    assert finding.kind == "direction"
    assert "in the one seed that both have; one seed has no interval" in finding


def test_arms_are_ordered_by_their_loss_without_claiming_more() -> None:
    (finding,) = words.evaluation({"a": {0: 4.3, 1: 4.1}, "b": {0: 4.0, 1: 4.1}, "c": {}})
    assert "(means of 2 seeds): b 4.050 and a 4.200" in finding
    assert words.evaluation({}) == []


# -- ablation --------------------------------------------------------------------------------------


def gained(difference: float, established: bool = True, n_tokens: int = 73_000) -> words.Gain:
    return words.Gain("transformer", difference, established, n_tokens)


def ablated(total: float, gain: words.Gain | None = gained(-0.05), **options):  # noqa: B008
    return words.ablation(mock.ablation({"zero": total}, **options), {}, "satformer (seed 0)", gain)


def test_taking_nothing_but_the_residual_is_said_of_routes_alone() -> None:
    table = mock.ablation({"zero": 0.08}, target="route").assign(flags="static")
    found = words.ablation(table, {}, "delta")
    assert found[0].startswith("delta: taking nothing but the residual stream raises")
    assert "weight of V_1" not in said(found)


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
    assert "One layer at a time, zero: it costs in 5 of 7 layers (layers 3 to 7)" in text
    assert "in layer 7, 95 % interval" in text
    assert "In the other 2 none is established." in text
    table = mock.ablation({"zero": 0.08}).assign(p_adjusted=0.001)
    every = said(words.ablation(table, {}))
    assert "it costs in" in every
    assert "In the other" not in every
    assert "it helps in 5 of 7 layers" in said(ablated(-0.08))
    assert "no effect is established in any of 7 layers" in said(ablated(0.0005))


def test_what_counts_as_noise_can_be_given() -> None:
    table = mock.ablation({"zero": 0.03}, half=0.001)
    assert "two trainings differ" not in words.ablation(table, {})[0]
    coarse = words.ablation(table, {}, "satformer", gained(-0.04), 0.05)
    assert "less than the 0.05 by which two trainings differ" in coarse[0]
    assert "no gain beyond the noise floor" in coarse[-1]


def test_damage_stands_beside_the_gain_over_the_trained_baseline() -> None:
    assert "0.050 nats/token below the trained transformer" in said(ablated(0.08))
    assert "1.6 times that gain" in said(ablated(0.08))
    assert ablated(0.08)[-1].kind == "found"
    assert "was measured on" not in said(ablated(0.08))
    unsure = ablated(0.08, gained(-0.05, established=False, n_tokens=100_000))[-1]
    assert unsure.kind == "open"
    assert "Over the seeds that gain is not established." in unsure
    assert "on 73,000 tokens, the difference between the arms on 100,000" in unsure
    no_gain = ablated(1.14, gained(0.002))
    assert no_gain[-1].kind == "open"
    assert "shows reliance, not usefulness" in no_gain[-1]
    assert "no trained baseline was compared" in said(ablated(0.08, None))


def test_the_gain_is_established_only_if_its_contrast_is() -> None:
    def gain(*seeds: float) -> words.Gain | None:
        return words.difference_of(mock.comparison({PAIR: seeds}), "satformer", 0)

    two, six = gain(-0.047, -0.045), gain(-0.05, -0.04, -0.06, -0.05, -0.045, -0.055)
    assert two == words.Gain("transformer", -0.047, False, 73_000)
    assert six is not None
    assert six.established


def test_small_effects_of_single_layers_are_read_against_the_noise_floor() -> None:
    (layers,) = [f for f in ablated(0.08) if f.startswith("One layer")]
    assert "two trainings differ" not in layers
    (heads,) = [f for f in ablated(0.08) if f.startswith("One head")]
    assert "(less than the 0.01 by which two trainings differ for no reason)" in heads


def test_the_output_read_is_no_layer_and_its_place_is_named() -> None:
    table = mock.ablation({"tie_v": 0.08}, n_layers=4, target="route").assign(p_adjusted=0.001)
    table.loc[table["layer"] == 3, ["sublayer", "dnll"]] = ["out", 0.08]
    text = said(words.ablation(table, {}))
    assert "One layer or the output read at a time, values read by the route of queries" in text
    assert "in the output read, 95 % interval" in text
    assert "tie_v" not in text
    table = table.assign(dnll=0.02)
    assert "3 of 3 reads by layer (layers 1 and 2 and the output read)" in said(
        words.ablation(table, {})
    )


def test_static_weights_are_not_called_gates() -> None:
    table = mock.ablation({"zero": 0.08}).assign(flags="static")
    assert "setting the weight of V_1 to zero raises" in words.ablation(table, {})[0]
    assert "every gate" not in said(words.ablation(table, {}))


# -- gates, routes ---------------------------------------------------------------------------------


def test_zeros_are_read_against_the_untrained_model() -> None:
    table = mock.gates()

    def zeros(zero: float, init: float = 0.5) -> Finding:
        return words.sparsity(table, mock.gate_summary(table, zero, init))[0]

    assert "56.0 % of cases, 95 % interval 55.0 to 57.0 %" in zeros(0.56)
    assert "sparser than the untrained model (50.0 %)" in zeros(0.56)
    assert "less sparse than the untrained model (50.0 %)" in zeros(0.44)
    assert "by +6.0 points, 95 % interval [+5.0, +7.0] points" in zeros(0.56)
    assert zeros(0.505).kind == "open"
    assert "training is not shown to have changed it" in zeros(0.505)


def test_the_change_of_zeros_has_its_own_paired_interval() -> None:
    """Wide intervals of both fractions do not hide a change that every document shows."""
    table = mock.gates()
    summary = mock.gate_summary(table, 0.52, 0.5)
    summary["gates"]["overall"]["zero_fraction"] = mock.cell(0.52, 0.2)
    summary["gates"]["zero_fraction_change"] = mock.cell(0.02, 0.001)
    assert "sparser than the untrained model" in words.sparsity(table, summary)[0]
    change = words.sparsity_effects(summary)
    assert change is not None
    assert (change.low, change.high) == pytest.approx((0.019, 0.021))
    del summary["gates"]["zero_fraction_change"]
    assert words.sparsity_effects(summary) is None
    assert "the untrained model was not measured" in words.sparsity(table, summary)[0]


def test_the_embedding_weight_has_its_spread_over_tokens_and_no_verdict() -> None:
    table = mock.routes(mock.route_weights())
    text = said(words.sparsity(table, mock.route_summary()))
    assert "a standard deviation of 0.070 over tokens; its mean over reads" in text
    assert "static" not in text


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


def test_signed_routes_have_no_entropy_and_no_per_cent() -> None:
    weights = mock.signed_route_weights("states")
    found = words.sparsity(mock.signed_routes(weights), mock.signed_route_summary(), "mudd")
    text = said(found)
    assert "the weights of 29 reads are signed. By weight times size of the source" in text
    assert "2.00 effective sources, 95 % interval [1.90, 2.10]; 20.0 % of what" in text
    assert "Mean sum of weights where there is such a source: the embedding" in text
    assert f"the embedding {MINUS}0.30 (95 % interval [{MINUS}0.35, {MINUS}0.25])" in text
    assert "entropy" not in text
    assert "concentrate" not in text
    streams = mock.signed_routes(mock.signed_route_weights("streams"))
    text = said(words.sparsity(streams, mock.signed_route_summary(embedding=False), "hyper"))
    assert "all streams" in text
    assert "embedding" not in text


def test_static_and_empty_signed_routes_are_said_to_be() -> None:
    table = mock.signed_routes(mock.signed_route_weights("states"))
    summary = mock.signed_route_summary()
    summary["routes"]["n_static"] = 29
    text = said(words.sparsity(table, summary, "dense"))
    assert "29 reads are signed, the same for every token" in text
    assert "standard deviation" not in text
    summary["routes"]["overall"]["norm_effective_sources"] = {"estimate": None, "flags": ""}
    (finding,) = [f for f in words.sparsity(table, summary, "dense") if "are signed" in f]
    assert finding.kind == "open"


# -- effective routes ------------------------------------------------------------------------------


def test_reads_are_compared_with_the_untrained_model() -> None:
    table, summary = mock.effective_routes(), mock.effective_summary()
    fewer = words.routes(table, summary, "mudd (seed 0)")[0]
    assert "mudd (seed 0): by the norms of what components bring, a read consists of 5.0" in fewer
    assert "fewer than the untrained model's 8.0" in fewer
    summary["overall_init"]["effective_components"] = 4.0
    assert "more than the untrained model's 4.0" in words.routes(table, summary)[0]
    summary["overall_init"]["effective_components"] = 5.1
    same = words.routes(table, summary)[0]
    assert same.kind == "open"
    assert "no change is established" in same
    del summary["overall_init"]
    assert "the untrained model was not measured" in words.routes(table, summary)[0]


def test_signs_tokens_and_channels_are_told_as_they_are() -> None:
    table = mock.effective_routes()
    text = said(words.routes(table, mock.effective_summary()))
    assert "Components with a negative coefficient are 10.0 % of their size" in text
    assert "add up to every read within 3e-07 of its size" in text
    text = said(words.routes(table, mock.effective_summary(signed=False)))
    assert "no component is subtracted" in text
    text = said(words.routes(table, {**mock.effective_summary(), "static": True}))
    assert "the same for every token" in text
    text = said(words.routes(table, mock.effective_summary(per_channel=True)))
    assert "negative coefficient (its mean over channels)" in text
    assert "Norms act inside the reads" in text


def test_a_model_of_one_layer_has_no_largest_sublayer_to_name() -> None:
    table = mock.effective_routes(1)
    one = table[table["sublayer"] != "out"]
    assert "largest share of one" not in said(words.routes(one, mock.effective_summary()))


def test_the_roles_of_routes_are_compared_by_their_intervals() -> None:
    table = mock.routes(mock.route_weights())

    def roles(qk: float, v: float) -> str:
        level = np.where(table["role"] == "v", v, qk)
        moved = mock.with_ends(table.assign(mass_embedding=level), "mass_embedding", 0.01)
        return said(words.sparsity(moved, mock.route_summary()))

    assert "than the query-key route in 7 and less in 0 of 7 layers" in roles(0.2, 0.5)
    assert "overlap" not in roles(0.2, 0.5)
    assert "than the query-key route in 0 and less in 7 of 7 layers" in roles(0.5, 0.2)
    assert "no difference between the roles is established" in roles(0.3, 0.305)


def test_the_reads_left_over_are_named_only_when_there_are_some() -> None:
    table = mock.routes(mock.route_weights())
    far = table.assign(mass_embedding_low=0.9, mass_embedding_high=1.0, mass_embedding_init=0.1)
    assert "no change is established" not in said(words.sparsity(far, mock.route_summary()))
    one = far.assign(mass_embedding_low=np.where(far["site"] == "out", 0.0, 0.9))
    assert "in 1 no change is established" in said(words.sparsity(one, mock.route_summary()))


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


def test_cells_left_over_are_named_only_when_there_are_some() -> None:
    every = contrasted(np.full(28, 0.2), np.full(28, 0.2))
    assert "in 28 of 28 heads" in every[0]
    assert "in the other" not in every[0]


def test_a_contrast_that_frequency_explains_is_not_claimed() -> None:
    some = np.zeros(28)
    some[:5] = 0.2
    gone, turned = contrasted(some, np.zeros(28)), contrasted(some, -some)
    assert gone[0].kind == "open"
    assert "with frequency and position held fixed 5 no longer show it." in said(gone)
    assert "held fixed 5 have the opposite sign." in said(turned)
    assert {finding.kind for finding in gone[1:]} == {"found"}
    one = np.zeros(28)
    one[0] = 0.2
    assert "1 no longer shows it." in said(contrasted(one, np.zeros(28)))
    assert "1 has the opposite sign." in said(contrasted(one, -one))


def test_reads_of_a_single_source_are_not_counted() -> None:
    cells, some = mock.gate_cells(8, 4), np.full(28, 0.2)
    table = mock.contrasts(cells.assign(kind="route"), some, some)
    table.loc[:1, "flags"] = "single_source"
    assert "in 26 of 26 reads" in said(words.categories(table, {}))
    assert "26 of 26 (26 upwards)" in said(words.categories_across("a", {0: table}))


def test_divergence_is_read_against_the_untrained_routes() -> None:
    table = mock.divergence()
    differ = words.divergence(table, mock.divergence_summary(0.2))
    assert "differ: mean JS divergence 0.200 nats a token" in differ[0]
    same = words.divergence(mock.divergence(level=0.0), mock.divergence_summary(0.0, 0.001))
    assert same[0].kind == "open"
    assert "are not told apart" in same[0]


def test_divergences_of_several_roles_and_of_components_name_what_they_compare() -> None:
    table = mock.divergence()
    pairs = [table.assign(role=role) for role in ("q|k", "q|v", "k|v")]
    several = pd.concat(pairs, ignore_index=True).assign(flags="norm_rectified")
    found = words.divergence(several, mock.divergence_summary(), "mudd")
    assert found[0].startswith("mudd: the q, k and v routes of each two differ")
    assert "Signed weights are no distribution" in said(found)
    reads = table.assign(site=[f"L{k}.attn.read" for k in table["layer"]])
    found = words.divergence(reads, mock.divergence_summary(), "attnres")
    assert "reads of one layer and of consecutive layers, by their components, differ" in found[0]
    assert "Signed weights" not in said(found)
    across = words.divergence_across("attnres", {0: (reads, mock.divergence_summary())})
    assert "reads, by their components, differ" in across[0]


def test_a_divergence_is_told_in_its_own_unit_with_its_own_bound() -> None:
    summary = {**mock.divergence_summary(0.2), "unit": "bits", "ceiling": 1.0}
    text = said(words.divergence(mock.divergence(), summary))
    assert "0.200 bits a token" in text
    assert "of at most 1.000 bits" in text
    (across,) = words.divergence_across("rd", {0: (mock.divergence(), summary)})
    assert "seed 0: 0.200 bits" in across
    (caveat, *_) = caveats.divergence([words.bound(summary)])
    assert "at most 1.000 bits" in caveat
    assert "nats" not in text + across + caveat
    assert "of at most 0.693 nats" in said(
        words.divergence(mock.divergence(), mock.divergence_summary())
    )


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
    assert "seed 0: 3 of 28 (2 upwards); seed 1: 0 of 28 (0 upwards)." in finding
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
        (
            (UP, UP),
            "found",
            "Zeroing hurts in both seeds: seed 0: +0.100 [+0.050, +0.150]; seed 1: +0.100",
        ),
        ((DOWN, DOWN), "found", "Zeroing helps in both seeds"),
        ((UP, DOWN), "open", "the seeds contradict each other"),
        ((UP, FLAT), "open", "Zeroing hurts in 1 of 2 seeds; in the others no effect"),
        ((FLAT, FLAT), "open", "no effect is established, every interval covers 0"),
        ((BARE,), "open", "too few documents for an interval: seed 0: +0.100 (no interval) ("),
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


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_a_rounded_share_lies_in_its_rounded_interval(shares: list[float]) -> None:
    low, value, high = (
        float(tenths(share).replace("< 0.1", "0.05").replace("> ", "")) for share in sorted(shares)
    )
    assert low <= value <= high


def test_formats() -> None:
    assert (signed(-0.0456), plain(4.2, 2), signed(math.nan)) == (f"{MINUS}0.046", "4.20", "n/a")
    assert (percent(0.563), percent(0.003), percent(0.0)) == ("56 %", "0.3 %", "0 %")
    assert (percent(0.9999), percent(1e-5), percent(1.0)) == ("> 99.9 %", "< 0.1 %", "100 %")
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert effect({"x": 1.0, "x_low": None}, "x").verdict == "no_interval"


def test_content_dependence_is_said_in_shares():
    summary = mock.route_summary()
    summary["routes"]["overall"]["content_dependence"] = mock.cell(0.12)
    summary["routes"]["weight_variance"] = {"tokens": mock.cell(0.34)}
    table = mock.routes(mock.route_weights())
    (found,) = [s for s in words.sparsity(table, summary) if "decides" in s]
    assert "12.0 %" in found
    assert "34.0 % of the variance" in found
    assert not [s for s in words.sparsity(table, mock.route_summary()) if "decides" in s]


# -- mass and cause, circuits ----------------------------------------------------------------------


def agreement(value: float, half: float) -> dict:
    cell = {"estimate": value, "low": value - half, "high": value + half, "flags": ""}
    keys = ("mass_dnll", "attribution_dnll", "fisher_dnll")
    return {"by_kind": {"gate": {"n_removed": 12, **dict.fromkeys(keys, cell)}}}


@pytest.mark.parametrize(
    ("value", "says", "kind"),
    [
        (0.6, "what carries more weight costs more to remove", "found"),
        (-0.6, "what carries more weight costs less to remove", "found"),
        (0.1, "weight is not shown to go with the cost", "open"),
    ],
)
def test_mass_and_cost_follow_their_correlation(value, says, kind):
    table = pd.DataFrame({"kind": ["gate"], "flags": [""]})
    first, *_ = words.attribution(table, agreement(value, 0.2))
    assert says in first
    assert first.kind == kind


def test_units_that_disagree_are_named():
    table = pd.DataFrame(
        {
            "kind": "gate",
            "site": ["L1.attn.v", "L2.attn.v"],
            "head": [0, 1],
            "source": "V_1",
            "mass": [0.9, 0.1],
            "dnll": [0.0, 0.3],
            "rank_difference": [0.8, -0.2],
            "flags": ["disagrees", ""],
        }
    )
    summary = agreement(0.1, 0.2)
    summary["by_kind"]["gate"]["n_disagree"] = 1
    (said,) = [s for s in words.attribution(table, summary) if "ranks apart" in s]
    assert "L1.attn.v head 0 (weight 0.90, cost +0.000)" in said
    assert "L2" not in said


@pytest.mark.parametrize(("value", "kind"), [(0.1, "found"), (-0.1, "found"), (0.001, "open")])
def test_what_v_1_says_follows_its_sign(value, kind):
    table = mock.circuits(4, 2)
    cell = {"estimate": value, "low": value - 0.02, "high": value + 0.02, "flags": ""}
    share = {"estimate": 0.2, "low": 0.15, "high": 0.25, "flags": ""}
    summary = {"share": share, "logit": {"v_first": cell}, "repetition": {"nll_gate_effect": cell}}
    first, *_, last = words.circuits(table, summary)
    sign = "+" if value > 0 else "\N{MINUS SIGN}"
    assert f"adds {sign}{abs(value):.3f} to its logit" in first
    assert (first.kind, last.kind) == (kind, kind)
