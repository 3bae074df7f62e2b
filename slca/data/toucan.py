"""Files of tasks: the released Toucan rows (RL and SFT), OpenAI-style dialogues, and our own saved tasks.

JSON Lines is the core format; a .json list and .parquet (extra "parquet") read the same. A row that cannot be used is a
DataError with the file, row, field and what was expected; nothing is guessed. Dialogues become one task: everything up
to the last user turn is the prompt, what follows is the demonstration, and its calls are the gold calls. So earlier
assistant turns of a long dialogue are context, not targets, as in the paper's decomposed samples.
Left out: splitting, filtering, and the teachers' raw dialogues (roles `function`, one call a message).
"""
from __future__ import annotations

import ast
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from slca.data.task import Task

KINDS = ("auto", "toucan_rl", "toucan_sft", "openai", "task")
MAX_CALL_CHARS, MAX_CALL_DEPTH = 200_000, 64  # a Python literal beyond these is refused before it is parsed
MISSING = object()


class DataError(ValueError):
    """A file or row that cannot be used."""

    def __init__(self, file: Any, row: int | None, field: str, expected: str, found: Any = MISSING):
        """row: line of a JSONL file, else position from 1; None for the file as a whole."""
        self.file, self.row, self.field, self.expected = str(file), row, field, expected
        place = ", ".join(str(part) for part in (file, row and f"row {row}", field) if part)
        shown = repr(found) if len(repr(found)) <= 80 else f"{found!r:.77}..."
        super().__init__(f"{place}: expected {expected}" + ("" if found is MISSING else f", found {shown}"))


class _Bad(Exception):
    """A problem inside a row; the file and row number are added where they are known."""

    def __init__(self, field: str, expected: str, found: Any = MISSING):
        super().__init__(field, expected, found)


