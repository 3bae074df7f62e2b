"""Tensors of the update: log-probabilities at policy positions only, micro-batches by token budget, the update itself.

The rollouts of a prompt stand in one micro-batch, where the prompt runs once for all of them. The head runs in chunks
that are computed again in the backward pass: no tensor of (tokens x vocabulary) is kept. Log-softmax is float32
whatever the compute type. Left out: the formulas of the loss (`loss.py`) and anything that knows of rewards.
"""
from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slca import ranks
from slca.config import override
from slca.lora import adapters_off
from slca.loss import cispo_loss, gspo_loss, kl_loss, policy_loss, sapo_loss, truncated_weights
from slca.model import Packed, Policy, RowBlock
from slca.optim import optimizer_step
from slca.phases import phases
from slca.products import bf16_runs, linear
from slca.segments import SUMMARY, TOOL
from slca.settings import Config
from slca.slots import rounded

CHUNK_LOGITS = 2 ** 21  # logits that exist at a time: they stay in the cache of a CPU
# Shapes are rounded up to few sizes: the CPU's matrix library keeps a compiled kernel for every shape it meets, and
# would fill gigabytes with those of every length and count.
WIDTH_STEP, POSITION_STEP = 32, 256


def pad(rows: Sequence[Sequence], width: int | None = None, value=0, dtype=torch.long) -> Tensor:
    """Ragged rows -> [B, width] filled with `value` on the right. Without a width: the longest row, rounded up."""
    width = rounded(max(map(len, rows), default=1), WIDTH_STEP) if width is None else width
    out = torch.full((len(rows), width), value, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, :len(row)] = torch.as_tensor(row, dtype=dtype)
    return out


def use_threads(count: int) -> None:
    """Set torch's CPU threads; 0: this process's cores divided by the local ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(count or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


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


def group_batches(lengths: Sequence[int], prompt_lengths: Sequence[int], groups: Sequence[int],
                  token_budget: int) -> Iterator[list[int]]:
    """Row indices in batches of whole groups of like length, within the budget of tokens where a prompt counts once.

    A group that is larger than the budget is cut up, and its prompt runs once in each piece.
    """
    pieces: list[tuple[int, list[int]]] = []  # (tokens, rows)
    for group in dict.fromkeys(groups):
        rows = sorted((i for i, g in enumerate(groups) if g == group), key=lambda i: (lengths[i], i))
        size, piece = prompt_lengths[rows[0]], []
        for i in rows:
            own = lengths[i] - prompt_lengths[i]
            if piece and size + own > token_budget:
                pieces.append((size, piece))
                size, piece = prompt_lengths[i], []
            size, piece = size + own, [*piece, i]
        pieces.append((size, piece))
    total, batch = 0, []
    for size, rows in sorted(pieces):
        if batch and total + size > token_budget:
            yield batch
            total, batch = 0, []
        total, batch = total + size, batch + rows
    if batch:
        yield batch


def precision_context(precision: str, device: torch.device):
    """Autocast to bfloat16 for "bf16" (where the machine has it); weights, optimiser state and loss stay float32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" and bf16_runs(device) else nullcontext()


def token_logprobs(policy: Policy, ids: Tensor, mask: Tensor, vocabulary: int, temperature: float = 1.0,
                   precision: str = "fp32") -> Tensor:
    """log pi(ids[b,t] | ids[b,:t]) where mask[b,t], else 0 -> float32 [B,T].

    ids int64 [B,T]; mask bool [B,T], False at t = 0 (nothing predicts it). The distribution is the sampler's: tempered
    and cut to the first `vocabulary` ids.
    """
    if bool(mask[:, 0].any()):
        raise ValueError("the first token of a row has no log-probability: mask[:, 0] must be 0")
    with precision_context(precision, ids.device):
        logp = policy.run(_plain_logprobs, ids, mask[:, 1:], vocabulary, temperature)
    return torch.zeros(ids.shape, device=ids.device).masked_scatter(mask, logp)


def _plain_logprobs(policy: Policy, ids: Tensor, where: Tensor, vocabulary: int, temperature: float) -> Tensor:
    return _gathered(policy.hidden(ids[:, :-1])[where], policy.head, ids[:, 1:][where], vocabulary, temperature)


def _packed_logprobs(policy: Policy, packed: Packed, before: Tensor, target: Tensor, vocabulary: int,
                     temperature: float) -> Tensor:
    return _gathered(policy.hidden_packed(packed).index_select(0, before), policy.head, target, vocabulary, temperature)


