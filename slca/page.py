"""report.html: one file without scripts and without anything from the network.

Inline CSS, SVG curves, and rollouts in which every token shows its segment, its advantage and its log-probability.
Everything a model wrote is escaped. Left out: live dashboards, and pages over several runs.
"""
from __future__ import annotations

import html
import json
import math
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slca.report import GLOSSARY, STAGES, read_metrics, table_rows


def esc(text: Any) -> str:
    """Text for HTML; control, format and surrogate characters (hidden, or able to reorder text) are spelled out."""
    spelled = (c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else f"\\u{ord(c):04x}"
               for c in str(text))
    return html.escape("".join(spelled), quote=True)


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that span the range."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [round(i * size, 12) for i in range(first, last + 1)]


def smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average without the bias of its start."""
    out, total, mass = [], 0.0, 0.0
    for value in values:
        total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        out.append(total / mass)
    return out


def chart(title: str, caption: str, rows: list[dict], series: list[tuple[str, str, str]], phase: str = "rl",
          log: bool = False, raw_only: bool = False) -> str:
    """One SVG card. series: (metric, label, CSS colour name); log: decades; raw_only: sparse points, not smoothed."""
    lines = []
    for metric, label, colour in series:
        points = [(row["step"], row[metric]) for row in rows if row.get("phase") == phase
                  and isinstance(row.get(metric), (int, float)) and (not log or row[metric] > 0)]
        if points:
            lines.append((label, colour, [x for x, _ in points],
                          [math.log10(y) if log else float(y) for _, y in points]))
    head = f"<figure class=card><h3>{esc(title)}</h3>"
    if not lines:
        return f"{head}<p class=none>This run wrote no such metric.</p><figcaption>{esc(caption)}</figcaption></figure>"
    low, high = min(min(ys) for *_, ys in lines), max(max(ys) for *_, ys in lines)
    if log:
        low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
        y_ticks = [float(t) for t in range(low, high + 1, max(1, (high - low) // 4))]
    else:
        low = min(low, 0.0) if low < 0.35 * high else low  # from zero, unless that would flatten the curve
        y_ticks = _ticks(low, high if high > low else low + max(abs(low) * 0.1, 1e-3))
    x_low, x_high = min(xs[0] for _, _, xs, _ in lines), max(xs[-1] for _, _, xs, _ in lines)
    x_high = max(x_high, x_low + 1)
    x_ticks = [t for t in _ticks(x_low, x_high, 6) if x_low <= t <= x_high]
    y_low, y_high = y_ticks[0], max(y_ticks[-1], high) if log else y_ticks[-1]
    left, right, top, bottom = 48, 508, 12, 186

    def at(x: float, y: float) -> tuple[float, float]:
        return (left + (x - x_low) / (x_high - x_low) * (right - left),
                bottom - (y - y_low) / (y_high - y_low) * (bottom - top))

    def path(xs: list, ys: list) -> str:
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(x, y) for x, y in zip(xs, ys, strict=True)))

    svg = []
    for tick in y_ticks:
        y = at(x_low, tick)[1]
        text = f"1e{tick:.0f}" if log else f"{tick:g}"
        svg.append(f"<line class=grid x1={left} x2={right} y1={y:.1f} y2={y:.1f} />"
                   f"<text x={left - 7} y={y + 4:.1f} text-anchor=end>{text}</text>")
    for tick in x_ticks:
        svg.append(f"<text x={at(tick, y_low)[0]:.1f} y={bottom + 18} text-anchor=middle>{tick:g}</text>")
    svg.append(f"<text x={right} y={bottom + 34} text-anchor=end>{'SFT' if phase == 'sft' else 'RL'} step</text>")
    for label, colour, xs, ys in lines:
        svg.append(f"<g class={colour}><title>{esc(label)}</title>")
        if raw_only or len(xs) < 8:
            svg.append(f'<polyline class=line points="{path(xs, ys)}" />')
            svg += [f"<circle cx={a:.1f} cy={b:.1f} r=3 />" for a, b in (at(x, y) for x, y in zip(xs, ys, strict=True))]
        else:
            svg.append(f'<polyline class=raw points="{path(xs, ys)}" />'
                       f'<polyline class=line points="{path(xs, smooth(ys))}" />')
        svg.append("</g>")
    key = "".join(f"<span class=key><i class={colour}></i>{esc(label)} <b>"
                  f"{f'{10 ** ys[-1]:.1e}' if log else f'{ys[-1]:.3g}'}</b></span>" for label, colour, _, ys in lines)
    return (f'{head}<div class=keys>{key}</div><svg viewBox="0 0 520 224" role=img aria-label="{esc(title)}">'
            f"{''.join(svg)}</svg><figcaption>{esc(caption)}</figcaption></figure>")


SEGMENTS = ("ignore", "tool", "summary")


def rollout_html(record: Mapping[str, Any], where: str = "rollout") -> str:
    """A rollout with each token coloured by segment and shaded by advantage. ValueError: lists of different lengths.

    record: step, task_id, subset, rank ("best" or "worst"), status, prompt_length, scores {name: number}, gold_calls,
    facts, and per token: tokens [str], ids, labels (0, 1, 2), policy_mask, logprobs, advantages.
    """
    names = ("tokens", "ids", "labels", "policy_mask", "logprobs", "advantages")
    if len({len(record[name]) for name in names}) != 1:
        raise ValueError(f"{where}: expected equal lengths, found {({name: len(record[name]) for name in names})}")
    spans = []
    for token, ident, label, policy, logprob, advantage in zip(*(record[name] for name in names), strict=True):
        kind = SEGMENTS[label] if policy else "ignore"
        shade = f" style=--a:{min(abs(advantage) / 2, 1):.2f}" if policy else ""
        sign = " up" if policy and advantage > 0 else " down" if policy and advantage < 0 else ""
        title = f"token {ident} | {kind}" + (
            f" | logprob {logprob:.3f} (p {math.exp(min(logprob, 0)):.2f}) | advantage {advantage:+.3f}"
            if policy else " | not scored")
        text = esc(token).replace("\n", "<u>&#8629;</u>\n")
        spans.append(f'<span class="t {kind}{sign}"{shade} title="{esc(title)}">{text}</span>')
    n = record["prompt_length"]
    scores = "".join(f"<span class=score>{esc(k)} <b>{esc(f'{v:.3f}' if isinstance(v, float) else v)}</b></span>"
                     for k, v in record.get("scores", {}).items())
    gold = "\n".join(f"step {i}: {json.dumps(step, ensure_ascii=False)}"
                     for i, step in enumerate(record.get("gold_calls") or [], 1)) or "no call is due"
    facts = ", ".join(map(str, record.get("facts") or [])) or "none known"
    rank = "best" if record.get("rank") == "best" else "worst"
    return (f"<article class=rollout><header><span class=\"rank {rank}\">{rank}</span> step {esc(record['step'])} "
            f"<code>{esc(record['task_id'])}</code> {esc(record.get('subset', ''))} "
            f"<span class=status>{esc(record.get('status', ''))}</span></header><div class=scores>{scores}</div>"
            f"<details><summary>Prompt, {n} tokens</summary><div class=tokens>{''.join(spans[:n])}</div></details>"
            f"<div class=tokens>{''.join(spans[n:])}</div>"
            f"<details><summary>Gold calls and facts</summary><pre>{esc(gold)}\nfacts: {esc(facts)}</pre></details>"
            "</article>")


def _pick(items: list, count: int) -> list:
    """At most count items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def write_report(folder: str | Path, summary: Mapping | None = None, config: str | None = None,
                 max_steps: int = 6) -> Path:
    """Write <folder>/report.html from the run's files, and return its path.

    summary: the content of summary.json, read from the folder if None; config: the resolved YAML text, likewise.
    max_steps: rollouts of at most this many steps are shown, spread over the run. ValueError: a file of the wrong form.
    """
    folder = Path(folder)
    rows = read_metrics(folder)
    if summary is None:
        path = folder / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if config is None:
        path = folder / "config.yaml"
        config = path.read_text(encoding="utf-8") if path.exists() else "not saved"
    charts = "".join([
        chart("Training reward by stream", "Both streams should rise; one that rises while the other falls is being "
              "paid for by it.", rows, [("process", "process (calls)", "tool"), ("summary", "summary (reply)", "summ"),
                                        ("reward", "total", "ink")]),
        chart("Validation", "Greedy, on held-out tasks: what the policy has learnt rather than what it samples.", rows,
              [("val_success", "success", "tool"), ("val_summary", "summary", "summ"),
               ("val_process", "process", "ink")], raw_only=True),
        chart("Calls left out", "Share of tasks with gold calls answered without one. It should fall towards 0.", rows,
              [("no_call", "no-call rate", "warm")]),
        chart("Calls too many", "Calls beyond gold, a rollout. A rise means reward is won by calling more.", rows,
              [("redundant_calls", "redundant calls", "gold")]),
        chart("Gradient norm", "Before clipping. Stable is healthy; spikes that return are not.", rows,
              [("grad_norm", "gradient norm", "ink")]),
        chart("Sampler and learner", "Mean absolute difference of their log-probabilities. Above 1e-4 in float32, "
              "the two no longer compute the same policy.", rows, [("logprob_gap", "gap", "warm")], log=True),
        chart("Advantage by segment", "Mean absolute advantage. Near 0, the groups no longer differ and that segment "
              "no longer learns.", rows, [("advantage_tool", "tool tokens", "tool"),
                                          ("advantage_summary", "summary tokens", "summ")]),
        chart("Supervised loss", "Loss on the demonstrations before RL. A plateau, then a drop, is copying being "
              "learnt.", rows, [("sft_loss", "loss", "ink")], phase="sft")])
    header, *body = table_rows({title: summary.get(name) for name, title in STAGES.items()})
    table = "<p class=none>No evaluation has been written yet.</p>"
    if len(header) > 1:
        lines = ["".join(f"<th>{esc(cell)}</th>" for cell in header),
                 *("".join(f"<td>{esc(cell)}</td>" for cell in row) for row in body)]
        table = f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
    rollouts = []
    for path in _pick(sorted(folder.glob("rollouts/step_*.json")), max_steps):
        rollouts += [rollout_html(record, str(path)) for record in json.loads(path.read_text(encoding="utf-8"))]
    last = {name: value for row in rows for name, value in row.items() if value is not None}
    glossary = "".join(
        f"<tr><td><code>{esc(name)}</code></td><td>{esc(f'{value:.4g}' if isinstance(value, float) else value)}</td>"
        f"<td>{esc(GLOSSARY.get(name, ''))}</td></tr>" for name, value in last.items() if name != "phase")
    facts = [f"{sum(row.get('phase') == 'rl' and 'reward' in row for row in rows)} RL steps"]
    facts += [f"seed {summary['seed']}"] if "seed" in summary else []
    facts += [f"{summary['wall_s'] / 60:.1f} minutes"] if isinstance(summary.get("wall_s"), (int, float)) else []
    page = f"""<!doctype html><html lang=en><meta charset=utf-8><title>SLCA run {esc(folder.name)}</title>
<meta name=viewport content="width=device-width, initial-scale=1">
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'">
<style>{STYLE}</style><body><main><h1>Run <code>{esc(folder.resolve().name)}</code></h1>
<p class=lead>{esc(' / '.join(facts))}</p>
<h2>Result</h2><p>The run's evaluation tasks, decoded greedily (and sampled at temperature 1 where it says so).</p>
{table}
<h2>Curves</h2><p>Thin: each step. Thick: moving average. Beside each name: the last value.</p>
<section class=grid2>{charts}</section>
<h2>Rollouts</h2><p>Best and worst of a step. The colour is the segment a token is credited in, the depth of colour the
size of its advantage, the underline its sign. Check that calls are blue, replies green, and that a good reply after
a bad call is green with a solid line and blue with a dashed one. Hover over a token for its numbers.</p>
<p class=legend><span class="t tool up" style=--a:.8>tool, rewarded</span> <span class="t tool down" style=--a:.8>tool,
penalised</span> <span class="t summary up" style=--a:.8>summary, rewarded</span> <span class="t summary down"
style=--a:.8>summary, penalised</span> <span class="t tool up" style=--a:.1>small advantage</span>
<span class="t ignore">prompt or tool result, not scored</span></p>
{''.join(rollouts) or '<p class=none>No rollouts were saved.</p>'}
<h2>Metrics</h2><details><summary>Last value and meaning of each metric</summary><table class=wide>{glossary}</table>
</details><h2>Configuration</h2><details><summary>As resolved</summary><pre>{esc(config)}</pre></details></main>"""
    target = folder / "report.html"
    target.write_text(page, encoding="utf-8")
    return target