def load_tasks(path: str | Path, kind: str = "auto", bad_rows: Literal["raise", "skip"] = "raise") -> list[Task]:
    """All tasks of a .jsonl, .json or .parquet file, in order, with ids that are unique within it.

    Of a folder: those of all its files in the order of their names.

    kind: one of KINDS; "auto" looks at each row's keys. bad_rows: "skip" leaves unusable rows out and warns with their
    number and the first error. Raises DataError. Warns where gold calls are not nested by step: read as one step, they
    make the parallel score wrong for tasks of several steps; names alone make both argument scores 1.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    if Path(path).is_dir():
        files = sorted(p for p in Path(path).iterdir() if p.suffix in (".jsonl", ".json", ".parquet"))
        if not files:
            raise DataError(path, None, "", "a folder with .jsonl, .json or .parquet files")
        return [task for file in files for task in load_tasks(file, kind, bad_rows)]
    tasks, forms, errors = [], Counter(), []
    seen: Counter[str] = Counter()
    for number, row in read_rows(path):
        try:
            if isinstance(row, _Bad):
                raise row
            if not isinstance(row, dict):
                raise _Bad("", "an object", row)
            found = detect(row) if kind == "auto" else kind
            task = _READERS[found](row, f"{Path(path).stem}-{number}")
            if found == "toucan_rl":
                forms[gold_form(_truth(row)["gold_tool_calls"])] += 1
        except _Bad as bad:
            error = DataError(path, number, *bad.args)
            if bad_rows == "raise":
                raise error from bad
            errors.append(error)
            continue
        seen[task.id] += 1
        if seen[task.id] > 1:  # decomposed samples of one dialogue may share its id
            task.id = f"{task.id}#{seen[task.id]}"
        tasks.append(task)
    if errors:
        warnings.warn(f"{len(errors)} rows left out; the first: {errors[0]}", stacklevel=2)
    if not tasks:
        raise DataError(path, None, "", "at least one usable row")
    if flat := forms["flat"] + forms["names"]:
        warnings.warn(f"{path}: gold calls of {flat} of {len(tasks)} tasks are not nested by step and are read as one "
                      f"step; {forms['names']} of them are names without arguments", stacklevel=2)
    return tasks


def read_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(row number, row) of a file, chosen by its suffix; blank lines of JSONL are passed over. Raises DataError.

    A line that is not JSON is given as a _Bad, so that the caller decides about it as about any other bad row.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(path, None, "", "a file or folder that exists")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix in (".jsonl", ".json"):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(path, None, "", f"UTF-8 text ({error})") from error
        if path.suffix == ".json":
            try:
                rows = _load(text, "")
            except _Bad as bad:
                raise DataError(path, None, *bad.args) from bad
            if not isinstance(rows, list):
                raise DataError(path, None, "", "a JSON list of rows", rows)
            yield from enumerate(rows, 1)
        else:
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    try:
                        yield number, _load(line, "")
                    except _Bad as bad:
                        yield number, bad
    else:
        raise DataError(path, None, "", "a name that ends in .jsonl, .json or .parquet")


def detect(row: dict) -> str:
    """Which of KINDS a row is, by its keys."""
    if "reward_model" in row:
        return "toucan_rl"
    if "gold_calls" in row:
        return "task"
    if "messages" in row:
        return "toucan_sft" if "uuid" in row or "subset_name" in row else "openai"
    raise _Bad("", "the key reward_model (Toucan RL), gold_calls (saved task) or messages (dialogue)", sorted(row))


def gold_form(gold_tool_calls: Any) -> Literal["nested", "flat", "names", "empty"]:
    """How a usable RL row holds its gold calls: by step, as one list of calls, as names only, or not at all."""
    gold = _load(gold_tool_calls, "gold_tool_calls")
    if not gold:
        return "empty"
    items = [item for step in gold for item in step] if isinstance(gold[0], list) else gold
    if items and all(isinstance(item, str) for item in items):
        return "names"
    return "nested" if isinstance(gold[0], list) else "flat"


# --- the four kinds of row -------------------------------------------------------------------------------------------

def _truth(row: dict) -> dict:
    return _mapping(_mapping(row, "reward_model"), "ground_truth", "reward_model.")


def _toucan_rl(row: dict, name: str) -> Task:
    truth, field = _truth(row), "reward_model.ground_truth"
    key, tools = "tools", row.get("tools")
    if tools is None:
        key, tools = f"{field}.tool_schemas", truth.get("tool_schemas")
    tools = _tools(tools, key)
    names, allowed = {t["function"]["name"] for t in tools}, _load(truth.get("allowed_tools"), f"{field}.allowed_tools")
    if allowed is not None and (not isinstance(allowed, list) or {str(tool) for tool in allowed} != names):
        raise _Bad(f"{field}.allowed_tools", f"null or the names of {key}", allowed)
    messages = _messages(row.get("prompt"), "prompt")
    messages = [m for m in (_without_tools(m) for m in messages) if m["role"] != "system" or m["content"]]
    if not messages or messages[-1]["role"] != "user":
        raise _Bad("prompt", "messages that end with the user's turn")
    if "gold_tool_calls" not in truth:
        raise _Bad(f"{field}.gold_tool_calls", "a list of steps, calls or names, or null")
    extra = row.get("extra_info") if isinstance(row.get("extra_info"), dict) else {}
    return Task(id=str(row.get("uuid") or extra.get("uuid") or name), messages=messages, tools=tools,
                gold_calls=_gold(truth["gold_tool_calls"], f"{field}.gold_tool_calls"),
                subset=str(truth.get("subset_name") or ""))


def _dialogue(row: dict, name: str) -> Task:
    messages = _messages(row.get("messages"), "messages")
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise _Bad("messages", "a user turn")
    prompt, demonstration = messages[: users[-1] + 1], messages[users[-1] + 1:]
    answer = demonstration[-1] if demonstration else {}
    if answer.get("role") != "assistant" or answer.get("tool_calls") or not answer["content"].strip():
        raise _Bad("messages", "an assistant's reply, without calls, as the last message")
    return Task(id=str(row.get("uuid") or row.get("id") or name), messages=prompt,
                tools=_tools(row.get("tools"), "tools"), demonstration=demonstration, answer=answer["content"],
                gold_calls=[m["tool_calls"] for m in demonstration if m.get("tool_calls")],
                subset=str(row.get("subset_name") or ""))


def _saved_task(row: dict, name: str) -> Task:
    known = {f.name for f in fields(Task)}
    if unknown := sorted(set(row) - known):
        raise _Bad(unknown[0], f"only the keys {', '.join(sorted(known))}")
    for key, kind, expected in (("id", str, "text"), ("answer", str, "text"), ("subset", str, "text"),
                                ("facts", list, "a list of texts")):
        value = row.get(key, kind())
        if not isinstance(value, kind) or (kind is list and not all(isinstance(fact, str) for fact in value)):
            raise _Bad(key, expected, value)
    messages = _messages(row.get("messages"), "messages")
    if not messages or messages[-1]["role"] != "user":
        raise _Bad("messages", "messages that end with the user's turn")
    demonstration = _messages(row.get("demonstration", []), "demonstration")
    return Task(**{**row, "id": row.get("id") or name, "messages": messages, "tools": _tools(row.get("tools"), "tools"),
                   "gold_calls": _gold(row["gold_calls"], "gold_calls"), "demonstration": demonstration})


_READERS = {"toucan_rl": _toucan_rl, "toucan_sft": _dialogue, "openai": _dialogue, "task": _saved_task}


# --- the parts of a row ----------------------------------------------------------------------------------------------

def _load(value: Any, field: str) -> Any:
    """The value, decoded if it is JSON text (released files hold nested values so)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _Bad(field, f"JSON ({error})", value) from error


