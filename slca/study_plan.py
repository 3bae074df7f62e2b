"""The plan of a study: its file, read strictly, and every run and evaluation that it asks for, with its configuration.

A study file holds `title` and `conditions` (name -> what differs from the base configuration), and if wanted `paper`
(numbers of tables), `reference` (the condition that differences are against, or a condition for each) and `evaluate`
(arguments of evaluate.py for every finished run). The value "{sft}" of a setting stands for the checkpoint of the
shared supervised run. All configurations are built before anything runs. Left out: running
(`slca/study.py`) and tables (`slca/stats.py`).
"""
from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from slca import checkpoint
from slca.config import ConfigError, load_config, override, read_yaml, to_dict
from slca.evaluation.distractors import conditions as distractor_conditions
from slca.settings import Config

ROOT = Path(__file__).parents[1]
SFT_READS = ("model.", "lora.", "optim.", "sft.", "chat.", "data.", "precision", "reward.parallel_rule")
FREE = tuple(k for k in checkpoint.FREE if not k.startswith(("eval", "rl")))  # change no number of a finished run
FILES = ("study.json", "tables.md", "tables.csv")  # what a study writes beside the folders of its conditions
VALUES = {  # of `evaluate`: is the value good?, what is
    "k": (lambda v: bool(v) and all(type(n) is int and n >= 0 for n in v), "whole numbers from 0 on"),
    "how": (lambda v: bool(v) and set(map(str, v)) <= {"random", "hard"}, "random, hard or both"),
    "nearest": (lambda v: v in ("tfidf", "embeddings"), "tfidf or embeddings"),
    "temperature": (lambda v: type(v) is not bool and 0 <= v < math.inf, "a number from 0 on")}
EVALUATE = {"suite": str, "data": str, "catalogue": str, "k": list, "how": list, "nearest": str, "temperature": float}


class StudyError(ValueError):
    """A study that cannot be run; the message names the file, the key and what was expected."""


# --- the file --------------------------------------------------------------------------------------------------------

def read_study(path: str | Path) -> dict:
    """The file's mapping with every key, `reference` as condition -> condition. Raises StudyError."""
    def need(good: bool, key: str, found: Any, expected: str) -> None:
        if not good:
            raise StudyError(f"{path}: {key}: found {found!r}, expected {expected}")

    try:
        found = read_yaml(path)
    except ConfigError as error:
        raise StudyError(str(error)) from error
    need(isinstance(found, dict), "the file", found, "a mapping with title and conditions")
    study = {"title": None, "conditions": None, "paper": [], "reference": None, "evaluate": None}
    for key in found:
        need(key in study, str(key), found[key], f"one of the keys {', '.join(study)}")
    study |= found
    need(isinstance(study["title"], str), "title", study["title"], "text")
    names = study["conditions"]
    need(isinstance(names, dict) and bool(names), "conditions", names, "a mapping of names to settings")
    for name, tree in names.items():
        need(isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][\w.\-]*", name) is not None and name not in FILES,
             "conditions", name, f"names of letters, digits, _ . and -, but for {', '.join(FILES)}")
        need(isinstance(tree, dict), f"conditions.{name}", tree, "a mapping of settings, {} for none")
    study["paper"] = [study["paper"]] if isinstance(study["paper"], int) else study["paper"]
    need(isinstance(study["paper"], list) and all(type(n) is int for n in study["paper"]), "paper", study["paper"],
         "a number of a table, or a list of them")
    reference = next(iter(names)) if study["reference"] is None else study["reference"]
    need(isinstance(reference, str | dict), "reference", reference, "a condition, or a mapping of conditions")
    reference = dict.fromkeys(names, reference) if not isinstance(reference, dict) else reference
    for name, other in reference.items():
        need(name in names and other in names, "reference", study["reference"], f"of {', '.join(names)}")
    study["reference"] = reference
    if (extra := study["evaluate"]) is not None:
        need(isinstance(extra, dict) and extra.get("suite") in ("toucan", "distractors"), "evaluate", extra,
             "a mapping with suite: toucan or distractors")
        for key, value in extra.items():
            kind = EVALUATE.get(key)
            need(kind is not None, f"evaluate.{key}", value, f"one of the keys {', '.join(EVALUATE)}")
            need(isinstance(value, (int, float) if kind is float else kind), f"evaluate.{key}", value, kind.__name__)
            good, expected = VALUES.get(key, (lambda _: True, ""))
            need(good(value), f"evaluate.{key}", value, expected)
        need(extra["suite"] == "distractors" or not extra.keys() & {"catalogue", "k", "how", "nearest"}, "evaluate",
             extra, "catalogue, k, how and nearest only with suite: distractors")
        need(extra["suite"] == "toucan" or "catalogue" in extra, "evaluate", extra, "a catalogue")
    return study


