"""What the browser tests look at: documents that try a page, models, results and their pages."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import mock_tables as mock
import mock_tasks
import numpy as np
import pandas as pd

import satlens
from satlens.analysis.result import Result

SCRIPT = "<script>window.ran = 1</script>"
HOSTILE = {
    "markup": f"He said {SCRIPT} and </script></style><script>ran = 2</script> <!-- then & ]]>.",
    "handlers": 'An <img src=x onerror="ran = 3"> and \'"><svg onload=ran=4> &lt;b&gt; {{ 7*7 }}',
    "emoji": "Two 👩\u200d👩\u200d👧\u200d👦 families 🇺🇳 and 👍🏽 waved, naïve café Ångström.",
    "right to left": "The word שלום means peace and السلام عليكم greets, he wrote (אבג) twice.",
    "zero width": "soft\u00adhyphen, zero\u200bwidth\u200djoin\ufeffmark \u202eturn\u202c end",
    "lines": "First line\nsecond line\n\n\tafter a blank one\u2028separator  two spaces\r\nlast",
}
PLAIN = set(string.ascii_letters + string.digits + string.punctuation + " ")
"""Characters that a page shows as they are."""
INTERVENTIONS = {
    "satformer": "zero-gate:layer=5",
    "attnres": "uniform-route:layer=3",
    "rd-attnres": "tie-value-route:layer=3",
}
"""One an architecture that has what it changes."""


def zoo_names() -> list[str]:
    """Architectures of the zoo."""
    from satlens.checkpoints.zoo import zoo_names

    return [name.removeprefix("tiny/") for name in zoo_names()]


def documents() -> list[str]:
    return list(HOSTILE.values())


def token_result(name: str) -> Result:
    """The token view of a zoo model over the documents above."""
    model = satlens.load(f"tiny/{name}")
    chosen = [INTERVENTIONS[name]] if name in INTERVENTIONS else []
    return satlens.token_view(model, documents(), interventions=chosen, tagger="wordlist")


def zoo_folder(name: str, folder: Path) -> Path:
    """A plain folder of results of one zoo model."""
    token_result(name).save(folder, figures=False)
    model = satlens.load(f"tiny/{name}")
    satlens.evaluate(model, documents(), n_resamples=100).save(folder, figures=False)
    return folder


def spelled_result() -> Result:
    """A made-up view of the documents above; a token is a word with the space before it."""
    texts = tuple(tuple(re.findall(r"\n| ?[^ \n]+| ", text)) for text in documents())
    single = tuple("\u200b \u00ad \ufeff \u202e \u2066 \u0000 \u0301 \ufffd \u00a0 \t".split(" "))
    return mock_tasks.token_result((*texts, single), n_layers=3, n_heads=2)


def large_result(n_tokens: int = 2000) -> Result:
    """A token view of 2,000 tokens of a random model with 8 layers of 32 heads."""
    model = satlens.build(
        "satformer", n_layers=8, n_heads=32, n_key_value_heads=32, d_model=128, d_head=4, d_mlp=128,
        n_ctx=256, d_vocab=2048,
    )  # fmt: skip
    model.tokenizer = satlens.load("tiny/satformer").tokenizer
    model.eval()
    text = " ".join(documents())
    return satlens.token_view(
        model,
        [" ".join([text] * 12), text],
        max_tokens=n_tokens,
        interventions=["zero-gate:layer=5"],
        tagger="wordlist",
    )


def study_folder(folder: Path) -> Path:
    """A study whose tables are large, wide, and full of names that try the page."""
    analyses = ["evaluation", "sparsity", "categories", "token_view", "tasks"]
    arms = {
        "transformer": {"variant": "transformer", "analyses": ["evaluation"]},
        "satformer": {"variant": "satformer", "analyses": analyses},
    }
    recipe = {"name": "t", "title": f"A study {SCRIPT}", "corpus": "sotu", "vocab_size": 2048}
    recipe |= {"seeds": 1, "arms": arms, "train": {"tokens": 614_400, "lr": 0.003}}
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"asked": {}, "recipe": recipe}))
    cells = mock.gate_cells(4, 2)
    for arm in arms:
        _save(folder, f"{arm}-seed0", "evaluation", *mock.evaluation())
    gates = mock.gates(4, 2)
    _save(folder, "satformer-seed0", "sparsity", gates, mock.gate_summary(gates))
    named = mock.categories(cells).replace({"category": {"structural": SCRIPT}})
    delta = np.linspace(-0.2, 0.2, len(cells))
    part = Result("categories_contrasts", mock.contrasts(cells, delta, delta))
    tagger = {"tagger": "wordlist 1"}
    _save(folder, "satformer-seed0", "categories", named, tagger, parts=(part,))
    for result in (spelled_result(), mock_tasks.task_result()):
        result.save(folder / "results" / "satformer-seed0", figures=False)
    pairs = {("satformer", "transformer"): (-0.047, -0.045)}
    _save(folder, "", "comparison", mock.comparison(pairs), {"noise_floor": 0.01})
    curves = mock.curves(("transformer", "satformer"))
    _save(folder, "", "curves", curves, keys=("seed", "tokens"))
    return folder


def _save(root: Path, where: str, name: str, table, summary=None, **options) -> None:
    facts = {"checkpoint": {"sha256": "ab" * 32}, "command": f"satlens {SCRIPT}"}
    folder = root / "results" / where if where else root / "results"
    Result(name, table, facts, summary or {}, **options).save(folder, figures=False)


def hard_to_sort() -> Result:
    """A table whose columns only sort right as numbers, or only as text."""
    values = [9.0, 10.0, -0.5, 1e-7, float("nan"), 2.00000001, 2.0, -1e6]
    table = pd.DataFrame(
        {
            "name": ["b", "a", "10", "9", SCRIPT, "é", "=1+1", 'with "quotes", commas'],
            "value": values,
            "share": np.linspace(0.123451, 0.123452, len(values))[::-1],
            "count": [3, 1, 2, 30, 100, 20, 7, 8],
            "sure": [True, False] * 4,
        }
    )
    return Result("sortable", table.assign(n_documents=1, n_tokens=1, flags=""))


def table_page(result: Result, path: Path) -> Path:
    """A page of one table, unfolded."""
    from markupsafe import Markup

    from satlens.report.page.document import document
    from satlens.report.page.layout import Part, part_html
    from satlens.report.page.tables import result_table

    table = part_html(Part(tables=[result_table(result, "A table", opened=True)]))
    body = Markup("<main id='main' tabindex='-1'>{}</main>").format(table)
    path.write_text(document(f"Tables {SCRIPT}", body), encoding="utf-8")
    return path


def report_page(folders: Path | list[Path], out: Path | None = None) -> Path:
    """The report of a folder, or of several side by side."""
    from satlens.report import build_report

    return build_report(folders, out)
