"""Charts of quality against speed, as SVG in the colours of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 440, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 18, 14, 44
_LEAST = 1e-7
"""Below this a divergence is rounding, and a logarithmic axis has to end somewhere."""
_DECADES = 4
"""Most of the axis of divergences: points further below are drawn at its end."""


@dataclass(frozen=True, slots=True)
class Point:
    """One variant: `x` times sooner, divergence `y` with the ends of its interval."""

    x: float
    y: float
    low: float
    high: float
    label: str
    """What stands beside the point; may be empty."""
    told: str
    """What is told when one points at it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The variants of one strategy, by budget. `colour`: a class number of the page's CSS."""

    colour: int
    points: Sequence[Point]


class _Scale:
    """A logarithmic axis: values from `low` to `high` on pixels from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high
        self._start, self._unit = start, (end - start) / math.log(high / low)

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        return self._start + math.log(value / self.low) * self._unit

    def ticks(self, steps: Sequence[float]) -> list[float]:
        """The multiples `steps` of every power of ten, as far as they are on the axis."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


def chart(curves: Sequence[Curve], floor: float | None, title: str) -> str:
    """An SVG element. `floor`: the divergence of computing the same prompt twice, if known."""
    points = [point for curve in curves for point in curve.points]
    x = _Scale(*_speeds(points), _LEFT, _WIDTH - _RIGHT)
    y = _Scale(*_divergences(points, floor), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="{escape(title)}">',
        *_axes(x, y),
    ]
    if floor is not None and floor > y.low:
        at = y(floor)
        parts.append(
            f'<line class="floor" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="note" x="{_LEFT + 6}" y="{at - 5:.1f}">'
            "the same prompt computed twice</text>"
        )
    for curve in curves:
        parts += _curve(curve, x, y)
    return "".join([*parts, "</svg>"])


def strip(value: float, low: float, high: float) -> str:
    """A divergence and its interval on a small axis of its own, the same for all: 1e-7 to 10."""
    x = _Scale(_LEAST, 10.0, 4, 156)
    ticks = "".join(
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="3" y2="17"/>'
        for tick in x.ticks((1,))
    )
    return (
        f'<svg class="strip" viewBox="0 0 160 20" aria-hidden="true">{ticks}<g class="s0">'
        f'<line class="whisker" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="10" y2="10"/>'
        f'<circle cx="{x(value):.1f}" cy="10" r="4"/></g></svg>'
    )


def _speeds(points: Sequence[Point]) -> tuple[float, float]:
    """From cold, or slower, to somewhat beyond the fastest, so that labels have room."""
    return min(1.0, *(point.x for point in points)), 1.5 * max(2.0, *(point.x for point in points))


def _divergences(points: Sequence[Point], floor: float | None) -> tuple[float, float]:
    """Whole powers of ten around what is drawn: two at least, and the uppermost few at most."""
    drawn = [value for point in points for value in (point.low, point.y, point.high)]
    drawn = [max(value, _LEAST) for value in [*drawn, *([] if floor is None else [floor])]]
    low, high = math.floor(math.log10(min(drawn))), math.ceil(math.log10(max(drawn) * 1.05))
    return 10.0 ** max(low, high - _DECADES), 10.0 ** max(high, low + 2)


def _axes(x: _Scale, y: _Scale) -> list[str]:
    parts = []
    for tick in y.ticks((1,)):
        at = y(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">'
            f"{_power(tick)}</text>"
        )
    base = _HEIGHT - _BOTTOM
    for tick in x.ticks((1, 2, 5)):
        at = x(tick)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{base}"/>'
            f'<text class="tick" x="{at:.1f}" y="{base + 17}" text-anchor="middle">'
            f"{tick:g}&times;</text>"
        )
    parts.append(
        f'<text class="axis" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}"'
        ' text-anchor="middle">first token sooner than cold →</text>'
        f'<text class="axis" transform="translate(14 {(_TOP + base) / 2}) rotate(-90)"'
        ' text-anchor="middle">← mean KL of the next token, nats</text>'
    )
    return parts


def _curve(curve: Curve, x: _Scale, y: _Scale) -> list[str]:
    places = [(x(point.x), y(point.y)) for point in curve.points]
    parts = [f'<g class="s{curve.colour}">']
    if len(places) > 1:
        line = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        parts.append(f'<polyline points="{line}"/>')
    for point, (left, top) in zip(curve.points, places, strict=True):
        parts.append(
            f'<g><title>{escape(point.told)}</title><line class="whisker" x1="{left:.1f}" '
            f'x2="{left:.1f}" y1="{y(point.low):.1f}" y2="{y(point.high):.1f}"/>'
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="5"/>'
            f'<text class="label" x="{left + 9:.1f}" y="{top + 4:.1f}">{escape(point.label)}</text>'
            "</g>"
        )
    return [*parts, "</g>"]


def _power(tick: float) -> str:
    """A power of ten as people write it: plain near 1, with an exponent far from it."""
    power = round(math.log10(tick))
    if power >= -3:
        return f"{tick:g}"
    return f'10<tspan dy="-5" font-size="9">&minus;{-power}</tspan>'
