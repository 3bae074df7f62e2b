"""Optimisers: Muon against PyTorch's and by its singular values, what decays at which rate, clipping by hand.

AdamW with small moments: with float32 moments on the CPU it is PyTorch's to 1e-6; bfloat16 ones are unbiased where
rounding to the nearest stands still, end a training within 3 % of float32's loss, and repeat bit for bit after a load.
"""
import pytest
import torch

from slca import optim
from slca.model import ModelConfig, Policy, new_policy
from slca.optim import AdamW, Muon, optimizer_step, optimizers, orthogonalised, randomly_rounded, set_rate
from slca.settings import OptimConfig


def make(seed: int = 0) -> Policy:
    return new_policy(ModelConfig("qwen2", 41, 32, 48, 2, 4, 2), seed)


def test_muon_is_pytorchs_up_to_its_bfloat16():
    draw = torch.Generator().manual_seed(1)
    start = [torch.randn(s, generator=draw) for s in ((12, 40), (40, 12), (16, 16))]
    found = []
    for kind in (Muon, torch.optim.Muon):
        params = [torch.nn.Parameter(t.clone()) for t in start]
        optimizer, draw = kind(params, lr=0.1, weight_decay=0.2), torch.Generator().manual_seed(2)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=draw)
            optimizer.step()
        found.append([p.detach() - t for p, t in zip(params, start, strict=True)])
    for own, peer in zip(*found, strict=True):
        assert (own - peer).norm() / peer.norm() < 0.02


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_orthogonalised_keeps_the_directions_and_levels_the_singular_values(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    x = orthogonalised(g).float()
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    assert 0.5 < s.min() and s.max() < 1.3
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    inner = u.T @ x @ v.T  # diagonal in the singular vectors of g
    assert (inner - inner.diagonal().diag()).abs().max() < 0.03 and inner.diagonal().min() > 0.5


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_clipping_by_hand(clip):
    """SGD shows the clipped gradient; the norm returned is the one before."""
    policy = make()
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    before, n = policy.model.norm.weight.detach().clone(), sum(p.numel() for p in policy.parameters())
    norm = optimizer_step(policy, [torch.optim.SGD(policy.parameters(), lr=1.0)], clip)
    assert norm == pytest.approx(n ** 0.5, rel=1e-5)
    step = (before - policy.model.norm.weight.detach())[0]
    assert float(step) == pytest.approx(min(1.0, clip / n ** 0.5), rel=1e-3)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizers_and_rates(kind):
    policy = make(1)
    found = optimizers(policy, kind, 0.02, 0.1, (0.8, 0.9), 0.003)
    groups = [g for o in found for g in o.param_groups]
    owners = {n: [g for g in groups if any(q is p for q in g["params"])] for n, p in policy.named_parameters()}
    for name, p in policy.named_parameters():
        (group,) = owners[name]  # each parameter has exactly one
        inside = p.ndim == 2 and name.startswith("model.layers")
        assert group["weight_decay"] == (0.1 if p.ndim == 2 else 0.0)
        assert group["peak"] == group["lr"] == (0.003 if kind == "muon" and not inside else 0.02)
    assert [type(o).__name__ for o in found] == (["Muon", "AdamW"] if kind == "muon" else ["AdamW"])
    assert found[-1].param_groups[0]["betas"] == (0.8, 0.9)
    for share in (0.25, 1.0, 0.0):  # of the peak, not of the last rate
        set_rate(found, share)
        assert all(g["lr"] == g["peak"] * share for g in groups)


# ---- AdamW with small moments

def gradients(policy: Policy, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for p in policy.parameters():
        p.grad = torch.randn(p.shape, generator=draw) * (0.1 + step % 3)


def run(policy: Policy, found: list, steps: range) -> list[torch.Tensor]:
    for step in steps:
        gradients(policy, step)
        found[0].step()
    return [p.detach().clone() for p in policy.parameters()]


@pytest.mark.parametrize("chunk", [10**9, 100])
def test_float32_moments_on_the_cpu_are_pytorchs_adamw(monkeypatch, chunk):
    monkeypatch.setattr(optim, "CHUNK", chunk)
    results, policies = [], [make(), make()]
    for policy, options in zip(policies, (None, OptimConfig("fp32", True)), strict=True):
        found = optimizers(policy, "adamw", 0.01, 0.1, (0.8, 0.99), options=options)
        results.append(run(policy, found, range(20)))
    assert isinstance(found[0], AdamW)
    start = make()
    for name, a, b, p in zip(dict(start.named_parameters()), *results, start.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
        assert (a - p).abs().mean() > 0.01, name


def test_the_default_is_pytorchs_and_frozen_parameters_are_left_out():
    policy = make()
    policy.model.embed_tokens.requires_grad_(False)
    for options in (None, OptimConfig(), OptimConfig("bf16")):
        found = optimizers(policy, "adamw", 0.01, 0.1, (0.8, 0.99), options=options)
        assert type(found[0]) is (AdamW if options == OptimConfig("bf16") else torch.optim.AdamW)
        held = [p for g in found[0].param_groups for p in g["params"]]
        assert not any(p is policy.model.embed_tokens.weight for p in held)
        assert len(held) == len(list(policy.parameters())) - 1


def test_random_rounding_keeps_the_mean():
    """A value a quarter of the way between two neighbours goes up a quarter of the times; exact ones stay."""
    x = torch.tensor([1 + 2**-9, -(1 + 2**-9), 3.0, 0.0, 1e-30])
    drawn = torch.stack([randomly_rounded(x, torch.Generator().manual_seed(i)) for i in range(4000)]).float()
    assert set(drawn[:, 0].tolist()) == {1.0, 1 + 2**-7} and set(drawn[:, 1].tolist()) == {-1.0, -1 - 2**-7}
    assert (drawn[:, 2] == 3).all() and (drawn[:, 3] == 0).all()
    for column in (0, 1, 4):  # four standard errors of the mean; a draw's deviation is .5 of a spacing at most
        off = drawn[:, column].double().mean() - x[column]
        assert abs(float(off)) < 4 * 0.5 * 2**-7 * abs(float(x[column])) / 4000 ** 0.5


def test_bfloat16_moments_are_unbiased_where_the_nearest_would_stand_still():
    """Gradients of 1 and then .5: after 400 steps exp_avg_sq has fallen by a quarter, rounded to the nearest it has
    not moved. The mean over 2,000 elements is within 1 % of float32's."""
    p, ends = torch.nn.Parameter(torch.zeros(2000)), {}
    for dtype in (torch.float32, torch.bfloat16):
        optimizer = AdamW([p], 0.0, (0.9, 0.999), 0.0, dtype=dtype, seed=1)
        optimizer.state[p].update(step=torch.tensor(1.0), exp_avg=torch.ones(2000).to(dtype),
                                  exp_avg_sq=torch.full((2000,), 0.99).to(dtype))
        for _ in range(400):
            p.grad = torch.full((2000,), 0.5)
            optimizer.step()
        ends[dtype] = [optimizer.state[p][name].double() for name in ("exp_avg", "exp_avg_sq")]
        assert ends[dtype][1].std() > 0 or dtype == torch.float32
    nearest = torch.tensor(0.99).bfloat16()
    for _ in range(400):
        nearest = (nearest.float() * 0.999 + 0.001 * 0.25).bfloat16()
    assert float(nearest) > 0.98 and 0.7 < ends[torch.float32][1].mean() < 0.8
    for want, got in zip(ends[torch.float32], ends[torch.bfloat16], strict=True):
        assert float(got.mean()) == pytest.approx(float(want.mean()), rel=0.01)


def losses(options: OptimConfig, seed: int = 0) -> float:
    """Mean loss of the last 20 of 150 steps on copying: the second half of a row repeats the first."""
    policy, draw, last = make(), torch.Generator().manual_seed(0), []
    found = optimizers(policy, "adamw", 3e-3, 0.01, (0.9, 0.999), options=options, seed=seed)
    for step in range(150):
        half = torch.randint(0, 8, (16, 6), generator=draw)
        ids = torch.cat([half, half], 1)
        logp = torch.log_softmax(policy(ids)[:, :-1], -1).gather(2, ids[:, 1:, None])
        loss = -logp.mean()
        loss.backward()
        optimizer_step(policy, found, 1.0)
        last += [loss.item()] if step >= 130 else []
    return sum(last) / len(last)


def test_a_training_with_bfloat16_moments_ends_where_float32_does():
    want = losses(OptimConfig())
    assert want < 1.9  # of log 41 = 3.7 at the start, log 8 = 2.08 without any copying
    assert losses(OptimConfig("bf16")) == pytest.approx(want, rel=0.03)


@pytest.mark.parametrize("options", [OptimConfig("bf16"), OptimConfig("bf16", True), OptimConfig("fp32", True)])
@pytest.mark.parametrize("way", ["state_dict", "tensors"])
def test_a_run_that_is_resumed_repeats_bit_for_bit(options, way):
    """Saved as torch does, and as a checkpoint does: by parameter and key, nothing but tensors."""
    policy = make()
    found = optimizers(policy, "adamw", 0.01, 0.1, (0.9, 0.999), options=options, seed=4)
    middle = run(policy, found, range(5))
    saved = {p: {k: t.clone() for k, t in s.items()} for p, s in found[0].state.items()}
    assert {k: t.dtype for k, t in saved[policy.model.norm.weight].items()} == {
        "step": torch.float32, **dict.fromkeys(("exp_avg", "exp_avg_sq"),
                                               torch.bfloat16 if options.state == "bf16" else torch.float32)}
    want = run(policy, found, range(5, 9))

    other = make(1)
    again = optimizers(other, "adamw", 0.01, 0.1, (0.9, 0.999), options=options, seed=4)
    with torch.no_grad():
        for p, value in zip(other.parameters(), middle, strict=True):
            p.copy_(value)
    if way == "state_dict":
        order = [p for g in found[0].param_groups for p in g["params"]]
        again[0].load_state_dict(found[0].state_dict() | {"state": {i: saved[p] for i, p in enumerate(order)}})
    else:
        for p, q in zip(policy.parameters(), other.parameters(), strict=True):
            again[0].state[q] = saved[p]
    assert all(map(torch.equal, run(other, again, range(5, 9)), want))
    assert again[0].state[other.model.norm.weight]["exp_avg"].dtype == found[0].dtype


def test_the_noise_is_the_seeds():
    ends = [run(p := make(), optimizers(p, "adamw", 0.01, 0.1, (0.9, 0.999), options=OptimConfig("bf16"), seed=seed),
                range(4)) for seed in (4, 4, 5)]
    assert all(map(torch.equal, ends[0], ends[1])) and not all(map(torch.equal, ends[0], ends[2]))


def test_replicas_stay_equal_on_any_rank(monkeypatch):
    """Unsharded, every rank holds all of a parameter: one that rounded its moments otherwise would drift away."""
    ends = []
    for number in (0, 1):
        monkeypatch.setattr(optim, "rank", lambda number=number: number)
        ends.append(run(p := make(), optimizers(p, "adamw", 0.01, 0.1, (0.9, 0.999), options=OptimConfig("bf16")),
                        range(4)))
    assert all(map(torch.equal, *ends))
