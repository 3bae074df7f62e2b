"""From the scored rollouts of a step to per-token advantages: which rewards, which estimator.

`estimate` is the only place that chooses; the estimators are pure functions (`advantages.py`, `baselines.py`), and what
they need beyond HierR (an outcome verdict, a planner's reward, the score of each turn) is worked out here.
Left out: SHARPO, which needs a teacher's log-probabilities (`baselines.sharpo_advantages`).
"""
from __future__ import annotations

from collections.abc import Sequence
from math import fsum

import torch
from torch import Tensor

from slca import ranks
from slca.advantages import Advantages, group_normalize, grpo_advantages, slca_advantages, turn_advantages
from slca.baselines import (
    RLTR_INVALID,
    correct_calls,
    gdpo_advantages,
    mt_grpo_advantages,
    outcome_by_rule,
    overlong_penalty,
    planner_reward,
    rltr_advantages,
    toolpo_advantages,
    trajectory_text,
)
from slca.judge import checker_votes, solved
from slca.learner import Batch
from slca.rewards import Call, gold_steps, process_score, score_turns
from slca.rollout import Episode
from slca.segments import TOOL
from slca.settings import Config


def estimate(episodes: Sequence[Episode], batch: Batch, cfg: Config, judge=None) -> Advantages:
    """Per-token advantages of a step. judge: of the rollouts; asked again only for a verdict or for votes."""
    a, labels, mix = cfg.advantage, batch.labels, cfg.reward.mix
    scores, groups = [e.rewards for e in episodes], [e.group for e in episodes]
    tool, summary, total, omission = rewards(episodes, cfg, judge)
    if a.estimator == "grpo":
        return grpo_advantages(batch.policy_mask, groups, unified(tool, total, omission, cfg), a.divide_by_std, a.eps)
    if a.estimator == "toolpo":
        ratio = [correct_calls(*_calls(e)) / s.n_gold if s.n_gold else 1.0
                 for e, s in zip(episodes, scores, strict=True)]
        return toolpo_advantages(labels, groups, outcomes(episodes, cfg, judge), ratio, a.lambda_tool,
                                 a.divide_by_std, a.eps)
    if a.estimator == "rltr":
        planner = [planner_reward(s, v, e.call_errors, cfg.reward.repeat_penalty, cfg.reward.error_penalty)
                   for e, s, v in zip(episodes, scores, votes(episodes, cfg, judge), strict=True)]
        return rltr_advantages(labels, groups, planner, a.divide_by_std, a.eps)
    # an omission's total takes the place of its summary score, as in SLCA
    reply = [t if o else s for t, o, s in zip(total, omission, summary, strict=True)]
    if a.estimator == "mt_grpo":
        return mt_grpo_advantages(labels, groups, reply, tool)
    if a.estimator == "gdpo":
        return gdpo_advantages(batch.policy_mask, groups, (tool, reply), (mix.process, mix.summary),
                               spread=over_the_batch)
    routing = a.routing
    if a.summary_credit == "omissions":  # Table 16: statistics of the whole group, then only omissions keep theirs
        (tt, ts), (st, ss) = routing
        routing = (tt, ts), (st, ss * torch.tensor(omission))
    # the guard against penalised rollouts looks at HierR's total: a long response is no omission
    found = slca_advantages(labels, groups, tool, summary, [s.total for s in scores], omission, a.lambda_tool,
                            a.lambda_summary, routing, a.divide_by_std, a.eps)
    if a.turn_credit:
        index = turn_index(labels)
        by_turn = a.lambda_tool * turn_advantages(index, [turn_scores(e, cfg) for e in episodes], groups,
                                                  a.divide_by_std, a.eps)
        found = found._replace(tokens=torch.where(index >= 0, by_turn, found.tokens),
                               tool=by_turn.sum(1) / (index >= 0).sum(1).clamp(min=1))
    if a.abstention_credit:
        here = torch.tensor([s.gold_empty for s in scores], device=labels.device)
        x = group_normalize(tool, groups, here.cpu(), a.divide_by_std, a.eps).to(labels.device)
        tokens = torch.where(here[:, None] & (batch.policy_mask == 1), x[:, None], found.tokens)
        found = Advantages(tokens, *(torch.where(here, x, stream) for stream in (found.tool, found.summary)))
    return found


def rewards(episodes: Sequence[Episode], cfg: Config, judge=None) -> tuple[list[float], ...]:
    """(tool, summary, total, omission) of each rollout, as training has them: HierR's, or with `reward.tool: executed`
    a verdict for the calls, and DAPO's penalty for length taken off the first three."""
    scores = [e.rewards for e in episodes]
    tool, summary, total = ([getattr(s, k) for s in scores] for k in ("process", "summary", "total"))
    omission = [float(s.omission) for s in scores]
    if cfg.reward.tool == "executed":
        process, tool = tool, outcomes(episodes, cfg, judge)
        total = [t if o else t + cfg.reward.mix.process * (new - old)
                 for t, o, new, old in zip(total, omission, tool, process, strict=True)]
    if cfg.reward.overlong_buffer:
        cut = [overlong_penalty(e.response_length, cfg.rollout.max_response_tokens, cfg.reward.overlong_buffer)
               for e in episodes]
        tool, summary, total = ([x + c for x, c in zip(xs, cut, strict=True)] for xs in (tool, summary, total))
    return tool, summary, total, omission


