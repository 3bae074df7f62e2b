"""The distractor suite: the in-domain suite with the tools of each task padded to K (paper Tables 13, 14 and 24).

A condition is a rule (random or hard) and a K; K = 0 is the tasks with their own tools. Prompts over
`eval.max_prompt_tokens` are skipped, so conditions are over different tasks, the larger K over those with short
schemas. The comparison of like with like is over the tasks that every condition kept; it needs scores by task, which
the record holds. A record can be gone on with, as long as nothing changes that its figures depend on.
"""
from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from math import fsum, sqrt
from pathlib import Path
from statistics import mean, pstdev, stdev

from slca.config import to_dict
from slca.data.distractors import Nearness, pad_tools
from slca.data.task import Task
from slca.evaluation.metrics import sums, well_formed
from slca.evaluation.record import weights_sha256
from slca.evaluation.toucan import NoTaskLeft, evaluate
from slca.model import Policy
from slca.settings import Config
from slca.simulator import Simulator

TABLE = (("success", "Success"), ("process", "Process"), ("summary", "Summary"), ("name_f1", "Name F1"),
         ("arg_match", "ArgMatch"), ("parallel", "Parallel"), ("fmt", "Format"), ("no_call", "No-call"),
         ("redundant_calls", "Redundant"), ("n", "Tasks"), ("skipped", "Skipped"), ("prompt_tokens", "Prompt tokens"))


