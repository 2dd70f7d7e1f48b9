"""Pages as such: what may run in them, what is escaped, and the tables that they carry whole."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from markupsafe import Markup, escape

from satlens.analysis.result import Result
from satlens.report.effects import Finding
from satlens.report.page.document import Fragment, document, embedded_json, write_page
from satlens.report.page.layout import Part, Section, part_html, report_page
from satlens.report.page.tables import MAX_COLUMNS, MAX_ROWS, result_table, table, visible

EVIL = "</script><script>alert('x')</script><!--"


class Reader(HTMLParser):
    """The texts of styles and scripts, the policy, and all tags, as a browser would read them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, dict, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data) -> None:
        if self.tags and self.tags[-1][0] in ("style", "script"):
            self.texts.append((*self.tags[-1], data))

    def handle_endtag(self, tag) -> None:
        self.tags.append((f"/{tag}", {}))

    @property
    def policy(self) -> dict[str, list[str]]:
        (content,) = (a["content"] for t, a in self.tags if t == "meta" and "http-equiv" in a)
        return {part.split()[0]: part.split()[1:] for part in content.split(";")}

    def executed(self, tag: str) -> list[str]:
        return [text for name, attrs, text in self.texts if name == tag and "type" not in attrs]


def source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_allows_just_the_styles_and_scripts_of_the_page():
    page = document("t", Markup("<main id='main'>é</main>"), ["b { color: red }"], ["'use\u2028'"])
    read = Reader(page)
    assert read.policy["default-src"] == ["'none'"]
    assert read.policy["img-src"] == ["data:"]
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        texts = read.executed(tag)
        assert len(texts) == 2
        assert read.policy[directive] == [source(text) for text in texts]
    assert not re.search(r"unsafe|https?:|[*]", str(read.policy))


@pytest.mark.parametrize(
    ("styles", "scripts"), [((), (EVIL,)), (("</STYLE>",), ()), (("<!--",), ())]
)
def test_a_text_that_would_end_its_element_is_refused(styles, scripts):
    with pytest.raises(ValueError, match="contains"):
        document("t", Markup(""), styles, scripts)


def test_titles_are_escaped_and_fragments_bring_a_script_once():
    fragment = Fragment(Markup("<p class='mine'>here</p>"), ("p { top: 0 }",), ("let mine;",))
    section = Section("s", EVIL, parts=[Part(EVIL, [Finding(EVIL)], fragments=[fragment] * 2)])
    nothing = {"lead": EVIL, "facts": [(EVIL, EVIL)], "short": [], "scale": [], "provenance": []}
    page = report_page(title=EVIL, sections=[section], **nothing)
    read = Reader(page)
    assert page.count("<p class='mine'>here</p>") == 2
    assert sum("let mine;" in text for text in read.executed("script")) == 1
    assert not any("alert" in text for _, _, text in read.texts)
    assert str(escape(EVIL)) in page


def test_json_in_a_page_comes_back_and_ends_nothing():
    value = {"token": EVIL, "more": ["\u2028", "é", 1.5, None]}
    text = embedded_json(value)
    assert "<" not in text
    assert json.loads(text) == value


def test_a_page_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "page.html"
    write_page(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_page(path, "\ud800")
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


# -- tables ----------------------------------------------------------------------------------------


def hostile(n: int = 4) -> Result:
    texts = [EVIL, 'a "quoted", word', "two\nlines", " \u200bשלום"]
    frame = pd.DataFrame(
        {
            "name": [texts[k % 4] for k in range(n)],
            "value": np.linspace(-1 / 3, 1e-7, n),
            "share": [0.5, np.nan, np.inf, -0.0][:n] * (n // 4),
            "sure": [True, False] * (n // 2),
            "nothing": np.nan,
        }
    )
    return Result("hostile", frame.assign(n_documents=1, n_tokens=12_345, flags=""))


def unpacked(page: str) -> list[bytes]:
    packed = [text for _, a, text in Reader(page).texts if a.get("class") == "packed"]
    return [gzip.decompress(base64.b64decode(text)) for text in packed]


def test_the_table_in_a_page_is_the_csv_of_the_result_byte_for_byte():
    result = hostile()
    html = part_html(Part(tables=[result_table(result, "of x", "runs/x, seed 0-")]))
    assert unpacked(html) == [result.csv()]
    assert 'data-csv="runs-x-seed-0-hostile.csv"' in html
    assert EVIL not in html
    assert str(escape(EVIL)) in html


def test_columns_say_where_they_are_in_the_csv():
    result = hostile()
    shown = result_table(result, "x")
    header = next(csv.reader(io.StringIO(result.csv().decode())))
    assert [header[column.index] for column in shown.columns] == [c.name for c in shown.columns]
    assert "nothing" in header
    assert "nothing" not in [column.name for column in shown.columns]
    assert shown.n_hidden == 0


def test_cells_are_rounded_text_and_what_is_missing_is_blank():
    frame = pd.DataFrame({"a": [0.1234567, -0.25, np.nan], "n": [1000, 2, 3], "b": [10.0, -1, 200]})
    rows = table(frame, "t", "t").rows
    assert rows[0] == ("0.12346", "1000", "10.00")
    assert rows[1][0] == "−0.25000"
    assert rows[2] == ("", "3", "200.00")


def test_long_and_wide_tables_are_shown_in_part_and_carried_whole():
    long = hostile(4 * MAX_ROWS)
    shown = result_table(long, "x")
    assert len(shown.rows) < shown.n_rows == 4 * MAX_ROWS
    html = part_html(Part(tables=[shown]))
    assert f"the first {len(shown.rows)} of {4 * MAX_ROWS:,} rows" in html
    assert unpacked(html) == [long.csv()]
    wide = pd.DataFrame({f"c{k}": np.arange(100.0) for k in range(2 * MAX_COLUMNS)})
    shown = table(wide, "t", "wide")
    assert (len(shown.columns), shown.n_hidden) == (MAX_COLUMNS, MAX_COLUMNS)
    assert len(unpacked(part_html(Part(tables=[shown])))[0].splitlines()[0].split(b",")) == 120
    assert f"{MAX_COLUMNS} further columns" in part_html(Part(tables=[shown]))


def test_characters_that_cannot_be_seen_are_written_out():
    assert visible("a\u200bb\u202ec\r\n") == "a‹U+200B›b‹U+202E›c‹U+000D›⏎"
    assert visible("é 日本 שלום") == "é 日本 שלום"
