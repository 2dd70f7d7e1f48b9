"""The section with every token of some documents, coloured by what gates and routes do there."""

from __future__ import annotations

from satlens.analysis.result import Result
from satlens.report import caveats
from satlens.report.collect import Run
from satlens.report.effects import NATS, Finding, count, heading, plain, signed, who
from satlens.report.page.layout import Part, Section
from satlens.report.sections.parts import tables_of
from satlens.report.tokens.fragment import token_fragment

NAME = "token_view"


def token_section(run: Run) -> Section | None:
    """The token view of every checkpoint that has one; None without any."""
    found = run.of(NAME)
    if not found:
        return None
    section = Section("tokens", "What happens at single tokens?", caveats=list(caveats.TOKENS))
    for arm, seeds in found.items():
        for number, (seed, result) in enumerate(seeds.items()):
            part = Part(heading(arm, seed), folded=number > 0)
            if run.is_plain:  # there may be nothing else to say in short
                section.headlines.append(_said(result, who(arm, seed)))
            part.fragments.append(token_fragment(result))
            part.tables += tables_of(run, result, run.folder(arm, seed), heading(arm, seed))
            section.parts.append(part)
    return section


def _said(result: Result, whose: str) -> Finding:
    """How much is shown, and what an intervention does to it on average."""
    summary, n = result.summary, len(result.table)
    documents = len(set(result.table["document"]))
    text = f"{whose}: {count(n, 'token')} of {count(documents, 'document')}"
    loss, changed = summary.get("nll"), summary.get("nll_intervened")
    if loss is not None:
        text += f", mean loss {plain(float(loss))} {NATS}"
    if loss is not None and changed is not None:
        text += (
            f"; under {summary.get('intervention')} {plain(float(changed))} "
            f"({signed(float(changed) - float(loss))})"
        )
    return Finding(f"{text}.")
