"""The paper's pipeline for raw Toucan rows: filter, hold out, decompose, split into SFT and RL.

A row is kept if it is relevant and well formed. Relevant: no quality score below the limit, a call in every row but
those of the subset `irrelevant`, and none in those. Well formed: it reads without an error (its calls parse, each has
its result, a reply ends it) and calls offered tools only. The paper does not print its thresholds; these are ours.
Whole dialogues go to one split, so that no history of a held-out sample is trained on; those with the same uuid, as of
several teachers, count as one. Samples are counted, as in the paper: 78,241 = 4,000 held out + 42,423 SFT + 31,818 RL.
Left out: finding the same question under two uuids.
"""
from __future__ import annotations

import hashlib
from numbers import Real
from pathlib import Path
from typing import Any

from slca.data.rows import BadRow, decoded
from slca.data.task import Task
from slca.data.toucan import Read

SPLITS = ("heldout", "sft", "rl")
HELD_OUT = (3000, 1000)  # samples of single-turn and of decomposed dialogues
SFT_SHARE = 4 / 7  # of the samples that are not held out: 42,423 of 74,241
ASSESSMENTS = ("question_quality_assessment", "response_quality_assessment")


def refused(read: Read, min_score: float) -> tuple[str, Any]:
    """-> ("", None) for a row that stays, else ("relevance" or "format", the BadRow or DataError that says why)."""
    try:
        if isinstance(read.row, dict):
            _scored(read.row, min_score)
    except BadRow as bad:
        return "relevance", bad
    if read.error is not None:
        return "format", read.error
    names = [[c["name"] for m in task.messages + task.demonstration for c in m.get("tool_calls", ())]
             + [c["name"] for step in task.gold_calls for c in step] for task in read.tasks]
    if read.kind == "toucan_raw" and any(names) == (read.row.get("subset_name") == "irrelevant"):
        return "relevance", BadRow("messages", "no call, as no offered tool is relevant" if any(names) else
                                   "a call of an offered tool")
    for task, called in zip(read.tasks, names, strict=True):
        if strangers := sorted(set(called) - set(task.allowed_tools)):
            return "format", BadRow("messages", "calls of offered tools only", strangers[0])
    return "", None


def _scored(row: dict, min_score: float) -> None:
    for column in ASSESSMENTS:
        value = row.get(column) or None
        score = overall_score(value if value is None else decoded(value, column))
        if score is not None and score < min_score:
            raise BadRow(column, f"a score of {min_score:g} or more", score)


def overall_score(assessment: Any) -> float | None:
    """An assessment's `overall_score`, else the mean of its parts' `score`s, 1 to 5; None where it states none."""
    if not isinstance(assessment, dict):
        return None
    parts = [p.get("score") for p in assessment.values() if isinstance(p, dict)]
    for found in ([assessment.get("overall_score")], parts):
        numbers = [float(n) for n in found if isinstance(n, Real) and not isinstance(n, bool)]
        if numbers:
            return sum(numbers) / len(numbers)
    return None


def dialogue(read: Read, path: Path) -> str:
    """What tells a row's dialogue from others: its uuid or id, else its first question (of several teachers, say)."""
    extra = read.row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    named = (read.row.get("uuid"), extra.get("uuid"), read.row.get("id"), read.row.get("file"))
    if found := next((str(name) for name in named if name), None):
        return found
    asked = next((m["content"] for task in read.tasks for m in task.messages if m["role"] == "user"), None)
    return f"{path}:{read.number}" if asked is None else hashlib.sha256(
        asked.encode("utf-8", "surrogatepass")).hexdigest()


def multi_turn(tasks: list[Task]) -> bool:
    return sum(m["role"] == "user" for m in tasks[-1].messages) > 1


def assign(dialogues: dict[str, tuple[int, bool]], held_out: tuple[int, int] = HELD_OUT, sft_share: float = SFT_SHARE,
           seed: int = 0) -> dict[str, str]:
    """The split of each dialogue. dialogues: name -> (samples, of several turns?).

    In the order of a hash of (seed, name): held out are those that still fit into held_out (samples of single-turn and
    of multi-turn dialogues); of the rest, SFT gets those that still fit into its share, RL the others. A dialogue of
    several samples that does not fit is passed over, so that a count may stay just below what was asked for where no
    dialogue fits any more. ValueError where there are fewer samples than are to be held out.
    """
    for many, wanted in enumerate(held_out):
        there = sum(samples for samples, of_several in dialogues.values() if of_several == bool(many))
        if there < wanted:
            raise ValueError(f"{wanted} samples of {('single', 'multi')[many]}-turn dialogues to hold out (there are "
                             f"{there})")
    order = sorted(dialogues, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode("utf-8", "surrogatepass"))
                   .digest())
    left, found = list(held_out), {}
    for name in order:
        samples, many = dialogues[name]
        if samples <= left[many]:
            left[many] -= samples
            found[name] = "heldout"
    rest = [name for name in order if name not in found]
    room = round(sft_share * sum(dialogues[name][0] for name in rest))
    for name in rest:
        samples = dialogues[name][0]
        found[name] = "sft" if samples <= room else "rl"
        room -= samples if found[name] == "sft" else 0
    return found
