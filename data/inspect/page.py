"""The page of `forge-data inspect`: one HTML file with everything in it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO

import numpy as np
from PIL import Image

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1100px;padding:0 1em;color:#1d2330}
h1{font-size:1.5em;margin:0}h2{font-size:1.15em;margin:2em 0 .5em;border-bottom:1px solid #d5d9e2}
table{border-collapse:collapse;font-size:13px}td,th{padding:2px 10px 2px 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}th{color:#667}.bad{color:#b3261e}.mute{color:#667}
svg{margin:0 8px 8px 0}svg text{font-size:9.5px;fill:#667}svg .title{font-size:11px;fill:#1d2330}
svg .end{text-anchor:end}
.band{fill:#c9d8f2}.line{fill:none;stroke:#24509c;stroke-width:1.4}.one{fill:none;stroke:#e08a1e;stroke-width:1}
.bar{fill:#7c9bd0}figure{margin:0 10px 10px 0;display:inline-block}figcaption{font-size:12px;color:#667}
.strip img{margin-right:2px;border-radius:2px}
"""


def document(title: str, body: Iterable[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Numbers are aligned right; a text that starts with ``!`` is marked."""
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table>{f'<tr>{cells}</tr>' if cells else ''}{body}</table>"


def _cell(value: object) -> str:
    if isinstance(value, float | np.floating):
        return f'<td class="n">{value:.5g}</td>'
    if isinstance(value, int | np.integer):
        return f'<td class="n">{value:,}</td>'
    text = str(value)
    return f'<td class="bad">{escape(text[1:])}</td>' if text.startswith("!") else f"<td>{escape(text)}</td>"


def strip(caption: str, pictures: Sequence[np.ndarray], height: int = 128) -> str:
    """Pictures uint8 [H, W, 3] side by side, each `height` pixels high at most."""
    images = "".join(f'<img src="{_data(picture, height)}" alt="">' for picture in pictures)
    return f'<figure class="strip">{images}<figcaption>{escape(caption)}</figcaption></figure>'


def _data(picture: np.ndarray, height: int) -> str:
    image = Image.fromarray(picture)
    if image.height > height:
        image = image.resize((max(1, round(image.width * height / image.height)), height), Image.Resampling.BILINEAR)
    target = BytesIO()
    image.save(target, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(target.getvalue()).decode()
