"""The ledger: every claim is in it, published numbers are quoted once, words follow the tables."""

from __future__ import annotations

import re

import pytest

from satlens.analysis.result import Result
from satlens.report.claims import published
from satlens.report.claims.claimed import CLAIMS
from satlens.report.claims.ledger import VERDICTS, counted, ledger, markdown, summary
from satlens.report.collect import collect
from studies import HIGHER, LOWER, ablate, compare, make_study


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "mock")


def rows(root, claim: str):
    table = ledger([collect(root)]).table
    return table[table["claim"].str.contains(claim, regex=False)]


def test_every_claim_has_a_row_a_verdict_and_a_reason(study):
    table = ledger([collect(study)]).table
    assert {claim.text for claim in CLAIMS} == set(table["claim"])
    assert set(table["verdict"]) <= set(VERDICTS)
    assert (table["reason"].str.len() > 0).all()
    measured = table[table["verdict"] != "not run"]
    assert measured["value"].notna().all()
    assert (measured["study"] == "mock").all()
    assert table[table["verdict"] == "not run"]["value"].isna().all()


def test_a_claim_that_no_study_can_speak_about_says_why(study):
    (denseformer,) = rows(study, "static weights over the states")["reason"]
    assert denseformer == "no study has an arm denseformer"
    (suite,) = rows(study, "retrieves better")["reason"]
    assert "no data of these tasks" in suite


def test_two_studies_stand_beside_each_other(study, tmp_path):
    other = make_study(tmp_path / "other", "other")
    compare(other, HIGHER, LOWER)
    table = ledger([collect(study), collect(other)]).table
    both = table[table["claim"].str.contains("gated access to V_1", regex=False)]
    assert list(both["study"]) == ["mock", "other"]
    assert list(both["verdict"]) == ["holds here", "does not hold here"]
    assert (table["claim"].str.contains("retrieves better", regex=False)).sum() == 1
    said = summary(ledger([collect(study), collect(other)]))
    for name, verdict in (("mock", "holds here"), ("other", "does not hold here")):
        (line,) = [each for each in said[verdict] if "gated access to V_1" in each]
        assert f"(study `{name}`)" in line
    alone = summary(ledger([collect(study)]))
    assert "(study" not in " ".join(" ".join(lines) for lines in alone.values())


def test_a_flipped_table_turns_verdicts_and_words(study):
    def said():
        result = ledger([collect(study)])
        return markdown(result), {k: " ".join(v) for k, v in summary(result).items()}

    table, words = said()
    claim = "gated access to V_1 lowers the loss of a Transformer"
    assert claim in words["holds here"]
    assert "gated access ends below static value residuals" in words["does not hold here"]
    compare(study, HIGHER, LOWER)
    flipped_table, flipped = said()
    assert flipped_table != table
    assert claim in flipped["does not hold here"]
    assert "+0.056 nats/token" in flipped["does not hold here"]
    assert "gated access ends below static value residuals" in flipped["holds here"]


def test_the_counts_are_those_of_the_rows(study):
    result = ledger([collect(study)])
    claimed, rows, *verdicts = [int(n) for n in re.findall(r"\d+", counted(result))]
    assert claimed == len({(claim.text, claim.paper) for claim in CLAIMS}) < rows
    assert rows == len(result.table) == sum(verdicts)
    assert verdicts == [int((result.table["verdict"] == v).sum()) for v in VERDICTS]
    once = Result("ledger", result.table.drop_duplicates("claim"))
    assert f"Of {claimed} claims of the papers " in counted(once)


def test_the_short_list_says_what_a_verdict_has_to_be_read_with(study):
    said = " ".join(summary(ledger([collect(study)]))["holds here"])
    assert "training closes gates" in said
    assert "trained 56.0 %, untrained 50.0 %" in said


def test_a_checkpoint_that_disagrees_makes_a_claim_undecided(study):
    (verdict,) = rows(study, "relies on its gates")["verdict"]
    assert verdict == "holds here"
    ablate(study, -0.04, seed=1)
    (row,) = rows(study, "relies on its gates").to_dict("records")
    assert row["verdict"] == "undecided"
    assert "shown by 1 and contradicted by 1 of 2 checkpoints" in row["reason"]


def test_the_markdown_has_as_many_cells_in_every_line_as_heads(study):
    lines = [line for line in markdown(ledger([collect(study)])).splitlines() if line[:1] == "|"]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    table = ledger([collect(study)]).table
    heads = table["source"].nunique()
    assert len(lines) == len(table) + 2 * heads


def test_published_numbers_are_those_of_the_papers():
    """Recomputed from the numbers that the papers print, so that a slip in one form shows."""
    assert published.RD_SPEED.by_scale == pytest.approx({"S": 1 - 0.101, "M": 1 - 0.089})
    for fact in (published.RD_LOSS, published.RD_DIVERGENCE, published.SATFORMER_OVER_HC_SPEED):
        text = fact.text.replace("\N{MINUS SIGN}", "-")
        assert fact.by_scale
        assert all(f"{value:g}" in text for value in fact.by_scale.values())
    papers = [paper for paper in vars(published).values() if isinstance(paper, published.Paper)]
    assert len({paper.arxiv for paper in papers}) == len(papers) == 9
