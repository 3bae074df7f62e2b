"""The loss: golden vectors with gradients, the clip table, aggregation and its additivity over micro-batches, KL, and
that nothing under a zero mask, nor the other stream's reward, reaches a token's gradient.
"""
import json
import math
from pathlib import Path

import pytest
import torch

from slca.advantages import grpo_advantages, slca_advantages
from slca.loss import (
    AGGREGATIONS,
    aggregate,
    cispo_loss,
    gspo_loss,
    kl_loss,
    policy_loss,
    sapo_loss,
    truncated_weights,
)
from slca.segments import segment_labels


def golden(name: str):
    cases = json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
    return pytest.mark.parametrize("case", cases, ids=[c["id"] for c in cases])


def close(got, want, tol: float = 1e-5):
    torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float32), torch.as_tensor(want, dtype=torch.float32),
                               rtol=tol, atol=tol)


def leaf(x) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float32).clone().requires_grad_()


def policy(i: dict, lp: torch.Tensor):
    weights = i["importance_weights"]
    return policy_loss(lp, torch.tensor(i["old_log_prob"]), torch.tensor(i["advantages"]),
                       torch.tensor(i["policy_mask"]), i["clip_low"], i["clip_high"], i["dual_clip"], i["aggregation"],
                       i["norm_length"], None if weights is None else torch.tensor(weights))


# ---- golden vectors

@golden("loss_policy")
def test_golden_policy(case):
    i, want = case["input"], case["expected"]
    lp = leaf(i["log_prob"])
    got = policy(i, lp)
    got.loss.backward()
    close(got.loss, want["loss"])
    close(got.token_losses, want["token_losses"])
    close(lp.grad, want["grad_wrt_log_prob"])
    close(got.clip_fraction, want["clip_fraction"])
    close(got.dual_clip_fraction, want["dual_clip_fraction"])
    close(got.approx_kl, want["mean_old_minus_new_log_prob"])


@golden("loss_kl")
def test_golden_kl(case):
    i, want = case["input"], case["expected"]
    lp = leaf(i["log_prob"])
    got = kl_loss(lp, torch.tensor(i["ref_log_prob"]), torch.tensor(i["policy_mask"]), i["kind"], i["aggregation"],
                  i["norm_length"])
    got.loss.backward()
    close(got.token_kl, want["token_kl"])
    close(got.loss, want["loss"])
    close(lp.grad, want["grad_wrt_log_prob"])


@golden("loss_aggregation")
def test_golden_aggregation(case):
    i = case["input"]
    got = aggregate(torch.tensor(i["token_losses"]), torch.tensor(i["policy_mask"]), i["aggregation"], i["norm_length"],
                    token_count=i["global_token_count"], sequence_count=i["global_sequence_count"])
    close(got * (i["data_parallel_size"] or 1), case["expected"]["loss"])


@golden("loss_combined")
def test_golden_combined(case):
    i, want = case["input"], case["expected"]
    lp = leaf(i["log_prob"])
    first = policy(i, lp).loss
    second = kl_loss(lp, torch.tensor(i["ref_log_prob"]), torch.tensor(i["policy_mask"]), i["kl_kind"],
                     i["aggregation"], i["norm_length"]).loss
    loss = first + i["kl_coefficient"] * second
    loss.backward()
    for got, name in ((first, "policy_loss"), (second, "kl_loss"), (loss, "loss")):
        close(got, want[name])
    close(lp.grad, want["grad_wrt_log_prob"])


# ---- worked examples

@pytest.mark.parametrize("ratio, a, high, dual, loss, grad", [  # W17, gradient with respect to the log-probability
    (1.0, 1, .2, 3.0, -1.0, -1.0), (1.5, 1, .2, 3.0, -1.2, 0), (.5, 1, .2, 3.0, -.5, -.5),
    (1.5, -1, .2, 3.0, 1.5, 1.5), (.5, -1, .2, 3.0, .8, 0), (5.0, -1, .2, 3.0, 3.0, 0),
    (1.5, 1, .28, 3.0, -1.28, 0), (1.25, 1, .28, 3.0, -1.25, -1.25), (1.25, 1, .2, 3.0, -1.2, 0),
    (.75, -1, .28, 3.0, .8, 0),  # the lower bound is its own
    (5.0, -1, .2, math.inf, 5.0, 5.0), (1.0, 0, .2, math.inf, 0, 0)])
