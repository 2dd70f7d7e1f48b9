"""Runs against the first of them: paired differences of losses and of task scores.

A difference is paired only where both sides scored the same tokens or were asked the same
questions in the same words; otherwise the page says what stands in the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from satlens.analysis.result import Result
from satlens.analysis.stats import Interval, group_of, mean_interval, pool_clusters
from satlens.report.collect import Run
from satlens.report.effects import (
    ALPHA,
    NATS,
    Effect,
    Finding,
    Frame,
    count,
    effect,
    interval,
    listed,
    plain,
    signed,
    who,
)
from satlens.report.page.layout import Part, Section
from satlens.report.page.tables import result_table
from satlens.report.sections.paired_tasks import paired_tasks

LOSSES = "loss_differences"
MISSING = "missing"
TASKS = "task_differences"
SEVERAL = (
    "Differences are between these checkpoints: intervals speak about other documents or passages, "
    "not about other seeds or trainings."
)


class Pair(NamedTuple):
    """Results of one analysis for a checkpoint of a later run and for one of the first."""

    model: str
    baseline: str
    result: Result
    reference: Result


def differences_section(run: Run) -> Section | None:
    """What later runs of a comparison do otherwise than the first; None for a single run."""
    if not run.runs:
        return None
    section = Section("differences", f"What differs from {next(iter(run.runs))}?")
    section.caveats = [Finding(SEVERAL, "caveat")]
    measured = {name for _, _, name in run.results}
    parts = {"evaluation": _losses, "tasks": _tasks}
    if not measured & parts.keys():
        text = "No run has losses of documents or answers to tasks, which a difference would need."
        section.parts.append(Part(findings=[Finding(text, MISSING)]))
    for part in (make(run) for name, make in parts.items() if name in measured):
        section.headlines += [each for each in part.findings if each.kind != MISSING]
        section.parts.append(part)
    return section


def pairs(run: Run, kind: str) -> tuple[list[Pair], list[str]]:
    """Checkpoints with a result of a kind beside their counterpart in the first run.

    The counterpart has the same arm and seed, or is the only checkpoint there. Returns the pairs
    and the checkpoints that have none.
    """
    first = next(iter(run.runs.values()))
    found = [(*run.origin(arm), arm, seed) for arm, seed, name in run.results if name == kind]
    base = {(name, seed): arm for own, name, arm, seed in found if own is first}
    paired, alone = [], []
    for own, name, arm, seed in found:
        if own is first:
            continue
        partner = (name, seed)
        if partner not in base and len(base) == 1:
            partner = next(iter(base))
        if partner not in base:
            alone.append(who(arm, seed))
            continue
        other, other_seed = base[partner], partner[1]
        names = who(arm, seed), who(other, other_seed)
        results = run.results[arm, seed, kind], run.results[other, other_seed, kind]
        paired.append(Pair(*names, *results))
    return paired, alone


def _missing(alone: list[str], what: str, run: Run) -> list[Finding]:
    if not alone:
        return []
    first = next(iter(run.runs))
    text = f"{first} has no {what} to set beside that of {listed(alone)}."
    return [Finding(text, MISSING)]


# -- losses ----------------------------------------------------------------------------------------


def _losses(run: Run) -> Part:
    paired, alone = pairs(run, "evaluation")
    part, rows = Part("Held-out loss"), []
    for pair in paired:
        reason = _other_tokens(pair)
        if reason:
            text = f"{pair.model} against {pair.baseline}: not paired, {reason}."
            part.findings.append(Finding(text, MISSING))
        else:
            rows.append(_loss_row(pair))
    table = pd.DataFrame(rows)
    part.findings = [_loss_sentence(row) for _, row in table.iterrows()] + part.findings
    part.findings += _missing(alone, "loss of documents", run)
    if rows:
        title = f"Paired differences in held-out loss, {NATS}"
        part.tables.append(result_table(Result(LOSSES, table), title, opened=True))
    return part


def _other_tokens(pair: Pair) -> str:
    """Why the losses of two evaluations are not of the same tokens; empty where they are."""
    mine, theirs = (each.provenance for each in (pair.result, pair.reference))
    if mine.get("tokenizer") != theirs.get("tokenizer"):
        return (
            "they have different tokenizers, and a loss a token is then of different tokens (bits "
            "per byte, where measured, are in the table of losses)"
        )
    named = [list(each.table["document"]) for each in (pair.result, pair.reference)]
    if named[0] != named[1]:
        return f"they scored different documents ({len(named[0])} and {len(named[1])})"
    if not pair.result.table["n_tokens"].equals(pair.reference.table["n_tokens"]):
        return "they scored different tokens of the documents"
    data = [(each.get("data") or {}).get("sha256") for each in (mine, theirs)]
    if data[0] is None or data[0] != data[1]:
        return "their data is not the same (the sha256 in the provenance differ)"
    return ""


def _loss_row(pair: Pair) -> dict[str, object]:
    mine, theirs = pair.result.table, pair.reference.table
    n = mine["n_tokens"].to_numpy(float)
    losses = [np.nan_to_num(each["nll"].to_numpy(float)) * n for each in (mine, theirs)]
    change = losses[0] - losses[1]
    groups = group_of(np.arange(len(n)), len(n))
    found = mean_interval(np.bincount(groups, change), np.bincount(groups, n))
    row = {"model": pair.model, "baseline": pair.baseline, **_columns("delta", found)}
    clusters = list(mine["cluster"])
    if all(clusters):
        row |= _columns("delta_clusters", mean_interval(*pool_clusters(clusters, change, n)))
    flags = [str(found.flags[()])]
    contexts = [(r.provenance["data"]).get("context") for r in (pair.result, pair.reference)]
    if contexts[0] != contexts[1]:
        flags.append(f"contexts:{contexts[0]},{contexts[1]}")
    return {
        **row,
        "nll_model": losses[0].sum() / n.sum(),
        "nll_baseline": losses[1].sum() / n.sum(),
        "n_documents": int((n > 0).sum()),
        "n_tokens": int(n.sum()),
        "flags": ";".join(filter(None, flags)),
    }


def _columns(name: str, found: Interval) -> dict[str, float]:
    ends = {"": found.estimate, "_low": found.low, "_high": found.high}
    return {name + end: float(value) for end, value in ends.items()}


def _loss_sentence(row: Frame) -> Finding:
    found: Effect = effect(row, "delta", "these checkpoints, other documents")
    names = f"{row['model']} against {row['baseline']}"
    where = f"on the same {count(int(row['n_documents']), 'document')}"
    size = f"{signed(found.value)} {NATS}, {interval(found)}"
    if found.verdict in ("positive", "negative"):
        does = "higher (worse)" if found.verdict == "positive" else "lower (better)"
        ends = f"{plain(float(row['nll_model']))} and {plain(float(row['nll_baseline']))}"
        text = f"{names}: the held-out loss is {does} {where}: {size} ({ends})."
    else:
        text = f"{names}: no difference in held-out loss is established {where}: {size}."
    if "contexts:" in str(row["flags"]):
        mine, theirs = str(row["flags"]).rpartition("contexts:")[2].split(",")
        text += f" The first reads contexts of {mine} tokens, the second of {theirs}."
    return Finding(text, "found" if found.verdict in ("positive", "negative") else "open")


# -- tasks -----------------------------------------------------------------------------------------


def _tasks(run: Run) -> Part:
    paired, alone = pairs(run, "tasks")
    part, tables = Part("Tasks"), []
    for pair in paired:
        table, reasons = paired_tasks(pair.model, pair.baseline, pair.result, pair.reference)
        if len(table):
            tables.append(table)
        part.findings += [
            Finding(
                f"{pair.model} against {pair.baseline}, {task}: not paired, {reason}.", "missing"
            )
            for task, reason in reasons.items()
        ]
    if tables:
        whole = Result(TASKS, pd.concat(tables, ignore_index=True))
        part.findings = [*_task_sentences(whole.table), *part.findings]
        title = "Paired differences in task scores"
        part.tables.append(result_table(whole, title, "runs-", opened=True))
    part.findings += _missing(alone, "answers to tasks", run)
    return part


def _task_sentences(table: Frame) -> Iterator[Finding]:
    """One for every pair: where it is higher, where lower, where nothing is established."""
    for (model, baseline), rows in table.groupby(["model", "baseline"], sort=False):
        sides: dict[str, list[str]] = {"higher": [], "lower": [], "open": []}
        for _, row in rows.iterrows():
            found = effect(row, "delta")
            settled = found.verdict in ("positive", "negative") and row["p_adjusted"] < ALPHA
            side = "open" if not settled else "higher" if found.value > 0 else "lower"
            name = f"{row['task']} by {row['metric']}"
            sides[side].append(f"{name} ({signed(found.value)}, {interval(found)})")
        said = [f"{side} in {listed(sides[side])}" for side in ("higher", "lower") if sides[side]]
        text = f"{model} against {baseline}: " + ("; ".join(said) or "no difference is established")
        if said and sides["open"]:
            text += "; no difference is established in the other tasks"
        if not said:
            text += f" in {listed(sides['open'])}"
        yield Finding(f"{text}.", "found" if said else "open")
