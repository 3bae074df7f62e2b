"""Evaluate a checkpoint.

    python evaluate.py --suite toucan --checkpoint DIR [--data PATH] [--config F.yaml] [--set a.b=c] [--out F.json]

Suite toucan is the paper's in-domain protocol: greedy, up to ten turns, the simulator answering. Without --data it
takes the embedded world's held-out tasks; with it, rows of any kind `slca.data.load_tasks` reads. Prints the table and
writes the metrics, those of each kind of task, and the settings as JSON.

    python evaluate.py --suite distractors --checkpoint DIR --catalogue FILE [--k 0 20 50 100 150] [--how random hard]

Suite distractors runs the same protocol with each task's tools padded to K from a catalogue. Prompts over
eval.max_prompt_tokens are skipped and counted (the paper's cap is 24576). --out is written after every condition, and
the conditions that it holds are not run again.

    python evaluate.py --suite bfcl --checkpoint DIR --out FOLDER [--subset NAME ...] [--limit N]
    python evaluate.py --suite tau2 --checkpoint DIR --out FOLDER [--domain NAME ...] [--user DIR_or_URL] [--agent gold]

Suites bfcl and tau2 are the paper's out-of-domain benchmarks, BFCL V3 and tau2-bench, judged by their own packages
(README, "Benchmarks"). --out is a folder there, and what it holds is not run again. A checkpoint that no run of ours
belongs to is taken to write parallel calls as blocks.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

from slca.config import FOREIGN, checkpoint_config, describe, to_dict
from slca.data import Task
from slca.data.distractors import by_embeddings, load_catalogue, tfidf
from slca.data.source import file_tasks, world_split
from slca.evaluation import bfcl, distractors, tau2
from slca.evaluation.record import save
from slca.evaluation.toucan import evaluate
from slca.judge import make_judge
from slca.learner import use_threads
from slca.model import Policy
from slca.products import bf16_runs
from slca.report import metrics_table
from slca.responders import make_simulator
from slca.settings import Config
from slca.tokenizer import load_tokenizer
from slca.weights import load_policy

BENCHMARKS = {"bfcl": bfcl.suite, "tau2": tau2.suite}


def main() -> None:
    args = arguments()
    cfg = checkpoint_config(args.checkpoint, args.config or (), args.set,
                            FOREIGN if args.suite in BENCHMARKS else ())
    use_threads(cfg.threads)
    if args.out and args.suite not in BENCHMARKS:  # before the work: a path that cannot be written loses nothing
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).open("a").close()
    gpu = torch.cuda.is_available()
    # a benchmark's agent decodes with these very weights, the other suites with a copy in `rollout.precision`
    fast = gpu and args.suite in BENCHMARKS and bf16_runs(torch.device("cuda"))
    held = torch.bfloat16 if fast else torch.float32
    tokenizer, policy = load_tokenizer(args.checkpoint), load_policy(args.checkpoint, held, "cuda" if gpu else "cpu")
    policy.requires_grad_(False)
    if args.suite in BENCHMARKS:
        return BENCHMARKS[args.suite](args, cfg, policy, tokenizer)
    path = args.data or cfg.data.heldout
    source = path or "embedded world, held out"
    tasks = file_tasks(cfg, path) if path else world_split(cfg, "heldout").tasks(cfg.data.eval_tasks)
    if args.suite == "distractors":
        return distractor_suite(args, cfg, policy, tokenizer, tasks, source)
    with tqdm(total=len(tasks), desc=f"suite {args.suite}", unit="task", dynamic_ncols=True) as bar:
        result = evaluate(policy, tokenizer, tasks, cfg, args.temperature,
                          lambda done: bar.update(done - bar.n))
    print(metrics_table({"all": result.metrics, **result.by_subset}))
    print(f"{result.metrics['tool_turns']:.3f} tool turns a task against {result.gold_turns:.3f} in gold")
    if result.agreement is not None:
        print(f"judge {cfg.judge.kind} agrees with the rules on {result.agreement:.3f} of the replies it rated")
    if result.skipped:
        print(f"{result.skipped} of {len(tasks)} tasks left out: prompt over {cfg.eval.max_prompt_tokens} tokens")
    report = {"suite": args.suite, "checkpoint": str(args.checkpoint), "data": source,
              "temperature": args.temperature, "metrics": result.metrics, "by_subset": result.by_subset,
              "gold_turns_per_task": result.gold_turns, "judge_agreement": result.agreement,
              "skipped": result.skipped, "config": to_dict(cfg)}
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")


def distractor_suite(args: argparse.Namespace, cfg: Config, policy: Policy, tokenizer, tasks: list[Task],
                     source: str) -> None:
    catalogue = load_catalogue(args.catalogue)
    distractors.check(tasks, catalogue, args.k, cfg.seed)
    depends_on = distractors.identity(args.checkpoint, tasks, catalogue, cfg, args.temperature, args.nearest)
    done = distractors.finished(args.out, depends_on) if args.out else {}
    wanted = distractors.conditions(args.k, args.how)

    def record() -> dict:
        """conditions: also those of earlier calls; restricted: over this call's, as far as they are done."""
        return {"suite": args.suite, "checkpoint": str(args.checkpoint), "data": source,
                "catalogue": str(args.catalogue), "depends_on": depends_on, "conditions": done,
                "restricted": distractors.restricted({name: done[name] for name in wanted if name in done})}

    nearness, simulator, judge = None, make_simulator(cfg.simulator), make_judge(cfg.judge)
    for name, (how, k) in wanted.items():
        if name in done:
            print(f"{name}: taken from {args.out}")
            continue
        if how == "hard" and nearness is None:
            nearness = tfidf(catalogue) if args.nearest == "tfidf" else by_embeddings(catalogue, policy, tokenizer)
        with tqdm(total=len(tasks), desc=f"suite {args.suite}, {name}", unit="task", dynamic_ncols=True) as bar:
            done[name] = distractors.run_condition(policy, tokenizer, tasks, catalogue, how, k, cfg, nearness,
                                                   args.temperature, lambda n, bar=bar: bar.update(n - bar.n),
                                                   simulator, judge)
        if args.out:
            save(args.out, record())
    final = record()
    print(distractors.table({name: done[name] for name in wanted}))
    for name in wanted:
        if done[name]["larger"]:
            print(f"{name}: {done[name]['larger']} of {len(tasks)} have more tools of their own, kept as they are")
        reach, made_for = done[name]["prompt_tokens_max"] or 0, policy.config.max_position_embeddings
        if reach + cfg.eval.max_response_tokens > made_for:
            print(f"{name}: a prompt of {reach} tokens and its response may pass the checkpoint's {made_for} positions")
    print(distractors.restricted_table(final["restricted"]))
    if args.out:
        save(args.out, final)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="settings:\n" + describe().replace("%", "%%"))
    parser.add_argument("--suite", choices=["toucan", "distractors", *BENCHMARKS], required=True)
    parser.add_argument("--checkpoint", required=True, help="folder with config.json, safetensors and tokenizer")
    parser.add_argument("--data", help="tasks (JSONL, JSON or parquet); default: data.heldout, or the embedded world")
    parser.add_argument("--config", nargs="+", action="extend", metavar="F.yaml")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="a.b=c")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy, the protocol's")
    parser.add_argument("--out", metavar="F.json", help="a folder for the benchmarks")
    parser.add_argument("--limit", type=int, metavar="N", help="benchmarks: the first N items of each subset or domain")
    parser.add_argument("--rows", type=int, metavar="N",
                        help="benchmarks: items run at once, each a row of the KV cache (default: 32)")
    bfcl.add_options(parser)
    tau2.add_options(parser)
    more = parser.add_argument_group("suite distractors")
    more.add_argument("--catalogue", metavar="FILE", help="tool schemas: Toucan's tools.jsonl, or OpenAI tools")
    more.add_argument("--k", nargs="+", type=int, metavar="K",
                      help="tools a task; 0: its own (default: 0 20 50 100 150)")
    more.add_argument("--how", nargs="+", choices=["random", "hard"], help="which distractors (default: both)")
    more.add_argument("--nearest", choices=["tfidf", "embeddings"],
                      help="hard: nearest by TF-IDF (the default), or by the policy's input embeddings")
    args = parser.parse_args()
    refuse_others(parser, args)
    if args.suite == "distractors" and not args.catalogue:
        parser.error("--suite distractors needs --catalogue")
    args.rows = 32 if args.rows is None else args.rows
    args.k, args.how = args.k or [0, 20, 50, 100, 150], args.how or ["random", "hard"]
    args.nearest = args.nearest or "tfidf"
    if min(args.k) < 0:
        parser.error(f"--k: expected numbers from 0 on, found {min(args.k)}")
    return args


def refuse_others(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """An option of another suite would be without effect."""
    own = {"distractors": ["catalogue", "k", "how", "nearest"], "bfcl": ["subset"],
           "tau2": ["domain", "trials", "agent", "user", "user_name", "user_key_env"]}
    unused = [name for suite, names in own.items() if suite != args.suite for name in names]
    unused += {"bfcl": [], "tau2": ["data"]}.get(args.suite, ["limit", "rows"])
    if found := [f"--{name.replace('_', '-')}" for name in unused if getattr(args, name) is not None]:
        parser.error(f"{', '.join(found)}: not for --suite {args.suite}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, FloatingPointError) as error:  # configuration, data and checkpoint errors among them
        raise SystemExit(f"error: {error}") from error
