"""A recipe for any target from its configuration alone: which head, how much text, how long to train."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .data import check_chat, write_whole
from .kinds import KINDS, kind_of
from .placement import process_state
from .recipe import run
from .store import TokenStore
from .texts import resolve
from .trainer import last_checkpoint

TOKENS_PER_STEP = 150
"""Answer tokens for one update, about as in the bundled head's run (1,036,944 tokens, 8,400 updates)."""
TOKENS_PER_PROMPT = 120
"""Answers are about as long, so that there are enough prompts for the tokens wanted."""


@dataclass(frozen=True)
class Request:
    """What a user asks of ``specdec train --target``; the rest follows from the target.

    Attributes:
        target: name or directory; ``default`` is the embedded one.
        strategy: kind of head; ``None``: DSpark, or that of ``init_head``.
        init_head: a head to go on with.
        max_tokens: answer tokens to write; ``None``: 250,000 on a CPU, 2,000,000 with an accelerator.
        steps: updates; ``None``: in proportion to the tokens.
        head: fields of the head's configuration that are to differ.
        data: fields of :class:`~specdec_hf.training.sources.TextSettings`; without any prompts the target writes its
            own.
        train: fields of :class:`~specdec_hf.training.trainer.TrainConfig` that are to differ.
    """

    target: str
    strategy: str | None = None
    init_head: str | None = None
    max_tokens: int | None = None
    steps: int | None = None
    head: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


