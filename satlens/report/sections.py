"""The sections of the page, one a question: findings, caveats, figures and tables of each."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from satlens.analysis.result import Result
from satlens.analysis.stats import FEW_UNITS
from satlens.plotting import figure_for
from satlens.report import caveats, words
from satlens.report.claims import sentences as claim_sentences
from satlens.report.collect import Run
from satlens.report.effects import NOISE_FLOOR, Effect, Finding, Frame, capital, effect_of
from satlens.report.page import Link, Part, Picture, Section, Table, picture, table

Say = Callable[[str, int, Result], list[Finding]]
Headline = Callable[[str, dict[int, Result]], list[Finding]]


def arms_section(run: Run) -> Section | None:
    """Losses: training curves, paired differences, held-out loss of every checkpoint."""
    evaluated, study = run.of("evaluation"), run.study
    if not evaluated and not study:
        return None
    section = Section("arms", "Which architecture ends with the lower loss?")
    section.caveats = caveats.arms(_floor(run))
    part = Part()
    losses = {
        arm: {seed: _nll(result).value for seed, result in seeds.items()}
        for arm, seeds in evaluated.items()
    }
    if "comparison" in study:
        result = study["comparison"]
        found = words.comparison(result.table, result.summary)
        part.findings += found
        section.headlines = found
        part.figures.append(_figure(run, result, "results", "Paired differences between arms"))
        part.tables.append(_table(result, "results", "Paired differences"))
    part.findings += words.evaluation(losses)
    if "curves" in study and len(study["curves"].table):
        part.figures.append(_figure(run, study["curves"], "results", "Validation loss in training"))
    n_clusters = _few_clusters(evaluated)
    if n_clusters is not None:
        section.caveats.append(caveats.few_clusters(n_clusters, FEW_UNITS))
    if evaluated:
        part.tables.append(_losses(evaluated))
    section.parts = [part]
    return section


def claims_section(run: Run, result: Result) -> Section | None:
    """What of the papers' claims this study can confirm, deny or not decide."""
    if not len(result.table):
        return None
    section = Section("claims", "Which claims of the papers hold at this scale?")
    section.caveats = [caveats.CLAIMS]
    part = Part(findings=claim_sentences(result))
    part.tables.append(_table(result, "results", "Claims and verdicts"))
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
    return _by_arm(
        run,
        "sparsity",
        "How much is taken, and from where?",
        notes,
        lambda arm, seed, r: words.sparsity(r.table, r.summary, _who(arm, seed)),
        headline,
    )


def routes_section(run: Run) -> Section | None:
    """Of what reads consist."""

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        return words.routes(result.table, result.summary, _who(arm, seed))

    title = "Of what do reads consist?"
    return _by_arm(run, "routes", title, caveats.EFFECTIVE, say, lambda arm, results: [])


def categories_section(run: Run) -> Section | None:
    """Which tokens."""

    def contrasts(result: Result) -> list[Frame]:
        return [part.table for part in result.parts if part.name == "categories_contrasts"]

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        who, tables = _who(arm, seed), contrasts(result)
        if not tables:
            return [Finding(f"{who}: no contrast of categories was computed.", "missing")]
        said = words.categories(tables[0], result.summary, who)
        return said + words.drivers(result.summary, who)

    def headline(arm: str, results: dict[int, Result]) -> list[Finding]:
        tables = {seed: table for seed, r in results.items() for table in contrasts(r)}
        return words.categories_across(arm, tables)

    title = "For which tokens?"
    return _by_arm(run, "categories", title, caveats.CATEGORIES, say, headline)


def divergence_section(run: Run) -> Section | None:
    """Whether values are read from elsewhere than queries and keys."""

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        return words.divergence(result.table, result.summary, _who(arm, seed))

    def headline(arm: str, results: dict[int, Result]) -> list[Finding]:
        tables = {seed: (result.table, result.summary) for seed, result in results.items()}
        return words.divergence_across(arm, tables)

    title = "Do values come from elsewhere than queries and keys?"
    summaries = [r.summary for results in run.of("divergence").values() for r in results.values()]
    bounds = dict.fromkeys(words.bound(summary) for summary in summaries)
    return _by_arm(run, "divergence", title, caveats.divergence(list(bounds)), say, headline)


