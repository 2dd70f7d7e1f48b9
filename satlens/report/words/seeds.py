"""Sentences about several seeds of one arm, and about what is not there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from satlens.report.effects import (
    NO_SEED,
    Effect,
    Finding,
    by_seed,
    capital,
    listed,
    signed,
    who,
)


def across_seeds(
    statement: str, effects: Mapping[int, Effect], *, up: str, down: str, unit: str
) -> list[Finding]:
    """Whether the seeds of an arm tell the same about one effect.

    Args:
        statement: subject of the sentence, such as "Setting every gate of X to zero".
        effects: by seed; the verdict of each comes from its own interval.
        up, down: what a positive and a negative effect do, such as "raises the loss".
    """
    defined = {seed: found for seed, found in effects.items() if found.verdict != "undefined"}
    if not defined:
        return []
    each = "; ".join(
        f"{by_seed(seed)}{signed(found.value)} {_ends(found)}" for seed, found in defined.items()
    )
    where = in_each(defined)
    verdicts = [found.verdict for found in defined.values()]
    n_up, n_down = verdicts.count("positive"), verdicts.count("negative")
    n = len(verdicts)
    if n_up and n_down:
        text = (
            f"{statement}: the seeds contradict each other, it {up} in {n_up} and {down} in "
            f"{n_down} of {n}: {each} ({unit})."
        )
        return [Finding(text, "open")]
    if n_up == n or n_down == n:
        text = f"{statement} {up if n_up else down} {where}: {each} ({unit})."
        return [Finding(text, "found")]
    if n_up or n_down:
        text = (
            f"{statement} {up if n_up else down} in {n_up or n_down} of {n} seeds; in the others "
            "no "
            f"effect is established: {each} ({unit})."
        )
        return [Finding(text, "open")]
    reason = "every interval covers 0"
    if any(verdict == "no_interval" for verdict in verdicts):
        reason = "there are too few documents for an interval"
    text = f"{statement}: no effect is established, {reason}: {each} ({unit})."
    return [Finding(text, "open")]


def in_each(seeds: Collection[int]) -> str:
    """:func:`in_all` of some seeds; in this checkpoint, outside a study."""
    return "in this checkpoint" if NO_SEED in seeds else in_all(len(seeds))


def in_all(n: int) -> str:
    """in the one seed measured; in both seeds; in all 3 seeds."""
    if n == 1:
        return "in the one seed measured"
    return "in both seeds" if n == 2 else f"in all {n} seeds"


def _ends(found: Effect) -> str:
    if not found.has_interval:
        return "(no interval)"
    return f"[{signed(found.low)}, {signed(found.high)}]"


def missing(absent: Sequence[tuple[str, str | None, int | None, str]]) -> list[Finding]:
    """A sentence a reason; ``absent`` has (analysis, arm, seed, reason), arm and seed None for all.

    Results that nobody planned are not missing and are not passed here.
    """
    reasons: dict[str, list[str]] = {}
    for name, arm, seed, reason in absent:
        whose = "" if arm is None else f" of {who(arm, NO_SEED if seed is None else seed)}"
        reasons.setdefault(reason, []).append(name + whose)
    return [
        Finding(f"{capital(reason)}: {listed(names)}. Nothing is said about it here.", "missing")
        for reason, names in reasons.items()
    ]
