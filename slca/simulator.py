"""SGLS, the schema-guided simulator that answers tool calls in process: schema check first, then a responder.

The check needs no model: an unknown tool, arguments that are no JSON object, a missing required argument, a wrong type
or a value outside an enum become an error observation that says which. A valid call goes to the responder; here the
rules: the embedded world's own tools, and for any other tool values drawn from a hash of (tool, canonical arguments,
seed) within its output schema, or a sentence with such values where it has none. Stateless: the same call gives the
same answer, whatever the order of its arguments. `use_schema=False` is the paper's ablation without SGLS: no check,
and answers that follow no schema.
Any other responder (`responders.py`: a frozen language model, your own functions; or a callable) is not trusted to
answer: what it raises, a hang and a result that is no text become an error observation (`is_failure`).
Left out: JSON Schema beyond what tools use ($ref, patterns, number ranges).
"""
from __future__ import annotations

import json
import math
import queue
import random
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from slca.data.families import BY_NAME, Family, call_rng, draw

MAX_DEPTH = 32  # of schemas and arguments; deeper is reported, not followed
MAX_NUMBER = 1e100  # beyond it (and NaN) a number is refused: Python cannot print integers of thousands of digits
MAX_HUNG = 8  # calls of a responder that may hang at once; until one comes back, further calls fail without a wait
FAILED = "no answer from the tool"
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
    """Answers calls. seed: of the rules.

    responder: "rules"; a callable (call {"name", "arguments"}, tools) -> text, which runs in a thread of its own,
    timeout_s seconds a call at most; or an object whose answer_all takes [(call, function schema or None)] and gives a
    text or None for each, and minds its own time (`responders.LLMResponder`). ValueError for anything else.
    """

    def __init__(self, responder: str | Callable[[dict, Sequence[dict]], str] | object = "rules", seed: int = 0,
                 use_schema: bool = True, timeout_s: float = 30.0):
        if responder != "rules" and not callable(responder) and not hasattr(responder, "answer_all"):
            raise ValueError(f"responder {responder!r} is neither 'rules' nor a callable")
        self.responder, self.seed, self.use_schema, self.timeout_s = responder, seed, use_schema, timeout_s
        self.hung: list[threading.Thread] = []

    def respond(self, call: object, tools: Sequence[dict]) -> str:
        """Observation for one call {"name", "arguments" (object or JSON text)}.

        Never raises, whatever the model wrote and whatever the responder does.
        """
        return self.respond_all([(call, tools)])[0]

    def respond_all(self, requests: Sequence[tuple[object, Sequence[dict]]]) -> list[str]:
        """The same for many (call, tools); a frozen model is asked for all of them at once."""
        found: list[str] = []
        batch: dict[int, tuple[dict, dict | None]] = {}
        for i, (call, tools) in enumerate(requests):
            parsed, error = check_call(call, tools) if self.use_schema else (loose_call(call), "")
            if not error and hasattr(self.responder, "answer_all"):
                batch[i] = parsed, find_tool(parsed["name"], tools) if self.use_schema else None
            found.append(error_text(error) if error else "" if i in batch else self._answer(parsed, tools))
        if batch:
            try:
                texts = list(self.responder.answer_all(list(batch.values())))
            except Exception as error:
                warnings.warn(f"responder failed: {type(error).__name__}", stacklevel=2)
                texts = []
            texts += [None] * (len(batch) - len(texts))
            for i, text in zip(batch, texts, strict=False):
                good = isinstance(text, str) and text and not text.isspace()
                found[i] = text if good else error_text(f"{FAILED}: no text")
        return found

    def _answer(self, call: dict, tools: Sequence[dict]) -> str:
        if callable(self.responder):
            return self._ask(call, tools)
        if not self.use_schema:
            return free_answer(call, self.seed)
        return answer(call, find_tool(call["name"], tools), self.seed)

    def _ask(self, call: dict, tools: Sequence[dict]) -> str:
        self.hung = [thread for thread in self.hung if thread.is_alive()]
        if len(self.hung) >= MAX_HUNG:  # or a dead endpoint would cost timeout_s for each call of each rollout
            return error_text(f"{FAILED}: earlier calls still hang")
        text, error = in_time(lambda: self.responder(call, tools), self.timeout_s, "responder", self.hung)
        if not error and not isinstance(text, str):
            error = f"{type(text).__name__} instead of text"
        if not error and (not text or text.isspace()):
            error = "an empty text"
        return error_text(f"{FAILED}: {error}") if error else text