def ablation_section(run: Run) -> Section | None:
    """Whether it matters."""
    compared = run.study.get("comparison")

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        gain = (
            None
            if compared is None
            else words.difference_of(compared.table, arm, seed, _floor(run))
        )
        return words.ablation(result.table, result.summary, _who(arm, seed), gain, _floor(run))

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

    return _by_arm(run, "ablation", "Does it matter?", caveats.ABLATION, say, headline)


def attribution_section(run: Run) -> Section | None:
    """Whether the weight that something carries tells what removing it costs."""

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        return words.attribution(result.table, result.summary, _who(arm, seed))

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
    return _by_arm(run, "attribution", title, caveats.ATTRIBUTION, say, headline)


def circuits_section(run: Run) -> Section | None:
    """What the first layer's values carry to the heads that take them."""

    def say(arm: str, seed: int, result: Result) -> list[Finding]:
        return words.circuits(result.table, result.summary, _who(arm, seed))

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
    return _by_arm(run, "circuits", title, caveats.CIRCUITS, say, headline)


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
    return _by_arm(run, name, title, [], lambda arm, seed, result: [], lambda arm, results: [])


def _floor(run: Run) -> float:
    """Nats a token by which two trainings differ for no reason, as the comparison has it."""
    compared = run.study.get("comparison")
    return float((compared and compared.summary.get("noise_floor")) or NOISE_FLOOR)


# -- parts -----------------------------------------------------------------------------------------


def _by_arm(
    run: Run,
    name: str,
    title: str,
    notes: list[Finding],
    say: Say,
    headline: Headline,
) -> Section | None:
    """A section with a part for every arm and seed that has the result."""
    found = run.of(name)
    absent = [m for m in run.missing if m.name == name]
    if not found and not absent:
        return None
    section = Section(name, title, caveats=list(notes))
    for arm, results in found.items():
        across = headline(arm, results)
        section.headlines += across
        nested = len(results) > 1 and bool(across)
        if nested:
            section.parts.append(Part(arm, across))
        for number, (seed, result) in enumerate(results.items()):
            title = f"{arm}, seed {seed}"
            part = _of_seed(run, result, f"results/{arm}-seed{seed}", title, say(arm, seed, result))
            part.folded, part.nested = number > 0, nested
            section.parts.append(part)
    if absent:
        section.parts.append(Part("Not measured", words.missing(absent)))
    return section


def _of_seed(run: Run, result: Result, where: str, title: str, findings: list[Finding]) -> Part:
    """What is said of one checkpoint, its figure, its tables."""
    part = Part(title, findings)
    if len(result.table):
        label = f"{capital(result.name)} of {title}"
        part.figures.append(_figure(run, result, where, label))
    for each in (result, *result.parts):
        part.tables.append(_table(each, where, f"{each.name.replace('_', ' ')} of {title}"))
    return part


def _who(arm: str, seed: int) -> str:
    return f"{arm} (seed {seed})"


def _nll(result: Result) -> Effect:
    return effect_of(result.summary.get("nll"))


def _losses(evaluated: dict[str, dict[int, Result]]) -> Table:
    """Held-out loss of every checkpoint, with intervals over documents and over clusters."""
    rows = []
    for arm, seeds in evaluated.items():
        for seed, result in seeds.items():
            nll, clusters = (
                effect_of(result.summary.get(key)) for key in ("nll", "nll_over_clusters")
            )
            perplexity = result.summary.get("perplexity") or {}
            rows.append(
                {
                    "arm": arm,
                    "seed": seed,
                    "nll": nll.value,
                    "nll_low": nll.low,
                    "nll_high": nll.high,
                    "clusters_low": clusters.low,
                    "clusters_high": clusters.high,
                    "perplexity": perplexity.get("estimate"),
                    "documents": result.summary.get("n_documents"),
                    "clusters": result.summary.get("n_clusters"),
                    "flags": _flags(nll=nll.flags, clusters=clusters.flags),
                }
            )
    return table(pd.DataFrame(rows), "Held-out loss of every checkpoint, nats/token", opened=True)


def _flags(**flags: str) -> str:
    return "; ".join(f"{name}: {text}" for name, text in flags.items() if text)


