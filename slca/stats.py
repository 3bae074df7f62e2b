"""Finished runs -> the paper's tables: mean ± std over seeds, paired differences, factor effects, steps to a level.

A table is a list of cells, one for each condition and metric, with the value of every seed; `markdown` pivots it,
`csv_text` writes one line a cell. Rounding is decimal and half up, as in the paper. Left out: other tests than the
t-interval, corrections for many comparisons, and figures, which read study.json.
"""
from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import fmean, stdev

from slca.evaluation.metrics import factor_effects
from slca.report import read_metrics

METRICS = {"name_f1": "Name F1", "arg_match": "ArgMatch", "parallel": "Parallel", "process": "Process",
           "summary": "Summary", "success": "Success", "no_call": "No-call", "redundant_calls": "Redundant",
           "calls_per_task": "Calls"}
SHARES = ("name_f1", "arg_match", "parallel", "process", "summary", "success", "no_call")
CELLS = ("slca", "s_to_t", "t_to_s", "both")  # the support control's conditions, in factor_effects' order
CURVES = ("reward", "success", "process", "summary", "no_call", "redundant_calls", "calls_per_task", "tool_turns",
          "outcome", "grad_norm", "advantage_tool", "advantage_summary", "entropy", "val_success", "val_process",
          "val_summary")
LEARNING = ("success", "process", "summary")  # always averaged too: the area under the curve says who learns faster
DIAGNOSTICS = ("leak", "grad_cos", "grad_norm_", "omission")  # beginnings of names that are always averaged and kept
WINDOW = 5  # steps of the trailing mean of the training success


# --- arithmetic ------------------------------------------------------------------------------------------------------

def mean_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and unbiased standard deviation; None where there are too few values."""
    return fmean(values) if values else None, stdev(values) if len(values) > 1 else None


def t_share(t: float, df: int) -> float:
    """P(|T| <= t) of Student's t with df degrees of freedom, a whole number >= 1: the exact finite sum."""
    angle = math.atan(t / math.sqrt(df))
    cosine, odd = math.cos(angle), df % 2
    term = cosine if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(3 if odd else 2, df - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def t_quantile(df: int, level: float = 0.95) -> float:
    """t with P(|T| <= t) = level, by bisection: 12.706 for one degree of freedom, 4.303 for two."""
    low, high = 0.0, 1.0
    while t_share(high, df) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, df) < level else (low, middle)
    return high


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float | None, float | None]:
    """(low, high) of the mean by Student's t; None where there are fewer than two values."""
    mean, std = mean_std(values)
    if std is None:
        return None, None
    half = t_quantile(len(values) - 1, level) * std / math.sqrt(len(values))
    return mean - half, mean + half


def half_up(value: float, digits: int) -> Decimal:
    """Rounded half up, as the decimal that the value stands for: a mean's .79124999999999998 is .79125."""
    return Decimal(str(round(value, 12))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)


# --- one run ---------------------------------------------------------------------------------------------------------

