"""Distractors: a task's tools padded to K from a catalogue of tools, at random or with the nearest by description.

The paper (its Tables 13, 14 and 24) publishes K in {20, 50, 100, 150} and the names random and hard, not the rules.
Ours: every task ranks the whole catalogue once, whatever K, and takes the first it needs. So the distractors of a small
K are among those of a larger one, and a curve over K compares like with like. How near a tool is: TF-IDF cosine, or the
policy's own input embeddings. Left out: distractors made up for a task, and a check that none could answer it as well
as its own tools (only a copy of an own tool under another name is refused).
"""
from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from slca.data.rows import DataError, read_rows
from slca.data.task import Task
from slca.model import Policy

Nearness = Callable[[str], np.ndarray]  # text -> a number for each tool of the catalogue, float [N]; higher is nearer
WORD, HUMP = re.compile(r"[^\W_]+"), re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def load_catalogue(path: str | Path) -> list[dict]:
    """Tool schemas of a .jsonl, .json or .parquet file, in order; of several with one name the first.

    A row is an OpenAI tool, its bare function, or a function with the key `server` as in Toucan's catalogue, whose tool
    is then called `<server in lower case, spaces as hyphens>-<name>`. Other keys are dropped. Raises DataError.
    """
    tools: dict[str, dict] = {}
    for number, row in read_rows(path):
        def bad(field: str, expected: str, *found: Any, number: int = number) -> DataError:
            return DataError(path, number, field, expected, *found)

        if isinstance(row, Exception):  # a line that is no JSON
            raise bad(*row.args) from row
        at = "function." if isinstance(row, dict) and "function" in row else ""
        function = row["function"] if at else row
        if not isinstance(function, dict):
            raise bad(at.rstrip("."), "a tool: an object with name, description and parameters", function)
        name, server = function.get("name"), function.get("server")
        if not isinstance(name, str) or not name:
            raise bad(f"{at}name", "a text that is not empty", name)
        if not isinstance(server, str | None) or server == "":
            raise bad(f"{at}server", "a text that is not empty, or no such key", server)
        description, parameters = function.get("description"), function.get("parameters")
        if not isinstance(description, str | None):
            raise bad(f"{at}description", "text or null", description)
        if not isinstance(parameters, dict | None):
            raise bad(f"{at}parameters", "a JSON schema or null", parameters)
        name = f"{server.lower().replace(' ', '-')}-{name}" if server else name
        tools.setdefault(name, {"type": "function", "function": {
            "name": name, "description": description or "",
            "parameters": parameters or {"type": "object", "properties": {}}}})
    if not tools:
        raise DataError(path, None, "", "at least one tool")
    return list(tools.values())


def pad_tools(task: Task, catalogue: Sequence[dict], k: int, how: Literal["random", "hard"] = "random", seed: int = 0,
              nearness: Nearness | None = None) -> Task:
    """The task with k tools: its own, and distractors whose names it does not have, in an order drawn anew.

    The same seed and task id give the same tools. The distractors of a smaller k, and the order of its tools, are those
    of a larger one with some left out. Own tools stand anywhere. A task with k tools or more comes back as it is. What
    differs from an own tool in its name alone is no distractor: a call of it would be as right.

    catalogue: schemas with names that all differ. nearness: for "hard", that of this catalogue (`tfidf`,
    `by_embeddings`); None works TF-IDF out anew, slow for many tasks. Raises ValueError where the catalogue is too
    small.
    """
    if how not in ("random", "hard"):
        raise ValueError(f"how {how!r}: expected random or hard")
    wanted = k - len(task.tools)
    if wanted <= 0:
        return task
    order = np.argsort(_draws(seed, task.id, len(catalogue)), kind="stable")
    if how == "hard":
        near = (nearness or tfidf(catalogue))(task_text(task))
        order = order[np.argsort(-near[order], kind="stable")]  # equally near ones in their random order
    names, bodies = set(task.allowed_tools), [_body(t) for t in task.tools]
    chosen: list[dict] = []
    for i in order:
        if len(chosen) == wanted:
            break
        tool = catalogue[i]
        if tool["function"]["name"] not in names and _body(tool) not in bodies:
            chosen.append(tool)
    if len(chosen) < wanted:
        raise ValueError(f"task {task.id}: {k} tools asked for, but to its own {len(task.tools)} the catalogue of "
                         f"{len(catalogue)} has only {len(chosen)} others ({wanted} are needed)")
    tools = sorted([*task.tools, *chosen], key=lambda t: _hash(seed, task.id, t["function"]["name"]))
    return replace(task, tools=tools)


