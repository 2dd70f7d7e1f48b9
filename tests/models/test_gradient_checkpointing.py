"""Running blocks again in the backward pass changes memory and no gradient."""

from __future__ import annotations

import pytest
import torch
from straight_line import random_model, random_tokens

from satlens.analysis.efficiency import saved_bytes
from satlens.models.presets import VARIANTS


def gradients(model, **options):
    model.zero_grad()
    loss = model(random_tokens(), return_type="loss", **options)
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def count_runs(model, runs):
    """Counts each start of block 1; a second run stops at its last saved tensor."""
    return model.blocks[1].register_forward_pre_hook(lambda *args: runs.append(1))


@pytest.mark.parametrize("name", [*VARIANTS, "satformer on rd-attnres"])
def test_gradients_are_equal(name):
    residual, name = name.split(" on ") if " on " in name else (None, name)
    fields = {} if residual is None else {"value_residual": residual}
    model, runs = random_model(name, **fields).train(), []
    loss, expected = gradients(model)
    kept = saved_bytes(model, lambda: model(random_tokens(), return_type="loss"))
    model.gradient_checkpointing = True
    count_runs(model, runs)
    again, found = gradients(model)
    assert len(runs) == 2
    assert torch.equal(loss, again)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert torch.equal(found[parameter], gradient), parameter
    rerun = saved_bytes(model, lambda: model(random_tokens(), return_type="loss"))
    assert rerun < 0.7 * kept


def test_under_autocast():
    model = random_model("satformer", dtype=torch.float32).train()
    with torch.autocast("cpu", torch.bfloat16):
        _, expected = gradients(model)
        model.gradient_checkpointing = True
        _, found = gradients(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_only_while_training_and_not_through_hooks():
    model, runs = random_model("satformer").train(), []
    model.gradient_checkpointing = True
    handle = count_runs(model, runs)

    def double(tensor, hook):
        return tensor * 2

    with model.hooks([("blocks.1.attn.hook_v_gate", double)]):
        loss = model(random_tokens(), return_type="loss")
    loss.backward()  # the hook is gone, its effect is not
    found = {name: p.grad for name, p in model.named_parameters()}
    model.gradient_checkpointing = False
    with model.hooks([("blocks.1.attn.hook_v_gate", double)]):
        _, expected = gradients(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    model.gradient_checkpointing = True
    runs.clear()
    gradients(model.eval())
    with torch.no_grad():
        model.train()(random_tokens())
    assert len(runs) == 2
    handle.remove()
