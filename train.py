"""Train a tool-calling policy: supervised on demonstrations, then SLCA-GRPO. Reads top to bottom as the algorithm.

    torchrun train.py [--config F.yaml ...] [--set a.b=c ...] [--out DIR] [--resume] [--dry-run]

Without arguments: configs/tiny.yaml, a model of a million parameters in the embedded tool world, on a CPU. The run's
folder gets config.yaml, metrics.jsonl, summary.json, rollouts/, checkpoints/ and report.html.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import time
from pathlib import Path

import torch
from tqdm import tqdm

from slca import chat
from slca.advantages import Advantages, grpo_advantages, slca_advantages
from slca.config import Config, ConfigError, describe, load_config, save_config
from slca.data import DataError, Task, load_tasks
from slca.data.vocabulary import world_tokenizer
from slca.evaluation.metrics import metrics, values_right
from slca.evaluation.toucan import evaluate, world_split
from slca.judge import RulesJudge, score_episodes
from slca.learner import Batch, all_logprobs, optimizers, policy_update, set_rate
from slca.model import ModelConfig, Policy, new_policy
from slca.report import RunLog, console_line, final_table, write_report
from slca.rollout import Episode, make_sampler, rollout
from slca.sft import Row, curriculum_task, demonstration_row, rate_share, sft_step
from slca.simulator import Simulator
from slca.tokenizer import load_tokenizer
from slca.weights import load_policy, save_policy

POOL_STEPS = 8  # SFT steps whose rows are drawn together and sorted by length
RL_TASKS = 10_000_000  # the world's RL prompts are numbered from here, apart from every demonstration


def main() -> None:
    args = arguments()
    cfg = load_config(args.config or [Path(__file__).parent / "configs" / "tiny.yaml"], args.set)
    run = Run(cfg, Path(args.out), args.resume)
    if args.dry_run:
        return run.dry_run()
    run.stage("before", lambda: None)
    if cfg.sft.enabled:
        run.stage("after_sft", run.supervise)
    if cfg.rl.enabled:
        run.stage("after_rl", run.reinforce)
    run.finish()


class Run:
    """What the stages share: policy, tokenizer, tasks, simulator, judge and log."""

    def __init__(self, cfg: Config, folder: Path, resume: bool):
        self.cfg, self.folder, self.started = cfg, folder, time.time()
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        if ranks > 1:
            raise SystemExit(f"train.py runs on one rank so far; torchrun started {ranks}")
        torch.set_num_threads(cfg.threads or len(os.sched_getaffinity(0)))
        torch.manual_seed(cfg.seed)
        if folder.exists() and any(folder.iterdir()) and not resume:
            raise SystemExit(f"{folder} is not empty: give another --out, or --resume to go on from its checkpoints")
        self.log = RunLog(folder)
        save_config(cfg, folder / "config.yaml")
        self.summary = {"seed": cfg.seed, "wall_s": 0.0}
        if resume and (folder / "summary.json").exists():
            self.summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            self.started -= self.summary["wall_s"]
        self.tokenizer, self.policy = build_policy(cfg)
        self.policy.to("cuda" if torch.cuda.is_available() else "cpu")
        self.simulator = Simulator(cfg.simulator.responder, cfg.simulator.seed, cfg.simulator.use_schema)
        self.judge = RulesJudge(cfg.judge.noise, cfg.judge.seed)
        self.tasks = Tasks(cfg, self.tokenizer)
        print(f"{sum(p.numel() for p in self.policy.parameters()) / 1e6:.2f} M parameters, {self.tokenizer.size} "
              f"tokens, {torch.get_num_threads()} threads, {len(self.tasks.heldout)} held-out tasks -> {folder}")

    # ------------------------------------------------------------------------------------------------- the stages
    def stage(self, name: str, work) -> None:
        """Do a stage, save its checkpoint, evaluate it. A stage that an earlier run finished is loaded instead."""
        checkpoint = self.folder / "checkpoints" / name
        if name in self.summary and (name == "before" or checkpoint.exists()):
            if checkpoint.exists():
                self.policy = load_policy(checkpoint, device=self.policy.device)
            return print(f"{name}: taken from the earlier run")
        work()
        if name != "before":
            save_policy(self.policy, checkpoint, self.tokenizer)
        self.summary[name] = self.evaluate(self.tasks.heldout).metrics
        if name != "before":
            self.summary[f"{name}_sampled"] = self.evaluate(self.tasks.heldout, temperature=1.0).metrics
        self.write_summary()

    def supervise(self) -> None:
        """SFT: cross-entropy on demonstrations, easy rows first, until copying of arguments is there."""
        cfg, sft = self.cfg, self.cfg.sft
        found = optimizers(self.policy, sft.optimizer, sft.lr, sft.weight_decay, sft.betas, sft.adam_lr)
        limit = self.tasks.sft_steps()
        decay_from = None if sft.scheduler == "gated" else -1
        bar = tqdm(range(limit), desc="SFT", unit="step", dynamic_ncols=True)
        for step in bar:
            start = time.time()
            if decay_from is None and step >= limit - sft.decay_steps:
                decay_from = step  # the step limit: copying or not, the rate has to come down
            share = (rate_share(step, sft.warmup_steps, decay_from, sft.decay_steps) if sft.scheduler == "gated"
                     else cosine_share(step, limit, sft.warmup_ratio))
            if share <= 0:
                break
            found_metrics = sft_step(self.policy, found, self.tasks.demonstrations(step), share, sft,
                                     self.tokenizer.size, cfg.precision, cfg.micro_batch_tokens)
            if sft.scheduler == "gated" and (step + 1) % sft.gate_every == 0:
                copied = values_right(self.evaluate(self.tasks.validation).episodes)
                found_metrics["sft_copy"] = copied
                if decay_from is None and copied >= sft.copy_gate and step >= self.tasks.curriculum_steps():
                    decay_from = step + 1
            found_metrics["time_s"] = time.time() - start
            row = self.log.write("sft", step + 1, found_metrics)
            if (step + 1) % 50 == 0 or "sft_copy" in row:
                bar.write(console_line(step + 1, row, "sft"))
        bar.close()

    def reinforce(self) -> None:
        """RL: rollouts in the simulator -> HierR and judge -> advantages routed by segment -> clipped loss -> step."""
        cfg, rl = self.cfg, self.cfg.rl
        found = optimizers(self.policy, "adamw", rl.lr, rl.weight_decay, rl.betas)
        reference = copy.deepcopy(self.policy).requires_grad_(False) if cfg.loss.kl_coef > 0 else None
        sampler = make_sampler(self.policy, self.tokenizer, cfg, rl.group_size, rl.prompts_per_step,
                               cfg.rollout.max_prompt_tokens + cfg.rollout.max_response_tokens,
                               cfg.rollout.temperature)
        bar = tqdm(range(rl.planned_steps(self.tasks.rl_prompts)), desc="RL", unit="step", dynamic_ncols=True)
        for step in bar:
            start = time.time()
            episodes = rollout(self.policy, self.tokenizer, self.tasks.prompts(step), self.simulator, cfg,
                               rl.group_size, (cfg.seed, step), cfg.rollout.temperature, sampler=sampler)
            score_episodes(episodes, self.judge, cfg.reward, cfg.judge.failure_score)
            sampled = time.time()

            batch = Batch.of(episodes, self.policy.device)
            advantages = estimate(episodes, batch, cfg)
            batch.advantages = advantages.tokens

            set_rate(found, min(1.0, (step + 1) / max(1, rl.warmup_steps)))
            try:
                updates = self.update(found, reference, batch)
            except FloatingPointError as error:
                path = self.log.save_rollouts(step + 1, [record(e, batch, i, self.tokenizer, step + 1, "worst")
                                                         for i, e in enumerate(episodes)])
                raise SystemExit(f"RL step {step + 1}: {error}; the batch is in {path}") from error

            row = step_metrics(episodes, batch, advantages) | updates
            row |= {"lr": found[0].param_groups[0]["lr"], "rollout_s": sampled - start,
                    "learn_s": time.time() - sampled, "peak_memory_gb": peak_memory_gb(),
                    "tok_s": float(batch.policy_mask.sum()) / (sampled - start)}
            if cfg.eval.every and (step + 1) % cfg.eval.every == 0:
                row |= {f"val_{k}": v for k, v in self.evaluate(self.tasks.validation).metrics.items()}
            row["time_s"] = time.time() - start
            row = self.log.write("rl", step + 1, row)
            bar.write(console_line(step + 1, row))
            if cfg.eval.save_rollouts:
                self.log.save_rollouts(step + 1, best_and_worst(episodes, batch, self.tokenizer, step + 1,
                                                                cfg.log.keep_rollouts))
        bar.close()

    def update(self, found: list, reference: Policy | None, batch: Batch) -> dict[str, float]:
        """The optimiser updates of a step, each on its share of the prompts; metrics are their means."""
        cfg, rl = self.cfg, self.cfg.rl
        if cfg.loss.old_logprobs == "sampler":
            batch.old = batch.logprobs
        elif rl.updates_per_step > 1:  # with one update the pass itself gives them, and the ratio is exactly 1
            batch.old = all_logprobs(self.policy, batch, self.tokenizer.size, cfg)
        results = []
        for u in range(rl.updates_per_step):
            rows = list(range(u * rl.rollouts_per_update, (u + 1) * rl.rollouts_per_update))
            results.append(policy_update(self.policy, reference, found, batch, rows, self.tokenizer.size, cfg))
        means = {k: sum(r[k] for r in results) / len(results) for k in results[0]}
        # the sampler's policy is that of the first update alone
        return means | {k: results[0][k] for k in ("logprob_gap", "logprob_gap_max")}

    # ------------------------------------------------------------------------------------------------- evidence
    def evaluate(self, tasks: list[Task], temperature: float = 0.0):
        return evaluate(self.policy, self.tokenizer, tasks, self.cfg, temperature)

    def write_summary(self) -> None:
        self.summary["wall_s"] = round(time.time() - self.started, 1)
        path = self.folder / "summary.json"
        path.with_suffix(".tmp").write_text(json.dumps(self.summary, indent=1), encoding="utf-8")
        path.with_suffix(".tmp").replace(path)

    def finish(self) -> None:
        self.write_summary()
        print(final_table(self.summary))
        print(f"{self.summary['wall_s'] / 60:.1f} minutes, {peak_memory_gb():.1f} GB; see {write_report(self.folder)}")

    def dry_run(self) -> None:
        """The first supervised and the first RL batch, decoded with labels, and what they take."""
        cfg = self.cfg
        if cfg.sft.enabled:
            row = self.tasks.demonstrations(0)[0]
            print(f"\nfirst demonstration, {len(row.ids)} tokens (loss weight before each stretch):")
            print(stretches(row.ids, row.weights, self.tokenizer))
        if cfg.rl.enabled:
            tasks = self.tasks.prompts(0)
            episodes = rollout(self.policy, self.tokenizer, tasks, self.simulator, cfg, cfg.rl.group_size,
                               (cfg.seed, 0), cfg.rollout.temperature)
            score_episodes(episodes, self.judge, cfg.reward, cfg.judge.failure_score)
            print(f"\nfirst rollout of {len(episodes)} (labels: 0 ignored, 1 tool, 2 summary):")
            print(stretches(episodes[0].ids, episodes[0].labels, self.tokenizer))
            for name, lengths in (("prompt", [e.prompt_length for e in episodes]),
                                  ("response", [e.response_length for e in episodes])):
                print(f"{name} tokens: mean {sum(lengths) / len(lengths):.0f}, max {max(lengths)}")
        size = sum(p.numel() for p in self.policy.parameters()) * 4
        print(f"weights {size / 1e9:.3f} GB, AdamW state {2 * size / 1e9:.3f} GB, peak memory {peak_memory_gb():.2f} GB")


# ----------------------------------------------------------------------------------------------------- its parts

def build_policy(cfg: Config):
    """(tokenizer, policy): the folder's, or a fresh policy with the embedded world's tokenizer."""
    if cfg.model.path:
        return load_tokenizer(cfg.model.path), load_policy(cfg.model.path)
    m = cfg.model
    tokenizer = world_tokenizer(m.vocab_size)
    shape = ModelConfig(m.family, tokenizer.size, m.hidden_size, m.intermediate_size, m.num_layers, m.num_heads,
                        m.num_kv_heads, rope_theta=m.rope_theta)
    return tokenizer, new_policy(shape, cfg.seed)


class Tasks:
    """The run's tasks: demonstrations and prompts by step, validation and held-out lists. Fixed by the seed."""

    def __init__(self, cfg: Config, tokenizer):
        self.cfg, self.tokenizer, d = cfg, tokenizer, cfg.data
        self.train = self.sft = self.world = self.pool = None
        if d.kind == "world":
            self.world, validation, heldout = (world_split(cfg, s) for s in ("train", "validation", "heldout"))
            self.validation, self.heldout = validation.tasks(d.validation_tasks), heldout.tasks(d.eval_tasks)
            self.rl_prompts = 0
            return
        if cfg.rl.enabled:
            self.train = self._short_enough(load_tasks(d.train), d.train)
        if cfg.sft.enabled:
            self.sft = [t for t in load_tasks(d.sft) if t.demonstration]
            if not self.sft:
                raise DataError(f"{d.sft}: no row has a demonstration to learn from")
        pool = load_tasks(d.heldout) if d.heldout else []
        self.heldout = pool[:d.eval_tasks] or (self.train or self.sft)[:d.eval_tasks]
        self.validation = self.heldout[:d.validation_tasks]
        self.rl_prompts = len(self.train or [])

    def _short_enough(self, tasks: list[Task], path: str) -> list[Task]:
        limit = self.cfg.rollout.max_prompt_tokens
        kept = [t for t in tasks if len(chat.render(t.messages, t.tools, self.tokenizer,
                                                    parallel=self.cfg.chat.parallel)) <= limit]
        if len(kept) < self.cfg.rl.prompts_per_step:
            raise DataError(f"{path}: {len(kept)} of {len(tasks)} prompts are within {limit} tokens, "
                            f"rl.prompts_per_step asks for {self.cfg.rl.prompts_per_step}")
        if len(kept) < len(tasks):
            print(f"{path}: {len(tasks) - len(kept)} of {len(tasks)} prompts are over {limit} tokens, left out")
        return kept

    def sft_steps(self) -> int:
        sft = self.cfg.sft
        by_epochs = sft.epochs * len(self.sft) // sft.rows_per_step if sft.epochs and self.sft else None
        return max(1, min(n for n in (sft.max_steps, by_epochs) if n is not None))

    def curriculum_steps(self) -> int:
        return int(self.cfg.sft.curriculum_fraction * self.sft_steps()) if self.world else 0

    def demonstrations(self, step: int) -> list[Row]:
        """Rows of an SFT step. Eight steps share a pool that is sorted by length: little padding, half the time."""
        pool, at = divmod(step, POOL_STEPS)
        if self.pool != pool:
            sft, n = self.cfg.sft, self.cfg.sft.rows_per_step
            first, size = pool * POOL_STEPS * n, POOL_STEPS * n
            if self.world:
                progress = pool * POOL_STEPS / max(1, self.curriculum_steps())
                tasks = [curriculum_task(self.world, i, progress) for i in range(first, first + size)]
            else:
                tasks = self._slice(self.sft, first, size)
            rows = sorted((demonstration_row(t, self.tokenizer, self.cfg.chat.parallel, sft.prompt_loss_weight,
                                             sft.max_tokens) for t in tasks), key=lambda row: len(row.ids))
            steps = [rows[i:i + n] for i in range(0, size, n)]
            random.Random(f"{self.cfg.seed}/{pool}").shuffle(steps)
            self.pool, self.rows = pool, steps
        return self.rows[at]

    def prompts(self, step: int) -> list[Task]:
        n = self.cfg.rl.prompts_per_step
        return self.world.tasks(n, RL_TASKS + step * n) if self.world else self._slice(self.train, step * n, n)

    def _slice(self, tasks: list[Task], first: int, n: int) -> list[Task]:
        """n tasks from number `first` on of an endless stream: the list shuffled anew each epoch."""
        found = []
        for i in range(first, first + n):
            epoch, at = divmod(i, len(tasks))
            found.append(tasks[random.Random(f"{self.cfg.seed}/{epoch}").sample(range(len(tasks)), len(tasks))[at]])
        return found


