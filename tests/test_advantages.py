"""Advantages: the golden vectors, the worked examples W2 to W12, and the invariants that make SLCA what it claims:
a stream is bit-identical under changes of the other stream's reward, groups do not interact, equal rewards give 0.
"""
import json
from pathlib import Path

import pytest
import torch

from slca.advantages import Advantages, group_normalize, grpo_advantages, per_rollout, slca_advantages
from slca.segments import segment_labels


def golden(name: str):
    cases = json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
    return pytest.mark.parametrize("case", cases, ids=[c["id"] for c in cases])


def close(got, want, tol: float = 1e-5):
    torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float32), torch.as_tensor(want, dtype=torch.float32),
                               rtol=tol, atol=tol)


def two_segments(n: int) -> torch.Tensor:
    """Labels [n,3]: one tool token, one ignored, one summary token."""
    return torch.tensor([[1, 0, 2]]).repeat(n, 1)


def slca(tool, summary, total=None, omission=None, labels=None, groups=None, **options) -> Advantages:
    n = len(tool)
    total = [t + s for t, s in zip(tool, summary, strict=True)] if total is None else total
    return slca_advantages(two_segments(n) if labels is None else labels, groups or ["g"] * n, tool, summary, total,
                           [0] * n if omission is None else omission, **options)


# ---- golden vectors

@golden("advantage_group_normaliser")
def test_golden_normaliser(case):
    i = case["input"]
    for scores in (i["scores"], torch.tensor(i["scores"])):
        close(group_normalize(scores, i["group_ids"], i["present"], i["divide_by_std"], i["epsilon"]),
              case["expected"]["advantages"])


@golden("advantage_slca")
def test_golden_slca(case):
    i, want = case["input"], case["expected"]
    share = i["kl_share_per_token"]
    got = slca_advantages(
        segment_labels(torch.tensor(i["policy_mask"])), i["group_ids"], torch.tensor(i["tool_reward"]),
        torch.tensor(i["summary_reward"]), i["total_reward"], i["omission"], i["lambda_tool"], i["lambda_summary"],
        divide_by_std=i["divide_by_std"], eps=i["epsilon"], kl_share=None if share is None else torch.tensor(share))
    close(got.tool, want["tool_advantage_per_rollout"])
    close(got.summary, want["summary_advantage_per_rollout"])
    close(got.tokens, want["token_advantages"])


@golden("advantage_unified_grpo")
def test_golden_grpo(case):
    i, want = case["input"], case["expected"]
    got = grpo_advantages(torch.tensor(i["policy_mask"]), i["group_ids"], i["total_reward"], i["divide_by_std"],
                          i["epsilon"])
    close(got.tokens, want["token_advantages"])
    close(got.tool, want["advantage_per_rollout"])
    assert torch.equal(got.tool, got.summary)


# ---- worked examples

@pytest.mark.parametrize("scores, groups, present, by_std, want", [  # W2
    ([1, 2, 3, 4], "gggg", None, True, [-1.161894, -.387298, .387298, 1.161894]),
    ([1, 2, 3, 4], "gggg", None, False, [-1.5, -.5, .5, 1.5]),
    ([1, 2, 3, 4], "gggg", [1, 1, 0, 0], True, [-.707106, .707106, 0, 0]),
    ([1, 2, 3, 4], "gggg", [0, 1, 0, 0], True, [0, 0, 0, 0]),
    ([1, 2, float("nan"), 4], "gggg", [1, 1, 0, 0], True, [-.707106, .707106, 0, 0]),  # the absent have no score
    ([5, 10], "ab", None, True, [0, 0]),
    ([.8, .4], "gg", None, True, [.707104, -.707104])])
def test_normaliser_by_hand(scores, groups, present, by_std, want):
    close(group_normalize(scores, groups, present, by_std), want)


@pytest.mark.parametrize("delta, want", [  # W11: a small gap is damped by eps, not blown up and not cut
    (1e-8, .005 / (.01 / 2 ** .5 + 1)), (1e-7, .046698), (1e-6, .292893), (1e-5, .619497), (1e-4, .697246),
    (1e-2, .707007), (1, .707106)])
def test_eps_floor(delta, want):
    close(group_normalize([0.0, delta], "gg"), [-want, want])


FIG9_TOOL, FIG9_SUMMARY = [.65, 1, 1, 1], [1, .25, .5, .25]