def _mapping(parent: dict, key: str, prefix: str = "") -> dict:
    value = _load(parent.get(key), prefix + key)
    if not isinstance(value, dict):
        raise _Bad(prefix + key, "a mapping", value)
    return value


def _tools(value: Any, field: str) -> list[dict]:
    """OpenAI function schemas; a bare function is wrapped, and null is no tools."""
    value = _load(value, field) if value is not None else []
    if not isinstance(value, list):
        raise _Bad(field, "a list of tool schemas, or its JSON text", value)
    tools = []
    for i, tool in enumerate(value):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise _Bad(f"{field}[{i}]", "a function schema with a name", tool)
        parameters = function.get("parameters")
        if not isinstance(parameters, dict | None):
            raise _Bad(f"{field}[{i}].parameters", "a JSON schema or null", parameters)
        function = {**function, "description": function.get("description") or "",
                    "parameters": parameters or {"type": "object", "properties": {}}}
        tools.append({"type": "function", "function": function})
    return tools


def _call(value: Any, field: str) -> dict:
    """{"name", "arguments"} of a call in any of its forms; missing or empty arguments are {}."""
    value = {"name": value, "arguments": {}} if isinstance(value, str) else value
    value = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _Bad(field, "a call with a name", value)
    arguments = _load(value.get("arguments") or {}, f"{field}.arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise _Bad(f"{field}.arguments", "an object or its JSON text", arguments)
    return {"name": value["name"], "arguments": arguments}


def _gold(value: Any, field: str) -> list[list[dict]]:
    """Gold calls nested by step; a flat list is one step, null is none, empty mappings and steps are dropped."""
    value = _load(value, field)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Bad(field, "a list of steps, calls or names, or null", value)
    nested = bool(value) and isinstance(value[0], list)
    if any(isinstance(item, list) != nested for item in value):
        raise _Bad(field, "steps (lists) only, or calls only", value)
    steps = [[_call(call, f"{field}[{i}][{j}]") for j, call in enumerate(step) if call != {}]
             for i, step in enumerate(value)] if nested else [[_call(c, f"{field}[{i}]") for i, c in enumerate(value)]]
    return [step for step in steps if step]


def _messages(value: Any, field: str) -> list[dict]:
    """Messages in the roles system, user, assistant and tool, each assistant step with all its calls.

    Toucan's tool_call messages join the assistant text before them (or make a turn of their own); every call must be
    answered by one tool message before the dialogue goes on.
    """
    value = _load(value, field)
    if not isinstance(value, list):
        raise _Bad(field, "a list of messages, or its JSON text", value)
    messages: list[dict] = []
    due, previous = 0, ""
    for i, message in enumerate(value):
        place = f"{field}[{i}]"
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            raise _Bad(place, "a message with a role", message)
        content, calls = message.get("content"), message.get("tool_calls") or []
        if not isinstance(calls, list) or (calls and role != "assistant"):
            raise _Bad(f"{place}.tool_calls", "a list, in an assistant's message", calls)
        if content is None and calls:
            content = ""
        if not isinstance(content, str):
            raise _Bad(f"{place}.content", "text", content)
        if due and role not in ("tool", "tool_response") and not role == previous == "tool_call":
            raise _Bad(place, f"the results of {due} calls before the next turn", role)
        if role == "tool_call":
            if previous not in ("assistant", "tool_call"):
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_literal_call(content, f"{place}.content"))
            due += 1
        elif role in ("tool", "tool_response"):
            if not due:
                raise _Bad(place, "a call that this result answers")
            messages.append({"role": "tool", "content": content})
            due -= 1
        elif role in ("system", "user", "assistant"):
            messages.append({"role": role, "content": content})
            if isinstance(message.get("reasoning_content"), str):
                messages[-1]["reasoning_content"] = message["reasoning_content"]
            if calls:
                messages[-1]["tool_calls"] = [_call(c, f"{place}.tool_calls[{k}]") for k, c in enumerate(calls)]
                due = len(calls)
        else:
            raise _Bad(f"{place}.role", "system, user, assistant, tool, tool_call or tool_response", role)
        previous = role
    if due:
        raise _Bad(field, f"the results of the last {due} calls")
    return messages


