"""Proves: a demonstration is learnt exactly as a rollout would have written it, and its loss is one weighted mean.

Ids are the chat template's for the whole dialogue in both forms of parallel calls; weight 1 is on the assistant's own
tokens and their stops and nowhere else; loss and gradient are those of a hand-written mean, whatever the micro-batches;
the curriculum and the learning-rate schedule are checked by hand.
"""
from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from test_model import drawn

from slca import chat, sft
from slca.data.task import Task
from slca.data.vocabulary import world_tokenizer
from slca.data.world import KINDS, World
from slca.model import ModelConfig
from slca.optim import optimizers
from slca.settings import Flaws, SFTConfig
from slca.sft import Row, curriculum_task, demonstration_row, rate_share, sft_step

V = 41


@pytest.fixture(scope="module")
def tok():
    return world_tokenizer(examples=150)


def demonstrated() -> list[Task]:
    """Tasks of every kind, with and without flaws."""
    worlds = World("train", 5, flaws=Flaws()), World("heldout", 5)
    return [w.task(i, kind) for w in worlds for i, kind in enumerate(KINDS * 4)]


def written(message: dict, parallel: str) -> str:
    """An assistant message as the model has to write it, stop included; by hand."""
    calls = [json.dumps(c) for c in message.get("tool_calls", [])]
    if not calls:
        return message["content"] + "<|im_end|>"
    if parallel == "list":
        return f"<tool_call>\n{calls[0] if len(calls) == 1 else '[' + ', '.join(calls) + ']'}\n</tool_call>"
    return "\n".join(f"<tool_call>\n{c}\n</tool_call>" for c in calls) + "<|im_end|>"


@pytest.mark.parametrize("parallel", ["list", "blocks"])
def test_row_is_the_template_with_weight_on_the_assistant(tok, parallel):
    newline, tasks = tok.encode("\n"), demonstrated()
    assert max(len(m.get("tool_calls", [])) for t in tasks for m in t.demonstration) > 1
    for task in tasks:
        row = demonstration_row(task, tok, parallel, 0.25, 10_000)
        whole = chat.render(task.messages + task.demonstration, task.tools, tok, False, parallel)
        assert row.ids == whole[:-len(newline)] and whole[-len(newline):] == newline
        assert len(row.weights) == len(row.ids) and set(row.weights) == {0.25, 1.0}
        stretches, last = [], 0.25
        for i, w in zip(row.ids, row.weights, strict=True):
            if w == 1.0 and last != 1.0:
                stretches.append([])
            if w == 1.0:
                stretches[-1].append(i)
            last = w
        assert [tok.decode(s) for s in stretches] == [written(m, parallel) for m in task.demonstration
                                                      if m["role"] == "assistant"]
        assert row.weights[-1] == 1.0 and row.ids[-1] == tok.control["<|im_end|>"]


def test_history_turns_of_the_assistant_are_prompt(tok):
    task = World("train", 5).task(0, "history")
    assert any(m["role"] == "assistant" for m in task.messages)
    row = demonstration_row(task, tok, "list", 0.0, 10_000)
    prompt = chat.render(task.messages, task.tools, tok)
    assert row.ids[:len(prompt)] == prompt and not any(row.weights[:len(prompt)]) and row.weights[len(prompt)] == 1


def test_long_rows_are_cut(tok):
    task = World("train", 5).task(0, "parallel")
    whole, cut = (demonstration_row(task, tok, "list", 0.1, n) for n in (10_000, 50))
    assert cut.ids == whole.ids[:50] and cut.weights == whole.weights[:50] and len(whole.ids) > 50


@pytest.mark.parametrize("demonstration", [[], [{"role": "tool", "content": "41"}], [{"role": "user", "content": "x"}]])
def test_task_without_a_demonstration_is_refused(tok, demonstration):
    task = Task("row 7", [{"role": "user", "content": "x"}], [], demonstration=demonstration)
    with pytest.raises(ValueError, match="task row 7: a demonstration that begins with an assistant"):
        demonstration_row(task, tok, "list", 0.1, 100)


# ---- one step

