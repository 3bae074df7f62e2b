"""Rollouts -> the paper's in-domain metrics (Table 1) and the counts behind tool redundancy."""
from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from slca.rollout import Episode

TOLERANCE = 1e-9  # .1 + .25 + .15 + .1 + .3 is .8999999999999999 in floats


def metrics(episodes: Sequence[Episode], success_threshold: float = 0.9) -> dict[str, float]:
    """Means over scored episodes. Success is process >= threshold; no_call counts only tasks with gold calls.

    redundant_calls: mean of max(0, predicted - gold); calls_per_task: valid calls the policy made.
    """
    scores = [e.rewards for e in episodes]
    due = [s for s in scores if not s.gold_empty]
    mean = lambda values: fmean(values) if values else 0.0  # noqa: E731
    return {
        "name_f1": mean([s.name for s in scores]),
        "arg_match": mean([(s.key + s.value) / 2 for s in scores]),
        "parallel": mean([s.parallel for s in scores]),
        "process": mean([s.process for s in scores]),
        "summary": mean([s.summary for s in scores]),
        "success": mean([float(s.process >= success_threshold - TOLERANCE) for s in scores]),
        "no_call": mean([float(s.omission) for s in due]),
        "redundant_calls": mean([max(0, s.n_predicted - s.n_gold) for s in scores]),
        "calls_per_task": mean([s.n_predicted for s in scores]),
        "gold_calls_per_task": mean([s.n_gold for s in scores]),
        "tool_turns": mean([e.tool_turns for e in episodes]),
        "n": len(scores),
    }


def values_right(episodes: Sequence[Episode]) -> float:
    """Share of gold argument values copied right, over episodes that call where calls are due: the copy gate's figure."""
    made = [e.rewards.value for e in episodes if not e.rewards.gold_empty and e.rewards.n_predicted]
    return fmean(made) if made else 0.0


def by_subset(episodes: Sequence[Episode], success_threshold: float = 0.9) -> dict[str, dict[str, float]]:
    """The same metrics for each kind of task."""
    kinds = sorted({e.task.subset for e in episodes})
    return {k: metrics([e for e in episodes if e.task.subset == k], success_threshold) for k in kinds}
