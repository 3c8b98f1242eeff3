"""What colours look like, for all eyes."""

from __future__ import annotations

EYES = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "without L cones": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "without M cones": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))}
"""What linear sRGB becomes: G. M. Machado, M. M. Oliveira and L. A. F. Fernandes, "A Physiologically-based Model for Simulation
of Color Vision Deficiency", IEEE TVCG 15(6), 2009, severity 1."""

_CONES = ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
          (0.0883024619, 0.2817188376, 0.6299787005))
_LAB = ((0.2104542553, 0.7936177850, -0.0040720468), (1.9779984951, -2.4285922050, 0.4505937099),
        (0.0259040371, 0.7827717662, -0.8086757660))

Three = tuple[float, float, float]


def linear(colour: str) -> Three:
    """Linear sRGB of "#rrggbb"; WCAG 2.2, relative luminance."""
    red, green, blue = (int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5))
    return _linear(red), _linear(green), _linear(blue)


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)


def oklab(colour: str, eyes: tuple[Three, Three, Three]) -> Three:
    """As those eyes see it: B. Ottosson, "A perceptual color space for image processing", 2020."""
    seen = [min(max(part, 0.0), 1.0) for part in _times(eyes, linear(colour))]
    red, green, blue = _times(_CONES, (seen[0], seen[1], seen[2]))
    return _times(_LAB, (red ** (1 / 3), green ** (1 / 3), blue ** (1 / 3)))


def _times(matrix: tuple[Three, Three, Three], vector: Three) -> Three:
    one, two, three = (sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)
    return one, two, three