def in_time(work: Callable[[], object], timeout_s: float, what: str, hung: list | None = None) -> tuple[object, str]:
    """work() in a daemon thread -> (its result, "") or (None, why there is none): it raised, or timeout_s ran out.

    A late result is dropped; the thread is added to `hung` and does not keep the program from ending. What holds the
    interpreter's lock (a regular expression that backtracks without end) cannot be bounded like this.
    """
    done: queue.SimpleQueue = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), "", ""))
        except BaseException as error:  # SystemExit too: in a thread nobody would see it
            at = error.__traceback__
            while at.tb_next:
                at = at.tb_next
            # not the message: it may quote what a model wrote, or hold a key
            place = f"{Path(at.tb_frame.f_code.co_filename).name}, line {at.tb_lineno}"
            done.put((None, type(error).__name__, place))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        result, error, place = done.get(timeout=timeout_s)
    except queue.Empty:
        if hung is not None:
            hung.append(thread)
        result, error, place = None, f"none within {timeout_s:g} s", "still running"
    if error:
        warnings.warn(f"{what} failed: {error} ({place})", stacklevel=3)
    return result, error


def is_error(observation: str) -> bool:
    """Whether an observation of ours reports an error."""
    return observation.startswith('{"error": ')


def is_failure(observation: str) -> bool:
    """Whether it reports that the responder gave no answer, which is not the fault of the call."""
    return observation.startswith(f'{{"error": "{FAILED}')


def error_text(message: str) -> str:
    return json.dumps({"error": message}, ensure_ascii=False)


def functions(tools: Sequence[dict] | None) -> list[dict]:
    """The function schemas of a tool list, with or without their OpenAI wrapping; what is no mapping is left out."""
    found = (t.get("function", t) for t in tools or () if isinstance(t, dict))
    return [f for f in found if isinstance(f, dict)]


def find_tool(name: str, tools: Sequence[dict] | None) -> dict | None:
    """The function schema of that name, or None."""
    return next((f for f in functions(tools) if f.get("name") == name), None)


def plain(value: object, depth: int = 0) -> object:
    """A JSON value in its one form: 2.0 is 2, as JSON has it. ValueError for what JSON or Python cannot write."""
    if depth > MAX_DEPTH:
        raise ValueError("are nested too deep")
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v, depth + 1) for v in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= MAX_NUMBER:
            raise ValueError("hold a number out of range")
        return int(value) if value == int(value) else value
    if value is None or isinstance(value, str | bool):
        return value
    raise ValueError("are not valid JSON")


def check_call(call: object, tools: Sequence[dict]) -> tuple[dict, str]:
    """-> (call with its arguments as an object, "") or ({}, what is wrong with it)."""
    if not isinstance(call, dict):
        return {}, "a call must be a JSON object with a name and arguments"
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return {}, "a call needs a name"
    function = find_tool(name, tools)
    if function is None:
        known = ", ".join(str(f.get("name")) for f in functions(tools))
        return {}, f"tool {name[:80]!r} not found; the tools are: {known}"
    arguments = next((a for a in (call.get("arguments"), call.get("parameters")) if a), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}, f"the arguments of {name} are not valid JSON"
    if not isinstance(arguments, dict):
        return {}, f"the arguments of {name} must be a JSON object"
    try:
        arguments = plain(arguments)
    except ValueError as error:
        return {}, f"the arguments of {name} {error}"
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
    kinds = known_types(schema)
    if kinds and not any(TYPES[k](value) for k in kinds):
        return f"{where} must be of type {' or '.join(kinds)}, not {json_type(value)}"
    allowed = allowed_values(schema)
    if allowed is not None and not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
        return f"{where} must be one of {json.dumps(allowed, ensure_ascii=False)}"
    if isinstance(value, dict):
        properties = schema.get("properties") if isinstance(schema.get("properties"), dict) else {}
        required = schema.get("required") if isinstance(schema.get("required"), list) else []
        missing = [f"{path}.{name}" if path else name for name in required
                   if isinstance(name, str) and name not in value]
        if missing:
            return f"missing required argument{'s' * (len(missing) > 1)}: {', '.join(missing)}"
        if schema.get("additionalProperties") is False:
            extra = [name for name in value if name not in properties]
            if extra:
                return f"unknown argument '{f'{path}.' if path else ''}{extra[0][:80]}'"
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


def known_types(schema: dict) -> list[str]:
    """The JSON types a schema allows; [] where it names none that is known, so that any value will do."""
    kinds = schema.get("type")
    return [k for k in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(k, str) and k in TYPES]


def allowed_values(schema: dict) -> list | None:
    """The members of an enum, or a const alone; None where any value is allowed."""
    return [schema["const"]] if "const" in schema else schema["enum"] if isinstance(schema.get("enum"), list) else None


def json_type(value: object) -> str:
    return next(name for name in ("null", "boolean", "integer", "number", "string", "array", "object")
                if TYPES[name](value))


def output_schema(function: dict) -> dict | None:
    """The schema of a tool's result, where the record has one (`output_schema`, or MCP's `outputSchema`)."""
    schema = function.get("output_schema") or function.get("outputSchema")
    return schema if isinstance(schema, dict) else None


