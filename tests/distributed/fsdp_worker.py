"""One rank of the FSDP2 check: gradients of sharded models against unsharded ones, in float64.

    python fsdp_worker.py RANK WORLD_SIZE STORE_FILE VARIANT...  (STREAM+VALUES composes two)

Prints, on rank 0, a line of JSON a variant: the largest difference of any gradient, relative to
that gradient's largest element, without and with activation checkpointing.
"""

from __future__ import annotations

import copy
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import satlens

ROWS, LENGTH, VOCAB = 4, 12, 37


def sharded(model, checkpointing):
    """A copy of a model with every block, and what is left, as FSDP units."""
    model = copy.deepcopy(model)
    model.gradient_checkpointing = checkpointing
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def gradients(model, tokens):
    """Gradients of the mean loss; checkpointed blocks are seen to run once more, backward."""
    runs = []
    model.blocks[0].mlp.register_forward_pre_hook(lambda *_: runs.append(None))
    model.train()
    model(tokens, "loss").backward()
    assert len(runs) == 1 + model.gradient_checkpointing
    return {name: p.grad for name, p in model.named_parameters()}


def difference(expected, found):
    """Largest difference between gradients, each in units of its largest element."""
    worst = 0.0
    for name, grad in expected.items():
        assert (grad is None) == (found[name] is None), name
        if grad is not None and grad.numel():
            whole = found[name].full_tensor()
            scale = grad.abs().max().clamp_min(1e-6)
            worst = max(worst, float((whole - grad).abs().max() / scale))
    return worst


def check(variant, rank, world_size):
    sizes = {"n_layers": 3, "d_model": 32, "n_heads": 4, "n_key_value_heads": 2, "d_mlp": 48}
    name, _, values = variant.partition("+")
    parts = {"value_residual": values} if values else {}
    model = satlens.build(name, d_vocab=VOCAB, n_ctx=LENGTH, dtype=torch.float64, **sizes, **parts)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # away from the start, where many gradients vanish
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise, alpha=0.1)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    expected = gradients(copy.deepcopy(model), tokens)
    mine = tokens.chunk(world_size)[rank]
    return [difference(expected, gradients(sharded(model, on), mine)) for on in (False, True)]


def main(rank, world_size, store, variants):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for variant in variants:
        plain, checkpointed = check(variant, rank, world_size)
        if rank == 0:
            print(json.dumps([variant, plain, checkpointed]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
