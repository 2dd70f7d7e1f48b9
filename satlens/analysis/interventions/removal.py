"""What a sublayer brings, taken out of what later ones read.

Every stream is linear in the outputs delta_m of its sublayers once its weights are fixed, so a read
is sum_m c_m delta_m with the effective routes c
(:meth:`satlens.models.block.DepthStream.unfold`), and without sublayer m it is
read - c_m delta_m: exact on any stream.

Shapes: B batch, T position, D model width.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from satlens.analysis.engine.stream import depth_of
from satlens.analysis.interventions.gates import HookFunction, Intervention
from satlens.analysis.interventions.running import Running
from satlens.errors import HookError
from satlens.hooks import ReadOnly
from satlens.models.decoder import Decoder
from satlens.models.decomposition import parts_of_read
from satlens.models.reads import Read, component_hooks, component_names, reads_of

_RESIDUAL_ROLE = "r"


@dataclass(frozen=True, kw_only=True)
class RemoveSublayer(Intervention):
    """Take the contribution of sublayers, or of the embedding, out of reads.

    Weights and outputs are those of the running pass, as all interventions leave them. What the
    sublayer brings to other reads stays. The read of role r, which continues the residual itself,
    is left out unless it is named: from there on every read would lose it too.
    """

    kind = "route"
    name = "remove"

    component: str | Sequence[str]
    """What is taken out: ``embed``, ``L0.attn``, ``L0.mlp``, ``L1.attn``, ..."""
    recorded: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)
    """Activations of :func:`removal_points` in an earlier pass over the same tokens, for what a
    pass that starts at a block border does not visit; read when the pass runs."""

    def reads(self, model: Decoder) -> list[Read]:
        """The reads it changes: those it names that can contain a component.

        Raises:
            HookError: a component, layer, role or sublayer that the model does not have; reads
                before the component; role r of several layers, which would lose it twice.
        """
        components = self._components(model)
        found = reads_of(model.hook_dict, model.cfg.n_layers)
        named = self.named(found, "read")
        if self.role is None:
            named = [read for read in named if read.role != _RESIDUAL_ROLE]
        changed = [read for read in named if min(components) < read.n_components]
        if not changed:
            raise HookError(
                f"RemoveSublayer: {self.component}: runs after every read that is named"
            )
        if len(changed) > 1 and any(read.role == _RESIDUAL_ROLE for read in changed):
            raise HookError(
                "RemoveSublayer: role 'r': it continues the residual, so later reads lose the "
                "component with it; name one layer and this role alone"
            )
        return changed

    def hooks(self, model: Decoder, running: Running) -> list[tuple[str, HookFunction]]:
        components = self._components(model)
        return self.identified(
            (
                read.hook,
                partial(
                    self._without,
                    read=read,
                    parts=[m for m in components if m < read.n_components],
                    model=model,
                    running=running,
                ),
            )
            for read in self.reads(model)
        )

    def looks(self, model: Decoder, running: Running) -> list[tuple[str, HookFunction]]:
        last = self.reads(model)[-1]
        look = ReadOnly(partial(_keep, running=running))
        points = self._needed(model, depth_of(model, last.hook), self._components(model))
        return [(point, look) for point in points]

    def _without(
        self,
        read_BTD: Tensor,
        hook: Any,
        *,
        read: Read,
        parts: list[int],
        model: Decoder,
        running: Running,
    ) -> Tensor:
        seen = {**(self.recorded or {}), **running.seen}
        # What its own block has was visited, up to the read.
        below = self._needed(model, depth_of(model, read.hook) - 1, parts)
        missing = [point for point in below if point not in seen]
        if missing:
            raise HookError(
                f"RemoveSublayer: this pass did not visit {', '.join(missing)}; give what an "
                "earlier one recorded there (recorded=)"
            )
        removed = parts_of_read(model, seen, read, parts, type(self).__name__)
        return read_BTD - removed.sum(0).to(read_BTD.dtype)

    def _needed(self, model: Decoder, depth: int, parts: list[int]) -> list[str]:
        """Hook points that parts of reads are made of, weights only of so many blocks."""
        weights = model.stream.unfolded_from(model.cfg)
        outputs = component_hooks(model.cfg.n_layers)
        return [
            *(point for point in weights if depth_of(model, point) <= depth),
            *(outputs[m] for m in parts),
        ]

    def _components(self, model: Decoder) -> list[int]:
        """Numbers of the components, ascending."""
        names = component_names(model.cfg.n_layers)
        given = [self.component] if isinstance(self.component, str) else list(self.component)
        if not given:
            raise HookError("RemoveSublayer: component: an empty list removes nothing")
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=3) or [names[0], names[-1]]
                raise HookError(
                    f"RemoveSublayer: component {name!r}: no such sublayer; "
                    f"did you mean {', '.join(near)}?"
                )
        return sorted({names.index(name) for name in given})


def removal_points(model: Decoder) -> list[str]:
    """Hook points whose activations a removal needs: the stream's weights and every component."""
    weights = model.stream.unfolded_from(model.cfg)
    return list(dict.fromkeys((*weights, *component_hooks(model.cfg.n_layers))))


def _keep(tensor: Tensor, hook: Any, *, running: Running) -> None:
    running.seen[hook.name] = tensor