def test_sign_conflict_and_its_mirror():
    """W3, W4: unified GRPO rewards the worst tool use and punishes the best; SLCA does not."""
    got = slca(FIG9_TOOL, FIG9_SUMMARY)
    unified = grpo_advantages(torch.ones(4, 3), "gggg", [1.65, 1.25, 1.5, 1.25]).tool
    close(got.tool, [-1.499991, .499997, .499997, .499997])
    close(got.summary, [1.414210, -.707105, 0, -.707105])
    close(unified, [1.203265, -.823286, .443308, -.823286])
    std_t, std_s, std_u = (torch.tensor(x).std() for x in (FIG9_TOOL, FIG9_SUMMARY, [1.65, 1.25, 1.5, 1.25]))
    close((std_t * got.tool + std_s * got.summary) / std_u, unified, 2e-5)  # the leakage identity
    mirror = slca([1, .65, .65, .5], [0, .75, 1, .75])
    close([mirror.tool[0], mirror.summary[0]], [1.414207, -1.443372])
    close(grpo_advantages(torch.ones(4, 3), "gggg", [1, 1.4, 1.65, 1.25]).tool[0], -1.193376)


@pytest.mark.parametrize("routing, first, third", [  # W5
    (((1, 0), (0, 1)), (-1.49999, 1.41421), (.499997, 0)),
    (((1, 1), (0, 1)), (-.085782, 1.414210), (.499997, 0)),
    (((1, 0), (1, 1)), (-1.499991, -.085782), (.499997, .499997)),
    (((1, 1), (1, 1)), (-.085782, -.085782), (.499997, .499997))])
def test_support_control(routing, first, third):
    got = slca(FIG9_TOOL, FIG9_SUMMARY, routing=routing)
    close(got.tokens[[0, 2]][:, [0, 2]], [first, third], 2e-5)
    close(got.tool[0], -1.499991)  # before routing


@pytest.mark.parametrize("ratio, want", [(1, 1.203265), (2, -.210040), (3, -1.277772), (5, -1.465707), (1 / .525, 0)])
def test_reward_ratio(ratio, want):
    """W6: reweighting moves the unified advantage through zero; SLCA's does not depend on it (up to eps)."""
    total = [ratio * t + s for t, s in zip(FIG9_TOOL, FIG9_SUMMARY, strict=True)]
    close(grpo_advantages(torch.ones(4, 3), "gggg", total).tool[0], want, 2e-5)
    close(slca([5 * t for t in FIG9_TOOL], FIG9_SUMMARY).tool[0], -1.499998)


def test_omission_group():
    """W7, with Table 16's two ways to silence the summary stream; the omission has one run and no tool score."""
    labels = two_segments(4)
    labels[2] = torch.tensor([2, 2, 0])
    tool, summary, omission = [.8, .6, float("nan"), 1.0], [.75, .5, float("nan"), 1.0], [0, 0, 1, 0]
    args = dict(total=[1.55, 1.1, -.5, 2.0], omission=omission, labels=labels)
    got = slca(tool, summary, **args)
    close(got.tool, [0, -.999995, 0, .999995])
    close(got.summary, [.475292, .095058, -1.425877, .855526])
    close(got.tokens[2], [-1.425877, -1.425877, 0])
    close(grpo_advantages(labels > 0, "gggg", args["total"]).tool, [.470674, .057399, -1.412021, .883948])
    kept = slca(tool, summary, routing=((1, 0), (0, torch.tensor(omission))), **args)
    close(kept.tokens[:, [0, 2]], [[0, 0], [-.999995, 0], [-1.425877, 0], [.999995, 0]])
    silent = slca(tool, summary, routing=((1, 0), (0, 0)), **args)
    close(silent.tokens[:, [0, 2]], [[0, 0], [-.999995, 0], [0, 0], [.999995, 0]])


def test_penalty_lives_in_the_summary_stream():
    """W8: a negative total, or the omission flag, overrides; a penalised rollout with a tool run scores 0 there."""
    got = slca([.9, .3], [.8, .4], total=[-.5, .5])
    close(got.tool, [-.707103, .707103])
    close(got.summary, [-.707106, .707106])
    flagged = slca([.9, .3], [.8, .4], total=[.2, .5], omission=[1, 0], divide_by_std=False)
    close(flagged.summary, [-.1, .1])
    close(flagged.tool, [-.15, .15])


