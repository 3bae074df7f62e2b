"""The parts of a row: tool schemas, calls, gold calls, messages, and the samples that a dialogue is cut into.

Every function takes the part and the name of its field, gives it in the one form that `Task` holds, and raises BadRow
where it cannot. Nothing is guessed.
"""
from __future__ import annotations

import ast
import json
import re
from typing import Any

from slca.data.rows import BadRow, decoded
from slca.data.task import Task

MAX_CALL_CHARS, MAX_CALL_DEPTH = 200_000, 64  # a Python literal beyond these is refused before it is parsed
RESULT_ROLES = ("tool", "tool_response", "function")
ROLES = "system, user, assistant, tool, tool_call, tool_response or function"
_BRACKETS = re.compile(r"[][(){}]")
_DECLARED = re.compile(r"<\|im_system\|>tool_declare<\|im_middle\|>.*?(?:<\|im_end\|>|$)", re.DOTALL)


def mapping(parent: dict, key: str, prefix: str = "") -> dict:
    value = decoded(parent.get(key), prefix + key)
    if not isinstance(value, dict):
        raise BadRow(prefix + key, "a mapping", value)
    return value


def tool_schemas(value: Any, field: str) -> list[dict]:
    """OpenAI function schemas; a bare function is wrapped, and null is no tools."""
    value = decoded(value, field) if value is not None else []
    if not isinstance(value, list):
        raise BadRow(field, "a list of tool schemas, or its JSON text", value)
    tools = []
    for i, tool in enumerate(value):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow(f"{field}[{i}]", "a function schema with a name", tool)
        parameters = function.get("parameters")
        if not isinstance(parameters, dict | None):
            raise BadRow(f"{field}[{i}].parameters", "a JSON schema or null", parameters)
        function = {**function, "description": function.get("description") or "",
                    "parameters": parameters or {"type": "object", "properties": {}}}
        tools.append({"type": "function", "function": plain_json(function, f"{field}[{i}]")})
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadRow(field, "tools of different names", twice)
    return tools


def plain_json(value: Any, field: str) -> Any:
    """The value, if JSON can write it: no NaN, no infinity, no key that is no text (a Python literal may hold them)."""
    try:
        whole = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(field, f"what JSON can write ({error})") from error
    if not whole:
        raise BadRow(field, "what JSON can write (keys that are texts)")
    return value


