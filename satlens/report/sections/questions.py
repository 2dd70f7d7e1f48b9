"""The sections of the page, one a question: findings, caveats, figures and tables of each."""

from __future__ import annotations

from satlens.analysis.result import Result
from satlens.plotting.figures import FIGURES
from satlens.report import caveats, words
from satlens.report.claims.table import sentences as claim_sentences
from satlens.report.collect import Run
from satlens.report.effects import Finding, Frame, effect_of, who
from satlens.report.page.layout import Part, Section
from satlens.report.sections.losses import comparison_of, noise_floor
from satlens.report.sections.parts import by_arm, figure_of, table_of, tables_of


def claims_section(run: Run, result: Result) -> Section | None:
    """What of the papers' claims this study can confirm, deny or not decide."""
    if not len(result.table):
        return None
    section = Section("claims", "Which claims of the papers hold at this scale?")
    section.caveats = [caveats.CLAIMS]
    part = Part(findings=claim_sentences(result))
    part.tables.append(table_of(run, result, run.root / "results", "Claims and verdicts"))
    section.parts = [part]
    return section


def sparsity_section(run: Run) -> Section | None:
    """Gates and routes beside the untrained model."""

    def headline(arm: str, results: dict[int, Result]) -> list[Finding]:
        changes = {seed: words.sparsity_effects(r.summary) for seed, r in results.items()}
        effects = {seed: change for seed, change in changes.items() if change is not None}
        return words.across_seeds(
            f"{arm}: training",
            effects,
            up="makes more gates exactly zero than at initialisation",
            down="makes fewer gates exactly zero than at initialisation",
            unit="change of the zero fraction",
        )

    summaries = [r.summary for results in run.of("sparsity").values() for r in results.values()]
    notes = list(caveats.GATES) if any("gates" in summary for summary in summaries) else []
    if any("routes" in summary for summary in summaries):
        notes += [note for note in caveats.ROUTES if note not in notes]
    if any((summary.get("routes") or {}).get("n_signed") for summary in summaries):
        notes.append(caveats.SIGNED)
    return by_arm(
        run,
        "sparsity",
        "How much is taken, and from where?",
        notes,
        lambda arm, seed, r: words.sparsity(r.table, r.summary, who(arm, seed)),
        headline,
    )


def routes_section(run: Run) -> Section | None:
    """Of what reads consist."""

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        return words.routes(result.table, result.summary, who(arm, seed))

    title = "Of what do reads consist?"
    return by_arm(run, "routes", title, caveats.EFFECTIVE, say, lambda arm, results: [])


def categories_section(run: Run) -> Section | None:
    """Which tokens."""

    def contrasts(result: Result) -> list[Frame]:
        return [part.table for part in result.parts if part.name == "categories_contrasts"]

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        whose, tables = who(arm, seed), contrasts(result)
        if not tables:
            return [Finding(f"{whose}: no contrast of categories was computed.", "missing")]
        said = words.categories(tables[0], result.summary, whose)
        return said + words.drivers(result.summary, whose)

    def headline(arm: str, results: dict[int, Result]) -> list[Finding]:
        tables = {seed: table for seed, r in results.items() for table in contrasts(r)}
        return words.categories_across(arm, tables)

    title = "For which tokens?"
    return by_arm(run, "categories", title, caveats.CATEGORIES, say, headline)


def divergence_section(run: Run) -> Section | None:
    """Whether values are read from elsewhere than queries and keys."""

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        return words.divergence(result.table, result.summary, who(arm, seed))

    def headline(arm: str, results: dict[int, Result]) -> list[Finding]:
        tables = {seed: (result.table, result.summary) for seed, result in results.items()}
        return words.divergence_across(arm, tables)

    title = "Do values come from elsewhere than queries and keys?"
    summaries = [r.summary for results in run.of("divergence").values() for r in results.values()]
    bounds = dict.fromkeys(words.bound(summary) for summary in summaries)
    return by_arm(run, "divergence", title, caveats.divergence(list(bounds)), say, headline)


