"""A whole GRPO step against TRL's GRPOTrainer; the learner's scaling and memory.

    python tests/benchmarks/step.py [--model a b] [--threads 1] [--pairs 5] [--quick]
    python tests/benchmarks/step.py --scaling --memory

8 prompts x 8 rollouts, prompt 128 tokens, completion exactly 64, one AdamW update a step at rate 1e-5, no KL term,
gradient clipped at 1: TRL's "grpo" loss, which is the mean over rows of the mean over tokens. Our step runs inside
TRL's own loop, after each of its steps, on the same prompts; both start from the same weights. rollout: sampling,
decoding to text and reward (TRL's: advantages too); update: all the rest of the step. In bf16 TRL runs with bf16=True;
ours samples with bfloat16 weights and learns under autocast. On the first step, a warm-up, ours also learns TRL's
rollouts, and the script stops where the two gradient norms differ: both sides do the same work.

--scaling: tokens/s of our update with 64 and with 128 rollouts. --memory: what an update takes beyond what was there
before it, 4 rows of 2,048 tokens (1,792 sampled) and a vocabulary of 151,936, against one that holds all logits
(16 GB).
Left out: KL terms, several updates a step, ragged lengths, checkpointing of blocks, and GPUs.
"""
from __future__ import annotations

import copy
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import torch

from slca import learner, optim
from slca.advantages import grpo_advantages
from slca.config import override
from slca.data import Task
from slca.loss import policy_loss
from slca.model import Policy
from slca.rollout import Episode
from slca.sampler import generate
from slca.settings import Config
from slca.slots import Completion

TARGETS = {("a", "fp32"): 4.0, ("b", "fp32"): 3.5, ("a", "bf16"): 5.0, ("b", "bf16"): 5.0}
GROUP = 8
MEMORY_TARGET, MEMORY_ROWS = 0.6, 4
# (tokens of a row, sampled tokens of it, shape)
LARGE = (2048, 1792, {"vocab_size": 151936, "hidden_size": 256})
SMALL = (64, 48, {"vocab_size": 8192})


# --- our step --------------------------------------------------------------------------------------------------------

class Own:
    """Our side: a policy, its optimiser and what train.py does in a step, without simulator and judge."""

    def __init__(self, policy: Policy, precision: str, prompts: int):
        self.policy, self.precision = policy, precision
        self.cfg = override(Config(), [f"precision={precision}", "loss.aggregation=seq_mean_token_mean",
                                       f"rl.prompts_per_step={prompts}", f"rl.prompts_per_update={prompts}",
                                       f"rl.group_size={GROUP}", "rl.lr=1e-5"])
        self.found = optim.optimizers(policy, "adamw", 1e-5, 0.0, (0.9, 0.999))

    def sample(self, prompts: list[list[int]], new: int, seed: int) -> list[Completion]:
        dtype = torch.bfloat16 if self.precision == "bf16" else None
        return generate(self.policy, prompts, GROUP, new, seed=seed, dtype=dtype)

    def update(self, batch: learner.Batch) -> dict[str, float]:
        return learner.policy_update(self.policy, None, self.found, batch, list(range(len(batch.lengths))),
                                     self.policy.config.vocab_size, self.cfg)


