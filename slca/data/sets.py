"""Public sets of tool calls as tasks: Seal-Tools, API-Bank and Glaive (ShareGPT).

Seal-Tools has queries and gold calls, but no results and no replies. The rules responder (`slca.simulator.answer`, seed
SEED) gives the results by the tool's response fields; a parameter that names an earlier result takes its value from
there. So facts, answer and demonstration are ours, and hold for a simulator of the same seed only. API-Bank and Glaive
have whole dialogues. Seal-Tools and API-Bank keep their tool schemas in a file of their own, the catalogue: a prompt
offers the tools it needs among others from there, drawn by a hash of the row's id, TOOLS_PER_TASK in all.
Left out: API-Bank's results as facts, and its output schemas, which its results do not follow.
"""
from __future__ import annotations

import decimal
import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slca import simulator  # as a module: it imports slca.data itself, and may be half loaded here
from slca.data.parts import chat_messages, dialogue_tasks, literal, tool_schemas
from slca.data.rows import BadRow, DataError, read_rows
from slca.data.task import Task

SEED = 0  # of the rules responder; a run's simulator.seed must be the same for the facts to hold
TOOLS_PER_TASK = 5
TYPES = {"str": {"type": "string"}, "int": {"type": "integer"}, "float": {"type": "number"},
         "bool": {"type": "boolean"}, "list": {"type": "array"},
         "list(str)": {"type": "array", "items": {"type": "string"}}}
LEADS = ("", "", "Here is what I found: ", "I have the result: ", "It is done: ")
_RESULT = re.compile(r"API_call_\d+")
SAID = ("the {} is {}", "the {} is {}", "{}: {}", "the value of {} is {}")


# --- the catalogue of tools ------------------------------------------------------------------------------------------

def catalogue(path: str | Path, kind: str) -> dict[str, dict]:
    """Tool schemas by name, from a file of Seal-Tools' or API-Bank's form. Raises DataError."""
    path = Path(path)
    if not path.is_file():
        raise DataError(path, None, "", f"the tool schemas of {kind} rows, beside them or given by --tools")
    tools = {}
    for number, row in read_rows(path):
        try:
            if isinstance(row, BadRow):
                raise row
            if not isinstance(row, dict):
                raise BadRow("", "an object", row)
            function = _seal_function(row) if kind == "seal_tools" else _api_bank_function(row)
        except BadRow as bad:
            raise DataError(path, number, *bad.args) from bad
        tools[function["name"]] = {"type": "function", "function": function}
    return tools


def _seal_function(row: dict) -> dict:
    parameters = _object(row.get("parameters"), "parameters", row.get("required", []))
    return {"name": _text(row, "api_name"), "description": _text(row, "api_description"), "parameters": parameters,
            "output_schema": _object(row.get("responses"), "responses")}


def _api_bank_function(row: dict) -> dict:
    """API-Bank does not say which parameters are required, and its calls leave some out: none is."""
    return {"name": _text(row, "name"), "description": _text(row, "description"),
            "parameters": _object(row.get("input_parameters"), "input_parameters", [])}


def _object(value: Any, field: str, required: Any = None) -> dict:
    """{name: {"type": str | int | ..., "description"}} as a JSON Schema; required None: all of them."""
    if not isinstance(value, dict):
        raise BadRow(field, "a mapping", value)
    required = list(value) if required is None else required
    if not isinstance(required, list) or not all(isinstance(name, str) and name in value for name in required):
        raise BadRow("required", f"a list of names of {field}", required)
    properties = {}
    for name, said in value.items():
        if not isinstance(said, dict) or not isinstance(said.get("type"), str) or said["type"] not in TYPES:
            raise BadRow(f"{field}.{name}", f"a type, one of {', '.join(TYPES)}", said)
        about = said.get("description")
        properties[name] = TYPES[said["type"]] | ({"description": about} if isinstance(about, str) else {})
    return {"type": "object", "properties": properties, "required": required}


