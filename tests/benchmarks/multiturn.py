"""Dialogues of three turns with tool results between them: the cache kept, against generate() that starts over.

    python tests/benchmarks/multiturn.py [--model a b] [--threads 1] [--pairs 5] [--quick]

16 rows (2 prompts x 8) with prompts of 512 tokens; 48 tokens are sampled a turn and 64 tool tokens are put in after
the first and the second turn; temperature 1, no stop, float32 and bfloat16, end to end. transformers' generate() gets
the whole dialogue again each turn, with a dynamic or a static cache: the one that is faster in its warm-up run. Ours
keeps its cache, and the script checks that each token went through the model once. Ratios are of times, peer's over
ours. Left out: the simulator, and turns of unequal length.
"""
from __future__ import annotations

import common
import numpy as np
import torch

from slca.sampler import Sampler

TARGET = 4.0
TURNS, PROMPTS, MEMBERS = 3, 2, 8


def own_episodes(policy, prompts: list[list[int]], tool: list[list[list[int]]], new: int, dtype: torch.dtype) -> None:
    """tool: [turn][row] -> ids put in after that turn."""
    injected = sum(len(turn[0]) for turn in tool)
    sampler = Sampler(policy, PROMPTS * MEMBERS, len(prompts[0]) + TURNS * new + injected, 1.0, dtype=dtype)
    uniforms = [[np.random.default_rng((p, m)).random(TURNS * new, np.float32) for m in range(MEMBERS)]
                for p in range(PROMPTS)]
    rows = [row for group in sampler.admit(prompts, uniforms) for row in group]
    for turn in range(TURNS):
        sampler.decode(rows, [new] * len(rows))
        assert all(len(row.fresh.ids) == new for row in rows)
        if turn < len(tool):
            sampler.feed(rows, tool[turn])
    # each prompt once a group, each later token of a row once, but for its very last one, which nothing follows
    expected = sum(map(len, prompts)) + len(rows) * (TURNS * new + injected - 1)
    assert sampler.tokens_run == expected, f"{sampler.tokens_run} tokens went through the model, not {expected}"


def peer_episodes(peer, prompts: list[list[int]], tool: list[list[list[int]]], new: int, cache: str) -> None:
    ids = torch.tensor(prompts).repeat_interleave(MEMBERS, 0)
    for turn in range(TURNS):
        ids, _ = common.peer_generate(peer, ids, new - 1, cache)
        if turn < len(tool):
            ids = torch.cat([ids, torch.tensor(tool[turn])], 1)


def measure(name: str, prompt: int, new: int, injected: int, pairs: int) -> dict:
    loaded = {d: common.models(name, dtype) for d, dtype in common.DTYPES.items()}
    policy = loaded["fp32"][1]
    prompts = common.prompts_of(PROMPTS, prompt, name)
    tool = [common.prompts_of(PROMPTS * MEMBERS, injected, name, seed=turn + 1) for turn in range(TURNS - 1)]
    work, rivals = {}, []
    for d, dtype in common.DTYPES.items():
        rivals.append([f"peer {d} {cache}" for cache in common.CACHES])
        for cache in common.CACHES:
            work[f"peer {d} {cache}"] = lambda d=d, c=cache: peer_episodes(loaded[d][0], prompts, tool, new, c)
        work[f"own {d}"] = lambda t=dtype: own_episodes(policy, prompts, tool, new, t)
    runs = common.alternate(work, pairs, rivals)
    sampled = PROMPTS * MEMBERS * TURNS * new
    rows = [{"who": kind, "s": common.mid(runs, kind), "sampled tokens/s": sampled / common.mid(runs, kind)}
            for kind in runs]
    common.table(f"model {name}: {TURNS} turns, {PROMPTS} prompts x {MEMBERS}", rows)
    found = {"model": name, "target": TARGET, "rows": rows}
    for label in (*common.DTYPES, "best"):
        peer, own = (common.best_of(runs, side if label == "best" else f"{side} {label}") for side in ("peer", "own"))
        found[label] = common.ratio(runs, peer, own)
        print(f"{label}: {peer} / {own} = {found[label]}, target {TARGET}")
    return found


def main() -> None:
    args = common.arguments(__doc__, "transformers")
    lengths = (12, 3, 4) if args.quick else (512, 48, 64)
    common.finish(common.about(args) | {"episodes": [measure(name, *lengths, args.pairs) for name in args.model]})


if __name__ == "__main__":
    main()
