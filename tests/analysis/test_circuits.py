"""What heads take from V_1, against straight-line computations in float64 and closed forms."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from planted import blank, documents

import satlens
from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.engine.stream import n_groups, run
from satlens.analysis.heads.attribution import HeadAttribution
from satlens.analysis.heads.induction import PatternScores, half_length, repeated
from satlens.analysis.heads.ov_circuits import circuit_of, first_values
from satlens.config import (
    AttnResStream,
    DeltaStream,
    DenseStream,
    GatedValueResidual,
    HyperStream,
    MuddStream,
    RoleDecoupledStream,
    StaticValueResidual,
)
from satlens.errors import AnalysisError

sys.path.append(str(Path(__file__).parents[1] / "models"))
from straight_line import evaluate as straight_line
from straight_line import random_model

FAST = {"n_resamples": 99, "n_induction": 9}
N_CTX, D_VOCAB = 16, 29
GATED, STATIC = GatedValueResidual(), StaticValueResidual(mode="constant", weights=(0.7, -0.4))
MODELS = {
    "satformer": {},
    "resformer": {"value_residual": STATIC},
    "sigmoid gates in the last layer": {
        "value_residual": GatedValueResidual(gate="sigmoid", last_k=1)
    },
    "learned static": {"value_residual": StaticValueResidual(mode="learnable_plus")},
    "rd-attnres": {"stream": RoleDecoupledStream(block_size=2), "value_residual": GATED},
    "attnres, static": {"stream": AttnResStream(block_size=1), "value_residual": STATIC},
    "delta": {"stream": DeltaStream(block_size=2), "value_residual": GATED},
    "muddformer": {"stream": MuddStream(), "value_residual": GATED},
    "muddformer, channel by channel": {
        "stream": MuddStream(pre_post_norm=True),
        "value_residual": GATED,
    },
    "hyperconnections": {"stream": HyperStream(n_streams=2), "value_residual": GATED},
    "denseformer": {"stream": DenseStream(), "value_residual": GATED},
    "a window and qk-norm": {"window_size": 3, "qk_norm": True},
}


def model_of(name, dtype=torch.float64, **fields):
    return random_model("satformer", dtype=dtype, n_ctx=N_CTX, **MODELS[name], **fields)


@pytest.fixture(scope="module")
def docs():
    return documents((20, 7, 33, 12, 16, 5, 18, 25, 9), d_vocab=D_VOCAB)


def windows_by_hand(docs):
    for number, document in enumerate(docs):
        for start in range(0, len(document.tokens) - 1, N_CTX):
            piece = torch.from_numpy(document.tokens[start : start + N_CTX + 1])
            yield number, piece[None, :-1], piece[1:]


# -- direct logit attribution ----------------------------------------------------------------------


def v_first_parts(model, cache, layer, head):
    """What one head's attention takes from V_1, in the model's width: loops, no linear algebra."""
    at = f"blocks.{layer}.attn.hook_"
    pattern, gate, v_first = (cache[at + name][0] for name in ("pattern", "v_gate", "v_first"))
    kv = head * model.cfg.n_key_value_heads // model.cfg.n_heads
    width = model.cfg.d_head
    columns = model.blocks[layer].attn.o.weight.detach()[:, head * width : (head + 1) * width]
    written = []
    for t in range(pattern.shape[1]):
        taken = torch.zeros(width, dtype=torch.float64)
        for s in range(t + 1):
            taken += pattern[head, t, s] * gate[s, kv] * v_first[s, kv]
        written.append(columns @ taken)
    return torch.stack(written)


def head_parts(model, cache, layer, head):
    width = model.cfg.d_head
    columns = model.blocks[layer].attn.o.weight.detach()[:, head * width : (head + 1) * width]
    return cache[f"blocks.{layer}.attn.hook_z"][0, :, head] @ columns.T


def without(model, tokens, cache, layer, parts):
    """Logits if a part of a layer's attention output never reached the end, for each part.

    Everything that was computed is held where it was: weights of reads, outputs of sublayers, the
    final scale. What is left is a linear map of the outputs, run by the model's own blocks.
    """
    target = f"blocks.{layer}.hook_attn_out"
    fixed = [*model.stream.unfolded_from(model.cfg), "ln_final.hook_scale"]
    fixed += [name for name in model.hook_dict if name.endswith(("hook_attn_out", "hook_mlp_out"))]

    def hold(tensor, hook):
        kept = cache[hook.name].expand_as(tensor).clone()
        return kept - parts if hook.name == target else kept

    with model.hooks([(name, hold) for name in dict.fromkeys(fixed)]):
        return model(tokens.expand(len(parts), -1))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_attribution_is_what_the_next_token_loses_without_the_part(name, docs):
    model, few = model_of(name), docs[1:3]
    cfg = model.cfg
    names = ("v_first", "rest")
    expected = {p + size: np.zeros((2, cfg.n_layers, 4)) for p in names for size in ("", "_size")}
    n = np.zeros(2)
    for number, tokens, targets in windows_by_hand(few):
        clean, cache = model.run_with_cache(tokens)
        n[number] += len(targets) - 1
        for layer in range(cfg.n_layers):
            whole = torch.stack([head_parts(model, cache, layer, head) for head in range(4)])
            first = torch.zeros_like(whole)
            if layer in cfg.value_layers:
                parts = [v_first_parts(model, cache, layer, head) for head in range(4)]
                first = torch.stack(parts)
            lost = clean - without(model, tokens, cache, layer, torch.cat((first, whole - first)))
            worth = lost[:, torch.arange(len(targets)), targets] - lost.mean(-1)
            for part, effect in zip(names, worth[:, 1:].numpy().reshape(2, 4, -1), strict=True):
                expected[part][number, layer] += effect.sum(-1)
                expected[f"{part}_size"][number, layer] += np.abs(effect).sum(-1)

    windows = open_windows(model, few, batch_size=3)
    found = HeadAttribution(model, n_groups(windows))
    run(model, windows, [found])
    assert found.sums["n"].tolist() == n.tolist()
    for part, sums in expected.items():
        np.testing.assert_allclose(
            found.sums[part], sums, rtol=1e-9, atol=1e-9 * np.abs(sums).max()
        )


@pytest.mark.parametrize("name", ["satformer", "attnres, static"])
@torch.no_grad()
def test_attribution_is_that_of_a_straight_line_model(name, docs):
    """Nothing of the package's arithmetic: the coefficient of a layer's output is 1, or is the
    weight of its block."""
    model, few = model_of(name), docs[:3]
    cfg = model.cfg
    assert name == "satformer" or cfg.stream.block_size == 1
    W_U = model.W_U.detach()
    attention = np.zeros(cfg.n_layers)
    total, n = 0.0, 0
    for _, tokens, targets in windows_by_hand(few):
        trace = straight_line(model, tokens)
        scale = trace.reads["hook_out_read"].pow(2).mean(-1, keepdim=True).add(cfg.norm_eps).sqrt()
        for layer in range(cfg.n_layers):
            out = trace.added[1 + 2 * layer]
            if name != "satformer":
                out = out * trace.routes["hook_route_out"][..., 1 + 2 * layer, None]
            logits = (out / scale * model.ln_final.weight @ W_U)[0, 1:]
            rows = torch.arange(len(logits))
            attention[layer] += float((logits[rows, targets[1:]] - logits.mean(-1)).sum())
        logits = trace.logits[0, 1:]
        total += float((logits[torch.arange(len(logits)), targets[1:]] - logits.mean(-1)).sum())
        n += len(logits)
    found = satlens.circuits(model, few, **FAST)
    by_layer = found.table.groupby("layer")[["dla_v_first", "dla_rest"]].sum().sum(axis=1)
    np.testing.assert_allclose(by_layer, attention / n, rtol=1e-9)
    assert found.summary["logit"]["total"]["estimate"] == pytest.approx(total / n, rel=1e-9)
    assert found.table["n_tokens"].unique().tolist() == [n]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_parts_of_the_logit_add_up(name, docs):
    """The components of the read, each pulled through the final norm, are the logits."""
    model, docs = model_of(name), docs[:4]
    found = satlens.circuits(model, docs, **FAST)
    logit = {part: cell["estimate"] for part, cell in found.summary["logit"].items()}
    table = found.table
    assert logit["v_first"] == pytest.approx(table["dla_v_first"].sum(), rel=1e-9)
    assert logit["rest_of_heads"] == pytest.approx(table["dla_rest"].sum(), rel=1e-9)

    others, n = 0.0, 0
    W_U = (model.W_U - model.W_U.mean(1, keepdim=True)).detach()
    for _, tokens, targets in windows_by_hand(docs):
        cache = model.run_with_cache(tokens)[1]
        parts, labels = cache.decompose_resid(apply_ln=True, return_labels=True)
        kept = [k for k, label in enumerate(labels) if not label.endswith("attn_out")]
        written = (parts[kept].sum(0)[0, 1:] * model.ln_final.weight) @ W_U
        others += float(written[torch.arange(len(written)), targets[1:]].sum())
        n += len(written)
    assert logit["embedding_and_mlps"] == pytest.approx(others / n, rel=1e-6)
    assert sum(logit.values()) - logit["total"] == pytest.approx(logit["total"], rel=1e-9)


def test_layers_without_v_first_have_gaps(docs):
    found = satlens.circuits(model_of("sigmoid gates in the last layer"), docs, **FAST)
    table = found.table.set_index("layer")
    own = ["dla_v_first", "share", "copying", "copying_eigenvalues"]
    assert table.loc[[0, 1], own].isna().all(axis=None)
    assert table.loc[2, own].notna().all(axis=None)
    assert table[["dla_rest", "induction", "previous_token"]].notna().all(axis=None)
    assert table.loc[[0, 1], "flags"].str.startswith("no_v_first").all()
    assert set(found.part("circuits_lens").table["layer"]) == {2}
    assert table.loc[2, "kv_head"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["rd-attnres", "resformer"])
def test_batches_do_not_change_the_table(name, docs):
    model = model_of(name, torch.float32)
    tables = [satlens.circuits(model, docs, batch_size=n, **FAST) for n in (1, 2, 8)]
    for other in tables[1:]:
        numbers = tables[0].table.select_dtypes("number")
        drawn = other.table.select_dtypes("number")
        np.testing.assert_allclose(drawn, numbers, rtol=1e-5, atol=1e-6)
    lens = [t.part("circuits_lens").table for t in tables]
    np.testing.assert_allclose(lens[1]["logit"], lens[0]["logit"], rtol=1e-5, atol=1e-6)


def test_closed_gates_leave_nothing_of_v_first(docs):
    model = model_of("rd-attnres")
    with satlens.intervene(model, satlens.ZeroGate()):
        found = satlens.circuits(model, docs, **FAST)
    mixing = found.table[found.table["layer"] > 0]
    assert (mixing[["dla_v_first", "share"]] == 0).all(axis=None)
    assert (mixing["induction_gate_effect"] == 0).all()
    assert (found.part("circuits_lens").table["logit"] == 0).all()


def test_a_hook_that_edits_a_read_is_refused(docs):
    model = model_of("satformer")
    with (
        model.hooks([("hook_out_read", lambda read, hook: 2 * read)]),
        pytest.raises(AnalysisError, match=r"hook_out_read: its components miss it by .* of its"),
    ):
        satlens.circuits(model, docs, **FAST)


def test_killed_passes_continue(docs, tmp_path):
    model, docs = model_of("rd-attnres", torch.float32), docs[:6]
    whole = satlens.circuits(model, docs, batch_size=1, **FAST)
    calls = []

    def stop(label, done, total):
        calls.append(label)
        if label == "circuits" and done == 7:
            raise KeyboardInterrupt

    options = {"batch_size": 1, "resume_dir": tmp_path, **FAST}
    with pytest.raises(KeyboardInterrupt):
        satlens.circuits(model, docs, progress=stop, **options)
    seen = []
    found = satlens.circuits(
        model, docs, progress=lambda label, done, total: seen.append((label, done)), **options
    )
    assert found.table.equals(whole.table)
    assert found.part("circuits_lens").table.equals(whole.part("circuits_lens").table)
    assert ("circuits", 1) not in seen


# -- planted circuits ------------------------------------------------------------------------------

GATE, OWN, WEIGHT = 0.8, 1.5, 2.0


@torch.no_grad()
def copier(sign=1.0):
    """Tokens are unit vectors; attention is uniform; V_1 is the token, and head 0 of layer 1 with a
    gate of GATE writes WEIGHT times it back, head 1 nothing. Logits read the token's own channel.
    """
    size = 8
    model = satlens.build(
        "resformer",
        n_layers=2,
        d_model=size,
        n_heads=2,
        d_head=size,
        d_vocab=size,
        n_ctx=16,
        norm_eps=0.0,
        tied_embeddings=False,
        dtype=torch.float64,
        value_residual=StaticValueResidual(mode="constant", weights=(GATE, OWN)),
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.zero_()
    unit = torch.eye(size, dtype=torch.float64)
    model.embed.weight.copy_(math.sqrt(size) * unit)
    model.unembed.weight.copy_(unit)
    model.blocks[0].attn.qkv.weight[4 * size : 5 * size] = unit / math.sqrt(size)
    model.blocks[1].attn.o.weight[:, :size] = sign * WEIGHT * unit
    return model


def copier_rows(docs, sign=1.0):
    """By hand, per scored token: V_1's logit of the next one, minus the mean; all channels."""
    size, values, written = 8, [], []
    for document in docs:
        for start in range(0, len(document.tokens) - 1, 16):
            piece = document.tokens[start : start + 17]
            for t in range(1, len(piece) - 1):
                seen = np.bincount(piece[: t + 1], minlength=size) / (t + 1)
                added = sign * WEIGHT * GATE * seen
                read = math.sqrt(size) * np.eye(size)[piece[t]] + added
                logits = added / np.sqrt((read**2).mean())
                values.append(logits[piece[t + 1]] - logits.mean())
                written.append(logits - logits.mean())
    return np.array(values), np.mean(written, axis=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_planted_copying_has_its_closed_form(sign):
    docs = documents((40, 23, 9, 31, 24, 12, 18, 17, 33, 28), d_vocab=8)
    found = satlens.circuits(copier(sign), docs, top_k=8, **FAST)
    table = found.table.set_index(["layer", "head"])
    values, logits = copier_rows(docs, sign)
    row = table.loc[1, 0]
    assert row["dla_v_first"] == pytest.approx(values.mean(), rel=1e-9)
    assert row["dla_v_first_low"] < row["dla_v_first"] < row["dla_v_first_high"]
    assert row["dla_rest"] == pytest.approx(0, abs=1e-12)
    assert row["share"] == pytest.approx(1, abs=1e-12)
    assert row["copying"] == (sign > 0)
    # One eigenvalue is 0: what all tokens' logits share is taken out.
    assert row["copying_eigenvalues"] == pytest.approx(sign, abs=1e-12)
    assert table.loc[1, 1][["dla_v_first", "dla_rest", "copying"]].tolist() == [0, 0, 0]
    assert np.isnan(table.loc[1, 1]["copying_eigenvalues"])
    assert np.isnan(table.loc[1, 1]["share"])

    lens = found.part("circuits_lens").table.query("head == 0")
    assert lens["token_id"].tolist() == np.argsort(-logits).tolist()
    np.testing.assert_allclose(lens["logit"], np.sort(logits)[::-1], rtol=1e-9)
    if sign > 0:
        pairs = found.part("circuits_pairs").table.query("head == 0")
        assert (pairs["source_id"] == pairs["output_id"]).all()
        np.testing.assert_allclose(pairs["effect"], WEIGHT * (1 - 1 / 8), rtol=1e-9)


@pytest.mark.parametrize("name", ["rd-attnres", "muddformer", "hyperconnections"])
@torch.no_grad()
def test_circuits_are_the_products_of_their_weights(name):
    model = model_of(name, n_layers=2)
    tokens = np.array([0, 2, 3, 7, 8, 11, 19, 28])
    values = first_values(model, tokens)
    # In any place of any context.
    cache = model.run_with_cache(torch.tensor([[5, 28, 3], [1, 1, 19]]))[1]
    for row, t, token in ((0, 1, 28), (0, 2, 3), (1, 2, 19)):
        torch.testing.assert_close(cache["hook_v_first"][row, t], values[list(tokens).index(token)])

    W_U = model.W_U.double() - model.W_U.double().mean(1, keepdim=True)
    for head in range(4):
        effect = np.array(
            [
                (v[head // 2] @ model.blocks[1].attn.W_O[head] * model.ln_final.weight @ W_U)
                .detach()
                .numpy()
                for v in values
            ]
        )[:, tokens]
        found = circuit_of(model, tokens, values, 1, head, 3)
        best = effect.argmax(1)
        assert found.copying == np.mean((best == np.arange(8)) & (effect.max(1) > 0))
        eigenvalues = np.linalg.eigvals(effect)
        share = eigenvalues.sum().real / np.abs(eigenvalues).sum()
        assert found.copying_eigenvalues == pytest.approx(share, abs=1e-9)
        order = np.argsort(-effect.max(1))[:3]
        assert found.sources.tolist() == tokens[order].tolist()
        assert found.outputs.tolist() == tokens[best[order]].tolist()
        np.testing.assert_allclose(found.values, effect.max(1)[order], rtol=1e-9)


# -- patterns --------------------------------------------------------------------------------------


@torch.no_grad()
def test_pattern_scores_are_those_of_the_pattern_entry_by_entry(docs):
    model, half = model_of("rd-attnres"), 6
    sequences = torch.from_numpy(repeated(np.arange(20), half, 5, seed=3))
    windows = open_windows(model, sequences, batch_size=2)
    found = PatternScores(model, half, 5)
    run(model, windows, [found])
    for number, sequence in enumerate(sequences):
        logits, cache = model.run_with_cache(sequence[None, :-1])
        assert sequence[:half].tolist() == sequence[half:].tolist()
        assert len(set(sequence[:half].tolist())) == half
        nll = torch.nn.functional.cross_entropy(logits[0, half:], sequence[half + 1 :])
        assert found.sums["nll"][number] == pytest.approx(float(nll), rel=1e-6)
        for layer in range(3):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0]
            for head in range(4):
                after, before = [], []
                for t in range(1, 2 * half - 1):
                    before.append(float(pattern[head, t, t - 1]))
                    if t >= half:
                        place = sequence[:half].tolist().index(int(sequence[t])) + 1
                        after.append(float(pattern[head, t, place]))
                scores = found.sums["scores"][number, :, layer, head]
                assert scores.tolist() == pytest.approx([np.mean(after), np.mean(before)], rel=1e-9)


def test_gate_effects_are_paired_and_absent_below_the_first_gate(docs):
    model = model_of("satformer")
    table = satlens.circuits(model, docs, **FAST).table
    for name in ("induction", "previous_token"):
        on, off, effect = (table[name + s] for s in ("", "_gates_off", "_gate_effect"))
        np.testing.assert_allclose(on - off, effect, atol=1e-12)
        assert (effect[table["layer"] < 2] == 0).all()
        assert (effect[table["layer"] == 2] != 0).all()
        assert (table[f"{name}_low"] <= on).all()
    with satlens.intervene(model, satlens.ZeroGate()):
        closed = satlens.circuits(model, docs, **FAST).table
    np.testing.assert_allclose(closed["induction"], table["induction_gates_off"], rtol=1e-12)


@torch.no_grad()
def test_uniform_attention_scores_what_the_summary_says(docs):
    model = blank("resformer", n_layers=2, d_model=8, n_heads=2, d_vocab=D_VOCAB, n_ctx=N_CTX)
    found = satlens.circuits(model, docs, **FAST)
    uniform = found.summary["repetition"]["uniform"]
    half = found.summary["repetition"]["n_tokens_repeated"]
    assert half == (N_CTX + 1) // 2
    assert uniform["induction"] == pytest.approx(
        np.mean([1 / (t + 1) for t in range(half, 2 * half - 1)])
    )
    for name, value in uniform.items():
        np.testing.assert_allclose(found.table[name], value, rtol=1e-6)
        assert found.table["flags"].str.contains("constant").all()


def test_sequences_fit_window_context_and_vocabulary():
    assert half_length(model_of("satformer"), 29) == 8
    assert half_length(model_of("satformer"), 5) == 5
    assert half_length(model_of("a window and qk-norm"), 29) == 3
    assert (repeated(np.arange(9), 4, 3, 0) == repeated(np.arange(9), 4, 3, 0)).all()
    assert (repeated(np.arange(9), 4, 3, 0) != repeated(np.arange(9), 4, 3, 1)).any()


# -- errors and files ------------------------------------------------------------------------------


def test_models_and_data_that_cannot_answer_are_refused(docs):
    with pytest.raises(AnalysisError, match="adds no V_1"):
        satlens.circuits(random_model("attnres"), docs)
    with pytest.raises(AnalysisError, match="room for 2"):
        satlens.circuits(random_model("satformer", n_ctx=4), docs)
    with pytest.raises(AnalysisError, match="n_induction: must be positive, got 0"):
        satlens.circuits(random_model("satformer"), docs, n_induction=0)
    with pytest.raises(AnalysisError, match="3 different tokens, got 2"):
        satlens.circuits(random_model("satformer"), torch.tensor([[1, 2, 1, 2, 1]]), **FAST)


def test_the_result_is_saved_whole(docs, tmp_path):
    found = satlens.circuits(model_of("rd-attnres", torch.float32), docs, **FAST)
    found.save(tmp_path, figures=False)
    assert len(found.figure().findobj(Axes)) >= 9
    loaded = satlens.Result.load(tmp_path, "circuits")
    assert loaded.table.equals(found.table)
    assert loaded.part("circuits_pairs").table.equals(found.part("circuits_pairs").table)
    assert found.summary["interval"]["covers"] == "this checkpoint, other documents"
    assert found.summary["repetition"]["interval"]["covers"].endswith("other random sequences")