class _TokenLogprob(torch.autograd.Function):
    """log softmax(hidden W^T / temperature)[target] in chunks of positions; the way back makes the logits again."""

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, target: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(hidden, head, target)
        ctx.temperature = temperature
        logp = torch.empty(len(target), device=target.device)
        ctx.norm = torch.empty_like(logp)
        for i in _TokenLogprob.chunks(hidden, head):
            logits = linear(hidden[i], head).float().div_(temperature)
            ctx.norm[i] = logits.logsumexp(-1)
            logp[i] = logits.gather(1, target[i, None]).squeeze(1) - ctx.norm[i]
        return logp

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        hidden, head, target = ctx.saved_tensors
        hidden_grad, head_grad = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:  # under adapters the head is frozen
            head_grad = torch.zeros_like(head, dtype=torch.promote_types(head.dtype, torch.float32))
        for i in _TokenLogprob.chunks(hidden, head):
            logits = linear(hidden[i], head).float().div_(ctx.temperature)
            weight = logits.sub_(ctx.norm[i, None]).exp_().mul_(-grad[i, None] / ctx.temperature)
            weight.scatter_add_(1, target[i, None], grad[i, None] / ctx.temperature)
            weight = weight.to(hidden.dtype)
            hidden_grad[i] = linear(weight, head.t())
            if head_grad is not None:
                head_grad += linear(weight.t(), hidden[i].t())
        return hidden_grad, None if head_grad is None else head_grad.to(head.dtype), None, None

    @staticmethod
    def chunks(hidden: Tensor, head: Tensor) -> list[slice]:
        size = min(4096, max(256, CHUNK_LOGITS // len(head)))
        return [slice(i, i + size) for i in range(0, len(hidden), size)]


def _gathered(hidden: Tensor, head: Tensor, target: Tensor, vocabulary: int, temperature: float) -> Tensor:
    """hidden [N,E], target int64 [N] -> log-probability float32 [N]."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # the last norm is float32 under autocast; the head's products are not
        hidden = hidden.to(torch.get_autocast_dtype(device))
    count = len(target)
    spare = rounded(max(count, 1), POSITION_STEP) - count
    hidden, target = F.pad(hidden, (0, 0, 0, spare)), F.pad(target, (0, spare))
    head = head[:vocabulary].to(hidden.dtype)
    with torch.autocast(device, enabled=False):
        return _TokenLogprob.apply(hidden, head, target, temperature)[:count].clone()  # FSDP hooks onto no views


def pack(ids: Tensor, lengths: Sequence[int], prompt_lengths: Sequence[int],
         groups: Sequence[int]) -> tuple[Packed, list[int], list[int]]:
    """Rows int64 [B,T] of some groups, prompt included, as one line in which each group's prompt stands once.

    -> the line, and where on it each row's prompt ends and the tokens behind it begin. A row's last token is left
    out: nothing is predicted from it. Rows of a group share their first prompt tokens.
    """
    device, lines = ids.device, ids.cpu()
    first = {g: groups.index(g) for g in dict.fromkeys(groups)}  # a row of each group
    number = {g: n for n, g in enumerate(first)}
    heads = [prompt_lengths[i] for i in first.values()]
    tails = [n - 1 - p for n, p in zip(lengths, prompt_lengths, strict=True)]
    wide = rounded(max(heads), WIDTH_STEP)

    def places(sizes: Sequence[int], width: int) -> Tensor:
        return torch.cat([torch.arange(n) + i * width for i, n in enumerate(sizes)]).to(device)

    line = [lines[i, :p] for i, p in zip(first.values(), heads, strict=True)]
    position = [torch.arange(p) for p in heads]
    at, starts, blocks = sum(heads), [0] * len(tails), []
    classes: dict[int, list[int]] = {}  # rows by width, which doubles, so that less than half of a block is padding
    for i in sorted(range(len(tails)), key=lambda i: tails[i]):
        if tails[i] > 0:
            classes.setdefault(WIDTH_STEP << max(0, (tails[i] - 1) // WIDTH_STEP).bit_length(), []).append(i)
    for width, rows in classes.items():
        begin = at
        for i in rows:
            starts[i], at = at, at + tails[i]
            line.append(lines[i, prompt_lengths[i]:lengths[i] - 1])
            position.append(torch.arange(prompt_lengths[i], lengths[i] - 1))
        owner = torch.tensor([number[groups[i]] for i in rows], device=device)
        of_prompt = torch.arange(wide, device=device) < torch.tensor(heads, device=device)[owner, None]  # [R,P]
        of_row = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        mask = torch.cat([of_prompt[:, None].expand(-1, width, -1), of_row.expand(len(rows), -1, -1)], 2)
        blocks.append(RowBlock(slice(begin, at), (len(rows), width), places([tails[i] for i in rows], width), owner,
                               mask))
    spare = rounded(at, POSITION_STEP) - at
    line, position = (F.pad(torch.cat(x), (0, spare)).to(device) for x in (line, position))
    ends = torch.tensor(heads).cumsum(0).sub(1)[[number[g] for g in groups]].tolist()
    return Packed(line, position, (len(heads), wide), places(heads, wide), blocks, max(lengths)), ends, starts


def group_logprobs(policy: Policy, ids: Tensor, mask: Tensor, lengths: Sequence[int], prompt_lengths: Sequence[int],
                   groups: Sequence[int], vocabulary: int, temperature: float = 1.0,
                   precision: str = "fp32") -> Tensor:
    """`token_logprobs` of rollouts [B,T], with the prompt of each group run once.

    lengths, prompt_lengths, groups: of each row; mask must be False on all prompts.
    """
    packed, *at = pack(ids, lengths, prompt_lengths, groups)
    ends, starts = torch.tensor(at, device=ids.device)
    row, column = mask.nonzero(as_tuple=True)
    inside = column - torch.tensor(prompt_lengths, device=ids.device)[row]
    if bool((inside < 0).any()) or min(prompt_lengths) < 1:
        raise ValueError("a prompt token is masked as sampled, or a prompt is empty")
    # a token is predicted from the one before it: in its row, or the last of its prompt
    before = torch.where(inside == 0, ends[row], starts[row] + inside - 1)
    with precision_context(precision, ids.device):
        logp = policy.run(_packed_logprobs, packed, before, ids[mask], vocabulary, temperature)
    return torch.zeros(ids.shape, device=ids.device).masked_scatter(mask, logp)


def row_logprobs(policy: Policy, ids: Tensor, mask: Tensor, lengths: Sequence[int], vocabulary: int,
                 precision: str = "fp32") -> Tensor:
    """`token_logprobs` of rows [B,T] of these lengths, padded on the right, where only attention sees the padding."""
    packed, ends, _ = pack(ids, lengths, lengths, range(len(lengths)))  # each row is a prompt with nothing behind it
    row, column = mask.nonzero(as_tuple=True)
    if bool(mask[:, 0].any()):
        raise ValueError("the first token of a row has no log-probability: mask[:, 0] must be 0")
    before = (torch.tensor(ends) - torch.tensor(lengths)).to(ids.device)[row] + column
    with precision_context(precision, ids.device):
        logp = policy.run(_packed_logprobs, packed, before, ids[mask], vocabulary, 1.0)
    return torch.zeros(ids.shape, device=ids.device).masked_scatter(mask, logp)


@dataclass
class Batch:
    """Rollouts of a step as tensors, prompt included: ids, labels, policy_mask int64 and logprobs float32, all [B,T].

    advantages float32 [B,T] and old (log-probabilities before the first update; None: those of the pass itself) are
    filled in later; lengths, prompt_lengths, groups: tokens, prompt tokens and prompt of each row.
    """

    ids: Tensor
    labels: Tensor
    policy_mask: Tensor
    logprobs: Tensor
    lengths: list[int]
    prompt_lengths: list[int]
    groups: list[int]
    advantages: Tensor | None = None
    old: Tensor | None = None

    @classmethod
    def of(cls, episodes: Sequence, device: torch.device) -> Batch:
        ids, labels, mask = (pad([getattr(e, name) for e in episodes]).to(device)
                             for name in ("ids", "labels", "policy_mask"))
        logprobs = pad([e.logprobs for e in episodes], dtype=torch.float32).to(device)
        return cls(ids, labels, mask, logprobs, [len(e.ids) for e in episodes], [e.prompt_length for e in episodes],
                   [e.group for e in episodes])

    def logprobs_of(self, policy: Policy, rows: Sequence[int], vocabulary: int, cfg: Config) -> Tensor:
        """Log-probabilities of these rows' policy tokens under `policy`, float32 [rows, widest of them]."""
        lengths, prompts, groups = ([x[i] for i in rows] for x in (self.lengths, self.prompt_lengths, self.groups))
        width = rounded(max(lengths), WIDTH_STEP)
        return group_logprobs(policy, self.ids[rows, :width], self.policy_mask[rows, :width] == 1, lengths, prompts,
                              groups, vocabulary, cfg.rollout.temperature, cfg.precision)

    def parts(self, rows: Sequence[int], token_budget: int) -> list[list[int]]:
        """These rows in micro-batches, as many on every rank: a rank short of work gets empty ones (`no_work`)."""
        chosen = ([x[i] for i in rows] for x in (self.lengths, self.prompt_lengths, self.groups))
        return evened([[rows[i] for i in part] for part in group_batches(*chosen, token_budget)])


def evened(parts: list[list[int]]) -> list[list[int]]:
    """Micro-batches with empty ones behind them, so that all ranks have the same number: each pass is a collective."""
    most = int(ranks.all_max({"parts": len(parts)})["parts"])
    return parts + [[] for _ in range(most - len(parts))]


def no_work(policy: Policy, precision: str) -> Tensor:
    """The pass of an empty micro-batch: 0 with a graph, which takes part in what the other ranks gather and sum."""
    ids, mask = torch.tensor([[0, 0]], device=policy.device), torch.tensor([[False, True]], device=policy.device)
    return token_logprobs(policy, ids, mask, 1, precision=precision).sum() * 0


def refuse_not_finite(name: str, value: float) -> None:
    """Raises FloatingPointError on every rank where the value is not finite on one: none is left in a collective."""
    if ranks.all_max({"bad": not math.isfinite(value)})["bad"]:
        raise FloatingPointError(f"{name} {value}" + " on another rank" * math.isfinite(value))


@torch.no_grad()
def all_logprobs(policy: Policy, batch: Batch, vocabulary: int, cfg: Config) -> Tensor:
    """Log-probabilities of all policy tokens under `policy`, float32 [B,T], 0 elsewhere."""
    out = torch.zeros_like(batch.logprobs)
    for rows in batch.parts(range(len(batch.lengths)), cfg.micro_batch_tokens):
        if not rows:
            no_work(policy, cfg.precision)
            continue
        with phases("log-probabilities", sum(batch.lengths[i] for i in rows)):
            logp = batch.logprobs_of(policy, rows, vocabulary, cfg)
        out[rows, :logp.shape[1]] = logp
    return out


def policy_update(policy: Policy, reference: Policy | None, found: Sequence[torch.optim.Optimizer], batch: Batch,
                  rows: Sequence[int], vocabulary: int, cfg: Config) -> dict[str, float]:
    """One optimiser update on these rows of the batch, and those of the other ranks -> metrics over all of them.

    reference: of the KL term; the policy itself where it has adapters, which are then left out.
    Raises FloatingPointError where loss or gradient is not finite.
    """
    sums, widest, parts = accumulate(policy, reference, batch, rows, batch.advantages, vocabulary, cfg)
    refuse_not_finite("policy loss", sums["loss"])
    with phases("optimiser"):
        norm = optimizer_step(policy, found, cfg.rl.grad_clip) if parts else 0.0
    sums, widest = ranks.all_sum(sums), ranks.all_max({"widest": widest})["widest"]
    tokens = sums.pop("tokens")
    means = {k: v / max(1, tokens) for k, v in sums.items() if k != "loss"}
    return means | {"loss": sums["loss"], "grad_norm": norm, "logprob_gap_max": widest}


def stream_gradients(policy: Policy, batch: Batch, rows: Sequence[int], vocabulary: int,
                     cfg: Config) -> dict[str, float]:
    """Norms of the two streams' gradients and their cosine: the loss of these rows with the advantages of tool tokens
    alone, and of summary tokens alone. Two passes more; no update, and no gradient is left behind."""
    kept = []
    for label in (TOOL, SUMMARY):
        alone = torch.where(batch.labels == label, batch.advantages, 0.0)
        accumulate(policy, None, batch, rows, alone, vocabulary, override(cfg, ["loss.kl_coef=0"]))
        ranks.sum_gradients(policy.parameters())
        kept.append([p.grad for p in policy.parameters()])
        policy.zero_grad(set_to_none=True)
    return gradient_angles(*kept)


def gradient_angles(tool: Sequence, summary: Sequence) -> dict[str, float]:
    """Norms and cosine of two gradients, lists of tensors (shards of a rank's are summed over the ranks) or None."""
    def dot(a: Sequence, b: Sequence) -> float:
        return sum(float((_local(x).double() * _local(y).double()).sum()) for x, y in zip(a, b, strict=True)
                   if x is not None and y is not None)

    sharded = any(hasattr(x, "to_local") for x in tool if x is not None)
    found = {"tt": dot(tool, tool), "ss": dot(summary, summary), "ts": dot(tool, summary)}
    found = ranks.all_sum(found) if sharded else found
    tt, ss = found["tt"] ** 0.5, found["ss"] ** 0.5
    return {"grad_norm_tool": tt, "grad_norm_summary": ss, "grad_cosine": found["ts"] / (tt * ss) if tt * ss else 0.0}


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def accumulate(policy: Policy, reference: Policy | None, batch: Batch, rows: Sequence[int], advantages: Tensor,
               vocabulary: int, cfg: Config) -> tuple[dict[str, float], float, list[list[int]]]:
    """Gradients of the loss on these rows -> (sums over this rank's policy tokens, widest gap, micro-batches).

    The denominators are those of the whole update and known before its first backward, so micro-batches and ranks
    change nothing. Rows without any advantage stay in the denominators, but are not run where no KL term needs them.
    """
    loss_cfg = cfg.loss
    surrogate = {"token": policy_loss, "gspo": gspo_loss, "cispo": cispo_loss,
                 "sapo": sapo_loss}[loss_cfg.surrogate]
    mask, labels = batch.policy_mask[rows], batch.labels[rows]
    whole = ranks.all_sum({"tokens": int(mask.sum()), "rows": int(mask.any(1).sum()),
                           "tool": int((labels == TOOL).sum()), "summary": int((labels == SUMMARY).sum())})
    counts = {"segment_weights": loss_cfg.segment_weights, "token_count": int(whole["tokens"]),
              "sequence_count": int(whole["rows"]), "segment_counts": (int(whole["tool"]), int(whole["summary"]))}
    # without a given constant: the longest response of this update, from its first sampled token to its end
    longest = max((batch.lengths[i] - int(batch.policy_mask[i].argmax()) for i in rows), default=0)
    norm_length = loss_cfg.norm_length or int(ranks.all_max({"longest": longest})["longest"])
    work = [i for i in rows if loss_cfg.kl_coef > 0 or bool(advantages[i].any())]
    sums = dict.fromkeys(("loss", "kl", "clip_fraction", "dual_clip_fraction", "approx_kl", "logprob_gap"), 0.0)
    widest, tokens = 0.0, 0
    parts = batch.parts(work, cfg.micro_batch_tokens)
    for part in parts:
        if not part:
            nothing = no_work(policy, cfg.precision)
            if loss_cfg.kl_coef > 0:  # in the order of the ranks that have work: each pass is a collective
                with torch.no_grad(), adapters_off(reference):
                    no_work(reference, cfg.precision)
            nothing.backward()
            continue
        tokens_in = sum(batch.lengths[i] for i in part)
        with phases("log-probabilities", tokens_in):
            logp = batch.logprobs_of(policy, part, vocabulary, cfg)
        width = logp.shape[1]
        mask, labels, stored, a = (t[part, :width] for t in (batch.policy_mask, batch.labels, batch.logprobs,
                                                             advantages))
        old = logp.detach() if batch.old is None else batch.old[part, :width]
        weights = None if loss_cfg.importance_cap is None else truncated_weights(old, stored, loss_cfg.importance_cap)
        result = surrogate(logp, old, a, mask, loss_cfg.clip_low, loss_cfg.clip_high, loss_cfg.dual_clip,
                           loss_cfg.aggregation, norm_length, weights, labels=labels, **counts)
        loss = result.loss
        if loss_cfg.kl_coef > 0:
            with torch.no_grad(), adapters_off(reference), phases("log-probabilities", tokens_in):
                ref = batch.logprobs_of(reference, part, vocabulary, cfg)
            kl = kl_loss(logp, ref, mask, loss_cfg.kl_kind, loss_cfg.aggregation, norm_length, labels=labels, **counts)
            loss = loss + loss_cfg.kl_coef * kl.loss
            sums["kl"] += float(kl.token_kl.detach().sum())
        with phases("backward", tokens_in):
            loss.backward()
        n = int(mask.sum())
        gap = (logp.detach() - stored).abs() * mask
        widest, tokens = max(widest, float(gap.max())), tokens + n
        sums["loss"] += loss.item()
        sums["logprob_gap"] += float(gap.sum())
        for name in ("clip_fraction", "dual_clip_fraction", "approx_kl"):
            sums[name] += float(getattr(result, name)) * n
    return sums | {"tokens": tokens}, widest, parts
