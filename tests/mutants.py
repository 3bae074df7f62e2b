"""Proves that the tests would notice: each fault below, planted alone in a copy of the tree, turns its tests red.

    python tests/mutants.py [NAME ...] [--fast] [--jobs N] [--list]

The listed tests run once without a fault first, and must be green. A fault is killed where pytest then reports a failed
test. One that survives, hangs or cannot be imported, or whose line has changed by now, makes the exit status 1.
"""
from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TREE = ("slca", "tests", "configs", "train.py", "evaluate.py", "setup.py", "pyproject.toml", "README.md")
PATIENCE = 600  # seconds that the tests of a fault may take
# Each fault has its own process. Where those can be forked, what takes long to import is imported once for all.
PROCESSES = get_context("forkserver" if sys.platform == "linux" else "spawn")


class Mutant(NamedTuple):
    """A fault in slca/PART.py: `old`, which stands there once, becomes `new`; one of the tests must then fail.

    tests: node ids, as FILE::TEST for tests/test_FILE.py.
    """

    name: str
    part: str
    old: str
    new: str
    tests: tuple[str, ...]


BATCHES = "test_gradient_does_not_depend_on_micro_batches"
SHARED = "test_shared_prompts_give_the_plain_scores_and_gradients"
ENGINE = "test_prefill_steps_and_tool_turns_are_the_plain_forward_pass"
STORED = "sampler::test_stored_logprobs_are_the_learners"
TABLE = {  # name, old, new, tests (in tests/test_PART.py where no other file is named)
    "segments": [
        ("no-summary", "labels = mask.long() + last.long()", "labels = mask.long()", "test_by_hand"),
        ("labels-swapped", "TOOL, SUMMARY = 0, 1, 2", "TOOL, SUMMARY = 0, 2, 1", "test_strict"),
        ("labels-beyond-mask", "last = mask & (run ==", "last = (run ==", "test_by_hand"),
        ("first-run-is-summary", "(run == run[:, -1:])", "(run == 1)", "test_by_hand"),
        ("strict-of-any-turn", "(last & opens).any(1,", "opens.any(1,", "test_strict"),
    ],
    "rewards": [
        ("omission-not-applied", "if gold and parsed.n_open == 0:", "if False:", "test_totals_and_omission"),
        ("mix-swapped", "mix[0] * scores.process + mix[1] * summary", "mix[1] * scores.process + mix[0] * summary",
         "test_totals_and_omission"),
        ("weights-swapped", '"value": 0.20, "parallel": 0.30', '"value": 0.30, "parallel": 0.20',
         "test_process_by_hand"),
        ("reasoning-kept", 'return "".join(kept) + text[at:]', "return text", "test_totals_and_omission"),
        ("parallel-rule-swapped", 'if parallel_rule == "first_block" else', 'if parallel_rule != "first_block" else',
         "test_first_turn_counts_all_blocks_of_the_turn"),
        ("parallel-counts-blocks", "sum(len(block) for _, block in counted)", "len(counted)", "test_process_by_hand"),
        ("f1-numerator", "2 * common.total()", "common.total()", "test_process_by_hand"),
        ("values-as-strings", "loosely_equal(given[k], wanted[k])", "(str(given[k]) == str(wanted[k]))",
         "test_process_by_hand"),
        ("call-matched-twice", "del unused[name][best_at]", "pass", "test_process_by_hand"),
        ("unclosed-call-is-fine", "max(parsed.n_open, parsed.n_close, 1)", "max(len(parsed.blocks), 1)",
         "test_golden_hierr"),
        ("reply-before-result", "n_results, since_result = n_results + 1, []", "n_results += 1",
         "test_only_what_the_model_wrote_counts"),
        ("result-without-call", "has_result = has_result or called", "has_result = True",
         "test_only_what_the_model_wrote_counts"),
    ],
    "advantages": [
        ("biased-std", "(count - 1).clamp(min=1)", "count.clamp(min=1)", "test_normaliser_by_hand"),
        ("eps-under-the-root", "centred / (std + eps)", "centred / (std.square() + eps).sqrt()", "test_eps_floor"),
        ("groups-mix", "values.new_zeros(n_groups).index_add(0, index, values)[index]", "values.sum().expand(n)",
         "test_golden_normaliser"),
        ("group-names-as-text", "numbers.setdefault(g,", "numbers.setdefault(str(g),",
         "test_moments_permutation_groups_lambda_shift"),
        ("equal-rewards-rounded", "torch.where(here, x - lowest[index], 0.0).float()",
         "torch.where(here, x, 0.0).float()", "test_equal_rewards_give_exactly_zero"),
        ("absent-rollouts-count", "tool, group_ids, on_tool.any(1),", "tool, group_ids, None,",
         "test_lone_caller_kl_share_and_lambda"),
        ("lambda-ignored", "s = lambda_summary * group_normalize(", "s = group_normalize(",
         "test_lone_caller_kl_share_and_lambda"),
        ("lambda-before-normalising", "t = lambda_tool * group_normalize(tool,",
         "t = group_normalize(lambda_tool * tool,", "test_lone_caller_kl_share_and_lambda"),
        ("routing-transposed", "(tt, ts), (st, ss) = routing", "(tt, st), (ts, ss) = routing", "test_support_control"),
        ("streams-swapped", "torch.where(on_tool, mixed(tt, ts)", "torch.where(on_tool, mixed(ts, tt)",
         "test_support_control"),
        ("advantage-sign", "(a * tool + b * summary)[", "-(a * tool + b * summary)[", "test_support_control"),
        ("omission-flag-ignored", "on_tool.device) > 0.5) | (total < 0)", "on_tool.device) > 9) | (total < 0)",
         "test_penalty_lives_in_the_summary_stream"),
        ("penalty-added", "summary = torch.where(penalised, total, per",
         "summary = torch.where(penalised, total, 0.0) + (per", "test_penalty_lives_in_the_summary_stream"),
        ("kl-share-of-all-tokens", "tool + torch.where(on_tool, share, 0.0).sum(1)", "tool + share.sum(1)",
         "test_lone_caller_kl_share_and_lambda"),
        ("advantage-on-the-prompt", "torch.where(mask, a[:, None], 0.0)", "a[:, None].expand(mask.shape)",
         "test_golden_grpo"),
    ],
    "loss": [
        ("loss-sign", "-a * ratio, -a * _clip(", "a * ratio, a * _clip(", "test_clip_table"),
        ("ratio-inverted", "(new - old).clamp(", "(old - new).clamp(", "test_clip_table"),
        ("clip-min-for-max", "torch.maximum(plain, clipped)", "torch.minimum(plain, clipped)", "test_clip_table"),
        ("clip-bounds-swapped", "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_high, 1 + clip_low)",
         "test_clip_table"),
        ("dual-clip-dropped", "torch.minimum(larger, ceiling)", "larger", "test_clip_table"),
        ("gradient-to-old", "_kept(old_log_prob.detach(),", "_kept(old_log_prob,",
         "test_low_precision_input_and_no_other_gradient"),
        ("mask-multiplied", "torch.where(mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0)",
         "x.to(torch.promote_types(x.dtype, torch.float32)) * mask", "test_masked_values_never_matter"),
        ("own-denominator", "clamp(min=1) if given is None else max(given, 1)", "clamp(min=1)",
         "test_micro_batches_add_up"),
        ("segment-weights-swapped", "zip((TOOL, SUMMARY), segment_weights", "zip((SUMMARY, TOOL), segment_weights",
         "test_two_stream_loss"),
        ("segment-weight-cancels", "losses, 0.0).sum() / count", "losses, 0.0).sum() / (weight * count)",
         "test_two_stream_loss"),
        ("kl-direction", 'd = _kept(log_prob, mask, "log_prob") - _kept(',
         'd = -_kept(log_prob, mask, "log_prob") + _kept(', "test_kl_by_hand"),
        ("k2-not-halved", "d.square() / 2", "d.square()", "test_kl_by_hand"),
        ("k3-of-the-other-ratio", "gap = (-d).clamp(", "gap = d.clamp(", "test_kl_by_hand"),
    ],
    "learner": [
        ("targets-shifted", "ids[:, 1:][where]", "ids[:, :-1][where]", "test_scorer_is_tempered_and_cut"),
        ("temperature-missing", ".float().div_(temperature)", ".float()", "test_scorer_is_tempered_and_cut"),
        ("gradient-untempered", "mul_(-grad[i, None] / ctx.temperature)", "mul_(-grad[i, None])",
         "test_head_in_chunks_is_the_dense_one_and_keeps_no_logits"),
        ("vocabulary-not-cut", "head = head[:vocabulary]", "head = head", "test_scorer_is_tempered_and_cut"),
        ("packed-off-by-one", "starts[row] + inside - 1", "starts[row] + inside", SHARED),
        ("prompt-end-off-by-one", ".cumsum(0).sub(1)", ".cumsum(0).sub(2)", SHARED),
        ("rows-begin-at-0", "torch.arange(prompt_lengths[i], lengths[i] - 1)",
         "torch.arange(lengths[i] - 1 - prompt_lengths[i])", SHARED),
        ("rows-see-the-future", "dtype=torch.bool, device=device).tril()", "dtype=torch.bool, device=device)", SHARED),
        ("first-prompt-for-all", "number[groups[i]] for i in rows]", "0 for i in rows]", SHARED),
        ("micro-batch-mean", '"token_count": int(', '"token_count": None and int(', BATCHES),
        ("counts-swapped", "(labels == TOOL).sum()", "(labels == SUMMARY).sum()", BATCHES),
        ("prompt-in-norm-length", "- int(batch.policy_mask[i].argmax())", "- 0", BATCHES),
        ("kl-subtracted", "loss + loss_cfg.kl_coef * kl", "loss - loss_cfg.kl_coef * kl", BATCHES),
        ("reference-is-the-policy", "batch.logprobs_of(reference,", "batch.logprobs_of(policy,", BATCHES),
        ("old-is-new", "if batch.old is None else batch.old[part", "if True else batch.old[part", BATCHES),
        ("rows-off-by-one", ".to(ids.device)[row] + column", ".to(ids.device)[row] + column - 1",
         "test_rows_without_their_padding_give_the_same_and_the_same_gradients"),
        ("skipped-despite-kl", "loss_cfg.kl_coef > 0 or bool(", "bool(",
         "test_rows_without_advantage_are_skipped_but_counted"),
    ],
    "optim": [
        ("replicas-drift", "rank() if isinstance(p, DTensor) else 0", "rank()", "test_replicas_stay_equal_on_any_rank"),
        ("clip-after-the-step", "torch.nn.utils.clip_grads_with_norm_(",
         "_ = [o.step() for o in found], torch.nn.utils.clip_grads_with_norm_(", "test_clipping_by_hand"),
        ("decay-of-norms", '"params": vectors, "weight_decay": 0.0', '"params": vectors, "weight_decay": weight_decay',
         "test_optimizers_and_rates"),
        ("gradients-add-up", "optimizer.zero_grad(set_to_none=True)", "pass", "learner::test_small_updates_arrive"),
    ],
    "sampler": [
        ("unknown-ids-drawn", "min(policy.config.vocab_size, tokenizer.size if",
         "max(policy.config.vocab_size, tokenizer.size if", "test_ids_beyond_the_tokenizer_are_never_drawn"),
        ("one-stop-id", "set(stop_ids), stop_strings", "set(stop_ids[:1]), stop_strings",
         "test_each_stop_ends_its_row_and_is_scored"),
        ("members-alike", "row_stream(seed, p, m)", "row_stream(seed, p, 0)",
         "test_groups_are_adjacent_and_members_differ"),
        ("last-token-not-run", "*(row.fresh.ids[-1:] if row.ended else ()), *new", "*new", "test_each_token_runs_once"),
        ("finished-rows-stay", "row for row in live if row not in stopped", "row for row in live",
         "test_finished_rows_leave_the_batch"),
        ("stream-goes-on", "self.drawn[at] = 0", "pass", "test_refill_gives_what_all_at_once_gives"),
    ],
    "slots": [
        ("drawn-untempered", "logits.float() / temperature, -1)", "logits.float(), -1)", "sampler::test_draw_tempers"),
        ("logprob-of-the-likeliest", "p.gather(1, token).squeeze(1)", "p.amax(-1)", "sampler::test_draw_by_hand"),
        ("weights-not-refreshed", "self.engine.refresh()", "pass", "sampler::test_new_weights_are_seen_after_refresh"),
        ("prompt-length-off-by-one", "[p.length for p in self.groups", "[p.length - 1 for p in self.groups", STORED),
        ("prompts-not-moved", "self.prompts.copy(self._ints(source), self._ints(target), longest)", "pass", STORED),
        ("streams-not-moved", "self.token, self.uniforms, self.heat):", "self.token, self.heat):",
         "sampler::test_a_row_does_not_know_its_neighbours"),
    ],
    "engine": [
        ("stale-columns-seen", "self.numbers(span) < length[:, None]", "self.numbers(span) <= length[:, None]", ENGINE),
        ("fed-rows-begin-at-0", "(start[:, None] + column).flatten()", "column.flatten()", ENGINE),
        ("parts-swapped", "(a[1] - top).exp_(), (b[1] - top)", "(b[1] - top).exp_(), (a[1] - top)",
         "test_partial_attention_merges_to_the_whole"),
        ("cache-lost-on-growth", "self.kv[:, :, :s, :, :c] = old", "pass",
         "sampler::test_greedy_from_the_cache_is_greedy_without"),
    ],
    "rollout": [
        ("results-as-policy", "0 if logprobs is None else 1", "1", "test_records_by_hand"),
        ("prompt-as-policy", "len(ids), [0] * len(ids),", "len(ids), [1] * len(ids),", "test_records_by_hand"),
        ("segment-rule-ignored", "segment_labels(mask, rule,", 'segment_labels(mask, "positional",',
         "test_segment_rule_of_a_cut_call_turn"),
        ("sampled-at-temperature-1", "max_len, temperature, tokenizer.stop_ids", "max_len, 1.0, tokenizer.stop_ids",
         "test_stored_logprobs_after_tool_turns"),
        ("second-stop-ignored", "tokenizer.stop_ids, stops", "tokenizer.stop_ids[:1], stops",
         "test_both_stops_end_the_episode"),
        ("members-share-a-stream", "numbers[g], m).random(", "numbers[g], 0).random(", "test_key_fixes_the_episodes"),
        ("cut-call-runs", "if row.fresh.stopped else", "if True else", "test_a_cut_call_is_not_run"),
        ("turn-end-doubled", "closed=row.fresh.ids[-1] == tokenizer.token_to_id(chat.END)", "closed=False",
         "test_ids_are_those_of_the_template"),
        ("old-weights-sample", "sampler.refresh()", "pass", "train::test_metrics_are_documented_and_complete"),
    ],
    "ranks": [
        ("dealt-out-one-way", "if min(at % lap, lap - 1 - at % lap) == rank()", "if at % world() == rank()",
         "test_rows_are_dealt_out_so_that_no_rank_waits"),
    ],
    "data/source": [
        ("tables-over-the-first-tasks", "tasks[i * len(tasks) // n]", "tasks[i]",
         "source::test_tables_and_validations_are_over_the_whole_file"),
        ("a-cut-row-not-counted", "len(row.ids) > limit", "len(row.ids) > limit + 1",
         "source::test_rows_over_the_limits_are_left_out_and_counted"),
    ],
}
MUTANTS = [Mutant(name, part, old, new, tuple(t if "::" in t else f"{part}::{t}" for t in tests.split()))
           for part, rows in TABLE.items() for name, old, new, tests in rows]
