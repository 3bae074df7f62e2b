"""The advantages of the methods SLCA is compared with: ToolPO (arXiv 2510.21618) and RLTR (arXiv 2508.19598).

Both as the SLCA authors adapted them to these rollouts. Left out: their rewards (judge, correct calls, checker votes).
"""
from __future__ import annotations

import torch
from torch import Tensor

from .advantages import Advantages, Groups, Values, checked_labels, group_normalize, per_rollout, route
from .advantages import whole_group_normalize as whole


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
