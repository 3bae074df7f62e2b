"""From rewards to per-token advantages: the group normaliser, SLCA and unified GRPO.

SLCA normalises the tool reward and the summary reward separately within a group of rollouts of one prompt and gives
each only to the tokens that earned it; the 2x2 routing matrix opens the paths for the paper's controls. All results
are float32. Left out: the loss, and the other estimators (`baselines.py`).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .segments import SUMMARY, TOOL, binary_mask

Values = Tensor | Sequence[float]
Groups = Tensor | Sequence[str | int]
Number = float | Tensor  # a number, or a [B] tensor


class Advantages(NamedTuple):
    tokens: Tensor  # [B,T], exactly 0 on ignored tokens
    tool: Tensor  # [B] tool stream, after lambda, before routing
    summary: Tensor  # [B] summary stream, likewise


def per_rollout(values: Values, n: int, name: str, device: torch.device | None = None) -> Tensor:
    """values -> float64 [n]: exact for whatever comes in, so that rounding waits until equal members have cancelled."""
    x = torch.as_tensor(values, dtype=torch.float64).detach().to(device)
    if x.shape != (n,):
        raise ValueError(f"{name} must have shape [{n}], got {list(x.shape)}")
    return x


def checked_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """labels [B,T] of 0, 1, 2 -> (tool tokens, summary tokens), bool [B,T]. ValueError for anything else."""
    labels = torch.as_tensor(labels)
    if labels.dim() != 2:
        raise ValueError(f"labels must have shape [B, T], got {list(labels.shape)}")
    tool, summary = labels == TOOL, labels == SUMMARY
    if not (tool | summary | (labels == 0)).all():
        raise ValueError("labels must be 0 (ignored), 1 (tool) or 2 (summary)")
    return tool, summary


def _group_index(group_ids: Groups, n: int) -> tuple[Tensor, int]:
    """Names of groups in any order -> (int64 [n] number of each rollout's group, number of groups)."""
    ids = group_ids.tolist() if hasattr(group_ids, "tolist") else list(group_ids)
    if len(ids) != n:
        raise ValueError(f"group_ids has {len(ids)} entries for {n} rollouts")
    numbers: dict = {}
    return torch.tensor([numbers.setdefault(g, len(numbers)) for g in ids], dtype=torch.long), len(numbers)


def group_normalize(scores: Values, group_ids: Groups, present: Tensor | Sequence[bool] | None = None,
                    divide_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """(x - mean) / (std + eps) within each group, over its present members: the presence-filtered normaliser.

    scores [B] (any float type; absent entries may be NaN), present [B] bool -> float32 [B]. std is unbiased;
    divide_by_std=False leaves x - mean. Absent members and groups with fewer than two present members get 0.
    Equal members get exactly 0: scores are first taken relative to the group's smallest, which leaves zeros, where
    the mean of sixteen float32 0.65 would be off by a rounding that 1 / eps then blows up.
    Raises ValueError for wrong lengths or a present score that is not finite.
    """
    x = torch.as_tensor(scores, dtype=torch.float64).detach()
    if x.dim() != 1:
        raise ValueError(f"scores must have shape [B], got {list(x.shape)}")
    n = len(x)
    here = torch.ones_like(x, dtype=torch.bool) if present is None else torch.as_tensor(present).to(x.device).bool()
    if here.shape != x.shape:
        raise ValueError(f"present must have shape [{n}], got {list(here.shape)}")
    if not x[here].isfinite().all():
        raise ValueError("a score of a present rollout is not finite")
    index, n_groups = _group_index(group_ids, n)
    index = index.to(x.device)

    lowest = x.new_full((n_groups,), torch.inf).scatter_reduce(0, index[here], x[here], "amin")
    x = torch.where(here, x - lowest[index], 0.0).float()

    def group_sum(values: Tensor) -> Tensor:  # [B] -> [B], each member holds its group's sum
        return values.new_zeros(n_groups).index_add(0, index, values)[index]

    count = group_sum(here.float())
    centred = torch.where(here, x - group_sum(x) / count.clamp(min=1), 0.0)  # one alone is its own smallest: 0
    if not divide_by_std:
        return centred
    std = (group_sum(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(centred != 0, centred / (std + eps), 0.0)  # eps = 0 is allowed too


def whole_group_normalize(scores: Values, group_ids: Groups, divide_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO's normaliser: as `group_normalize` with all present, but a group of one has mean 0 and std 1."""
    normal = group_normalize(scores, group_ids, None, divide_by_std, eps)
    index, n_groups = _group_index(group_ids, len(normal))
    alone = (torch.bincount(index, minlength=n_groups)[index] == 1).to(normal.device)
    x = torch.as_tensor(scores, dtype=torch.float32, device=normal.device).detach()
    return torch.where(alone, x / (1 + eps) if divide_by_std else x, normal)


def slca_advantages(labels: Tensor, group_ids: Groups, tool_reward: Values, summary_reward: Values,
                    total_reward: Values, omission: Values, lambda_tool: float = 1.0, lambda_summary: float = 1.0,
                    routing: tuple[tuple[Number, Number], tuple[Number, Number]] = ((1, 0), (0, 1)),
                    divide_by_std: bool = True, eps: float = 1e-6, kl_share: Tensor | None = None) -> Advantages:
    """SLCA-GRPO: T = lambda_tool N(tool reward), S = lambda_summary N(summary reward), each on its own tokens.

    labels [B,T]; rewards and omission (0/1) [B] -> float32. A penalised rollout (omission > 0.5, or a negative total)
    has tool reward 0 and its total as the summary reward. Only rollouts with tokens of a segment enter its statistics;
    elsewhere T or S is 0. kl_share [B,T] (token reward minus score, for KL in the reward) is added to the reward of
    the segment its token is in. lambda comes after N: before it, it would cancel.
    routing ((TT, TS), (ST, SS)): tool tokens get TT*T + TS*S, summary tokens ST*T + SS*S; entries are numbers or [B].
    Raises ValueError for bad shapes, labels or routing.
    """
    on_tool, on_summary = checked_labels(labels)
    n = len(on_tool)
    total = per_rollout(total_reward, n, "total_reward", on_tool.device)
    penalised = (per_rollout(omission, n, "omission", on_tool.device) > 0.5) | (total < 0)
    tool = torch.where(penalised, 0.0, per_rollout(tool_reward, n, "tool_reward", on_tool.device))
    summary = torch.where(penalised, total, per_rollout(summary_reward, n, "summary_reward", on_tool.device))
    if kl_share is not None:
        share = torch.as_tensor(kl_share, dtype=torch.float64).detach().to(on_tool.device)
        if share.shape != on_tool.shape:
            raise ValueError(f"kl_share must have shape {list(on_tool.shape)}, got {list(share.shape)}")
        tool = tool + torch.where(on_tool, share, 0.0).sum(1)
        summary = summary + torch.where(on_summary, share, 0.0).sum(1)
    t = lambda_tool * group_normalize(tool, group_ids, on_tool.any(1), divide_by_std, eps)
    s = lambda_summary * group_normalize(summary, group_ids, on_summary.any(1), divide_by_std, eps)
    return Advantages(route(t, s, on_tool, on_summary, routing), t, s)


def route(tool: Tensor, summary: Tensor, on_tool: Tensor, on_summary: Tensor,
          routing: tuple[tuple[Number, Number], tuple[Number, Number]]) -> Tensor:
    """Two streams [B] and their tokens, bool [B,T] -> float32 [B,T] through the 2x2 routing matrix."""
    try:
        (tt, ts), (st, ss) = routing
    except (TypeError, ValueError):
        raise ValueError("routing must be ((TT, TS), (ST, SS))") from None

    def mixed(of_tool: Number, of_summary: Number) -> Tensor:  # -> [B,1]
        a, b = (torch.as_tensor(c, dtype=torch.float32, device=tool.device) for c in (of_tool, of_summary))
        if not all(c.dim() == 0 or c.shape == tool.shape for c in (a, b)):
            raise ValueError(f"a routing entry must be a number or have shape [{len(tool)}]")
        return (a * tool + b * summary)[:, None]

    return torch.where(on_tool, mixed(tt, ts), torch.where(on_summary, mixed(st, ss), 0.0))


def turn_advantages(turn_index: Tensor, turn_scores: Sequence[Sequence[float]], group_ids: Groups,
                    divide_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Ours, beyond the paper: every call turn has a score of its own, normalised against the same turn of the group.

    turn_index int64 [B,T]: number of a token's turn in its rollout, below 0 for none; turn_scores[b][k]: of turn k
    (those of turns without tokens are passed over) -> float32 [B,T], 0 outside turns. A rollout that has ended before
    turn k counts with 0 there; one without any turn does not count.
    """
    counts = (turn_index.amax(1) + 1).clamp(min=0).tolist()
    if any(len(scores) < n for n, scores in zip(counts, turn_scores, strict=True)):
        raise ValueError(f"turn_scores has {[len(s) for s in turn_scores]} scores for {counts} turns")
    here = [n > 0 for n in counts]
    out = torch.zeros_like(turn_index, dtype=torch.float32)
    for k in range(max(counts, default=0)):
        scores = [s[k] if k < n else 0.0 for s, n in zip(turn_scores, counts, strict=True)]
        normal = group_normalize(scores, group_ids, here, divide_by_std, eps).to(out.device)
        out = torch.where(turn_index == k, normal[:, None], out)
    return out


def grpo_advantages(policy_mask: Tensor, group_ids: Groups, total_reward: Values, divide_by_std: bool = True,
                    eps: float = 1e-6) -> Advantages:
    """Unified GRPO, the paper's control without SLCA: one normalised total on all policy tokens.

    policy_mask [B,T], total_reward [B] -> float32; `tool` and `summary` hold the same value. A group of one keeps its
    score (GRPO's convention). Raises ValueError for bad shapes.
    """
    mask = binary_mask(policy_mask)
    total = per_rollout(total_reward, len(mask), "total_reward", mask.device)
    a = whole_group_normalize(total, group_ids, divide_by_std, eps)
    return Advantages(torch.where(mask, a[:, None], 0.0), a, a)
