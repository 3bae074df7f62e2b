"""Proves: adapters are what they should be in every limit.

At the start they change no bit; at full rank (A the identity, alpha = rank) training B is training W, with SGD and
AdamW; switched off they leave the base; merged ones sample, save and load as they train; one stage's end in the weights
is what the next begins with. All of that on two ranks too, over a float32 and a bfloat16 base, together with blocks
that compute again and moments that are bfloat16 or on the CPU.
"""
from __future__ import annotations

import copy
import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from test_model import SIZES, drawn, make, tokens

from slca import learner, ranks
from slca.config import ConfigError, override
from slca.engine import Engine
from slca.learner import group_logprobs, token_logprobs
from slca.lora import adapters, adapters_off, add_lora, merge_adapters, merged_state, merged_tensors
from slca.model import ModelConfig, Policy, checkpoint_blocks
from slca.optim import optimizer_step, optimizers
from slca.sampler import generate
from slca.settings import Config, OptimConfig
from slca.weights import load_policy, save_policy

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLACES = 3 * len(EVERY)


def with_lora(family: str = "qwen2", rank: int = 4, targets=EVERY, dtype: torch.dtype = torch.float32) -> Policy:
    policy = make(family).to(dtype).requires_grad_(True)
    add_lora(policy, rank, 8.0, targets, seed=3)
    return policy


def trained(policy: Policy, steps: int = 3, rate: float = 0.03) -> Policy:
    """A few steps of AdamW towards random rows: adapters that are far from their start."""
    found = optimizers(policy, "adamw", rate, 0.0, (0.9, 0.999))
    for step in range(steps):
        ids = tokens(4, 12, seed=step)
        (-token_logprobs(policy, ids, later(ids), 61).mean()).backward()
        optimizer_step(policy, found, 1.0)
    return policy


