"""Sampling against transformers' generate(): decode speed, and what prefilling a prompt once a group gains.

    python tests/benchmarks/rollout.py [--model a b] [--threads 1] [--pairs 5] [--quick]

(1) decode: prompts of 256 tokens, all different, 128 decode steps (a draw and a forward pass each) at temperature 1
without any stop, batches of 1, 16 and 64, float32 and bfloat16. Prefill and decode are timed apart inside one call;
ours counts packing the weights and allocating the cache as prefill. transformers runs with a dynamic and with a static
cache; after a warm-up run of both the faster one goes on, in each precision. Its static cache is not compiled:
transformers compiles it on accelerators only, and nothing here forces it to.
(2) groups, in the sitting of batch 64: 4 prompts x 16 rollouts end to end, ours with a prefix shared by the group, ours
with every row for itself, and generate() on the repeated prompts, which cost it what different ones do.
Everybody draws one token more than there are steps. Ratios are of times, peer's over ours, so above 1 ours is faster.
"best" lets each side pick its precision. Left out: stops and ragged lengths (where ours drops finished rows), compiled
models, and GPUs.
"""
from __future__ import annotations

import time

import common
import numpy as np
import torch

from slca.sampler import Sampler, generate

DECODE_TARGETS = {("a", 1): 2.5, ("a", 16): 2.3, ("a", 64): 2.0, ("b", 1): 1.6, ("b", 16): 1.9, ("b", 64): 2.5}
PREFIX_TARGETS = {"a": 2.6, "b": 2.9}


def own_decode(policy, prompts: list[list[int]], new: int, dtype: torch.dtype) -> dict[str, float]:
    """Every prompt its own group. One token more than `new` is drawn, as in peer_generate, so `new` steps are whole."""
    start = time.perf_counter()
    sampler = Sampler(policy, len(prompts), len(prompts[0]) + new + 1, 1.0, dtype=dtype)
    uniforms = [[np.random.default_rng(i).random(new + 1, np.float32)] for i in range(len(prompts))]
    rows = [row for group in sampler.admit(prompts, uniforms) for row in group]
    middle = time.perf_counter()
    sampler.decode(rows, [new + 1] * len(rows))
    assert all(len(row.fresh.ids) == new + 1 for row in rows)
    return {"prefill": middle - start, "decode": time.perf_counter() - middle}


def sitting(name: str, peers: dict, policy, batch: int, group: int | None, prompt: int, new: int, pairs: int,
            limits: dict) -> dict[str, dict]:
    """One batch size: "decode", and where a group size is given "groups" too."""
    prompts = common.prompts_of(batch, prompt, name)
    leaders = prompts[:batch // group] if group else []
    every = [p for p in leaders for _ in range(group)]
    ids, work = torch.tensor(every or prompts), {}
    for d, dtype in common.DTYPES.items():
        for cache in common.CACHES:
            work[f"peer {d} {cache}"] = lambda d=d, c=cache: common.peer_generate(peers[d], ids, new, c)[1]
        work[f"own {d}"] = lambda t=dtype: own_decode(policy, prompts, new, t)
        if group:
            work[f"every row {d}"] = lambda t=dtype: generate(policy, every, 1, new + 1, dtype=t) and None
            work[f"shared {d}"] = lambda t=dtype: generate(policy, leaders, group, new + 1, dtype=t) and None
    runs = common.alternate(work, pairs, [[f"peer {d} {c}" for c in common.CACHES] for d in common.DTYPES])
    found = {"decode": report_decode(name, runs, batch, prompt, new, limits)}
    return found | ({"groups": report_groups(name, runs, batch, group, new)} if group else {})


def report_decode(name: str, runs: common.Runs, batch: int, prompt: int, new: int, limits: dict) -> dict:
    rows = []
    for kind in (kind for kind in runs if kind.startswith(("peer", "own"))):
        seconds = common.mid(runs, kind, "decode")
        bound = new * common.decode_bound(name, batch, prompt + new / 2, kind.split()[1], limits)
        rows.append({"who": kind, "prefill s": common.mid(runs, kind, "prefill"), "ms/step": seconds / new * 1e3,
                     "tokens/s": batch * new / seconds, "of roofline": bound / seconds})
    common.table(f"model {name}, batch {batch}: decode", rows)
    found = {"model": name, "batch": batch, "target": DECODE_TARGETS.get((name, batch)), "rows": rows}
    for label in (*common.DTYPES, "best"):
        peer, own = (common.best_of(runs, side if label == "best" else f"{side} {label}", "decode")
                     for side in ("peer", "own"))
        found[label] = common.ratio(runs, peer, own, "decode") | {"total": common.ratio(runs, peer, own)["paired"]}
        print(f"{label}: {peer} / {own} = {found[label]}" + f", target {found['target']}" * (label == "best"))
    return found


def report_groups(name: str, runs: common.Runs, batch: int, group: int, new: int) -> dict:
    rows = [{"who": kind, "s": common.mid(runs, kind), "tokens/s": batch * new / common.mid(runs, kind)}
            for kind in runs if not kind.startswith("own")]
    common.table(f"model {name}, {batch // group} prompts x {group}: end to end", rows)
    found = {"model": name, "target": PREFIX_TARGETS.get(name), "rows": rows}
    for label in (*common.DTYPES, "best"):
        d = "" if label == "best" else f" {label}"
        peer, every, shared = (common.best_of(runs, f"{side}{d}") for side in ("peer", "every row", "shared"))
        found[label] = {"every row": common.ratio(runs, every, shared), "peer": common.ratio(runs, peer, shared)}
        print(f"{label}: every row / shared = {found[label]['every row']}, target {found['target']}; "
              f"{peer} / {shared} = {found[label]['peer']}")
    return found


def main() -> None:
    args = common.arguments(__doc__, "transformers")
    (batches, group), lengths = (((1, 4), 2), (12, 4)) if args.quick else (((1, 16, 64), 16), (256, 128))
    limits = common.machine(args.quick)
    print("machine:", ", ".join(f"{k} {v / 1e9:.0f} {'GB/s' if k == 'memory' else 'GFLOP/s'}"
                                for k, v in limits.items()))
    result = common.about(args) | {"machine": limits, "decode": [], "groups": []}
    for name in args.model:
        loaded = {d: common.models(name, dtype) for d, dtype in common.DTYPES.items()}
        peers, policy = {d: peer for d, (peer, _) in loaded.items()}, loaded["fp32"][1]
        for batch in batches:
            found = sitting(name, peers, policy, batch, group if batch == batches[-1] else None, *lengths, args.pairs,
                            limits)
            for part in found:
                result[part].append(found[part])
    common.finish(result)


if __name__ == "__main__":
    main()