def run_record(folder: Path, stage: str, columns: Sequence[str] = (), levels: Sequence[float] = ()) -> dict:
    """What the tables and figures need of a finished run, as JSON holds it.

    stage: after_rl or after_sft, whose metrics count. columns: names in metrics.jsonl. -> greedy and sampled metrics,
    wall_s, grad_norm (std, unbiased, and mean over the RL steps), columns (name -> mean over the RL steps), curves
    (name -> one value an RL step), reach (val_success and success -> level -> first RL step, None: never). The
    training success is the mean of the last 5 steps. Raises ValueError for files that cannot be read.
    """
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        found = {"folder": str(folder), "stage": stage, "wall_s": summary["wall_s"], "greedy": summary[stage],
                 "sampled": summary[f"{stage}_sampled"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected the summary of a finished run with {stage}: {error!r}") from error
    rows = [r for r in read_metrics(folder) if r.get("phase") == "rl"] if stage == "after_rl" else []
    names = {name for row in rows for name, value in row.items() if isinstance(value, (int, float))}
    kept = {n for n in names if n in columns or n in LEARNING or n.startswith(DIAGNOSTICS)}

    def numbers(name: str) -> list[float]:
        return [r[name] for r in rows if isinstance(r.get(name), (int, float)) and math.isfinite(r[name])]

    std_of, mean_of = mean_std(numbers("grad_norm"))[::-1]
    return found | {
        "grad_norm": {"std": std_of, "mean": mean_of},
        "columns": {n: fmean(numbers(n)) for n in sorted(kept)},
        "curves": {n: [_short(r.get(n)) for r in rows]
                   for n in ("step", *CURVES, *sorted(kept - set(CURVES))) if n in names},
        "reach": {"val_success": {f"{x:g}": first_step(rows, "val_success", x, 1) for x in levels},
                  "success": {f"{x:g}": first_step(rows, "success", x, WINDOW) for x in levels}} if rows else {}}


def _short(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def first_step(rows: Sequence[Mapping], name: str, level: float, window: int) -> int | None:
    """First step at which the mean of the last `window` values reaches the level; None: never."""
    points = [(r["step"], r[name]) for r in rows if isinstance(r.get(name), (int, float))]
    for i in range(window, len(points) + 1):
        if fmean(value for _, value in points[i - window:i]) >= level - 1e-9:
            return points[i - 1][0]
    return None


# --- tables ----------------------------------------------------------------------------------------------------------

Runs = Mapping[str, Mapping[int, dict]]  # condition -> seed -> run_record


def cell(condition: str, metric: str, by_seed: Mapping[int, float | None], digits: int = 4,
         difference: bool = False) -> dict:
    """A cell: the seeds' values (None: not there, or never reached), their mean, std and 95 % t-interval."""
    values = [v for v in by_seed.values() if v is not None]
    (mean, std), (low, high) = mean_std(values), interval(values)
    return {"condition": condition, "metric": metric, "values": {str(s): v for s, v in by_seed.items()}, "mean": mean,
            "std": std, "low": low, "high": high, "digits": digits, "difference": difference}


def build_tables(runs: Runs, reference: Mapping[str, str]) -> dict[str, list[dict]]:
    """Title -> cells, in the order they are shown. reference: condition -> the one its differences are against."""
    runs = {name: by_seed for name, by_seed in runs.items() if by_seed}
    tables: dict[str, list[dict]] = {}
    for how in ("greedy", "sampled"):
        tables[f"Metrics, {how}"] = [cell(c, title, {s: r[how][m] for s, r in by_seed.items()})
                                     for c, by_seed in runs.items() for m, title in METRICS.items()]
        tables[f"Paired differences, {how}"] = [
            cell(f"{c} - {reference[c]}", title, paired(runs, c, reference[c], lambda r, m=m, how=how: r[how][m]),
                 difference=True)
            for c in comparable(runs, reference) for m, title in METRICS.items()]
    for how in ("greedy", "sampled"):
        tables[f"Factor effects, {how}, percentage points"] = effects(runs, how)
    trained = {c: rs for c, found in runs.items() if (rs := {s: r for s, r in found.items() if r["curves"]})}
    tables["Gradient norm over the RL steps"] = [
        cell(c, part, {s: r["grad_norm"][part] for s, r in by_seed.items()})
        for c, by_seed in trained.items() for part in ("std", "mean")] + [
        cell(f"{c} - {reference[c]}", "std", paired(trained, c, reference[c], lambda r: r["grad_norm"]["std"]),
             difference=True) for c in comparable(trained, reference)]
    tables["First RL step at a success of"] = [
        cell(c, f"{level}, {title}", {s: r["reach"].get(name, {}).get(level) for s, r in by_seed.items()}, 1)
        for c, by_seed in trained.items()
        for name, title in (("val_success", "validation"), ("success", f"training, mean of {WINDOW}"))
        for level in dict.fromkeys(x for r in by_seed.values() for x in r["reach"].get(name, {}))]
    columns = {c: list(dict.fromkeys(n for r in by_seed.values() for n in r["columns"]))
               for c, by_seed in trained.items()}
    tables["Columns of metrics.jsonl, mean over the RL steps"] = [
        cell(c, n, {s: r["columns"].get(n) for s, r in trained[c].items()}) for c in trained for n in columns[c]] + [
        cell(f"{c} - {reference[c]}", n, paired(trained, c, reference[c], lambda r, n=n: r["columns"].get(n)),
             difference=True) for c in comparable(trained, reference) for n in columns[c]]
    return {title: cells for title, cells in (tables | evaluations(runs)).items() if cells}


def comparable(runs: Runs, reference: Mapping[str, str]) -> list[str]:
    """Conditions that share a seed with their reference."""
    return [c for c in runs if (other := reference.get(c)) and other != c and runs[c].keys() & runs.get(other, {})]


def paired(runs: Runs, condition: str, other: str, read) -> dict[int, float | None]:
    """Seed -> value of the condition less that of the other, over the seeds that both have."""
    pairs = {s: (read(r), read(runs[other][s])) for s, r in runs[condition].items() if s in runs[other]}
    return {s: None if a is None or b is None else a - b for s, (a, b) in pairs.items()}


def effects(runs: Runs, how: str) -> list[dict]:
    """Table 22 from the cell means as Table 21 prints them, over the seeds that all four cells have."""
    shared = set.intersection(*(set(runs.get(c, ())) for c in CELLS))
    if not shared:
        return []
    cells = []
    for m in SHARES:
        means = [half_up(fmean(runs[c][s][how][m] for s in sorted(shared)), 4) * 100 for c in CELLS]
        cells += [cell(name, METRICS[m], {}, 2) | {"mean": value} for name, value in factor_effects(*means).items()]
    order = list(dict.fromkeys(c["condition"] for c in cells))
    return sorted(cells, key=lambda c: order.index(c["condition"]))


def evaluations(runs: Runs) -> dict[str, list[dict]]:
    """Tables of what the study's `evaluate` measured: the metrics of suite toucan, success by K of the distractors."""
    tables: dict[str, list[dict]] = {}
    for c, by_seed in runs.items():
        found = {s: r.get("evaluate", {}) for s, r in by_seed.items()}
        for name in dict.fromkeys(n for entries in found.values() for n in entries):
            shown = METRICS if name == "toucan" else {"success": name, "n": name}
            for m, title in shown.items():
                table = "Evaluated with the base's simulator and judge" if name == "toucan" else (
                    "Success by number of tools" if m == "success" else "Tasks whose prompt fits")
                values = {s: (e.get(name) or {}).get(m) for s, e in found.items()}
                tables.setdefault(table, []).append(cell(c, title, values, 1 if m == "n" else 4))
    return tables


def cell_text(c: Mapping) -> str:
    """ "0.7913 ± 0.0105", or "+0.0012 [-0.0100, +0.0124]" for a difference; "(2 of 3)" where seeds have no value."""
    def show(value: float) -> str:
        rounded = half_up(value, c["digits"])
        return f"{abs(rounded):f}" if not rounded else f"{rounded:+f}" if c["difference"] else f"{rounded:f}"

    if c["mean"] is None:
        return "-"
    there, seeds = sum(v is not None for v in c["values"].values()), len(c["values"])
    spread = "" if c["std"] is None else (f" [{show(c['low'])}, {show(c['high'])}]" if c["difference"]
                                          else f" ± {show(c['std'])}")
    return show(c["mean"]) + spread + (f" ({there} of {seeds})" if there < seeds else "")


def markdown(title: str, note: str, tables: Mapping[str, Sequence[Mapping]]) -> str:
    """All tables, a row a condition and a column a metric."""
    parts = [f"# {title}", note]
    for name, cells in tables.items():
        columns = list(dict.fromkeys(c["metric"] for c in cells))
        texts = {(c["condition"], c["metric"]): cell_text(c) for c in cells}
        lines = [["", *columns], ["---"] + ["---:"] * len(columns)]
        lines += [[row, *(texts.get((row, column), "-") for column in columns)]
                  for row in dict.fromkeys(c["condition"] for c in cells)]
        parts.append(f"## {name}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def csv_text(tables: Mapping[str, Sequence[Mapping]]) -> str:
    """One line a cell, unrounded: table, condition, metric, number of seeds, mean, std, low, high, seed:value ..."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "condition", "metric", "n", "mean", "std", "low", "high", "values"])
    for name, cells in tables.items():
        for c in cells:
            there = {s: v for s, v in c["values"].items() if v is not None}
            writer.writerow([name, c["condition"], c["metric"], len(there),
                             *("" if c[k] is None else c[k] for k in ("mean", "std", "low", "high")),
                             " ".join(f"{s}:{v}" for s, v in there.items())])
    return out.getvalue()
