"""BFCL V3's files behind one door: its rows, the tools as a model is shown them, its tool objects, its checkers.

The rows, the sources of the tools and the rules of right and wrong are those of the package bfcl-eval 2025.6.16, found
installed or in a folder. Its dependencies are not needed, mpmath aside. Its executor is not used: it builds Python text
from what a model wrote and evaluates it. Here a call is a name and arguments, looked up among the public methods of the
item's tool objects, and the benchmark's multi-turn checker runs with that in the executor's place. Gold calls are
Python text too; they are parsed, not evaluated.

Left out: the benchmark's own ways to reach a model, its prompts for models without native calls, and its leaderboard.
"""
from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

PACKAGE = "bfcl_eval"
INSTALL = "pip install --no-deps bfcl-eval==2025.6.16 && pip install mpmath"
DIGEST = "d896005dbb8d09f304a8f5dafb3025677d14757bab98f49ae1d3a48d63ae2544"
NON_LIVE = {"simple": 400, "multiple": 200, "parallel": 200, "parallel_multiple": 200, "java": 100, "javascript": 50}
LIVE = {"live_simple": 258, "live_multiple": 1053, "live_parallel": 16, "live_parallel_multiple": 24}
MULTI_TURN = {"multi_turn_base": 200, "multi_turn_miss_func": 200, "multi_turn_miss_param": 200}
PAPER = NON_LIVE | LIVE | MULTI_TURN  # items of each; 3,101 together
OTHERS = {"irrelevance": 240, "live_irrelevance": 882, "live_relevance": 18, "multi_turn_long_context": 200}
MODEL = "slca-FC"  # "FC" makes the benchmark's own readers expect calls, not prose
LANGUAGE = {"java": "Java", "javascript": "JavaScript"}
HINT = {"Java": "Java 8 SDK", "JavaScript": "JavaScript", "Python": "Python 3"}
JSON_TYPES = {"integer": "integer", "number": "number", "float": "number", "string": "string", "boolean": "boolean",
              "bool": "boolean", "array": "array", "list": "array", "tuple": "array", "dict": "object",
              "object": "object"}  # the rest, "any" among them, is text: the benchmark's rule
LARGEST = {"precision": 10**4, "exponent": 10**4, "decimal_places": 10**4, "base": 10**12}
LONGEST_BLANK = re.compile(r"\s{50}")  # the converter of Java and JavaScript values takes hours over more
ONE_AT_A_TIME = threading.RLock()  # some tool objects use state of their modules, such as mpmath's precision


def language_of(subset: str) -> str:
    return LANGUAGE.get(subset, "Python")


def is_multi_turn(subset: str) -> bool:
    return subset.startswith("multi_turn")


# --- tools as a model is shown them ----------------------------------------------------------------------------------

def shown_tools(functions: Sequence[dict], language: str) -> list[dict]:
    """Function descriptions of the benchmark -> tools in the form of `slca.chat`, their parameters a JSON Schema.

    Dots in names become underscores. The texts added to descriptions are the benchmark's own (its
    `func_doc_language_specific_pre_processing` and `convert_to_tool`). Java and JavaScript take every argument as text
    in the syntax of that language, so all their parameters are strings; what they stand for is in the description.
    """
    tools = []
    for function in deepcopy(list(functions)):
        function["name"] = function["name"].replace(".", "_")
        function["description"] += f" Note that the provided function is in {HINT[language]} syntax."
        parameters = function["parameters"]
        if language != "Python":
            parameters["properties"] = {k: _source_text(v, language) for k, v in parameters["properties"].items()}
        function["parameters"] = _json_schema({**parameters, "type": "dict"})
        if "response" in function:  # what the tools of multi-turn items return
            function["response"] = _json_schema(function["response"])
        tools.append({"type": "function", "function": function})
    return tools


