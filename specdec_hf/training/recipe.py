"""From a YAML file to a trained head: the target writes texts, then the head is trained on them. Both parts resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .kinds import KINDS, kind_of, load_head
from .placement import place_target, process_state
from .sources import TextSettings
from .store import TokenStore
from .texts import hub_or_last, resolve, write_texts, writing_dtype
from .trainer import TrainConfig, train

_SECTIONS = ("target", "data", "train", "strategy")


def run(path: str | Path, output: str | Path, say: Callable[[str], None] = lambda line: None) -> dict[str, float]:
    """Carry out a recipe; started again, it goes on where it was.

    Args:
        path: YAML with ``target`` (a name or directory; ``default`` is the embedded SmolLM2-135M-Instruct), ``data``
            (fields of :class:`~specdec_hf.training.sources.TextSettings`) and ``train`` (fields of
            :class:`TrainConfig`). ``strategy: medusa`` or ``strategy: early_exit`` trains a head of that kind, and
            ``train.head`` has the fields of its configuration; without it, a DSpark head, or one of the kind of
            ``train.init_head``.
        output: directory for texts, checkpoints and ``head``.
        say: called with a line now and then.

    Returns:
        The figures of :func:`~specdec_hf.training.trainer.train`.

    Raises:
        ValueError: an unknown or missing field, or no prompts.
    """
    import yaml
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path, output = Path(path), Path(output)
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(recipe, dict) or "target" not in recipe:
        raise ValueError(f"{path} has no field 'target'; a recipe names target, data and train")
    if unknown := [name for name in recipe if name not in _SECTIONS]:
        raise ValueError(f"{path}: {unknown[0]!r} is not a section of a recipe; choose from {', '.join(_SECTIONS)}")
    try:
        settings = TextSettings.of(recipe.get("data") or {})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    texts = output / "texts" if settings.texts is None else path.parent / settings.texts
    places = {"data": str(texts), "output": str(output)}
    if cache := (recipe.get("train") or {}).get("feature_cache"):
        places["feature_cache"] = str(output / cache)
    config = TrainConfig.from_yaml(path, **places)
    if (strategy := recipe.get("strategy", "dspark")) not in KINDS:
        raise ValueError(f"{path}: strategy={strategy!r} cannot be trained; choose from {', '.join(KINDS)}")
    if config.init_head is not None:
        strategy = kind_of(config.init_head, recipe.get("strategy"))
    source = resolve(recipe["target"], say)
    tokenizer = AutoTokenizer.from_pretrained(source)
    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    state = process_state(config.use_cpu)
    if not config.shard_target:
        place_target(target, state.device, shard=False)
    head: Any = None
    if config.init_head is not None:
        head = load_head(config.init_head)
        head.bind(target)  # a head for another target is refused before any text is written
    if state.is_main_process:  # under accelerate launch the others wait; where that takes long, write the texts before
        name = recipe["target"] if recipe["target"] == "default" else hub_or_last(recipe["target"])
        if settings.texts is None:
            dtype = writing_dtype(AutoConfig.from_pretrained(source), state.device.type, texts)
            spoken = str(dtype).removeprefix("torch.")
            write_texts(
                name, tokenizer, lambda: _writer(target, source, dtype), settings, texts, path.parent, spoken, say=say
            )
        elif (author := (TokenStore(texts).provenance or {}).get("target")) != name:
            say(f"{texts} was written by {author!r}, not by {name!r}: right only if that is the same model")
    state.wait_for_everyone()
    say("training")
    resume = any(output.glob("checkpoint-*"))
    kind = KINDS[strategy]
    if head is None and kind.new is not None:
        head = kind.new(target, config, TokenStore(texts).load())
    head, figures = train(target, config, head, resume=resume, say=say)
    if kind.finish is not None and state.is_main_process:
        kind.finish(head, target, config)
    return figures


def _writer(target: Any, source: str, dtype: torch.dtype) -> Any:
    """The target in the number type in which it writes: the float32 one that heads learn from, or another copy."""
    from transformers import AutoModelForCausalLM

    if dtype == target.dtype:
        return target
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(target.device).eval()
