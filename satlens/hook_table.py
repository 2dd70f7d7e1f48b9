"""Every hook point of every variant: its shape and its equation."""

from __future__ import annotations

import re

from satlens.errors import HookError

_TABLE: tuple[tuple[str, str, str], ...] = (
    (r"hook_embed", "B T D", "x_0 = W_E[token]"),
    (r"hook_v_first", "B T K E", "V_1 for all consumers"),
    (r"hook_resid_(pre|mid|post)", "B T D", "the residual stream before, inside, after the layer"),
    (r"hook_(attn|mlp|out)_read(_qk|_[qkvr])?", "B T D", "what the read delivers, un-normed"),
    (r"hook_(attn_out|mlp_out)", "B T D", "what the sublayer adds"),
    (r"(ln1(_[qkv])?|ln2|ln_final)\.hook_scale", "B T 1", "sqrt(mean(x^2) + eps)"),
    (r"(ln1(_[qkv])?|ln2|ln_final)\.hook_normalized", "B T D", "x / scale"),
    (r"attn\.hook_q", "B T H E", "W_q x, after qk-norm"),
    (r"attn\.hook_k", "B T K E", "W_k x, after qk-norm"),
    (r"attn\.hook_rot_q", "B T H E", "RoPE(q)"),
    (r"attn\.hook_rot_k", "B T K E", "RoPE(k)"),
    (r"attn\.hook_v", "B T K E", "V = W_v x, before mixing (layer 0: V_1)"),
    (r"attn\.hook_v_first", "B T K E", "V_1 as this layer receives it"),
    (r"attn\.hook_v_gate_pre", "B T K", "x W_alpha"),
    (r"attn\.hook_v_gate", "B T K", "weight of V_1: g(x W_alpha), or lambda1"),
    (r"attn\.hook_v_scale", "B T K", "weight of V: 1, or lambda2"),
    (r"attn\.hook_v_mixed", "B T K E", "V' = scale V + gate V_1"),
    (r"attn\.hook_attn_scores", "B H T T", "q k^T / sqrt(E) + mask"),
    (r"attn\.hook_pattern", "B H T T", "softmax(scores)"),
    (r"attn\.hook_z", "B T H E", "pattern V'"),
    (r"hook_route_(attn|qk|[qkvr]|mlp|out)", "B T n", "weights of the read's n sources"),
    (r"hook_route_depth", "B T n", "static weights of the n states summed after the layer"),
    (r"(depth|out)_read\.hook_pre_scale", "B T n", "sqrt(mean(x^2) + eps) of the read's n sources"),
    (r"(depth|out)_read\.hook_post_scale", "B T C", "the same of the C ways' mixtures"),
    (r"(attn|mlp)_hc\.hook_alpha", "B T n n+1", "A = S_A + s_a tanh(Norm(H) W_A)"),
    (r"(attn|mlp)_hc\.hook_beta", "B T n", "b = S_b + s_b tanh(Norm(H) w_b)"),
    (r"mlp\.hook_pre", "B T M", "W_gate y"),
    (r"mlp\.hook_pre_linear", "B T M", "W_up y"),
    (r"mlp\.hook_post", "B T M", "silu(W_gate y) * W_up y"),
    (r"hook_logits", "B T V", "W_U ln_final(x)"),
)


def describe_hook(name: str) -> tuple[str, str]:
    """(shape, equation) of a hook point. B batch, T position, D width, H heads, K KV heads, E head
    width, M MLP width, n sources, V vocabulary.

    Raises:
        HookError: the name is in no row of the table.
    """
    local = re.sub(r"^blocks\.\d+\.", "", name)
    for pattern, shape, equation in _TABLE:
        if re.fullmatch(pattern, local):
            return shape, equation
    raise HookError(f"{name}: this hook point is in no row of the hook table")
