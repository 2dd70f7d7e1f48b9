from __future__ import annotations

import html
import re

import mock_tables as mock
import pytest
from mock_tasks import token_result

import satlens
from satlens.analysis.result import Result
from satlens.errors import AnalysisError


def gates() -> Result:
    table = mock.gates(4, 2)
    facts = {"checkpoint": {"sha256": "ab" * 32}}
    return Result("sparsity", table, facts, mock.gate_summary(table), notes=["A note <b>."])


def test_a_token_view_is_shown_as_its_text_with_tables():
    page = satlens.view(token_result()).html
    assert page.count('class="token-view"') == 1
    files = re.findall(r'data-csv="([^"]+)"', page)
    assert files == ["token_view.csv", "token_channels.csv"]
    assert "<img" not in page


def test_another_result_is_shown_as_its_figure_with_table_notes_and_provenance():
    page = satlens.view(gates()).html
    assert page.count("data:image/png;base64,") == 1
    assert 'data-csv="sparsity.csv"' in page
    assert "A note &lt;b&gt;." in page
    assert "checkpoint.sha256" in page and "ab" * 32 in page
    assert "token-view" not in page.split("<body>")[1]


def test_the_page_may_load_nothing():
    page = satlens.view(token_result(texts=(("<img src=x onerror=a()>",),))).html
    assert "default-src &#39;none&#39;" in page
    assert not re.search(r"<[^>]+\s(?:src|href)=\"?(?:https?:)?//", page)
    assert "<img" not in page


def test_the_frame_in_a_notebook_holds_the_same_page_and_reaches_nothing():
    shown = satlens.view(token_result(), height=400)
    frame = shown._repr_html_()
    found = re.fullmatch(
        r'<iframe sandbox="([^"]*)" title="Token view" srcdoc="([^"]*)" '
        r'width="100%" height="400" style="border:0"></iframe>',
        frame,
    )
    assert found is not None
    assert found[1] == "allow-scripts allow-downloads"
    assert html.unescape(found[2]) == shown.html


def test_the_page_is_saved_as_it_is(tmp_path):
    shown = satlens.view(gates())
    path = shown.save(tmp_path / "new" / "gates.html")
    assert path.read_text(encoding="utf-8").rstrip("\n") == shown.html.rstrip("\n")
    assert "Sparsity" in repr(shown)
    (tmp_path / "file").touch()
    with pytest.raises(AnalysisError, match=r"cannot write the page"):
        shown.save(tmp_path / "file" / "page.html")
    for folder in (tmp_path, "."):
        with pytest.raises(AnalysisError, match=r"cannot write the page: Is a directory"):
            shown.save(folder)


def test_only_a_result_is_shown():
    with pytest.raises(AnalysisError, match="view: expected one result, got list"):
        satlens.view([gates()])


def test_the_same_result_gives_the_same_page():
    assert satlens.view(token_result()).html == satlens.view(token_result()).html


def test_a_result_without_a_figure_is_refused():
    with pytest.raises(AnalysisError, match="no figure is known"):
        satlens.view(Result("unheard_of", mock.counted(mock.gate_cells(2, 1))))
