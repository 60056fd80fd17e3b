"""Writes SVG: boxes, texts and a document, with short numbers.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape

CHARACTER = 0.58
"""Width of a character of the sans-serif font, as a share of the font's size."""
_DARK, _LIGHT = "#1c2733", "#ffffff"
_LEAST_TIP = 0.25  # pixels; thinner boxes get no tooltip, which keeps files small


class Box(NamedTuple):
    """A rectangle, in pixels."""

    x: float
    y: float
    width: float
    height: float


def document(width: float, height: float, body: Iterable[str]) -> str:
    """A whole SVG on white; `body` is its elements."""
    size = f'width="{px(width)}" height="{px(height)}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
        f' viewBox="0 0 {px(width)} {px(height)}" font-family="Helvetica, Arial, sans-serif">'
    )
    return "\n".join([head, f'<rect {size} fill="#ffffff"/>', *body, "</svg>", ""])


def rect(box: Box, fill: str, tip: str = "", opacity: float = 1.0) -> str:
    """A filled box; `tip` is its tooltip."""
    rounded = ' rx="2"' if min(box.width, box.height) > 8 else ""
    clear = f' fill-opacity="{opacity}"' if opacity < 1 else ""
    shape = (
        f'<rect x="{px(box.x)}" y="{px(box.y)}" width="{px(box.width)}"'
        f' height="{px(box.height)}" fill="{fill}"{rounded}{clear}'
    )
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def text(
    x: float,
    y: float,
    content: str,
    size: float,
    fill: str = _DARK,
    *,
    anchor: str = "start",
    weight: int = 400,
    seen_through: bool = False,
) -> str:
    """A line of text; with `seen_through` it does not catch the mouse."""
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    through = ' pointer-events="none"' if seen_through else ""
    printable = "".join(character for character in content if character.isprintable())
    return (
        f'<text x="{px(x)}" y="{px(y)}" font-size="{px(size)}" fill="{fill}"'
        f"{bold}{place}{through}>{escape(printable)}</text>"
    )


def labelled(box: Box, fill: str, label: str, tip: str) -> Iterator[str]:
    """A box with a tooltip, a little space around it, and its label if that fits."""
    drawn = shrunk(box)
    yield rect(drawn, fill, tip if box.width >= _LEAST_TIP else "")
    size = min(12.0, (drawn.width - 2) / (CHARACTER * len(label)), drawn.height - 1)
    if size >= 8:
        colour = _DARK if _luminance(fill) > 0.36 else _LIGHT
        x, y = drawn.x + drawn.width / 2, drawn.y + drawn.height / 2 + size * 0.36
        yield text(x, y, label, size, colour, anchor="middle", seen_through=True)


def shrunk(box: Box) -> Box:
    """The box without the space to the next one: a pixel, less for thin boxes."""
    width, height = (max(size - min(1.0, size / 6), 0.1) for size in (box.width, box.height))
    return box._replace(width=width, height=height)


def px(value: float) -> str:
    """A number of pixels, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _luminance(colour: str) -> float:
    """Relative luminance (WCAG 2, "relative luminance", with gamma 2.2)."""
    red, green, blue = ((int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