def unified(tool: Sequence[float], total: Sequence[float], omission: Sequence[float], cfg: Config) -> list[float]:
    """GRPO's one reward: ratio * process + summary (Table 20); an omission keeps its penalty as it is."""
    extra = (cfg.advantage.reward_ratio - 1) * cfg.reward.mix.process
    return [t if o else t + extra * x for t, x, o in zip(total, tool, omission, strict=True)]


def _calls(e: Episode) -> tuple[list[Call], list[Call]]:
    """Valid calls made, and gold calls."""
    return ([call for block in e.rewards.blocks for call in block],
            [call for step in gold_steps(e.task.gold_calls) for call in step])


def outcomes(episodes: Sequence[Episode], cfg: Config, judge) -> list[float]:
    """R_succ of each rollout, 0 or 1: by the judge's verdict, or by a rule over its calls (`reward.outcome`).

    It is kept with the rollout, so that a judge is asked once.
    """
    due = [e for e in episodes if e.outcome is None]
    found = solved(due, judge, cfg.judge.timeout_s) if cfg.reward.outcome == "judge" else [
        outcome_by_rule(cfg.reward.outcome, e.rewards, correct_calls(*_calls(e))) for e in due]
    for e, outcome in zip(due, found, strict=True):
        e.outcome = outcome
    return [e.outcome for e in episodes]


def uses_outcome(cfg: Config) -> bool:
    return cfg.advantage.estimator == "toolpo" or cfg.reward.tool == "executed"


def votes(episodes: Sequence[Episode], cfg: Config, judge) -> list[list[float | None]]:
    """RLTR's votes on whether the calls of a rollout complete its task; where its format decides, none is asked."""
    due = [e for e in episodes if planner_reward(e.rewards, []) != RLTR_INVALID]
    whole = [float(correct_calls(*_calls(e)) == e.rewards.n_gold) for e in due]
    texts = [trajectory_text("\n".join(t if role == "assistant" else f"<tool_response>\n{t}\n</tool_response>"
                                       for role, t in e.turns)) for e in due]
    found = dict(zip(map(id, due), checker_votes(judge, [e.task.question for e in due], texts, whole,
                                                 cfg.reward.checker_votes), strict=True))
    return [found.get(id(e), []) for e in episodes]


# --- turns -----------------------------------------------------------------------------------------------------------

def turn_index(labels: Tensor) -> Tensor:
    """labels [B,T] -> int64 [B,T]: the number of a tool token's turn in its rollout, -1 elsewhere."""
    tool = labels == TOOL
    starts = tool.clone()
    starts[:, 1:] &= ~tool[:, :-1]
    return torch.where(tool, starts.long().cumsum(1) - 1, -1)


def turn_scores(e: Episode, cfg: Config) -> list[float]:
    """The part of the process score that each assistant turn earned: the score up to it less the score before it.

    Before the first turn it is that of a rollout without calls. The parts and that one sum to the process score.
    """
    weights = {k: getattr(cfg.reward.weights, k) for k in ("format", "name", "key", "value", "parallel")}

    def score(turns: list) -> float:
        found = score_turns(turns, e.task.allowed_tools, e.task.gold_calls, weights=weights,
                            parallel_rule=cfg.reward.parallel_rule)
        return 0.0 if found.omission else process_score(found, weights)

    ends = [i + 1 for i, (role, _) in enumerate(e.turns) if role == "assistant"]
    levels = [score([("assistant", "")]), *(score(e.turns[:end]) for end in ends)]
    return [after - before for before, after in zip(levels, levels[1:], strict=False)]


# --- what the streams have to do with each other ---------------------------------------------------------------------

def over_the_batch(x: Tensor) -> tuple[float, float]:
    """Mean and unbiased standard deviation of x [B] over all ranks."""
    total = ranks.all_sum({"n": len(x), "sum": float(x.double().sum())})
    mean = total["sum"] / max(1, total["n"])
    spread = ranks.all_sum({"spread": fsum((v - mean) ** 2 for v in x.tolist())})["spread"]
    return mean, (spread / max(1, total["n"] - 1)) ** 0.5


def leakage(episodes: Sequence[Episode], batch: Batch, cfg: Config, judge=None) -> dict[str, tuple[float, float]]:
    """How far one advantage for all tokens (GRPO's) would carry the summary reward into tool tokens.

    leak_flips: share of tool tokens (with a tool signal) whose unified advantage has the other sign than the tool
    stream's; leak_share: |w_S sigma_S S| / (|w_T sigma_T T| + |w_S sigma_S S|), the summary's part of it (method: U =
    (sigma_T T + sigma_S S) / sigma_U; w: reward.mix and the ratio), mean over tool tokens. (sum, count) each.
    """
    groups, mix = [e.group for e in episodes], cfg.reward.mix
    tool, summary, total, omission = rewards(episodes, cfg, judge)
    streams = slca_advantages(batch.labels, groups, tool, summary, [e.rewards.total for e in episodes], omission,
                              divide_by_std=False)
    u = grpo_advantages(batch.policy_mask, groups, unified(tool, total, omission, cfg), False).tool.cpu().double()
    t, s = streams.tool.cpu().double(), streams.summary.cpu().double()
    tokens = (batch.labels == TOOL).sum(1).cpu().double()
    of_tool, of_summary = cfg.advantage.reward_ratio * mix.process * t.abs(), mix.summary * s.abs()
    signal, either = tokens * (t != 0), tokens * (of_tool + of_summary > 0)
    share = of_summary / (of_tool + of_summary).clamp(min=1e-12)
    return {"leak_flips": (float((signal * (t * u < 0)).sum()), float(signal.sum())),
            "leak_share": (float((either * share).sum()), float(either.sum()))}