def conditions(ks: Sequence[int], hows: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Name -> (rule, K), in the order they are evaluated; K = 0 is there once, as "own"."""
    own = {"own": ("own", 0)} if 0 in ks else {}
    return own | {f"{how} {k}": (how, k) for how in hows for k in sorted(set(ks)) if k}


def check(tasks: Sequence[Task], catalogue: Sequence[dict], ks: Sequence[int], seed: int) -> None:
    """Raises ValueError where the catalogue is too small for the largest K, before any hour is spent on the others."""
    for task in tasks:
        pad_tools(task, catalogue, max(ks), "random", seed)


def run_condition(policy: Policy, tokenizer, tasks: Sequence[Task], catalogue: Sequence[dict], how: str, k: int,
                  cfg: Config, nearness: Nearness | None = None, temperature: float = 0.0,
                  progress: Callable[[int], None] = lambda done: None, simulator: Simulator | None = None,
                  judge=None) -> dict:
    """Evaluate the padded tasks -> the condition's entry in the record, as JSON holds it.

    metrics: those of the in-domain suite and of `well_formed`, None where every prompt is over the limit. skipped:
    prompts over the limit; larger: tasks that have more than K tools of their own, which stay as they are.
    prompt_tokens: mean, standard deviation and largest of the kept ones. scores: column -> one value for each kept
    task; "task" is its index in `tasks`; no_call is None where no call is due, fmt where none is made. simulator,
    judge: as `evaluate` takes them.
    """
    start = time.perf_counter()
    padded = [pad_tools(t, catalogue, k, how, cfg.seed, nearness) for t in tasks] if k else list(tasks)
    entry = {"how": how, "k": k, "metrics": None, "by_subset": {}, "gold_turns_per_task": None,
             "skipped": len(tasks), "larger": sum(len(t.tools) > k for t in tasks) if k else 0,
             "prompt_tokens": None, "prompt_tokens_std": None, "prompt_tokens_max": None, "scores": {}}
    try:
        result = evaluate(policy, tokenizer, padded, cfg, temperature, progress, simulator, judge)
    except NoTaskLeft:
        return entry | {"seconds": time.perf_counter() - start}
    index = {id(task): i for i, task in enumerate(padded)}  # ids of tasks may repeat over several files
    scores: dict[str, list] = {"task": [index[id(e.task)] for e in result.episodes]}
    for e in result.episodes:
        for name, (total, count) in (sums([e], cfg.eval.success_threshold) | well_formed([e])).items():
            scores.setdefault(name, []).append(total if count else None)
    lengths = [e.prompt_length for e in result.episodes]
    total, written = well_formed(result.episodes)["fmt"]
    fmt = total / written if written else None  # 0 would say that all calls are broken where none is made
    return entry | {"metrics": result.metrics | {"fmt": fmt}, "by_subset": result.by_subset,
                    "gold_turns_per_task": result.gold_turns, "skipped": result.skipped,
                    "prompt_tokens": mean(lengths), "prompt_tokens_std": pstdev(lengths),
                    "prompt_tokens_max": max(lengths), "scores": scores, "seconds": time.perf_counter() - start}


def restricted(entries: Mapping[str, dict]) -> dict:
    """The conditions over the tasks that all of them kept, the ones that kept none left aside.

    -> {"n", "tasks": their indices, "metrics": name -> metrics of these tasks, "success_change": name -> [mean, half
    width] of the success less that of the first condition, task by task: mean +- 1.96 standard errors, None for one
    task}.
    """
    kept = {name: e["scores"] for name, e in entries.items() if e["metrics"]}
    common = sorted(set.intersection(*(set(s["task"]) for s in kept.values()))) if kept else []
    found: dict = {"n": len(common), "tasks": common, "metrics": {}, "success_change": {}}
    if not common:
        return found
    rows = {name: [{task: i for i, task in enumerate(s["task"])}[t] for t in common] for name, s in kept.items()}
    first = None
    for name, scores in kept.items():
        values = {m: [scores[m][i] for i in rows[name]] for m in scores if m != "task"}
        counted = {m: [v for v in column if v is not None] for m, column in values.items()}
        found["metrics"][name] = {m: fsum(c) / len(c) if c else None if m == "fmt" else 0.0
                                  for m, c in counted.items()} | {"n": len(common)}
        first = first or values["success"]
        change = [b - a for a, b in zip(first, values["success"], strict=True)]
        half = 1.96 * stdev(change) / sqrt(len(change)) if len(change) > 1 else None
        found["success_change"][name] = [mean(change), half]
    return found


# --- tables ----------------------------------------------------------------------------------------------------------

def table(entries: Mapping[str, dict]) -> str:
    """One line a condition: the paper's metrics, tasks kept and skipped, mean prompt tokens of the kept ones."""
    lines = [["Tools", *(title for _, title in TABLE)]]
    for name, e in entries.items():
        values = {"n": 0} | (e["metrics"] or {}) | {"skipped": e["skipped"], "prompt_tokens": e["prompt_tokens"]}
        lines.append([name, *(_cell(key, values.get(key)) for key, _ in TABLE)])
    return _aligned(lines)


def restricted_table(found: Mapping) -> str:
    """The same over the common tasks, with the change of the success against the first condition."""
    if not found["n"]:
        return "no task was kept under every condition"
    shown = [(key, title) for key, title in TABLE if key not in ("n", "skipped", "prompt_tokens")]
    lines = [["Tools", *(title for _, title in shown), "Change of success (95 %)"]]
    for name, metrics in found["metrics"].items():
        change, half = found["success_change"][name]
        lines.append([name, *(_cell(key, metrics.get(key)) for key, _ in shown),
                      f"{change:+.3f}" + ("" if half is None else f" +- {half:.3f}")])
    return f"over the {found['n']} tasks kept under every condition that kept any:\n{_aligned(lines)}"


def _cell(key: str, value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if key in ("n", "skipped", "prompt_tokens") else f"{value:.3f}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


# --- the record ------------------------------------------------------------------------------------------------------

def identity(checkpoint: str | Path, tasks: Sequence[Task], catalogue: Sequence[dict], cfg: Config, temperature: float,
             nearest: str) -> dict:
    """What the figures depend on: contents, not paths.

    A frozen model or a file of functions that answers the calls counts by its settings alone.
    """
    return {"checkpoint_sha256": weights_sha256(checkpoint), "tasks_sha256": _sha256([vars(t) for t in tasks]),
            "catalogue_sha256": _sha256(catalogue), "temperature": temperature, "nearest": nearest,
            "config": to_dict(cfg)}


def _sha256(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def finished(path: str | Path, depends_on: Mapping) -> dict[str, dict]:
    """Conditions that the record at path holds; none where there is no file or an empty one.

    Raises ValueError where it is no such record, or one of something else: it is not overwritten.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not text:
        return {}
    try:
        known = json.loads(text)
        entries, old = known["conditions"], known["depends_on"]
        differ = [key for key in depends_on if old.get(key) != json.loads(json.dumps(depends_on[key]))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected the record of a distractor suite, or no file") from error
    if "config" in differ:
        differ[differ.index("config")] = "config: " + ", ".join(_changed(old.get("config"), depends_on["config"]))
    if differ:
        raise ValueError(f"{path}: holds figures of another run, different in {'; '.join(differ)}; "
                         "name another file or remove this one")
    return entries


def _changed(old, new, at: str = "") -> list[str]:
    """Dotted keys whose values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [key for k in sorted({*old, *new}) for key in _changed(old.get(k), new.get(k), f"{at}.{k}".lstrip("."))]
    return [] if old == new else [at or "all"]
