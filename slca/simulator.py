"""SGLS, the schema-guided simulator that answers tool calls in process: schema check first, then a responder.

The check needs no model: an unknown tool, arguments that are no JSON object, a missing required argument, a wrong type
or a value outside an enum become an error observation that says which. A valid call goes to the responder; here the
rules: the embedded world's own tools, and for any other tool values drawn from a hash of (tool, canonical arguments,
seed) within its output schema, or a sentence with such values where it has none. Stateless: the same call gives the
same answer. `use_schema=False` is the paper's ablation without SGLS: no check, and answers that follow no schema.
Left out: a language model as responder, and JSON Schema beyond what tools use ($ref, patterns, number ranges).
"""
from __future__ import annotations

import json
import random
from collections.abc import Sequence

from slca.data.families import BY_NAME, call_rng, draw

MAX_DEPTH = 32  # of schemas and arguments; deeper is reported, not followed
TYPES = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool) or isinstance(v, float) and v.is_integer(),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
    "null": lambda v: v is None,
}


class Simulator:
    """Answers calls. responder: "rules". seed: of the drawn values."""

    def __init__(self, responder: str = "rules", seed: int = 0, use_schema: bool = True):
        if responder != "rules":
            raise ValueError(f"responder {responder!r}: only 'rules' is available")
        self.seed, self.use_schema = seed, use_schema

    def respond(self, call: object, tools: Sequence[dict]) -> str:
        """Observation for one call {"name", "arguments" (object or JSON text)}. Never raises on a model's output."""
        if not self.use_schema:
            return free_answer(loose_call(call), self.seed)
        parsed, error = check_call(call, tools)
        return error_text(error) if error else answer(parsed, find_tool(parsed["name"], tools), self.seed)


def is_error(observation: str) -> bool:
    """Whether an observation of ours reports an error."""
    return observation.startswith('{"error": ')


def error_text(message: str) -> str:
    return json.dumps({"error": message}, ensure_ascii=False)


def find_tool(name: str, tools: Sequence[dict]) -> dict | None:
    """The function schema of that name, or None."""
    functions = (t.get("function", t) for t in tools if isinstance(t, dict))
    return next((f for f in functions if isinstance(f, dict) and f.get("name") == name), None)


def check_call(call: object, tools: Sequence[dict]) -> tuple[dict, str]:
    """-> (call with its arguments as an object, "") or ({}, what is wrong with it)."""
    if not isinstance(call, dict):
        return {}, "a call must be a JSON object with a name and arguments"
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return {}, "a call needs a name"
    function = find_tool(name, tools)
    if function is None:
        known = ", ".join(str(t.get("function", t).get("name")) for t in tools if isinstance(t, dict))
        return {}, f"tool {name[:80]!r} not found; the tools are: {known}"
    arguments = next((a for a in (call.get("arguments"), call.get("parameters")) if a), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}, f"the arguments of {name} are not valid JSON"
    if not isinstance(arguments, dict):
        return {}, f"the arguments of {name} must be a JSON object"
    schema = function.get("parameters")
    error = violation(arguments, schema if isinstance(schema, dict) else {}, "")
    return ({}, f"{name}: {error}") if error else ({"name": name, "arguments": arguments}, "")


def violation(value: object, schema: dict, path: str, depth: int = 0) -> str:
    """The first thing in value that the JSON Schema forbids, with its path, or ""."""
    where = f"argument '{path}'" if path else "the arguments"
    if depth > MAX_DEPTH:
        return f"{where}: nested too deep"
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            found = [violation(value, s, path, depth + 1) for s in schema[key] if isinstance(s, dict)]
            if found and all(found):
                return found[0]
    kinds = schema.get("type", [])
    kinds = [k for k in ([kinds] if isinstance(kinds, str) else kinds) if k in TYPES]
    if kinds and not any(TYPES[k](value) for k in kinds):
        return f"{where} must be of type {' or '.join(kinds)}, not {json_type(value)}"
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return f"{where} must be one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    if isinstance(value, dict):
        properties = schema.get("properties") if isinstance(schema.get("properties"), dict) else {}
        required = schema.get("required") if isinstance(schema.get("required"), list) else []
        missing = [str(name) for name in required if name not in value]
        if missing:
            return f"missing required argument{'s' * (len(missing) > 1)}: {', '.join(missing)}"
        if schema.get("additionalProperties") is False:
            extra = [name for name in value if name not in properties]
            if extra:
                return f"unknown argument '{extra[0][:80]}'"
        for name, item in value.items():
            if isinstance(properties.get(name), dict):
                error = violation(item, properties[name], f"{path}.{name}" if path else name, depth + 1)
                if error:
                    return error
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for i, item in enumerate(value):
            error = violation(item, schema["items"], f"{path}[{i}]", depth + 1)
            if error:
                return error
    return ""


