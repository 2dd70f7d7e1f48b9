from __future__ import annotations

import json
import math
import os

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from satlens.analysis import result as result_module
from satlens.analysis.result import Result, flag_column
from satlens.errors import AnalysisError


def table(**extra) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "flags": ["few", ""],
            "mean_high": [0.3, math.nan],
            "n_tokens": [100, 100],
            "mean": [0.1 + 0.2, math.nan],
            "head": [0, 1],
            "mean_low": [1 / 3, math.nan],
            "layer": [1, 1],
            "site": ["blocks.1.attn.hook_v_gate"] * 2,
            "dead": [False, True],
            "n_documents": [9, 9],
            **extra,
        }
    )


def result(**extra) -> Result:
    return Result("sparsity", table(**extra), {"seed": 0}, {"dead": 1}, ["one note"])


@pytest.fixture
def plotting(monkeypatch) -> list:
    """Figures that draw one line and remember what they were given."""
    calls = []

    def figure_for(name, frame, summary, parts) -> Figure:
        calls.append((name, frame, summary, parts))
        figure = Figure()
        figure.subplots().plot(frame["mean"])
        return figure

    monkeypatch.setattr("satlens.plotting.figure_for", figure_for)
    return calls


# -- the table -------------------------------------------------------------------------------------


def test_columns_are_put_in_order():
    ordered = "site layer head mean mean_low mean_high dead n_documents n_tokens flags"
    assert list(result().table) == ordered.split()
    assert result().statistics == ["mean", "dead"]


def test_text_and_named_numbers_are_keys():
    res = Result("ablation", table(kind=["zero"] * 2, step=[1, 2]), keys=("step",))
    assert res.key_columns == ["site", "layer", "head", "kind", "step"]
    assert list(res.table)[3:6] == ["kind", "step", "mean"]


def test_the_frame_is_a_copy():
    res = result()
    frame = res.to_frame()
    frame.loc[0, "mean"] = 0
    assert res.table["mean"][0] == 0.1 + 0.2


def test_long_frame_has_one_row_a_statistic():
    res = result()
    long = res.to_frame(long=True)
    columns = "site layer head stat value low high n_documents n_tokens flags"
    assert list(long) == columns.split()
    assert list(long["stat"]) == ["mean", "mean", "dead", "dead"]
    assert list(long["value"])[2:] == [0.0, 1.0]
    assert long["low"].isna().tolist() == [False, True, True, True]
    assert len(long) == len(res.statistics) * len(res.table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="flags"), "lacks the column 'flags'"),
        (lambda t: t.drop(columns="mean_high"), "'mean_low' without the other end"),
        (lambda t: t.drop(columns="mean"), "is the end of no statistic"),
        (lambda t: t.assign(layer=["a", "b"]), "'layer' has to be whole numbers"),
        (lambda t: t.assign(head=[0.5, 1.0]), "'head' has to be whole numbers"),
        (lambda t: pd.concat([t, t[["mean"]]], axis=1), "distinct"),
    ],
)
def test_a_table_of_another_shape_is_refused(change, message):
    with pytest.raises(AnalysisError, match=message) as caught:
        Result("sparsity", change(table()))
    assert "\n" not in str(caught.value)


def test_gaps_in_layers_and_heads_stay_whole_numbers(tmp_path):
    res = result(head=[np.nan, 1.0], role=[None, "v"])
    assert str(res.table["head"].dtype) == "Int64"
    assert list(res.table["role"]) == ["", "v"]
    res.save(tmp_path, figures=False)
    pd.testing.assert_frame_equal(Result.load(tmp_path, "sparsity").table, res.table)


def test_names_that_are_no_file_names_are_refused():
    with pytest.raises(AnalysisError, match="name"):
        Result("../sparsity", table())


def test_keys_have_to_be_columns():
    with pytest.raises(AnalysisError, match="lacks the column 'step'"):
        Result("sparsity", table(), keys=("step",))


def test_flags_of_several_statistics_are_joined():
    mean = np.array(["few", "", "few;constant"], dtype=object)
    zero = np.array(["few", "undefined", "few"], dtype=object)
    assert list(flag_column({"mean": mean, "zero_fraction": zero})) == [
        "few",
        "zero_fraction:undefined",
        "few;mean:constant",
    ]
    assert list(flag_column({"mean": mean})) == list(mean)


# -- files -----------------------------------------------------------------------------------------


def test_saved_results_come_back_equal(tmp_path):
    res = result()
    written = res.save(tmp_path / "new" / "folder", figures=False)
    assert [path.name for path in written] == ["sparsity.csv", "sparsity.json"]
    for back in (Result.load(tmp_path / "new/folder", "sparsity"), Result.load(written[0])):
        pd.testing.assert_frame_equal(back.table, res.table, check_exact=True)
        assert (back.name, back.provenance, back.summary) == ("sparsity", {"seed": 0}, {"dead": 1})
        assert back.notes == ["one note"]


numbers = st.floats(allow_subnormal=True)
text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
lines = st.lists(st.sampled_from(["", "NA", "nan", 'a"b', "a,b", "two\nlines", "\r", " x "]) | text)


