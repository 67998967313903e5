"""Draw the held-out accuracy of quickstart runs as an SVG: the README's picture is made by this.

python -m examples.quickstart.plot runs/quickstart/grpo runs/quickstart/grpo_shuffled --out curve.svg
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path

from examples.quickstart.run import accuracy

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 170, 24, 44
COLORS = ("#1f6feb", "#7d8590", "#6f42c1", "#1a7f37")
GRAY = "#7d8590"


def draw(curves: dict[str, list[tuple[int, float]]]) -> str:
    """Return an SVG with one line per entry: name -> [(rollout, accuracy between 0 and 1)]."""
    last = max(step for points in curves.values() for step, _ in points)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{GRAY}">',
        "<title>Held-out accuracy over GRPO rollouts</title>",
    ]
    for percent in (0, 25, 50, 75, 100):
        at = y(percent / 100)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="{GRAY}" stroke-opacity=".3"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{percent} %</text>')
    for step in range(0, last + 1, max(1, round(last / 5))):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{x(last / 2):.1f}" y="{HEIGHT - 6}" text-anchor="middle">GRPO rollouts</text>')
    for (name, points), color in zip(curves.items(), COLORS, strict=False):
        line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        step, value = points[-1]
        label = f"{html.escape(name)}: {value:.0%}"
        parts.append(f'<text x="{x(step) + 8:.1f}" y="{y(value) + 4:.1f}" fill="{color}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory of the GRPO stage")
    parser.add_argument("control", type=Path, help="run directory of the stage with shuffled rewards")
    parser.add_argument("--out", type=Path, required=True, help="the SVG to write")
    options = parser.parse_args()
    curves = {"reward": accuracy(options.run), "shuffled reward": accuracy(options.control)}
    options.out.write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
