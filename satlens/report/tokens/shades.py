"""Fills behind text: shades of an amount, of a signed number and of kinds, for light and dark.

Text keeps a contrast of at least 4.5 on each of them (WCAG 2.2, 1.4.3): black stands on the light
shades, white on the dark ones, and no shade comes near the grey that is hard for both.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.colors import LinearSegmentedColormap, to_hex

AMOUNTS = 16
"""Shades of an amount, from little to much."""
SIGNED = 17
"""Shades of a signed number; the one in the middle is for numbers near zero."""

INK = ("#000000", "#ffffff")
"""Text on the light fills and on the dark ones."""
_AMOUNT = (("#f1f4c3", "#7fcdbb", "#41a0d0"), ("#23303a", "#155a63", "#1c6cae"))
_SIGNED = (("#5aa7e0", "#f1f0ec", "#f2984c"), ("#1c6cae", "#2b3036", "#a8520f"))
_KINDS = (
    ("#9ccbeb", "#f6bf87", "#9adcc4", "#cfd4d8", "#e9b5d3", "#f2dd82", "#c3b8ee"),
    ("#1b5c8c", "#8a4a12", "#11664d", "#49525a", "#82406b", "#6b5a05", "#57489b"),
)
KINDS = len(_KINDS[0])
"""Fills of kinds; further kinds start again with the first."""

Fill = tuple[str, str]
"""Colour in light and in dark."""


def fills() -> dict[str, Fill]:
    """Every fill by the name of its class: ``a0`` .. for amounts, ``s0`` .., and ``k0`` .."""
    named = {"a": _steps(_AMOUNT, AMOUNTS), "s": _steps(_SIGNED, SIGNED)}
    named["k"] = list(zip(*_KINDS, strict=True))
    return {f"{letter}{k}": fill for letter, all_ in named.items() for k, fill in enumerate(all_)}


def _steps(anchors: Sequence[Sequence[str]], count: int) -> list[Fill]:
    """Evenly spaced colours along the anchors of each scheme."""
    light, dark = (LinearSegmentedColormap.from_list("shades", list(a)) for a in anchors)
    return [(to_hex(light(k / (count - 1))), to_hex(dark(k / (count - 1)))) for k in range(count)]


def fill_styles(prefix: str) -> str:
    """A CSS rule a fill, for classes that begin with ``prefix``."""
    ink = f"color:light-dark({INK[0]},{INK[1]})"
    rules = (
        f".{prefix}{name}{{background-color:light-dark({light},{dark});{ink}}}"
        for name, (light, dark) in fills().items()
    )
    return "\n".join(rules) + "\n"