def test_clip_table(ratio, a, high, dual, loss, grad):
    lp = leaf([[math.log(ratio)]])
    got = policy_loss(lp, torch.zeros(1, 1), torch.tensor([[float(a)]]), torch.ones(1, 1), .2, high, dual)
    got.loss.backward()
    close(got.loss, loss)
    close(lp.grad.item(), grad)
    assert got.dual_clip_fraction == float(dual == 3 and ratio == 5)
    clipped = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < .8)
    assert got.clip_fraction == float(clipped)
    close(got.approx_kl, -math.log(ratio))


LOSSES, MASK = torch.tensor([[1., 3, 9, 9], [2, 2, 2, 6]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize("aggregation, length, want", [  # W18
    ("token_mean", None, 16 / 6), ("seq_mean_token_mean", None, 2.5), ("seq_mean_token_sum", None, 8),
    ("seq_sum_over_constant", 8, 2), ("seq_sum_over_constant", None, 4)])
def test_aggregation_by_hand(aggregation, length, want):
    close(aggregate(LOSSES, MASK, aggregation, length), want)
    padded = torch.cat([LOSSES, torch.full((1, 4), 5.)]), torch.cat([MASK, torch.zeros(1, 4, dtype=torch.long)])
    close(aggregate(*padded, aggregation, length), want)  # a row without policy tokens does not enter


@pytest.mark.parametrize("aggregation, want", [
    ("token_mean", -.248949), ("seq_mean_token_mean", -.249264), ("segment_mean", -.227327)])
def test_two_stream_loss(aggregation, want):
    """W19: the two streams share one loss; a tool token's gradient under token_mean is -A / 7."""
    labels = torch.tensor([[1, 1, 0, 2, 2, 2], [1, 0, 2, 0, 0, 0]])
    a = torch.tensor([[-1.5, -1.5, 0, 1.414214, 1.414214, 1.414214], [.5, 0, 0, 0, 0, 0]])
    lp = leaf(torch.full((2, 6), -1.0))
    got = policy_loss(lp, lp, a, labels > 0, aggregation=aggregation, labels=labels)
    got.loss.backward()
    close(got.loss, want)
    if aggregation == "token_mean":
        close(lp.grad[0, :2], [.214286, .214286])
    if aggregation == "segment_mean":
        heavy = policy_loss(lp, lp, a, labels > 0, aggregation=aggregation, labels=labels, segment_weights=(2.0, .5))
        close(heavy.loss, 2 * 2.5 / 3 - .5 * 3 * 1.414214 / 4)


@pytest.mark.parametrize("lp, ref, kind, want", [  # W20
    (-1, -1.2, "k1", .2), (-1, -1.2, "k2", .02), (-1, -1.2, "k3", .018731), (-1.2, -1, "k1", -.2),
    (-1.2, -1, "k2", .02), (-1.2, -1, "k3", .021403), (-1.2, -1, "abs", .2), (-1, -1, "k3", 0), (-26, -1, "k3", 10),
    (-26, -1, "k1", -25)])
def test_kl_by_hand(lp, ref, kind, want):
    close(kl_loss(torch.tensor([[float(lp)]]), torch.tensor([[float(ref)]]), torch.ones(1, 1), kind).loss, want)


# ---- properties

def batch(seed: int, n: int = 8, t: int = 12):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, t + 1, (n, 1), generator=g)
    mask = (torch.rand(n, t, generator=g) < .7) & (torch.arange(t) < lengths)
    lp, old, ref = (-3 * torch.rand(3, n, t, generator=g)).unbind()
    return lp, lp + .4 * (old - old.mean()), ref, torch.randn(n, t, generator=g), mask, lengths


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_add_up(aggregation, seed):
    """Ragged micro-batches with the update's counts sum to the whole batch: loss and gradient, and KL likewise.

    Without the counts they do not (the planted bug), whatever the split; seq_sum_over_constant needs none.
    """
    lp, old, ref, a, mask, lengths = batch(seed)
    labels, t = segment_labels(mask), lp.shape[1]
    counts = dict(token_count=mask.sum(), sequence_count=int(mask.any(1).sum()),
                  segment_counts=[(labels == s).sum() for s in (1, 2)])
    order = lengths[:, 0].argsort()
    parts = [order[:1], order[1:4], order[4:6], order[6:]]  # short rows first: every part is cut to its own length

    def losses(x, rows, cut, **given):
        at = (rows, slice(0, cut))
        options = dict(aggregation=aggregation, norm_length=t, labels=labels[at], segment_weights=(.7, 1.5), **given)
        weights = torch.full_like(x, 1.1)[at]
        return (policy_loss(x[at], old[at], a[at], mask[at], importance_weights=weights, **options).loss
                + .3 * kl_loss(x[at], ref[at], mask[at], **options).loss)

    whole, split = leaf(lp), leaf(lp)
    everything = torch.arange(len(lp))
    want = losses(whole, everything, t)
    want.backward()
    got = sum(losses(split, rows, max(1, int(lengths[rows].max())), **counts) for rows in parts)
    got.backward()
    close(got, want)
    close(split.grad, whole.grad)
    naive = sum(losses(lp, rows, t) for rows in parts)
    assert torch.allclose(naive, want, atol=1e-5) == (aggregation == "seq_sum_over_constant")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_values_never_matter(aggregation):
    """NaN and infinities under the mask: loss and gradients are bit-equal to those with zeros there, and 0 under it."""
    lp, old, ref, a, mask, _ = batch(1)
    labels = segment_labels(mask)

    def run(junk: float):
        x, o, r, b, w = (torch.where(mask, v, junk) for v in (lp, old, ref, a, torch.full_like(lp, .9)))
        x = x.requires_grad_()
        got = policy_loss(x, o, b, mask, aggregation=aggregation, importance_weights=w, labels=labels)
        kl = [kl_loss(x, r, mask, kind, aggregation, labels=labels) for kind in ("k1", "k2", "k3", "abs")]
        (got.loss + sum(k.loss for k in kl)).backward()
        return [*got, *(v for k in kl for v in k), x.grad]

    clean = run(0.0)
    assert clean[-1][~mask].eq(0).all() and clean[-1][mask].ne(0).any()
    for junk in (float("nan"), float("inf"), -float("inf"), 1e30):
        for x, y in zip(clean, run(junk), strict=True):
            assert torch.equal(x, y)
    losses = torch.where(mask, a, float("nan")).requires_grad_()
    aggregate(losses, mask, aggregation, labels=labels).backward()
    assert losses.grad.isfinite().all() and losses.grad[~mask].eq(0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_empty_mask_is_zero_with_a_graph(aggregation):
    lp = leaf(torch.full((2, 3), float("nan")))
    empty = torch.zeros(2, 3)
    for counts in ({}, dict(token_count=0, sequence_count=0, segment_counts=(0, 0)), dict(token_count=9)):
        options = dict(aggregation=aggregation, labels=empty.long(), **counts)
        got = policy_loss(lp, lp, empty, empty, **options)
        loss = got.loss + kl_loss(lp, lp, empty, **options).loss
        loss.backward()
        assert loss == 0 and lp.grad.eq(0).all() and got.clip_fraction == got.approx_kl == 0


def test_a_tool_token_never_feels_the_summary_reward():
    """Invariant 8, through the real loss at a policy that has moved: bit-identical under SLCA, not under GRPO."""
    g = torch.Generator().manual_seed(3)
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 1, 1, 1], [1, 0, 1, 1, 0, 0, 1, 0]]).repeat(4, 1)
    labels, groups = segment_labels(mask), [0, 1, 2] * 4
    tool, zero = torch.rand(12, generator=g), torch.zeros(12)
    old = -2 * torch.rand(12, 8, generator=g)
    lp = old + .3 * torch.randn(12, 8, generator=g)

    def gradient(tool, summary, unified=False):
        a = (grpo_advantages(mask, groups, tool + summary) if unified else
             slca_advantages(labels, groups, tool, summary, tool + summary, zero))
        x = leaf(lp)
        policy_loss(x, old, a.tokens, mask).loss.backward()
        return x.grad

    one, two = torch.randint(5, (2, 12), generator=g) / 4
    base, moved, swapped = gradient(tool, one), gradient(tool, two), gradient(one, two)
    assert torch.equal(base[labels == 1], moved[labels == 1]) and not torch.equal(base, moved)
    assert torch.equal(moved[labels == 2], swapped[labels == 2]) and not torch.equal(moved, swapped)
    assert not torch.equal(gradient(tool, one, True)[labels == 1], gradient(tool, two, True)[labels == 1])


