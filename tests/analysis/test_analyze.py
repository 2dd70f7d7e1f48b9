"""One pass for several analyses: the tables of each alone, for the forwards of one."""

from __future__ import annotations

import pytest
from planted import documents, tags_of, tiny

import satlens
from satlens.analysis.engine.inputs import open_windows
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder

FAST = {"n_resamples": 99}
ALONE = {
    "sparsity": satlens.sparsity,
    "routes": satlens.routes,
    "categories": satlens.categories,
    "divergence": satlens.divergence,
    "evaluation": satlens.evaluate,
}
BOTH = {"value_residual": "satformer"}


@pytest.fixture(scope="module")
def docs():
    return documents(d_vocab=32)


def tables(result):
    return {r.name: r.table for r in (result, *result.parts)}


def same(first, second):
    return first.keys() == second.keys() and all(first[k].equals(second[k]) for k in first)


@pytest.fixture
def forwards(monkeypatch):
    """How many times a model ran, and to which layer."""
    calls = []
    plain = Decoder.forward

    def counted(self, *arguments, **options):
        calls.append(options.get("stop_at_layer"))
        return plain(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "forward", counted)
    return calls


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (tiny("rd-attnres", **BOTH), tuple(ALONE)),
        (tiny("muddformer-prepost"), ("routes", "sparsity")),
        (tiny("resformer"), ("sparsity", "routes", "evaluation")),
    ],
    ids=["gates and routes", "signed routes", "static gates"],
)
def test_every_table_is_that_of_the_analysis_alone(docs, model, names):
    own = {"categories": {"tags": tags_of(docs)}, "sparsity": {"thresholds": (0.2, 0.3)}}
    own = {name: options for name, options in own.items() if name in names}
    results = satlens.analyze(model, docs, names, options=own, **FAST)
    assert list(results) == list(names)
    for name, result in results.items():
        alone = ALONE[name](model, docs, **own.get(name, {}), **FAST)
        assert same(tables(result), tables(alone)), name
        assert result.summary == alone.summary
        assert result.notes == alone.notes
        assert result.provenance == alone.provenance


def test_one_forward_a_batch_feeds_all_of_them(docs, forwards):
    model = tiny("rd-attnres", **BOTH)
    n_batches = len(open_windows(model, docs))
    names = ("sparsity", "routes", "divergence")
    satlens.analyze(model, docs, names, **FAST)
    assert len(forwards) == 2 * n_batches  # the untrained model's beside the checkpoint's
    forwards.clear()
    satlens.analyze(model, docs, names, baseline=False, **FAST)
    assert len(forwards) == n_batches


def test_logits_are_computed_for_losses_alone_and_layers_up_to_the_last_hook(docs, forwards):
    model = tiny("satformer", n_layers=4, last_k=2)
    ran = []
    for name in ("blocks.3.hook_mlp_out", "hook_logits"):
        model.add_hook(name, lambda x, hook: ran.append(hook.name))
    satlens.analyze(model, docs, ("sparsity", "routes"), baseline=False, **FAST)
    assert set(ran) == {"blocks.3.hook_mlp_out"}
    ran.clear()
    satlens.analyze(model, docs, ("sparsity", "evaluation"), baseline=False, **FAST)
    assert set(ran) == {"blocks.3.hook_mlp_out", "hook_logits"}
    forwards.clear()
    rd = tiny("rd-attnres")
    satlens.analyze(rd, docs, ("divergence", "sparsity"), baseline=False, **FAST)
    assert set(forwards) == {rd.cfg.n_layers}  # its last read follows the blocks


def test_what_a_model_or_the_data_lack_is_left_out_with_the_reason(docs, caplog):
    results = satlens.analyze(tiny("transformer"), docs, baseline=False, **FAST)
    assert list(results) == ["routes"]
    reasons = [record.getMessage() for record in caplog.records]
    assert all(reason.startswith("left out: ") for reason in reasons)
    for name in ("sparsity", "categories", "divergence"):
        assert sum(reason.startswith(f"left out: {name}: ") for reason in reasons) == 1
    caplog.clear()
    gates = satlens.analyze(tiny("satformer"), docs, baseline=False, **FAST)
    assert list(gates) == ["sparsity", "routes"]
    assert "categories: tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("model", "names", "options", "message"),
    [
        ("transformer", ("sparsity",), {}, "sparsity: this model .* has no access sites"),
        ("satformer", ("divergence",), {}, "divergence: this model .* has no routes"),
        ("satformer", ("categories",), {}, "categories: tokenizer"),
        ("satformer", ("sparsty",), {}, "'sparsty' is not one of sparsity, routes"),
        ("satformer", (), {}, "one or more names"),
        ("satformer", ("sparsity", "sparsity"), {}, "each once"),
        ("satformer", ("sparsity",), {"routes": {}}, "options: routes: not among"),
        ("satformer", ("sparsity",), {"sparsity": {"limit": 1}}, "sparsity.limit: unknown"),
    ],
)
def test_errors_name_what_is_wrong(docs, model, names, options, message):
    with pytest.raises(AnalysisError, match=message):
        satlens.analyze(tiny(model), docs, names, options=options, **FAST)


class KilledError(Exception):
    """Stands for a signal in the middle of a pass."""


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_killed_in_either_pass_it_resumes_to_the_same_bits(docs, share, tmp_path):
    """At 0.3 in the checkpoint's pass, at 0.6 in the untrained model's."""
    model, names = tiny("rd-attnres", **BOTH), ("sparsity", "routes", "divergence")

    def analysed(progress=None, resume_dir=None):
        options = {**FAST, "batch_size": 1, "progress": progress, "resume_dir": resume_dir}
        return satlens.analyze(model, docs, names, **options)

    steps = []
    expected = analysed(lambda *step: steps.append(step))
    assert {label for label, _, _ in steps} == {"analyze", "analyze-init"}
    in_all = sum(done > 0 for _, done, _ in steps)
    ran = 0

    def kill(label, done, total):
        nonlocal ran
        ran += done > 0
        if ran == int(share * in_all):
            raise KilledError

    with pytest.raises(KilledError):
        analysed(kill, tmp_path)
    after = []
    resumed = analysed(lambda *step: after.append(step), tmp_path)
    for name in names:
        assert same(tables(resumed[name]), tables(expected[name]))
    starts = {label: done for label, done, _ in reversed(after)}
    repeated = sum(done > starts[label] for label, done, _ in after) + ran - in_all
    assert repeated <= 0.1 * in_all
    again = []
    analysed(lambda *step: again.append(step), tmp_path)
    assert all(done == total for _, done, total in again)