def flat(tree: Mapping, path: str = "") -> dict[str, Any]:
    """Nested mappings -> dotted key -> value; an empty mapping inside stays a value."""
    found = {}
    for key, value in tree.items():
        if not isinstance(key, str) or not re.fullmatch(r"\w+", key):
            raise StudyError(f"{path}{key}: expected a key of letters, digits and _, sections nested")
        found |= flat(value, f"{path}{key}.") if isinstance(value, dict) and value else {f"{path}{key}": value}
    return found


def settings(values: Mapping[str, Any]) -> list[str]:
    """Dotted key -> value as --set takes them."""
    def text(value: Any) -> str:  # YAML knows no Infinity, and no pairs of surrogates
        return ".inf" if value == math.inf else json.dumps(value, ensure_ascii=False, default=str)

    return [f"{key}={text(value)}" for key, value in values.items()]


def changed(base: Config, cfg: Config) -> dict[str, Any]:
    """The settings of cfg that are not those of base."""
    before = flat(to_dict(base))
    return {key: value for key, value in flat(to_dict(cfg)).items() if value != before[key]}


def other_keys(theirs: Mapping, cfg: Config, paths: Sequence[str] = ()) -> list[str]:
    """"key: value there, value here" of every setting that differs from a record's, but those that change no number.

    paths: settings that name a checkpoint of the study, which may have moved: name, seed and stage have to agree.
    """
    before, ours = flat(theirs), json.loads(json.dumps(flat(to_dict(cfg))))

    def same(key: str) -> bool:
        a, b = before.get(key), ours[key]
        return a == b or (key in paths and isinstance(a, str) and Path(a).parts[-4:] == Path(b).parts[-4:])

    return [f"{k}: {before.get(k)!r} there, {ours[k]!r} here" for k in ours
            if not same(k) and not any(k == free or k.startswith(f"{free}.") for free in FREE)]


# --- the plan --------------------------------------------------------------------------------------------------------

class Run(NamedTuple):
    """One run of train.py. stage: what it ends with; starts: folders of the runs whose checkpoints it reads; paths:
    the settings that name these."""

    name: str
    seed: int
    folder: Path
    cfg: Config
    stage: str
    starts: tuple[Path, ...] = ()
    paths: tuple[str, ...] = ()

    def finished(self) -> bool:
        return self.stage in read_json(self.folder / "summary.json")

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / self.stage


Plan = dict[str, dict[int, list[Run]]]  # condition -> seed -> its runs


class Job(NamedTuple):
    """A process to run. needs: folders of the runs whose checkpoints it reads; done: says whether it has been run."""

    label: str
    kind: str
    folder: Path
    needs: tuple[Path, ...]
    command: list[str]
    log: Path
    done: Callable[[], bool]


def plan(study: dict, path: str | Path, base: Config, root: Path, seeds: Sequence[int]) -> Plan:
    """Condition -> seed -> its runs, supervised first; the last one's result is the condition's.

    Every configuration is built here, so a wrong setting ends the study before anything runs. Raises StudyError.
    """
    found: Plan = {}
    plain = override(base, ["rl.enabled=false"])
    for name, tree in study["conditions"].items():
        try:
            cfg = override(base, settings(flat(tree)))
            differs = {k: v for k, v in changed(base, cfg).items() if k.startswith(SFT_READS) and k != "data.train"}
            supervised = override(base, settings(differs) + ["rl.enabled=false"])
        except ValueError as error:
            raise StudyError(f"{path}: conditions.{name}: {error}") from error
        if "seed" in changed(base, cfg):
            raise StudyError(f"{path}: conditions.{name}: seed: expected none, as --seeds gives it")
        if not cfg.sft.enabled and not cfg.rl.enabled:
            raise StudyError(f"{path}: conditions.{name}: expected sft.enabled or rl.enabled")
        if cfg.rl.enabled and (name == "sft" or name.startswith("sft-")):
            raise StudyError(f"{path}: conditions.{name}: expected another name, as runs with RL do not go by sft")
        unread = [k for k in changed(base, cfg) if not cfg.rl.enabled and not k.startswith((*SFT_READS, "rl."))]
        if unread:
            raise StudyError(f"{path}: conditions.{name}: {unread[0]}: expected none without RL, as the result is that "
                             "of the supervised run")
        if not base.sft.enabled and "{sft}" in flat(to_dict(cfg)).values():
            raise StudyError(f"{path}: conditions.{name}: {{sft}}: expected a base with sft.enabled")
        known = hashlib.sha256(json.dumps(differs, sort_keys=True).encode()).hexdigest()[:8]
        first = f"sft-{known}" if differs else "sft"
        for seed in seeds:
            shared, own = (Run(n, seed, root / n / f"seed{seed}", replace(c, seed=seed), "after_sft")
                           for n, c in (("sft", plain), (first, supervised)))
            filled = {k: str(shared.checkpoint) for k, v in flat(to_dict(cfg)).items() if v == "{sft}"}
            runs = ([shared] if filled and own != shared else []) + ([own] if cfg.sft.enabled else [])
            if cfg.rl.enabled:
                if cfg.sft.enabled:
                    filled["model.path"] = str(own.checkpoint)
                here = settings(filled | {"seed": seed, "sft.enabled": False})
                runs.append(Run(name, seed, root / name / f"seed{seed}", override(cfg, here), "after_rl",
                                tuple(run.folder for run in runs), tuple(filled)))
            found.setdefault(name, {})[seed] = runs
    return found