def test_low_precision_input_and_no_other_gradient():
    """bf16 log-probabilities are lifted to float32 first; old, reference and advantages get no gradient."""
    lp, old, ref, a, mask, _ = batch(2)
    half = lp.bfloat16()
    got = policy_loss(half, old, a, mask)
    assert got.loss.dtype == torch.float32 and torch.equal(got.loss, policy_loss(half.float(), old, a, mask).loss)
    x, others = leaf(lp), [leaf(v) for v in (old, a, ref, torch.ones_like(a))]
    loss = policy_loss(x, others[0], others[1], mask, importance_weights=others[3]).loss
    (loss + kl_loss(x, others[2], mask).loss).backward()
    assert x.grad.ne(0).any() and all(v.grad is None for v in others)


ONE = torch.ones(1, 2)


@pytest.mark.parametrize("call, word", [
    (lambda: policy_loss(ONE, ONE[:, :1], ONE, ONE), "old_log_prob"),
    (lambda: policy_loss(ONE, ONE, ONE[0], ONE), "advantages"),
    (lambda: policy_loss(ONE, ONE, ONE, ONE, dual_clip=.5), "dual_clip"),
    (lambda: policy_loss(ONE, ONE, ONE, ONE, importance_weights=ONE[:, :1]), "importance_weights"),
    (lambda: policy_loss(ONE, ONE, ONE, 2 * ONE), "policy_mask"),
    (lambda: aggregate(ONE, ONE, "mean"), "aggregation"),
    (lambda: aggregate(ONE, ONE, "segment_mean"), "labels"),
    (lambda: kl_loss(ONE, ONE, ONE, "k4"), "k4")])
