"""The run's configuration: strict YAML over the tree of `settings.py`, dotted overrides, saved as resolved.

`describe()` prints every field's sentence and range, `load_config` enforces them. A wrong key, type, range or
combination is a ConfigError that names the key, what was found, what was expected and the source file.
Left out: environment variables, interpolation, includes.
"""
from __future__ import annotations

import difflib
import functools
import math
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from slca.settings import AdvantageConfig, Config, LLMConfig, LossConfig, RewardConfig


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, the value, what was expected and the source."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-4 as a number (YAML 1.2; PyYAML wants 1.0e-4) and refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is written twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
                              list("-+.0123456789"))


def read_yaml(path: str | Path) -> Any:
    """A file's YAML, strictly: no key twice, 1e-4 is a number. Raises ConfigError."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error


def load_config(files: Iterable[str | Path] = (), overrides: Iterable[str] = ()) -> Config:
    """Defaults, then each YAML file left to right, then each "a.b=c"; validated. Raises ConfigError."""
    config, origin = Config(), {}
    for file in files:
        loaded = read_yaml(file)
        config = _merge(config, {} if loaded is None else loaded, "", str(file), origin)
    for text in overrides:
        config = _set(config, text, origin)
    return validate(config, origin)


FOREIGN = ("chat.parallel=blocks", "reward.parallel_rule=first_turn")  # how models that are not ours write calls


def checkpoint_config(folder: str | Path, files: Iterable[str | Path] = (), overrides: Iterable[str] = (),
                      foreign: Iterable[str] = ()) -> Config:
    """The settings a checkpoint is used with: `files` if given, else the config.yaml of the run it belongs to, else the
    defaults with `foreign` on top; then `overrides`.
    """
    files = list(files) or [p / "config.yaml" for p in Path(folder).resolve().parents[:2]
                            if (p / "config.yaml").is_file()][:1]
    return load_config(files, [*(() if files else foreign), *overrides])


def override(config: Config, overrides: Iterable[str]) -> Config:
    """A copy with each "a.b=c" applied; validated. Raises ConfigError."""
    origin: dict[str, str] = {}
    for text in overrides:
        config = _set(config, text, origin)
    return validate(config, origin)


def to_dict(config: Any) -> dict:
    """Nested plain dicts, lists and scalars, as YAML and JSON hold them."""
    return {f.name: to_dict(v) if is_dataclass(v := getattr(config, f.name)) else _plain(v) for f in fields(config)}


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def save_config(config: Config, path: str | Path) -> None:
    """Write every key as resolved; `load_config([path])` gives an equal tree back."""
    part = Path(path).with_suffix(".tmp")  # a killed run leaves no half of it
    part.write_text(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
    part.replace(path)


def leaves(kind: type = Config, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, type, dataclass field) of every setting under a section."""
    hints = get_type_hints(kind)
    for f in fields(kind):
        if is_dataclass(hints[f.name]):
            yield from leaves(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", hints[f.name], f


def _at(config: Config, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), config)


def describe() -> str:
    """Every key with its default, what it takes and its sentence; for --help and the README."""
    lines = []
    for path, kind, f in leaves():
        shown = yaml.safe_dump(_plain(_at(Config(), path)), default_flow_style=True, width=1000).split("\n")[0]
        lines.append(f"{path} = {shown}  ({_expected(kind, f.metadata['limits'])})\n    {f.metadata['doc']}")
    return "\n".join(lines)


def _set(config: Config, text: str, origin: dict[str, str]) -> Config:
    key, equals, value = text.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"--set {text}: expected a.b=value")
    try:
        tree = yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: the value cannot be read as YAML: {' '.join(str(error).split())}") from error
    for part in reversed(key.strip().split(".")):
        tree = {part: tree}
    return _merge(config, tree, "", f"--set {text}", origin)


def _merge(node: Any, tree: Any, prefix: str, source: str, origin: dict[str, str]) -> Any:
    """The section with the tree's keys replaced; sections merge, everything else is replaced whole."""
    if not isinstance(tree, dict):
        raise _error(prefix.rstrip(".") or "the file", tree, "a mapping of keys", source)
    hints, metadata = get_type_hints(type(node)), {f.name: f.metadata for f in fields(node)}
    changed = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in metadata:
            near = difflib.get_close_matches(str(key), metadata, n=1)
            expected = f"{near[0]!r}?" if near else "one of " + ", ".join(metadata)
            raise ConfigError(f"{path}: unknown key ({source}); {'did you mean' if near else 'expected'} {expected}")
        if is_dataclass(hints[key]):
            changed[key] = _merge(getattr(node, key), value, f"{path}.", source, origin)
        else:
            changed[key] = _convert(value, hints[key], metadata[key]["limits"], path, source)
            origin[path] = source
    return replace(node, **changed)