def ablation_section(run: Run) -> Section | None:
    """Whether it matters."""

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        compared, name = comparison_of(run, arm)
        floor = noise_floor(run)
        gain = None
        if compared is not None:
            gain = words.difference_of(compared.table, name, seed, floor)
        return words.ablation(result.table, result.summary, who(arm, seed), gain, floor)

    def headline(arm: str, results: dict[int, Result]) -> list[Finding]:
        effects = {seed: words.ablation_effects(r.table) for seed, r in results.items()}
        found = []
        static = all(words.is_static(r.table) for r in results.values())
        for key in dict.fromkeys(key for of_seed in effects.values() for key in of_seed):
            seeds = {seed: of_seed[key] for seed, of_seed in effects.items() if key in of_seed}
            if all(effect.value == 0 for effect in seeds.values()):
                continue  # a static weight replaced by its own mean
            statement = f"{arm}: {words.describe(*key, static)}"
            found += words.across_seeds(
                statement, seeds, up=words.UP, down=words.DOWN, unit="nats/token"
            )
        return found

    return by_arm(run, "ablation", "Does it matter?", caveats.ABLATION, say, headline)


def attribution_section(run: Run) -> Section | None:
    """Whether the weight that something carries tells what removing it costs."""

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        return words.attribution(result.table, result.summary, who(arm, seed))

    def headline(arm: str, results: dict[int, Result]) -> list[Finding]:
        found = []
        kinds = dict.fromkeys(k for r in results.values() for k in r.summary.get("by_kind", {}))
        for kind in kinds:
            cells = {seed: r.summary["by_kind"].get(kind, {}) for seed, r in results.items()}
            effects = {s: effect_of(c["mass_dnll"]) for s, c in cells.items() if "mass_dnll" in c}
            found += words.across_seeds(
                f"{arm}: the weight of a {kind}",
                effects,
                up="goes with the cost of removing it",
                down="goes against the cost of removing it",
                unit="rank correlation",
            )
        return found

    title = "Does weight tell what matters?"
    return by_arm(run, "attribution", title, caveats.ATTRIBUTION, say, headline)


def circuits_section(run: Run) -> Section | None:
    """What the first layer's values carry to the heads that take them."""

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        return words.circuits(result.table, result.summary, who(arm, seed))

    def headline(arm: str, results: dict[int, Result]) -> list[Finding]:
        effects = {seed: effect_of(r.summary["logit"]["v_first"]) for seed, r in results.items()}
        return words.across_seeds(
            f"{arm}: what heads take from V_1",
            effects,
            up="speaks directly for the next token",
            down="speaks directly against the next token",
            unit="nats of its logit",
        )

    title = "What do the first layer's values carry?"
    return by_arm(run, "circuits", title, caveats.CIRCUITS, say, headline)


def trajectory_sections(run: Run) -> list[Section]:
    """How access developed in training, a section an analysis that was repeated along it."""
    return [
        section
        for analysis, title in _TRAJECTORIES.items()
        if (section := _trajectory_section(run, f"trajectory_{analysis}", title)) is not None
    ]


_TRAJECTORIES = {
    "sparsity": "How did access develop in training?",
    "routes": "How did effective routes develop in training?",
    "categories": "How did the preference for categories develop in training?",
    "divergence": "How did the roles come apart in training?",
}


def _trajectory_section(run: Run, name: str, title: str) -> Section | None:
    return by_arm(run, name, title, [], lambda arm, seed, result: [], lambda arm, results: [])


def others_section(run: Run) -> Section | None:
    """Results that no other section is about: their notes, figures and tables."""
    if not run.others:
        return None
    section = Section("others", "Further results")
    for name, result in run.others.items():
        part = Part(name, [Finding(note, "caveat") for note in result.notes])
        if result.name in FIGURES and len(result.table):
            part.figures.append(figure_of(run, result, run.root, name))
        part.tables += tables_of(run, result, run.root, name)
        section.parts.append(part)
    return section
