"""Train a tool-calling policy: supervised on demonstrations, then SLCA-GRPO. Reads top to bottom as the algorithm.

    torchrun [--nproc_per_node N] train.py [--config F.yaml ...] [--set a.b=c ...] [--out DIR] [--resume] [--profile]
                                           [--dry-run]

Without arguments: configs/tiny.yaml, a model of a million parameters in the embedded tool world, on a CPU. The run's
folder gets config.yaml, metrics.jsonl, summary.json, rollouts/, checkpoints/ and report.html.

Ranks run this file alike: each takes its share of a step's prompts and holds its rows of the weights; rank 0 writes.
SIGTERM and Ctrl-C end the run after the step, with a checkpoint.
"""
from __future__ import annotations

import argparse
import json
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from slca import checkpoint, llm, memory, ranks
from slca.advantages import Advantages
from slca.config import describe, load_config, override, save_config, to_dict
from slca.credit import estimate, leakage, uses_outcome
from slca.data import Task
from slca.data.source import TaskSource
from slca.data.vocabulary import world_tokenizer
from slca.evaluation.metrics import means, over_ranks, step_sums, values_right
from slca.evaluation.toucan import evaluate
from slca.judge import make_judge, score_episodes
from slca.learner import Batch, all_logprobs, policy_update, stream_gradients, use_threads
from slca.lora import add_lora, merge_adapters, merged_state
from slca.model import ModelConfig, Policy, checkpoint_blocks, new_policy
from slca.optim import optimizers, set_rate
from slca.page import write_report
from slca.phases import phases
from slca.products import bf16_runs
from slca.report import RunLog, best_and_worst, console_line, final_table, read_metrics, record, stretches
from slca.responders import make_simulator
from slca.rollout import make_sampler, rollout
from slca.segments import segment_labels
from slca.settings import Config
from slca.sft import cosine_share, rate_share, sft_step
from slca.tokenizer import load_tokenizer
from slca.weights import load_policy, save_state


def main() -> None:
    args = arguments()
    out = Path(args.out or time.strftime("runs/%Y%m%d-%H%M%S"))
    if args.resume and not args.out:
        raise SystemExit("error: --resume needs --out with the folder of an earlier run")
    earlier = args.resume and (out / "config.yaml").is_file()
    if args.resume and not earlier:
        print(f"{out} holds no run yet: it begins")  # killed before it began, or another folder was meant
    files = args.config or [out / "config.yaml" if earlier else Path(__file__).parent / "configs" / "tiny.yaml"]
    cfg = load_config(files, args.set)
    device = ranks.start()
    run = Run(cfg, Path(ranks.gather(str(out))[0]), device)  # ranks may see another second
    phases.on = args.profile and ranks.rank() == 0
    if args.dry_run:
        return run.dry_run()
    run.open_folder(args.resume)
    with run.signals():
        run.stage("before", lambda: None)
        if cfg.sft.enabled:
            run.stage("after_sft", run.supervise)
        if cfg.rl.enabled:
            run.stage("after_rl", run.reinforce)
        run.finish()
    ranks.end()


