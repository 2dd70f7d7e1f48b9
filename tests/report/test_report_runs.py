"""Pages of plain folders and of several runs: arms side by side, differences where they pair."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import mock_tables as mock
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from satlens.analysis.result import Result
from satlens.analysis.scoring.answers import Answers, Metric
from satlens.analysis.scoring.estimates import Scored
from satlens.analysis.scoring.tables import answer_table, protocol_table, score_table
from satlens.cli import app
from satlens.errors import DataError
from satlens.report import build_report
from satlens.report.collect import collect
from satlens.report.effects import NO_SEED
from satlens.report.sections.differences import differences_section
from satlens.report.side_by_side import collect_all

DATA = {"sha256": "da" * 32, "split": "test", "context": 256}


def facts(checkpoint: str = "tiny/satformer", tokenizer: str = "t", **data) -> dict:
    sha256 = checkpoint.encode().hex()[:64].ljust(64, "0")
    return {
        "checkpoint": {"sha256": sha256, "checkpoint": checkpoint, "variant": "satformer"},
        "data": {**DATA, **data},
        "tokenizer": tokenizer,
        "n_documents": 24,
        "n_tokens": 21_600,
    }


def save_losses(folder: Path, shift: float, wobble: float = 0.01, n: int = 24, **where) -> Path:
    """Losses that differ from those of no shift by ``shift`` and a little in every document."""
    table, summary = mock.evaluation(n=n)
    table["nll"] += shift + wobble * np.cos(np.arange(n))
    Result("evaluation", table, facts(**where), summary).save(folder, figures=False)
    return folder


def save_answers(folder: Path, right: np.ndarray, prompt: str = "p", task: str = "squad") -> Path:
    """Answers to ``right.size`` questions about half as many passages."""
    n = len(right)
    metric = Metric("acc", "mean", right.astype(float), np.ones(n))
    answers = Answers((metric,), np.zeros(n, bool), np.zeros(n, bool), prompt, 100)
    protocol = {"version": "1", "data": "f", "data_sha256": "d", "output_type": "x"}
    protocol |= {"source": "s", "num_fewshot": 0}
    passages = [f"p{k // 2}" for k in range(n)]
    scored = [Scored(task, passages, {"ckpt": answers}, {"acc": 0.5}, protocol)]
    table, _ = score_table(scored, [], {"n_resamples": 99, "seed": 0})
    parts = [("task_protocol", protocol_table(scored)), ("task_answers", answer_table(scored))]
    more = tuple(Result(name, part) for name, part in parts)
    Result("tasks", table, facts(), {}, parts=more).save(folder, figures=False)
    return folder


def text_of(page: Path) -> str:
    markup = page.read_text(encoding="utf-8")
    markup = re.sub(r"data:image/png[^\"]*|<(style|script)[ >].*?</\1>", "", markup, flags=re.S)
    text = html.unescape(re.sub(r"<[^>]*>", " ", markup)).replace("\N{NO-BREAK SPACE}", " ")
    return re.sub(r"\s+", " ", text)


# -- one folder ------------------------------------------------------------------------------------


def test_the_folder_of_an_analysis_is_an_arm_without_seeds(tmp_path):
    folder = save_losses(tmp_path / "mine", 0.0)
    gates = mock.gates(4, 2)
    summary = mock.gate_summary(gates)
    Result("sparsity", gates, facts(), summary).save(folder, figures=False)
    Result("controls", mock.controls(), facts(), notes=["Known noise."]).save(folder, figures=False)
    run = collect(folder)
    assert (run.arms, run.seeds) == (["mine"], {"mine": [NO_SEED]})
    assert run.variant("mine") == "satformer"
    text = text_of(build_report(folder))
    assert "Held-out NLL of mine 4.200 nats/token" in text
    assert "tiny/satformer (satformer, sha256" in text
    assert "mine: training makes more gates exactly zero" in text
    assert "in this checkpoint" in text
    assert "Known noise." in text
    assert not re.search(r"\bseed -?\d", text)
    assert "claims" not in [path.stem for path in folder.rglob("*.csv")]


def test_parts_are_shown_with_their_result_and_tables_of_others_left_alone(tmp_path):
    cells = mock.gate_cells(4, 2)
    delta = np.linspace(-0.2, 0.2, len(cells))
    part = Result("categories_contrasts", mock.contrasts(cells, delta, delta))
    whole = Result("categories", mock.categories(cells), facts(), {"tagger": "w"}, parts=(part,))
    whole.save(tmp_path / "mine", figures=False)
    (tmp_path / "mine" / "notes.csv").write_text("a,b\n1,2\n")
    run = collect(tmp_path / "mine")
    assert [name for _, _, name in run.results] == ["categories"]
    assert run.missing == []
    assert not run.others


def test_two_checkpoints_in_a_folder_are_two_arms(tmp_path):
    folder = save_losses(tmp_path / "mine", 0.0)
    gates = mock.gates(4, 2)
    other = facts("tiny/other")
    Result("sparsity", gates, other, mock.gate_summary(gates)).save(folder, figures=False)
    assert set(collect(folder).arms) == {"mine: tiny/satformer", "mine: tiny/other"}


def test_a_damaged_table_is_named_and_alone_it_is_an_error(tmp_path):
    folder = save_losses(tmp_path / "mine", 0.0)
    Result("controls", mock.controls(), facts()).save(folder, figures=False)
    (folder / "evaluation.csv").write_text("cut")
    text = text_of(build_report(folder))
    assert "evaluation.csv: truncated or changed" in text
    assert str(folder) not in text
    for path in folder.glob("controls.*"):
        path.unlink()
    with pytest.raises(DataError, match=r"evaluation.csv: truncated or changed") as caught:
        build_report(folder)
    assert "\n" not in str(caught.value)


def test_a_page_elsewhere_has_no_link_to_files_that_do_not_travel_with_it(tmp_path):
    folder = save_losses(tmp_path / "mine", 0.0)
    beside = build_report(folder).read_text(encoding="utf-8")
    assert 'href="evaluation.csv"' in beside
    (tmp_path / "away").mkdir()
    away = build_report(folder, tmp_path / "away" / "page.html").read_text(encoding="utf-8")
    assert set(re.findall(r'href="([^"]*)"', away)) == set(re.findall(r'href="(#[^"]*)"', beside))


# -- several ---------------------------------------------------------------------------------------


def losses_of(*folders: Path) -> tuple[list[str], pd.DataFrame]:
    """Sentences about losses, and the numbers of the table beside them."""
    section = differences_section(collect_all(folders))
    assert section is not None
    part = section.parts[0]
    columns = [column.name for column in part.tables[0].columns] if part.tables else []
    rows = part.tables[0].rows if part.tables else []
    return list(part.findings), pd.DataFrame(rows, columns=columns)


@pytest.mark.parametrize(
    ("shift", "kind", "sentence"),
    [
        (0.1, "found", "b against a: the held-out loss is higher (worse) on the same 24 documents"),
        (-0.1, "found", "b against a: the held-out loss is lower (better)"),
        (0.0, "open", "b against a: no difference in held-out loss is established"),
    ],
)
def test_a_difference_is_that_of_the_documents(tmp_path, shift, kind, sentence):
    first = save_losses(tmp_path / "a", 0.0, wobble=0.0)
    second = save_losses(tmp_path / "b", shift, wobble=0.02)
    (said,), table = losses_of(first, second)
    assert sentence in said
    assert said.kind == kind
    expected = shift + 0.02 * np.cos(np.arange(24)).mean()
    delta, low, high = (
        float(table[name][0].replace("−", "-")) for name in ("delta", "delta_low", "delta_high")
    )
    assert delta == pytest.approx(expected, abs=1e-5)
    assert low < expected < high < low + 0.03


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"n": 23}, "they scored different documents (23 and 24)"),
        ({"tokenizer": "another"}, "they have different tokenizers"),
        ({"sha256": "ee" * 32}, "their data is not the same"),
    ],
)
def test_losses_of_other_tokens_are_not_paired_and_the_page_says_why(tmp_path, options, reason):
    first = save_losses(tmp_path / "a", 0.0)
    second = save_losses(tmp_path / "b", 0.5, **options)
    (said,), table = losses_of(first, second)
    assert said.kind == "missing"
    assert reason in said
    assert not len(table)


def test_other_contexts_are_paired_and_said(tmp_path):
    first = save_losses(tmp_path / "a", 0.0)
    second = save_losses(tmp_path / "b", 0.1, context=512)
    (said,), _ = losses_of(first, second)
    assert "The first reads contexts of 512 tokens, the second of 256." in said


def test_answers_are_paired_by_question(tmp_path):
    right = np.arange(40) % 4 == 0
    first = save_answers(tmp_path / "a", right)
    second = save_answers(tmp_path / "b", np.ones(40, bool))
    section = differences_section(collect_all([first, second]))
    (part,) = section.parts
    (said,) = part.findings
    assert said.kind == "found"
    assert said.startswith("b against a: higher in squad by acc (+0.750, 95 % interval")
    assert part.tables[0].n_rows == 1
    text = text_of(build_report([first, second], tmp_path / "page.html"))
    assert said in text


def test_answers_to_other_prompts_are_not_paired(tmp_path):
    first = save_answers(tmp_path / "a", np.ones(40, bool))
    second = save_answers(tmp_path / "b", np.zeros(40, bool), prompt="q")
    third = save_answers(tmp_path / "c", np.zeros(40, bool), task="nq")
    (part,) = differences_section(collect_all([first, second, third])).parts
    assert "b against a, squad: not paired, the prompts differ" in part.findings[0]
    assert "c against a, nq: not paired, one of the runs was not asked it." in part.findings
    assert not part.tables


def study(root: Path, shift: float) -> Path:
    arms = {"transformer": {"analyses": []}, "satformer": {"analyses": []}}
    recipe = {"name": "t", "seeds": 1, "arms": arms, "train": {"tokens": 614_400}}
    root.mkdir(parents=True)
    (root / "plan.json").write_text(json.dumps({"asked": {}, "recipe": recipe}))
    for arm in arms:
        save_losses(root / "results" / f"{arm}-seed0", shift)
    table = mock.comparison({("satformer", "transformer"): (-0.047, -0.045)})
    Result("comparison", table, {}, {"noise_floor": 0.01}).save(root / "results", figures=False)
    return root


def test_arms_of_studies_stand_beside_their_namesakes(tmp_path):
    first, second = study(tmp_path / "x" / "run", 0.0), study(tmp_path / "y" / "run", 0.2)
    plain = save_losses(tmp_path / "plain", 0.1)
    run = collect_all([first, second, plain])
    arms = ["x/run/transformer", "x/run/satformer", "y/run/transformer", "y/run/satformer", "plain"]
    assert run.arms == arms
    page = build_report([first, second, plain], tmp_path / "page.html")
    text = text_of(page)
    assert "y/run/satformer (seed 0) against x/run/satformer (seed 0): the held-out loss" in text
    assert "x/run has no loss of documents to set beside that of plain." in text
    assert text.count("satformer ends 0.046 nats/token below transformer") == 2
    assert not list(tmp_path.rglob("claims.csv"))
    names = re.findall(r'data-csv="([^"]*)"', page.read_text(encoding="utf-8"))
    assert len(names) == len(set(names))


def test_a_run_given_twice_is_refused(tmp_path):
    folder = save_losses(tmp_path / "a", 0.0)
    with pytest.raises(DataError, match="a: this run is given twice"):
        build_report([folder, tmp_path / "." / "a"])


def test_the_command_compares_runs(tmp_path):
    folders = [save_losses(tmp_path / name, shift) for name, shift in (("a", 0.0), ("b", 0.3))]
    out = tmp_path / "sub" / "both.html"
    done = CliRunner().invoke(app, ["report", *map(str, folders), "--out", str(out)])
    assert (done.exit_code, done.stdout.strip()) == (0, str(out))
    assert "b against a: the held-out loss is higher" in text_of(out)