def offered(name: str, wanted: list[str], tools: dict[str, dict], count: int = TOOLS_PER_TASK) -> list[dict]:
    """The wanted tools among others, `count` in all or as many as are wanted; choice and order are a hash of name."""
    rng, wanted = _rng(name), list(dict.fromkeys(wanted))
    drawn = rng.sample(list(tools), min(len(tools), count + len(wanted)))
    spare = [n for n in drawn if n not in wanted][:max(0, count - len(wanted))]
    names = wanted + spare
    rng.shuffle(names)
    return [tools[n] for n in names]


def _rng(name: str) -> random.Random:
    return random.Random(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest())


# --- Seal-Tools ------------------------------------------------------------------------------------------------------

def seal_tools(row: dict, name: str, decompose: bool, tools: Callable[[], dict[str, dict]]) -> list[Task]:
    """One task of {"id", "query", "calling": [{"api", "parameters", "responses"}]}.

    Calls that need no other's result are one step; a call that names one as API_call_k belongs to the step after it.
    Where a gold value is not of the declared type (a chained result, a vector for a number: 1.4 % of the rows), the
    type gives way in this task's schema, or no call could be right.
    """
    name, query, calls = str(row.get("id") or name), _text(row, "query"), row.get("calling")
    if not isinstance(calls, list) or not calls:
        raise BadRow("calling", "a list of calls", calls)
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise BadRow(f"calling[{i}]", "an object", call)
        for key, kind, expected in (("api", str, "text"), ("parameters", dict, "a mapping"), ("responses", list,
                                                                                              "a list of names")):
            if not isinstance(call.get(key), kind):
                raise BadRow(f"calling[{i}].{key}", expected, call.get(key))
    known, results = dict(tools()), {}  # results: API_call_k -> (step of its call, value)
    done: list[list[tuple[dict, str]]] = []  # by step: (call, observation)
    waiting = dict(enumerate(calls))
    while waiting:
        ready = [i for i, call in waiting.items() if _named(call["parameters"]) <= results.keys()]
        if not ready:
            i, call = next(iter(waiting.items()))
            raise BadRow(f"calling[{i}].parameters", "values, or results of other calls as API_call_k",
                         call["parameters"])
        for i in ready:
            call, place = waiting.pop(i), f"calling[{i}]"
            tool = _known(call["api"], known, f"{place}.api")
            step = max((results[r][0] + 1 for r in _named(call["parameters"])), default=0)
            arguments = {k: _filled(v, results) for k, v in call["parameters"].items()}
            gold, known[call["api"]] = _agreed(arguments, tool, f"{place}.parameters")
            observation = simulator.answer(gold, tool["function"], SEED)
            values = list(json.loads(observation).values())
            if len(call["responses"]) != len(values) or not all(isinstance(r, str) for r in call["responses"]):
                raise BadRow(f"{place}.responses", f"the names of {len(values)} results", call["responses"])
            results |= {r: (step, value) for r, value in zip(call["responses"], values, strict=True)}
            done += [[] for _ in range(step + 1 - len(done))]
            done[step].append((gold, observation))
    facts, reply = _reply(name, query, [pair for step in done for pair in step])
    demonstration = []
    for step in done:
        demonstration.append({"role": "assistant", "content": "", "tool_calls": [gold for gold, _ in step]})
        demonstration += [{"role": "tool", "content": observation} for _, observation in step]
    demonstration.append({"role": "assistant", "content": reply})
    kind = "dependent" if len(done) > 1 else "parallel" if len(calls) > 1 else "single"
    return [Task(name, [{"role": "user", "content": query}], offered(name, [c["api"] for c in calls], known),
                 [[gold for gold, _ in step] for step in done], facts, reply, kind, demonstration)]


def _named(parameters: dict) -> set[str]:
    """The results that a call's parameters name."""
    return set(_RESULT.findall(json.dumps(parameters)))