class Run:
    """What the stages share: policy, tokenizer, tasks, simulator, judge and log."""

    def __init__(self, cfg: Config, folder: Path, device: torch.device):
        self.cfg, self.asked, self.folder, self.device, self.started = cfg, cfg, folder, device, time.time()
        self.lead, self.signal, self.save_failures = ranks.rank() == 0, 0, 0
        use_threads(cfg.threads)
        self.tokenizer, policy = build_policy(cfg)
        size = sum(p.numel() for p in policy.parameters()) / 1e6
        self.fit(policy.config)
        self.policy = self.ready(policy)
        self.simulator = make_simulator(cfg.simulator)
        self.examiner = make_judge(cfg.judge)  # of evaluations, which its noise does not disturb
        self.judge = make_judge(cfg.judge, cfg.judge.noise) if cfg.judge.noise else self.examiner
        self.tasks = TaskSource(cfg, self.tokenizer)
        self.summary = {"seed": cfg.seed, "wall_s": 0.0}
        self.say(f"{size:.2f} M parameters, {self.tokenizer.size} tokens, {ranks.world()} ranks, "
                 f"{torch.get_num_threads()} threads, {len(self.tasks.heldout)} held-out tasks -> {folder}")
        if "bf16" in (cfg.precision, cfg.rollout.precision) and not bf16_runs(device):
            self.say("this machine has no bfloat16 units: precision bf16 computes in float32 here")

    def fit(self, shape: ModelConfig) -> None:
        """Say what this rank will hold, and sample only as many rows at a time as fit. Raises ValueError: none do."""
        limit, vocabulary = memory.available(), self.tokenizer.size
        world = ranks.world() if self.cfg.shard else 1
        rows = memory.fit(self.cfg, shape, world, limit, vocabulary)
        if rows < self.cfg.rollout.max_rows // self.cfg.rl.group_size * self.cfg.rl.group_size:
            self.say(f"rollout.max_rows is {rows} here, as more do not fit")
            self.cfg = override(self.cfg, [f"rollout.max_rows={rows}"])
        self.say(memory.report(memory.plan(self.cfg, shape, world, vocabulary), limit))

    def ready(self, policy: Policy) -> Policy:
        """A policy as this run trains it: adapters, recomputed blocks, on its device or sharded."""
        cfg = self.cfg
        checkpoint_blocks(policy, cfg.model.checkpoint_blocks)
        if cfg.lora.rank:
            add_lora(policy, cfg.lora.rank, cfg.lora.alpha, cfg.lora.targets, cfg.seed)
        return ranks.placed(policy, self.device, cfg.precision, cfg.shard)

    def say(self, text: str) -> None:
        if self.lead:
            tqdm.write(text)

    # ------------------------------------------------------------------------------------------------- the stages
    def supervise(self) -> None:
        """SFT: cross-entropy on demonstrations, easy rows first, until copying of arguments is there."""
        cfg, sft = self.cfg, self.cfg.sft
        found = optimizers(self.policy, sft.optimizer, sft.lr, sft.weight_decay, sft.betas, sft.adam_lr,
                           cfg.optim, cfg.seed)
        limit, gated = self.tasks.sft_steps(), sft.scheduler == "gated"
        first, extra = self.restore("sft", found)
        decay_from = extra.get("decay_from")
        bar = tqdm(range(first, limit), desc="SFT", unit="step", initial=first, total=limit, dynamic_ncols=True,
                   disable=not self.lead)
        for step in bar:
            start = time.time()
            if gated and decay_from is None and step >= limit - sft.decay_steps:
                decay_from = step  # the step limit: copying or not, the rate has to come down
            share = (rate_share(step, sft.warmup_steps, decay_from, sft.decay_steps) if gated
                     else cosine_share(step, limit, sft.warmup_ratio))
            if share <= 0:
                break
            rows = self.tasks.demonstrations(step)
            try:
                row = sft_step(self.policy, found, rows, share, sft, self.tokenizer.size, cfg.precision,
                               cfg.micro_batch_tokens)
            except FloatingPointError as error:
                self.stop("sft", step + 1, error, [asdict(r) for r in rows])
            if gated and (step + 1) % sft.gate_every == 0:
                row |= means(over_ranks(values_right(self.evaluate(self.tasks.validation).episodes)))
                if decay_from is None and row["sft_copy"] >= sft.copy_gate and step >= self.tasks.curriculum_steps():
                    decay_from = step + 1
            row = self.log.write("sft", step + 1, row | {"time_s": time.time() - start})
            if (step + 1) % 50 == 0 or "sft_copy" in row:
                self.say(console_line(step + 1, row, "sft"))
            self.keep("sft", step + 1, found, {"decay_from": decay_from})
        bar.close()

    def reinforce(self) -> None:
        """RL: rollouts in the simulator -> HierR and judge -> advantages routed by segment -> clipped loss -> step."""
        cfg, rl = self.cfg, self.cfg.rl
        found = optimizers(self.policy, "adamw", rl.lr, rl.weight_decay, rl.betas, options=cfg.optim, seed=cfg.seed)
        reference = self.start_of_rl() if cfg.loss.kl_coef > 0 else None
        first, _ = self.restore("rl", found)
        sampler = make_sampler(self.policy, self.tokenizer, cfg, rl.group_size, rl.prompts_per_step,
                               cfg.rollout.max_prompt_tokens + cfg.rollout.max_response_tokens,
                               cfg.rollout.temperature)
        mine = ranks.share(rl.prompts_per_step)
        bar = tqdm(range(first, self.tasks.rl_steps()), desc="RL", unit="step", initial=first,
                   total=self.tasks.rl_steps(), dynamic_ncols=True, disable=not self.lead)
        for step in bar:
            phases.clear()
            start, records, tasks = time.time(), [], self.tasks.prompts(step)
            tasks = [tasks[i] for i in mine]
            try:
                episodes = rollout(self.policy, self.tokenizer, tasks, self.simulator, cfg, rl.group_size,
                                   (cfg.seed, step), cfg.rollout.temperature, sampler=sampler, numbers=mine)
                with phases("judge"):
                    score_episodes(episodes, self.judge, cfg.reward, cfg.judge.failure_score, cfg.judge.timeout_s)
                sampled = time.time()

                batch, advantages = self.credited(episodes)
                if rl.dynamic_sampling:
                    episodes = self.with_signal(episodes, advantages, step, mine, sampler)
                    batch, advantages = self.credited(episodes)
                records = advantages.tokens.tolist()

                set_rate(found, min(1.0, (step + 1) / max(1, rl.warmup_steps)))
                every, angles = cfg.log.stream_gradients, {}
                if every and (step + 1) % every == 0:
                    with phases("stream gradients"):
                        angles = stream_gradients(self.policy, batch, range(len(episodes)), self.tokenizer.size, cfg)
                updates = self.update(found, reference, batch) | angles
                if phases.on:
                    self.say(f"RL step {step + 1}\n{phases.table(time.time() - start)}")
            except FloatingPointError as error:
                self.stop("rl", step + 1, error,
                          [record(e, a, self.tokenizer, step + 1, "worst")
                           for e, a in zip(episodes, records, strict=True)] if records else list(map(asdict, tasks)))

            tokens = ranks.all_sum({"tokens": int(batch.policy_mask.sum())})["tokens"]
            sums = step_sums(episodes, batch, advantages) | leakage(episodes, batch, cfg, self.judge)
            if uses_outcome(cfg):
                sums["outcome"] = sum(e.outcome for e in episodes), len(episodes)
            row = means(over_ranks(sums)) | updates
            row |= {"lr": found[0].param_groups[0]["lr"], "rollout_s": sampled - start,
                    "learn_s": time.time() - sampled, "tok_s": tokens / (sampled - start),
                    "save_failures": self.save_failures, **llm.counts(self.simulator.responder, self.judge),
                    **ranks.all_max({"peak_memory_gb": peak_memory_gb()})}
            if cfg.eval.every and (step + 1) % cfg.eval.every == 0:
                row |= {f"val_{k}": v for k, v in self.evaluate(self.tasks.validation).metrics.items()}
            row = self.log.write("rl", step + 1, row | {"time_s": time.time() - start})
            self.say(console_line(step + 1, row))
            if cfg.log.keep_rollouts:
                self.log.save_rollouts(step + 1, best_and_worst(episodes, records, self.tokenizer, step + 1,
                                                                cfg.log.keep_rollouts))
            self.keep("rl", step + 1, found, {})
        bar.close()

    def credited(self, episodes: list) -> tuple[Batch, Advantages]:
        """The step as tensors, and the advantages that go with it."""
        batch = Batch.of(episodes, self.policy.device)
        advantages = estimate(episodes, batch, self.cfg, self.judge)
        batch.advantages = advantages.tokens
        return batch, advantages

    def with_signal(self, episodes: list, advantages: Advantages, step: int, mine: list[int], sampler) -> list:
        """DAPO's dynamic sampling, once a step: where all advantages of a group are 0 (in both streams), the group of
        another prompt takes its place, if that has any."""
        cfg, size = self.cfg, self.cfg.rl.group_size
        dead = [g for g in range(len(mine)) if not bool(advantages.tokens[g * size:(g + 1) * size].any())]
        if not ranks.all_max({"dead": len(dead)})["dead"]:  # all ranks go on together: packing weights is a collective
            return episodes
        tasks = self.tasks.spare(step)
        found = rollout(self.policy, self.tokenizer, [tasks[mine[g]] for g in dead], self.simulator, cfg, size,
                        (cfg.seed, step, 1), cfg.rollout.temperature, sampler=sampler, numbers=[mine[g] for g in dead])
        score_episodes(found, self.judge, cfg.reward, cfg.judge.failure_score, cfg.judge.timeout_s)
        alive = self.credited(found)[1].tokens if found else None
        for k, g in enumerate(dead):
            if bool(alive[k * size:(k + 1) * size].any()):
                episodes[g * size:(g + 1) * size] = found[k * size:(k + 1) * size]
        return episodes

    def update(self, found: list, reference: Policy | None, batch: Batch) -> dict[str, float]:
        """The optimiser updates of a step, each on its share of the prompts; metrics are their means."""
        cfg, rl = self.cfg, self.cfg.rl
        if cfg.loss.old_logprobs == "sampler":
            batch.old = batch.logprobs
        elif rl.updates_per_step > 1:  # with one update the pass itself gives them, and the ratio is exactly 1
            batch.old = all_logprobs(self.policy, batch, self.tokenizer.size, cfg)
        results = []
        for u in range(rl.updates_per_step):
            rows = [i for i, prompt in enumerate(batch.groups) if prompt // rl.prompts_per_update == u]
            results.append(policy_update(self.policy, reference, found, batch, rows, self.tokenizer.size, cfg))
        means = {k: sum(r[k] for r in results) / len(results) for k in results[0]}
        # the sampler's policy is that of the first update alone
        return means | {k: results[0][k] for k in ("logprob_gap", "logprob_gap_max")}

    def evaluate(self, tasks: list[Task], temperature: float = 0.0):
        return evaluate(self.policy, self.tokenizer, tasks, self.cfg, temperature, simulator=self.simulator,
                        judge=self.examiner)

    # ------------------------------------------------------------------------------------------- the run's folder
    def open_folder(self, resume: bool) -> None:
        used = self.folder.exists() and any(self.folder.iterdir())
        if ranks.gather(used)[0] and not resume:
            raise SystemExit(f"{self.folder} is not empty: give another --out, or --resume to go on from its stages")
        path = self.folder / "summary.json"
        if resume and path.exists():
            try:
                earlier = json.loads(path.read_text(encoding="utf-8"))
                seed, wall = earlier["seed"], earlier["wall_s"]
            except (ValueError, KeyError, TypeError):
                self.say(f"{path} cannot be read: its evaluations are done again")
            else:
                if seed != self.cfg.seed:
                    raise SystemExit(f"error: {self.folder} is a run of seed {seed}, not {self.cfg.seed}")
                self.summary, self.started = earlier, self.started - wall
        self.log = RunLog(self.folder, self.lead)
        if not resume or not (self.folder / "config.yaml").exists():
            self.write_config()

    def write_config(self) -> None:
        """At the start, and when a resumed run has been found to go on with this configuration."""
        if self.lead:
            save_config(self.asked, self.folder / "config.yaml")

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C only ask for the end, which `keep` brings after the step; a second Ctrl-C is at once."""
        def asked(number: int, frame) -> None:
            if self.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number

        before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stage(self, name: str, work) -> None:
        """Do a stage, save its checkpoint, evaluate it. What an earlier run finished of it is taken from there."""
        folder = self.folder / "checkpoints" / name
        if ranks.gather(folder.exists())[0]:
            policy = load_policy(folder, held(self.cfg))
            if policy.config != self.policy.config:
                raise ValueError(f"{folder} is of another shape ({policy.config}) than the configuration's policy "
                                 f"({self.policy.config})")
            self.policy = self.ready(policy)
            self.say(f"{name}: weights taken from {folder}")
            steps = sum(row["phase"] == "rl" for row in read_metrics(self.folder))
            if name == "after_rl" and steps != self.tasks.rl_steps():
                self.say(f"warning: RL ended with {steps} steps; to go on to {self.tasks.rl_steps()} remove {folder}")
        elif name != "before":
            work()
            merge_adapters(self.policy, self.cfg.seed)  # the next stage begins as a run that takes it from the folder
            state = merged_state(self.policy)
            if not self.settled():
                raise OSError(f"{self.log.path}: the last lines could not be written")
            if self.lead:
                unfinished = folder.with_name(f".{name}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                save_state(self.policy.config, state, unfinished, self.tokenizer)
                checkpoint.publish(unfinished, folder)
            ranks.gather(None)  # it is there before any rank goes on
        if name not in self.summary:
            self.summary[name] = self.evaluate(self.tasks.heldout).metrics
            if name != "before":
                self.summary[f"{name}_sampled"] = self.evaluate(self.tasks.heldout, temperature=1.0).metrics
        self.write_summary()

    def start_of_rl(self) -> Policy:
        """The reference of the KL term: the policy that RL began with, once more, or the adapters' base."""
        if self.cfg.lora.rank:
            return self.policy
        folder = self.folder / "checkpoints" / "after_sft"
        policy = load_policy(folder) if self.cfg.sft.enabled else build_policy(self.cfg)[1]
        return ranks.placed(policy, self.device, self.cfg.precision, self.cfg.shard).requires_grad_(False)

    def restore(self, phase: str, found: list) -> tuple[int, dict]:
        """Take policy and optimisers from the stage's last good checkpoint -> steps done, what else it kept."""
        last = checkpoint.latest(self.folder / "checkpoints", phase, self.say)
        if last is None:
            self.write_config()
            self.log.rewind(phase, 0)  # the lines of a stage that was cut off
            return 0, {}
        folder, state = last
        checkpoint.refuse_other_config(folder, state["config"], json.loads(json.dumps(to_dict(self.cfg))))
        self.write_config()
        checkpoint.load(folder, self.policy, found)
        self.log.rewind(phase, state["step"])
        self.say(f"{phase}: goes on after step {state['step']}, from {folder}")
        return state["step"], state["extra"]

    def keep(self, phase: str, step: int, found: list, extra: dict) -> None:
        """Save a checkpoint where one is due; after a signal save one and end the run."""
        cfg = self.cfg.checkpoint
        every = cfg.sft_every if phase == "sft" else cfg.rl_every
        stop = int(ranks.all_max({"signal": self.signal})["signal"])
        if stop or every and step % every == 0:
            try:
                if not self.settled():
                    raise OSError("lines of metrics.jsonl wait to be written")
                folder = checkpoint.save(self.folder / "checkpoints", phase, step, self.policy, found, self.tokenizer,
                                         to_dict(self.cfg), extra, cfg.keep)
                if stop:
                    self.say(f"{signal.Signals(stop).name}: stopped after {phase} step {step}, saved in {folder}; "
                             "--resume goes on")
            except OSError as error:  # a full disk: the run goes on, and with it the chance of a later one
                self.save_failures += 1
                self.say(f"warning: {phase} step {step} could not be saved: {error}")
            else:
                with suppress(OSError):  # for the seconds of a run that goes on from here
                    self.write_summary()
        if stop:
            ranks.end()
            raise SystemExit(128 + stop)

    def settled(self) -> bool:
        """Has the disk every metric line so far? A checkpoint that is ahead of them would lose them."""
        done = self.log.flush()
        if self.lead and done and self.log.path.exists():
            checkpoint.sync(self.log.path)
        return ranks.gather(done)[0]

    def write_summary(self) -> None:
        self.summary["wall_s"] = round(time.time() - self.started, 1)
        path = self.folder / "summary.json"
        if self.lead:
            path.with_suffix(".tmp").write_text(json.dumps(self.summary, indent=1), encoding="utf-8")
            path.with_suffix(".tmp").replace(path)

    def stop(self, phase: str, step: int, error: FloatingPointError, batch: list[dict]) -> None:
        """A number that is not finite ends the run; the batch that made it is kept, and a line in the metrics."""
        self.log.write(phase, step, {"nonfinite": 1})
        path = self.folder / ("failed_batch.json" if self.lead else f"failed_batch_rank{ranks.rank()}.json")
        path.write_text(json.dumps(batch), encoding="utf-8")
        raise SystemExit(f"error: {phase.upper()} step {step}: {error}; the batch is in {path}")

    def finish(self) -> None:
        if self.lead:
            print(final_table(self.summary))
            print(f"{self.summary['wall_s'] / 60:.1f} minutes, {peak_memory_gb():.1f} GB; "
                  f"see {write_report(self.folder)}")

    def dry_run(self) -> None:
        """The first SFT and the first RL batch, decoded with labels, and what they take. Writes nothing."""
        cfg = self.cfg
        self.say("labels before each stretch of text: 0 ignored, 1 tool, 2 summary")
        if cfg.sft.enabled:
            for i, row in enumerate(self.tasks.demonstrations(0)):
                labels = segment_labels(torch.tensor([[float(w == 1) for w in row.weights]]))[0].tolist()
                self.say(f"\ndemonstration {i}, {len(row.ids)} tokens:\n{stretches(row.ids, labels, self.tokenizer)}")
        if cfg.rl.enabled:
            episodes = rollout(self.policy, self.tokenizer, self.tasks.prompts(0), self.simulator, cfg,
                               cfg.rl.group_size, (cfg.seed, 0), cfg.rollout.temperature)
            for e in episodes[::cfg.rl.group_size]:
                self.say(f"\nprompt {e.group}, first of {cfg.rl.group_size} rollouts, {e.prompt_length} + "
                         f"{e.response_length} tokens, {e.status}:\n{stretches(e.ids, e.labels, self.tokenizer)}")
            self.say(f"\n{len(episodes)} rollouts")
            for name, lengths in (("prompt", [e.prompt_length for e in episodes]),
                                  ("response", [e.response_length for e in episodes])):
                self.say(f"{name} tokens: mean {sum(lengths) / len(lengths):.0f}, max {max(lengths)}")
        self.say(f"peak memory so far {peak_memory_gb():.2f} GB")


def build_policy(cfg: Config):
    """(tokenizer, policy): the folder's, or a fresh policy with the embedded world's tokenizer."""
    if cfg.model.path:
        return load_tokenizer(cfg.model.path), load_policy(cfg.model.path, held(cfg))
    m, tokenizer = cfg.model, world_tokenizer(cfg.model.vocab_size)
    shape = ModelConfig(m.family, tokenizer.size, m.hidden_size, m.intermediate_size, m.num_layers, m.num_heads,
                        m.num_kv_heads, rope_theta=m.rope_theta)
    return tokenizer, new_policy(shape, cfg.seed).to(held(cfg))


def held(cfg: Config) -> torch.dtype:
    """Type that the weights are held in."""
    return torch.bfloat16 if cfg.model.dtype == "bf16" else torch.float32


def peak_memory_gb() -> float:
    """Peak of the process, or of the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="settings:\n" + describe().replace("%", "%%"))
    parser.add_argument("--config", nargs="+", action="extend", metavar="F.yaml",
                        help="files merged left to right over the defaults; default: configs/tiny.yaml")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="a.b=c", help="settings by name")
    parser.add_argument("--out", metavar="DIR", help="the run's folder; default: runs/ and the time")
    parser.add_argument("--resume", action="store_true",
                        help="go on in --out after its last good checkpoint, with its configuration and any --set")
    parser.add_argument("--profile", action="store_true", help="print time and tokens of each phase of every RL step")
    parser.add_argument("--dry-run", action="store_true", help="show the first batches and stop")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, FloatingPointError) as error:  # configuration, data and checkpoint errors among them
        raise SystemExit(f"error: {error}") from error