def estimate(episodes: list[Episode], batch: Batch, cfg: Config) -> Advantages:
    """Per-token advantages of a step: two routed streams (SLCA), or one total for all tokens (GRPO)."""
    a, scores, groups = cfg.advantage, [e.rewards for e in episodes], [e.group for e in episodes]
    if a.estimator == "slca":
        return slca_advantages(batch.labels, groups, [s.process for s in scores], [s.summary for s in scores],
                               [s.total for s in scores], [float(s.omission) for s in scores], a.lambda_tool,
                               a.lambda_summary, a.routing, a.divide_by_std, a.eps)
    extra = (a.reward_ratio - 1) * cfg.reward.mix.process  # the omission penalty stays as it is
    totals = [s.total if s.omission else s.total + extra * s.process for s in scores]
    return grpo_advantages(batch.policy_mask, groups, totals, a.divide_by_std, a.eps)


def cosine_share(step: int, steps: int, warmup_ratio: float) -> float:
    """Share of the peak rate: linear warm-up, then half a cosine to nought (never quite, so that no step is lost)."""
    warmup = max(1, round(warmup_ratio * steps))
    if step < warmup:
        return (step + 1) / warmup
    at = torch.tensor((step - warmup) / max(1, steps - warmup) * torch.pi)
    return max(1e-8, float((1 + at.cos()) / 2))