FAST = ("labels-swapped", "f1-numerator", "biased-std", "routing-transposed", "clip-min-for-max", "old-is-new",
        "last-token-not-run", "results-as-policy")


def mutated(m: Mutant, root: Path = ROOT) -> str:
    """The text of its file with the fault. ValueError unless there is exactly one place for it."""
    text = (root / "slca" / f"{m.part}.py").read_text(encoding="utf-8")
    if text.count(m.old) != 1:
        raise ValueError(f"{text.count(m.old)} places in slca/{m.part}.py for: {m.old}")
    return text.replace(m.old, m.new)


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    # Python tells compiled files from newer sources by size and second only, and a fault may change neither
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def copied(tree: Path) -> Path:
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, tree)
    return tree


def run_pytest(tree: Path, tests: list[str]) -> None:
    """In a process of its own: run tests of the copy, and exit with 100 + pytest's status."""
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)  # for the processes that tests start
    sys.path[:] = [str(tree), *(p for p in sys.path if Path(p).resolve() not in (ROOT, ROOT / "tests"))]
    with open("output", "w", encoding="utf-8") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    import pytest
    import torch

    torch.set_num_threads(1)
    files = ["tests/test_" + test.replace("::", ".py::", 1) for test in tests]
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files])
    import slca

    if Path(slca.__file__).parent != tree / "slca":  # an editable install must not come first
        sys.exit(f"the tests have imported {slca.__file__}")
    sys.exit(100 + status)


