"""The page of a run: complete, self-contained, escaped, the same on a rebuild, and honest."""

from __future__ import annotations

import html
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import mock_tables as mock
import pytest

from satlens.analysis.result import Result
from satlens.errors import DataError
from satlens.report import build_report
from satlens.report.paper_figures import FOLDER, draw_figures

EVIL = "<script>alert('x')</script>"
VOID = {"meta", "img", "link", "br", "hr", "input", "source"}


def save(root: Path, where: str, name: str, table, summary=None, **options) -> None:
    folder = root / "results" / where if where else root / "results"
    provenance = {"checkpoint": {"sha256": "ab" * 32}, "command": f"satlens {EVIL}"}
    Result(name, table, provenance, summary or {}, **options).save(folder, figures=False)


def write_ablation(root: Path, total: float, seed: int = 0) -> None:
    table = mock.ablation({"zero": total}, 4, 2)
    save(root, f"satformer-seed{seed}", "ablation", table)


def write_comparison(root: Path, *seeds: float) -> None:
    table = mock.comparison({("satformer", "transformer"): seeds})
    save(root, "", "comparison", table, {"noise_floor": 0.01})


def make_run(root: Path) -> Path:
    """A small study of two arms; satformer's second seed lacks what was planned for it."""
    arms = {
        "transformer": {"variant": "transformer", "analyses": ["evaluation"]},
        "satformer": {
            "variant": "satformer",
            "analyses": ["evaluation", "sparsity", "categories", "ablation"],
        },
        "rd": {"variant": "rd-attnres", "analyses": ["divergence"]},
    }
    recipe = {"name": "t", "title": f"A study {EVIL}", "corpus": "sotu", "vocab_size": 2048}
    recipe |= {"seeds": 1, "arms": arms, "train": {"tokens": 614_400, "lr": 0.003}}
    root.mkdir(parents=True)
    (root / "plan.json").write_text(json.dumps({"asked": {}, "recipe": recipe}))
    for arm in ("transformer", "satformer"):
        save(root, f"{arm}-seed0", "evaluation", *mock.evaluation())
    gates, cells = mock.gates(4, 2), mock.gate_cells(4, 2)
    save(root, "satformer-seed0", "sparsity", gates, mock.gate_summary(gates))
    evil = mock.categories(cells).replace({"category": {"structural": EVIL}})
    delta = mock.np.linspace(-0.2, 0.2, len(cells))
    part = Result("categories_contrasts", mock.contrasts(cells, delta, delta))
    tagger = {"tagger": "wordlist 1"}
    save(root, "satformer-seed0", "categories", evil, tagger, parts=(part,))
    write_ablation(root, 0.08)
    write_comparison(root, -0.047, -0.045)
    save(root, "", "curves", mock.curves(("transformer", "satformer")), keys=("seed", "tokens"))
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    root = make_run(tmp_path_factory.mktemp("study") / "run")
    build_report(root)
    return root