def rows() -> list[Row]:
    draw = torch.Generator().manual_seed(2)
    lengths, levels = [9, 4, 14, 6, 2], [0.0, 0.3, 1.0]
    return [Row(torch.randint(0, V, (n,), generator=draw).tolist(),
                [levels[int(i)] for i in torch.randint(0, 3, (n,), generator=draw)]) for n in lengths]


def make():
    return drawn(ModelConfig("qwen2", V, 32, 48, 2, 4, 2))


@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_loss_is_the_weighted_mean_of_the_step(monkeypatch, budget):
    policy, data, kept = make(), rows(), []

    def keep(p, optimizers, clip):
        kept.append(torch.cat([q.grad.flatten() for q in p.parameters()]))
        return 0.0
    monkeypatch.setattr(sft, "optimizer_step", keep)
    total = weight = 0.0
    for row in data:  # the first token is predicted by nothing and does not count
        row.ids = [i % (V - 3) for i in row.ids]
        logp = torch.log_softmax(policy(torch.tensor([row.ids]))[0, :, :V - 3], -1)
        total = total - sum(row.weights[t] * logp[t - 1, row.ids[t]] for t in range(1, len(row.ids)))
        weight += sum(row.weights[1:])
    want = torch.cat([g.flatten() for g in torch.autograd.grad(total / weight, list(policy.parameters()))])
    found = sft_step(policy, [torch.optim.SGD([{"params": policy.parameters(), "peak": 0.1}], lr=0.1)], data, 0.5,
                     SFTConfig(), V - 3, "fp32", budget)
    assert found["sft_loss"] == pytest.approx(float(total.detach() / weight), rel=1e-5)
    assert float((kept[0] - want).norm() / want.norm()) < 1e-6
    assert found["lr"] == pytest.approx(0.05) and found["sft_tokens"] == sum(w == 1 for r in data for w in r.weights)


def test_a_step_makes_its_rows_likelier():
    policy, data = make(), rows()
    found = optimizers(policy, "muon", 0.01, 0.0, (0.9, 0.95), 3e-3)
    losses = [sft_step(policy, found, data, 1.0, SFTConfig(), V, "fp32", 1000)["sft_loss"] for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]


def test_loss_that_is_not_finite_stops_the_run():
    policy = make()
    with torch.no_grad():
        policy.model.norm.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match="SFT loss nan"):
        sft_step(policy, [], rows(), 1.0, SFTConfig(), V, "fp32", 1000)


# ---- curriculum and rate

def test_curriculum_by_hand():
    world = World("train", 1, tools_per_task=4)
    for progress, tools in ((0.0, 1), (0.24, 1), (0.25, 2), (0.5, 3), (0.75, 4), (0.99, 4)):
        tasks = [curriculum_task(world, i, progress) for i in range(200)]
        assert all(len(t.tools) >= min(tools, 4) for t in tasks)
        singles = [t for t in tasks if t.subset == "single"]
        assert all(len(t.tools) == tools for t in singles)
        kinds = Counter(t.subset for t in tasks)
        assert 160 <= kinds["single"] <= 192  # .85 + .15 * .26 of 200, give or take 3.5 deviations
        assert len(kinds) >= 4
    full = [curriculum_task(world, i, 1.0) for i in range(50)]
    assert full == [world.task(i) for i in range(50)]
    assert curriculum_task(world, 7, 0.3) == curriculum_task(world, 7, 0.3)


@pytest.mark.parametrize("step, warmup, decay_from, decay_steps, share", [
    (0, 10, None, 100, 0.1), (4, 10, None, 100, 0.5), (9, 10, None, 100, 1.0), (500, 10, None, 100, 1.0),
    (0, 0, None, 100, 1.0), (200, 10, 200, 100, 1.0), (225, 10, 200, 100, 0.75), (299, 10, 200, 100, 0.01),
    (300, 10, 200, 100, 0.0), (400, 10, 200, 100, 0.0), (199, 10, 200, 100, 1.0), (200, 10, 200, 0, 1.0),
    (201, 10, 200, 0, 0.0), (4, 10, 2, 4, 0.25),
])
def test_rate_share_by_hand(step, warmup, decay_from, decay_steps, share):
    assert rate_share(step, warmup, decay_from, decay_steps) == pytest.approx(share)