def _error(path: str, found: Any, expected: str, source: str) -> ConfigError:
    return ConfigError(f"{path}: found {found!r}, expected {expected} ({source})")


def _expected(kind: Any, limits: dict[str, float]) -> str:
    """What a value of this type and range is called in messages."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _expected(arg, limits) for arg in args)
    if origin is tuple:
        return f"a list{'' if args[-1] is ... else f' of {len(args)}'}, each {_expected(args[0], limits)}"
    words = {"lo": ">=", "above": ">", "hi": "<=", "below": "<"}
    bounds = " and ".join(f"{words[name]} {limits[name]:g}" for name in words if name in limits)
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    return f"{name} {bounds}".rstrip() if kind in (int, float) else name


def _convert(value: Any, kind: Any, limits: dict[str, float], path: str, source: str) -> Any:
    """The value as its field's type; only int to float and list to tuple are converted."""
    wrong = _error(path, value, _expected(kind, limits), source)
    if get_origin(kind) in (Union, types.UnionType):
        if value is None:
            return None
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise wrong
        return value
    if origin is tuple:
        args = args[:1] * len(value) if args[-1] is ... and isinstance(value, (list, tuple)) else args
        if not isinstance(value, (list, tuple)) or len(value) != len(args):
            raise wrong
        return tuple(_convert(v, arg, limits, f"{path}[{i}]", source)
                     for i, (v, arg) in enumerate(zip(value, args, strict=True)))
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise wrong
    if kind in (int, float):
        tests = {"lo": lambda x, b: x >= b, "hi": lambda x, b: x <= b, "above": lambda x, b: x > b,
                 "below": lambda x, b: x < b}
        if not all(tests[name](value, bound) for name, bound in limits.items()):
            raise wrong
        if kind is float:
            if abs(value) > 1e300 or math.isnan(value):
                raise wrong
            return float(value)
    return value


# --- combinations ----------------------------------------------------------------------------------------------------