def status_of(tree: Path, tests: list[str]) -> int | None:
    """pytest's status; below zero where it did not get to the end, None after PATIENCE."""
    process = PROCESSES.Process(target=run_pytest, args=(tree, tests))
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode - 100


def trial(m: Mutant, trees: SimpleQueue) -> tuple[str, float]:
    """-> what became of it, seconds."""
    tree, start = trees.get(), time.perf_counter()
    path = tree / "slca" / f"{m.part}.py"
    plain = path.read_text(encoding="utf-8")
    try:
        write(path, mutated(m, tree))
        verdict = {1: "killed", 0: "SURVIVED", None: "HUNG"}.get(status_of(tree, m.tests), "BROKEN")
    except ValueError as e:
        verdict = f"STALE ({e})"
    finally:
        write(path, plain)
        trees.put(tree)
    return verdict, time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    parser.add_argument("--fast", action="store_true", help=f"only {', '.join(FAST)}")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time, one thread each")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    args = parser.parse_args(argv)
    wanted = {*args.names, *(FAST if args.fast else ())}
    if unknown := wanted - {m.name for m in MUTANTS}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTANTS if not wanted or m.name in wanted]
    if args.list:
        for m in chosen:
            print(f"{m.name:25} {m.part:10} {' '.join(m.tests)}")
        return 0
    start, killed, jobs = time.perf_counter(), 0, max(1, args.jobs)
    PROCESSES.set_forkserver_preload(["pytest", "torch.distributed.tensor", "sympy"])  # torch imports these late
    with tempfile.TemporaryDirectory() as folder:
        first, *others = [copied(Path(folder).resolve() / str(job)) for job in range(jobs)]
        if status_of(first, list(dict.fromkeys(test for m in chosen for test in m.tests))) != 0:
            print((first / "output").read_text(encoding="utf-8"), "the tests fail without any fault", sep="\n")
            return 1
        print(f"{time.perf_counter() - start:6.1f} s  green     without any fault", flush=True)
        trees: SimpleQueue = SimpleQueue()
        for tree in (first, *others):
            trees.put(tree)
        with ThreadPoolExecutor(jobs) as pool:
            for m, (verdict, seconds) in zip(chosen, pool.map(lambda m: trial(m, trees), chosen), strict=True):
                killed += verdict == "killed"
                print(f"{seconds:6.1f} s  {verdict:8}  {m.name}", flush=True)
    print(f"{killed} of {len(chosen)} faults killed in {time.perf_counter() - start:.0f} s")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
