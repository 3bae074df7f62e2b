"""What a run leaves behind: metrics.jsonl and its glossary, the console line of a step, tables, rollout records.

Left out: the HTML page of a run (`page.py`) and tables over several runs.
"""
from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slca import ranks

if TYPE_CHECKING:
    from slca.rollout import Episode

# One sentence a metric: what it is; what healthy looks like. Each name in metrics.jsonl has one (`undocumented`).
GLOSSARY = {
    "phase": "Part of the run the line belongs to: sft or rl.",
    "step": "Optimiser step in sft, rollout step in rl; counts up from 1 without gaps.",
    "time_s": "Wall-clock seconds of the step; steady, and falling where rollouts get shorter.",
    "rollout_s": "Seconds of the step spent sampling, simulating and judging.",
    "learn_s": "Seconds of the step spent on log-probabilities and updates.",
    "tok_s": "Policy tokens sampled a second of rollout time; steady.",
    "lr": "Learning rate of the step; follows the configured schedule.",
    "reward": "Mean total reward of the rollouts; rises, and flattens when the tasks are solved.",
    "process": "Mean process score (HierR, 0 to 1) of the rollouts; rises.",
    "summary": "Mean summary score (judge, 0 to 1) of the rollouts; rises, not at the cost of process.",
    "success": "Share of rollouts with a process score of at least 0.9; rises.",
    "fmt": "Mean share of call blocks that are valid; near 1 after SFT, a fall means broken calls.",
    "name_f1": "Mean F1 of the called tool names; rises towards 1.",
    "key": "Mean overlap of argument names; near 1 once the policy reads schemas.",
    "value": "Mean share of right argument values; rises, the slowest of the five.",
    "parallel": "Mean share of rollouts whose first step has the right number of calls; rises towards 1.",
    "no_call": "Share of tasks with gold calls that were answered without any; falls towards 0.",
    "redundant_calls": "Mean calls beyond the number of gold calls; falls towards 0.",
    "calls_per_task": "Mean calls of a rollout; approaches the mean number of gold calls.",
    "tool_turns": "Mean rounds of tool results in a rollout; falls as parallel calls are learnt.",
    "malformed": "Share of rollouts with a call that could not be read; near 0.",
    "turn_limit": "Share of rollouts ended by the turn limit; near 0.",
    "length_limit": "Share of rollouts ended by the token limit; near 0, else raise the limit.",
    "response_tokens": "Mean response tokens, tool results included; no runaway growth.",
    "responder_failures": "Mean calls of a rollout without an answer: the responder raised, hung or gave no text; 0.",
    "judge_failures": "Share of rollouts whose reply the judge failed to rate, so that it got judge.failure_score; 0.",
    "judge_agreement": "Share of rated replies on which judge and exact rules agree; 1 with rules and no noise.",
    "frozen_asked": "Chats that a frozen model (simulator or judge) wrote an answer to; absent without one.",
    "frozen_cached": "Chats whose answer was remembered from an earlier one; rises as calls repeat.",
    "frozen_tok_s": "Tokens a second of a frozen model in process, over all ranks; steady, 0 at a server.",
    "results_cut": "Mean tool results of a rollout that were shortened to rollout.max_tool_chars; near 0.",
    "results_forged": "Mean tool results of a rollout that spell a control token, which stays plain text; near 0.",
    "advantage_abs": "Mean absolute advantage of policy tokens; 0.5 to 1, near 0 when groups stop differing.",
    "advantage_tool": "Mean absolute advantage of tool tokens; falls as call patterns settle.",
    "advantage_summary": "Mean absolute advantage of summary tokens; falls as replies settle.",
    "outcome": "Mean R_succ (1: solved, else 0) of the rollouts, where training asks for it; rises.",
    "dead_tool": "Share of groups without any tool signal (equal scores); near 1 means nothing left to learn.",
    "dead_summary": "Share of groups without any summary signal (equal scores); near 1 means nothing left to learn.",
    "leak_flips": "Share of tool tokens on which one advantage for all (GRPO's) has the other sign than the tool "
                  "stream; 0 where the summary reward carries nothing into the calls.",
    "leak_share": "Summary's part of the advantage that tool tokens would get under GRPO, by size; 0 to 1.",
    "grad_norm_tool": "Norm of the gradient of tool tokens alone, each log.stream_gradients steps.",
    "grad_norm_summary": "Norm of the gradient of summary tokens alone, likewise.",
    "grad_cosine": "Cosine of these two gradients; near 0 where the streams do not disturb each other.",
    "loss": "Policy loss, mean over the updates; near 0, its level says little.",
    "kl": "Estimated KL to the reference policy; grows slowly, a jump means the policy broke away.",
    "grad_norm": "Gradient norm before clipping, mean over updates; stable, spikes are rare.",
    "clip_fraction": "Share of policy tokens whose ratio was clipped; 0 with one update a step, below 0.2 else.",
    "dual_clip_fraction": "Share of policy tokens held by the dual clip; near 0.",
    "approx_kl": "Mean old minus new log-probability within the updates; near 0, below 0.05.",
    "logprob_gap": "Mean absolute difference of sampler and learner log-probabilities; 1e-5 or less in float32.",
    "logprob_gap_max": "Largest such difference of the step; 1e-3 or less in float32.",
    "entropy": "Minus the mean log-probability of the sampled tokens, an estimate of the policy's entropy; falls "
               "slowly, a collapse to 0 ends exploration.",
    "peak_memory_gb": "Largest memory of a process (on a GPU: of torch) so far, over ranks; flattens.",
    "nonfinite": "1 on the last line of a run that ended at a loss or gradient that is not finite; absent else.",
    "save_failures": "Checkpoints so far that could not be written (a full disk); 0.",
    "sft_loss": "Mean loss of the demonstrations' tokens; falls, then flattens.",
    "sft_grad_norm": "Gradient norm of the supervised step; stable.",
    "sft_tokens": "Target tokens of the supervised step.",
    "sft_copy": "Share of right argument values on validation tasks where calls were made: the copy gate; jumps once "
                "copying is learnt.",
    **{f"val_{name}": f"Validation, greedy: {text}" for name, text in {
        "process": "mean process score; rises.",
        "summary": "mean summary score; rises.", "success": "share of process scores of at least 0.9; rises.",
        "name_f1": "F1 of tool names; rises.", "arg_match": "mean of the two argument scores; rises.",
        "parallel": "share of right first-step counts; rises.", "no_call": "share of omitted calls; falls.",
        "redundant_calls": "calls beyond gold; falls towards 0.", "calls_per_task": "calls; approaches gold.",
        "gold_calls_per_task": "gold calls; constant.", "tool_turns": "rounds of results; falls.",
        "n": "number of tasks; constant."}.items()},
}