def validate(config: Config, origin: dict[str, str] | None = None) -> Config:
    """Check every value and the combinations that one key alone cannot decide; returns it. Raises ConfigError.

    origin: dotted path -> the file or override that set it, for the message; a key not in it is at its default.
    """
    origin = origin or {}

    def need(good: bool, path: str, expected: str) -> None:
        if not good:
            found = _at(config, path)
            source = [origin[k] for k in origin if k == path or k.startswith(f"{path}.")] or ["a default"]
            raise _error(path, to_dict(found) if is_dataclass(found) else found, expected, source[-1])

    for path, kind, f in leaves():
        _convert(_at(config, path), kind, f.metadata["limits"], path, origin.get(path, "set in code"))

    model, data, rl, sft, adv, loss = config.model, config.data, config.rl, config.sft, config.advantage, config.loss
    if model.path is None:
        need(model.hidden_size % (2 * model.num_heads) == 0, "model.num_heads",
             f"heads of an even width that divide model.hidden_size = {model.hidden_size}")
        need(model.num_heads % model.num_kv_heads == 0, "model.num_kv_heads",
             f"a divisor of model.num_heads = {model.num_heads}")
    need(model.dtype == "fp32" or config.lora.rank > 0, "model.dtype",
         "fp32, as bf16 weights cannot be trained themselves (lora.rank is 0)")
    need(bool(config.lora.targets), "lora.targets", "at least one matrix")
    if data.kind == "toucan":
        need(data.train is not None or not rl.enabled, "data.train", "a file, as data.kind is toucan and RL is on")
        need(data.sft is not None or not sft.enabled, "data.sft", "a file, as data.kind is toucan and SFT is on")
    else:
        for name in ("train", "sft", "heldout"):
            need(getattr(data, name) is None, f"data.{name}", "null, as data.kind world makes its own tasks")
        need(rl.steps is not None or not rl.enabled, "rl.steps", "a number, as data.kind world has no last prompt")
        shares = [getattr(data.mix, f.name) for f in fields(data.mix)]
        need(abs(sum(shares) - 1) <= 1e-6, "data.mix", f"shares that sum to 1, not {sum(shares):.6g}")
    for path, kind, llm in (("simulator", config.simulator.responder, config.simulator.llm),
                            ("judge", config.judge.kind, config.judge.llm)):
        chooser, plain_llm = ("responder" if path == "simulator" else "kind"), getattr(Config(), path).llm
        for key, reader in (("path", "model"), ("url", "http")):
            need((getattr(llm, key) is not None) == (kind == reader), f"{path}.llm.{key}",
                 f"a value with {path}.{chooser} {reader} and null without, which is {kind}")
        for f in fields(LLMConfig):
            asks = kind in ("model", "http")
            need(asks or getattr(llm, f.name) == getattr(plain_llm, f.name), f"{path}.llm.{f.name}",
                 f"{getattr(plain_llm, f.name)}, as {path}.{chooser} {kind} asks no model")
    need((config.simulator.python is not None) == (config.simulator.responder == "python"), "simulator.python",
         f"a file with responder python and null without; the responder is {config.simulator.responder}")
    need(config.judge.noise == 0 or config.judge.kind == "rules", "judge.noise", "0, as only kind rules reads it")
    need(config.reward.mix.process + config.reward.mix.summary > 0, "reward.mix", "weights that are not both 0")
    need(config.chat.parallel == "list" or config.reward.parallel_rule == "first_turn", "reward.parallel_rule",
         "first_turn, as chat.parallel blocks writes parallel calls as several blocks")
    need(rl.prompts_per_step % rl.prompts_per_update == 0, "rl.prompts_per_update",
         f"a divisor of rl.prompts_per_step = {rl.prompts_per_step}")
    need(sft.max_steps is not None or sft.epochs is not None, "sft.max_steps", "a number, as sft.epochs is null")
    need(sft.max_steps is not None or sft.scheduler == "cosine", "sft.max_steps", "a number, with sft.scheduler gated")
    # a setting that would be read by nobody is refused, not ignored: key -> the estimators that read it
    readers = {"lambda_tool": "slca toolpo", "lambda_summary": "slca", "routing": "slca", "summary_credit": "slca",
               "turn_credit": "slca", "abstention_credit": "slca", "reward_ratio": "grpo",
               "divide_by_std": "slca grpo toolpo rltr", "eps": "slca grpo toolpo rltr"}
    for name, who in readers.items():
        default = getattr(AdvantageConfig(), name)
        need(adv.estimator in who.split() or getattr(adv, name) == default, f"advantage.{name}",
             f"{_plain(default)}, as only advantage.estimator {' or '.join(who.split())} reads it, not {adv.estimator}")
    need(not adv.turn_credit or adv.routing[0] == (1.0, 0.0), "advantage.routing",
         "[[1, 0], ...], as advantage.turn_credit gives tool tokens their turn's part alone")
    for key, value, default in (("tool", config.reward.tool, "hierr"),
                                ("overlong_buffer", config.reward.overlong_buffer, None)):
        need(not adv.turn_credit or value == default, f"reward.{key}",
             f"{default or 'null'}, as advantage.turn_credit scores the turns by HierR")
    need((config.reward.overlong_buffer or 0) <= config.rollout.max_response_tokens, "reward.overlong_buffer",
         f"at most rollout.max_response_tokens = {config.rollout.max_response_tokens}")
    need(not rl.dynamic_sampling or adv.estimator != "gdpo", "rl.dynamic_sampling",
         "false, as advantage.estimator gdpo shifts the groups without a signal too")
    reward, plain = config.reward, RewardConfig()
    need(reward.tool == "hierr" or adv.estimator not in ("toolpo", "rltr"), "reward.tool",
         f"hierr, as advantage.estimator {adv.estimator} has a reward of its own for the calls")
    need(reward.outcome == plain.outcome or reward.tool == "executed" or adv.estimator == "toolpo", "reward.outcome",
         f"{plain.outcome}, as only advantage.estimator toolpo and reward.tool executed read it")
    for name in ("checker_votes", "repeat_penalty", "error_penalty"):
        need(getattr(reward, name) == getattr(plain, name) or adv.estimator == "rltr", f"reward.{name}",
             f"{getattr(plain, name)}, as only advantage.estimator rltr reads it")
    need(reward.overlong_buffer is None or adv.estimator not in ("toolpo", "rltr"), "reward.overlong_buffer",
         f"null, as advantage.estimator {adv.estimator} does not read it")
    for name, who in (("dual_clip", ("cispo", "sapo")), ("clip_low", ("sapo",)), ("clip_high", ("sapo",))):
        default = getattr(LossConfig(), name)
        need(loss.surrogate not in who or getattr(loss, name) == default, f"loss.{name}",
             f"{default}, as loss.surrogate {loss.surrogate} does not read it")
    need(loss.norm_length is None or loss.aggregation == "seq_sum_over_constant", "loss.norm_length",
         "null, as only loss.aggregation seq_sum_over_constant reads it")
    need(loss.segment_weights == (1.0, 1.0) or loss.aggregation == "segment_mean", "loss.segment_weights",
         "[1.0, 1.0], as only loss.aggregation segment_mean reads it")
    return config