def _hash(*parts: Any) -> bytes:
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def _draws(seed: int, name: str, n: int) -> np.ndarray:
    """n random uint64. Raw draws of a counter-based generator: the same in every release of numpy."""
    key = np.frombuffer(_hash(seed, name)[:16], "<u8")
    return np.random.Philox(key=key).random_raw(n)


def _body(tool: dict) -> tuple[str, Any]:
    return tool["function"].get("description", ""), tool["function"].get("parameters")


# --- nearness --------------------------------------------------------------------------------------------------------

def tool_text(tool: dict) -> str:
    return f"{tool['function']['name']} {tool['function'].get('description') or ''}"


def task_text(task: Task) -> str:
    """What distractors are to be near to: the question, and names and descriptions of the task's own tools."""
    return "\n".join([task.question, *map(tool_text, task.tools)])


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits; "getUserName" and "get_user_name" are three each."""
    return [w.lower() for w in WORD.findall(HUMP.sub(" ", text))]


def tfidf(catalogue: Sequence[dict]) -> Nearness:
    """Cosine of a text with each tool's name and description, float64 [N] in [0, 1].

    A word that stands c > 0 times in a text weighs (1 + ln c) * ln((1 + N) / (1 + d)), where d of the N tools have it;
    vectors are brought to length 1 and words no tool has are dropped. No stemming, no list of stop words: a word that
    all tools have weighs nothing.
    """
    counts = [Counter(words(tool_text(t))) for t in catalogue]
    tools_with = Counter(w for count in counts for w in count)
    idf = {w: math.log((1 + len(counts)) / (1 + d)) for w, d in tools_with.items()}

    def vector(count: Counter) -> dict[str, float]:
        weights = {w: (1 + math.log(c)) * idf[w] for w, c in count.items() if w in idf}
        length = math.sqrt(math.fsum(x * x for x in weights.values())) or 1.0
        return {w: x / length for w, x in weights.items()}

    lists: dict[str, list[tuple[int, float]]] = {w: [] for w in idf}
    for i, count in enumerate(counts):
        for w, x in vector(count).items():
            lists[w].append((i, x))
    postings = {w: (np.array([i for i, _ in found]), np.array([x for _, x in found])) for w, found in lists.items()}

    def near(text: str) -> np.ndarray:
        scores = np.zeros(len(counts))
        for w, x in vector(Counter(words(text))).items():
            at, weights = postings[w]
            scores[at] += x * weights
        return scores

    return near


def by_embeddings(catalogue: Sequence[dict], policy: Policy, tokenizer) -> Nearness:
    """Cosine of mean input embeddings, float32 [N] in [-1, 1], from which the catalogue's mean is taken off first.

    The policy is read now: other checkpoints have other distractors.
    """
    table = policy.model.embed_tokens.weight.detach()

    def mean(text: str) -> torch.Tensor:
        return table[torch.tensor(tokenizer.encode_untrusted(text), device=table.device)].float().mean(0)

    vectors = torch.stack([mean(tool_text(t)) for t in catalogue])
    centre = vectors.mean(0)
    vectors = torch.nn.functional.normalize(vectors - centre, dim=1)
    return lambda text: (vectors @ torch.nn.functional.normalize(mean(text) - centre, dim=0)).cpu().numpy()
