"""Target, tokenizer and draft head by their names, as commands take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .default_target import BUNDLED_HEAD, fetch_default_target
from .hardware import fast_dtype

DTYPES = ("auto", "bfloat16", "float32", "float16")


@dataclass(frozen=True)
class Pair:
    """A target and its head, in one dtype on one device, in eval mode.

    Attributes:
        model, tokenizer, head: the target (speculation not yet enabled), its tokenizer, its `DSparkDraftModel`.
        target, draft: names for a person.
        draft_source: what the head was loaded from.
        dtype: the number type of both, as chosen where "auto" was asked for.
    """

    model: Any
    tokenizer: Any
    head: Any
    target: str
    draft: str
    draft_source: str
    dtype: str


def check_names(target: str | None, draft: str | None, dtype: str) -> None:
    """Refuse what `load_pair` could not load, before anything is imported or fetched.

    Raises:
        ValueError: a dtype that is not known, or ``target`` without ``draft``.
        FileNotFoundError: the bundled head is asked for and not there.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}")
    if target is not None and draft is None:
        raise ValueError(
            f"target is {target!r} without a draft: the bundled head was trained for SmolLM2-135M-Instruct and fits no "
            "other. Name a DSpark head that belongs to this target with --draft."
        )
    if draft is None and not (BUNDLED_HEAD / "config.json").is_file():
        raise FileNotFoundError(
            f"this copy of specdec_hf comes without its head ({BUNDLED_HEAD.name} is not in assets/): install from a "
            "full checkout or wheel, or name a DSpark head with --draft"
        )


@dataclass(frozen=True)
class Target:
    """A target alone: what `Pair` says of it."""

    model: Any
    tokenizer: Any
    name: str
    dtype: str


def load_target(target: str | None, dtype: str = "auto", say: Callable[[str], None] = lambda message: None) -> Target:
    """Load a target, on the GPU if there is one. On the CPU, `pack_linears` it.

    Args:
        target: model name or directory; None is SmolLM2-135M-Instruct (see `default_target`).
        dtype: one of ``DTYPES``; "auto" is bfloat16, or float32 on a CPU where neither arithmetic nor packing makes
            bfloat16 blocks cheap (see `hardware.fast_dtype`).
        say: is told, in sentences, what takes time and what was chosen.

    Raises:
        OSError: not found.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .packing import pack_linears, packs_bfloat16

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = fast_dtype(device, packed=packs_bfloat16())
        if dtype == "float32":
            say(
                "float32: this processor has no bfloat16 arithmetic, so a block of tokens would cost nearly as much as "
                "its tokens one by one and hardly anything could be gained (--dtype bfloat16 shows it)"
            )
    source, name = target, target
    if source is None:
        found = fetch_default_target(say)
        source, name = found.path, found.source
    assert name is not None
    say(f"loading the target in {dtype} ...")
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).to(device).eval()
    if device == "cpu" and (size := pack_linears(model)):
        say(
            f"linear layers are packed for blocks of tokens: {size / 2**20:.0f} MB more memory (see specdec_hf.packing)"
        )
    return Target(model, tokenizer, name, dtype)


def load_pair(
    target: str | None, draft: str | None, dtype: str = "auto", say: Callable[[str], None] = lambda message: None
) -> Pair:
    """Load a target (see `load_target`) and its head, in its dtype and on its device.

    Args:
        target, dtype, say: see `load_target`.
        draft: DSpark head for it; None is the bundled one, which fits the default target only.

    Raises:
        ValueError: a dtype that is not known, or ``target`` without ``draft``.
        OSError: not found.
    """
    check_names(target, draft, dtype)
    from .heads.dspark import DSparkDraftModel
    from .packing import pack_linears

    loaded = load_target(target, dtype, say)
    model = loaded.model
    where = draft or str(BUNDLED_HEAD)
    head = DSparkDraftModel.from_pretrained(where, dtype=model.dtype).to(model.device).eval()
    if model.device.type == "cpu":
        pack_linears(head)
    draft_name = draft or f"{BUNDLED_HEAD.name}, which comes with the package"
    return Pair(model, loaded.tokenizer, head, loaded.name, draft_name, where, loaded.dtype)
