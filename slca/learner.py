"""Tensors of the update: log-probabilities at policy positions only, micro-batches by token budget, optimisers.

Rows are right-padded and sorted by length, so a micro-batch wastes little. The head runs in chunks that are computed
again in the backward pass: no tensor of (all tokens x vocabulary) is kept. Log-softmax is float32 whatever the compute
type. Left out: the formulas of the loss (`loss.py`) and anything that knows of rewards.
"""
from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slca.config import Config
from slca.loss import kl_loss, policy_loss
from slca.model import Policy
from slca.segments import SUMMARY, TOOL

HEAD_CHUNK = 4096  # positions whose logits exist at a time
# Shapes are rounded up to few sizes: the CPU's matrix library keeps a compiled kernel for every shape it meets, and
# would fill gigabytes with those of every length and count.
WIDTH_STEP, POSITION_STEP = 32, 256


def pad(rows: Sequence[Sequence], width: int | None = None, value=0, dtype=torch.long) -> Tensor:
    """Ragged rows -> [B, width] filled with `value` on the right. Without a width: the longest row, rounded up."""
    width = rounded(max(map(len, rows)), WIDTH_STEP) if width is None else width
    out = torch.full((len(rows), width), value, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, :len(row)] = torch.as_tensor(row, dtype=dtype)
    return out


def use_threads(count: int) -> None:
    """Set torch's CPU threads; 0: this process's cores divided by the local ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(count or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def micro_batches(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Row indices in batches of like length whose padded size stays within the budget (a longer row goes alone)."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[i] > token_budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def precision_context(precision: str, device: torch.device):
    """Autocast to bfloat16 for "bf16"; weights, optimiser state and the loss stay float32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def token_logprobs(policy: Policy, ids: Tensor, mask: Tensor, vocabulary: int, temperature: float = 1.0,
                   precision: str = "fp32") -> Tensor:
    """log pi(ids[b,t] | ids[b,:t]) where mask[b,t], else 0 -> float32 [B,T].

    ids int64 [B,T]; mask bool [B,T], False at t = 0 (nothing predicts it). The distribution is the sampler's: tempered
    and cut to the first `vocabulary` ids.
    """
    if bool(mask[:, 0].any()):
        raise ValueError("the first token of a row has no log-probability: mask[:, 0] must be 0")
    with precision_context(precision, ids.device):
        hidden = policy.hidden(ids[:, :-1])
        where = mask[:, 1:]
        logp = _gathered(hidden[where], policy.head, ids[:, 1:][where], vocabulary, temperature)
    return torch.zeros(ids.shape, device=ids.device).masked_scatter(mask, logp)


def _gathered(hidden: Tensor, head: Tensor, target: Tensor, vocabulary: int, temperature: float) -> Tensor:
    """hidden [N,E], target int64 [N] -> log-probability float32 [N], a chunk of positions at a time."""
    def chunk(h: Tensor, t: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(h, w[:vocabulary]).float()
        return -F.cross_entropy(logits if temperature == 1 else logits / temperature, t, reduction="none")

    count = len(target)
    spare = rounded(max(count, 1), POSITION_STEP) - count
    hidden, target = F.pad(hidden, (0, 0, 0, spare)), F.pad(target, (0, spare))
    parts = [(hidden[i:i + HEAD_CHUNK], target[i:i + HEAD_CHUNK]) for i in range(0, len(target), HEAD_CHUNK)]
    if len(parts) == 1 or not torch.is_grad_enabled():
        return torch.cat([chunk(h, t, head) for h, t in parts])[:count]
    return torch.cat([checkpoint(chunk, h, t, head, use_reentrant=False) for h, t in parts])[:count]


def optimizers(policy: Policy, kind: str, lr: float, weight_decay: float, betas: tuple[float, float],
               adam_lr: float | None = None) -> list[torch.optim.Optimizer]:
    """kind "adamw": one AdamW. "muon": Muon for the matrices inside the blocks, AdamW (adam_lr) for all else.

    Each parameter group remembers its peak rate as `peak`; `set_rate` scales it. Norms and biases do not decay.
    """
    matrices = [p for n, p in policy.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    tables = [p for n, p in policy.named_parameters() if p.ndim == 2 and ("embed" in n or "lm_head" in n)]
    vectors = [p for p in policy.parameters() if p.ndim < 2]
    decayed, found = tables, []
    if kind == "muon":
        found.append(torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay))
        lr = lr if adam_lr is None else adam_lr
    else:
        decayed = matrices + tables
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    found.append(torch.optim.AdamW(groups, lr=lr, betas=betas))
    for group in (g for o in found for g in o.param_groups):
        group["peak"] = group["lr"]
    return found


def set_rate(found: Sequence[torch.optim.Optimizer], share: float) -> None:
    """Every learning rate becomes `share` of its peak."""
    for group in (g for o in found for g in o.param_groups):
        group["lr"] = group["peak"] * share


def optimizer_step(policy: Policy, found: Sequence[torch.optim.Optimizer], grad_clip: float) -> float:
    """Clip, step, clear -> gradient norm before clipping. Raises FloatingPointError where it is not finite."""
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip))
    if norm != norm or norm == float("inf"):
        raise FloatingPointError(f"gradient norm {norm}")
    for optimizer in found:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm


@dataclass
class Batch:
    """Rollouts of a step as tensors, prompt included: ids, labels, policy_mask int64 and logprobs float32, all [B,T].

    advantages float32 [B,T] and old (log-probabilities before the first update; None: those of the pass itself) are
    filled in later; lengths: tokens of each row.
    """

    ids: Tensor
    labels: Tensor
    policy_mask: Tensor
    logprobs: Tensor
    lengths: list[int]
    advantages: Tensor | None = None
    old: Tensor | None = None

    @classmethod
    def of(cls, episodes: Sequence, device: torch.device) -> Batch:
        ids, labels, mask = (pad([getattr(e, name) for e in episodes]).to(device)
                             for name in ("ids", "labels", "policy_mask"))
        logprobs = pad([e.logprobs for e in episodes], dtype=torch.float32).to(device)
        return cls(ids, labels, mask, logprobs, [len(e.ids) for e in episodes])


@torch.no_grad()
def all_logprobs(policy: Policy, batch: Batch, vocabulary: int, cfg: Config) -> Tensor:
    """Log-probabilities of all policy tokens under `policy`, float32 [B,T], 0 elsewhere."""
    out = torch.zeros_like(batch.logprobs)
    for rows in micro_batches(batch.lengths, cfg.micro_batch_tokens):
        width = rounded(max(batch.lengths[i] for i in rows), WIDTH_STEP)
        out[rows, :width] = token_logprobs(policy, batch.ids[rows, :width], batch.policy_mask[rows, :width] == 1,
                                           vocabulary, cfg.rollout.temperature, cfg.precision)
    return out


def policy_update(policy: Policy, reference: Policy | None, found: Sequence[torch.optim.Optimizer], batch: Batch,
                  rows: Sequence[int], vocabulary: int, cfg: Config) -> dict[str, float]:
    """One optimiser update on these rows of the batch -> metrics.

    The denominators are those of the whole update and known before its first backward, so micro-batches change
    nothing. Rows without any advantage stay in the denominators, but are not run where no KL term needs them.
    Raises FloatingPointError where loss or gradient is not finite.
    """
    loss_cfg, rl = cfg.loss, cfg.rl
    mask, labels = batch.policy_mask[rows], batch.labels[rows]
    counts = {"segment_weights": loss_cfg.segment_weights, "token_count": int(mask.sum()),
              "sequence_count": int(mask.any(1).sum()),
              "segment_counts": (int((labels == TOOL).sum()), int((labels == SUMMARY).sum()))}
    # without a given constant: the longest response of this update, from its first sampled token to its end
    norm_length = loss_cfg.norm_length or max(
        batch.lengths[i] - int(batch.policy_mask[i].argmax()) for i in rows)
    work = [i for i in rows if loss_cfg.kl_coef > 0 or bool(batch.advantages[i].any())]
    sums = dict.fromkeys(("loss", "kl", "clip_fraction", "dual_clip_fraction", "approx_kl", "logprob_gap"), 0.0)
    widest, tokens = 0.0, 0
    for part in micro_batches([batch.lengths[i] for i in work], cfg.micro_batch_tokens):
        part = [work[i] for i in part]
        width = rounded(max(batch.lengths[i] for i in part), WIDTH_STEP)
        ids, mask, labels, stored, advantages = (t[part, :width] for t in (
            batch.ids, batch.policy_mask, batch.labels, batch.logprobs, batch.advantages))
        logp = token_logprobs(policy, ids, mask == 1, vocabulary, cfg.rollout.temperature, cfg.precision)
        old = logp.detach() if batch.old is None else batch.old[part, :width]
        result = policy_loss(logp, old, advantages, mask, loss_cfg.clip_low, loss_cfg.clip_high, loss_cfg.dual_clip,
                             loss_cfg.aggregation, norm_length, labels=labels, **counts)
        loss = result.loss
        if loss_cfg.kl_coef > 0:
            with torch.no_grad():
                ref = token_logprobs(reference, ids, mask == 1, vocabulary, cfg.rollout.temperature, cfg.precision)
            kl = kl_loss(logp, ref, mask, loss_cfg.kl_kind, loss_cfg.aggregation, norm_length, labels=labels, **counts)
            loss = loss + loss_cfg.kl_coef * kl.loss
            sums["kl"] += float(kl.token_kl.detach().sum())
        if not torch.isfinite(loss):
            raise FloatingPointError(f"policy loss {loss.item()}")
        loss.backward()
        n = int(mask.sum())
        gap = (logp.detach() - stored).abs() * mask
        widest, tokens = max(widest, float(gap.max())), tokens + n
        sums["loss"] += loss.item()
        sums["logprob_gap"] += float(gap.sum())
        for name in ("clip_fraction", "dual_clip_fraction", "approx_kl"):
            sums[name] += float(getattr(result, name)) * n
    norm = optimizer_step(policy, found, rl.grad_clip) if work else 0.0
    means = {k: v / max(1, tokens) for k, v in sums.items() if k != "loss"}
    return means | {"loss": sums["loss"], "grad_norm": norm, "logprob_gap_max": widest}