def batch_of(prompts: list[list[int]], completions: list[Completion], rewards: list[float]) -> learner.Batch:
    """The episodes of a step, members of a group adjacent, as tensors with GRPO's advantages (TRL's eps)."""
    episodes, size = [], len(completions) // len(prompts)
    for i, completion in enumerate(completions):
        prompt = prompts[i // size]
        episode = Episode(Task("", [], []), i // size, i % size, list(prompt), len(prompt), [0] * len(prompt),
                          [0.0] * len(prompt), open_call=[0] * len(prompt))
        episode.append(completion.ids, completion.logprobs)
        episode.finish("length_limit", "positional")
        episodes.append(episode)
    batch = learner.Batch.of(episodes, torch.device("cpu"))
    batch.advantages = grpo_advantages(batch.policy_mask, [e.group for e in episodes], rewards, eps=1e-4).tokens
    return batch


# --- against TRL -----------------------------------------------------------------------------------------------------

def word_tokenizer(folder: str, vocabulary: int):
    """One word is one token, so that a prompt's length is exact."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, vocabulary)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>",
                            unk_token="<unk>").save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def reward(completions: list[str], **_) -> list[float]:
    """Share of words with an odd number."""
    return [sum(int(w[1:]) % 2 for w in text.split() if w[1:].isdigit()) / len(text.split()) for text in completions]


def against_trl(name: str, precision: str, prompts: int, prompt: int, new: int, pairs: int, folder: str) -> dict:
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    peer, policy = common.models(name)
    own, tokenizer = Own(policy, precision, prompts), word_tokenizer(folder, common.SHAPES[name]["vocab_size"])
    peer.config.eos_token_id = peer.generation_config.eos_token_id = tokenizer.eos_token_id
    words = tokenizer.batch_decode(common.prompts_of(prompts * (pairs + 1), prompt, name))
    seen, norms, runs = {}, {}, {"peer": [], "own": []}

    def texts(completions) -> list[str]:
        return tokenizer.batch_decode(completions, skip_special_tokens=True)

    def own_step(ids: list[list[int]], seed: int) -> dict[str, float]:
        start = time.perf_counter()
        completions = own.sample(ids, new, seed)
        rewards = reward(texts([c.ids for c in completions]))
        middle = time.perf_counter()
        own.update(batch_of(ids, completions, rewards))
        end = time.perf_counter()
        return {"rollout": middle - start, "update": end - middle, "total": end - start}

    class InTurn(TrainerCallback):
        """A step of TRL's lasts from the end of our turn to the beginning of the next."""

        def on_train_begin(self, *_, **__):
            seen["start"] = time.perf_counter()

        def on_step_end(self, _, state, *__, **___):
            total = time.perf_counter() - seen["start"]
            ids = seen["prompts"][::GROUP].tolist()
            if state.global_step == 1:  # TRL's rollouts once through our update, for the norm alone, then a warm-up
                told = [Completion(c, [0.0] * new, False) for c in seen["completions"].tolist()]
                batch = batch_of(ids, told, reward(texts(seen["completions"])))
                norms["own"] = Own(copy.deepcopy(policy), precision, prompts).update(batch)["grad_norm"]
                own_step(ids, 0)
            else:
                runs["peer"].append({"rollout": seen["rollout"], "update": total - seen["rollout"], "total": total})
                runs["own"].append(own_step(ids, state.global_step))
            seen["start"] = time.perf_counter()

        def on_log(self, _, state, __, logs, **___):
            if state.global_step == 1:
                norms["peer"] = float(logs["grad_norm"])

    config = GRPOConfig(output_dir=folder, use_cpu=True, bf16=precision == "bf16", num_generations=GROUP,
                        per_device_train_batch_size=prompts * GROUP, gradient_accumulation_steps=1, temperature=1.0,
                        max_completion_length=new, top_k=0, beta=0.0, loss_type="grpo", num_iterations=1,
                        learning_rate=1e-5, max_steps=pairs + 1, logging_steps=1, report_to=[], save_strategy="no",
                        gradient_checkpointing=False, generation_kwargs={"min_new_tokens": new}, disable_tqdm=True)
    trainer = GRPOTrainer(model=peer, reward_funcs=reward, args=config, processing_class=tokenizer,
                          train_dataset=Dataset.from_list([{"prompt": text} for text in words]),
                          callbacks=[InTurn()])
    inner = trainer._generate_and_score_completions

    def timed(*inputs):
        start = time.perf_counter()
        out = inner(*inputs)
        seen["rollout"] = time.perf_counter() - start
        seen["prompts"], seen["completions"] = out["prompt_ids"], out["completion_ids"]
        assert seen["prompts"].shape == (prompts * GROUP, prompt), seen["prompts"].shape
        assert seen["completions"].shape == (prompts * GROUP, new), seen["completions"].shape
        return out

    trainer._generate_and_score_completions = timed
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    assert len(runs["peer"]) == len(runs["own"]) == pairs
    gap = abs(norms["own"] / norms["peer"] - 1)
    if not gap < (1e-3 if precision == "fp32" else 3e-2):
        raise SystemExit(f"error: on the same rollouts the gradient norms are {norms}: the losses are not the same")
    rows = [{"who": who, **{f"{key} s": common.mid(runs, who, key) for key in ("rollout", "update", "total")}}
            for who in runs]
    common.table(f"model {name}, {precision}: a step", rows)
    found = {"model": name, "precision": precision, "target": TARGETS.get((name, precision)), "rows": rows,
             "grad_norms": norms}
    for key in ("total", "rollout", "update"):
        found[key] = common.ratio(runs, "peer", "own", key)
    print(f"TRL / own = {found['total']}, target {found['target']}; rollout {found['rollout']['paired']}, update "
          f"{found['update']['paired']}; gradient norms {gap:.0e} apart")
    return found


# --- the learner alone -----------------------------------------------------------------------------------------------

def made_up(policy: Policy, prompts: int, group: int, prompt: int, new: int) -> learner.Batch:
    """Random prompts and completions, with rewards that leave no row without an advantage."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, policy.config.vocab_size, (prompts * (1 + group), prompt + new), generator=draw).tolist()
    completions = [Completion(row[prompt:], [0.0] * new, False) for row in ids[prompts:]]
    return batch_of([row[:prompt] for row in ids[:prompts]], completions, [i % 2 for i in range(len(completions))])


def scaling(name: str, precision: str, prompts: int, prompt: int, new: int, pairs: int) -> dict:
    work = {}
    for count in (prompts, 2 * prompts):
        own = Own(common.own_policy(name), precision, count)
        batch = made_up(own.policy, count, GROUP, prompt, new)
        work[f"{count * GROUP} rollouts"] = lambda own=own, batch=batch: own.update(batch) and None
    runs = common.alternate(work, pairs)
    rates = [n * GROUP * (prompt + new) / common.mid(runs, who)
             for n, who in zip((prompts, 2 * prompts), runs, strict=True)]
    common.table(f"model {name}, {precision}: update", [{"who": who, "s": common.mid(runs, who), "tokens/s": rate}
                                                        for who, rate in zip(runs, rates, strict=True)])
    print(f"tokens/s, twice the rollouts over once: {rates[1] / rates[0]:.3f}, target 0.9 to 1.1")
    return {"model": name, "precision": precision, "tokens_s": rates, "ratio": rates[1] / rates[0]}


def dense_update(own: Own, batch: learner.Batch) -> dict[str, float]:
    """The same update with the logits of all positions at once."""
    logits = own.policy(batch.ids[:, :-1])
    logp = torch.log_softmax(logits, -1).gather(2, batch.ids[:, 1:, None]).squeeze(2)
    del logits
    mask, loss = batch.policy_mask[:, 1:], own.cfg.loss
    policy_loss(logp, logp.detach(), batch.advantages[:, 1:], mask, loss.clip_low, loss.clip_high, loss.dual_clip,
                loss.aggregation).loss.backward()
    return {"grad_norm": optim.optimizer_step(own.policy, own.found, own.cfg.rl.grad_clip)}


def update_memory(side: str, quick: bool) -> None:
    """In a process of its own: bytes that one update needs beyond those resident before it, as JSON."""
    length, new, changes = SMALL if quick else LARGE
    own = Own(common.own_policy("tiny" if quick else "a", **changes), "fp32", 1)
    batch = made_up(own.policy, 1, MEMORY_ROWS, length - new, new)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    earlier = peak_bytes()
    norm = (own.update if side == "own" else lambda b: dense_update(own, b))(batch)["grad_norm"]
    if peak_bytes() <= earlier and not quick:
        raise SystemExit("error: the update needed less than what came before it, so its memory was not seen")
    print(json.dumps({"bytes": peak_bytes() - before, "grad_norm": norm}))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(threads: int, quick: bool) -> dict:
    found = {}
    for side in ("own", "dense"):
        done = subprocess.run([sys.executable, "-c", f"import step; step.update_memory({side!r}, {quick})",
                               "--threads", str(threads)], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"error: the {side} update ended with {done.returncode} (-9: the memory did not suffice)")
        found[side] = json.loads(done.stdout.splitlines()[-1])
    share = found["own"]["bytes"] / found["dense"]["bytes"]
    common.table("memory of an update", [{"who": side, "GB": f["bytes"] / 1e9, "gradient norm": f["grad_norm"]}
                                         for side, f in found.items()])
    print(f"own / dense = {share:.3f}, target below {MEMORY_TARGET}")
    return found | {"ratio": share, "target": MEMORY_TARGET}


def main() -> None:
    args = common.arguments(__doc__, "transformers", "trl", scaling="only our update, 64 and 128 rollouts",
                            memory="only our update's memory, a large vocabulary")
    sizes = (2, 12, 6) if args.quick else (8, 128, 64)
    result, cases = common.about(args), [(name, precision) for name in args.model for precision in common.DTYPES]
    if args.scaling:
        result["scaling"] = [scaling(*case, *sizes, args.pairs) for case in cases]
    if args.memory:
        result["memory"] = memory(args.threads, args.quick)
    if not (args.scaling or args.memory):
        result["steps"] = []
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                result["steps"].append(against_trl(*case, *sizes, args.pairs, folder))
    common.finish(result)


if __name__ == "__main__":
    main()
