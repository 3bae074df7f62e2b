"""The methods SLCA is compared with: their rewards and advantages, each a short function with its source.

ToolPO (arXiv 2510.21618) and RLTR (arXiv 2508.19598) as the SLCA authors adapted them to these rollouts; GDPO (arXiv
2601.05242), MT-GRPO (arXiv 2505.11821); DAPO's overlong penalty (arXiv 2503.14476); SHARPO's multiplier (arXiv
2610.00838), whose formula is a guess. Left out: who asks the judge or the checker (`credit.py`), and ToolPO's term for
folded memory.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .advantages import Advantages, Groups, Values, checked_labels, group_normalize, per_rollout, route
from .advantages import whole_group_normalize as whole
from .rewards import Call, HierR, loosely_equal, strip_reasoning
from .segments import binary_mask

RLTR_INVALID = -1.0  # the planner's reward for an invalid format


# --- ToolPO ----------------------------------------------------------------------------------------------------------

def correct_calls(predicted: Sequence[Call], gold: Sequence[Call]) -> int:
    """Gold calls that are met: same name, all its arguments loosely equal (others may be there), one to one.

    Greedy in gold order, as the authors have it. ToolPO's action reward is this over the number of gold calls, 1
    without any.
    """
    unused, found = list(predicted), 0
    for name, wanted in gold:
        at = next((i for i, c in enumerate(unused) if c.name == name and all(
            k in c.arguments and loosely_equal(c.arguments[k], v) for k, v in wanted.items())), None)
        if at is not None:
            del unused[at]
            found += 1
    return found


def verdict(reply: str | None) -> float | None:
    """A judge's text on whether the task was solved: 0 where it says "unsolved", 1 where "solved", None: unsure."""
    said = (reply or "").lower()
    return 0.0 if "unsolved" in said else 1.0 if "solved" in said else None


def outcome_by_rule(rule: str, scores: HierR, correct: int) -> float:
    """R_succ without a judge (paper Eq. 28 is not public; the default of the three is our guess): 1 or 0.

    all_gold: every gold call is met; all_gold_only: and no other made; process: a process score of 0.9 or more.
    An omission is 0. ValueError for another rule.
    """
    if rule not in ("all_gold", "all_gold_only", "process"):
        raise ValueError(f"unknown outcome rule {rule!r}: use all_gold, all_gold_only or process")
    if scores.omission or scores.error:
        return 0.0
    if rule == "process":
        return float(scores.process >= 0.9 - 1e-9)
    return float(correct == scores.n_gold and (rule == "all_gold" or scores.n_predicted == scores.n_gold))


def toolpo_advantages(labels: Tensor, group_ids: Groups, outcome_reward: Values, action_reward: Values,
                      lambda_tool: float = 1.0, divide_by_std: bool = True, eps: float = 1e-6) -> Advantages:
    """ToolPO: A = A_outcome on all policy tokens, plus lambda_tool * A_action on tool tokens.

    labels [B,T], rewards [B] -> float32. A_outcome is GRPO's over the whole group (a group of one keeps its score),
    A_action is normalised over the rollouts with tool tokens. divide_by_std=False is the ToolPO paper's own form.
    In the result `tool` is lambda_tool * A_action and `summary` A_outcome, routed as ((1, 1), (0, 1)).
    """
    on_tool, on_summary = checked_labels(labels)
    n = len(on_tool)
    outcome = whole(per_rollout(outcome_reward, n, "outcome_reward", on_tool.device), group_ids, divide_by_std, eps)
    action = per_rollout(action_reward, n, "action_reward", on_tool.device)
    tool = lambda_tool * group_normalize(action, group_ids, on_tool.any(1), divide_by_std, eps)
    return Advantages(route(tool, outcome, on_tool, on_summary, ((1, 1), (0, 1))), tool, outcome)


# --- RLTR ------------------------------------------------------------------------------------------------------------

def vote(reply: str | None) -> float | None:
    """A checker's text: the last 0 or 1 that stands alone; None where there is none (the vote does not count)."""
    found = re.findall(r"\b[01]\b", reply or "")
    return float(found[-1]) if found else None


def completeness(votes: Sequence[float | None]) -> float:
    """Mean of the votes that count, 0 without any."""
    counted = [v for v in votes if v is not None]
    return sum(counted) / len(counted) if counted else 0.0


def repeated_calls(calls: Sequence[Call]) -> int:
    """Valid calls that equal the one before them, in name and arguments."""
    def same(a: Call, b: Call) -> bool:
        try:
            return a == b
        except RecursionError:  # nested too deep to compare
            return False
    return sum(map(same, calls, calls[1:]))


def planner_reward(scores: HierR, votes: Sequence[float | None], refused: int = 0, repeat_penalty: float = 0.1,
                   error_penalty: float = 0.2) -> float:
    """RLTR: completeness, less the penalties for repeated calls and for `refused` ones.

    An invalid block is an invalid format, RLTR_INVALID, and so is an omission, as in the authors' code. Their error
    penalty counts those same blocks and thus never shows; here it is for well-formed calls that the simulator refused.
    """
    if scores.omission or scores.n_valid < max(scores.n_open, scores.n_close):
        return RLTR_INVALID
    calls = [call for block in scores.blocks for call in block]
    return completeness(votes) - repeat_penalty * repeated_calls(calls) - error_penalty * refused


def trajectory_text(completion: str) -> str:
    """What the checker is shown of a rollout: its calls and their results; all of it where it has neither."""
    text = strip_reasoning(completion)
    found = [m[0] for m in re.finditer(r"<tool_call>.*?</tool_call>|<tool_response>.*?</tool_response>", text, re.S)]
    return "\n".join(found) or text.strip()