@pytest.fixture(scope="module")
def page(run) -> str:
    return (run / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def text_of(root: Path) -> str:
    """The page's words, without markup and pictures."""
    page = build_report(root).read_text(encoding="utf-8")
    page = re.sub(r"data:image/png;base64,[^\"]*|<(style|script)[ >].*?</\1>", "", page, flags=re.S)
    text = html.unescape(re.sub(r"<[^>]*>", " ", page)).replace("\N{NO-BREAK SPACE}", " ")
    return re.sub(r"\s+", " ", text)


class Checker(HTMLParser):
    """Collects tags, attributes, ids and any tag that is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.attributes: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    return checker


def test_the_page_is_well_formed_with_unique_ids_and_links_that_lead_somewhere(run, page) -> None:
    checker = checked(page)
    assert page.startswith("<!doctype html>")
    assert (checker.open, checker.faults) == ([], [])
    ids = [attrs["id"] for _, attrs in checker.attributes if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in checker.attributes:
        for name in ("href", "aria-labelledby"):
            target = attrs.get(name)
            if target is None:
                continue
            if name == "aria-labelledby" or target.startswith("#"):
                assert target.removeprefix("#") in ids, (tag, target)
            else:
                assert (run / target).exists(), target


def test_the_page_loads_nothing(page) -> None:
    checker = checked(page)
    tags = {tag for tag, _ in checker.attributes}
    assert not tags & {"link", "iframe", "object", "embed", "base", "form"}
    for _, attrs in checker.attributes:
        for name in ("src", "srcset", "href", "data", "action"):
            value = attrs.get(name) or ""
            assert not re.match(r"(https?:)?//", value)
        assert not any(name.startswith("on") or name == "style" for name in attrs)
    unpacked = re.sub(r'class="packed">[^<]*<', "", page)
    assert not re.search(r"url\(|@import|https?://", unpacked)
    images = [attrs for tag, attrs in checker.attributes if tag == "img"]
    assert len(images) == 5
    assert all(attrs["src"].startswith("data:image/png;base64,") for attrs in images)
    assert all(attrs["alt"] for attrs in images)


def test_names_from_documents_and_commands_are_escaped(page) -> None:
    assert EVIL not in page
    assert html.escape(EVIL, quote=False).replace("'", "&#39;") in page


def test_scrolling_regions_can_be_reached_and_have_names(page) -> None:
    regions = [attrs for _, attrs in checked(page).attributes if attrs.get("role") == "region"]
    assert regions
    assert all(attrs.get("tabindex") == "0" and attrs.get("aria-label") for attrs in regions)


def test_a_rebuild_gives_the_same_bytes(run, page) -> None:
    assert build_report(run).read_text(encoding="utf-8") == page


def test_the_page_says_what_was_run_and_what_was_found(page, run) -> None:
    text = text_of(run)
    assert "614,400 tokens an arm and seed" in text
    assert "satformer ends 0.046 nats/token below transformer (better)" in text
    assert "this is a direction, not a result" in text
    assert "setting every gate to zero raises the held-out NLL in the one seed measured" in text
    assert "Ablation damage is not usefulness" in text
    assert "A ReLU gate that was never trained is exactly zero half of the time" in text
    assert "Conclusions are about this genre" in text
    assert "No spaCy model was used" in text
    assert "ab" * 32 in text


def test_the_sentences_change_with_a_null_and_with_a_flipped_result(copy) -> None:
    write_comparison(copy, -0.08, -0.01)
    write_ablation(copy, 0.004)
    null = text_of(copy)
    assert "satformer against transformer: no difference is established" in null
    assert "no effect is established, every interval covers 0: seed 0: +0.004" in null
    assert "(better)" not in null
    assert "raises the held-out NLL" not in null

    write_comparison(copy, 0.047, 0.045)
    write_ablation(copy, -0.08)
    flipped = text_of(copy)
    assert "satformer ends 0.046 nats/token above transformer (worse)" in flipped
    assert "setting every gate to zero lowers the held-out NLL" in flipped
    assert "raises the held-out NLL" not in flipped


def test_seeds_that_contradict_each_other_are_said_to(copy) -> None:
    write_ablation(copy, -0.08, seed=1)
    assert "the seeds contradict each other" in text_of(copy)


def test_what_is_missing_or_damaged_is_named(copy) -> None:
    (copy / "results" / "satformer-seed0" / "sparsity.csv").write_text("truncated")
    (copy / "results" / "satformer-seed0" / "categories.json").unlink()
    text = text_of(copy)
    assert "Planned and not run: divergence of rd (seed 0)" in text
    assert "sparsity.csv: truncated or changed" in text
    assert str(copy) not in text
    assert "categories of satformer (seed 0)" in text
    assert "exactly zero in" not in text


def test_results_without_a_plan_are_reported_too(copy) -> None:
    (copy / "plan.json").unlink()
    text = text_of(copy)
    assert "satformer ends 0.046" in text
    assert "Planned and not run" not in text


def test_the_page_says_which_part_of_the_documents_was_read(copy) -> None:
    assert "measured of each document" not in text_of(copy)
    for name, first in (("evaluation", 2049), ("sparsity", 513), ("ablation", 129)):
        path = copy / "results" / "satformer-seed0" / f"{name}.json"
        record = json.loads(path.read_text())
        record["provenance"]["data"] = {"max_tokens_per_document": first}
        path.write_text(json.dumps(record))
    text = text_of(copy)
    assert (
        "measured of each document: evaluation the first 2,049 tokens, gates and routes the first "
        "513 tokens, ablation the first 129 tokens. Intervals of what" in text
    )
    assert "openings of documents" in text


def test_arms_of_signed_routes_are_reported_without_what_they_do_not_have(copy) -> None:
    weights = mock.signed_route_weights("states")
    parts = (Result("route_weights", weights, keys=("source_index",)),)
    summary = mock.signed_route_summary()
    save(copy, "mudd-seed0", "sparsity", mock.signed_routes(weights), summary, parts=parts)
    table = mock.effective_routes(roles="qkvr")
    reads = (Result("routes_reads", mock.effective_reads(table)),)
    summary = mock.effective_summary()
    save(copy, "mudd-seed0", "routes", table, summary, keys=("component_index",), parts=reads)
    text = text_of(copy)
    assert "Of what do reads consist?" in text
    assert "mudd (seed 0): by the norms of what components bring" in text
    assert "mudd (seed 0): the weights of 29 reads are signed" in text
    assert "mudd (seed 0): routes concentrate" not in text
    assert "Signed weights have no entropy" in text
    assert "routes reads of mudd, seed 0" in text.lower()


def test_few_clusters_are_said_to_be_few(copy) -> None:
    table, summary = mock.evaluation()
    clusters = {"nll_over_clusters": mock.cell(4.2, 0.05, "few"), "n_clusters": 12}
    save(copy, "satformer-seed0", "evaluation", table, {**summary, **clusters})
    text = text_of(copy)
    assert "clusters: few" in text
    assert "rest on 12 clusters, fewer than 30" in text


def test_the_noise_floor_is_that_of_the_comparison(copy) -> None:
    assert "Differences below about 0.01 nats/token" in text_of(copy)
    table = mock.comparison({("satformer", "transformer"): (-0.047, -0.045)})
    save(copy, "", "comparison", table, {"noise_floor": 0.06})
    text = text_of(copy)
    assert "Differences below about 0.06 nats/token" in text
    assert "no gain beyond the noise floor" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such run directory"),
        ({}, "holds neither plan.json nor results"),
        ({"plan.json": "{"}, "plan.json: not JSON"),
        ({"plan.json": "[]"}, "plan.json: field recipe is missing"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path, content, message) -> None:
    root = tmp_path / "run"
    if content is not None:
        root.mkdir()
        for name, text in content.items():
            (root / name).write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        build_report(root)
    assert "\n" not in str(caught.value)
    assert not (root / "report.html").exists()


DRAWN = "open_gates_by_depth"


def test_the_page_shows_drawn_figures_with_their_captions_and_files(copy):
    assert "Figures as the papers have them" not in text_of(copy)
    draw_figures(copy, only=[DRAWN])
    facts = json.loads((copy / FOLDER / f"{DRAWN}.json").read_text())
    text = text_of(copy)
    assert "Figures as the papers have them" in text
    assert facts["caption"] in text
    page = (copy / "report.html").read_text(encoding="utf-8")
    linked = set(re.findall(rf'href="({FOLDER}/[^"]+)"', page))
    assert linked == {f"{FOLDER}/{DRAWN}.{kind}" for kind in ("png", "pdf", "csv", "json")}
    assert all((copy / path).is_file() for path in linked)


def test_a_damaged_figure_is_named_and_the_page_stands(copy):
    draw_figures(copy, only=[DRAWN])
    (copy / FOLDER / f"{DRAWN}.json").write_text("{")
    text = text_of(copy)
    assert f"{FOLDER}/{DRAWN}" in text
    assert "Figures as the papers have them" not in text
