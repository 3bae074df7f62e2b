"""Tasks from files: Toucan's rows (released RL and SFT, raw), OpenAI dialogues, the sets of `sets.py`, saved tasks.

A row that cannot be used is a DataError with the file, row, field and what was expected; nothing is guessed. A dialogue
becomes one task: everything up to the last user turn is the prompt, what follows is the demonstration, and its calls
are the gold calls. With `decompose` it becomes one task for each user turn that an assistant answers, so that no
training turn is lost; of a Toucan dialogue of several turns, as in the paper, those from the second user turn on.
Left out: filtering and splitting (`split.py`).
"""
from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slca.data import sets
from slca.data.parts import chat_messages, dialogue_tasks, gold_steps, mapping, tool_schemas, without_tools
from slca.data.rows import CATALOGUES, BadRow, DataError, data_files, decoded, read_rows
from slca.data.task import Task

KEYS = {"reward_model": "toucan_rl", "gold_calls": "task", "calling": "seal_tools", "turns": "api_bank",
        "conversations": "glaive"}  # the key that tells a kind; rows with `messages` are told apart by others


class Read(NamedTuple):
    """One row of a file: its tasks, or the error that says why it has none. form: of a Toucan RL row's gold calls."""

    number: int
    row: Any
    kind: str
    form: str
    tasks: list[Task]
    error: DataError | None


def load_tasks(path: str | Path, kind: str = "auto", bad_rows: Literal["raise", "skip"] = "raise") -> list[Task]:
    """All tasks of a .jsonl, .json or .parquet file, in order, with ids that are unique within it.

    Of a folder: those of all its files in the order of their names.

    kind: one of KINDS; "auto" looks at each row's keys. bad_rows: "skip" leaves unusable rows out and warns with their
    number and the first error. Raises DataError. Warns where gold calls are not nested by step: read as one step, they
    make the parallel score wrong for tasks of several steps; names alone make both argument scores 1.
    """
    if Path(path).is_dir():
        return [task for file in data_files(path) for task in load_tasks(file, kind, bad_rows)]
    tasks, forms, errors = [], Counter(), []
    for read in read_tasks(path, kind):
        if read.error is None:
            tasks += read.tasks
            forms[read.form] += 1
        elif bad_rows == "raise":
            raise read.error
        else:
            errors.append(read.error)
    if errors:
        warnings.warn(f"{len(errors)} rows left out; the first: {errors[0]}", stacklevel=2)
    if not tasks:
        raise DataError(path, None, "", "at least one usable row")
    if flat := forms["flat"] + forms["names"]:
        warnings.warn(f"{path}: gold calls of {flat} of {len(tasks)} tasks are not nested by step and are read as one "
                      f"step; {forms['names']} of them are names without arguments", stacklevel=2)
    return tasks


def iter_tasks(path: str | Path, kind: str = "auto", decompose: bool = False, tools: str | Path | None = None,
               ) -> Iterator[tuple[int, Task | DataError]]:
    """(row number, task or the error of an unusable row), row by row: memory does not grow with the file.

    Ids are unique within the file. Raises DataError for a file that cannot be read at all. See `read_tasks`.
    """
    for read in read_tasks(path, kind, decompose, tools):
        if read.error is not None:
            yield read.number, read.error
        for task in read.tasks:
            yield read.number, task


def read_tasks(path: str | Path, kind: str = "auto", decompose: bool = False, tools: str | Path | None = None,
               seen: Counter | None = None) -> Iterator[Read]:
    """Every row of one file with its tasks or its error.

    tools: the file of tool schemas of Seal-Tools or API-Bank rows, else the one beside the file (CATALOGUES).
    seen: the ids given so far, where several files share one space of ids.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    path, seen = Path(path), Counter() if seen is None else seen

    @functools.cache
    def catalogue(of: str) -> dict[str, dict]:
        return sets.catalogue(tools or path.with_name(CATALOGUES[of]), of)

    for number, row in read_rows(path):
        found = form = ""
        try:
            if isinstance(row, BadRow):
                raise row
            if not isinstance(row, dict):
                raise BadRow("", "an object", row)
            found = detect(row) if kind == "auto" else kind
            tasks = _READERS[found](row, f"{path.stem}-{number}", decompose, functools.partial(catalogue, found))
            if found == "toucan_rl":
                form = gold_form(_truth(row)["gold_tool_calls"])
        except BadRow as bad:
            error = DataError(path, number, *bad.args)
            error.__cause__ = bad
            yield Read(number, row, found, form, [], error)
            continue
        for task in tasks:
            task.id = _unique(task.id, seen)
        yield Read(number, row, found, form, tasks, None)


def _unique(name: str, seen: Counter) -> str:
    """The name, with #2, #3 ... where it was given before: released samples of one dialogue share its id."""
    new, count = name, seen[name]
    while new in seen:
        count += 1
        new = f"{name}#{count}"
    seen[name] = max(count, 1)
    seen[new] = max(seen[new], 1)
    return new


