"""Headless Chromium, which tells what a page looks like: it loads pages from a folder, with no network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=5000",
         "--window-size=1400,1000")

SCHEMES = {"light": 1, "dark": 0}
"""Values of Blink's preferredColorScheme."""

FRAME = """<!DOCTYPE html><html><head><meta charset="utf-8"><meta name="color-scheme" content="light dark"></head><body>
<iframe width="{width}" height="900" srcdoc="{page}"></iframe><pre id="seen"></pre>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument, view = frame.contentWindow, style = node => view.getComputedStyle(node);
  const shown = kind => [...page.querySelectorAll("div." + kind)].filter(node => node.offsetParent !== null).length;
  document.getElementById("seen").textContent = JSON.stringify({{
    width: page.documentElement.clientWidth, content: page.documentElement.scrollWidth,
    background: style(page.body).backgroundColor, ink: style(page.body).color,
    wide: shown("wide"), narrow: shown("narrow"), point: style(page.querySelector("figure text")).fill,
    outside: [...page.querySelectorAll("figure svg")].filter(node => node.clientWidth > page.body.clientWidth).length}});
}};
</script></body></html>"""
"""A page in a frame as wide as a device, which may be narrower than Chromium's window can be."""


@cache
def _program() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@cache
def has_chromium() -> bool:
    """Whether there is one that starts: a package may be the stub of another, or half-installed."""
    program = _program()
    try:
        return program is not None and subprocess.run([program, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@dataclass(frozen=True, slots=True)
class Seen:
    """What a page looked like.

    Attributes:
        values: widths, colours and counts, as FRAME names them.
        console: what the browser's console said.
    """

    values: dict[str, Any]
    console: list[str]


def print_out(page: Path, folder: Path) -> int:
    """How many sheets of paper a page takes."""
    program = _program()
    assert program is not None
    paper = folder / "paper.pdf"
    subprocess.run([program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--no-pdf-header-footer", f"--print-to-pdf={paper}",
                    page.as_uri()], capture_output=True, timeout=300, check=True)
    return len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes()))


def look(page: Path, width: int, scheme: str, folder: Path) -> Seen:
    """Loads a page as on a device so wide, in CSS pixels, of a reader who prefers that scheme."""
    program = _program()
    assert program is not None
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width, page=html.escape(page.read_text(encoding="utf-8"))), encoding="utf-8")
    done = subprocess.run(
        [program, *FLAGS, f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--user-data-dir={folder / 'profile'}",
         "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None and found[1], done.stderr
    return Seen(json.loads(html.unescape(found[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line])
