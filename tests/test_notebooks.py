"""The notebooks as they are stored: run in order, without errors, portable and small.

`pytest --nbmake notebooks` runs them; here is what a run alone does not show.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST_FILE = 400_000
WIDEST_PICTURE = 1000
"""Pixels that a page of a notebook shows without shrinking them."""
# Folders of one machine, a kernel's temporary files, addresses of objects in memory.
LOCAL = re.compile(
    r"(?<![\w.])/(tmp|root|home|work|Users|private|mnt)/|site-packages| at 0x|ipykernel_"
)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in code_cells(notebook) for output in cell["outputs"]]


def texts(output: dict[str, Any]) -> list[str]:
    """All that an output shows, but pictures."""
    data = output.get("data", {})
    shown = [output.get("text", ""), *(v for k, v in data.items() if k.startswith("text/"))]
    return ["".join(text) for text in shown]


def pictures(notebook: dict[str, Any]) -> list[bytes]:
    found = [output.get("data", {}).get("image/png") for output in outputs(notebook)]
    return [base64.b64decode("".join(png)) for png in found if png is not None]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_they_are_numbered_from_one() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == [f"0{n}_" for n in range(1, 9)]


def test_it_is_a_valid_notebook_without_anything_of_one_session(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(read(path))
    notebook = read(path)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"cell-\d\d", name) for name in ids)
    assert not any(cell["metadata"] for cell in notebook["cells"])


def test_every_cell_was_run_in_order(path: Path) -> None:
    cells = code_cells(read(path))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell["outputs"] for cell in cells)


def test_nothing_went_wrong_and_nothing_was_warned_of(path: Path) -> None:
    for output in outputs(read(path)):
        assert output["output_type"] in ("stream", "display_data", "execute_result")
        assert output.get("name") != "stderr", output["text"]


def test_nothing_belongs_to_one_machine(path: Path) -> None:
    notebook = read(path)
    shown = [text for output in outputs(notebook) for text in texts(output)]
    for text in (*shown, *(source(cell) for cell in notebook["cells"])):
        assert not LOCAL.search(text), text


def test_it_explains_itself(path: Path) -> None:
    """A title first, and words around the code."""
    cells = read(path)["cells"]
    assert cells[0]["cell_type"] == "markdown" and source(cells[0]).startswith("# ")
    assert sum(cell["cell_type"] == "markdown" for cell in cells) >= len(cells) // 3


def test_it_is_small_and_its_pictures_fit_the_page(path: Path) -> None:
    assert path.stat().st_size < LARGEST_FILE
    found = pictures(read(path))
    assert found
    for png in found:
        width, _ = struct.unpack(">II", png[16:24])
        assert 300 < width <= WIDEST_PICTURE


def test_the_architecture_of_the_guide_is_the_one_that_is_registered() -> None:
    """CONTRIBUTING.md and the notebook show one example."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^   ```python\n(.*?)^   ```", guide, re.MULTILINE | re.DOTALL)
    (notebook,) = [path for path in NOTEBOOKS if path.stem.startswith("06_")]
    code = "\n".join(source(cell) for cell in code_cells(read(notebook)))
    assert len(blocks) == 2
    for block in blocks:
        assert textwrap.dedent(block).strip() in code