def rltr_advantages(labels: Tensor, group_ids: Groups, planner_reward: Values, divide_by_std: bool = True,
                    eps: float = 1e-6) -> Advantages:
    """RLTR: the planner's reward, normalised over rollouts with tool tokens, on tool tokens; summary tokens get 0.

    labels [B,T], planner_reward [B] (completeness plus penalties, or -1 for an invalid format) -> float32.
    """
    on_tool, on_summary = checked_labels(labels)
    reward = per_rollout(planner_reward, len(on_tool), "planner_reward", on_tool.device)
    tool = group_normalize(reward, group_ids, on_tool.any(1), divide_by_std, eps)
    silent = torch.zeros_like(tool)
    return Advantages(route(tool, silent, on_tool, on_summary, ((1, 0), (0, 1))), tool, silent)


# --- others ----------------------------------------------------------------------------------------------------------

def mt_grpo_advantages(labels: Tensor, group_ids: Groups, outcome_reward: Values, turn_reward: Values,
                       alpha: float = 1.0, eps: float = 1e-4) -> Advantages:
    """MT-GRPO: A_outcome + alpha A_turn up to the last tool result (tool tokens), A_outcome after it.

    labels [B,T], rewards [B] -> float32; both normalised over the whole group. `tool` is alpha A_turn.
    """
    on_tool, on_summary = checked_labels(labels)
    n, device = len(on_tool), on_tool.device
    outcome = whole(per_rollout(outcome_reward, n, "outcome_reward", device), group_ids, eps=eps)
    turn = alpha * whole(per_rollout(turn_reward, n, "turn_reward", device), group_ids, eps=eps)
    return Advantages(route(turn, outcome, on_tool, on_summary, ((1, 1), (0, 1))), turn, outcome)


def gdpo_sum(group_ids: Groups, rewards: Sequence[Values], weights: Sequence[float] | None = None,
             eps: float = 1e-4) -> Tensor:
    """GDPO: each reward [B] normalised in its group, then their weighted sum, float32 [B]."""
    weights = [1.0] * len(rewards) if weights is None else weights
    return sum(w * whole(r, group_ids, eps=eps) for w, r in zip(weights, rewards, strict=True))


def gdpo_advantages(policy_mask: Tensor, group_ids: Groups, rewards: Sequence[Values],
                    weights: Sequence[float] | None = None, eps: float = 1e-4,
                    spread: Callable[[Tensor], tuple[float, float]] | None = None) -> Advantages:
    """GDPO: `gdpo_sum` whitened over the batch, one value on all policy tokens of a rollout.

    spread: mean and unbiased standard deviation of the sums [B], over all ranks; None: the batch is all here.
    """
    x = gdpo_sum(group_ids, rewards, weights, eps)
    mean, std = spread(x) if spread else (float(x.mean()), float(x.std()) if len(x) > 1 else 0.0)
    mask = binary_mask(policy_mask)
    a = ((x - mean) / (std + eps)).to(mask.device)
    return Advantages(torch.where(mask, a[:, None], 0.0), a, a)


def overlong_penalty(length: int, limit: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft punishment: 0 up to limit - buffer tokens, then falling in a line to -factor at the limit."""
    return min(0.0, -(length - (limit - buffer)) / buffer * factor)


def toolrl_reward(predicted: Sequence[Call] | None, gold: Sequence[Call]) -> float:
    """ToolRL's correctness (arXiv 2504.13958), -3 to 3: the ancestor of HierR's name, key and value scores.

    6 (r_name + sum) / (1 + sum over gold of 1 + its arguments) - 3; r_name is the Jaccard index of the name multisets;
    each gold call adds its best unused call of that name: Jaccard of the keys, and how many values are exactly equal.
    predicted None: the calls could not be parsed, -3.
    """
    if predicted is None:
        return -3.0
    ours, theirs = Counter(c.name for c in predicted), Counter(c.name for c in gold)
    found = (ours & theirs).total() / max(1, (ours | theirs).total()) if ours or theirs else 1.0
    unused = list(predicted)
    for name, wanted in gold:
        def gain(i: int, wanted: dict = wanted) -> float:
            given = unused[i].arguments
            keys = len(given.keys() & wanted.keys()) / len(given.keys() | wanted.keys()) if given or wanted else 1.0
            return keys + sum(k in given and given[k] == v for k, v in wanted.items())
        best = max((i for i, c in enumerate(unused) if c.name == name), key=gain, default=None)
        if best is not None:
            found += gain(best)
            del unused[best]
    return 6 * found / (1 + sum(1 + len(c.arguments) for c in gold)) - 3


def sharpo_advantages(advantages: Tensor, segments: Tensor, teacher_gap: Tensor, alpha: float = 0.5,
                      tau: float = 1.0) -> Tensor:
    """SHARPO (our guess of it): a bounded multiplier a segment, from how much the teacher prefers its tokens.

    advantages [B,T]; segments int [B,T], the number of a token's segment in its row (below 0: none); teacher_gap [B,T],
    teacher's minus policy's log-probability. w = clip(1 + alpha tanh(sign(A) mean(gap) / tau), 1 - alpha, 1 + alpha),
    detached; alpha < 1 keeps every sign, alpha = 0 changes nothing.
    """
    inside = segments >= 0
    index = torch.where(inside, segments, 0)
    sums, counts = (torch.zeros(len(index), int(index.max()) + 1).to(advantages).scatter_add(1, index, x)
                    for x in (torch.where(inside, teacher_gap.detach(), 0.0).to(advantages), inside.to(advantages)))
    mean = (sums / counts.clamp(min=1)).gather(1, index)
    factor = 1 + alpha * torch.tanh(advantages.sign() * mean / tau)
    return torch.where(inside, advantages * factor.clamp(1 - alpha, 1 + alpha), advantages)
