"""Sentences about arms: their losses and the paired differences between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from satlens.report.effects import (
    NATS,
    NO_SEED,
    NOISE_FLOOR,
    Effect,
    Finding,
    Frame,
    count,
    effect,
    interval,
    listed,
    plain,
    settles,
    signed,
)

T_INTERVAL = "95 % t interval"


class Gain(NamedTuple):
    """What one seed of an arm gains over its trained reference."""

    reference: str
    difference: float
    """Nats a token in this seed; negative is lower than the reference."""
    established: bool
    """Over the seeds, not in this one alone."""
    n_tokens: int
    """That the difference was measured on."""


def evaluation(losses: Mapping[str, Mapping[int, float]]) -> list[Finding]:
    """Order of the arms by mean held-out NLL; ``losses`` is arm -> seed -> nats a token."""
    means = {arm: float(np.mean(list(seeds.values()))) for arm, seeds in losses.items() if seeds}
    if not means:
        return []
    ordered = sorted(means, key=lambda arm: means[arm])
    each = listed([f"{arm} {plain(means[arm])}" for arm in ordered])
    n_seeds = sorted({len(seeds) for seeds in losses.values() if seeds})
    if len(means) == 1 and NO_SEED in losses[ordered[0]]:
        return [Finding(f"Held-out NLL of {each} {NATS}.")]
    over = f"means of {n_seeds[0]} seeds" if len(n_seeds) == 1 else "means of their seeds"
    if n_seeds == [1]:
        unseeded = any(NO_SEED in seeds for seeds in losses.values())
        over = "one checkpoint each" if unseeded else "one seed"
    return [
        Finding(
            f"Held-out NLL in {NATS} from lowest to highest ({over}): {each}. An order says "
            "nothing "
            "about how sure it is: see the paired differences."
        )
    ]


def comparison(table: Frame, summary: Mapping[str, Any]) -> list[Finding]:
    """One finding for each contrast of two arms over paired seeds."""
    floor = float(summary.get("noise_floor") or NOISE_FLOOR)
    return [_contrast(row, floor) for _, row in table.iterrows()]


def difference_of(table: Frame, arm: str, seed: int, floor: float = NOISE_FLOOR) -> Gain | None:
    """Reference and loss difference of an arm in one seed, from its first contrast with another."""
    for _, row in table.iterrows():
        value = row.get(f"seed_{seed}")
        if row["first"] == arm and value is not None and pd.notna(value):
            settled = _contrast(row, floor).kind == "found"
            return Gain(str(row["second"]), float(value), settled, int(row["n_tokens"]))
    return None


def _contrast(row: Frame, floor: float) -> Finding:
    names = f"{row['first']} against {row['second']}"
    seeds = _seed_differences(row)
    found = effect(row, "difference", covers="other seeds")
    if found.verdict == "undefined":
        return Finding(f"{names}: no difference is defined.", "open")
    signs = {math.copysign(1, value) for value in seeds if value != 0}
    below = abs(found.value) < floor
    if len(signs) > 1:
        text = (
            f"{names}: the seeds disagree in sign ({_each(seeds)} {NATS}, mean "
            f"{signed(found.value)}, {interval(found, name=T_INTERVAL)}), so no difference is "
            "established."
        )
    elif found.verdict == "null":
        text = (
            f"{names}: no difference is established. The mean of {count(len(seeds), 'paired seed')}"
            f" is {signed(found.value)} {NATS} ({_each(seeds)}) and its "
            f"{interval(found, name=T_INTERVAL)} covers 0."
        )
    else:
        text = _direction(row, found, seeds)
    sentences = [text, _below_floor(found, floor) if below else "", _documents(row)]
    settled = found.verdict != "null" and len(signs) == 1 and not below
    sentences += [_bootstrap(row), _attainable(row, len(seeds), settled)]
    kind = "open"
    if settled:
        kind = "found" if found.has_interval and settles(len(seeds)) else "direction"
    return Finding(" ".join(s for s in sentences if s), kind)


def _direction(row: Frame, found: Effect, seeds: Sequence[float]) -> str:
    side, which = ("below", "better") if found.value < 0 else ("above", "worse")
    ends = f"{row['first']} ends {plain(abs(found.value))} {NATS} {side} {row['second']} ({which})"
    if len(seeds) < 2:
        return f"{ends} in the one seed that both have; one seed has no interval."
    return (
        f"{ends}: mean of {len(seeds)} paired seeds ({_each(seeds)}), "
        f"{interval(found, name=T_INTERVAL)} over other seeds."
    )


def _below_floor(found: Effect, floor: float) -> str:
    return (
        f"{plain(abs(found.value))} is below the noise floor of single runs at this scale (about "
        f"{plain(floor, 2)} {NATS}) and means nothing by itself."
    )


def _seed_differences(row: Frame) -> list[float]:
    names = [name for name in row.index if str(name).startswith("seed_")]
    return [float(row[name]) for name in names if pd.notna(row[name])]


def _each(seeds: Sequence[float]) -> str:
    return listed([signed(value) for value in seeds])


def _documents(row: Frame) -> str:
    """What the same checkpoints would do on other documents, which is another question."""
    found = effect(row, "difference_documents")
    if not found.has_interval:
        return ""
    value = f"{signed(found.value)} {NATS}"
    return f"For these very checkpoints on other documents it is {value}, {interval(found)}."


def _bootstrap(row: Frame) -> str:
    """The other intervals over seeds, which five seeds and more have."""
    found = effect(row, "difference_percentile")
    both = effect(row, "difference_hierarchical")
    over = f"Percentile bootstrap over seeds: {interval(found)}" if found.has_interval else ""
    if both.has_interval:
        other = f"over other seeds and other documents at once: {interval(both)}"
        over = f"{over}; {other}" if over else other.capitalize()
    return f"{over}." if over else ""


def _attainable(row: Frame, n_seeds: int, settled: bool) -> str:
    """What a sign test over this few seeds can and cannot say."""
    smallest, p = 2.0 ** (1 - n_seeds), float(row.get("sign_p", math.nan))
    if not settles(n_seeds):
        so = "this is a direction, not a result" if settled else "none could have settled it"
        return (
            f"With {count(n_seeds, 'seed')} the smallest p that a sign test can reach is "
            f"{smallest:.2g}, so {so}."
        )
    return f"Sign test over {n_seeds} seeds: p = {p:.2g}." if math.isfinite(p) else ""
