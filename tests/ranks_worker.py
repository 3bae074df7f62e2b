"""What tests/test_ranks.py runs under torchrun, and alone for comparison: ranks_worker.py CASE FOLDER [EPISODES].

"updates": three RL steps with one and several micro-batches, and with a prompt for only one of the ranks. Step 1
samples; steps 2 and 3 replay the episodes in the file EPISODES where it is given, else sample too and write them.
"scripted": rollouts whose tokens are a script, long with tool calls on one prompt, two tokens on the other.
Rank 0 writes what it found to FOLDER.
"""
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from slca import learner, ranks, rollout, slots
from slca.config import override
from slca.data.vocabulary import world_tokenizer
from slca.data.world import World
from slca.learner import Batch, policy_update
from slca.lora import merged_state
from slca.model import ModelConfig, new_policy
from slca.optim import optimizers
from slca.rewards import HierR
from slca.settings import Config
from slca.simulator import Simulator

CASES = {"one": ["micro_batch_tokens=100000"], "two": ["micro_batch_tokens=900"], "many": ["micro_batch_tokens=400"],
         "idle rank": ["rl.prompts_per_step=1", "rl.prompts_per_update=1"],
         "kl and two updates": ["loss.kl_coef=0.1", "rl.prompts_per_update=2", "micro_batch_tokens=900"],
         "idle rank, kl": ["loss.kl_coef=0.1", "rl.prompts_per_step=2", "rl.prompts_per_update=1"],
         "whole": ["shard=false", "micro_batch_tokens=900"],
         "bf16": ["precision=bf16"]}


def setting(tokenizer, *changes: str):
    cfg = override(Config(), ["threads=1", "rl.prompts_per_step=4", "rl.prompts_per_update=4", "rl.group_size=3",
                              "rollout.max_response_tokens=40", "rl.lr=2e-4", *changes])
    shape = ModelConfig("qwen2", tokenizer.size, 32, 48, 2, 4, 2)
    return cfg, shape


def score(episode) -> HierR:
    """A reward for each stream that differs within a group, whatever an untrained policy writes."""
    process, summary = episode.member / 2, (episode.member * 2 % 3) / 2
    return HierR(process=process, summary=summary, total=process + summary, has_tool_response=True)


def updates(tokenizer, folder: Path, replay: list | None) -> None:
    found, kept = {}, {}
    for name, changes in CASES.items():
        cfg, shape = setting(tokenizer, *changes)
        if cfg.precision == "bf16":  # slowly, where the CPU has no such units
            ranks.bf16_runs = learner.bf16_runs = lambda device: True
        policy, reference = ranks.placed(new_policy(shape, 1), torch.device("cpu"), cfg.precision, cfg.shard), None
        if cfg.loss.kl_coef:
            reference = ranks.placed(new_policy(shape, 2), torch.device("cpu"), "fp32").requires_grad_(False)
        found_optimizers, world = optimizers(policy, "adamw", cfg.rl.lr, 0.01, (0.9, 0.999)), World("train", 0)
        found[name], kept[name], run = [], [], train.Run.__new__(train.Run)
        run.cfg, run.policy, run.tokenizer = cfg, policy, tokenizer
        for step in range(3):
            tasks, mine = world.tasks(cfg.rl.prompts_per_step), ranks.share(cfg.rl.prompts_per_step)
            if step and replay is not None:
                episodes = [rollout.Episode(tasks[e["group"]], **e) for e in replay[name][step] if e["group"] in mine]
            else:
                episodes = rollout.rollout(policy, tokenizer, [tasks[i] for i in mine], Simulator(), cfg,
                                           cfg.rl.group_size, (0, step), 1.0, numbers=mine)
            for e in episodes:
                e.rewards = score(e)
            batch = Batch.of(episodes, policy.device)
            batch.advantages = train.estimate(episodes, batch, cfg).tokens
            every = [e for part in ranks.gather([plain(e) for e in episodes]) for e in part]
            kept[name].append(sorted(every, key=lambda e: (e["group"], e["member"])))
            found[name].append(run.update(found_optimizers, reference, batch))
        state = merged_state(policy)
        if ranks.rank() == 0:
            save_file(state, folder / f"{name}.safetensors")
    if ranks.rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
        (folder / "episodes.json").write_text(json.dumps(kept))


def plain(e) -> dict:
    return {k: v for k, v in asdict(e).items() if k not in ("task", "rewards")}


def scripted(tokenizer, folder: Path) -> None:
    cfg, shape = setting(tokenizer, "rollout.max_response_tokens=300")
    call = '<tool_call>\n[{"name": "nothing", "arguments": {}}]\n</tool_call>'
    turn = tokenizer.encode(call)  # its end stops the turn
    stop = list(tokenizer.stop_ids)[:1]
    texts = [turn * 3 + tokenizer.encode("well " * 20) + stop, turn * 3 + tokenizer.encode("done " * 20) + stop,
             [5, *stop], [6, *stop]]  # by prompt, even or odd, and member

    class Stream:  # a row's "random" numbers say which token of which script is next
        def __init__(self, *key: int):
            self.script = key[-2] % 2 * 2 + key[-1]

        def random(self, count: int, dtype) -> np.ndarray:
            return ((self.script * 1000 + np.arange(count)) / 1e6).astype(dtype)

    def draw(logits, uniforms, temperature):
        codes = (uniforms.double() * 1e6).round().long().tolist()
        tokens = [(texts[code // 1000] + [7] * 1000)[code % 1000] for code in codes]
        return torch.tensor(tokens), torch.full((len(tokens),), -1.0)

    rollout.row_stream, slots.draw = Stream, draw
    tasks, mine = World("train", 0).tasks(4), ranks.share(4)
    policy = ranks.placed(new_policy(shape, 1), torch.device("cpu"), "fp32")
    episodes = rollout.rollout(policy, tokenizer, [tasks[i] for i in mine], Simulator(), cfg, 2, (0, 0), 1.0,
                               numbers=mine)
    for e in episodes:
        e.rewards = score(e)
    batch = Batch.of(episodes, policy.device)
    batch.advantages = train.estimate(episodes, batch, cfg).tokens
    result = policy_update(policy, None, optimizers(policy, "adamw", 1e-3, 0.0, (0.9, 0.999)), batch,
                           range(len(episodes)), tokenizer.size, cfg)
    every = sorted((e for part in ranks.gather([plain(e) for e in episodes]) for e in part),
                   key=lambda e: (e["group"], e["member"]))
    if ranks.rank() == 0:
        (folder / "found.json").write_text(json.dumps({"episodes": every, "grad_norm": result["grad_norm"]}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks.start(timeout_s=60)
    case, out = sys.argv[1], Path(sys.argv[2])
    words = world_tokenizer(1024, examples=150)
    if case == "updates":
        updates(words, out, json.loads(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else None)
    else:
        scripted(words, out)
    ranks.end()
