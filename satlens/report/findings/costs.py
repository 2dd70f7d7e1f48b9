"""What architectures cost, and whether the weight of a source tells what it is worth."""

from __future__ import annotations

from collections.abc import Iterator

from satlens.analysis.result import Result
from satlens.report import words
from satlens.report.claims.measures import noise
from satlens.report.collect import Run
from satlens.report.effects import NATS, Frame, effect, listed, plain, signed
from satlens.report.findings.phrases import (
    Row,
    across,
    cells,
    fixed,
    how_many,
    numbers,
    table,
)


def cost_table(run: Run) -> str:
    """Speed and memory of every architecture over its reference; empty without a timing."""
    timed = run.study.get("bench")
    if timed is None:
        return ""
    frame: Frame = timed.table
    rows = []
    for _, row in frame.iterrows():
        speed = effect(row, "speed_ratio")
        rows.append(
            [
                f"{row['variant']} / {row['reference']}",
                f"{plain(speed.value)} [{plain(speed.low)}, {plain(speed.high)}]",
                plain(float(row["memory_ratio"])),
            ]
        )
    heads = (
        "architecture / reference",
        "tokens a second of processor time, ratio [quartiles]",
        "activations kept, ratio",
    )
    return table(heads, [row for row in rows if row[0] != "transformer / transformer"])


def costs(run: Run) -> list[str]:
    """What the machine cannot resolve, and what costs the most."""
    timed = run.study.get("bench")
    if timed is None:
        return []
    frame: Frame = timed.table
    low, high = noise(run)
    real = frame[(frame["reference"] == "transformer") & (frame["variant"] != "transformer")]
    real = real[~real["variant"].astype(str).str.endswith("(again)")]
    slow = real.loc[real["speed_ratio"].idxmin()]
    fast = real.loc[real["speed_ratio"].idxmax()]
    return [
        f"In study `{run.name}` the transformer against itself reads {plain(low)} to "
        f"{plain(high)}: differences within that are noise of the machine. Beside the transformer "
        f"{fast['variant']} trains fastest, with {_speed(fast)} of its tokens a second, and "
        f"{slow['variant']} slowest, with {_speed(slow)}."
    ]


def _speed(row: Frame) -> str:
    found = effect(row, "speed_ratio")
    return f"{plain(found.value, 2)} [{plain(found.low, 2)}, {plain(found.high, 2)}]"


def mass_and_cause(run: Run) -> list[str]:
    """Rank correlation of weight and exact cost, and of what one backward pass predicts."""
    said = []
    for arm, kind, results in _removed(run):
        weight = cells(results, "by_kind", kind, "mass_dnll")
        second = cells(results, "by_kind", kind, "fisher_dnll")
        units = next(iter(numbers(results, "by_kind", kind, "n_removed").values()))
        text = (
            f"**`{arm}`**, {int(units)} {_UNITS[kind]}: weight and cost of removal have the "
            f"rank correlation {across(weight, fixed())}"
        )
        if second:
            predicted = across(second, fixed())
            text += f"; a second-order prediction from one backward pass has {predicted}"
        apart = numbers(results, "by_kind", kind, "n_disagree")
        if apart:
            each = listed([str(int(n)) for n in apart.values()])
            text += (
                f". By seed {each} of them are at least half of the ranks apart by weight and by "
                "cost and, by both intervals, on opposite sides of the median unit"
            )
        said.append(f"{text}.")
    return said


def mass_rows(run: Run) -> list[Row]:
    """The rank correlations behind them."""
    names = {
        "mass_dnll": "weight",
        "attribution_dnll": "first-order prediction",
        "fisher_dnll": "second-order prediction",
    }
    return [
        Row(
            run.name,
            arm,
            f"rank correlation of cost and {label}, {kind}s",
            cells(results, "by_kind", kind, stat),
            fixed(),
            beside_zero=True,
        )
        for arm, kind, results in _removed(run)
        for stat, label in names.items()
    ]


def _removed(run: Run) -> Iterator[tuple[str, str, dict[int, Result]]]:
    """Arm, kind of unit and results, where units were removed one at a time."""
    for arm, results in run.of("attribution").items():
        kinds = dict.fromkeys(k for r in results.values() for k in r.summary.get("by_kind", {}))
        for kind in kinds:
            if cells(results, "by_kind", kind, "mass_dnll"):
                yield arm, kind, results


_UNITS = {"gate": "gates", "route": "pairs of a read and a source"}


def nulls(run: Run) -> list[str]:
    """Interventions on a whole model whose effect is not established, and empty layers."""
    said = []
    for arm, results in run.of("ablation").items():
        kinds = dict.fromkeys(
            key for result in results.values() for key in words.ablation_effects(result.table)
        )
        for target, kind in kinds:
            tables = [result.table for result in results.values()]
            found = [words.ablation_effects(table).get((target, kind)) for table in tables]
            measured = [effect for effect in found if effect is not None]
            none = [effect for effect in measured if effect.verdict == "null"]
            if none and any(effect.low < effect.high for effect in none):
                values = listed([signed(effect.value) for effect in none])
                said.append(
                    f"An effect of {words.describe(target, kind)} in {arm}: not established "
                    f"{how_many(len(none), len(measured))} ({values} {NATS})."
                )
    return said
