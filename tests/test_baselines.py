"""ToolPO, RLTR and the other baselines: the golden vectors, and the worked examples W13, W14, W22 to W25."""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slca.baselines import (
    RLTR_INVALID,
    completeness,
    correct_calls,
    gdpo_advantages,
    gdpo_sum,
    mt_grpo_advantages,
    outcome_by_rule,
    overlong_penalty,
    planner_reward,
    repeated_calls,
    rltr_advantages,
    sharpo_advantages,
    toolpo_advantages,
    toolrl_reward,
    trajectory_text,
    vote,
)
from slca.data.task import Task
from slca.judge import LLMJudge, solved
from slca.rewards import Call, HierR, gold_steps, score_completion
from slca.rollout import Episode
from slca.segments import segment_labels


def golden(name: str):
    cases = json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
    return pytest.mark.parametrize("case", cases, ids=[c["id"] for c in cases])


def close(got, want):
    got, want = (torch.as_tensor(x, dtype=torch.float32) for x in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


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


# ---- rewards

def tokens_of(case):
    i = case["input"]
    return score_completion(i["completion"], i["allowed_tools"], i["gold_tool_calls"])


def made(scores):
    return [call for block in scores.blocks for call in block]


@golden("baseline_toolpo_reward")
def test_golden_toolpo_reward(case):
    i, want, scores = case["input"], case["expected"], tokens_of(case)
    gold = [call for step in gold_steps(i["gold_tool_calls"]) for call in step]
    correct = correct_calls(made(scores), gold)
    assert (correct, scores.omission) == (want["correct_call_count"], want["omission"])
    if not scores.omission:
        close(correct / len(gold) if gold else 1.0, want["correct_call_ratio"])
    said, asked = iter(i["outcome_judge_replies"]), []

    def write(chats):
        asked.extend(chats)
        return [next(said) for _ in chats]

    e = Episode(Task("t", [{"role": "user", "content": "q"}], []), 0, 0, [], 0, [], [], rewards=scores)
    assert solved([e], LLMJudge(SimpleNamespace(texts=write)), 1.0) == [want["outcome_reward"]]
    assert len(asked) == want["judge_calls_made"]


@golden("baseline_rltr_reward")
def test_golden_rltr_reward(case):
    i, want, scores = case["input"], case["expected"], tokens_of(case)
    votes = [vote(text) for text in i["completeness_checker_replies"]]
    assert scores.omission == want["omission"] and trajectory_text(i["completion"]) == want["trajectory_text"]
    if scores.omission:
        assert planner_reward(scores, votes) == RLTR_INVALID  # theirs reports -0.5 and carries an invalid format
        return
    close(completeness(votes), want["completeness"])
    assert repeated_calls(made(scores)) == want["repeat_count"]
    assert max(scores.n_open, scores.n_close) - scores.n_valid == want["error_count"]
    close(planner_reward(scores, votes), want["score"])


def test_w14_rewards():
    one, twice = HierR(n_open=1, n_close=1, n_valid=1), HierR(n_open=2, n_close=2, n_valid=2, blocks=(
        (Call("f", {"a": 1}),), (Call("f", {"a": 1}),)))
    close([planner_reward(twice, [1, 1, 0]), planner_reward(one, [1, 1, 1]), planner_reward(
        HierR(n_open=2, n_close=1, n_valid=1), [1, 1, 1]), planner_reward(one, [1, 0, 0, None], refused=1)],
        [2 / 3 - .1, 1.0, -1.0, 1 / 3 - .2])


@pytest.mark.parametrize("rule, made_, want", [
    ("all_gold", ["a", "b"], 1), ("all_gold", ["a", "b", "c"], 1), ("all_gold", ["a"], 0), ("all_gold", [], 0),
    ("all_gold_only", ["a", "b"], 1), ("all_gold_only", ["a", "b", "c"], 0), ("process", ["a", "b"], 1),
    ("process", ["a", "b", "c"], 0)])
def test_outcome_rules(rule, made_, want):
    gold = [[{"name": n, "arguments": {}} for n in ("a", "b")]]
    block = json.dumps([{"name": n, "arguments": {}} for n in made_])
    scores = score_completion(f"<tool_call>{block}</tool_call>" if made_ else "no call", "abc", gold)
    correct = correct_calls(made(scores), [c for step in gold_steps(gold) for c in step])
    assert outcome_by_rule(rule, scores, correct) == want
    with pytest.raises(ValueError, match="unknown outcome rule"):
        outcome_by_rule("other", scores, correct)


# ---- W22, W23, W24 and SHARPO

def test_w22_overlong():
    assert [overlong_penalty(n, 8192, 4096) for n in (3000, 4096, 6144, 8192)] == [0, 0, -.5, -1]


def test_w23_gdpo():
    mask = torch.ones(4, 3)
    got = gdpo_advantages(mask, ["g"] * 4, ([0, 1, 0, 1], [0, 0, 1, 1]))
    close(gdpo_sum(["g"] * 4, ([0, 1, 0, 1], [0, 0, 1, 1]), eps=1e-6), [-1.732048, 0, 0, 1.732048])
    close(got.tool, [-1.224658, 0, 0, 1.224658])
    close(got.tokens, torch.tensor([-1.224658, 0, 0, 1.224658])[:, None].expand(4, 3))
    close(gdpo_sum(["g"] * 2, ([0, 1], [0, 0]), eps=1e-6), [-.707106, .707106])
    close(gdpo_sum(["g"] * 2, ([0, 1], [0, 1]), eps=1e-6), [-1.414212, 1.414212])  # told apart from one reward alone


def test_w24_mt_grpo():
    labels = torch.tensor([[1, 0, 2]] * 4)
    got = mt_grpo_advantages(labels, ["g"] * 4, [1, 0, 1, 0], [1, 1, 0, 0])
    close(got.tokens[:, 0], [1.731751, 0, 0, -1.731751])
    close(got.tokens[:, 2], [.865875, -.865875, .865875, -.865875])


def test_w25_toolrl():
    def price(*symbols):
        return [Call("price", {"symbol": s}) for s in symbols]

    assert toolrl_reward(price("AAPL", "MSFT"), price("AAPL", "MSFT")) == pytest.approx(3.0)
    left = [Call("search", {"q": 1}), *price("MSFT", "AAPL")]
    assert toolrl_reward(left, price("AAPL", "MSFT")) == pytest.approx(2.6)
    assert toolrl_reward([Call("f", {"a": 1, "b": 2})], [Call("f", {"a": 1, "b": 3})]) == pytest.approx(1.5)
    assert toolrl_reward(None, price("AAPL")) == toolrl_reward([], price("AAPL")) == -3


def test_sharpo_is_bounded_and_keeps_signs():
    a = torch.tensor([[1.0, 1.0, -1.0, 0.0, 2.0]])
    segments = torch.tensor([[0, 0, 1, 1, -1]])
    gap = torch.tensor([[9.0, 11.0, 5.0, -1.0, 7.0]])
    got = sharpo_advantages(a, segments, gap, alpha=.5, tau=1.0)
    close(got, [[1.5, 1.5, -(1 + .5 * torch.tanh(torch.tensor(-2.0))), 0, 2]])  # one factor a segment
    close(sharpo_advantages(a, segments, gap, alpha=0.0), a)
