"""The findings page: written from tables alone, the same again, true when tables change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mock_tables as mock
import pytest

from satlens.cli import main
from satlens.errors import DataError
from satlens.report import words
from satlens.report.findings import LEDGER, findings, write_findings
from satlens.report.findings.shown import escaped
from studies import HIGHER, LOWER, ablate, compare, draw, make_study, save

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "findings.md"
SHIPPED = {path.parent.name for path in (ROOT / "studies").glob("*/plan.json")}


@pytest.fixture
def study(tmp_path):
    root = make_study(tmp_path / "studies" / "mock")
    draw(root, "open_gates_by_depth", "Open gates, of 2 seeds.")
    draw(root, "something_new")
    return root


def written(study: Path) -> str:
    page = study.parents[1] / "docs" / "findings.md"
    write_findings([study], page)
    return page.read_text(encoding="utf-8")


@pytest.mark.skipif(not SHIPPED, reason="no study ships with the source")
def test_the_shipped_page_and_ledger_are_what_the_shipped_tables_give():
    page = PAGE.read_text(encoding="utf-8")
    names = re.findall(r"^satlens reproduce (\S+)$", page, flags=re.M)
    assert set(names) == SHIPPED
    text, table = findings([ROOT / "studies" / name for name in names], PAGE)
    assert text == page
    assert table == PAGE.with_name(LEDGER).read_text(encoding="utf-8")


def test_the_same_tables_give_the_same_bytes(study):
    assert written(study) == written(study)


def test_a_flipped_comparison_changes_the_words(study):
    before = written(study)
    assert "satformer ends 0.056 below transformer" in before
    assert "**Holds here**" in before
    compare(study, HIGHER, LOWER)
    after = written(study)
    assert "satformer ends 0.056 above transformer" in after
    assert "satformer ends 0.056 below transformer" not in after
    start, end = after.index("**Does not hold here**"), after.index("## How to read")
    assert "gated access to V_1 lowers the loss" in after[start:end]


@pytest.mark.parametrize(
    ("seeds", "group", "verdict"),
    [
        (LOWER, "Established beyond", "Holds here"),
        (HIGHER, "Established beyond", "Does not hold here"),
        ((-0.055, -0.022, -0.019, -0.002, -0.037, -0.015), "Established to differ", "Undecided"),
        ((*LOWER[:5], 0.002), "Not established by seeds", "Undecided"),
        ((*HIGHER[:5], -0.002), "Not established by seeds", "Does not hold here"),
        ((-0.004, -0.003, -0.004, -0.003, -0.004, -0.003), "Not established by", "Does not hold"),
        ((0.004, 0.003, 0.004, 0.003, 0.004, 0.003), "Not established by", "Does not hold"),
        ((-0.017, -0.001, -0.013, -0.007, -0.002, -0.011), "Not established by", "Undecided"),
    ],
)
def test_the_summary_and_the_differences_say_the_same(study, seeds, group, verdict):
    compare(study, seeds, HIGHER)
    text = written(study)
    (line,) = [
        line for line in text.splitlines() if re.match(r"\* .*satformer ends .* trans", line)
    ]
    groups = re.split(r"(?<=[a-z]): ", line)
    assert groups[0].startswith(f"* {group}")
    short = text[text.index("## In short") : text.index("## How to read")]
    headed = [part for part in re.split(r"\n\*\*", short) if "gated access to V_1 lowers" in part]
    assert [part.startswith(verdict) for part in headed] == [True]
    (said,) = [line for line in short.splitlines() if "gated access to V_1 lowers" in line]
    assert ("opposite is found" in said) == (seeds is HIGHER)
    assert ("apart from 0" in said) == (group == "Established to differ")


def test_the_seeds_said_are_those_that_were_compared(study):
    plan = json.loads((study / "plan.json").read_text())
    plan["recipe"]["seeds"] = 9
    (study / "plan.json").write_text(json.dumps(plan))
    text = written(study)
    assert "6 seeds: transformer, resformer, satformer and satformer-tanh" in text
    assert "| transformer | 2,132,096 | 6 |" in text


def test_what_was_not_established_is_said(study):
    assert "looked for and not found" not in written(study)
    ablate(study, 0.001, seed=1)
    text = written(study)
    assert (
        "An effect of setting every gate to zero in satformer: not established in 1 of 2 seeds"
        in text
    )
    compare(study, (-0.02, 0.03, -0.03, 0.02, 0.01, -0.02), HIGHER)
    assert "A difference between satformer and transformer" in written(study)


def test_numbers_and_intervals_are_those_of_the_tables(study):
    text = written(study)
    # Gates of the one seed, with their interval over documents, beside the untrained model.
    assert "56.0 % [55.0 %, 57.0 %] (one seed) of all gates are exactly zero" in text
    assert "untrained 50.0 %" in text
    # Three seeds of the divergence: 0.20, 0.21, 0.22 and Student's interval, 0.0248 wide.
    assert "is 0.210 [0.185, 0.235] nats per token" in text
    assert "| rd-attnres / attnres | 0.950 [0.940, 0.960] | 1.070 |" in text
    assert "tanh +0.020 and +0.030 (2 seeds)" in text


def test_a_weight_is_beside_that_of_the_untrained_model(study):
    weights = mock.route_weights(4, decoupled=False)
    table = mock.routes(weights)
    several = table[table["n_sources"] > 1]
    expected = 100 * (several["mass_embedding_init"] * several["n_tokens"]).sum()
    expected /= several["n_tokens"].sum()
    save(study, "attnres-seed0", "sparsity", table, mock.route_summary())
    text = written(study)
    assert "has 40.0 % [39.0 %, 41.0 %] (one seed) of the weight" in text
    assert f"of the weight (untrained {expected:.1f} %)" in text
    (row,) = [line for line in text.splitlines() if "weight of the embedding, reads" in line]
    assert row.endswith(f" | {expected:.1f} % |")


def test_units_that_disagree_are_said_by_the_whole_rule(study):
    summary = mock.attribution_summary()
    save(study, "satformer-seed0", "attribution", mock.attribution(), summary)
    assert "By seed 2 of them are at least half of the ranks apart" in written(study)
    assert "by both intervals, on opposite sides of the median unit" in written(study)


def test_damage_and_gain_say_what_they_were_measured_on(study):
    text = written(study)
    assert "nats/token; by their own intervals over documents 2 of 2 such costs are above 0" in text
    assert "Beside the 0.040 of closing them all (2 seeds, on the tokens that" in text
    assert "ends 0.056 below the trained transformer (6 seeds, on all held-out tokens)" in text


def test_figures_are_linked_from_where_the_page_is(study):
    text = written(study)
    page = study.parents[1] / "docs" / "findings.md"
    links = re.findall(r"\]\((\.\./[^)]+)\)", text)
    assert len(links) == 6
    assert all((page.parent / link).resolve().exists() for link in links)
    assert "*A title (study mock). Open gates, of 2 seeds. Kind of figure: A paper." in text
    gates, more = text.index("open_gates_by_depth.png"), text.index("something_new.png")
    assert text.index("## What is taken") < gates < text.index("## Do values come from")
    assert more > text.index("## Further figures")


def test_anchors_lead_to_headings(study):
    text = written(study)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_no_folder_of_the_machine_is_on_the_page(study):
    text = written(study)
    assert "/somewhere" not in text
    assert str(study.parents[1]) not in text
    assert "made by `satlens reproduce mock --seeds 6`" in text


def test_a_study_without_most_tables_is_written_too(tmp_path):
    root = tmp_path / "bare"
    root.mkdir()
    (root / "plan.json").write_text(json.dumps({"recipe": {"name": "bare"}}))
    text, _ = findings([root], tmp_path / "findings.md")
    assert "were not run" in text
    assert "What is taken from" not in text


def test_what_cannot_be_written_is_refused_in_one_line(study, tmp_path, capsys):
    with pytest.raises(DataError, match="no study was given"):
        findings([], tmp_path / "x.md")
    (study / "figures" / "something_new.json").write_text("[]")
    with pytest.raises(DataError, match=r"something_new\.json: not the sidecar"):
        findings([study], tmp_path / "x.md")
    (tmp_path / "file").write_text("")
    (study / "figures" / "something_new.json").unlink()
    with pytest.raises(DataError, match="cannot be written"):
        write_findings([study], tmp_path / "file" / "findings.md")


def rename(study: Path, **texts: str) -> None:
    plan = json.loads((study / "plan.json").read_text())
    plan["recipe"] |= texts
    (study / "plan.json").write_text(json.dumps(plan))


def test_texts_of_a_plan_cannot_act_as_markdown(study):
    rename(study, name="a`b|c<i>", title="A\n\n## injected <script>x</script> *y* [z](u)")
    text = written(study)
    assert not re.search(r"^## injected", text, flags=re.M)
    assert "<script>" not in text and "a`b" not in text and "*y*" not in text
    assert "### A ## injected &#60;script&#62;" in text
    rows = [line for line in text.splitlines() if line.startswith("| a&#96;b&#124;c")]
    assert rows and "|c" not in "".join(rows)
    assert escaped("my_arm _x_") == "my_arm &#95;x&#95;"


def test_studies_with_the_same_arms_are_told_apart(study, tmp_path):
    other = make_study(tmp_path / "runs" / "other", "other")
    text, _ = findings([study, other], tmp_path / "x.md")
    leads = [line for line in text.splitlines() if "**Are gates sparse?**" in line]
    assert [line.split(":")[0] for line in leads] == ["Study `mock`", "Study `other`"]
    claim = "gated access to V_1 lowers the loss of a Transformer"
    said = [line for line in text.splitlines() if line.startswith("* ") and claim in line]
    assert [name for name in ("mock", "other") for line in said if f"(study `{name}`)" in line] == [
        "mock",
        "other",
    ]
    assert "Study `mock`" not in written(study) and "(study `mock`)" not in written(study)


def test_studies_of_one_name_are_called_by_their_folders_and_none_is_taken_twice(study, tmp_path):
    other = make_study(tmp_path / "runs" / "mock")
    text, _ = findings([study, other], tmp_path / "x.md")
    assert "Study `mock in studies/mock`" in text and "Study `mock in runs/mock`" in text
    with pytest.raises(DataError, match="was given twice"):
        findings([study, study / ".." / "mock"], tmp_path / "x.md")


def test_a_damaged_table_is_refused_by_name(study, tmp_path):
    (study / "results" / "comparison.csv").write_text("x")
    with pytest.raises(DataError, match=r"comparison is not readable \(.*comparison.*\)"):
        findings([study], tmp_path / "x.md")


def test_nothing_is_left_where_the_page_cannot_go(study, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        write_findings([study], tmp_path / "folder")
    (tmp_path / LEDGER).mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        write_findings([study], tmp_path / "findings.md")
    assert not list(tmp_path.glob(".*.tmp"))


def test_steps_of_snakemake_are_one_command_and_only_shipped_recipes_are_named(study):
    for k, path in enumerate(sorted((study / "results").rglob("*.json"))):
        facts = json.loads(path.read_text())
        facts["provenance"]["command"] = f"satlens step . results/{k}"
        path.write_text(json.dumps(facts))
    text = written(study)
    assert "made by `satlens step`; code" in text
    assert "To make them again" not in text
    rename(study, name="tiny")
    assert "satlens reproduce tiny\n```" in written(study)


def test_losses_that_a_comparison_lacks_are_said(study):
    path = study / "results" / "comparison.json"
    facts = json.loads(path.read_text())
    del facts["summary"]["nll"], facts["summary"]["n_parameters"]
    path.write_text(json.dumps(facts))
    assert "lacks the held-out losses of its arms" in written(study)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("rows", [0, 8])
def test_gates_without_numbers_are_said_to_be_missing(static, rows):
    table = mock.gates(4, 2, n_dead=0).iloc[:rows].assign(mean=float("nan"))
    (said,) = words.sparsity(table, {"gates": {"static": static}}, "an arm")
    assert said.kind == "missing" and "no mean of any gate" in said


def test_summaries_without_overall_numbers_are_said_to_be_missing():
    table = mock.gates(4, 2, n_dead=0)
    (gates,) = words.sparsity(table, {"gates": {"n_heads": 8}})
    (reads,) = words.sparsity(table, {"routes": {"n_reads": 8}})
    (effective,) = words.routes(table, {})
    assert all("lacks the numbers over all" in said for said in (gates, reads, effective))


def test_the_command_writes_both_files(study, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out" / "findings.md"
    monkeypatch.setattr("sys.argv", ["satlens", "findings", str(study), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out.split() == [str(out), str(out.with_name(LEDGER))]
    assert out.read_text(encoding="utf-8").startswith("# Findings")