def seeds_there(root: Path, names: Sequence[str]) -> set[int]:
    """Seeds that have a folder under a condition's or a supervised run's name."""
    folders = [p for name in (*names, "sft*") for p in root.glob(f"{name}/seed*")]
    return {int(p.name[4:]) for p in folders if p.name[4:].isdecimal()}


def refuse_other(runs: Sequence[Run]) -> None:
    """Raises StudyError where a folder holds a run of another configuration, with the keys that differ."""
    wrong = []
    for run in runs:
        path = run.folder / "config.yaml"
        if not path.is_file():
            continue
        try:
            theirs = to_dict(load_config([path]))
        except ConfigError as error:
            wrong.append(f"{run.folder}: {error}")
            continue
        if keys := other_keys(theirs, run.cfg, run.paths):
            wrong.append(f"{run.folder}: {'; '.join(keys)}")
    if wrong:
        raise StudyError("runs of another configuration are in the way; name another --out or remove them:\n"
                         + "\n".join(wrong))


def jobs(study: dict, planned: Plan, base: Config, files: Sequence[str], sets: Sequence[str], seeds: Sequence[int],
         ranks: int) -> Iterator[Job]:
    """What to run, seed by seed, each supervised run once. files, sets: the --config and --set that make the base."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    python = torchrun if ranks > 1 else torchrun[:1]  # standalone: on a free port, as others may run beside it
    there: set[Path] = set()
    for seed in seeds:
        for by_seed in planned.values():
            new = [run for run in by_seed[seed] if run.folder not in there]
            there.update(run.folder for run in new)
            for run in new:
                command = [*python, str(ROOT / "train.py"), *given(files, sets, base, run.cfg), "--out",
                           str(run.folder), "--resume"]
                yield Job(f"{run.name}, seed {seed}", "rl" if run.stage == "after_rl" else "sft", run.folder,
                          run.starts, command, run.folder / "log.txt", run.finished)
            if study["evaluate"]:
                yield evaluation(study["evaluate"], by_seed[seed][-1], base, files, sets)


def given(files: Sequence[str], sets: Sequence[str], base: Config, cfg: Config) -> list[str]:
    """The flags that make cfg."""
    every = [*sets, *settings(changed(base, cfg))]
    return ["--config", *files, *(["--set", *every] if every else [])]


def evaluation(extra: Mapping, run: Run, base: Config, files: Sequence[str], sets: Sequence[str]) -> Job:
    """evaluate.py on a run's checkpoint, with its configuration but the base's simulator and judge."""
    alike = {k: v for k, v in flat(to_dict(base)).items() if k.startswith(("simulator.", "judge."))}
    cfg = override(run.cfg, settings(alike))
    flags = []
    for key, value in extra.items():
        flags += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    out = evaluation_file(run, extra)
    command = [sys.executable, str(ROOT / "evaluate.py"), "--checkpoint", str(run.checkpoint), *flags,
               *given(files, sets, base, cfg), "--out", str(out)]

    def done() -> bool:
        record = read_json(out)
        if extra["suite"] == "toucan":
            asked = {"temperature": 0.0} | {k: v for k, v in extra.items() if k in ("data", "temperature")}
            return (bool(record.get("metrics")) and all(record.get(k) == v for k, v in asked.items())
                    and not other_keys(record["config"], cfg, run.paths))
        wanted = distractor_conditions(extra.get("k", [0, 20, 50, 100, 150]), extra.get("how", ["random", "hard"]))
        return (wanted.keys() <= record.get("conditions", {}).keys() and record["catalogue"] == extra["catalogue"]
                and not other_keys(record["depends_on"]["config"], cfg, run.paths))

    return Job(f"{run.name}, seed {run.seed}, suite {extra['suite']}", "evaluate", run.folder, (run.folder,), command,
               run.folder / f"log-{extra['suite']}.txt", done)


def evaluation_file(run: Run, extra: Mapping) -> Path:
    return run.folder / f"evaluate-{extra['suite']}.json"


def read_json(path: Path) -> dict:
    """The file's mapping; empty where there is none or it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