@settings(deadline=None, max_examples=50)
@given(st.lists(numbers, min_size=1, max_size=6), lines)
def test_the_csv_keeps_every_bit(tmp_path_factory, values, words):
    folder = tmp_path_factory.mktemp("bits")
    n = len(values)
    frame = pd.DataFrame(
        {
            "category": (words + [""] * n)[:n],
            "mean": np.array(values),
            "n_documents": 1,
            "n_tokens": 2**62 // 1000 * 1000 if n == 1 else 7,
            "flags": (words[::-1] + ["x"] * n)[:n],
        }
    )
    res = Result("bits", frame)
    res.save(folder, figures=False)
    back = Result.load(folder, "bits").table
    known = ~np.isnan(np.array(values))
    assert back["mean"].to_numpy()[known].tobytes() == np.array(values)[known].tobytes()
    assert np.array_equal(back["mean"].isna(), ~known)
    pd.testing.assert_frame_equal(back, res.table, check_exact=True)


def test_an_empty_table_comes_back_with_its_types(tmp_path):
    res = Result("sparsity", table().iloc[:0])
    res.save(tmp_path, figures=False)
    pd.testing.assert_frame_equal(Result.load(tmp_path, "sparsity").table, res.table)


def test_saving_twice_gives_the_same_bytes(tmp_path, plotting):
    first = result().save(tmp_path / "a")
    second = result().save(tmp_path / "b")
    assert [path.suffix for path in first] == [".csv", ".json", ".png", ".pdf"]
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_the_figure_is_drawn_from_table_and_summary(plotting):
    res = result()
    assert isinstance(res.figure(), Figure)
    ((name, frame, summary, parts),) = plotting
    assert name == "sparsity"
    assert frame is res.table
    assert summary is res.summary
    assert parts == {}


def test_numbers_that_are_not_finite_are_null_in_the_json(tmp_path):
    summary = {
        "a": np.float64("nan"),
        "b": (np.int64(3), np.bool_(True)),
        "c": np.array([math.inf]),
    }
    res = Result("sparsity", table(), summary=summary)
    assert res.summary == {"a": None, "b": [3, True], "c": [None]}
    res.save(tmp_path, figures=False)
    written = json.loads((tmp_path / "sparsity.json").read_text())
    assert written["summary"] == res.summary
    assert written["schema_version"] == 1
    with pytest.raises(AnalysisError, match="object"):
        Result("sparsity", table(), summary={"a": object()})


def test_a_figure_that_fails_leaves_no_file(tmp_path, plotting, monkeypatch):
    def broken(*_):
        raise RuntimeError("no figure")

    monkeypatch.setattr("satlens.plotting.figure_for", broken)
    with pytest.raises(RuntimeError):
        result().save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_files_alone(tmp_path, monkeypatch):
    result().save(tmp_path, figures=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AnalysisError, match="No space left"):
        result(mean=[1.0, 2.0]).save(tmp_path, figures=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("sparsity.csv", cut, "csv_sha256"),
        ("sparsity.csv", lambda p: p.unlink(), "No such file"),
        ("sparsity.csv", lambda p: p.write_bytes(b""), "csv_sha256"),
        ("sparsity.json", cut, "truncated or damaged"),
        ("sparsity.json", lambda p: p.unlink(), "No such file"),
        ("sparsity.json", lambda p: p.write_bytes(b"\xff\xfe{"), "truncated or damaged"),
        ("sparsity.json", lambda p: p.write_text("[]"), "field schema_version"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path, name, damage, message):
    result().save(tmp_path, figures=False)
    damage(tmp_path / name)
    with pytest.raises(AnalysisError, match=message) as caught:
        Result.load(tmp_path, "sparsity")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schema_version", 99, "schema_version is 99"),
        ("summary", None, "field summary"),
        ("name", "other", "names the result 'other'"),
        ("columns", {"site": "str"}, "columns"),
    ],
)
def test_a_json_of_another_result_is_refused(tmp_path, field, value, message):
    result().save(tmp_path, figures=False)
    path = tmp_path / "sparsity.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(AnalysisError, match=message):
        Result.load(tmp_path, "sparsity")


def test_a_column_of_another_kind_is_refused(tmp_path):
    result().save(tmp_path, figures=False)
    path = tmp_path / "sparsity.json"
    path.write_text(path.read_text().replace('"site": "str"', '"site": "float"'))
    with pytest.raises(AnalysisError, match="column site is not of kind float"):
        Result.load(tmp_path, "sparsity")


def test_a_csv_of_another_run_is_noticed(tmp_path):
    result().save(tmp_path / "a", figures=False)
    result(mean=[1.0, 2.0]).save(tmp_path / "b", figures=False)
    os.replace(tmp_path / "a/sparsity.csv", tmp_path / "b/sparsity.csv")
    with pytest.raises(AnalysisError, match="csv_sha256"):
        Result.load(tmp_path / "b", "sparsity")


def test_the_schema_version_is_the_modules(tmp_path):
    result().save(tmp_path, figures=False)
    assert json.loads((tmp_path / "sparsity.json").read_text())["schema_version"] == (
        result_module.SCHEMA_VERSION
    )
