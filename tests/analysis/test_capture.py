"""What a pass captures: once for all reducers, without copies, and sparing what others read."""

from __future__ import annotations

import pytest
import torch
from planted import documents, tiny

from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.engine.stream import observe, run
from satlens.hooks import ReadOnly

ISOLATED = {
    "transformer": "blocks.1.hook_attn_read",
    "rd-attnres": "blocks.1.hook_attn_read_v",
    "muddformer": "blocks.1.hook_attn_read_k",
    "denseformer": "blocks.1.hook_mlp_read",
}


class Looking:
    """A reducer that keeps what it sees."""

    needs_nll = False

    def __init__(self, hooks):
        self.hooks, self.seen = hooks, []
        self.accumulators, self.identity = {}, {}

    def update(self, seen):
        self.seen.append(seen)


def test_what_two_reducers_ask_for_is_made_once():
    model, made = tiny("satformer"), []

    def norms(x):
        made.append(len(x))
        return torch.linalg.vector_norm(x, dim=-1)

    gate = "blocks.1.attn.hook_v_gate"
    first, second = Looking({gate: norms, "hook_embed": None}), Looking({gate: norms})
    other = Looking({gate: None})
    windows = open_windows(model, documents(d_vocab=32), batch_size=4)
    run(model, windows, [first, second, other])
    assert len(made) == len(windows)
    for a, b, c in zip(first.seen, second.seen, other.seen, strict=True):
        assert a.captured[gate] is b.captured[gate]
        assert torch.equal(a.captured[gate], norms(c.captured[gate]))
        assert a.once("key", lambda: [1]) is b.once("key", lambda: [2])
    assert first.seen[0].shared is not first.seen[1].shared


def test_alone_every_reducer_makes_its_own():
    model = tiny("satformer")
    looking = Looking({"hook_embed": None})
    run(model, open_windows(model, documents()[:1]), [looking])
    alone = looking.seen[0]._replace(shared=None)
    assert alone.once("key", lambda: [1]) is not alone.once("key", lambda: [1])


def test_observed_activations_can_be_cut_at_once():
    model = tiny("attnres")
    (batch, *_) = open_windows(model, documents(d_vocab=32))
    with torch.no_grad():
        whole = observe(model, batch, ["hook_embed", "hook_out_read"])
        cut = observe(model, batch, {"hook_embed": lambda x: x[:, 0], "hook_out_read": None})
    assert torch.equal(cut["hook_embed"], whole["hook_embed"][:, 0])
    assert torch.equal(cut["hook_out_read"], whole["hook_out_read"])


@torch.no_grad()
@pytest.mark.parametrize("name", ISOLATED)
def test_looking_beside_an_edit(name):
    """A look alone gets the tensor itself; beside an edit in place, the copy that is edited."""
    model, point = tiny(name), ISOLATED[name]
    tokens = torch.arange(12)[None] % 32
    clean = model(tokens)
    seen = []
    look = (point, ReadOnly(lambda x, hook: seen.append(x)))

    def edit(x, hook):
        x.mul_(0.5)

    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[look]), clean)
    edited = model.run_with_hooks(tokens, fwd_hooks=[(point, edit)])
    both = model.run_with_hooks(tokens, fwd_hooks=[(point, edit), look])
    assert torch.equal(both, edited)
    assert not torch.equal(edited, clean)
    assert torch.equal(seen[1], seen[0] * 0.5)


def test_gradients_of_a_look_are_those_of_one_reader():
    """In a graph a look still gets a copy: the stream itself has other readers."""
    model = tiny("transformer")
    seen = {}

    def keep(x, hook):
        seen[hook.name] = x

    points = ["blocks.1.hook_resid_pre", "blocks.1.hook_attn_read"]
    loss = model.run_with_hooks(
        torch.arange(12)[None] % 32,
        return_type="loss",
        fwd_hooks=[(point, ReadOnly(keep)) for point in points],
    )
    stream, read = torch.autograd.grad(loss, [seen[point] for point in points])
    assert not torch.allclose(stream, read)