def later(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    return mask


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_at_the_start_nothing_has_changed(family):
    base, policy, ids = make(family), with_lora(family), tokens(3, 20)
    assert torch.equal(policy(ids), base(ids))
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == {
        n for n, _ in policy.named_parameters() if "lora_" in n} and len(adapters(policy)) == PLACES
    assert {n for n, _ in policy.named_parameters() if "lora_" not in n} == {n for n, _ in base.named_parameters()}
    for module in adapters(policy):
        a = module.lora_a  # Kaiming's uniform: within 1 / sqrt(in), of variance 1 / (3 in)
        assert not module.lora_b.any() and a.abs().max() < a.shape[1] ** -0.5
        assert float(a.detach().var()) == pytest.approx(1 / (3 * a.shape[1]), rel=0.3)
    again = with_lora(family)
    assert all(torch.equal(x.lora_a, y.lora_a) for x, y in zip(adapters(policy), adapters(again), strict=True))
    (group,) = optimizers(policy, "adamw", 0.1, 0.0, (0.9, 0.999))[0].param_groups
    assert len(group["params"]) == 2 * PLACES and all(p.requires_grad for p in group["params"])


def test_by_hand():
    policy, x = with_lora(), torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    module = adapters(policy)[0]
    with torch.no_grad():
        module.lora_b.normal_(generator=torch.Generator().manual_seed(1))
    want = x @ module.weight.T + module.bias + 8.0 / 4 * (x @ module.lora_a.T) @ module.lora_b.T
    torch.testing.assert_close(module(x), want, rtol=1e-5, atol=1e-5)
    assert (module(x) - x @ module.weight.T - module.bias).abs().max() > 1


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("targets", [EVERY, ("v_proj", "down_proj")])
def test_full_rank_is_full_training(kind, targets):
    """A = identity and frozen, alpha = rank = in: B's gradient is W's, and so are three steps of either optimiser."""
    config = ModelConfig(**SIZES | {"intermediate_size": 32})  # every matrix has 32 columns
    full, policy = drawn(config), drawn(config)
    add_lora(policy, 32, 32.0, targets, seed=0)
    full.requires_grad_(False)
    with torch.no_grad():
        for module in adapters(policy):
            module.lora_a.copy_(torch.eye(32)).requires_grad_(False)
    trained_weights = [p.requires_grad_() for n, p in full.named_parameters() if n.endswith(tuple(
        f"{t}.weight" for t in targets))]
    start = [p.detach().clone() for p in trained_weights]
    for p, parameters in ((full, trained_weights), (policy, [m.lora_b for m in adapters(policy)])):
        how = torch.optim.SGD(parameters, 0.1) if kind == "sgd" else torch.optim.AdamW(
            parameters, 0.01, eps=1e-4, weight_decay=0.0)
        for step in range(3):
            ids = tokens(4, 12, seed=step)
            (-token_logprobs(p, ids, later(ids), 61).mean()).backward()
            how.step()
            how.zero_grad()
    got = merged_state(policy)
    for name, p in full.named_parameters():
        torch.testing.assert_close(got[name], p.detach(), rtol=0, atol=1e-6)
    assert all((a - p).abs().max() > 1e-3 for a, p in zip(start, trained_weights, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_adapters_it_is_the_base(dtype):
    base, ids = make().to(dtype), tokens(3, 20)
    policy = trained(with_lora(dtype=dtype))
    assert (policy(ids) - base(ids)).abs().max() > 0.1
    with pytest.raises(KeyError), adapters_off(policy):
        assert torch.equal(policy(ids), base(ids))
        raise KeyError
    assert (policy(ids) - base(ids)).abs().max() > 0.1  # they are on again whatever happened
    with adapters_off(base), adapters_off(None):
        pass


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_sampling_agrees_with_the_learner(family):
    policy, prompts = trained(with_lora(family)), [[5, 6, 7], [9] * 11]
    found, gaps = generate(policy, prompts, 3, 20, seed=1), []
    for i, c in enumerate(found):
        row = torch.tensor([prompts[i // 3] + c.ids])
        mask = torch.arange(row.shape[1])[None] >= len(prompts[i // 3])
        logp = token_logprobs(policy, row, mask, 61)[mask]
        assert (logp.detach() - torch.tensor(c.logprobs)).abs().max() < 1e-5
        with adapters_off(policy), torch.no_grad():
            gaps.append(float((token_logprobs(policy, row, mask, 61)[mask] - logp).abs().max()))
    assert min(gaps) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_folder_loads_with_the_same_logits(tmp_path, dtype):
    policy, ids = trained(with_lora(dtype=dtype)), tokens(3, 20)
    save_policy(policy, tmp_path)
    got, want = load_policy(tmp_path, dtype), policy(ids).detach()
    assert {n: p.dtype for n, p in got.named_parameters()} == {n: dtype for n, _ in make().named_parameters()}
    assert (got(ids) - want).abs().max() < (1e-5 if dtype == torch.float32 else 0.1)
    assert (make()(ids) - want).abs().max() > 0.1
    state = merged_tensors({n: p.detach() for n, p in policy.named_parameters()}, 8.0)  # as an export does
    assert all(torch.equal(state[n], p) for n, p in got.named_parameters()) and len(state) == len(got.state_dict())


def test_a_merged_folder_loads_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    policy, ids = trained(with_lora()), tokens(3, 20)
    save_policy(policy, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert (theirs(ids).logits - policy(ids)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_ends_in_the_weights(tmp_path, dtype):
    """The next one begins as it would from the stage's folder, bit for bit."""
    policy, ids = trained(with_lora(dtype=dtype)), tokens(3, 20)
    want, sampled = policy(ids).detach(), Engine(policy, 20)
    save_policy(policy, tmp_path)
    merge_adapters(policy, seed=7)
    assert (policy(ids) - want).abs().max() < (1e-5 if dtype == torch.float32 else 0.1)
    with adapters_off(policy):
        assert (policy(ids) - want).abs().max() < (1e-5 if dtype == torch.float32 else 0.1)
    if dtype == torch.bfloat16:  # what was sampled from was rounded as the weights are now
        assert torch.equal(Engine(policy, 20).layers[1].down.plain, sampled.layers[1].down.plain)
    fresh = load_policy(tmp_path, dtype)
    add_lora(fresh, 4, 8.0, EVERY, seed=7)
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_learner_runs_over_either_base(monkeypatch, dtype, precision):
    """Rows with a shared prompt and rows alone, near the float32 scores; adapters and gradients stay float32."""
    monkeypatch.setattr(learner, "bf16_runs", lambda device: True)
    exact = trained(with_lora())
    policy = copy.deepcopy(exact)
    for n, p in policy.named_parameters():
        p.data = p.data if "lora_" in n else p.data.to(dtype)
    ids = tokens(3, 20)
    ids[:, :8] = ids[0, :8]
    mask = later(ids)
    mask[:, :8] = False
    want = token_logprobs(exact, ids, mask, 61).detach()
    shared = group_logprobs(policy, ids, mask, [20] * 3, [8] * 3, [0] * 3, 61, 1.0, precision)
    alone = token_logprobs(policy, ids, mask, 61, 1.0, precision)
    bound = 1e-5 if dtype == torch.float32 and precision == "fp32" else 0.25
    for got in (shared, alone):
        assert (got.detach() - want).abs().max() < bound
    (shared.sum() + alone.sum()).backward()
    for name, p in policy.named_parameters():
        assert p.dtype == (torch.float32 if "lora_" in name else dtype)
        assert (p.grad is not None) == ("lora_" in name) and (p.grad is None or p.grad.any())
    before = [m.lora_b.detach().clone() for m in adapters(policy)]
    optimizer_step(policy, optimizers(policy, "adamw", 1e-6, 0.0, (0.9, 0.999)), 1.0)
    assert all((m.lora_b - b).abs().max() > 5e-7 for m, b in zip(adapters(policy), before, strict=True))


def test_wrong_targets_are_named():
    with pytest.raises(ValueError, match="qproj, lm_head; expected some of q_proj, k_proj, v_proj, o_proj, gate_proj, "
                                         "up_proj, down_proj"):
        add_lora(make(), 4, 8.0, ["q_proj", "qproj", "lm_head"], 0)
    for policy, rank, targets in ((with_lora(), 4, EVERY), (make(), 0, EVERY), (make(), 4, ())):
        with pytest.raises(ValueError, match="adapters need"):
            add_lora(policy, rank, 8.0, targets, 0)
    with pytest.raises(ConfigError, match=r"lora.targets\[1\].*qproj.*one of q_proj, k_proj"):
        override(Config(), ["lora.targets=[q_proj, qproj]"])
    with pytest.raises(ConfigError, match="lora.targets.*at least one"):
        override(Config(), ["lora.targets=[]"])
    with pytest.raises(ConfigError, match="model.dtype.*lora.rank is 0"):
        override(Config(), ["model.dtype=bf16"])
    assert override(Config(), ["model.dtype=bf16", "lora.rank=4", "lora.targets=[v_proj]"]).lora.targets == ("v_proj",)


# ---- two ranks

CASES = {"full": (0, "fp32", "fp32"), "full bf16": (0, "fp32", "bf16"), "lora": (4, "fp32", "fp32"),
         "lora, bf16 base": (4, "bf16", "bf16")}


def on_a_rank(number: int, port: int, out: str) -> None:
    """What each case gives on this rank, beside the same policy in one piece; rank 0 writes it down."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    ranks.start(timeout_s=120)
    learner.bf16_runs = ranks.bf16_runs = lambda device: True
    found = {name: compare(*case) for name, case in CASES.items()}
    if number == 0:
        Path(out).write_text(json.dumps(found))
    ranks.end()


def compare(rank: int, base: str, precision: str) -> dict[str, float]:
    alone = drawn(ModelConfig(**SIZES | {"intermediate_size": 49}, tie_word_embeddings=False))  # 49 rows: 25 and 24
    if base == "bf16":
        alone.to(torch.bfloat16)
    if rank:
        add_lora(alone, rank, 8.0, EVERY, 0)
        with torch.no_grad():
            for i, module in enumerate(adapters(alone)):
                module.lora_b.normal_(0, 0.05, generator=torch.Generator().manual_seed(i))
    policies = [ranks.placed(copy.deepcopy(alone), torch.device("cpu"), precision) for _ in range(2)]
    policy, ids = policies[0], tokens(3, 20)
    checkpoint_blocks(policy)

    def logp(p: Policy) -> torch.Tensor:
        return token_logprobs(p, ids, later(ids), 61, 1.0, precision)

    def gap(a, b) -> float:
        return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(a, b, strict=True))

    scores, result = [], {}
    for p in (*policies, alone):
        scores.append(logp(p))
        with torch.no_grad(), adapters_off(p):  # the reference of the KL term, before the way back
            off = logp(p)
        scores[-1].sum().backward()
    grads = [[ranks.whole(p.grad) for p in q.parameters() if p.grad is not None] for q in (*policies, alone)]
    result["recomputed_differs"] = float(not all(map(torch.equal, [scores[0], *grads[0]], [scores[1], *grads[1]])))
    result["gradient"] = gap(grads[0], [2 * g for g in grads[2]])  # a sum over two ranks that see the same
    if rank:
        result["off"] = float((off - scores[2]).abs().max())
        engines = [Engine(p, 30) for p in (policy, alone)]
        result["engine"] = gap(*([e.layers[1].down.plain, e.layers[2].qkv.plain] for e in engines))
    for options in (OptimConfig("fp32", True), OptimConfig("bf16", False), OptimConfig("bf16", True)):
        (own,) = optimizers(policy, "adamw", 1e-3, 0.1, (0.9, 0.999), options=options)
        own.step()
        kinds = {(type(t).__name__, str(t.dtype)) for s in own.state.values() for k, t in s.items() if k != "step"}
        result[f"state_{options.state}_{options.offload}"] = float(
            kinds == {("DTensor", "torch.bfloat16" if options.state == "bf16" else "torch.float32")})
        if options.state == "fp32":
            plain = optimizers(policies[1], "adamw", 1e-3, 0.1, (0.9, 0.999))[0]
            plain.step()
            result["adamw"] = gap(*([ranks.whole(p).detach() for p in q.parameters()] for q in policies))
    before = {name: t.clone() for name, t in merged_state(policy).items()}
    merge_adapters(policy, 0)
    after = merged_state(policy)
    result["merged"] = max(gap([after[n]], [t]) for n, t in before.items()) if before else 0.0  # on rank 0
    return result


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("two") / "found.json"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(on_a_rank, (port, str(out)), 2)
    return json.loads(out.read_text())


@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(two, case):
    """Checkpointed blocks change no bit under FSDP; gradients, merged weights and AdamW are those of one process."""
    found, rough = two[case], CASES[case][2] == "bf16"
    assert not found["recomputed_differs"]
    assert found["gradient"] < (0.1 if rough else 1e-6)
    assert found["adamw"] < 1e-6 and found["merged"] < (1e-2 if "base" in case else 1e-6)
    assert all(found[f"state_{state}"] for state in ("fp32_True", "bf16_False", "bf16_True"))
    if "lora" in case:
        assert found["engine"] < 1e-6 and found["off"] > 0.1
