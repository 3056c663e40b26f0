"""The profile as one HTML file without scripts or anything to fetch: light and dark, readable on a phone."""

from __future__ import annotations

from html import escape

from vlaforge.graphs.profile import ProfileReport, Row

COLOURS = {
    "data": "#c2571a", "forward": "#2f6db3", "backward": "#1f8a70", "reduce": "#8a5fb0", "clip": "#b08900",
    "optimizer": "#a8324a", "other": "#8a8f98", "idle": "#c9ccd1",
}  # fmt: skip
MEANING = {
    "data": "waiting for the next batch and its copy",
    "forward": "model and loss",
    "backward": "gradients",
    "reduce": "gradients between ranks, as far as nothing hides it",
    "clip": "gradient norm and the guard's verdict",
    "optimizer": "update of weights, moments and average",
    "other": "between the stages",
    "idle": "the device runs no kernel",
}
ROWS = 40

STYLE = """
:root {
  color-scheme: light dark;
  --text: #1c2024; --soft: #62686f; --line: #dfe2e6; --back: #ffffff; --panel: #f5f6f8;
}
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --soft: #9aa1a9; --line: #33383e; --back: #15181b; --panel: #1e2226; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 36px 0 10px; }
p { margin: 4px 0; } .soft { color: var(--soft); }
.bar { display: flex; height: 34px; border-radius: 6px; overflow: hidden; margin: 14px 0; }
.bar span { display: block; min-width: 2px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); } th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.name { max-width: 420px; overflow: hidden; text-overflow: ellipsis; }
td.name, code { font-family: ui-monospace, monospace; font-size: 13px; }
td.wide { white-space: normal; text-align: left; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.meter { display: inline-block; width: 90px; height: 8px; border-radius: 4px; background: var(--line); }
.meter i { display: block; height: 100%; border-radius: 4px; background: #1f8a70; }
pre { background: var(--panel); padding: 14px; border-radius: 6px; overflow-x: auto; font-size: 13px; }
"""


def page(report: ProfileReport, trace: str | None) -> str:
    """The whole page. `trace` is the file name of the Chrome trace beside it."""
    parts = [
        _head(report),
        _split(report),
        _ops(report),
        _compile(report),
        _syncs(report),
        f"<h2>Plan</h2><pre>{escape(report.plan)}</pre>" if report.plan else "",
        f'<p class="soft">Trace for ui.perfetto.dev: <code>{escape(trace)}</code></p>' if trace else "",
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><title>Profile of a training step</title>'
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _head(report: ProfileReport) -> str:
    conditions = " · ".join(f"{escape(name)} {escape(value)}" for name, value in report.conditions.items())
    longest = max(report.split, key=lambda name: report.split[name], default="")
    share = report.split.get(longest, 0.0) / report.step_s if report.step_s else 0.0
    return (
        f"<h1>{report.step_s * 1e3:.1f} ms a step</h1>"
        f'<p>{report.steps} steps; most of the time, {share:.0%}, is <b>{escape(longest)}</b>.</p>'
        f'<p class="soft">{conditions}</p>'
    )  # fmt: skip


def _split(report: ProfileReport) -> str:
    order = [name for name in COLOURS if name in report.split]
    order += [name for name in report.split if name not in COLOURS]
    total = sum(report.split.values()) or 1.0
    bar = "".join(
        f'<span style="width:{report.split[name] / total:.2%};background:{COLOURS.get(name, "#555")}" '
        f'title="{escape(name)} {report.split[name] * 1e3:.1f} ms"></span>'
        for name in order
    )
    rows = "".join(
        f'<tr><td><span class="key" style="background:{COLOURS.get(name, "#555")}"></span>{escape(name)}</td>'
        f"<td>{report.split[name] * 1e3:.1f} ms</td><td>{report.split[name] / total:.1%}</td>"
        f'<td class="wide soft">{escape(MEANING.get(name, ""))}</td></tr>'
        for name in order
    )
    return f'<h2>A step</h2><div class="bar">{bar}</div><div class="scroll"><table>{rows}</table></div>'


def _ops(report: ProfileReport) -> str:
    total = sum(row.seconds for row in report.rows) or 1.0
    head = "".join(
        f"<th>{name}</th>"
        for name in ("op", "ms a step", "share", "calls a step", "GFLOP/s", "GB/s", "of the roofline")
    )
    body = "".join(_op(row, report, total) for row in report.rows[:ROWS])
    device = report.device
    peaks = (
        f"{device.label}: {device.fp32 / 1e12:.2f} TFLOP/s in fp32, {device.bf16 / 1e12:.2f} in bf16, "
        f"{device.bandwidth / 1e9:.0f} GB/s" + ("" if device.cuda else " (measured here)")
    )
    return (
        f'<h2>Ops by their own time</h2><p class="soft">{escape(peaks)}</p>'
        f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
    )


def _op(row: Row, report: ProfileReport, total: float) -> str:
    seconds = row.seconds or 1e-12
    part = min(1.0, row.roofline(report.device))
    shown = f'<span class="meter"><i style="width:{part:.0%}"></i></span> {part:.0%}' if part else ""
    flops = f"{row.flops / seconds / 1e9:.0f}" if row.flops else ""
    moved = f"{row.bytes / seconds / 1e9:.1f}" if row.bytes else ""
    return (
        f'<tr><td class="name" title="{escape(row.name)}">{escape(row.name)}</td>'
        f"<td>{row.seconds / report.steps * 1e3:.2f}</td><td>{row.seconds / total:.1%}</td>"
        f"<td>{row.calls / report.steps:.0f}</td><td>{flops}</td><td>{moved}</td><td>{shown}</td></tr>"
    )


def _compile(report: ProfileReport) -> str:
    text = f"{report.counts.text()} since the start; {report.recompiles} recompiles in the profiled steps."
    breaks = "".join(
        f'<tr><td class="wide">{escape(reason)}</td><td>{count}</td></tr>'
        for reason, count in sorted(report.counts.breaks.items(), key=lambda item: -item[1])
    )
    table = f'<div class="scroll"><table>{breaks}</table></div>' if breaks else ""
    return f"<h2>Compiled code</h2><p>{escape(text)}</p>{table}"


def _syncs(report: ProfileReport) -> str:
    if report.check is None:
        return "<h2>Host syncs</h2><p class='soft'>No step was watched.</p>"
    if report.check.ok:
        return f"<h2>Host syncs</h2><p>None in {report.check.ops} ops: the step is ready for a CUDA graph.</p>"
    rows = "".join(
        f"<tr><td>{escape(f.kind)}</td><td class='wide'>{escape(f.what)}<br>"
        f"<code class='soft'>{escape(f.code)}</code></td><td><code>{escape(f.where)}</code></td><td>{f.count}</td></tr>"
        for f in report.check.findings
    )
    return (
        "<h2>Host syncs, and what else breaks a capture</h2><div class='scroll'><table><tr><th>kind</th>"
        f"<th>what</th><th>where</th><th>a step</th></tr>{rows}</table></div>"
    )