def _filled(value: Any, results: dict[str, tuple[int, Any]]) -> Any:
    """The value with named results in their place; a text that is only a name ("API_call_0 response") is the result."""
    if isinstance(value, dict):
        return {k: _filled(v, results) for k, v in value.items()}
    if isinstance(value, list):
        return [_filled(v, results) for v in value]
    if not isinstance(value, str):
        return value
    if alone := re.fullmatch(rf"({_RESULT.pattern})( response)?", value.strip()):
        return results[alone[1]][1]
    return _RESULT.sub(lambda found: leaves(results[found[0]][1])[0][1], value)


def _agreed(arguments: dict, tool: dict, field: str) -> tuple[dict, dict]:
    """(gold call in the declared types, the tool with the types left out that it contradicts)."""
    function = tool["function"]
    properties = dict(function["parameters"]["properties"])
    arguments = {k: coerced(v, properties.get(k, {}).get("type"), f"{field}.{k}") for k, v in arguments.items()}
    for key, value in arguments.items():
        if key in properties and simulator.violation(value, properties[key], key):
            properties[key] = {k: v for k, v in properties[key].items() if k not in ("type", "items")}
    tool = {**tool, "function": {**function, "parameters": {**function["parameters"], "properties": properties}}}
    return _accepted(function["name"], arguments, tool, field), tool


def leaves(value: Any, label: str = "") -> list[tuple[str, str]]:
    """(name, value as text) of every number, text and truth value in a JSON value; true is "true"."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, key)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item, label)]
    return [(label, value if isinstance(value, str) else json.dumps(value))]


def _reply(name: str, query: str, done: list[tuple[dict, str]]) -> tuple[list[str], str]:
    """(facts, a sentence a call that names every value of its result). The wording is a hash of name.

    Words stay in lower case: to a judge a capitalised word is a name, and a name that no result holds is made up.
    """
    rng, facts, sentences = _rng(f"{name}/reply"), [], []
    for call, observation in done:
        found, said = leaves(json.loads(observation)), rng.choice(SAID)
        facts += [value for _, value in found]
        parts = [said.format(_words(label), value) for label, value in found]
        listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        lead = rng.choice(LEADS)
        about = next((v for v in call["arguments"].values() if isinstance(v, str) and 0 < len(v) <= 60 and v in query),
                     "")
        if len(done) > 1 and about:  # two results of one kind are told apart by what was asked
            lead = f"For {about}, "
        sentence = lead + (listed or "the call went through")
        sentences.append(sentence[0].upper() + sentence[1:] + ".")
    return list(dict.fromkeys(facts)), " ".join(sentences)


def _words(label: str) -> str:
    """A field's name as words: maxTemp_today -> max temp today."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", label).strip().lower() or "result"


# --- API-Bank and Glaive ---------------------------------------------------------------------------------------------