def step_metrics(episodes: list[Episode], batch: Batch, advantages: Advantages) -> dict[str, float]:
    """What the rollouts of a step were like (`report.GLOSSARY` explains each)."""
    n, scores, mask = len(episodes), [e.rewards for e in episodes], batch.policy_mask == 1
    known, size = metrics(episodes), advantages.tokens.abs()

    def mean(where) -> float:
        return float(size[where].mean()) if bool(where.any()) else 0.0

    groups: dict[int, list[int]] = {}
    for i, e in enumerate(episodes):
        groups.setdefault(e.group, []).append(i)

    def dead(stream) -> float:
        return sum(not bool(stream[rows].any()) for rows in groups.values()) / len(groups)

    picked = ("process", "summary", "success", "name_f1", "parallel", "no_call", "redundant_calls", "calls_per_task",
              "tool_turns")
    return {k: known[k] for k in picked} | {
        "reward": sum(s.total for s in scores) / n, "fmt": sum(s.fmt for s in scores) / n,
        "key": sum(s.key for s in scores) / n, "value": sum(s.value for s in scores) / n,
        "malformed": sum(s.n_valid < max(s.n_open, s.n_close) for s in scores) / n,
        "turn_limit": sum(e.status == "turn_limit" for e in episodes) / n,
        "length_limit": sum(e.status in ("length_limit", "tool_overflow") for e in episodes) / n,
        "response_tokens": sum(e.response_length for e in episodes) / n,
        "advantage_abs": mean(mask), "advantage_tool": mean(batch.labels == 1),
        "advantage_summary": mean(batch.labels == 2), "dead_tool": dead(advantages.tool),
        "dead_summary": dead(advantages.summary), "entropy": -float(batch.logprobs[mask].mean()),
    }