def undocumented(rows: Iterable[Mapping]) -> list[str]:
    """Names in these metrics that GLOSSARY lacks, sorted; empty is right."""
    return sorted({name for row in rows for name in row} - GLOSSARY.keys())


class RunLog:
    """Appends to <folder>/metrics.jsonl, one flushed JSON object a line: phase, step, then the metrics.

    A line that cannot be written (a full disk) waits for the next one: nothing is lost while the run goes on. writes:
    False on all ranks but the first.
    """

    def __init__(self, folder: str | Path, writes: bool = True):
        self.folder, self.writes, self.waiting = Path(folder), writes, ""
        self.path = self.folder / "metrics.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, phase: str, step: int, metrics: Mapping[str, Any]) -> dict:
        """Returns the row as written; a number that is not finite becomes null with a warning. ValueError: a name
        without a sentence in GLOSSARY."""
        row: dict[str, Any] = {"phase": phase, "step": step}
        for name, value in metrics.items():
            value = value.item() if hasattr(value, "item") else value
            if isinstance(value, float) and not math.isfinite(value):
                warnings.warn(f"{phase} step {step}: {name} is {value}, written as null", stacklevel=2)
                value = None
            row[name] = value
        if names := undocumented([row]):
            raise ValueError(f"metrics without a sentence in report.GLOSSARY: {', '.join(names)}")
        self.waiting += json.dumps(row, allow_nan=False) + "\n"
        self.flush()
        return row

    def flush(self) -> bool:
        """Write what waits; -> whether nothing does any more."""
        if self.writes and self.waiting:
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(self.waiting)
                self.waiting = ""
            except OSError as error:
                warnings.warn(f"{self.path}: {error}; the lines wait", stacklevel=2)
                if self.path.exists():
                    os.truncate(self.path, size)  # half a line would make the rest unreadable
        return not (self.writes and self.waiting)

    def rewind(self, phase: str, step: int) -> None:
        """Drop the lines after this step, so that a resumed run does not write them a second time."""
        if not self.writes:
            return
        rows = [row for row in read_metrics(self.folder)
                if not ((row["phase"] == phase and row["step"] > step) or (row["phase"] == "rl" and phase == "sft"))]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        temporary.replace(self.path)

    def save_rollouts(self, step: int, rollouts: list[dict]) -> Path:
        """Write rollouts/step_00012.json: records as `rollout_html` reads them. A full disk costs only the file."""
        path = self.folder / "rollouts" / f"step_{step:05d}.json"
        if self.writes:
            try:
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(rollouts), encoding="utf-8")
            except OSError as error:
                warnings.warn(f"{path}: {error}; not kept", stacklevel=2)
                path.unlink(missing_ok=True)
        return path


def read_metrics(folder: str | Path) -> list[dict]:
    """The lines of a run's metrics.jsonl; a last line cut off by a crash is left out."""
    path = Path(folder) / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: expected JSON ({error})") from error
    return rows


