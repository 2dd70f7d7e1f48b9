"""Answers about gated access: how much, where, for which tokens, and whether it matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from satlens.analysis.result import Result
from satlens.report.claims.measures import contrast, plain_arms, seeds_of
from satlens.report.collect import Run
from satlens.report.effects import ALPHA, NATS, Effect, Frame, count, effect, listed, plain
from satlens.report.findings.phrases import (
    Row,
    above_zero,
    across,
    cells,
    change,
    fixed,
    how_many,
    mean,
    number,
    numbers,
    share,
)

Results = Mapping[int, Result]
_DRIVERS = {
    "token": "the token itself",
    "category": "its category",
    "previous_token": "the token before it",
    "position": "its position",
}
_KINDS = {
    "zero": "closing every gate",
    "mean": "giving each head its mean gate",
    "shuffle": "permuting the gates among the tokens of a context",
}
_PARTS = {"tokens": "tokens of a head", "heads": "heads of a layer", "layers": "layers"}


def gates(run: Run) -> list[str]:
    """Every answer about the gated arms of a study, and the static one beside them."""
    said = []
    for arm in plain_arms(run, "satformer"):
        sparsity = run.of("sparsity").get(arm, {})
        said += [_zeros(arm, sparsity), _where(arm, sparsity)]
        said += [_categories(arm, run.of("categories").get(arm, {})), _drivers(run, arm)]
        said += [_cost_of_closing(run, arm), _what_is_carried(arm, run.of("circuits").get(arm, {}))]
    for arm in plain_arms(run, "resformer"):
        said.append(_static(arm, run.of("sparsity").get(arm, {}), run.of("ablation").get(arm, {})))
    said.append(gate_functions(run))
    return [sentence for sentence in said if sentence]


def rows(run: Run) -> list[Row]:
    """The numbers behind the answers."""
    found = []
    for arm in plain_arms(run, "satformer"):
        sparsity = run.of("sparsity").get(arm, {})
        quantities = [
            ("gates at exactly zero", "zero_fraction", share),
            ("mean gate", "mean", number()),
        ]
        for name, stat, write in quantities:
            effects = cells(sparsity, "gates", "overall", stat)
            found.append(Row(run.name, arm, name, effects, write, _untrained(sparsity, stat)))
        for name, label in _PARTS.items():
            spread = cells(sparsity, "gates", "variance_share_intervals", name)
            before = numbers(sparsity, "gates", "variance_shares_init", name)
            found.append(
                Row(run.name, arm, f"variance between {label}", spread, share, before or None)
            )
        ablation = run.of("ablation").get(arm, {})
        for kind, label in _KINDS.items():
            cost = cells(ablation, "overall", f"gate.{kind}")
            name = f"cost of {label}, {NATS}"
            found.append(Row(run.name, arm, name, cost, change(), beside_zero=True))
        pooled = run.of("categories").get(arm, {})
        for name, label in _DRIVERS.items():
            r2 = cells(pooled, "drivers", "pooled", "gate", name)
            name = f"R\N{SUPERSCRIPT TWO} of gates from {label}"
            found.append(Row(run.name, arm, name, r2, fixed(), beside_zero=True))
    return found


def _untrained(results: Results, stat: str) -> dict[int, float] | None:
    return numbers(results, "gates", "overall_init", stat) or None


# -- how much, and where ---------------------------------------------------------------------------


def _zeros(arm: str, results: Results) -> str:
    zero = cells(results, "gates", "overall", "zero_fraction")
    if not zero:
        return ""
    before = numbers(results, "gates", "overall_init", "zero_fraction")
    moved = cells(results, "gates", "zero_fraction_change")
    text = f"**Are gates sparse?** In `{arm}` {across(zero, share)} of all gates are exactly zero"
    if before and moved:
        points = {seed: _hundredths(found) for seed, found in moved.items()}
        text += (
            f"; in the same models untrained {share(mean(before.values()))}. Training moved that "
            f"by {across(points, change(1))} points: {_signs(moved, 'closed', 'opened')}"
        )
    size, start = cells(results, "gates", "overall", "mean"), _untrained(results, "mean")
    if size and start:
        text += (
            f". How far they open is another matter: the mean of all gates, zeros included, went "
            f"from {plain(mean(start.values()))} to {across(size, number())}"
        )
    return f"{text}."


def _signs(found: Mapping[int, Effect], up: str, down: str) -> str:
    """In how many seeds an interval lies on which side of zero."""
    verdicts = [each.verdict for each in found.values()]
    parts = [
        f"{word} {how_many(verdicts.count(verdict), len(verdicts))}"
        for verdict, word in (("positive", f"it {up} gates"), ("negative", f"it {down} gates"))
        if verdicts.count(verdict)
    ]
    return listed(parts) or "no change is established in any seed"


def _hundredths(found: Effect) -> Effect:
    return Effect(value=100 * found.value, low=100 * found.low, high=100 * found.high)


def _where(arm: str, results: Results) -> str:
    """Which layers, dead heads, and how much of the variance is not between tokens."""
    layers, before = (by_layer(results, stat) for stat in ("mean", "mean_init"))
    if not layers:
        return ""
    means = {layer: mean(f.value for f in found.values()) for layer, found in layers.items()}
    ends = min(means, key=lambda k: means[k]), max(means, key=lambda k: means[k])
    low, high = (across(layers[layer], number(2)) for layer in ends)
    text = (
        f"**Where?** The mean gate of a layer goes from {low} in layer {ends[0]} to {high} in "
        f"layer {ends[1]}"
    )
    if before:
        start = [mean(f.value for f in before[layer].values()) for layer in ends]
        text += f" (untrained {plain(start[0], 2)} and {plain(start[1], 2)})"
    dead, heads = numbers(results, "gates", "n_dead"), numbers(results, "gates", "n_heads")
    if dead and not any(dead.values()):
        text += f". No head of {int(next(iter(heads.values())))} is dead in any seed"
    elif dead:
        each = listed([str(int(n)) for n in dead.values()])
        text += f". Of {int(next(iter(heads.values())))} heads {each} are dead, by seed"
    spread = {name: cells(results, "gates", "variance_share_intervals", name) for name in _PARTS}
    parts = [
        f"{across(found, share)} between {_PARTS[name]}{_start(results, name)}"
        for name, found in spread.items()
        if found
    ]
    if parts:
        text += f". The variance of gates lies {listed(parts)}"
    return f"{text}."


def _start(results: Results, part: str) -> str:
    before = numbers(results, "gates", "variance_shares_init", part)
    return f" (untrained {share(mean(before.values()))})" if before else ""


def by_layer(results: Results, stat: str) -> dict[int, dict[int, Effect]]:
    """Layer -> seed -> mean of a statistic over the layer's gated heads."""
    found: dict[int, dict[int, Effect]] = {}
    for seed, result in results.items():
        table: Frame = result.table
        if stat in table:
            of_gates = table[table["kind"] == "gate"]
            for layer, value in of_gates.groupby("layer")[stat].mean().items():
                found.setdefault(int(layer), {})[seed] = Effect(value=float(value))
    return found


