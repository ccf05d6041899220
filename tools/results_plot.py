"""Charts as SVG files without a library: readable in light and dark, with a text for those who cannot see them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 760, 150, 60, 14, 10, 44
_SHADES = ("#4477aa", "#88bbdd", "#cc6677", "#ddaa99")  # told apart by people who see colours differently
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.l{stroke:#999;stroke-dasharray:3 3}.e{stroke:#222}"
    "@media (prefers-color-scheme:dark){text{fill:#ddd}.e{stroke:#ddd}}"
)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A value with its standard error (0: none known)."""

    value: float
    error: float = 0.0


def bars(title: str, groups: Sequence[str], series: Mapping[str, Sequence[Bar | None]]) -> str:
    """Horizontal bars: `groups` down the page, one bar of each series in every group; a line at 1.

    Args:
        title: also the accessible name. series: by name, a bar for each group or None.
    """
    height = _BAR * len(series) + _GAP
    known = [bar for row in series.values() for bar in row if bar is not None]
    scale = (_WIDTH - _LEFT - _RIGHT) / max([1.0, *(bar.value + bar.error for bar in known)])
    parts = [_text(_LEFT, 16, title)]
    for place, name in enumerate(series):
        parts.append(
            _rect(_LEFT + place * 145, 24, 10, 10, place) + _text(_LEFT + place * 145 + 14, 33, name)
        )
    for row, group in enumerate(groups):
        top = _TOP + row * height
        parts.append(_text(_LEFT - 8, top + height / 2, group, anchor="end"))
        for place, values in enumerate(series.values()):
            bar = values[row]
            if bar is not None:
                parts.append(_drawn(bar, top + place * _BAR, scale, place))
    bottom = _TOP + len(groups) * height
    at_one = _LEFT + scale
    parts.append(f'<line class="l" x1="{at_one:.1f}" x2="{at_one:.1f}" y1="{_TOP - 4}" y2="{bottom}"/>')
    return _svg(title, bottom + 8, parts)


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Lines on logarithmic axes that begin at (1, 1), and beside them, dashed, growth in proportion.

    Args:
        title: also the accessible name. series: by name, points (x, y), both at least 1.
    """
    most = max([2.0, *(value for points in series.values() for point in points for value in point)])
    octaves = math.ceil(math.log2(most))
    step = (_WIDTH - _LEFT - _RIGHT) / octaves
    height = step * octaves / 2
    bottom = _TOP + height

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + math.log2(x) * step, bottom - math.log2(max(y, 1.0)) * step / 2

    parts = [_text(_LEFT, 16, title)]
    for octave in range(octaves + 1):
        x, y = at(2**octave, 2**octave)
        parts.append(_text(x, bottom + 16, f"x{2**octave}", anchor="middle"))
        parts.append(_text(_LEFT - 8, y + 4, f"x{2**octave}", anchor="end"))
    (x1, y1), (x2, y2) = at(1, 1), at(2**octaves, 2**octaves)
    parts.append(f'<line class="l" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    for place, (name, points) in enumerate(series.items()):
        shade = _SHADES[place % len(_SHADES)]
        drawn = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{shade}" stroke-width="2"/>')
        parts += [_dot(*at(x, y), shade) for x, y in points]
        parts.append(
            _rect(_LEFT + place * 190, 24, 10, 10, place) + _text(_LEFT + place * 190 + 14, 33, name)
        )
    return _svg(title, bottom + 24, parts)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title, quote=True)}"><style>{_STYLE}</style>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _dot(x: float, y: float, shade: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{shade}"/>'


def _drawn(bar: Bar, top: float, scale: float, place: int) -> str:
    end, middle = _LEFT + bar.value * scale, top + _BAR / 2
    drawn = _rect(_LEFT, top, bar.value * scale, _BAR - 2, place)
    reach = bar.error * scale
    if reach:
        drawn += f'<line class="e" x1="{end - reach:.1f}" x2="{end + reach:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
    return drawn + _text(end + reach + 4, middle + 4, f"{bar.value:.3f}")


def _rect(x: float, y: float, width: float, height: float, place: int) -> str:
    shade = _SHADES[place % len(_SHADES)]
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{shade}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