def one_call(value: Any, field: str) -> dict:
    """{"name", "arguments"} of a call in any of its forms; missing or empty arguments are {}."""
    value = {"name": value, "arguments": {}} if isinstance(value, str) else value
    value = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise BadRow(field, "a call with a name", value)
    arguments = decoded(value.get("arguments") or {}, f"{field}.arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise BadRow(f"{field}.arguments", "an object or its JSON text", arguments)
    return {"name": value["name"], "arguments": plain_json(arguments, f"{field}.arguments")}


def gold_steps(value: Any, field: str) -> list[list[dict]]:
    """Gold calls nested by step; a flat list is one step, null is none, empty mappings and steps are dropped."""
    value = decoded(value, field)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(field, "a list of steps, calls or names, or null", value)
    nested = bool(value) and isinstance(value[0], list)
    if any(isinstance(item, list) != nested for item in value):
        raise BadRow(field, "steps (lists) only, or calls only", value)
    steps = [[one_call(call, f"{field}[{i}][{j}]") for j, call in enumerate(step) if call != {}]
             for i, step in enumerate(value)] if nested else [[one_call(c, f"{field}[{i}]")
                                                               for i, c in enumerate(value)]]
    return [step for step in steps if step]


def chat_messages(value: Any, field: str, text: str = "content") -> list[dict]:
    """Messages in the roles system, user, assistant and tool, each assistant step with all its calls.

    A call that is a message of its own (Toucan's role tool_call; `function_call` in an assistant's message) joins the
    assistant text before it, or makes a turn of its own. Every call must be answered by one result before the dialogue
    goes on; results stand in the order of the calls, found by their ids or names where these are given. text: what an
    error calls the content's field.
    """
    value = decoded(value, field)
    if not isinstance(value, list):
        raise BadRow(field, "a list of messages, or its JSON text", value)
    messages: list[dict] = []
    waiting: list[dict] = []  # calls of the last step: id, name, and the result once it has come
    previous = ""
    for i, message in enumerate(value):
        place = f"{field}[{i}]"
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            raise BadRow(place, "a message with a role", message)
        content, calls = message.get("content"), message.get("tool_calls") or []
        alone = message.get("function_call") or None
        if not isinstance(calls, list) or (calls and role != "assistant"):
            raise BadRow(f"{place}.tool_calls", "a list, in an assistant's message", calls)
        if alone is not None and (calls or role != "assistant"):
            raise BadRow(f"{place}.function_call", "one in an assistant's message without tool_calls", alone)
        if content is None and (calls or alone):
            content = ""
        if not isinstance(content, str):
            raise BadRow(f"{place}.{text}", "text", content)
        role = "function_call" if alone is not None else role
        calling = role in ("tool_call", "function_call")
        if waiting and role not in RESULT_ROLES and not (calling and role == previous):
            due = sum("result" not in call for call in waiting)
            raise BadRow(place, f"the results of {due} calls before the next turn", role)
        if calling:
            if previous not in ("assistant", role):
                messages.append({"role": "assistant", "content": ""})
            if alone is None:
                call = _literal_call(content, f"{place}.{text}")
            else:
                call = one_call(alone, f"{place}.function_call")
                messages[-1]["content"] = "\n".join(part for part in (messages[-1]["content"], content) if part)
            messages[-1].setdefault("tool_calls", []).append(call)
            waiting.append({"name": call["name"]})
        elif role in RESULT_ROLES:
            _answered(waiting, message, place)["result"] = content
            if all("result" in call for call in waiting):
                messages += [{"role": "tool", "content": call["result"]} for call in waiting]
                waiting = []
        elif role in ("system", "user", "assistant"):
            messages.append({"role": role, "content": content})
            if calls:
                made = [one_call(c, f"{place}.tool_calls[{k}]") for k, c in enumerate(calls)]
                messages[-1]["tool_calls"] = made
                waiting = [{"name": c["name"], "id": call.get("id") if isinstance(call, dict) else None}
                           for c, call in zip(made, calls, strict=True)]
        else:
            raise BadRow(f"{place}.role", ROLES, role)
        if isinstance(message.get("reasoning_content"), str) and role not in RESULT_ROLES:
            thoughts = messages[-1].get("reasoning_content"), message["reasoning_content"]
            messages[-1]["reasoning_content"] = "\n".join(filter(None, thoughts))
        previous = role
    if due := sum("result" not in call for call in waiting):
        raise BadRow(field, f"the results of the last {due} calls")
    return messages


def _answered(waiting: list[dict], message: dict, place: str) -> dict:
    """Which of the calls a result belongs to: by its tool_call_id, else its name if a call has it, else their order."""
    left = [call for call in waiting if "result" not in call]
    if not left:
        raise BadRow(place, "a call that this result answers")
    for key, own in (("id", "tool_call_id"), ("name", "name")):
        wanted = message.get(own)
        if isinstance(wanted, str) and wanted and all(call.get(key) for call in left):
            found = next((call for call in left if call[key] == wanted), None)
            if found is not None:
                return found
            if key == "id":
                raise BadRow(f"{place}.{own}", "the id of a call that waits for its result", wanted)
    return left[0]


def dialogue_tasks(messages: list[dict], tools: list[dict], name: str, subset: str, field: str,
                   decompose: bool = False, first_turn: int = 1) -> list[Task]:
    """The tasks of a dialogue: prompt up to a user turn, demonstration up to the next, and its calls as gold calls.

    Without decompose one task: the last user turn, whose reply must be the last message. With it one for each user turn
    that ends in an assistant's reply, from number first_turn (from 1) on; a dialogue of one user turn gives that turn.
    Their ids are name-turnK.
    """
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise BadRow(field, "a user turn")
    turns = list(zip(users, [*users[1:], len(messages)], strict=True))
    tasks = []
    for number, (at, end) in enumerate(turns, 1):
        if number < len(turns) and (not decompose or number < first_turn):
            continue
        demonstration = messages[at + 1:end]
        reply = demonstration[-1] if demonstration else {}
        if reply.get("role") != "assistant" or reply.get("tool_calls") or not reply["content"].strip():
            continue
        tasks.append(Task(f"{name}-turn{number}" if decompose and len(turns) > 1 else name, messages[:at + 1], tools,
                          gold_calls=[m["tool_calls"] for m in demonstration if m.get("tool_calls")],
                          answer=reply["content"], subset=subset, demonstration=demonstration))
    if not tasks:
        raise BadRow(field, "an assistant's reply, without calls, to a user turn" if decompose else
                     "an assistant's reply, without calls, as the last message")
    return tasks


def literal(text: str, field: str, expected: str) -> Any:
    """JSON or a Python literal. Deep and huge text is refused before the parser sees it."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(text[:MAX_CALL_CHARS]):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    if len(text) > MAX_CALL_CHARS or deepest > MAX_CALL_DEPTH:
        raise BadRow(field, f"at most {MAX_CALL_CHARS} characters and {MAX_CALL_DEPTH} open brackets", text)
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise BadRow(field, expected, text) from error


def _literal_call(text: str, field: str) -> dict:
    """A tool_call message's content: a Python dict literal whose arguments are JSON text; plain JSON is read too."""
    expected = "JSON or a Python literal {'name': ..., 'arguments': an object or its JSON text}"
    value = literal(text, field, expected)
    if not isinstance(value, dict):
        raise BadRow(field, expected, value)
    return one_call(value, field)


def without_tools(message: dict) -> dict:
    """A system message without its printed tool list, which the chat template prints itself."""
    if message["role"] != "system":
        return message
    text = _DECLARED.sub("", message["content"])
    message = {**message, "content": text.strip()} if text != message["content"] else message
    start = text.find("# Tools")
    end = text.rfind("</tools>")
    if start < 0 or text.find("<tools>", start) < 0 or end < start:
        return message
    rest = text[end + len("</tools>"):]
    example = rest.find("<args-json-object>")  # the call format's example, closed by the tag after it
    close = rest.find("</tool_call>", example)
    if rest.lstrip().startswith("For each function call") and 0 <= example < close:
        rest = rest[close + len("</tool_call>"):]
    return {**message, "content": "\n\n".join(part.strip() for part in (text[:start], rest) if part.strip())}
