"""The evaluation pass of a run: validation loss and the architecture's own signals.

Signals come from here and not from the training pass, whose hooks compilation would drop.
Everything is accumulated in fp64 on the device and read once, in a fixed order: the same weights
give the same numbers to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.config import ModelConfig, TrainConfig
from satlens.data.dataset import PreparedDataset
from satlens.data.windows import Batch, Windows, tokens_per_document
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """bf16 products over fp32 weights, or nothing under ``fp32``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def evaluation_slice(
    dataset: PreparedDataset, model_cfg: ModelConfig, train_cfg: TrainConfig
) -> Windows:
    """The fixed slice of the validation split: at most about ``eval_tokens`` targets.

    As many documents as give one full context each where they are long enough, chosen by the hash
    of their ids, all cut at one length. It depends on the data, ``n_ctx`` and
    ``eval_tokens`` alone, so paired runs score the same tokens.
    """
    documents = dataset.split("val").documents
    context = np.array([min(len(d.tokens) - 1, model_cfg.n_ctx) for d in documents])
    wanted = int(np.ceil(train_cfg.eval_tokens / max(float(context.mean()), 1.0)))

    def windows(chosen: list[Any], **limits: Any) -> Windows:
        return Windows(
            chosen,
            model_cfg.n_ctx,
            train_cfg.batch_size,
            dataset.special_ids,
            d_vocab=model_cfg.d_vocab,
            **limits,
        )

    chosen = windows(documents, max_documents=wanted).documents
    cap = tokens_per_document(chosen, train_cfg.eval_tokens)
    return windows(chosen, max_tokens_per_document=cap)


def evaluate(model: Decoder, windows: Windows, precision: str) -> dict[str, float]:
    """Mean loss in nats over the scored tokens, and the signals of every access site.

    Returns:
        ``val_loss`` and, by site name: for token-dependent gates ``open_fraction/<site>`` (share of
        head-tokens whose gate is not zero), ``gate_mean/<site>`` and ``dead_heads/<site>`` (heads
        that never open); for static ones ``lambda1/<site>`` and ``lambda2/<site>``; for reads of
        several sources ``route_entropy/<site>``, in nats. Special and padding tokens are left out.
    """
    device = model.device
    signals = Signals(model.sites)
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad(), model.hooks(fwd_hooks=signals.hooks()), autocast(device, precision):
        for batch in windows:
            signals.valid = batch.valid.to(device)
            total += _loss_sum(model, batch, device)
    return {"val_loss": total.item() / windows.n_tokens, **signals.read()}


def _loss_sum(model: Decoder, batch: Batch, device: torch.device) -> Tensor:
    loss = model(
        batch.tokens.to(device),
        return_type="loss",
        targets=batch.targets.to(device),
        loss_per_token=True,
    )
    return loss.sum(dtype=torch.float64)


class Signals:
    """Sums over valid tokens of what each access site shows; set ``valid`` before each pass."""

    def __init__(self, sites: list[AccessSite]) -> None:
        self.valid: Tensor
        self._sites = [s for s in sites if s.kind == "gate" or _is_choice(s)]
        self._sums: dict[str, Tensor] = {}
        self._static: dict[str, Tensor] = {}

    def hooks(self) -> list[tuple[str, Callable[..., None]]]:
        """Forward hooks to install around the passes; they change nothing."""
        found: list[tuple[str, Callable[..., None]]] = []
        for site in self._sites:
            if site.kind == "route":
                found.append((site.hook, self._summing(site, _entropies)))
            elif site.per_token:
                found.append((site.hook, self._summing(site, _openings)))
            else:
                scale = site.hook.removesuffix("_gate") + "_scale"
                found.append((site.hook, self._keeping(f"lambda1/{site.name}")))
                found.append((scale, self._keeping(f"lambda2/{site.name}")))
        return found

    def read(self) -> dict[str, float]:
        """The signals of all tokens seen."""
        out = {key: value.item() for key, value in self._static.items()}
        for site in self._sites:
            if site.name not in self._sums:
                continue
            sums = self._sums[site.name].cpu()
            if site.kind == "route":
                entropy, n_tokens = sums
                out[f"route_entropy/{site.name}"] = (entropy / n_tokens).item()
            else:
                opened, total, n_tokens = sums
                out[f"open_fraction/{site.name}"] = (opened / n_tokens).mean().item()
                out[f"gate_mean/{site.name}"] = (total / n_tokens).mean().item()
                out[f"dead_heads/{site.name}"] = int((opened == 0).sum())
        return out

    def _summing(self, site: AccessSite, of: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def add(tensor: Tensor, hook: Any) -> None:
            mine = of(tensor[self.valid]).sum(1)
            count = self.valid.sum().double().expand_as(mine[:1])
            sums = torch.cat((mine, count))
            self._sums[site.name] = (
                self._sums[site.name] + sums if site.name in self._sums else sums
            )

        return add

    def _keeping(self, key: str) -> Callable[..., None]:
        def keep(tensor: Tensor, hook: Any) -> None:
            # One number for all heads and tokens, shown as an expanded view.
            self._static[key] = tensor.flatten()[0].clone()

        return keep


def _is_choice(site: AccessSite) -> bool:
    """Whether a route distributes a token's mass over several sources."""
    return site.support == "simplex" and len(site.sources) > 1


def _openings(gates: Tensor) -> Tensor:
    """Valid gates (N, K) -> opened and value, (2, N, K) fp64."""
    return torch.stack(((gates != 0).double(), gates.double()))


def _entropies(weights: Tensor) -> Tensor:
    """Valid routes (N, n) -> entropy in nats, (1, N) fp64."""
    return torch.special.entr(weights.double()).sum(-1)[None]