def _source_text(parameter: dict, language: str) -> dict:
    """A parameter of Java or JavaScript -> one of type string that says what the text is to be."""
    kind, shown = parameter["type"], {k: v for k, v in parameter.items() if k != "items"}
    if kind == "any":
        note = f" This parameter can be of any type of {language} object in string representation."
    else:
        note = f" This is {language} {kind} type parameter in string representation."
    if "items" in parameter:
        note += f" The list elements are of type {parameter['items']['type']}; they are not in string representation."
    if kind == "dict" and "properties" in shown:
        note += (" The dictionary entries have the following schema; they are not in string representation. "
                 + json.dumps(shown.pop("properties")))
    return shown | {"type": "string", "description": shown.get("description", "") + note}


def _json_schema(node: dict, in_properties: bool = False) -> dict:
    """The same with JSON Schema's type names, at every depth."""
    schema = dict(node)
    schema["type"] = JSON_TYPES.get(node.get("type"), "string")
    if node.get("type") == "float" and in_properties:
        schema |= {"format": "float", "description": node.get("description", "") + " This is a float type value."}
    if isinstance(node.get("properties"), dict):
        schema["properties"] = {k: _json_schema(v, True) for k, v in node["properties"].items()}
    if isinstance(node.get("items"), dict):
        schema["items"] = _json_schema(node["items"])
    return schema


# --- calls -----------------------------------------------------------------------------------------------------------

def gold_call(text: str) -> tuple[str, list, dict]:
    """`f(1, a='x')` -> ("f", [1], {"a": "x"}), by parsing. ValueError: anything but one call with literal values."""
    try:
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and all(k.arg for k in call.keywords):
            return (call.func.id, [ast.literal_eval(a) for a in call.args],
                    {k.arg: ast.literal_eval(k.value) for k in call.keywords})
    except (ValueError, SyntaxError):
        pass
    raise ValueError(f"gold call {text!r}: expected one call by name with literal arguments")


def _magnitude(value) -> float:
    """Of a number, or of a text that a tool may take for one; else 0."""
    try:
        return abs(float(value)) if isinstance(value, int | float | str) else 0.0
    except OverflowError:
        return float("inf")
    except ValueError:
        return 0.0


class ToolObjects:
    """Fresh tool objects of one multi-turn item, in its initial state. A call is a look-up, never an evaluation."""

    def __init__(self, entry: Mapping, modules: Mapping[str, str], stateless: Sequence[str]):
        self.instances, self.methods = {}, {}
        for name in entry["involved_classes"]:
            tool = getattr(importlib.import_module(modules[name]), name)()
            if name not in stateless:
                tool._load_scenario(deepcopy(entry["initial_config"].get(name, {})),
                                    long_context="long_context" in entry["id"])
            self.instances[name] = tool
            self.methods |= {n: m for n, m in inspect.getmembers(tool, inspect.ismethod) if not n.startswith("_")}

    def call(self, name: str, arguments: Mapping, positional: Sequence = ()) -> str:
        """The result as text, in the form the benchmark's executor gives it; what goes wrong is text as well."""
        with ONE_AT_A_TIME:
            try:
                if name not in self.methods:
                    raise NameError(f"name {name!r} is not defined")
                for key, most in LARGEST.items():  # they set how long a tool computes; gold stays far below
                    if _magnitude(arguments.get(key)) > most:
                        raise ValueError(f"{key} is too large")
                result = self.methods[name](*positional, **deepcopy(dict(arguments)))
                if isinstance(result, dict):
                    try:
                        return json.dumps(result)
                    except (TypeError, ValueError):  # objects in it that are no JSON
                        return str(result)
                return str(result)
            except Exception as error:  # a tool raises what it likes; the model reads it
                return f"Error during execution: {error}"


# --- the benchmark ---------------------------------------------------------------------------------------------------

