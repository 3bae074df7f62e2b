"""Proves: the update's gradient is that of one loss over the whole update, however it is cut into micro-batches.

For every aggregation, with and without KL, 1, 2 and N micro-batches and a plain hand-written loss give one gradient;
rows that are skipped would have added nothing; the chunked head is the dense one and keeps no logits; the scorer's
distribution is the sampler's; the first on-policy ratio is exactly 1; a summary reward moves no tool token under SLCA,
and does under GRPO; a rewarded token becomes likelier; what is not finite stops the run; small updates arrive.
"""
from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_model import drawn

from slca import learner
from slca.advantages import slca_advantages
from slca.config import override
from slca.data.task import Task
from slca.learner import (
    Batch,
    all_logprobs,
    micro_batches,
    pad,
    policy_update,
    row_logprobs,
    token_logprobs,
)
from slca.loss import AGGREGATIONS, kl_loss, policy_loss
from slca.model import ModelConfig, Policy
from slca.optim import optimizer_step, optimizers
from slca.rewards import HierR
from slca.rollout import Episode
from slca.sampler import generate
from slca.segments import segment_labels
from slca.settings import Config

V = 41


def load_train():
    spec = importlib.util.spec_from_file_location("train_script", Path(__file__).parents[1] / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(seed: int = 0, vocab: int = V, family: str = "qwen3") -> Policy:
    return drawn(ModelConfig(family, vocab, 32, 48, 2, 4, 2, tie_word_embeddings=seed % 2 == 0), seed)


def settings(*overrides: str) -> Config:
    return override(Config(), overrides)


# prompt, then (policy tokens, injected tokens), ..., ending on policy tokens; ragged on purpose
LAYOUTS = [(3, 2, 2, 1, 4, 3), (1, 7), (5, 1, 1, 1), (2, 4, 3, 6), (9, 2), (1, 1, 1, 1, 1, 1)]


def make_batch(seed: int = 0, quiet=()) -> Batch:
    """Rows of the layouts with random ids and advantages; `quiet` rows have advantage 0."""
    draw = torch.Generator().manual_seed(seed)
    masks = [[k % 2 for k, n in enumerate(layout) for _ in range(n)] for layout in LAYOUTS]
    mask = pad(masks)
    ids = torch.randint(0, V, mask.shape, generator=draw)
    advantages = torch.randn(mask.shape, generator=draw) * mask
    advantages[list(quiet)] = 0
    old = -3 + 0.3 * torch.randn(mask.shape, generator=draw) * mask
    return Batch(ids, segment_labels(mask), mask, old * mask, [len(m) for m in masks], [m.index(1) for m in masks],
                 list(range(len(masks))), advantages)


@pytest.fixture
def gradient(monkeypatch):
    """gradient(policy, ...) -> the flat gradient of one policy_update, which then takes no step."""
    def run(policy, reference, batch, cfg, rows=None) -> torch.Tensor:
        found = []

        def keep(policy, optimizers, clip):
            found.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
            policy.zero_grad(set_to_none=True)
            return float(found[-1].norm())
        monkeypatch.setattr(learner, "optimizer_step", keep)
        run.metrics = policy_update(policy, reference, [], batch, rows or list(range(len(batch.lengths))), V, cfg)
        return found[0]
    return run


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


# ---- micro-batches

@pytest.mark.parametrize("budget", [1, 10, 17, 40, 1000])
def test_micro_batches_cover_every_row_once_within_the_budget(budget):
    lengths = [9, 3, 17, 4, 3, 8, 1, 30, 9, 9]
    parts = list(micro_batches(lengths, budget))
    assert sorted(i for part in parts for i in part) == list(range(10))
    for part in parts:
        assert len(part) * max(lengths[i] for i in part) <= budget or len(part) == 1
    for a, b in zip(parts, parts[1:], strict=False):  # no two neighbours would have fitted into one
        assert max(lengths[i] for i in a) <= min(lengths[i] for i in b)
        assert (len(a) + 1) * lengths[b[0]] > budget
    assert list(micro_batches([], 5)) == []


BUDGETS = {10_000: 1, 50: 2, 1: len(LAYOUTS)}  # token budget -> micro-batches


def longest_response(batch):
    return max(n - int(m.argmax()) for n, m in zip(batch.lengths, batch.policy_mask, strict=True))


@pytest.mark.parametrize("kl", [0.0, 0.7])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_does_not_depend_on_micro_batches(gradient, aggregation, kl):
    """Also: it is that of one plain dense loss over the whole update, so it is not wrong alike in all three."""
    # weights in float64: what differs between the ways is then the cut, not the rounding of sums (logits are float32)
    policy, reference, batch = make().double(), make(1).double().requires_grad_(False), make_batch()
    # old log-probabilities far enough away that both clips and the dual clip act, each at a bound of its own
    noise = torch.randn(batch.logprobs.shape, generator=torch.Generator().manual_seed(7))
    batch.old = batch.logprobs + 0.5 * noise * batch.policy_mask
    how = [f"loss.aggregation={aggregation}", f"loss.kl_coef={kl}", "rollout.temperature=1.3", "loss.clip_low=0.1",
           "loss.clip_high=0.3", "loss.dual_clip=1.5", "loss.kl_kind=k2"]
    norm_length = longest_response(batch)
    if aggregation == "seq_sum_over_constant" and kl:
        how.append("loss.norm_length=7")
        norm_length = 7
    if aggregation == "segment_mean":
        how.append("loss.segment_weights=[0.7, 1.6]")
    weights = (0.7, 1.6) if aggregation == "segment_mean" else (1.0, 1.0)

    def dense(p):
        logp = torch.log_softmax(p(batch.ids)[:, :-1].float() / 1.3, -1)
        return F.pad(logp.gather(2, batch.ids[:, 1:, None])[..., 0], (1, 0)) * batch.policy_mask

    args = dict(aggregation=aggregation, norm_length=norm_length, labels=batch.labels, segment_weights=weights)
    logp = dense(policy)
    loss = policy_loss(logp, batch.old, batch.advantages, batch.policy_mask, 0.1, 0.3, 1.5, **args).loss
    loss = loss + kl * kl_loss(logp, dense(reference), batch.policy_mask, "k2", **args).loss
    want = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
    for budget, n in BUDGETS.items():
        assert len(list(micro_batches(batch.lengths, budget))) == n
        got = gradient(policy, reference, batch, settings(*how, f"micro_batch_tokens={budget}"))
        assert relative(got, want) < 1e-6
        assert gradient.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)


