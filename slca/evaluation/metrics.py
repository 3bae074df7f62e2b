"""Rollouts -> the paper's in-domain metrics (Table 1), tool redundancy, a step's metrics; its tables' arithmetic.

A metric is first a sum and a count, which add up over ranks, and then their quotient.
"""
from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from math import comb, fsum

from slca import ranks
from slca.advantages import Advantages
from slca.learner import Batch
from slca.rewards import process_score
from slca.rollout import Episode
from slca.segments import SUMMARY, TOOL

TOLERANCE = 1e-9  # .1 + .25 + .15 + .1 + .3 is .8999999999999999 in floats


Sums = dict[str, tuple[float, float]]  # name -> (sum, count)


def means(found: Sums) -> dict[str, float]:
    """0 where nothing was counted."""
    return {name: total / count if count else 0.0 for name, (total, count) in found.items()}


def over_ranks(found: Sums) -> Sums:
    """Sums and counts of all ranks together."""
    totals, counts = (ranks.all_sum({name: pair[i] for name, pair in found.items()}) for i in (0, 1))
    return {name: (totals[name], counts[name]) for name in found}


def _of(values: Sequence[float]) -> tuple[float, float]:
    return fsum(values), len(values)


def metrics(episodes: Sequence[Episode], success_threshold: float = 0.9) -> dict[str, float]:
    """Means of `sums`, and their number n."""
    return means(sums(episodes, success_threshold)) | {"n": len(episodes)}


def sums(episodes: Sequence[Episode], success_threshold: float = 0.9) -> Sums:
    """Over scored episodes. Success is process >= threshold; no_call counts only tasks with gold calls.

    Process is that of the paper's weights, also where training used others. redundant_calls: mean of
    max(0, predicted - gold); calls_per_task: valid calls the policy made.
    """
    scores = [e.rewards for e in episodes]
    process = [process_score(s) for s in scores]
    due = [s for s in scores if not s.gold_empty]
    return {
        "name_f1": _of([s.name for s in scores]),
        "arg_match": _of([(s.key + s.value) / 2 for s in scores]),
        "parallel": _of([s.parallel for s in scores]),
        "process": _of(process),
        "summary": _of([s.summary for s in scores]),
        "success": _of([float(p >= success_threshold - TOLERANCE) for p in process]),
        "no_call": _of([float(s.omission) for s in due]),
        "redundant_calls": _of([max(0, s.n_predicted - s.n_gold) for s in scores]),
        "calls_per_task": _of([s.n_predicted for s in scores]),
        "gold_calls_per_task": _of([s.n_gold for s in scores]),
        "tool_turns": _of([e.tool_turns for e in episodes]),
    }


def well_formed(episodes: Sequence[Episode]) -> Sums:
    """Share of call blocks that are valid to the letter, over episodes that open or close one."""
    return {"fmt": _of([s.fmt for s in (e.rewards for e in episodes) if s.n_open or s.n_close])}


def values_right(episodes: Sequence[Episode]) -> Sums:
    """Share of gold argument values that are right, over episodes that call where calls are due: the copy gate."""
    return {"sft_copy": _of([e.rewards.value for e in episodes if not e.rewards.gold_empty and e.rewards.n_predicted])}


def agreement(episodes: Sequence[Episode]) -> Sums:
    """Share of rated replies on which the judge agrees with the rules."""
    return {"judge_agreement": _of([float(e.judge_agrees) for e in episodes if e.judge_agrees is not None])}


def by_subset(episodes: Sequence[Episode], success_threshold: float = 0.9) -> dict[str, dict[str, float]]:
    """The same metrics for each kind of task."""
    kinds = sorted({e.task.subset for e in episodes})
    return {k: metrics([e for e in episodes if e.task.subset == k], success_threshold) for k in kinds}


def step_sums(episodes: Sequence[Episode], batch: Batch, advantages: Advantages) -> Sums:
    """What the scored rollouts of a training step were like; `report.GLOSSARY` explains each."""
    scores, mask = [e.rewards for e in episodes], batch.policy_mask == 1
    known, size = sums(episodes), advantages.tokens.abs()
    groups: dict[int, list[int]] = {}
    for i, e in enumerate(episodes):
        groups.setdefault(e.group, []).append(i)

    def mean_size(where) -> tuple[float, float]:
        return float(size[where].double().sum()), int(where.sum())

    def dead(stream) -> tuple[float, float]:
        return _of([not bool(stream[rows].any()) for rows in groups.values()])

    picked = ("process", "summary", "success", "name_f1", "parallel", "no_call", "redundant_calls", "calls_per_task",
              "tool_turns")
    return {k: known[k] for k in picked} | {
        "reward": _of([s.total for s in scores]), "fmt": _of([s.fmt for s in scores]),
        "key": _of([s.key for s in scores]), "value": _of([s.value for s in scores]),
        "malformed": _of([s.n_valid < max(s.n_open, s.n_close) for s in scores]),
        "turn_limit": _of([e.status == "turn_limit" for e in episodes]),
        "length_limit": _of([e.status in ("length_limit", "tool_overflow") for e in episodes]),
        "response_tokens": _of([e.response_length for e in episodes]),
        **{k: _of([getattr(e, k) for e in episodes])
           for k in ("responder_failures", "judge_failures", "results_cut", "results_forged")},
        **agreement(episodes),
        "advantage_abs": mean_size(mask), "advantage_tool": mean_size(batch.labels == TOOL),
        "advantage_summary": mean_size(batch.labels == SUMMARY), "dead_tool": dead(advantages.tool),
        "dead_summary": dead(advantages.summary),
        "entropy": (-float(batch.logprobs[mask].double().sum()), int(mask.sum())),
    }


def pass_hat_k(trials: int, successes: int, k: int) -> float:
    """pass^k of a task (tau-bench): the chance that k of its trials, drawn without replacement, all succeed."""
    if not 1 <= k <= trials:
        raise ValueError(f"k is {k}, expected 1 to the number of trials, {trials}")
    return comb(successes, k) / comb(trials, k)


def pooled_mean(parts: Sequence[tuple[float, float]]) -> float:
    """Mean over all items of several sets, from (mean of a set, its number of items): the paper's overall columns."""
    return sum(mean * n for mean, n in parts) / sum(n for _, n in parts)


def factor_effects(closed: float, s_to_t: float, t_to_s: float, both: float) -> dict[str, float]:
    """Effects of the 2x2 support control (paper Table 22) from its cell means (Table 21), rounded half up to 0.01.

    Main effects average the two simple effects over the other factor; the interaction is not halved. In decimals,
    since binary floats round 0.795 down.
    """
    a, b, c, d = (Decimal(str(x)) for x in (closed, s_to_t, t_to_s, both))
    effects = {"close_s_to_t": ((a - b) + (c - d)) / 2, "open_t_to_s": ((c - a) + (d - b)) / 2,
               "interaction": (d - b) - (c - a)}
    return {name: float(e.quantize(Decimal("0.01"), ROUND_HALF_UP)) for name, e in effects.items()}
