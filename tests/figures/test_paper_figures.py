"""The figures of a study: the same bytes from the same tables, and where every number came from."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import map_study
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from satlens.analysis.result import Result
from satlens.cli import main
from satlens.errors import DataError, SatlensError
from satlens.report import paper_figures
from satlens.report.collect import Run, collect
from satlens.report.paper_figures import NotDrawnError, draw_figures, scripts
from satlens.report.sections.drawn import drawn_section

ROOT = Path(__file__).parents[2]
DRAWN, NOT_DRAWN = "sizes", "absent"
SCRIPTS = {
    DRAWN: '''
"""Weights of the newest state.

More words.
"""
from satlens.plotting.style import new_figure
from satlens.report.paper_figures import Drawing, of_variant

SOURCE = "a paper (arXiv 0000.00000)"

def draw(run):
    _, seeds = of_variant(run, "sparsity", "denseformer")
    parts = [each.part("route_weights") for each in seeds.values()]
    figure = new_figure(2, 2)
    plotted = parts[0].table[["layer", "source", "weight"]]
    figure.subplots().plot(plotted["weight"])
    return Drawing(figure=figure, plotted=plotted, tables=parts, caption="Weights (one line).")
''',
    NOT_DRAWN: '''
"""What no study has."""
from satlens.report.paper_figures import of_variant

SOURCE = "nobody"

def draw(run):
    of_variant(run, "circuits", "denseformer")
''',
}


@pytest.fixture
def study(tmp_path) -> Path:
    return map_study.write(tmp_path / "study", seeds=2, arms=("dense",))


@pytest.fixture
def two_scripts(tmp_path, monkeypatch) -> None:
    """A script that draws and one that cannot, in place of those of the repository."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name, text in SCRIPTS.items():
        (folder / f"{name}.py").write_text(text.lstrip())
    monkeypatch.setattr(paper_figures, "shipped_folder", lambda name: folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def sidecar_of(study: Path) -> dict:
    return json.loads((study / "figures" / f"{DRAWN}.json").read_text())


# -- bytes -----------------------------------------------------------------------------------------


def test_two_processes_draw_the_same_bytes_without_torch(study, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    draw_figures(study, here, only=["denseformer_weights"])
    code = (
        "import sys; from satlens.report.paper_figures import draw_figures;"
        f"draw_figures({str(study)!r}, {str(there)!r}, only=['denseformer_weights']);"
        "assert 'torch' not in sys.modules"
    )
    other = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Pacific/Auckland"}
    subprocess.run([sys.executable, "-c", code], check=True, env=other, cwd=tmp_path)
    assert {path.suffix for path in here.iterdir()} == {".pdf", ".png", ".csv", ".json"}
    assert contents(here) == contents(there)


def test_another_table_gives_another_figure(study, two_scripts, tmp_path):
    draw_figures(study, tmp_path / "before", only=[DRAWN])
    weights = map_study.weights_of("dense", 0)
    weights["weight"] += 0.5
    part = [("route_weights", weights, ("source_index",))]
    map_study.save(study, "dense", 0, "sparsity", map_study.mock.signed_routes(weights), parts=part)
    draw_figures(study, tmp_path / "after", only=[DRAWN])
    before, after = contents(tmp_path / "before"), contents(tmp_path / "after")
    assert all(before[name] != after[name] for name in before)


# -- what the files say ----------------------------------------------------------------------------


def test_the_sidecar_says_where_every_table_came_from(study, two_scripts):
    draw_figures(study)
    facts = sidecar_of(study)
    assert facts["title"] == "Weights of the newest state"
    assert facts["source"] == "a paper (arXiv 0000.00000)"
    assert facts["command"] == f"satlens figures maps --only {DRAWN}"
    assert [each["table"] for each in facts["tables"]] == [
        f"results/dense-seed{seed}/route_weights.csv" for seed in range(2)
    ]
    for seed, each in enumerate(facts["tables"]):
        source = map_study.provenance("dense", seed)
        on_disk = (study / each["table"]).read_bytes()
        assert each["csv_sha256"] == hashlib.sha256(on_disk).hexdigest()
        assert each["data_sha256"] == source["data"]["sha256"]
        same = ("checkpoint", "seed", "command", "code", "packages")
        assert {name: each[name] for name in same} == {name: source[name] for name in same}
    assert set(facts["drawn_with"]) == {"satlens", "matplotlib", "numpy", "pandas", "seaborn"}
    for name, sha256 in facts["files"].items():
        data = (study / "figures" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == sha256
    assert set(facts["files"]) == {f"{DRAWN}.{kind}" for kind in ("csv", "pdf", "png")}


def test_pictures_carry_the_facts_of_the_sidecar(study, two_scripts):
    draw_figures(study)
    facts = sidecar_of(study)
    facts.pop("files")
    with Image.open(study / "figures" / f"{DRAWN}.png") as picture:
        said = dict(picture.text)
    assert said == {"Title": facts["title"], "Description": said["Description"]}
    assert json.loads(said["Description"]) == facts
    document = (study / "figures" / f"{DRAWN}.pdf").read_bytes().decode("latin-1")
    (subject,) = re.findall(r"/Subject \((.*)\)\n", document)
    assert json.loads(re.sub(r"\\(.)", r"\1", subject)) == facts
    assert "/CreationDate" not in document


def test_the_csv_holds_the_plotted_values_to_the_bit(study, two_scripts):
    draw_figures(study)
    written = pd.read_csv(study / "figures" / f"{DRAWN}.csv")
    source = Result.load(study / "results" / "dense-seed0", "route_weights").table
    np.testing.assert_array_equal(written["weight"], source["weight"])
    assert written["source"].tolist() == source["source"].tolist()


# -- what is drawn ---------------------------------------------------------------------------------


def test_what_lacks_tables_is_named_with_its_reason(study, two_scripts):
    drawn = {figure.name: figure for figure in draw_figures(study)}
    assert [path.parent for path in drawn[DRAWN].files] == [study / "figures"] * 4
    assert drawn[DRAWN].reason == ""
    assert drawn[NOT_DRAWN].files == ()
    assert drawn[NOT_DRAWN].reason == "needs the circuits of an arm of variant denseformer"
    assert not list((study / "figures").glob(f"{NOT_DRAWN}*"))


def test_only_draws_what_it_names_and_refuses_what_it_cannot(study, two_scripts, tmp_path):
    (figure,) = draw_figures(study, tmp_path / "out", only=[DRAWN])
    assert figure.name == DRAWN and not (study / "figures").exists()
    with pytest.raises(NotDrawnError, match=f"^{NOT_DRAWN}: needs the circuits"):
        draw_figures(study, only=[NOT_DRAWN])
    with pytest.raises(SatlensError, match=f"no such figure; there are {NOT_DRAWN}, {DRAWN}$"):
        draw_figures(study, only=["picture"])
    (tmp_path / "file").write_text("")
    with pytest.raises(SatlensError, match=f"cannot write {DRAWN}"):
        draw_figures(study, tmp_path / "file", only=[DRAWN])


def test_a_damaged_table_is_refused_by_name_and_old_files_stay(study, two_scripts):
    draw_figures(study)
    before = contents(study / "figures")
    path = study / "results" / "dense-seed1" / "route_weights.csv"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SatlensError) as error:
        draw_figures(study)
    message = str(error.value)
    assert "results/dense-seed1/route_weights.csv: truncated or changed" in message
    assert "\n" not in message
    assert contents(study / "figures") == before


def test_the_verb_draws_says_what_it_did_and_fails_in_one_line(
    study, two_scripts, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("sys.argv", ["satlens", "figures", str(study)])
    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0
    assert out == [
        f"{NOT_DRAWN}: not drawn: needs the circuits of an arm of variant denseformer",
        f"{DRAWN}: {study / 'figures' / DRAWN}.{{pdf,png,csv,json}}",
    ]
    (tmp_path / "file").write_text("")
    for arguments, said in (
        ([str(study), "--out", str(tmp_path / "file")], "is not a folder"),
        ([str(tmp_path / "none")], "no such run directory"),
    ):
        monkeypatch.setattr("sys.argv", ["satlens", "figures", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        err = capsys.readouterr().err
        assert stop.value.code == 1 and said in err and "Traceback" not in err


@pytest.fixture
def a_script_fails(two_scripts, monkeypatch) -> str:
    """A third script, which has its tables and a fault of its own."""
    path = paper_figures.shipped_folder("figures") / "broken.py"
    path.write_text('"""Broken."""\nSOURCE = "nobody"\ndef draw(run):\n    {}["weight\\nx"]\n')
    return path.stem


WHY = r"cannot be drawn: KeyError: 'weight\nx'"


def test_a_script_that_fails_costs_its_own_figure_alone(study, a_script_fails):
    folder = study / "figures"
    folder.mkdir()
    (folder / "broken.png").write_bytes(b"of other tables")
    drawn = {figure.name: figure for figure in draw_figures(study)}
    assert len(drawn[DRAWN].files) == 4 and drawn[NOT_DRAWN].error is None
    assert drawn["broken"].files == () and drawn["broken"].reason == WHY
    assert isinstance(drawn["broken"].error, KeyError)
    assert [path.name for path in folder.glob("broken*")] == ["broken.json"]
    run = collect(study)
    assert drawn_section(run) is not None
    assert ("figures/broken", WHY) in [(each.name, each.reason) for each in run.missing]
    with pytest.raises(SatlensError, match=r"^broken: cannot be drawn: KeyError"):
        draw_figures(study, only=["broken"])


def test_the_verb_names_scripts_that_failed(study, a_script_fails, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["satlens", "figures", str(study)])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 1
    assert f"broken: not drawn: {WHY}" in out and f"{DRAWN}: " in out
    assert err.splitlines() == [f"satlens: error: {study}: scripts that failed: broken"]


@pytest.mark.parametrize(
    ("recipe", "fault"),
    [
        ({"seeds": "x"}, "recipe.seeds: "),
        ({"arms": {"a": None}}, "recipe.arms.a: "),
        ({"arms": {"a": {"seeds": "x"}}}, "recipe.arms.a.seeds: "),
        ({"arms": {"a": {"analyses": 3}}}, "recipe.arms.a.analyses: "),
        ({"arms": {"a": {"options": {"trajectory": []}}}}, "recipe.arms.a.options.trajectory: "),
        ({"analysis_seeds": {"sparsity": None}}, "recipe.analysis_seeds.sparsity: "),
    ],
)
def test_a_plan_that_makes_no_sense_is_one_line(tmp_path, recipe, fault):
    (tmp_path / "plan.json").write_text(json.dumps({"recipe": recipe}))
    with pytest.raises(DataError) as error:
        collect(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'plan.json'}: {fault}")
    assert "\n" not in str(error.value)


# -- the scripts of the repository -----------------------------------------------------------------


def test_every_script_says_what_it_draws_and_what_it_lacks(tmp_path):
    empty = Run(tmp_path)
    for script in scripts():
        assert (script.module.__doc__ or "").splitlines()[0].endswith("."), script.name
        assert isinstance(script.module.SOURCE, str) and script.module.SOURCE, script.name
        with pytest.raises(NotDrawnError, match=r"^needs "):
            script.module.draw(empty)
    titles = [script.title for script in scripts()]
    assert len(set(titles)) == len(titles)


STUDIES = sorted(path.parent for path in ROOT.glob("studies/*/plan.json"))


@pytest.mark.skipif(not STUDIES, reason="a tree without the studies")
def test_the_shipped_figures_are_those_of_the_shipped_tables():
    """Every script draws from one study at least, and what is stored is what it draws."""
    drawn = set()
    for study in STUDIES:
        run, stored = collect(study), study / "figures"
        for script in scripts():
            try:
                drawing = script.module.draw(run)
            except NotDrawnError:
                assert not list(stored.glob(f"{script.name}.*")), script.name
                continue
            drawn.add(script.name)
            facts = json.loads((stored / f"{script.name}.json").read_text())
            assert facts["caption"] == drawing.caption
            assert {each["table"] for each in facts["tables"]} == {
                run.place(each) for each in drawing.tables
            }
            for name, sha256 in facts["files"].items():
                assert hashlib.sha256((stored / name).read_bytes()).hexdigest() == sha256
            _same_values(stored / f"{script.name}.csv", drawing.plotted)
    assert drawn == {script.name for script in scripts()}


def _same_values(path: Path, plotted: pd.DataFrame) -> None:
    """Equal text; numbers within the rounding of other releases of numpy."""
    text = io.StringIO(plotted.to_csv(index=False))
    stored, now = (pd.read_csv(source, dtype=str, keep_default_na=False) for source in (path, text))
    assert list(stored) == list(now) and len(stored) == len(now), path.name
    for name in stored:
        values, found = (pd.to_numeric(rows[name], errors="coerce") for rows in (stored, now))
        np.testing.assert_allclose(values, found, rtol=1e-9, atol=1e-12, err_msg=path.name)
        words = values.isna()
        assert stored[name][words].tolist() == now[name][words].tolist(), f"{path.name}: {name}"