def json_type(value: object) -> str:
    return next(name for name in ("null", "boolean", "integer", "number", "string", "array", "object")
                if TYPES[name](value))


def output_schema(function: dict) -> dict | None:
    """The schema of a tool's result, where the record has one (`output_schema`, or MCP's `outputSchema`)."""
    schema = function.get("output_schema") or function.get("outputSchema")
    return schema if isinstance(schema, dict) else None


def answer(call: dict, function: dict, seed: int) -> str:
    """The rules responder: observation of a call that passed the check."""
    family = BY_NAME.get(call["name"])
    if family is not None and family.arguments(call) is not None:
        return family.observation(call, seed)
    schema = output_schema(function)
    if schema is None:
        return free_answer(call, seed)
    return json.dumps(instance(schema, call_rng(call, seed)), ensure_ascii=False)


def instance(schema: dict, rng: random.Random, depth: int = 0) -> object:
    """A value that satisfies the schema, drawn from rng."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key] and isinstance(schema[key][0], dict):
            return instance(schema[key][0], rng, depth + 1)
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return rng.choice(schema["enum"])
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties = schema.get("properties") if isinstance(schema.get("properties"), dict) else {}
        return {k: instance(s if isinstance(s, dict) else {}, rng, depth + 1) for k, s in properties.items()
                if depth < MAX_DEPTH}
    if kind == "array":
        items = schema.get("items") if isinstance(schema.get("items"), dict) else {}
        return [instance(items, rng, depth + 1) for _ in range(rng.randint(1, 3)) if depth < MAX_DEPTH]
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", 2), schema.get("maximum", 999)
        return rng.randint(int(low), max(int(low), int(high)))
    return {"boolean": lambda: rng.random() < 0.5, "null": lambda: None}.get(kind, lambda: draw(rng, "word"))()


def loose_call(call: object) -> dict:
    """Any object as a call, for the condition without schema."""
    raw = call if isinstance(call, dict) else {}
    arguments = raw.get("arguments")
    return {"name": str(raw.get("name") or "tool"), "arguments": arguments if isinstance(arguments, dict) else {}}


def free_answer(call: dict, seed: int) -> str:
    """A sentence that carries two facts fixed by the call; it follows no schema."""
    rng = call_rng(call, seed)
    return f"{call['name']} found {draw(rng, 'word')} with the value {draw(rng, 'number')}."


def phi_check(call: dict, tools: Sequence[dict], observation: str, seed: int = 0) -> bool:
    """Does an observation align with the true tool, at the level of its mode (paper Figure 7)?

    deterministic: the value is identical; query: the output schema is met; open: the facts are there, whatever the
    phrasing. A tool that is neither in the world nor has an output schema is checked for its facts.
    """
    parsed, error = check_call(call, tools)
    if error:
        return is_error(observation)
    family, function = BY_NAME.get(parsed["name"]), find_tool(parsed["name"], tools)
    schema = family.output_schema() if family else output_schema(function)
    if (family is None and schema is None) or (family and family.mode == "open"):
        facts = (list(family.answer(parsed, seed).values()) if family
                 else free_answer(parsed, seed).rstrip(".").split()[-1:])
        return all(str(fact) in observation for fact in facts)
    try:
        value = json.loads(observation)
    except (ValueError, RecursionError):
        return False
    if family and family.mode == "deterministic":
        return value == family.answer(parsed, seed)
    return not violation(value, schema, "")
