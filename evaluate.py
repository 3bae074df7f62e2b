"""Evaluate a checkpoint.

    python evaluate.py --suite toucan --checkpoint DIR [--data PATH] [--config F.yaml] [--set a.b=c] [--out F.json]

Suite toucan is the paper's in-domain protocol: greedy, up to ten turns, the simulator answering. Without --data it
takes the embedded world's held-out tasks; with it, rows of any kind `slca.data.load_tasks` reads. Prints the table and
writes the metrics, those of each kind of task, and the settings as JSON.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

from slca.config import Config, describe, load_config, to_dict
from slca.data import load_tasks
from slca.data.source import world_split
from slca.evaluation.toucan import evaluate
from slca.learner import use_threads
from slca.report import metrics_table
from slca.tokenizer import load_tokenizer
from slca.weights import load_policy


def main() -> None:
    args = arguments()
    cfg = checkpoint_config(args)
    use_threads(cfg.threads)
    if args.out:  # before the work, so that a path that cannot be written loses nothing
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).open("a").close()
    tokenizer, policy = load_tokenizer(args.checkpoint), load_policy(args.checkpoint)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    path = args.data or cfg.data.heldout
    tasks = load_tasks(path) if path else world_split(cfg, "heldout").tasks(cfg.data.eval_tasks)
    with tqdm(total=len(tasks), desc=f"suite {args.suite}", unit="task", dynamic_ncols=True) as bar:
        result = evaluate(policy, tokenizer, tasks, cfg, args.temperature,
                          lambda done: bar.update(done - bar.n))
    print(metrics_table({"all": result.metrics, **result.by_subset}))
    print(f"{result.metrics['tool_turns']:.3f} tool turns a task against {result.gold_turns:.3f} in gold")
    if result.skipped:
        print(f"{result.skipped} of {len(tasks)} tasks left out: prompt over {cfg.eval.max_prompt_tokens} tokens")
    report = {"suite": args.suite, "checkpoint": str(args.checkpoint), "data": path or "embedded world, held out",
              "temperature": args.temperature, "metrics": result.metrics, "by_subset": result.by_subset,
              "gold_turns_per_task": result.gold_turns,
              "skipped": result.skipped, "config": to_dict(cfg)}
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")


def checkpoint_config(args: argparse.Namespace) -> Config:
    """--config if given, else the config.yaml of the run the checkpoint belongs to, else the defaults; then --set."""
    beside = [p / "config.yaml" for p in Path(args.checkpoint).resolve().parents[:2]]
    files = args.config or [p for p in beside if p.is_file()][:1]
    return load_config(files, args.set)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="settings:\n" + describe().replace("%", "%%"))
    parser.add_argument("--suite", choices=["toucan"], required=True)
    parser.add_argument("--checkpoint", required=True, help="folder with config.json, safetensors and tokenizer")
    parser.add_argument("--data", help="tasks (JSONL, JSON or parquet); default: data.heldout, or the embedded world")
    parser.add_argument("--config", nargs="+", action="extend", metavar="F.yaml")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="a.b=c")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy, the protocol's")
    parser.add_argument("--out", metavar="F.json")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, FloatingPointError) as error:  # configuration, data and checkpoint errors among them
        raise SystemExit(f"error: {error}") from error
