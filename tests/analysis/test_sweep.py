"""How a sweep runs: from block borders, without what changes nothing, and on after a kill."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from planted import documents, gated, tags_of, tiny

from satlens.analysis.ablation import ablate
from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.sweeps.cases import sweep
from satlens.analysis.sweeps.kinds import kinds_of
from satlens.analysis.sweeps.measure import measure
from satlens.hooks import ReadOnly

FAST = {"n_resamples": 99}


@pytest.fixture(scope="module")
def docs():
    return documents(d_vocab=32)


def test_starting_at_a_border_changes_no_bit(docs):
    model = tiny("rd-attnres")
    cases = sweep(model, kinds_of(model, ("uniform", "mask"), {}), ("layer", "source"))
    whole = [replace(case, first_layer=0) for case in cases]
    windows = open_windows(model, docs)
    first, second = (measure(model, windows, some, {}) for some in (cases, whole))
    for name in ("nll", "dnll", "kl", "top1"):
        np.testing.assert_array_equal(first[name], second[name])


def test_the_idle_head_costs_exactly_nothing_and_is_not_run():
    model, seen = gated(), []
    table = ablate(model, documents(), kinds="zero", scope="head", **FAST).table
    idle = table[table["head"] == 1].iloc[0]
    for stat in ("dnll", "kl", "top1_change"):
        assert idle[stat] == idle[f"{stat}_low"] == idle[f"{stat}_high"] == 0
    assert idle["p"] == idle["p_adjusted"] == 1
    windows = open_windows(model, documents())
    cases = sweep(model, kinds_of(model, ("zero",), {}), ("head",))
    with model.hooks([("hook_logits", ReadOnly(lambda logits, hook: seen.append(0)))]):
        measure(model, windows, cases, {})
    assert len(cases) == 2
    assert len(seen) == 2 * len(windows)  # the clean pass and head 0


def test_a_killed_sweep_continues(docs, tmp_path):
    """The stored sums of another division into categories are not taken up."""
    model, tags = tiny("satformer"), tags_of(docs)
    options = {"kinds": "zero", "scope": "head", "resume_dir": tmp_path, **FAST}
    whole = ablate(model, docs, kinds="zero", scope="head", tags=tags, **FAST)

    def stop(label, done, total):
        if label == "ablation" and done == total - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ablate(model, docs, tags=tags, progress=stop, batch_size=2, **options)
    again = ablate(model, docs, tags=tags, batch_size=2, **options)
    plain = ablate(model, docs, kinds="zero", scope="head", tags=tags, batch_size=2, **FAST)
    for found, expected in ((again, plain), (again.parts[0], plain.parts[0])):
        pd.testing.assert_frame_equal(found.table, expected.table)
    pd.testing.assert_frame_equal(again.table, whole.table, rtol=1e-5, atol=1e-6)
    other = tags_of(docs, names=("functional", "semantic"))
    swapped = ablate(model, docs, tags=other, batch_size=2, **options).parts[0].table
    first = swapped[swapped["category"] == "functional"]["dnll"].to_numpy()
    second = plain.parts[0].table.query("category == 'semantic'")["dnll"].to_numpy()
    np.testing.assert_array_equal(first, second)