def console_line(step: int, metrics: Mapping[str, Any], phase: str = "rl") -> str:
    """One aligned line; a metric that is missing or null shows as a dash of the same width."""
    def show(name: str, form: str, factor: float = 1.0) -> str:
        width, value = len(f"{0.0:{form}}"), metrics.get(name)
        return "-".rjust(width) if value is None else f"{value * factor:{form}}"

    if phase == "sft":
        middle = (f"loss {show('sft_loss', '7.4f')}  copy {show('sft_copy', '5.3f')} | "
                  f"grad {show('sft_grad_norm', '7.3f')}  lr {show('lr', '7.1e')}")
    else:
        middle = (f"reward {show('reward', '6.3f')}  proc {show('process', '5.3f')}  sum {show('summary', '5.3f')} | "
                  f"succ {show('success', '5.1f', 100)}%  no-call {show('no_call', '5.1f', 100)}%  "
                  f"redund {show('redundant_calls', '5.2f')} | adv {show('advantage_abs', '5.3f')}  "
                  f"grad {show('grad_norm', '6.3f')}  lr {show('lr', '7.1e')}  gap {show('logprob_gap', '7.1e')}")
    return f"{phase:<3} {step:>5} | {show('time_s', '6.1f')}s | {middle} | {show('tok_s', '6.0f')} tok/s"


TABLE = (("success", "Success (process >= 0.9)"), ("process", "Process"), ("summary", "Summary"),
         ("name_f1", "Name F1"), ("arg_match", "ArgMatch"), ("parallel", "Parallel"), ("no_call", "No-call rate"),
         ("redundant_calls", "Redundant calls"), ("calls_per_task", "Calls a task"),
         ("gold_calls_per_task", "Gold calls a task"), ("tool_turns", "Tool turns"), ("n", "Tasks"))
STAGES = {"before": "before", "after_sft": "after SFT", "after_rl": "after RL",
          "after_sft_sampled": "SFT, sampled", "after_rl_sampled": "RL, sampled"}


def table_rows(columns: Mapping[str, Mapping | None]) -> list[list[str]]:
    """Header and one row a metric, as text; a column without metrics is left out."""
    there = {title: values for title, values in columns.items() if values}

    def cell(key: str, value: Any) -> str:
        return "-" if value is None else f"{value:.0f}" if key == "n" else f"{value:.3f}"
    return [["", *there],
            *([title, *(cell(key, values.get(key)) for values in there.values())] for key, title in TABLE)]


def metrics_table(columns: Mapping[str, Mapping | None]) -> str:
    """Evaluations side by side as aligned text: column title -> its metrics, None where there are none."""
    rows = table_rows(columns)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
             for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def final_table(summary: Mapping) -> str:
    """The evaluations of a run's summary.json side by side; stages that did not run are left out."""
    return metrics_table({title: summary.get(name) for name, title in STAGES.items()})


# --- rollout records -------------------------------------------------------------------------------------------------

def record(e: Episode, advantages: list[float], tokenizer, step: int, rank: str) -> dict:
    """One scored rollout as `page.rollout_html` shows it; advantages: one a token. rank: "best" or "worst"."""
    scores = {k: getattr(e.rewards, k) for k in ("total", "process", "summary", "fmt", "name", "key", "value",
                                                 "parallel")}
    return {"step": step, "task_id": e.task.id, "subset": e.task.subset, "rank": rank, "status": e.status,
            "tokens": [tokenizer.decode([i]) for i in e.ids], "ids": e.ids, "labels": e.labels,
            "policy_mask": e.policy_mask, "logprobs": e.logprobs, "advantages": advantages[:len(e.ids)],
            "prompt_length": e.prompt_length, "scores": scores, "gold_calls": e.task.gold_calls,
            "facts": e.task.facts}


def best_and_worst(episodes: list[Episode], advantages: list[list[float]], tokenizer, step: int,
                   keep: int) -> list[dict]:
    """Records of the `keep` rollouts with the highest total and of those with the lowest, over all ranks."""
    order = sorted(range(len(episodes)), key=lambda i: -episodes[i].rewards.total)
    found = []
    for rank, chosen in (("best", order[:keep]), ("worst", order[max(0, len(order) - keep):])):
        own = [record(episodes[i], advantages[i], tokenizer, step, rank) for i in chosen]
        every = sorted((r for part in ranks.gather(own) for r in part), key=lambda r: -r["scores"]["total"])
        found += every[:keep] if rank == "best" else every[len(every) - min(keep, len(every)):]
    return found


def stretches(ids: list[int], marks: list, tokenizer) -> str:
    """A row's text cut where its mark changes, one stretch a line: "[mark x tokens] text"."""
    parts, start = [], 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or marks[i] != marks[start]:
            text = "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}"  # no escape reaches a terminal
                           for c in tokenizer.decode(ids[start:i]))
            parts.append(f"[{marks[start]} x {i - start}] {text}")
            start = i
    return "\n".join(parts)