# -- which tokens ----------------------------------------------------------------------------------


def _categories(arm: str, results: Results) -> str:
    """Heads that tell semantic from functional tokens."""
    found = [
        _established(part.table)
        for result in results.values()
        for part in result.parts
        if part.name == "categories_contrasts"
    ]
    if not found:
        return ""
    heads, controlled, up, raw = zip(*found, strict=True)
    return (
        f"**For which tokens?** Semantic and functional tokens differ in {_range(raw)} of "
        f"{_range(heads)} heads of `{arm}` by seed (adjusted p < {ALPHA}), and in "
        f"{_range(controlled)} with token frequency and position held fixed; of these "
        f"{_range(up)} open further for semantic tokens, the rest for functional ones. Which way a "
        "head leans is its own affair: heads of other seeds with the same number are other heads."
    )


def _established(table: Frame) -> tuple[int, int, int, int]:
    """Heads; those with a controlled contrast, with a positive one; those with a raw one."""
    table = table[(table["kind"] == "gate") & table["delta_controlled"].notna()]
    held = table["p_controlled_adjusted"].astype(float) < ALPHA
    up = int((held & (table["delta_controlled"] > 0)).sum())
    raw = int((table["p_adjusted"].astype(float) < ALPHA).sum())
    return len(table), int(held.sum()), up, raw


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _drivers(run: Run, arm: str) -> str:
    results = run.of("categories").get(arm, {})
    pooled = {
        label: found
        for name, label in _DRIVERS.items()
        if (found := cells(results, "drivers", "pooled", "gate", name))
    }
    if not pooled:
        return ""
    each = [f"{across(found, fixed())} from {label}" for label, found in pooled.items()]
    return (
        "**What predicts a gate?** The share of its variance over tokens that is predicted, fitted "
        f"on other documents, is {listed(each)}."
    )


