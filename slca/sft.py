"""Supervised stage: rows from demonstrations, the curriculum, the learning-rate schedule, one optimiser step.

The assistant's own tokens, stops included, weigh 1; prompt and tool tokens weigh `prompt_loss_weight`, because a
little language modelling on them is what makes copying come early in a small model.
"""
from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from slca import chat, ranks
from slca.data.task import Task
from slca.data.world import World
from slca.learner import evened, micro_batches, no_work, pad, refuse_not_finite, row_logprobs
from slca.model import Policy
from slca.optim import optimizer_step, set_rate
from slca.settings import SFTConfig


@dataclass
class Row:
    """A demonstration as ids with one loss weight each."""

    ids: list[int]
    weights: list[float]


def demonstration_row(task: Task, tokenizer, parallel: str, prompt_weight: float, max_tokens: int) -> Row:
    """ids exactly as a rollout would build them: prompt, then assistant turns and tool turns, cut at max_tokens.

    Raises ValueError where the task has no demonstration or it does not begin with the assistant.
    """
    if not task.demonstration or task.demonstration[0]["role"] != "assistant":
        raise ValueError(f"task {task.id}: a demonstration that begins with an assistant message was expected")
    ids = chat.render(task.messages, task.shown_tools, tokenizer, parallel=parallel)
    weights, results = [prompt_weight] * len(ids), []
    for i, message in enumerate(task.demonstration):
        if message["role"] == "tool":
            results.append(message["content"])
            if i + 1 == len(task.demonstration) or task.demonstration[i + 1]["role"] != "tool":
                glue = chat.tool_turn(results, tokenizer, closed=ids[-1] == tokenizer.token_to_id(chat.END))
                ids, weights, results = ids + glue, weights + [prompt_weight] * len(glue), []
        else:
            turn = chat.assistant_target(message, tokenizer, parallel)
            ids, weights = ids + turn, weights + [1.0] * len(turn)
    return Row(ids[:max_tokens], weights[:max_tokens])


PLANNED = "Done."  # what a planner writes instead of a reply


def planner_task(task: Task) -> Task:
    """For RLTR, which trains the calls alone: the reply of the demonstration becomes the fixed end of planning."""
    if not task.demonstration or task.demonstration[-1].get("tool_calls"):
        return task
    return replace(task, demonstration=[*task.demonstration[:-1], {"role": "assistant", "content": PLANNED}])


def curriculum_task(world: World, index: int, progress: float) -> Task:
    """Task for progress in [0, 1) through the easy phase: mostly one call, tools growing in number; 1: the full mix."""
    if progress >= 1:
        return world.task(index)
    tools = min(world.tools_per_task, 1 + int(world.tools_per_task * progress))
    easy = random.Random(f"curriculum/{index}").random() < 0.85
    return world.task(index, "single" if easy else None, tools)


def rate_share(step: int, warmup: int, decay_from: int | None, decay_steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, flat, and from `decay_from` on linear to nought."""
    share = min(1.0, (step + 1) / max(1, warmup))
    if decay_from is not None and step >= decay_from:
        share *= max(0.0, 1 - (step - decay_from) / max(1, decay_steps))
    return share


def cosine_share(step: int, steps: int, warmup_ratio: float) -> float:
    """Share of the peak rate: linear warm-up, then half a cosine towards nought, which the last step does not reach."""
    warmup = max(1, round(warmup_ratio * steps))
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


def sft_step(policy: Policy, optimizers: list, rows: list[Row], share: float, cfg: SFTConfig, vocabulary: int,
             precision: str, token_budget: int) -> dict[str, float]:
    """One update on rows, the same on all ranks, each of which runs its share: mean of weight * nll over the step's
    whole weight, whatever the micro-batches."""
    total = sum(sum(r.weights[1:]) for r in rows)  # the first token of a row is predicted by nothing
    if not total:
        raise ValueError("no token of these demonstrations has a loss weight: sft.max_tokens cuts all of them before "
                         "the assistant writes")
    loss_sum, mine = 0.0, ranks.level_share([len(r.ids) for r in rows])
    for batch in evened([[mine[i] for i in part] for part in micro_batches([len(rows[i].ids) for i in mine],
                                                                           token_budget)]):
        if not batch:
            no_work(policy, precision).backward()
            continue
        ids = pad([rows[i].ids for i in batch]).to(policy.device)
        weights = pad([rows[i].weights for i in batch], dtype=torch.float32).to(policy.device)
        weights[:, 0] = 0
        logp = row_logprobs(policy, ids, weights > 0, [len(rows[i].ids) for i in batch], vocabulary, precision)
        loss = -(weights * logp).sum() / total
        loss.backward()
        loss_sum += loss.item()
    refuse_not_finite("SFT loss", loss_sum)
    set_rate(optimizers, share)
    norm = optimizer_step(policy, optimizers, cfg.grad_clip)
    return {"sft_loss": ranks.all_sum({"loss": loss_sum})["loss"], "sft_grad_norm": norm,
            "lr": optimizers[0].param_groups[0]["lr"], "sft_tokens": sum(w == 1 for r in rows for w in r.weights)}