def test_lone_caller_kl_share_and_lambda():
    labels = torch.tensor([[1, 1, 0, 2], [2, 2, 0, 0]])  # W9
    got = slca([.9, .1], [.9, .5], labels=labels)
    close(got.tool, [0, 0])
    close(got.summary, [.707104, -.707104])
    labels = torch.tensor([[1, 1, 0, 2], [1, 1, 0, 2]])  # W10: the share at ignored tokens must not count
    share = torch.tensor([[-.1, -.1, float("nan"), 0], [0, 0, 9., 0]])
    got = slca([.5, .5], [.5, .5], labels=labels, kl_share=share)
    close(got.tool, [-.707102, .707102])
    assert got.summary.eq(0).all()
    got = slca([0, 1], [0, 1], lambda_tool=2.0, lambda_summary=3.0)  # W12
    close(got.tokens, [[-1.414212, 0, -2.121317], [1.414212, 0, 2.121317]])
    close(slca([.8, .4], [.75, .25], lambda_tool=2.0, lambda_summary=3.0).tool, [1.414208, -1.414208])


# ---- invariants, on random batches

def batch(seed: int, n: int = 24, t: int = 15):
    """Labels, group ids and rewards of n rollouts in groups of mixed names and sizes, without penalties."""
    g = torch.Generator().manual_seed(seed)
    labels = segment_labels(torch.rand(n, t, generator=g) < .6)
    names = ["a", 7, "7", "gruppe ß", -3]
    groups = [names[i] for i in torch.randint(len(names), (n,), generator=g).tolist()]
    tool, summary = torch.rand(n, generator=g), torch.randint(5, (n,), generator=g) / 4
    return labels, groups, tool, summary, g


def run(labels, groups, tool, summary, **options) -> Advantages:
    return slca_advantages(labels, groups, tool, summary, tool + summary, torch.zeros(len(tool)), **options)


@pytest.mark.parametrize("seed", range(20))
def test_streams_are_isolated_to_the_bit(seed):
    """Invariants 1 and 2; the planted alternatives (unified, open routes) must fail what SLCA passes."""
    labels, groups, tool, summary, g = batch(seed)
    other = torch.rand(len(tool), generator=g)
    on_tool, on_summary = labels == 1, labels == 2
    base, moved = run(labels, groups, tool, summary), run(labels, groups, tool, other)
    assert base.tokens[labels == 0].eq(0).all()
    assert torch.equal(base.tokens[on_tool], moved.tokens[on_tool]) and torch.equal(base.tool, moved.tool)
    assert not torch.equal(base.tokens[on_summary], moved.tokens[on_summary])
    moved = run(labels, groups, other, summary)
    assert torch.equal(base.tokens[on_summary], moved.tokens[on_summary])
    assert not torch.equal(base.tokens[on_tool], moved.tokens[on_tool])
    for routing in (((1, 1), (0, 1)), ((1, 1), (1, 1))):
        a, b = (run(labels, groups, tool, s, routing=routing).tokens[on_tool] for s in (summary, other))
        assert not torch.equal(a, b)
    a, b = (grpo_advantages(labels > 0, groups, tool + s).tokens[on_tool] for s in (summary, other))
    assert not torch.equal(a, b)