# -- does it matter --------------------------------------------------------------------------------


def _cost_of_closing(run: Run, arm: str) -> str:
    """What replacing gates costs, beside what the arm gains over the transformer."""
    results = run.of("ablation").get(arm, {})
    costs = {kind: cells(results, "overall", f"gate.{kind}") for kind in _KINDS}
    parts = [
        f"{_KINDS[kind]} costs {across(found, change())}" for kind, found in costs.items() if found
    ]
    if not parts:
        return ""
    text = f"**Does it matter?** In `{arm}` {listed(parts)} {NATS}; {above_zero(costs.values())}"
    row = contrast(run, arm, plain_arms(run, "transformer"))
    if row is not None and costs["zero"]:
        gain, damage = effect(row, "difference"), mean(f.value for f in costs["zero"].values())
        side = "below" if gain.value < 0 else "above"
        ablated, compared = (count(len(k), "seed") for k in (costs["zero"], seeds_of(row)))
        text += (
            f". Beside the {plain(damage)} of closing them all ({ablated}, on the tokens that "
            f"interventions read), `{arm}` ends {plain(abs(gain.value))} {side} the trained "
            f"transformer ({compared}, on all held-out tokens): damage to a model that was trained "
            "with its gates shows reliance, and is no measure of what they are worth"
        )
    return f"{text}."


def _what_is_carried(arm: str, results: Results) -> str:
    """The V_1 part of what heads say to the logits."""
    logit, size = cells(results, "logit", "v_first"), cells(results, "share")
    if not logit:
        return ""
    return (
        f"**What does V_1 say?** By direct attribution, what heads of `{arm}` take from V_1 adds "
        f"{across(logit, change())} to the logit of the next token; by size it is "
        f"{across(size, share)} of what heads write for it."
    )


def _static(arm: str, sparsity: Results, ablation: Results) -> str:
    """One weight of V_1 a layer: its size and what setting it to zero costs."""
    layers = by_layer(sparsity, "mean")
    if not layers:
        return ""
    before = [f.value for found in by_layer(sparsity, "mean_init").values() for f in found.values()]
    means = {layer: mean(f.value for f in found.values()) for layer, found in layers.items()}
    ends = min(means, key=lambda k: means[k]), max(means, key=lambda k: means[k])
    low, high = (across(layers[layer], number(2)) for layer in ends)
    start = f"start at {plain(mean(before), 2)} on average and " if before else ""
    text = (
        f"**The static rival.** `{arm}` gives V_1 one weight a layer, the same for every token; "
        f"they {start}end between {low} (layer {ends[0]}) and {high} (layer {ends[1]})"
    )
    cost = cells(ablation, "overall", "gate.zero")
    if cost:
        text += f". Setting them all to zero costs {across(cost, change())} {NATS}"
    return f"{text}."


# -- other gates -----------------------------------------------------------------------------------


def gate_functions(run: Run) -> str:
    """Other gate functions in place of ReLU: their loss beside it, and how often each is zero."""
    base = plain_arms(run, "satformer")
    said = []
    for arm in run.arms:
        fields = run.recipe.get("arms", {}).get(arm, {}).get("fields") or {}
        function = (fields.get("value_residual") or {}).get("gate")
        row = contrast(run, arm, base) if function else None
        if row is None:
            continue
        single = seeds_of(row)
        each = listed([change()(value) for value in single.values()])
        zero = cells(run.of("sparsity").get(arm, {}), "gates", "overall", "zero_fraction")
        zeros = f", exactly zero in {across(zero, share)} of cases" if zero else ""
        if zero and not any(each.value for each in zero.values()):
            zeros = ", never exactly zero"
        said.append(f"{function} {each} ({count(len(single), 'seed')}){zeros}")
    if not said:
        return ""
    what = f"held-out loss minus that of ReLU gates, {NATS}"
    return f"**Other gate functions**, {what}: {'; '.join(said)}."
