"""ToolPO and RLTR advantages: the golden vectors, and the worked examples W13 and W14."""
import json
from pathlib import Path

import pytest
import torch

from slca.baselines import rltr_advantages, toolpo_advantages
from slca.segments import segment_labels


def golden(name: str):
    cases = json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
    return pytest.mark.parametrize("case", cases, ids=[c["id"] for c in cases])


def close(got, want):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=torch.float32), rtol=1e-5, atol=1e-5)


@golden("baseline_toolpo_advantage")
def test_golden_toolpo(case):
    i, want = case["input"], case["expected"]
    got = toolpo_advantages(segment_labels(torch.tensor(i["policy_mask"])), i["group_ids"], i["outcome_reward"],
                            i["correct_call_ratio"], i["lambda_tool"], i["divide_by_std"], i["epsilon"])
    close(got.tokens, want["token_advantages"])
    close(got.summary, want["outcome_advantage_per_rollout"])
    close(got.tool, i["lambda_tool"] * torch.tensor(want["tool_advantage_per_rollout"]))  # theirs is before lambda


@golden("baseline_rltr_advantage")
def test_golden_rltr(case):
    i, want = case["input"], case["expected"]
    labels = segment_labels(torch.tensor(i["policy_mask"]))
    parts = torch.tensor([i["completeness"], i["repeat_penalty"], i["error_penalty"]])
    planner = torch.where(torch.tensor(i["format_valid"]) > .5, parts.sum(0), -1.0)
    if i["kl_share_per_token"] is not None:
        planner = planner + torch.where(labels == 1, torch.tensor(i["kl_share_per_token"]), 0.0).sum(1)
    close(planner, want["planner_reward_per_rollout"])
    got = rltr_advantages(labels, i["group_ids"], planner, i["divide_by_std"], i["epsilon"])
    close(got.tokens, want["token_advantages"])
    close(got.tool, want["tool_advantage_per_rollout"])
    assert got.summary.eq(0).all()


def test_toolpo_by_hand():
    """W13: the global term stays on tool tokens, where SLCA has none; the action term counts callers only."""
    labels = torch.tensor([[1, 0, 2]] * 3 + [[2, 2, 2]])
    outcome, ratio = [1, 0, 1, 0], [1, .5, .5, float("nan")]
    got = toolpo_advantages(labels, "gggg", outcome, ratio)
    close(got.summary, [.866024, -.866024, .866024, -.866024])
    close(got.tool, [1.154697, -.577348, -.577348, 0])
    close(got.tokens[:3, 0], [2.020720, -1.443372, .288676])
    assert torch.equal(got.tokens[:, 2], got.summary)
    plain = toolpo_advantages(labels, "gggg", outcome, ratio, divide_by_std=False)
    close(plain.summary, [.5, -.5, .5, -.5])
    close(plain.tool, [.333333, -.166667, -.166667, 0])
    close(toolpo_advantages(labels[:1], "g", [1.0], [1.0]).tokens[0], [.999999, 0, .999999])  # a group of one


def test_rltr_by_hand():
    """W14; and the summary learns nothing."""
    got = rltr_advantages(torch.tensor([[1, 0, 2]] * 4), "gggg", [.566667, 1.0, -1.0, .133333])
    close(got.tool, [.455673, .959823, -1.367020, -.048476])
    assert got.tokens[:, 1:].eq(0).all() and torch.equal(got.tokens[:, 0], got.tool)


@pytest.mark.parametrize("call", [
    lambda: toolpo_advantages(torch.tensor([[3]]), "g", [1], [1]),
    lambda: toolpo_advantages(torch.tensor([[1]]), "g", [1], [1, 2]),
    lambda: rltr_advantages(torch.tensor([[1]]), "gg", [1])])
def test_refuses(call):
    with pytest.raises(ValueError):
        call()