def test_metrics_do_not_depend_on_micro_batches(gradient):
    policy, reference, batch = make(), make(1), make_batch()
    batch.old = batch.logprobs
    found = []
    for budget in BUDGETS:
        gradient(policy, reference, batch, settings("loss.kl_coef=0.5", f"micro_batch_tokens={budget}"))
        found.append(gradient.metrics)
    assert found[0]["clip_fraction"] > 0.1 and found[0]["kl"] > 0 and found[0]["logprob_gap"] > 0.1
    assert found[0]["logprob_gap_max"] > found[0]["logprob_gap"]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5, abs=1e-6)


def test_an_update_of_some_rows_has_their_denominator(gradient):
    policy, batch = make().double(), make_batch()
    part = Batch(*(getattr(batch, k)[[1, 4]] for k in ("ids", "labels", "policy_mask", "logprobs")),
                 *([getattr(batch, k)[i] for i in (1, 4)] for k in ("lengths", "prompt_lengths", "groups")),
                 batch.advantages[[1, 4]])
    want = gradient(policy, None, part, settings())
    assert relative(gradient(policy, None, batch, settings(), rows=[1, 4]), want) < 1e-6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_without_advantage_are_skipped_but_counted(gradient, monkeypatch, aggregation):
    policy, batch, run = make().double(), make_batch(quiet=[0, 3, 4]), []
    plain = learner.group_logprobs
    monkeypatch.setattr(learner, "group_logprobs", lambda p, ids, *a: run.append(len(ids)) or plain(p, ids, *a))
    cfg = settings(f"loss.aggregation={aggregation}")
    got = gradient(policy, None, batch, cfg)
    assert run == [3]
    want = gradient(policy, policy, batch, override(cfg, ["loss.kl_coef=1e-30"]))  # with a KL term every row is run
    assert run == [3, 6, 6] and relative(got, want) < 1e-6


