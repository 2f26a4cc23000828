"""From a YAML file to a trained head: the target writes texts, then the head is trained on them. Both parts resume."""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from .data import Sampling, provenance, read_prompts, write_answers, write_user_turns
from .kinds import KINDS
from .placement import place_target, process_state
from .store import TokenStore
from .trainer import TrainConfig, train

CODE_PROMPT = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n\n```"
_DATA = ("prompts", "exclude", "docstring_prompts", "self_written", "max_tokens", "sampling")


def run(path: str | Path, output: str | Path, say: Callable[[str], None] = lambda line: None) -> dict[str, float]:
    """Carry out a recipe; started again, it goes on where it was.

    Args:
        path: YAML with ``target`` (a name or directory; ``default`` is the embedded SmolLM2-135M-Instruct), ``data``
            (``prompts`` and ``exclude``: JSONL files beside the recipe; ``docstring_prompts`` and ``self_written``: how
            many; ``max_tokens`` of answers; ``sampling``: fields of :class:`Sampling`) and ``train`` (fields of
            :class:`TrainConfig`). ``strategy: medusa`` or ``strategy: early_exit`` trains a head of that kind, and
            ``train.head`` has the fields of its configuration; without it, a DSpark head.
        output: directory for texts, checkpoints and ``head``.
        say: called with a line now and then.

    Returns:
        The figures of :func:`~specdec_hf.training.trainer.train`.

    Raises:
        ValueError: an unknown or missing field, or no prompts.
    """
    import yaml
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, output = Path(path), Path(output)
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(recipe, dict) or "target" not in recipe:
        raise ValueError(f"{path} has no field 'target'; a recipe names target, data and train")
    data = recipe.get("data") or {}
    for name in data:
        if name not in _DATA:
            raise ValueError(f"{path}: {name!r} is not a field of the section data; choose from {', '.join(_DATA)}")
    known = {item.name for item in fields(Sampling)}
    if unknown := set(data.get("sampling") or {}) - known:
        raise ValueError(
            f"{path}: {sorted(unknown)[0]!r} is not a field of sampling; choose from {', '.join(sorted(known))}"
        )
    places = {"data": str(output / "texts"), "output": str(output)}
    if cache := (recipe.get("train") or {}).get("feature_cache"):
        places["feature_cache"] = str(output / cache)
    config = TrainConfig.from_yaml(path, **places)
    if (strategy := recipe.get("strategy", "dspark")) not in KINDS:
        raise ValueError(f"{path}: strategy={strategy!r} cannot be trained; choose from {', '.join(KINDS)}")
    source = recipe["target"]
    if source == "default":
        from ..default_target import fetch_default_target

        source = fetch_default_target(say).path
    tokenizer = AutoTokenizer.from_pretrained(source)
    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    state = process_state(config.use_cpu)
    if not config.shard_target:
        place_target(target, state.device, shard=False)
    if state.is_main_process:  # under accelerate launch the others wait; where that takes long, write the texts before
        _write_texts(target, tokenizer, path, data, output / "texts", say)
    state.wait_for_everyone()
    say("training")
    resume = any(output.glob("checkpoint-*"))
    head: Any = None
    kind = KINDS[strategy]
    if kind.new is not None:
        head = kind.new(target, config, TokenStore(output / "texts").load())
    head, figures = train(target, config, head, resume=resume, say=say)
    if kind.finish is not None and state.is_main_process:
        kind.finish(head, target, config)
    return figures


def _write_texts(
    target: Any, tokenizer: Any, path: Path, data: dict[str, Any], place: Path, say: Callable[[str], None]
) -> None:
    sampling = Sampling(**(data.get("sampling") or {}))
    files = [path.parent / name for name in data.get("prompts") or []]
    prompts = read_prompts(files, [path.parent / name for name in data.get("exclude") or []]) if files else []
    prompts += docstring_prompts(data.get("docstring_prompts") or 0, sampling.seed)
    if count := data.get("self_written") or 0:
        say(f"the target writes {count} user turns")
        prompts += write_user_turns(target, tokenizer, count, sampling)
    if not prompts:
        raise ValueError(f"{path} gives no prompts; name files in data.prompts, or set data.self_written")
    store = TokenStore(place, provenance(target, tokenizer, sampling, f"{path.name}: {len(prompts)} prompts"))
    written = sum(int(item.mask.sum()) for item in store)
    limit = data.get("max_tokens")
    if limit is not None and written >= limit:
        return
    write_answers(
        target, tokenizer, prompts, store, sampling, None if limit is None else limit - written,
        lambda tokens, done: say(f"{written + tokens:,} answer tokens, {done} of {len(prompts)} prompts"),
    )  # fmt: skip


def docstring_prompts(count: int, seed: int = 0) -> list[str]:
    """Code tasks: signatures and docstrings of public functions of Python's standard library, without their bodies.

    Args:
        count: how many at most; those with doctests come first.
        seed: of the choice.
    """
    found: list[tuple[bool, str]] = []
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")) if count else []
    for file in files:
        if "site-packages" in file.parts or "test" in file.parts or file.stat().st_size > 400_000:
            continue
        try:
            text = file.read_text(encoding="utf-8")
            nodes = ast.parse(text).body
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        lines = text.split("\n")
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and len(node.body) > 1:
                docstring = ast.get_docstring(node, clean=False)
                if docstring and 60 < len(docstring) < 900:
                    head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
                    found.append((">>>" not in docstring, CODE_PROMPT.format(head)))
    random.Random(seed).shuffle(found)
    found.sort(key=lambda item: item[0])
    return [prompt for _, prompt in found[:count]]