class Benchmark:
    """The rows of the benchmark and its rules. root: the folder of the package."""

    def __init__(self, root: Path):
        self.root = root
        _import_from(root)
        self._ast_checker = _module("eval_checker.ast_eval.ast_checker").ast_checker
        self._turns_checker = _module("eval_checker.multi_turn_eval.multi_turn_checker").multi_turn_checker
        utils = _module("eval_checker.multi_turn_eval.multi_turn_utils")
        self._modules, self._stateless = utils.CLASS_FILE_PATH_MAPPING, utils.STATELESS_CLASSES
        prompts, categories = _module("constants.default_prompts"), _module("constants.category_mapping")
        self.added_functions = prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
        self.max_steps = prompts.MAXIMUM_STEP_LIMIT
        self._docs = categories.MULTI_TURN_FUNC_DOC_FILE_MAPPING

    def entries(self, subset: str) -> list[dict]:
        """Rows in the file's order: id, question (turns of messages), function; ground_truth, but for relevance.

        Multi-turn ones have their functions collected from their classes, missed_function: turn -> those held back
        until then.
        """
        entries = _rows(self.root / "data" / f"BFCL_v3_{subset}.json")
        known: set[str] = set()
        for entry in entries:  # live_relevance has two questions of one id; results are kept by id
            entry["id"] += "-again" if entry["id"] in known else ""
            known.add(entry["id"])
        if "relevance" not in subset:
            answers = _rows(self.root / "data" / "possible_answer" / f"BFCL_v3_{subset}.json")
            truth = {row["id"]: row["ground_truth"] for row in answers}
            entries = [entry | {"ground_truth": truth[entry["id"]]} for entry in entries]
        return [self._with_functions(entry) if is_multi_turn(subset) else entry for entry in entries]

    def _with_functions(self, entry: dict) -> dict:
        docs = [row for name in entry["involved_classes"]
                for row in _rows(self.root / "data" / "multi_turn_func_doc" / self._docs[name])]
        later = {turn: [next(d for d in docs if d["name"] == name) for name in names]
                 for turn, names in entry.get("missed_function", {}).items()}
        held = {d["name"] for more in later.values() for d in more}
        return entry | {"function": [d for d in docs if d["name"] not in held], "missed_function": later}

    def tool_objects(self, entry: Mapping) -> ToolObjects:
        with ONE_AT_A_TIME:
            return ToolObjects(entry, self._modules, self._stateless)

    def check_calls(self, subset: str, entry: Mapping, calls: Sequence[dict]) -> dict:
        """Calls {"name", "arguments"} of a single turn -> valid, error, error_type, by the benchmark's rules."""
        if "relevance" in subset:
            if bool(calls) == ("irrelevance" not in subset):
                return {"valid": True}
            kind = "irrelevance_error:decoder_success" if calls else "relevance_error:decoder_failed"
            return {"valid": False, "error": [f"{len(calls)} calls"], "error_type": kind}
        if language_of(subset) != "Python" and LONGEST_BLANK.search(json.dumps(calls).replace("\\n", " ")):
            return {"valid": False, "error": ["a value with 50 blanks in a row"], "error_type": "ast_checker:failed"}
        try:
            return self._ast_checker(entry["function"], [{c["name"]: c["arguments"]} for c in calls],
                                     entry["ground_truth"], language_of(subset), subset, MODEL)
        except Exception as error:  # its checker trips over some values, such as an integer no float can hold
            return {"valid": False, "error": [f"{type(error).__name__}: {error}"], "error_type": "ast_checker:failed"}

    def check_turns(self, entry: Mapping, turns: Sequence[Sequence[Sequence[dict]]]) -> dict:
        """Calls of each step of each turn -> valid, error_message, error_type, by the benchmark's rules.

        Model and gold calls are run anew on objects of their own, by `ToolObjects.call`.
        """
        gold = entry["ground_truth"]
        if len(turns) != len(gold):
            return {"valid": False, "error_type": "multi_turn:force_terminated",
                    "error_message": [f"{len(turns)} turns were reached, {len(gold)} expected"]}
        objects = {MODEL: self.tool_objects(entry), f"{MODEL}_ground_truth": self.tool_objects(entry)}

        def execute(func_call_list, model_name, **other):
            tools = objects[model_name]
            if model_name == MODEL:
                results = [tools.call(c["name"], c["arguments"]) for c in func_call_list]
            else:
                results = [tools.call(name, arguments, positional)
                           for name, positional, arguments in map(gold_call, func_call_list)]
            return results, tools.instances

        # The checker's code with one name bound to something else: its own executor is out of its reach.
        checker = FunctionType(self._turns_checker.__code__,
                               self._turns_checker.__globals__ | {"execute_multi_turn_func_call": execute})
        steps = [[list(step) for step in turn if step] for turn in turns]  # steps without a call do not count
        try:
            return checker(steps, gold, entry, entry["id"].rsplit("_", 1)[0], MODEL)
        except Exception as error:  # states that cannot be compared
            return {"valid": False, "error_type": "multi_turn:checker_failed",
                    "error_message": f"{type(error).__name__}: {error}"}