@pytest.mark.parametrize("seed", range(10))
def test_moments_permutation_groups_lambda_shift(seed):
    """Invariants 3 to 6."""
    labels, groups, tool, summary, g = batch(seed)
    base = run(labels, groups, tool, summary)
    for stream, scores, label in ((base.tool, tool, 1), (base.summary, summary, 2)):
        for name in set(groups):
            members = torch.tensor([x == name for x in groups]) & (labels == label).any(1)
            std = scores[members].std() if members.sum() > 1 else torch.tensor(0.0)
            if std > 0:
                close(stream[members].mean(), 0)
                close(stream[members].std(), std / (std + 1e-6))
            else:
                assert stream[members].eq(0).all()
    order = torch.randperm(len(tool), generator=g)
    close(run(labels[order], [groups[i] for i in order], tool[order], summary[order]).tokens, base.tokens[order])
    alone = torch.tensor([x == groups[0] for x in groups])
    moved = run(labels, groups, torch.where(alone, tool, 9 - tool), torch.where(alone, summary, 7 * summary))
    assert torch.equal(moved.tokens[alone], base.tokens[alone])
    close(run(labels, groups, tool, summary, lambda_tool=2.5).tokens[labels == 1], 2.5 * base.tokens[labels == 1])
    muted = run(labels, groups, tool, summary, lambda_tool=0.0)
    assert muted.tokens[labels == 1].eq(0).all() and torch.equal(muted.summary, base.summary)
    close(run(labels, groups, tool + 3, summary).tokens, base.tokens, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("value", [.65, 1.65, .1, -.5, 1 / 3, 0.0, 1e4])
def test_equal_rewards_give_exactly_zero(value, dtype):
    """Invariant 7, for group sizes up to 33 and every input type (None: a Python list), beside a group that differs."""
    for n in (2, 3, 15, 16, 33):
        x = [value] * n + [0.0, 1.0]
        x = x if dtype is None else torch.tensor(x, dtype=dtype)
        groups, labels = [0] * n + [1, 1], two_segments(n + 2)
        for got in (group_normalize(x, groups), grpo_advantages(labels > 0, groups, x).tool,
                    grpo_advantages(labels > 0, groups, x, divide_by_std=False).tool, group_normalize(x, groups, eps=0),
                    slca_advantages(labels, groups, x, x, x, [0] * (n + 2)).tokens):
            assert got.dtype == torch.float32 and got[:n].eq(0).all() and got[n:].ne(0).any()


def test_nearly_equal_rewards_are_not_cut():
    x = torch.tensor([.65, .65, .65, .65 + 1e-6], dtype=torch.float64)
    gap = torch.tensor([0, 0, 0, 1e-6], dtype=torch.float64)
    close(group_normalize(x, "gggg"), group_normalize(gap, "gggg"))
    close(group_normalize([1e9, 1e9 + 1], "gg"), [-.707106, .707106])  # float32 could not tell these apart


def test_group_of_one():
    """SLCA gives 0; unified GRPO keeps its score, the authors' (and verl's) convention."""
    assert slca([.9], [.8]).tokens.eq(0).all()
    close(grpo_advantages(torch.ones(2, 1), ["a", "b"], [1.5, -.5]).tool, [1.5 / (1 + 1e-6), -.5 / (1 + 1e-6)])
    close(grpo_advantages(torch.ones(1, 1), ["a"], [1.5], divide_by_std=False).tool, [1.5])
    close(group_normalize([1.0, 2.0, 4.0], torch.tensor([5, 9, 5])), [-.707106, 0, .707106])  # ids may be a tensor


L2 = two_segments(2)


@pytest.mark.parametrize("call, word", [
    (lambda: group_normalize([[1.0]], "g"), "scores"),
    (lambda: group_normalize([1.0, 2.0], "g"), "group_ids"),
    (lambda: group_normalize([1.0, 2.0], "gg", [True]), "present"),
    (lambda: group_normalize([1.0, float("nan")], "gg"), "finite"),
    (lambda: slca_advantages(L2[0], "gg", [1, 2], [1, 2], [1, 2], [0, 0]), "labels"),
    (lambda: slca_advantages(L2 + 1, "gg", [1, 2], [1, 2], [1, 2], [0, 0]), "labels"),
    (lambda: slca_advantages(L2, "gg", [1], [1, 2], [1, 2], [0, 0]), "tool_reward"),
    (lambda: slca_advantages(L2, "gg", [1, 2], [1, 2, 3], [1, 2], [0, 0]), "summary_reward"),
    (lambda: slca_advantages(L2, "gg", [1, 2], [1, 2], [1, 2], [0]), "omission"),
    (lambda: slca([1, 2], [1, 2], routing=(1, 0, 0, 1)), "routing"),
    (lambda: slca([1, 2], [1, 2], routing=((1, 0), (0, torch.ones(3)))), "routing"),
    (lambda: slca([1, 2], [1, 2], kl_share=torch.zeros(2, 2)), "kl_share"),
    (lambda: grpo_advantages(torch.ones(2), "gg", [1, 2]), "policy_mask"),
    (lambda: grpo_advantages(torch.ones(2, 1), "gg", [1, 2, 3]), "total_reward")])
def test_refuses(call, word):
    with pytest.raises(ValueError, match=word):
        call()


def test_rewards_go_to_the_device_of_the_labels():
    """They come as Python lists; labels may be on a GPU. The meta device stands for it here."""
    assert per_rollout([1.0, 2.0], 2, "x", torch.device("meta")).device.type == "meta"