def test_refuses(call, word):
    with pytest.raises(ValueError, match=word):
        call()


# ---- variants

def test_w21_gspo():
    new, old = torch.tensor([[.1, -.1, .3]], requires_grad=True), torch.zeros(1, 3)
    mask, a = torch.ones(1, 3), torch.tensor([[1.0, 2.0, -1.0]])
    got = gspo_loss(new, old, a, mask, clip_low=.5, clip_high=.5)
    close(got.token_losses, -a * 1.105171)
    got.loss.backward()
    close(new.grad, -a * 1.105171 / 3)  # the sequence's ratio, each token's own gradient
    assert gspo_loss(new, old, a, mask).clip_fraction == pytest.approx(2 / 3)  # 1.105 is far over 1 + 4e-4
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    plain = policy_loss(x, x, x, torch.ones(2, 5))  # at ratio 1 both are the same
    close(gspo_loss(x, x, x, torch.ones(2, 5), aggregation="token_mean").loss, plain.loss)


def test_gspo_reads_no_masked_token():
    new, mask = torch.tensor([[.2, float("nan"), .4]]), torch.tensor([[1, 0, 1]])
    got = gspo_loss(new, torch.zeros(1, 3), torch.ones(1, 3), mask, 1.0, 1.0)
    close(got.token_losses, [[-1.349859, 0, -1.349859]])  # exp(.3)


def test_w21_cispo():
    new = torch.tensor([[-1.0]], requires_grad=True)
    got = cispo_loss(new, new.detach() - torch.tensor(1.5).log(), torch.ones(1, 1), torch.ones(1, 1))
    got.loss.backward()
    close(got.loss, 1.2)
    close(new.grad, [[-1.2]])  # PPO's clip would leave none
    assert got.clip_fraction == 1 and got.dual_clip_fraction == 0
    same = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    losses = [f(same, same.detach(), torch.tensor([[1.0, -2.0]]), torch.ones(1, 2)).loss for f in (cispo_loss,
                                                                                                 policy_loss)]
    grads = [torch.autograd.grad(loss, same)[0] for loss in losses]
    close(grads[0], grads[1])  # at ratio 1 it is the plain policy gradient


def test_w21_sapo():
    ratio = torch.tensor([[1.0, 1.5, 1.5]])
    new, a = ratio.log().requires_grad_(True), torch.tensor([[1.0, 1.0, -1.0]])
    got = sapo_loss(new, torch.zeros(1, 3), a, torch.ones(1, 3))
    close(got.token_losses, [[-2.0, -2.489837, 2.393585]])
    got.loss.backward()
    assert float(new.grad[0, 0]) == pytest.approx(-1 / 3)  # at ratio 1 the plain policy gradient


def test_w21_truncated_weights():
    old, sampler = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.5, -2.0, -0.5]])
    got = truncated_weights(old, sampler, 2.0)
    close(got, [[1.648721, 2.0, .606531]])
    new, mask = torch.zeros(1, 3), torch.ones(1, 3)
    close(policy_loss(new, new, torch.ones(1, 3), mask, importance_weights=got).loss, -got.mean())
    close(cispo_loss(new - 1, new - 1, torch.ones(1, 3), mask, importance_weights=got).loss, got.mean())


def test_dapo_clips_higher():
    ratio = torch.tensor([[1.5, 1.25]]).log()
    got = policy_loss(ratio, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), .2, .28)
    close(got.token_losses, [[-1.28, -1.25]])