def _few_clusters(evaluated: dict[str, dict[int, Result]]) -> int | None:
    """The smallest number of clusters if it is below what a bootstrap should have."""
    found = [r.summary.get("n_clusters") for seeds in evaluated.values() for r in seeds.values()]
    few = [int(n) for n in found if n is not None and n < FEW_UNITS]
    return min(few, default=None)


def _figure(run: Run, result: Result, where: str, title: str) -> Picture:
    parts = {part.name: part.table for part in result.parts}
    figure = figure_for(result.name, result.table, result.summary, parts)
    files = [
        (kind.upper(), f"{where}/{result.name}.{kind}")
        for kind in ("png", "pdf")
        if (run.root / where / f"{result.name}.{kind}").exists()
    ]
    caption = f"{title}. {_caption(result)}"
    return picture(figure, title, caption, caption, tuple(files))


def _table(result: Result, where: str, title: str) -> Table:
    files: tuple[Link, ...] = tuple(
        (f"{result.name}.{kind}", f"{where}/{result.name}.{kind}") for kind in ("csv", "json")
    )
    return table(result.table, capital(title), files)


def _caption(result: Result) -> str:
    if result.name == "routes":
        return CAPTIONS["routes_effective"]
    if result.name == "divergence" and result.summary.get("over") == "sublayers":
        return CAPTIONS["divergence_of_reads"]
    if result.name == "ablation" and "out" in set(result.table["sublayer"]):
        return f"{CAPTIONS['ablation']} {CAPTIONS['output']}"
    if result.name != "sparsity":
        return CAPTIONS[result.name]
    kinds = [kind for kind in ("gates", "routes") if kind in result.summary]
    return " ".join(CAPTIONS[kind] for kind in ("untrained", *kinds))


CAPTIONS = {
    "untrained": (
        "Grey dashes and what is marked untrained: the same model before training, on the same "
        "tokens. Vertical lines: 95 % intervals over documents."
    ),
    "gates": "Heads stand side by side within their layer.",
    "routes": (
        "In the maps a row is a read and a cell a source, as wide as the sublayers that it sums; "
        "its number is the weight of the whole source in per cent (of signed weights, in "
        "hundredths; parallel streams have a column each)."
    ),
    "routes_effective": (
        "Rows are reads, columns what they can consist of: the embedding, then the attention and "
        "the MLP of each layer. Left: the mean coefficient of each; right: its share of the sum of "
        "all components' norms, with the sign of its coefficient. Colours are centred at zero."
    ),
    "categories": (
        "Above, the mean by category; below, the difference of two categories at every gate or "
        "read, raw and with token frequency and position held fixed, with 95 % intervals over "
        "documents. Stars: sign-flip p below 0.05 after max-T adjustment over the grid."
    ),
    "divergence": (
        "Jensen-Shannon divergence between two routes of each read, per token and of the mean "
        "routes, with 95 % intervals over documents. A tied control is 0 by construction; reads "
        "of a single source are 0 by definition."
    ),
    "divergence_of_reads": (
        "Jensen-Shannon divergence between two reads by the shares of their components, per token "
        "and of the mean shares, with 95 % intervals over documents; zero shares stand for what "
        "only the later read can contain."
    ),
    "ablation": (
        "Change in held-out loss when gates or routes are replaced, with 95 % intervals over "
        "documents; to the right of 0 is damage. Framed heads: adjusted p below 0.05."
    ),
    "attribution": (
        "Weight carried against the cost of removing it, gates and routes apart, with 95 % "
        "intervals over documents; labelled units are at least half of the ranks apart."
    ),
    "circuits": (
        "Query heads by layer: direct attribution to the next token's logit of what a head takes "
        "from V_1 and of the rest, copying of the V_1 circuit, and pattern scores with gates on "
        "and off."
    ),
    **dict.fromkeys(
        (f"trajectory_{name}" for name in ("sparsity", "routes", "categories", "divergence")),
        "Along training tokens, a line a layer; 0 is the untrained model.",
    ),
    "output": "The last layer number of routes is the output read.",
    "comparison": (
        "First arm minus second; left of 0 the first is better. Circles are single seeds, diamonds "
        "their mean with a 95 % t interval over other seeds, the grey band the noise floor of "
        "single runs."
    ),
    "curves": (
        "Lines are means over seeds, bands run from the lowest to the highest seed. Right: paired "
        "differences, seed by seed."
    ),
}