def best_and_worst(episodes: list[Episode], batch: Batch, tokenizer, step: int, keep: int) -> list[dict]:
    """Records of the rollouts with the highest and the lowest total."""
    order = sorted(range(len(episodes)), key=lambda i: -episodes[i].rewards.total)
    chosen = [(i, "best") for i in order[:keep]] + [(i, "worst") for i in order[len(order) - keep:]]
    return [record(episodes[i], batch, i, tokenizer, step, rank) for i, rank in chosen]


def record(e: Episode, batch: Batch, row: int, tokenizer, step: int, rank: str) -> dict:
    """One rollout as report.html shows it."""
    scores = {k: getattr(e.rewards, k) for k in ("total", "process", "summary", "fmt", "name", "key", "value",
                                                 "parallel")}
    return {"step": step, "task_id": e.task.id, "subset": e.task.subset, "rank": rank, "status": e.status,
            "tokens": [tokenizer.decode([i]) for i in e.ids], "ids": e.ids, "labels": e.labels,
            "policy_mask": e.policy_mask, "logprobs": e.logprobs,
            "advantages": batch.advantages[row, :len(e.ids)].tolist(), "prompt_length": e.prompt_length,
            "scores": scores, "gold_calls": e.task.gold_calls, "facts": e.task.facts}


def stretches(ids: list[int], marks: list, tokenizer) -> str:
    """Text cut where the mark changes: "[mark x tokens] text"."""
    parts, start = [], 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or marks[i] != marks[start]:
            parts.append(f"[{marks[start]} x {i - start}] {tokenizer.decode(ids[start:i])}")
            start = i
    return "\n".join(parts)


def peak_memory_gb() -> float:
    """Peak of the process, or of the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="settings:\n" + describe().replace("%", "%%"))
    parser.add_argument("--config", nargs="+", metavar="F.yaml", help="files merged left to right over the defaults")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="a.b=c", help="settings by name")
    parser.add_argument("--out", default=time.strftime("runs/%Y%m%d-%H%M%S"), help="the run's folder")
    parser.add_argument("--resume", action="store_true", help="go on in --out from its last finished stage")
    parser.add_argument("--dry-run", action="store_true", help="show the first batches and stop")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, DataError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
