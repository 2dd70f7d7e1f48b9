"""The section about losses: training curves, paired differences, every checkpoint's loss."""

from __future__ import annotations

import pandas as pd

from satlens.analysis.result import Result
from satlens.analysis.stats import FEW_UNITS
from satlens.report import caveats, words
from satlens.report.collect import Run
from satlens.report.effects import NO_SEED, NOISE_FLOOR, effect_of, heading
from satlens.report.page.layout import Part, Section
from satlens.report.page.tables import Table, table
from satlens.report.sections.parts import figure_of, table_of


def noise_floor(run: Run) -> float:
    """Nats a token by which two trainings differ for no reason, as the comparisons have it."""
    compared = [each.study.get("comparison") for each in (run, *run.runs.values())]
    stated = [float(r.summary.get("noise_floor") or 0) for r in compared if r is not None]
    return max(stated, default=0.0) or NOISE_FLOOR


def comparison_of(run: Run, arm: str) -> tuple[Result | None, str]:
    """The paired comparison that an arm took part in, and what it is called there."""
    own, name = run.origin(arm)
    return own.study.get("comparison"), name


def arms_section(run: Run) -> Section | None:
    """Losses: training curves, paired differences, held-out loss of every checkpoint."""
    evaluated = run.of("evaluation")
    studies = {label: each for label, each in (run.runs or {"": run}).items() if each.study}
    if not evaluated and not studies:
        return None
    section = Section("arms", "Which architecture ends with the lower loss?")
    if studies:
        section.caveats = caveats.arms(noise_floor(run))
    else:
        section.title = "How well is held-out text predicted?"
    for label, each in studies.items():
        section.parts.append(_trained(run, each, section, label))
    n_clusters = _few_clusters(evaluated)
    if n_clusters is not None:
        section.caveats.append(caveats.few_clusters(n_clusters, FEW_UNITS))
    if evaluated:
        section.parts += _held_out(run, evaluated)
    return section


def _trained(page: Run, run: Run, section: Section, label: str) -> Part:
    """Paired differences between the arms of one study, and their course in training."""
    part, folder = Part(label), run.root if run.is_plain else run.root / "results"
    prefix = f"{label}-" if label else ""
    if "comparison" in run.study:
        result = run.study["comparison"]
        part.findings = words.comparison(result.table, result.summary)
        section.headlines += [] if label else part.findings
        part.figures.append(figure_of(page, result, folder, "Paired differences between arms"))
        part.tables.append(table_of(page, result, folder, "Paired differences", prefix))
        part.tables += [
            table_of(page, each, folder, each.name.replace("_", " "), prefix)
            for each in result.parts
        ]
    if "curves" in run.study and len(run.study["curves"].table):
        result = run.study["curves"]
        part.figures.append(figure_of(page, result, folder, "Validation loss in training"))
        part.tables.append(table_of(page, result, folder, "Losses in training", prefix))
    if "bench" in run.study:
        title = "Speed and memory"
        part.tables.append(table_of(page, run.study["bench"], folder, title, prefix))
    return part


def _held_out(run: Run, evaluated: dict[str, dict[int, Result]]) -> list[Part]:
    """Loss of every checkpoint, then of every document."""
    losses = {
        arm: {seed: effect_of(result.summary.get("nll")).value for seed, result in seeds.items()}
        for arm, seeds in evaluated.items()
    }
    documents = [
        table_of(
            run,
            result,
            run.folder(arm, seed),
            f"evaluation of {heading(arm, seed)}",
            f"{heading(arm, seed)}-",
        )
        for arm, seeds in evaluated.items()
        for seed, result in seeds.items()
    ]
    return [
        Part(findings=words.evaluation(losses), tables=[_losses(evaluated)]),
        Part("Loss of every document", folded=True, tables=documents),
    ]


def _losses(evaluated: dict[str, dict[int, Result]]) -> Table:
    """Held-out loss of every checkpoint, with intervals over documents and over clusters."""
    rows = []
    for arm, seeds in evaluated.items():
        for seed, result in seeds.items():
            summary = result.summary
            nll, clusters = (effect_of(summary.get(key)) for key in ("nll", "nll_over_clusters"))
            perplexity = summary.get("perplexity") or {}
            rows.append(
                {
                    "arm": arm,
                    "seed": pd.NA if seed == NO_SEED else seed,
                    "nll": nll.value,
                    "nll_low": nll.low,
                    "nll_high": nll.high,
                    "clusters_low": clusters.low,
                    "clusters_high": clusters.high,
                    "perplexity": perplexity.get("estimate"),
                    "bits_per_byte": (summary.get("bits_per_byte") or {}).get("estimate"),
                    "documents": summary.get("n_documents"),
                    "clusters": summary.get("n_clusters"),
                    "flags": _flags(nll=nll.flags, clusters=clusters.flags),
                }
            )
    title = "Held-out loss of every checkpoint, nats/token"
    frame = pd.DataFrame(rows).astype({"seed": "Int64"})
    return table(frame, title, "losses", opened=True)


def _flags(**flags: str) -> str:
    return "; ".join(f"{name}: {text}" for name, text in flags.items() if text)


def _few_clusters(evaluated: dict[str, dict[int, Result]]) -> int | None:
    """The smallest number of clusters if it is below what a bootstrap should have."""
    found = [r.summary.get("n_clusters") for seeds in evaluated.values() for r in seeds.values()]
    few = [int(n) for n in found if n is not None and n < FEW_UNITS]
    return min(few, default=None)