def test_no_advantage_at_all_is_no_update():
    policy, batch = make(), make_batch(quiet=range(6))
    before = [p.detach().clone() for p in policy.parameters()]
    found = optimizers(policy, "adamw", 0.1, 0.5, (0.9, 0.999))
    metrics = policy_update(policy, None, found, batch, range(6), V, settings())
    assert metrics["loss"] == metrics["grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


# ---- log-probabilities

@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("vocabulary", [V, 30])
def test_scorer_is_tempered_and_cut(temperature, vocabulary):
    policy, batch = make(1), make_batch()
    ids = batch.ids % vocabulary
    got = token_logprobs(policy, ids, batch.policy_mask == 1, vocabulary, temperature)
    dense = torch.log_softmax(policy(ids)[:, :-1, :vocabulary].double() / temperature, -1)
    want = dense.gather(2, ids[:, 1:, None])[..., 0].float() * batch.policy_mask[:, 1:]
    torch.testing.assert_close(got[:, 1:], want, rtol=1e-5, atol=1e-5)
    assert got.dtype == torch.float32 and not got[batch.policy_mask == 0].any()


def test_first_token_has_no_probability():
    ids, mask = torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
    for score in (lambda: token_logprobs(make(), ids, mask, V), lambda: row_logprobs(make(), ids, mask, [3], V)):
        with pytest.raises(ValueError, match=r"mask\[:, 0\] must be 0"):
            score()


def test_rows_without_their_padding_give_the_same_and_the_same_gradients():
    batch, draw = make_batch(), torch.Generator().manual_seed(3)
    inside = torch.arange(batch.ids.shape[1]) < torch.tensor(batch.lengths)[:, None]
    mask = (torch.rand(batch.ids.shape, generator=draw) < 0.6) & inside
    mask[:, 0], weights, results = False, torch.randn(batch.ids.shape, generator=draw), []
    mask[range(len(batch.lengths)), [n - 1 for n in batch.lengths]] = True  # the last token of a row as well
    for score in (lambda p: token_logprobs(p, batch.ids, mask, V), lambda p: row_logprobs(p, batch.ids, mask,
                                                                                         batch.lengths, V)):
        policy = make(1)
        logp = score(policy)
        (logp * weights).sum().backward()
        results.append([logp.detach(), *(p.grad for p in policy.parameters())])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_padding_reaches_no_product(monkeypatch):
    """What a row's padding holds changes nothing, and as many positions go through the blocks as there are tokens."""
    policy, batch, seen = make(1), make_batch(), []
    monkeypatch.setattr(Policy, "hidden_packed", lambda p, packed, f=Policy.hidden_packed: seen.append(
        len(packed.ids)) or f(p, packed))
    other = torch.where(torch.arange(batch.ids.shape[1]) < torch.tensor(batch.lengths)[:, None], batch.ids, 7)
    one, two = (row_logprobs(policy, ids, batch.policy_mask == 1, batch.lengths, V) for ids in (batch.ids, other))
    assert torch.equal(one, two) and seen == [256] * 2 and sum(batch.lengths) <= 256  # rounded up to POSITION_STEP


def test_injected_tokens_and_padding_have_no_gradient():
    """Their ids are context; as targets they do not count: no gradient where no policy token follows."""
    policy, batch = make(1), make_batch()
    width = batch.ids.shape[1]
    logp = token_logprobs(policy, batch.ids, batch.policy_mask == 1, V)
    logp.sum().backward()
    head = policy.lm_head.weight.grad.clone()
    policy.zero_grad()
    for row, n in enumerate(batch.lengths):
        batch.ids[row, n:] = 7  # other padding
    token_logprobs(policy, batch.ids, batch.policy_mask == 1, V).sum().backward()
    assert width > min(batch.lengths) and torch.equal(policy.lm_head.weight.grad, head)


def saved_shapes(run) -> list[tuple[int, ...]]:
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        run()
    return shapes


@pytest.mark.parametrize("chunk", [256, 4])
def test_head_in_chunks_is_the_dense_one_and_keeps_no_logits(monkeypatch, chunk):
    """Values and gradients; no tensor of (tokens x vocabulary) is saved, in any type or order."""
    monkeypatch.setattr(learner._TokenLogprob, "chunks",
                        staticmethod(lambda hidden, head: [slice(i, i + chunk) for i in range(0, len(hidden), chunk)]))
    policy, batch = make(1).double(), make_batch()
    mask, logp = batch.policy_mask == 1, []
    shapes = saved_shapes(lambda: logp.append(token_logprobs(policy, batch.ids, mask, V, 0.8)))
    assert shapes and not [s for s in shapes if V in s and s != (V, 32)]
    (logp[0] * batch.advantages).sum().backward()
    grad = torch.cat([p.grad.flatten() for p in policy.parameters()])
    policy.zero_grad()
    dense = torch.log_softmax(policy(batch.ids[:, :-1]).float() / 0.8, -1)
    dense = torch.nn.functional.pad(dense.gather(2, batch.ids[:, 1:, None]).squeeze(2), (1, 0)) * mask
    (dense * batch.advantages).sum().backward()
    torch.testing.assert_close(logp[0], dense, rtol=1e-6, atol=1e-6)
    assert relative(grad, torch.cat([p.grad.flatten() for p in policy.parameters()])) < 1e-6


# ---- prompts that run once

GROUPS = [4, 9, 4, 9, 9, 2]  # of six rows; prompts of 3, 1 and 6 tokens
PROMPTS = {4: 3, 9: 1, 2: 6}


def shared_batch(seed: int = 0) -> Batch:
    """Rows of two to one response tokens and more, some with tool turns, whose groups share their prompts."""
    draw = torch.Generator().manual_seed(seed)
    prompts = {g: torch.randint(0, V, (n,), generator=draw).tolist() for g, n in PROMPTS.items()}
    masks = [[0] * PROMPTS[g] + m for g, m in zip(GROUPS, ([1, 1, 0, 0, 1], [1], [1, 1], [1, 0, 1, 1, 1, 1, 1], [1] * 4,
                                                           [1, 1, 0, 1]), strict=True)]
    rows = [prompts[g] + torch.randint(0, V, (len(m) - PROMPTS[g],), generator=draw).tolist()
            for g, m in zip(GROUPS, masks, strict=True)]
    mask = pad(masks)
    return Batch(pad(rows), segment_labels(mask), mask, -3.0 * mask, [len(m) for m in masks],
                 [PROMPTS[g] for g in GROUPS], GROUPS, torch.randn(mask.shape, generator=draw) * mask)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shared_prompts_give_the_plain_scores_and_gradients(family, precision):
    """Against the rows one after another without any sharing; in float32 to 1e-6, also of the embedding."""
    policy, batch = make(family=family), shared_batch()
    results = []
    for shared in (True, False):
        policy.zero_grad()
        if shared:
            logp = batch.logprobs_of(policy, range(6), V, settings(f"precision={precision}", "rollout.temperature=0.8"))
        else:
            logp = token_logprobs(policy, batch.ids, batch.policy_mask == 1, V, 0.8, precision)[:, :32]
        (logp * batch.advantages[:, :32]).sum().backward()
        results.append((logp.detach(), torch.cat([p.grad.flatten() for p in policy.parameters()])))
    (a, grad_a), (b, grad_b) = results
    assert (a != 0).sum() == batch.policy_mask.sum() == 19
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6 if precision == "fp32" else 0.15)
    assert relative(grad_a, grad_b) < (1e-6 if precision == "fp32" else 0.05)


