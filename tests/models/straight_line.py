"""A straight-line evaluation of architectures as their papers state them, in float64.

Nothing here is shared with the implementation: heads are looped over, positions are rotated as
complex numbers, every read recomputes its sources from the list of all sublayer outputs. The depth
streams are in ``straight_line_streams.py``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from straight_line_streams import STREAMS, rms

import satlens


def random_model(name, seed=0, dtype=torch.float64, **fields):
    """A small model whose every parameter differs from its start, GQA included."""
    defaults = {
        "n_layers": 3,
        "d_model": 16,
        "n_heads": 4,
        "n_key_value_heads": 2,
        "d_mlp": 24,
        "d_vocab": 29,
        "n_ctx": 32,
    }
    model = satlens.build(name, seed=seed, dtype=dtype, **{**defaults, **fields})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(dtype), alpha=0.3)
    return model


def random_tokens(rows=2, length=9, vocab=29, seed=1):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


class Trace(NamedTuple):
    """What a straight-line pass leaves behind; dictionaries are keyed by hook point."""

    logits: torch.Tensor
    routes: dict[str, torch.Tensor]
    gates: dict[str, torch.Tensor]
    reads: dict[str, torch.Tensor]
    added: list[torch.Tensor]
    """The embedding and the output of each sublayer, (B, T, D) each."""


def rotate(x, theta):
    """x (B, T, E): entries i and i + E/2 are one complex number, turned by t theta^(-2i/E)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((turned.real, turned.imag), -1)


def visible(cfg, length, documents):
    """(B or 1, T, T): the keys each query attends to, pair by pair."""
    rows = [None] if documents is None else documents.tolist()
    table = torch.zeros(len(rows), length, length, dtype=torch.bool)
    for b, ids in enumerate(rows):
        for i in range(length):
            for j in range(i + 1):
                near = cfg.window_size is None or i - j < cfg.window_size
                table[b, i, j] = near and (ids is None or ids[i] == ids[j])
    return table


def attend(cfg, W, at, x_q, x_v, mix, mask, x_k=None):
    """One attention sublayer; ``mix`` turns the layer's values (B, T, K, E) into V'.

    Keys read what queries read unless ``x_k`` is given.
    """
    x_k = x_q if x_k is None else x_k
    H, K, E = cfg.n_heads, cfg.n_key_value_heads, cfg.d_head
    weight = W[at + "qkv.weight"]
    bias = W.get(at + "qkv.bias", torch.zeros(weight.shape[0], dtype=torch.float64))
    q = (x_q @ weight[: H * E].T + bias[: H * E]).unflatten(-1, (H, E))
    k = (x_k @ weight[H * E : (H + K) * E].T + bias[H * E : (H + K) * E]).unflatten(-1, (K, E))
    v = (x_v @ weight[(H + K) * E :].T + bias[(H + K) * E :]).unflatten(-1, (K, E))
    if cfg.qk_norm:
        q = rms(q, cfg.qk_norm_eps) * W[at + "q_norm.weight"]
        k = rms(k, cfg.qk_norm_eps) * W[at + "k_norm.weight"]
    mixed = mix(v)
    heads = []
    for h in range(H):
        kv = h // (H // K)
        turned_q = rotate(q[:, :, h], cfg.rope_theta)
        scores = turned_q @ rotate(k[:, :, kv], cfg.rope_theta).transpose(1, 2) / math.sqrt(E)
        heads.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ mixed[:, :, kv])
    return torch.cat(heads, -1) @ W[at + "o.weight"].T, v


def feed_forward(W, at, y):
    if at + "down.weight" not in W:
        return torch.zeros_like(y)
    gate, up = (y @ W[at + "gate_up.weight"].T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ W[at + "down.weight"].T


def gate_function(name, z):
    K = z.shape[-1]
    soft = z.exp() / z.exp().sum(-1, keepdim=True) * K
    sigmoid = 1 / (1 + (-z).exp())
    return {
        "relu": z.clamp(min=0),
        "sigmoid": sigmoid,
        "softmax": soft,
        "softmax_sigmoid": soft * sigmoid,
        "tanh": z.tanh(),
        "identity": z,
    }[name]


def mix_rule(cfg, W, layer, x_v, v_first, gates):
    """V -> V' of one layer (architectures: ResFormer's five modes, SATFormer's six gates)."""
    residual = cfg.value_residual
    if layer not in cfg.value_layers:
        return lambda v: v
    at = f"blocks.{layer}.attn.values."
    if residual.kind == "gated":
        z = x_v @ W[at + "alpha.weight"].T + W.get(at + "alpha.bias", 0)
        gates[f"blocks.{layer}.attn.hook_v_gate"] = alpha = gate_function(residual.gate, z)
        return lambda v: v + alpha[..., None] * v_first
    if residual.mode == "learnable_plus":
        z = W["shared_lambda.logits"]
        first = W["shared_lambda.scale"] * z.exp()[layer - 1] / z.exp().sum()
        second = W[at + "lambda2"]
    elif residual.mode == "learnable":
        first, second = W[at + "lambda1"], W[at + "lambda2"]
    else:
        first, second = (0.5, 0.5) if residual.mode == "identity" else residual.weights
    return lambda v: first * v_first + second * v


def evaluate(model, tokens, documents=None) -> Trace:
    """Logits, routes, gates and reads of any model."""
    weights = {k: v.detach().double() for k, v in model.state_dict().items()}
    return evaluate_weights(model.cfg, weights, tokens, documents)


def evaluate_weights(cfg, W, tokens, documents=None) -> Trace:
    """The same of weights in float64 by name, with their gradients."""
    embedding, v_first, gates = W["embed.weight"][tokens], None, {}
    stream = STREAMS[cfg.stream.kind](cfg, W, embedding)
    mask = visible(cfg, tokens.shape[1], documents)

    def norm(name, x):
        return rms(x, cfg.norm_eps) * W[name + ".weight"]

    for layer in range(cfg.n_layers):
        at = f"blocks.{layer}."
        pairs = zip(stream.attention_norms(layer), stream.attention_reads(layer), strict=True)
        x_q, x_k, x_v = (norm(at + name, x) for name, x in pairs)
        mix = mix_rule(cfg, W, layer, x_v, v_first, gates)
        out, v = attend(cfg, W, at + "attn.", x_q, x_v, mix, mask, x_k)
        stream.add(out)
        v_first = v if layer == 0 else v_first
        stream.add(feed_forward(W, at + "mlp.", norm(at + "ln2", stream.mlp_read(layer))))
    last = norm("ln_final", stream.output_read())
    logits = last @ W.get("unembed.weight", W["embed.weight"]).T
    return Trace(logits, stream.routes, gates, stream.reads, [embedding, *stream.outputs])