def world_call(call: dict, function: dict) -> tuple[Family, dict, list] | None:
    """(family, call, its values in order) where the tool is the embedded world's; None if it only shares a name.

    Arguments that the schema does not have are dropped: they passed no check.
    """
    family = BY_NAME.get(call["name"])
    if family is None or not family.fits(function):
        return None
    own = {name: call["arguments"][name] for name in function["parameters"]["properties"]}
    return family, {"name": call["name"], "arguments": own}, list(own.values())


def answer(call: dict, function: dict, seed: int) -> str:
    """The rules responder: observation of a call that passed the check."""
    if found := world_call(call, function):
        family, own, values = found
        return family.observation(own, values, seed)
    schema = output_schema(function)
    if schema is None:
        return free_answer(call, seed)
    return json.dumps(instance(schema, call_rng(call, seed)), ensure_ascii=False)


def instance(schema: dict, rng: random.Random, depth: int = 0) -> object:
    """A value drawn from rng that has the schema's types, required names, enums and whole-number bounds.

    Of anyOf and oneOf it takes the first. Exclusive bounds, multiples, lengths and allOf are not followed.
    """
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key] and isinstance(schema[key][0], dict) and depth < MAX_DEPTH:
            rest = {k: v for k, v in schema.items() if k != key}
            return instance(rest | schema[key][0], rng, depth + 1)
    if allowed := allowed_values(schema):
        return rng.choice(allowed)
    properties = schema.get("properties") if isinstance(schema.get("properties"), dict) else {}
    required = schema.get("required") if isinstance(schema.get("required"), list) else []
    kind = next(iter(known_types(schema)), "object" if "properties" in schema else "string")
    if kind == "object":
        parts = {k: {} for k in required if isinstance(k, str)} | properties
        return {k: instance(s if isinstance(s, dict) else {}, rng, depth + 1) for k, s in parts.items()
                if depth < MAX_DEPTH}
    if kind == "array":
        items = schema.get("items") if isinstance(schema.get("items"), dict) else {}
        count = rng.randint(1, 3) if depth < 4 else 1  # one each further down, or the size would be 3 ** depth
        return [instance(items, rng, depth + 1) for _ in range(count) if depth < MAX_DEPTH]
    if kind in ("integer", "number"):
        low, high = (b if isinstance(b, int | float) and abs(b) <= MAX_NUMBER else None
                     for b in (schema.get("minimum"), schema.get("maximum")))
        low = math.ceil((2 if high is None else min(2, high)) if low is None else low)
        return rng.randint(low, max(low, 999 if high is None else math.floor(high)))
    return {"boolean": lambda: rng.random() < 0.5, "null": lambda: None}.get(kind, lambda: draw(rng, "word"))()


def loose_call(call: object) -> dict:
    """Any object as a call, for the condition without schema."""
    raw = call if isinstance(call, dict) else {}
    try:
        arguments = plain(raw.get("arguments"))
    except ValueError:
        arguments = {}
    name = raw.get("name")
    return {"name": name if isinstance(name, str) and name else "tool",
            "arguments": arguments if isinstance(arguments, dict) else {}}


def free_facts(call: dict, seed: int) -> tuple[str, int]:
    """Two facts fixed by the call: a name and a number."""
    rng = call_rng(call, seed)
    return draw(rng, "word"), draw(rng, "number")


def free_answer(call: dict, seed: int) -> str:
    """A sentence that carries the two facts; it follows no schema."""
    word, number = free_facts(call, seed)
    return f"{call['name']} found {word} with the value {number}."


def names(text: str, value: str) -> bool:
    """Does the text name the value, as a whole word or number (12 is not in 123 or 12.5), whatever its case?"""
    return re.search(rf"(?<!\w)(?<!\d\.){re.escape(value)}(?!\w|\.\d)", text, re.IGNORECASE) is not None


def phi_check(call: dict, tools: Sequence[dict], observation: str, seed: int = 0) -> bool:
    """Does an observation align with the true tool, at the level of its mode (paper Figure 7)?

    deterministic: the value is identical; query: the output schema is met; open: the facts are there, whatever the
    phrasing. A tool that is neither in the world nor has an output schema is checked for its facts.
    """
    parsed, error = check_call(call, tools)
    if error:
        return is_error(observation)
    function = find_tool(parsed["name"], tools)
    family, own, values = world_call(parsed, function) or (None, parsed, [])
    schema = family.output_schema() if family else output_schema(function)
    if schema is None or family and family.mode == "open":
        facts = family.answer(own, values, seed).values() if family else free_facts(parsed, seed)
        return all(names(observation, str(fact)) for fact in facts)
    try:
        value = json.loads(observation)
    except (ValueError, RecursionError):
        return False
    if family and family.mode == "deterministic":
        return value == family.answer(own, values, seed)
    return not violation(value, schema, "")
