"""The evaluation pass of a run: validation loss and the architecture's own signals.

Signals come from here and not from the training pass, whose hooks compilation would drop.
Processes take turns at the batches. Each batch leaves its sums in fp64 on the device; they are
read once and added in the order of the batches: the same weights give the same numbers to the bit,
however many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from satlens.config import ModelConfig, TrainConfig
from satlens.data.dataset import PreparedDataset
from satlens.data.windows import Batch, Windows, tokens_per_document
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite
from satlens.processes import world
from satlens.training.distributed import gathered, settle


def autocast(
    device: torch.device, precision: str, model: nn.Module | None = None
) -> torch.autocast:
    """bf16 products over fp32 weights, or nothing under ``fp32``.

    Args:
        model: what runs inside. Where its weights are sharded (FSDP2), their bf16 copies are not
            kept until the end: all of them together would be a whole model.
    """
    kept = not isinstance(model, FSDPModule)
    enabled = precision == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=kept)


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
    device, (rank, size) = model.device, world()
    signals, found = Signals(model.sites), []
    with (
        torch.no_grad(),
        model.hooks(fwd_hooks=signals.hooks()),
        autocast(device, precision, model),
    ):
        # Under FSDP2 a pass needs everybody: who has no batch left repeats the last one, unread.
        for turn in range(0, len(windows), size):
            batch = windows[min(turn + rank, len(windows) - 1)]
            signals.valid = batch.valid.to(device)
            loss = _loss_sum(model, batch, device)
            found.append(torch.cat((loss[None], signals.take())))
    settle(model)
    rows = gathered(torch.stack(found)).transpose(0, 1).flatten(0, 1)[: len(windows)]
    loss, *sums = reduce(torch.add, rows).split([1, *signals.sizes])
    return {"val_loss": loss.item() / windows.n_tokens, **signals.read(sums)}


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
        self._shapes: dict[str, torch.Size] = {}
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

    def take(self) -> Tensor:
        """The sums of one pass, all sites one after another (n,) fp64."""
        found = {s.name: self._sums[s.name] for s in self._sites if s.name in self._sums}
        self._shapes = {name: sums.shape for name, sums in found.items()}
        empty = torch.empty(0, dtype=torch.float64, device=self.valid.device)
        return torch.cat([empty, *(sums.flatten() for sums in found.values())])

    @property
    def sizes(self) -> list[int]:
        """How :meth:`take` is cut into sites."""
        return [shape.numel() for shape in self._shapes.values()]

    def read(self, sums: Sequence[Tensor]) -> dict[str, float]:
        """The signals, given the sums of all passes on the CPU, cut into sites."""
        out = {key: value.item() for key, value in self._static.items()}
        kinds = {site.name: site.kind for site in self._sites}
        for (name, shape), flat in zip(self._shapes.items(), sums, strict=True):
            if kinds[name] == "route":
                entropy, n_tokens = flat.view(shape)
                out[f"route_entropy/{name}"] = (entropy / n_tokens).item()
            else:
                opened, total, n_tokens = flat.view(shape)
                out[f"open_fraction/{name}"] = (opened / n_tokens).mean().item()
                out[f"gate_mean/{name}"] = (total / n_tokens).mean().item()
                out[f"dead_heads/{name}"] = int((opened == 0).sum())
        return out

    def _summing(self, site: AccessSite, of: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def add(tensor: Tensor, hook: Any) -> None:
            mine = of(tensor[self.valid]).sum(1)
            count = self.valid.sum().double().expand_as(mine[:1])
            self._sums[site.name] = torch.cat((mine, count))

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
