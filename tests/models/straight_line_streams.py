"""The depth streams of the straight-line evaluation, written from the papers' equations.

A stream knows the embedding and the outputs of all sublayers so far, and answers what the next
sublayer reads, before its norm. Weights come by name from a state dict in float64.
"""

from __future__ import annotations

import math

import torch


def rms(x, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def block_sums(embedding, outputs, size):
    """Sources of a read after these sublayers: the embedding, then sums of ``size`` outputs."""
    starts = range(0, len(outputs), size)
    return [embedding, *(sum(outputs[s : s + size]) for s in starts)]


def mixture(weights, sources):
    return sum(weights[..., i : i + 1] * s for i, s in enumerate(sources))


class Residual:
    """The residual stream; base of the others."""

    def __init__(self, cfg, W, embedding):
        self.cfg, self.W = cfg, W
        self.embedding, self.outputs = embedding, []
        self.routes, self.reads = {}, {}

    def attention_norms(self, layer):
        """Names of the norms of the queries', keys' and values' reads."""
        return ("ln1",) * 3

    def attention_reads(self, layer):
        """What queries, keys and values of a layer are computed from."""
        self.reads[f"blocks.{layer}.hook_attn_read"] = x = self.read_attention(layer)
        return x, x, x

    def mlp_read(self, layer):
        self.reads[f"blocks.{layer}.hook_mlp_read"] = x = self.read_mlp(layer)
        return x

    def output_read(self):
        self.reads["hook_out_read"] = x = self.read_output()
        return x

    def add(self, y):
        """A sublayer's output."""
        self.outputs.append(y)

    def read_attention(self, layer):
        return self.embedding + sum(self.outputs)

    read_mlp = read_attention

    def read_output(self):
        return self.embedding + sum(self.outputs)


# -- softmax over block sums -----------------------------------------------------------------------


class AttnRes(Residual):
    def softmax(self, at, role="shared"):
        """Weights (B, T, n) of one role of a read, and its sources."""
        cfg, W = self.cfg, self.W
        sources = block_sums(self.embedding, self.outputs, cfg.stream.block_size)
        query = W[at + ("query_v" if role == "v" else "query")]
        own = role == "v" and getattr(cfg.stream, "own_value_gamma", False)
        gamma = W[at + ("gamma_v" if own else "gamma")]
        keys = [rms(s, cfg.norm_eps) * gamma for s in sources]
        scores = torch.stack([key @ query for key in keys], -1)
        if at + "bias" in W:
            scores = scores + W[at + "bias"][1 if role == "v" else 0]
        return scores.softmax(-1), sources

    def mixed(self, at, hook):
        self.routes[hook], sources = self.softmax(at)
        return mixture(self.routes[hook], sources)

    def read_attention(self, layer):
        return self.mixed(f"blocks.{layer}.attn_read.", f"blocks.{layer}.hook_route_attn")

    def read_mlp(self, layer):
        return self.mixed(f"blocks.{layer}.mlp_read.", f"blocks.{layer}.hook_route_mlp")

    def read_output(self):
        if not self.cfg.stream.output_read:
            return super().read_output()
        return self.mixed("out_read.", "hook_route_out")


class RoleDecoupled(AttnRes):
    def attention_reads(self, layer):
        at, control = f"blocks.{layer}.", self.cfg.stream.control
        (qk, sources), (v, _) = (self.softmax(at + "attn_read.", role) for role in ("qk", "v"))
        if control == "tied":
            v = qk
        elif control == "frozen_v":
            v = torch.full_like(v, 1 / len(sources))
        x_qk, x_v = mixture(qk, sources), mixture(v, sources)
        if control == "average":
            x_qk = x_v = (x_qk + x_v) / 2
            qk = v = (qk + v) / 2
        self.routes |= {at + "hook_route_qk": qk, at + "hook_route_v": v}
        self.reads |= {at + "hook_attn_read_qk": x_qk, at + "hook_attn_read_v": x_v}
        return x_qk, x_qk, x_v


class Delta(AttnRes):
    """h~ + sum_i a_i s_i, h~ the residual stream; the final norm receives h~."""

    def mixed(self, at, hook):
        return self.embedding + sum(self.outputs) + super().mixed(at, hook)

    def read_output(self):
        return self.embedding + sum(self.outputs)


# -- weights over states after layers --------------------------------------------------------------


class Dense(Residual):
    """X_i = Block_i(Y_{i-1}); Y_i a static mixture of the X_j with j = i mod k, every p blocks."""

    def __init__(self, cfg, W, embedding):
        super().__init__(cfg, W, embedding)
        self.X, self.Y = [embedding], embedding

    def inside(self):
        """The residual stream within the current block."""
        return self.Y + sum(self.outputs[2 * (len(self.X) - 1) :])

    def add(self, y):
        super().add(y)
        if len(self.outputs) % 2 == 0:
            self.X.append(self.Y + self.outputs[-2] + y)
            self.Y = self.average(len(self.X) - 1)

    def average(self, i):
        k, p = self.cfg.stream.dilation, self.cfg.stream.period
        if i % p:
            return self.X[i]
        a = self.W[f"blocks.{i - 1}.depth_weights"]
        taken = [j for j in range(i + 1) if (i - j) % k == 0]
        assert a.shape == (len(taken),)
        shape = (*self.embedding.shape[:2], len(taken))
        self.routes[f"blocks.{i - 1}.hook_route_depth"] = a.expand(shape)
        return sum(weight * self.X[j] for weight, j in zip(a, taken, strict=True))

    def read_attention(self, layer):
        return self.inside()

    read_mlp = read_attention

    def read_output(self):
        return self.Y


class Mudd(Residual):
    """Four ways of one set of per-token weights over the embedding and all block outputs."""

    def __init__(self, cfg, W, embedding):
        super().__init__(cfg, W, embedding)
        self.X = [embedding]

    def attention_norms(self, layer):
        if layer == 0 and self.cfg.stream.shared_first_norm:
            return ("ln1",) * 3
        return "ln1_q", "ln1_k", "ln1_v"

    def ways(self, at, names):
        """(route, read) by way, from the newest state."""
        W, eps, newest, n = self.W, self.cfg.norm_eps, self.X[-1], len(self.X)
        z = rms(newest, eps) @ W[at + "w1.weight"].T
        z = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        dw = z @ W[at + "w2.weight"].T + W[at + "static"].flatten()
        found = {}
        for c, name in enumerate(names):
            weights = dw[..., c * n : (c + 1) * n]
            if self.cfg.stream.pre_post_norm:
                normed = [rms(x, eps) * W[at + "pre"][j] for j, x in enumerate(self.X)]
                x = newest + rms(mixture(weights, normed), eps) * W[at + "post"][c]
            else:
                x = mixture(weights, self.X)
            found[name] = weights, x
        return found

    def attention_reads(self, layer):
        at = f"blocks.{layer}."
        if layer == 0:
            reads = dict.fromkeys("qkvr", self.embedding)
        else:
            ways = self.ways(at + "depth_read.", "qkvr")
            self.routes |= {at + f"hook_route_{c}": weights for c, (weights, _) in ways.items()}
            reads = {c: x for c, (_, x) in ways.items()}
        self.reads |= {at + f"hook_attn_read_{c}": x for c, x in reads.items()}
        self.inside = reads["r"]
        return reads["q"], reads["k"], reads["v"]

    def add(self, y):
        super().add(y)
        self.inside = self.inside + y
        if len(self.outputs) % 2 == 0:
            self.X.append(self.inside)

    def read_mlp(self, layer):
        return self.inside

    def read_output(self):
        self.routes["hook_route_out"], x = self.ways("out_read.", "r")["r"]
        return x


# -- parallel streams ------------------------------------------------------------------------------


class Hyper(Residual):
    """n streams H (a list): A mixes them, b says how much of an output each receives."""

    def __init__(self, cfg, W, embedding):
        super().__init__(cfg, W, embedding)
        self.H = [embedding] * cfg.stream.n_streams

    def norm(self, at, h):
        if self.cfg.stream.norm == "rms":
            return rms(h, torch.finfo(torch.float32).eps) * self.W[at + "norm.weight"]
        centred = h - h.mean(-1, keepdim=True)
        return rms(centred, 1e-5) * self.W[at + "norm.weight"] + self.W[at + "norm.bias"]

    def matrices(self, at):
        """A (B, T, n, n + 1) and b (B, T, n) of a sublayer."""
        W, config, rows = self.W, self.cfg.stream, self.embedding.shape[:2]
        A = W[at + "static_alpha"].expand(*rows, -1, -1)
        b = W[at + "static_beta"].expand(*rows, -1)
        if config.dynamic:
            normed = torch.stack([self.norm(at, h) for h in self.H], 2)
            squash = torch.tanh if config.tanh else lambda z: z
            A = A + W[at + "alpha_scale"] * squash(normed @ W[at + "dynamic_alpha"])
            b = b + W[at + "beta_scale"] * squash(normed @ W[at + "dynamic_beta"])
        return A, b

    def connected(self, layer, sublayer):
        at = f"blocks.{layer}."
        A, self.b = self.matrices(f"{at}{sublayer}_hc.")
        self.routes[f"{at}hook_route_{sublayer}"] = A[..., 0]
        self.routes |= {
            f"{at}{sublayer}_hc.hook_alpha": A,
            f"{at}{sublayer}_hc.hook_beta": self.b,
        }
        x, *self.H = (mixture(A[..., m], self.H) for m in range(A.shape[-1]))
        return x

    def add(self, y):
        super().add(y)
        self.H = [h + self.b[..., i : i + 1] * y for i, h in enumerate(self.H)]

    def read_attention(self, layer):
        return self.connected(layer, "attn")

    def read_mlp(self, layer):
        return self.connected(layer, "mlp")

    def read_output(self):
        return sum(self.H)


STREAMS = {
    "residual": Residual,
    "attnres": AttnRes,
    "rd_attnres": RoleDecoupled,
    "delta": Delta,
    "dense": Dense,
    "mudd": Mudd,
    "hyper": Hyper,
}