def open_benchmark(folder: str | Path | None = None) -> Benchmark:
    """folder: the package's folder, or one that holds it (an unpacked wheel); None: the installed package.

    Raises ValueError where it is missing, or where any file that a score depends on is not that of the release.
    """
    if folder is None:
        spec = importlib.machinery.PathFinder.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"the BFCL suite needs its benchmark: {INSTALL} (or --data FOLDER, an unpacked wheel)")
        root = Path(next(iter(spec.submodule_search_locations)))
    else:
        root = Path(folder)
        root = root / PACKAGE if (root / PACKAGE).is_dir() else root
    if importlib.util.find_spec("mpmath") is None:
        raise ValueError(f"the BFCL suite needs mpmath: {INSTALL}")
    found = digest(root)
    if found != DIGEST:
        raise ValueError(f"{root}: not the files of bfcl-eval 2025.6.16 (digest {found[:12]}, expected {DIGEST[:12]}); "
                         f"{INSTALL}")
    return Benchmark(root.resolve())


def digest(root: Path) -> str:
    """SHA-256 over the files that a score depends on: rows, answers, function descriptions, checkers, tool sources."""
    named = [root / "data" / part / f"BFCL_v3_{subset}.json" for subset in PAPER | OTHERS
             for part in (["."] if "relevance" in subset else [".", "possible_answer"])]
    named += [root / "constants" / f"{name}.py" for name in ("type_mappings", "default_prompts", "category_mapping")]
    for path in named:
        if not path.is_file():
            raise ValueError(f"{root}: no {path.relative_to(root)}; expected the folder bfcl_eval of bfcl-eval "
                             f"2025.6.16, with its V3 files ({INSTALL})")
    named += [p for at in ("ast_eval", "multi_turn_eval") for p in (root / "eval_checker" / at).rglob("*.py")]
    named += (root / "data" / "multi_turn_func_doc").glob("*.json")
    whole = hashlib.sha256()
    for path in sorted(named, key=lambda p: p.relative_to(root).as_posix()):
        whole.update(path.relative_to(root).as_posix().encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def _import_from(root: Path) -> None:
    """Make `bfcl_eval` the package in this folder, with a stand-in for its table of models, which imports a hundred."""
    if list(getattr(sys.modules.get(PACKAGE), "__path__", [])) == [str(root)] and _model_table() in sys.modules:
        if getattr(sys.modules[_model_table()], "stand_in", False):
            return
    for name in [n for n in sys.modules if n == PACKAGE or n.startswith(PACKAGE + ".")]:
        del sys.modules[name]
    spec = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(root)]
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    table = ModuleType(_model_table())
    table.MODEL_CONFIG_MAPPING = {MODEL: SimpleNamespace(underscore_to_dot=True)}
    table.stand_in = True
    sys.modules[_model_table()] = table


def _model_table() -> str:
    return f"{PACKAGE}.constants.model_config"


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}")


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