def test_a_shared_prompt_runs_once():
    batch = shared_batch()
    packed, _, starts = learner.pack(batch.ids, batch.lengths, batch.prompt_lengths, batch.groups)
    rows = sum(n - 1 - p for n, p in zip(batch.lengths, batch.prompt_lengths, strict=True))
    assert len(packed.prompt_place) == sum(PROMPTS.values()) and sum(len(b.place) for b in packed.rows) == rows
    assert all(packed.ids[s] == batch.ids[i, batch.prompt_lengths[i]] for i, s in enumerate(starts) if s)
    assert len(packed.ids) == 256 and packed.ids[:3].tolist() == batch.ids[0, :3].tolist()


@pytest.mark.parametrize("budget", [1, 9, 20, 1000])
def test_groups_stay_together_within_the_budget(budget):
    batch = shared_batch()
    parts = list(batch.parts(range(6), budget))
    assert sorted(i for part in parts for i in part) == list(range(6))
    for part in parts:
        size = sum(PROMPTS[g] for g in {GROUPS[i] for i in part})
        size += sum(batch.lengths[i] - batch.prompt_lengths[i] for i in part)
        assert size <= budget or len(part) == 1
    assert len(parts) == {1: 6, 1000: 1}.get(budget, len(parts))


def test_bf16_scores_stay_close_and_float32(monkeypatch):
    monkeypatch.setattr(learner, "bf16_runs", lambda device: True)  # slowly, where the CPU has no such units
    policy, batch = make(), make_batch()
    exact, rough = (token_logprobs(policy, batch.ids, batch.policy_mask == 1, V, precision=p) for p in ("fp32", "bf16"))
    assert rough.dtype == torch.float32 and 1e-5 < (rough - exact).abs().max() < 0.15
    rough.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters())
    monkeypatch.setattr(learner, "bf16_runs", lambda device: False)
    again = token_logprobs(policy, batch.ids, batch.policy_mask == 1, V, precision="bf16")
    assert torch.equal(again, exact)  # a machine without computes in float32 instead