def api_bank(row: dict, name: str, decompose: bool, tools: Callable[[], dict[str, dict]]) -> list[Task]:
    """{"file", "turns": [{"role": "User" | "AI", "text"} or {"role": "API", "api_name", "param_dict", "result"}]}.

    Each API turn is a step of its own: the next was made with its result in view. What the assistant says before a
    call is that message's content; several texts in a row are one message. A result is the JSON of its output.
    """
    turns = row.get("turns")
    if not isinstance(turns, list):
        raise BadRow("turns", "a list of turns", turns)
    messages, wanted = [], []
    for i, turn in enumerate(turns):
        place, role = f"turns[{i}]", turn.get("role") if isinstance(turn, dict) else None
        if role not in ("User", "AI", "API"):
            raise BadRow(f"{place}.role", "User, AI or API", role)
        open_text = bool(messages) and messages[-1]["role"] == "assistant"  # one that has not called yet
        if role == "API":
            result = turn.get("result")
            if not isinstance(turn.get("param_dict"), dict):
                raise BadRow(f"{place}.param_dict", "a mapping", turn.get("param_dict"))
            if not isinstance(result, dict) or "output" not in result:
                raise BadRow(f"{place}.result", "a mapping with output", result)
            tool = _known(_text(turn, "api_name", f"{place}."), tools(), f"{place}.api_name")
            call = _accepted(turn["api_name"], turn["param_dict"], tool, f"{place}.param_dict")
            if not open_text:
                messages.append({"role": "assistant", "content": ""})
            messages[-1]["tool_calls"] = [call]
            failed = result.get("exception")
            messages.append({"role": "tool", "content": simulator.error_text(str(failed)) if failed else
                             json.dumps(result["output"], ensure_ascii=False)})
            wanted.append(call["name"])
        elif role == "AI" and open_text:
            messages[-1]["content"] += "\n" + _text(turn, "text", f"{place}.")
        else:
            messages.append({"role": "user" if role == "User" else "assistant",
                             "content": _text(turn, "text", f"{place}.")})
    source = row.get("file") if isinstance(row.get("file"), str) else ""
    name = source.removesuffix(".jsonl") or name
    found = dialogue_tasks(messages, [], name, source.split("/")[0] if "/" in source else "", "turns", decompose)
    shown = offered(name, wanted, tools())
    for task in found:
        task.tools = shown
    return found


def glaive(row: dict, name: str, decompose: bool, tools: Callable[[], dict[str, dict]]) -> list[Task]:
    """{"conversations": [{"from": human | gpt | function_call | observation | system, "value"}], "tools"}."""
    roles = {"human": "user", "gpt": "assistant", "function_call": "tool_call", "observation": "tool",
             "system": "system"}
    turns, messages = row.get("conversations"), []
    if not isinstance(turns, list):
        raise BadRow("conversations", "a list of turns", turns)
    if isinstance(row.get("system"), str) and row["system"].strip():
        raise BadRow("system", "no system text beside the conversation")
    for i, turn in enumerate(turns):
        said = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(said, str) or said not in roles:
            raise BadRow(f"conversations[{i}].from", f"one of {', '.join(roles)}", said)
        messages.append({"role": roles[said], "content": turn.get("value")})
    return dialogue_tasks(chat_messages(messages, "conversations", "value"), tool_schemas(row.get("tools") or None,
                          "tools"), str(row.get("id") or name), "", "conversations", decompose)


# --- what they share -------------------------------------------------------------------------------------------------

def _text(parent: dict, key: str, prefix: str = "") -> str:
    value = parent.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(prefix + key, "text", value)
    return value


def _known(name: str, tools: dict[str, dict], field: str) -> dict:
    if name not in tools:
        raise BadRow(field, "the name of a tool of the catalogue", name)
    return tools[name]


def _accepted(name: str, arguments: dict, tool: dict, field: str) -> dict:
    """The gold call with its values in the declared types; BadRow where the simulator would refuse it."""
    properties = tool["function"]["parameters"]["properties"]
    arguments = {k: coerced(v, properties.get(k, {}).get("type"), f"{field}.{k}") for k, v in arguments.items()}
    call, error = simulator.check_call({"name": name, "arguments": arguments}, [tool])
    if error:
        raise BadRow(field, f"a call that its tool accepts ({error})")
    return call


def coerced(value: Any, kind: str | None, field: str = "") -> Any:
    """The value in the declared JSON type where nothing is lost by that ("40.7" -> 40.7), else the value as it is."""
    if kind == "string" and isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    if kind == "boolean":
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    if kind == "array" and value.lstrip().startswith("["):
        return literal(value, field, "a list")
    if kind in ("integer", "number"):
        try:
            number = json.loads(value)
            if isinstance(number, int | float) and not isinstance(number, bool):
                return number if decimal.Decimal(value.strip()) == decimal.Decimal(repr(number)) else value
        except (ValueError, RecursionError, decimal.InvalidOperation):
            pass
    return value