def detect(row: dict) -> str:
    """Which of KINDS a row is, by its keys."""
    for key, kind in KEYS.items():
        if key in row:
            return kind
    if "messages" in row:
        if "available_tools" in row:
            return "toucan_raw"
        return "toucan_sft" if "uuid" in row or "subset_name" in row else "openai"
    raise BadRow("", "the key reward_model (Toucan RL), gold_calls (saved task), calling (Seal-Tools), turns "
                 "(API-Bank), conversations (Glaive) or messages (dialogue)", sorted(row))


def gold_form(gold_tool_calls: Any) -> Literal["nested", "flat", "names", "empty"]:
    """How a usable RL row holds its gold calls: by step, as one list of calls, as names only, or not at all."""
    gold = decoded(gold_tool_calls, "gold_tool_calls")
    if not gold:
        return "empty"
    items = [item for step in gold for item in step] if isinstance(gold[0], list) else gold
    if items and all(isinstance(item, str) for item in items):
        return "names"
    return "nested" if isinstance(gold[0], list) else "flat"


# --- the readers: (row, its name, decompose, its catalogue of tools) -> its tasks ------------------------------------

def _truth(row: dict) -> dict:
    return mapping(mapping(row, "reward_model"), "ground_truth", "reward_model.")


def _toucan_rl(row: dict, name: str, decompose: bool, catalogue: Callable) -> list[Task]:
    truth, field = _truth(row), "reward_model.ground_truth"
    key, tools = "tools", row.get("tools")
    if tools is None:
        key, tools = f"{field}.tool_schemas", truth.get("tool_schemas")
    tools = tool_schemas(tools, key)
    names = {t["function"]["name"] for t in tools}
    allowed = decoded(truth.get("allowed_tools"), f"{field}.allowed_tools")
    if allowed is not None and (not isinstance(allowed, list) or {str(tool) for tool in allowed} != names):
        raise BadRow(f"{field}.allowed_tools", f"null or the names of {key}", allowed)
    messages = _printed(chat_messages(row.get("prompt"), "prompt"))
    if not messages or messages[-1]["role"] != "user":
        raise BadRow("prompt", "messages that end with the user's turn")
    if "gold_tool_calls" not in truth:
        raise BadRow(f"{field}.gold_tool_calls", "a list of steps, calls or names, or null")
    extra = row.get("extra_info") if isinstance(row.get("extra_info"), dict) else {}
    return [Task(id=str(row.get("uuid") or extra.get("uuid") or name), messages=messages, tools=tools,
                 gold_calls=gold_steps(truth["gold_tool_calls"], f"{field}.gold_tool_calls"),
                 subset=str(truth.get("subset_name") or ""))]


def _printed(messages: list[dict]) -> list[dict]:
    """Messages without the tool list that a system message prints; one that held nothing else is left out."""
    return [m for m in (without_tools(m) for m in messages) if m["role"] != "system" or m["content"]]


def _dialogue(row: dict, name: str, decompose: bool, catalogue: Callable, first_turn: int = 1,
              tools: str = "tools") -> list[Task]:
    messages = chat_messages(row.get("messages"), "messages")
    if first_turn > 1:
        messages = _printed(messages)
    return dialogue_tasks(messages, tool_schemas(row.get(tools), tools), str(row.get("uuid") or row.get("id") or name),
                          str(row.get("subset_name") or ""), "messages", decompose, first_turn)


def _saved_task(row: dict, name: str, decompose: bool, catalogue: Callable) -> list[Task]:
    known = {f.name for f in fields(Task)}
    if unknown := sorted(set(row) - known):
        raise BadRow(unknown[0], f"only the keys {', '.join(sorted(known))}")
    for key, kind, expected in (("id", str, "text"), ("answer", str, "text"), ("subset", str, "text"),
                                ("facts", list, "a list of texts")):
        value = row.get(key, kind())
        if not isinstance(value, kind) or (kind is list and not all(isinstance(fact, str) for fact in value)):
            raise BadRow(key, expected, value)
    messages = chat_messages(row.get("messages"), "messages")
    if not messages or messages[-1]["role"] != "user":
        raise BadRow("messages", "messages that end with the user's turn")
    demonstration = chat_messages(row.get("demonstration", []), "demonstration")
    return [Task(**{**row, "id": row.get("id") or name, "messages": messages, "demonstration": demonstration,
                    "tools": tool_schemas(row.get("tools"), "tools"),
                    "gold_calls": gold_steps(row.get("gold_calls"), "gold_calls")})]


_READERS: dict[str, Callable[[dict, str, bool, Callable], list[Task]]] = {
    "toucan_rl": _toucan_rl, "toucan_sft": functools.partial(_dialogue, first_turn=2),
    "toucan_raw": functools.partial(_dialogue, first_turn=2, tools="available_tools"), "openai": _dialogue,
    "seal_tools": sets.seal_tools, "api_bank": sets.api_bank, "glaive": sets.glaive, "task": _saved_task}
KINDS = ("auto", *_READERS)