def test_all_logprobs_are_those_of_one_pass():
    policy, batch = make(), make_batch()
    want = token_logprobs(policy, batch.ids, batch.policy_mask == 1, V).detach()
    for budget in BUDGETS:
        got = all_logprobs(policy, batch, V, settings(f"micro_batch_tokens={budget}"))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert not got.requires_grad


# ---- the update's meaning

def test_ratio_is_exactly_1_on_the_first_update(monkeypatch, gradient):
    policy, batch, seen, plain = make(), make_batch(), [], learner.policy_loss
    monkeypatch.setattr(learner, "policy_loss", lambda new, old, *a, **k: seen.append((new, old)) or plain(new, old, *a,
                                                                                                          **k))
    gradient(policy, None, batch, settings("micro_batch_tokens=50"))
    assert len(seen) == 2 and all(torch.equal(new.detach(), old) and not old.requires_grad for new, old in seen)
    assert gradient.metrics["clip_fraction"] == gradient.metrics["approx_kl"] == 0
    assert gradient.metrics["logprob_gap"] > 0.1  # measured against the sampler's, which here are made up


def token_gradients(monkeypatch, policy, batch, cfg) -> torch.Tensor:
    """d loss / d log-probability, [B,T]. (The parameters are shared by both streams: at their level every gradient is
    a sum over all tokens, so whose reward reaches which token can be seen only here.)"""
    kept, plain = [], learner.group_logprobs

    def watch(*a):
        logp = plain(*a)
        logp.retain_grad()
        kept.append(logp)
        return logp
    monkeypatch.setattr(learner, "group_logprobs", watch)
    rows = list(range(len(batch.lengths)))
    policy_update(policy, None, optimizers(policy, "adamw", 1e-9, 0.0, (0.9, 0.999)), batch, rows, V, cfg)
    assert len(kept) == 1
    order = next(iter(batch.parts(rows, 10**6)))
    out = torch.zeros(batch.ids.shape)
    out[order] = kept[0].grad
    return out


@pytest.mark.parametrize("estimator", ["slca", "grpo"])
def test_summary_rewards_reach_no_tool_token(monkeypatch, estimator):
    """Through train.estimate and policy_update on two groups of three: not by one bit under SLCA; GRPO's do."""
    train, base, cfg = load_train(), make_batch(), settings(f"advantage.estimator={estimator}")
    process = [0.2, 0.9, 0.5, 0.7, 0.1, 0.4]
    gradients = []
    for summary in ([0.25, 0.5, 1.0, 0.0, 0.75, 0.5], [1.0, 0.0, 0.25, 0.75, 0.0, 0.0]):
        episodes = [Episode(Task(str(i), [], []), i // 3, i % 3, [], 0, [], [],
                            rewards=HierR(process=p, summary=s, total=p + s))
                    for i, (p, s) in enumerate(zip(process, summary, strict=True))]
        advantages = train.estimate(episodes, base, cfg)
        base.advantages = advantages.tokens
        gradients.append(token_gradients(monkeypatch, make(), base, cfg))
    a, b = gradients
    assert a[base.labels == 1].abs().min() > 1e-4 and a[base.labels == 2].abs().min() > 1e-4
    assert torch.equal(a[base.labels == 1], b[base.labels == 1]) == (estimator == "slca")
    assert not torch.equal(a[base.labels == 2], b[base.labels == 2])
    assert not a[base.labels == 0].any()