def _literal_call(text: str, field: str) -> dict:
    """A tool_call message's content: a Python dict literal whose arguments are JSON text; plain JSON is read too."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if len(text) > MAX_CALL_CHARS or deepest > MAX_CALL_DEPTH:
        raise _Bad(field, f"at most {MAX_CALL_CHARS} characters and {MAX_CALL_DEPTH} open brackets", text)
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise _Bad(field, "a Python literal {'name': ..., 'arguments': JSON text}", text) from error
    if not isinstance(value, dict):
        raise _Bad(field, "a Python literal {'name': ..., 'arguments': JSON text}", value)
    return _call(value, field)


def _without_tools(message: dict) -> dict:
    """A system message without its printed tool list, which the chat template prints itself."""
    text = message["content"]
    start = text.find("# Tools")
    end = text.rfind("</tools>")
    if message["role"] != "system" or start < 0 or text.find("<tools>", start) < 0 or end < start:
        return message
    rest = text[end + len("</tools>"):]
    example = rest.find("<args-json-object>")  # the call format's example, closed by the tag after it
    close = rest.find("</tool_call>", example)
    if rest.lstrip().startswith("For each function call") and 0 <= example < close:
        rest = rest[close + len("</tool_call>"):]
    return {**message, "content": "\n\n".join(part.strip() for part in (text[:start], rest) if part.strip())}


# --- files -----------------------------------------------------------------------------------------------------------

def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(path, None, "", 'pyarrow, to read parquet: pip install -e ".[parquet]"') from error
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield number, _unpad(row, False)
    except (OSError, ValueError) as error:
        raise DataError(path, None, "", f"a parquet file ({error})") from error


def _unpad(value: Any, in_list: bool) -> Any:
    """Without the nulls that parquet adds to structs in lists: all of them have the union of their keys."""
    if isinstance(value, dict):
        return {k: _unpad(v, in_list) for k, v in value.items() if v is not None or not in_list}
    return [_unpad(item, True) for item in value] if isinstance(value, list) else value