def head_fields(config: Any, strategy: str = "dspark") -> dict[str, Any]:
    """Fields of a head that suit a target, beside what the head's own configuration derives from it.

    Args:
        config: the target's configuration.
        strategy: kind of head.

    Returns:
        For DSpark: layers by the target's depth (1 below 8 layers, 2 below 32, else 3), a block of 5 below 32 layers,
        else 7, the rank of the Markov head an eighth of the width, 64 to 256; for all kinds a draft vocabulary of about
        a quarter where the target's has more than 16,384 ids, at most 32,768.
    """
    text = config.get_text_config(decoder=True)
    fields: dict[str, Any] = {}
    if text.vocab_size > 16_384:
        fields["draft_vocab_size"] = min(max(text.vocab_size // 4 // 1024 * 1024, 8_192), 32_768)
    if strategy == "dspark":
        depth = text.num_hidden_layers
        fields["num_hidden_layers"] = 1 if depth < 8 else 2 if depth < 32 else 3
        fields["block_size"] = 5 if depth < 32 else 7
        fields["markov_rank"] = min(max(text.hidden_size // 8, 64), 256)
    return fields


def make_recipe(request: Request, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The recipe that carries a request out.

    Raises:
        ValueError: a target that cannot have such a head, or contradictions in the request.
        OSError: no such target.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer

    source = resolve(request.target, say)
    config = AutoConfig.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if request.strategy is not None and request.strategy not in KINDS:
        raise ValueError(f"strategy={request.strategy!r} cannot be trained; choose from {', '.join(KINDS)}")
    if request.init_head is not None:
        if request.head:
            raise ValueError(
                f"head={request.head!r} beside init_head={request.init_head!r}: a given head keeps its shape; leave "
                "one out"
            )
        strategy = kind_of(request.init_head, request.strategy)
        head: dict[str, Any] = {}
    else:
        strategy = request.strategy or "dspark"
        head = {**head_fields(config, strategy), **request.head}
        KINDS[strategy].model.config_class.for_target(config, **head)  # refused before anything is written
    fast = torch.cuda.is_available()
    tokens = request.max_tokens or (2_000_000 if fast else 250_000)
    data = _data(request, config, tokens)
    if "texts" in data:
        tokens = sum(int(item.mask.sum()) for item in TokenStore(data["texts"]).load())
    check_chat(tokenizer, data.get("system_prompt"), data.get("thinking"))
    steps = request.steps or max(tokens // TOKENS_PER_STEP, 200)
    train: dict[str, Any] = {
        "max_steps": steps, "warmup_steps": min(20, max(steps // 10, 1)), "save_steps": max(min(200, steps // 4), 1),
        "loss": {"ce": 0.2, "tv": 0.9, "confidence": 1.0, "decay": 2.5}, "early_loss": {"ce": 1.0, "tv": 0.5},
        "early_share": 0.3, "sample_slots": True, "bf16": "auto",
    }  # fmt: skip
    if strategy == "medusa":
        train |= {"loss": {"ce": 0.5, "tv": 0.9, "decay": 2.5}, "early_share": 0.0, "lr": 0.002}
    train |= request.train
    if head:
        train["head"] = head
    if request.init_head is not None:
        train["init_head"] = _whole(request.init_head)
        train.setdefault("muon_lr", 0.01)  # a trained head needs smaller steps than a new one
        train.setdefault("lr", 1e-3)
    return {"target": _whole(request.target), "strategy": strategy, "data": data, "train": train}


def _data(request: Request, config: Any, tokens: int) -> dict[str, Any]:
    if request.data.get("texts") is not None:
        if request.max_tokens is not None:
            raise ValueError(f"max_tokens={tokens} beside texts that are written already; leave one out")
        return {"texts": _whole(request.data["texts"])}
    data: dict[str, Any] = {"max_tokens": tokens, **_whole_paths(request.data)}
    if not any(data.get(name) for name in ("prompts", "dataset", "docstring_prompts", "self_written")):
        data["self_written"] = max(tokens // TOKENS_PER_PROMPT, 64)
    longest = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 4096)
    given = data.get("sampling") or {}
    answer = given.get("max_new_tokens", min(288, longest // 2))
    data["sampling"] = {
        "max_new_tokens": answer,
        "max_prompt_tokens": min(230, longest - answer),
        **given,
    }
    return data


def train_target(
    request: Request, output: str | Path, say: Callable[[str], None] = lambda line: None
) -> dict[str, float]:
    """What ``specdec train --target`` does: texts, head and training from nothing; started again, it goes on.

    Args:
        request: see there.
        output: directory for ``recipe.yaml``, ``texts``, checkpoints and ``head``.
        say: called with a line now and then.

    Returns:
        The figures of :func:`~specdec_hf.training.trainer.train`.

    Raises:
        ValueError: as :func:`make_recipe` and :func:`~specdec_hf.training.recipe.run`, or the directory holds a run
            of another request.
        ImportError: PyYAML or accelerate is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError("training needs PyYAML; pip install 'specdec_hf[train]'") from error
    recipe, place = make_recipe(request, say), Path(output) / "recipe.yaml"
    state = process_state(bool(request.train.get("use_cpu")))
    before = yaml.safe_load(place.read_text(encoding="utf-8")) if place.is_file() else None
    state.wait_for_everyone()
    if before is not None and before != recipe:
        changed = [name for name in recipe if not isinstance(before, dict) or before.get(name) != recipe[name]]
        # Before the first checkpoint only the texts are there, and they do not depend on how a head is trained.
        if {"target", "data"} & set(changed) or last_checkpoint(output) is not None:
            raise ValueError(
                f"{place} is of another run ({', '.join(changed)} differ); name another directory, give the same "
                f"options to go on, or carry on with the file itself: specdec train {place} {output}"
            )
    if before != recipe and state.is_main_process:
        write_whole(place, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
        say(f"recipe: {place}" + ("" if before is None else " (replaced)"))
    state.wait_for_everyone()
    return run(place, output, say)


def _whole(name: str) -> str:
    """A directory by its whole path, so that it is found from the recipe's directory too; a name as it is."""
    return os.path.abspath(name) if os.path.exists(name) and name != "default" else name


def _whole_paths(data: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [os.path.abspath(one) for one in value] if name in ("prompts", "exclude") else value
        for name, value in data.items()
        if value not in (None, [], {})
    }