@pytest.mark.parametrize("sign", [1, -1])
def test_two_armed_bandit(sign):
    """One token earns 1, the others 0: its probability rises step by step, and falls if the sign is planted wrong."""
    policy, cfg, prompt = make(0, 4), settings("rl.grad_clip=1"), [2, 3]
    found, history = optimizers(policy, "adamw", 3e-3, 0.0, (0.9, 0.999)), []
    good = int(policy(torch.tensor([prompt]))[0, -1].argsort()[-2])  # the second likeliest
    for step in range(12):
        arms = [c.ids[0] for c in generate(policy, [prompt], 64, 1, seed=step)]
        mask = torch.tensor([[0, 0, 1]] * 64)
        labels = segment_labels(mask)
        reward = [float(a == good) for a in arms]
        batch = Batch(torch.tensor([[*prompt, a] for a in arms]), labels, mask, torch.zeros(64, 3), [3] * 64, [2] * 64,
                      [0] * 64)
        batch.advantages = sign * slca_advantages(labels, [0] * 64, [0.0] * 64, reward, reward, [0.0] * 64).tokens
        history.append(float(torch.softmax(policy(torch.tensor([prompt]))[0, -1], -1)[good].detach()))
        policy_update(policy, None, found, batch, range(64), 4, cfg)
    assert 0.1 < history[0] < 0.5
    rises = [sign * (b - a) for a, b in zip(history, history[1:], strict=False)]
    assert min(rises) > -5e-3 and (history[-1] > 0.8 if sign > 0 else history[-1] < 0.02)


# ---- optimisers

@pytest.mark.parametrize("where", ["advantage", "weight"])
def test_what_is_not_finite_stops_the_run(where):
    policy, batch = make(), make_batch()
    if where == "advantage":
        batch.advantages[2, 5] = float("nan")
    else:
        with torch.no_grad():
            policy.model.norm.weight[0] = float("inf")
    before = [p.detach().clone() for p in policy.parameters()]
    found = optimizers(policy, "adamw", 1e-3, 0.0, (0.9, 0.999))
    with pytest.raises(FloatingPointError, match="loss"):
        policy_update(policy, None, found, batch, range(6), V, settings())
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_stops_the_run(value):
    policy = make()
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)
    policy.model.norm.weight.grad[0] = value
    before = [p.detach().clone() for p in policy.parameters()]
    with pytest.raises(FloatingPointError, match="gradient norm"):
        optimizer_step(policy, optimizers(policy, "adamw", 1e-3, 0.0, (0.9, 0.999)), 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_small_updates_arrive(precision):
    """AdamW at 1e-6 moves every matrix; weights and its state are float32 whatever the compute type."""
    policy, batch = make(1), make_batch()
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    found = optimizers(policy, "adamw", 1e-6, 0.0, (0.9, 0.999))
    policy_update(policy, None, found, batch, range(6), V, settings(f"precision={precision}"))
    for name, p in policy.named_parameters():
        moved = (p.detach() - before[name]).abs()
        assert p.dtype == torch.float32 and float(moved.max()) == pytest.approx(1e-6, rel=0.2), name
        assert (moved > 0).float().mean() > 0.3, name  # rows of ids not in the batch rest
    assert {t.dtype for s in found[0].state.values() for t in s.values()} == {torch.float32}
    assert all(p.grad is None for p in policy.parameters())


def test_the_gradient_is_clipped_at_the_setting():
    policy, batch = make(), make_batch()
    before = torch.cat([p.detach().flatten() for p in policy.parameters()])
    found = [torch.optim.SGD(policy.parameters(), lr=1.0)]
    rows = list(range(len(batch.lengths)))
    metrics = policy_update(policy, None, found, batch, rows, V, settings("rl.grad_clip=0.01"))
    after = torch.cat([p.detach().flatten() for p in policy.parameters()])
    assert metrics["grad_norm"] > 0.02 and float((after - before).norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_scoring_pass_follows_the_precision(monkeypatch):
    monkeypatch.setattr(learner, "bf16_runs", lambda device: True)
    policy, batch = make(), make_batch()
    exact, rough = (batch.logprobs_of(policy, range(3), V, settings(f"precision={p}")) for p in ("fp32", "bf16"))
    assert 1e-5 < (exact - rough).abs().max() < 0.2
