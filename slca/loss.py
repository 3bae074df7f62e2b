"""The update's loss: clipped surrogate with dual clip and its variants, KL estimators, and how token losses become one.

Values under a zero mask may be anything, NaN included: they are replaced before any arithmetic, so neither loss nor
gradient sees them. Denominators can be those of a whole optimiser update, so that the losses of its micro-batches add
up. Left out: which micro-batches there are, and the sum over ranks.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .segments import SUMMARY, TOOL, binary_mask

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_over_constant", "segment_mean")
KL_KINDS = ("k1", "k2", "k3", "abs")
Count = float | Tensor


class PolicyLoss(NamedTuple):
    loss: Tensor  # scalar
    token_losses: Tensor  # [B,T], 0 where masked
    clip_fraction: Tensor  # the last three: means over this batch's policy tokens, without a graph
    dual_clip_fraction: Tensor
    approx_kl: Tensor


class KLLoss(NamedTuple):
    loss: Tensor  # scalar
    token_kl: Tensor  # [B,T], 0 where masked


def _kept(x: Tensor, mask: Tensor, name: str) -> Tensor:
    """x [B,T] in at least float32, with 0 where masked; the gradient there is exactly 0 too."""
    if x.shape != mask.shape:
        raise ValueError(f"{name} has shape {list(x.shape)}, policy_mask {list(mask.shape)}")
    return torch.where(mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0)


def aggregate(token_losses: Tensor, mask: Tensor, aggregation: str = "token_mean", norm_length: float | None = None,
              labels: Tensor | None = None, segment_weights: tuple[float, float] = (1.0, 1.0),
              token_count: Count | None = None, sequence_count: Count | None = None,
              segment_counts: Sequence[Count] | None = None) -> Tensor:
    """token_losses [B,T], mask [B,T] -> scalar. With l the masked losses:

    token_mean              sum l / policy tokens
    seq_mean_token_mean     mean over rows of (sum l / policy tokens of the row)
    seq_mean_token_sum      mean over rows of sum l; rows without policy tokens are left out of both
    seq_sum_over_constant   sum l / norm_length, or / T (Dr.GRPO, as verl has it: the number of rows does not enter)
    segment_mean            over tool and summary tokens: sum of segment_weight * (sum l of the segment / its tokens)

    token_count, sequence_count (rows with policy tokens) and segment_counts (tool, summary) are those of the whole
    optimiser update; None takes this batch's. Give norm_length if micro-batches are padded to different T.
    An empty mask gives 0 with a graph. Raises ValueError for shapes or an unknown aggregation.
    """
    mask = binary_mask(mask)
    losses = _kept(token_losses, mask, "token_losses")
    if aggregation == "token_mean":
        return losses.sum() / _count(token_count, mask)
    if aggregation in ("seq_mean_token_mean", "seq_mean_token_sum"):
        rows = losses.sum(1)  # [B]
        if aggregation == "seq_mean_token_mean":
            rows = rows / mask.sum(1).clamp(min=1)
        return rows.sum() / _count(sequence_count, mask.any(1))
    if aggregation == "seq_sum_over_constant":
        return losses.sum() / (max(mask.shape[1], 1) if norm_length is None else norm_length)
    if aggregation == "segment_mean":
        if labels is None or labels.shape != mask.shape:
            raise ValueError("segment_mean needs labels of the mask's shape")
        loss = 0.0
        for s, (label, weight) in enumerate(zip((TOOL, SUMMARY), segment_weights, strict=True)):
            tokens = mask & (labels == label)
            count = _count(None if segment_counts is None else segment_counts[s], tokens)
            loss = loss + weight * torch.where(tokens, losses, 0.0).sum() / count
        return loss
    raise ValueError(f"unknown aggregation {aggregation!r}: use one of {', '.join(AGGREGATIONS)}")


def _count(given: Count | None, members: Tensor) -> Count:
    """A given count, else the number of members; at least 1, as nothing over nothing is 0 here."""
    return members.sum().clamp(min=1) if given is None else max(given, 1)


def _inputs(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor,
            policy_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = binary_mask(policy_mask)
    return (mask, _kept(log_prob, mask, "log_prob"), _kept(old_log_prob.detach(), mask, "old_log_prob"),
            _kept(advantages.detach(), mask, "advantages"))


def _clip(ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return ratio.clamp(1 - clip_low, 1 + clip_high)


def policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, policy_mask: Tensor, clip_low: float = 0.2,
                clip_high: float = 0.2, dual_clip: float = 3.0, aggregation: str = "token_mean",
                norm_length: float | None = None, importance_weights: Tensor | None = None,
                labels: Tensor | None = None, segment_weights: tuple[float, float] = (1.0, 1.0),
                token_count: Count | None = None, sequence_count: Count | None = None,
                segment_counts: Sequence[Count] | None = None) -> PolicyLoss:
    """The clipped surrogate of PPO with dual clip (arXiv 1912.09729). All tensors [B,T]; gradient only to log_prob.

    ratio = exp(clamp(log_prob - old_log_prob, +-20));  l1 = -A ratio;  l2 = -A clip(ratio, 1 - clip_low, 1 + clip_high)
    l = max(l1, l2), and where A < 0 at most -A dual_clip (math.inf turns that off). importance_weights multiply l.
    clip_fraction: share of policy tokens with l2 > l1; dual_clip_fraction: with A < 0 and max(l1, l2) > -A dual_clip;
    approx_kl: mean of clamp(old - new, +-20). The rest is as in `aggregate`, which also says what raises.
    """
    mask, new, old, a = _inputs(log_prob, old_log_prob, advantages, policy_mask)
    if not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    log_ratio = (new - old).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain, clipped = -a * ratio, -a * _clip(ratio, clip_low, clip_high)
    larger = torch.maximum(plain, clipped)
    ceiling = torch.where(a < 0, -a * dual_clip, torch.inf)
    losses = torch.minimum(larger, ceiling)
    if importance_weights is not None:
        losses = losses * _kept(importance_weights.detach(), mask, "importance_weights")
    loss = aggregate(losses, mask, aggregation, norm_length, labels=labels, segment_weights=segment_weights,
                     token_count=token_count, sequence_count=sequence_count, segment_counts=segment_counts)
    n = _count(None, mask)
    return PolicyLoss(loss, losses, (clipped > plain).detach().sum() / n, (larger > ceiling).detach().sum() / n,
                      -log_ratio.detach().sum() / n)


def gspo_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, policy_mask: Tensor, clip_low: float = 3e-4,
              clip_high: float = 4e-4, dual_clip: float = 3.0, aggregation: str = "seq_mean_token_mean",
              norm_length: float | None = None, importance_weights: Tensor | None = None, **counts) -> PolicyLoss:
    """GSPO (arXiv 2507.18071): one ratio a sequence, exp(mean over its policy tokens of log_prob - old_log_prob).

    The token form: the value of that ratio with each token's own gradient, so that advantages may differ within a row.
    Otherwise as `policy_loss`. Its clip ranges are far smaller than PPO's.
    """
    mask, new, old, _ = _inputs(log_prob, old_log_prob, advantages, policy_mask)
    mean = (new.detach() - old).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    # its log-ratio to this "old" is the sequence's, and its gradient the token's
    return policy_loss(new, new.detach() - mean, advantages, mask, clip_low, clip_high, dual_clip, aggregation,
                       norm_length, importance_weights, **counts)


def cispo_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, policy_mask: Tensor, clip_low: float = 0.2,
               clip_high: float = 0.2, dual_clip: float = 3.0, aggregation: str = "token_mean",
               norm_length: float | None = None, importance_weights: Tensor | None = None, **counts) -> PolicyLoss:
    """CISPO (arXiv 2506.13585): l = -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log_prob.

    No token loses its gradient. The arguments are those of `policy_loss`; dual_clip has no part in it.
    """
    mask, new, old, a = _inputs(log_prob, old_log_prob, advantages, policy_mask)
    log_ratio = (new.detach() - old).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    weight = _clip(ratio, clip_low, clip_high)
    losses = -weight * a * new
    if importance_weights is not None:
        losses = losses * _kept(importance_weights.detach(), mask, "importance_weights")
    n = _count(None, mask)
    return PolicyLoss(aggregate(losses, mask, aggregation, norm_length, **counts), losses,
                      ((weight != ratio) & mask).sum() / n, torch.zeros(()), -log_ratio.sum() / n)


def sapo_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, policy_mask: Tensor, clip_low: float = 0.2,
              clip_high: float = 0.2, dual_clip: float = 3.0, aggregation: str = "token_mean",
              norm_length: float | None = None, importance_weights: Tensor | None = None, **counts) -> PolicyLoss:
    """SAPO, a soft gate in the place of the clip: l = -A (4 / tau) sigmoid(tau (ratio - 1)).

    tau is 1 where A > 0, else 1.05. The arguments are those of `policy_loss`; the clips have no part in it, and their
    fractions are 0.
    """
    mask, new, old, a = _inputs(log_prob, old_log_prob, advantages, policy_mask)
    log_ratio = torch.clamp(new - old, -20.0, 20.0)
    tau = torch.where(a > 0, 1.0, 1.05)
    losses = -a * (4 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1))
    if importance_weights is not None:
        losses = losses * _kept(importance_weights.detach(), mask, "importance_weights")
    none = torch.zeros(())
    return PolicyLoss(aggregate(losses, mask, aggregation, norm_length, **counts), losses, none, none,
                      -log_ratio.detach().sum() / _count(None, mask))


def truncated_weights(old_log_prob: Tensor, sampler_log_prob: Tensor, cap: float) -> Tensor:
    """Truncated importance weights: min(exp(old - sampler's log-probability), cap) of each token, [B,T] -> [B,T].

    For policy_loss's importance_weights, where sampler and learner differ (bfloat16 rollouts).
    """
    return (old_log_prob - sampler_log_prob).detach().clamp(max=20.0).exp().clamp(max=cap)


def kl_loss(log_prob: Tensor, ref_log_prob: Tensor, policy_mask: Tensor, kind: str = "k3",
            aggregation: str = "token_mean", norm_length: float | None = None, labels: Tensor | None = None,
            segment_weights: tuple[float, float] = (1.0, 1.0), token_count: Count | None = None,
            sequence_count: Count | None = None, segment_counts: Sequence[Count] | None = None) -> KLLoss:
    """Estimators of KL(policy || reference) at sampled tokens (joschu.net/blog/kl-approx.html). All tensors [B,T].

    With d = log_prob - ref_log_prob:  k1 = d,  k2 = d^2 / 2,  abs = |d|,  and k3 = exp(-d) + d - 1, where -d is
    clamped to +-20 and the value to +-10. Gradient only to log_prob. The rest is as in `aggregate`.
    """
    mask = binary_mask(policy_mask)
    d = _kept(log_prob, mask, "log_prob") - _kept(ref_log_prob.detach(), mask, "ref_log_prob")
    if kind == "k1":
        kl = d
    elif kind == "k2":
        kl = d.square() / 2
    elif kind == "abs":
        kl = d.abs()
    elif kind == "k3":
        gap = (-d).clamp(-20.0, 20.0)
        kl = (gap.exp() - gap - 1).clamp(-10.0, 10.0)
    else:
        raise ValueError(f"unknown KL kind {kind!r}: use one of {', '.join(KL_KINDS)}")
    loss = aggregate(kl, mask, aggregation, norm_length, labels=labels, segment_weights=segment_weights,
                     token_count=token_count, sequence_count=sequence_count, segment_counts=segment_counts)
    return KLLoss(loss, kl)