STYLE = """
:root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--text:#1d1f23;--dim:#666b73;--line:#e3e3df;--tool:42 120 214;
--summ:21 145 95;--warm:#d9542b;--gold:#b47a00;--good:#12804f;--bad:#c93030}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--text:#e8e8e6;--dim:#9aa0a8;--line:#32363c;
--tool:91 156 240;--summ:54 190 132;--warm:#f0805a;--gold:#e0a83a;--good:#45c68c;--bad:#ff7b72}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--text);font:15px/1.55 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 80px}h1{font-size:26px;margin:0}
h2{font-size:19px;margin:38px 0 6px}
h1 code{font-size:.85em!important}
h3{font-size:14.5px;margin:0 0 4px}p{margin:4px 0 12px;max-width:78ch}.lead,figcaption,.none{color:var(--dim)}
code,pre,.tokens{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,monospace;font-size:12.5px}
table{border-collapse:collapse;background:var(--card);font-variant-numeric:tabular-nums}
th,td{padding:5px 16px;border-bottom:1px solid var(--line);text-align:right}td:first-child{text-align:left}
.wide td{text-align:left}th{color:var(--dim);font-weight:600}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:16px}
.card,.rollout{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;margin:0}
svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:var(--dim)}.grid{stroke:var(--line)}
polyline{fill:none;stroke:currentColor;stroke-linejoin:round}.line{stroke-width:2.2}.raw{stroke-width:1;opacity:.35}
circle{fill:currentColor}g.tool,i.tool{color:rgb(var(--tool))}g.summ,i.summ{color:rgb(var(--summ))}
g.ink,i.ink{color:var(--dim)}g.warm,i.warm{color:var(--warm)}g.gold,i.gold{color:var(--gold)}
.keys{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px}.key i{display:inline-block;width:14px;height:3px;
background:currentColor;vertical-align:middle;margin-right:6px}figcaption{font-size:13px}
.rollout{margin:14px 0}.rollout header{display:flex;flex-wrap:wrap;gap:10px;align-items:baseline}
.rank,.status{border:1px solid currentColor;border-radius:20px;padding:0 9px;font-size:12px}.status{color:var(--dim)}
.best{color:var(--good)}.worst{color:var(--bad)}.scores{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;
color:var(--dim);margin:4px 0 8px}.score b{color:var(--text)}
.tokens{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.9;unicode-bidi:isolate}
.t{--a:0;border-radius:2px;padding:1px 0}.t u{text-decoration:none;opacity:.35}.ignore{color:var(--dim)}
.t.tool{background:rgb(var(--tool)/calc(.08 + .42*var(--a)))}
.t.summary{background:rgb(var(--summ)/calc(.08 + .42*var(--a)))}
.up{border-bottom:2px solid var(--good)}.down{border-bottom:2px dashed var(--bad)}
details{margin:6px 0}summary{cursor:pointer;color:var(--dim);font-size:13px}pre{white-space:pre-wrap;
overflow-wrap:anywhere;background:var(--card);margin:6px 0}
.legend{max-width:none}.legend .t{margin-right:10px;padding:1px 5px}
"""
