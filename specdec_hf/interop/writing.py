"""A head in this package's terms written in a layout: specdec, DeepSpec (Qwen3, Gemma 4), speculators, z-lab's DFlash.

What a layout has no field for is refused where it changes the drafts, and warned about where it does not.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from ..heads._config_sources import GEMMA4_TYPES
from ..heads.dspark import DSparkConfig
from .reading import Checkpoint
from .target import Target

SPECULATORS_VERSION = "0.9.0"
"""The version of speculators whose layout is written."""


def write_head(
    head: Checkpoint, out: str, layout: str, target: Target | None, mask_row: int | None = None
) -> list[str]:
    """Write a head into a new directory.

    Args:
        head: as read; ``head.tensors`` may get the target's embeddings added.
        out: directory; absent or empty.
        layout: ``specdec``, ``deepspec``, ``speculators`` or ``zlab``.
        target: needed for speculators (it names its verifier), and where embeddings have to be written.
        mask_row: the id whose row gets the mask vector of a head that has its own.

    Returns:
        Warnings, in words.

    Raises:
        ValueError: the layout cannot hold this head, or a fact is missing; the message says which.
        OSError: the directory is not empty or cannot be written.
    """
    directory = Path(out)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty directory; give a new one")
    if layout == "specdec":
        warnings, fields = [], _specdec(head.config)
    else:
        warnings = _prepare(head, layout, target, mask_row)
        write = {"deepspec": _deepspec, "speculators": _speculators, "zlab": _zlab}[layout]
        fields = write(head.config, target)
    tensors = dict(head.tensors)
    if layout == "speculators" and head.config.has_reduced_vocab:
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
    _write(directory, fields, tensors)
    return warnings


def _write(directory: Path, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """All or nothing: files are made beside the directory and moved there at the end."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent)
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            os.path.join(unfinished, "model.safetensors"),
            metadata={"format": "pt"},
        )
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        Path(unfinished, "config.json").write_text(text, encoding="utf-8")
        os.chmod(unfinished, 0o755)  # mkdtemp makes it private
        if directory.is_dir():
            directory.rmdir()
        os.replace(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _specdec(config: DSparkConfig) -> dict[str, Any]:
    config.architectures = ["DSparkDraftModel"]
    return json.loads(config.to_json_string(use_diff=False))


def _prepare(head: Checkpoint, layout: str, target: Target | None, mask_row: int | None) -> list[str]:
    """Refuse what the layout cannot hold, add embeddings where they must be in the file, and collect warnings."""
    config = head.config
    _refuse(config, layout)
    if layout == "zlab":
        _drop_embeddings(head, target)
    warnings = engine_warnings(config, layout)
    # What the layout's own embedding module multiplies its rows by.
    native = float(config.hidden_size) ** 0.5 if config.layer_kind == "gemma4" else 1.0
    changed = not config.has_embed_tokens and config.embedding_scale != 1.0
    if config.mask_token_id is None or changed or (layout == "deepspec" and target is not None):
        _own_embeddings(head, target, native)
    if config.has_embed_tokens and config.embedding_scale != native:
        factor, config.embedding_scale = config.embedding_scale / native, native
        head.tensors["embed_tokens.weight"] = head.tensors["embed_tokens.weight"] * factor
        warnings.append(f"embed_tokens is multiplied by embedding_scale, {factor:g} (rounded to its dtype).")
    if config.mask_token_id is None:
        warnings.append(_write_mask_row(head, target, mask_row, native))
    if config.has_reduced_vocab and not config.has_lm_head:
        if target is None:
            raise ValueError(
                "the head borrows its lm_head for a reduced vocabulary, which engines read from the file; give --target"
            )
        ids = head.tensors["d2t"] + torch.arange(len(head.tensors["d2t"]))
        head.tensors["lm_head.weight"] = target.lm_head_rows(config.vocab_size)[ids].to(_dtype(head))
        config.has_lm_head = True
    if layout == "deepspec" and not (config.has_embed_tokens and config.has_lm_head):
        if target is not None:
            head.tensors["lm_head.weight"] = target.lm_head_rows(config.vocab_size).to(_dtype(head))
            config.has_lm_head = True
        else:
            warnings.append(
                "the file has no embed_tokens and lm_head of its own: vLLM takes the target's, but DeepSpec's own "
                "loader leaves them uninitialised without a word. Give --target to write them into the file."
            )
    if config.confidence_temperatures is not None and layout == "speculators":
        warnings.append("confidence_temperatures (calibration) have no field in this layout and are left out.")
    return warnings


def _refuse(config: DSparkConfig, layout: str) -> None:
    name = {"deepspec": "DeepSpec's layout", "speculators": "the speculators layout", "zlab": "z-lab's layout"}[layout]
    gemma = config.layer_kind == "gemma4"
    refused = [
        (not config.qk_norm, "qk_norm=False", "its layers norm queries and keys"),
        (
            config.final_logit_softcapping is not None and not gemma,
            "final_logit_softcapping",
            "only Gemma 4's layers have it there" if layout == "deepspec" else "it has no field for it",
        ),
        (gemma and layout != "deepspec", "layer_kind='gemma4'", "its layers are Qwen3's"),
        (not config.embedding_norm, "embedding_norm=False", "it has no field for it"),
        (config.attention_k_eq_v and not gemma, "attention_k_eq_v", "Qwen3's layers have values of their own"),
        (config.sliding_window is not None, "sliding_window", "programs differ in what a block sees there"),
        (layout != "speculators" and config.has_reduced_vocab, "draft_vocab_size", "it has no reduced vocabulary"),
        (
            layout != "speculators" and config.target_hidden_size != config.hidden_size,
            "target_hidden_size",
            "it takes draft and target as equally wide",
        ),
        (layout == "zlab" and bool(config.markov_rank), "markov_rank", "it has no Markov head"),
        (layout == "zlab" and config.enable_confidence_head, "enable_confidence_head", "it has no confidence head"),
        (layout == "zlab" and config.sample_from_anchor, "sample_from_anchor", "only its mask slots predict"),
        (
            layout == "zlab" and config.mask_token_id is None,
            "mask_embedding",
            "it has no embeddings to hold the vector",
        ),
        (layout == "zlab" and config.embedding_scale != 1.0, "embedding_scale", "it takes the target's embeddings"),
    ]
    for applies, what, why in refused:
        if applies:
            other = " Use --to speculators." if layout != "speculators" and "vocab" in what + why else ""
            raise ValueError(f"a head with {what} cannot be written in {name}: {why}.{other}")


def _drop_embeddings(head: Checkpoint, target: Target | None) -> None:
    """z-lab's file has no embeddings: a head's own must be the target's, which is looked up and never assumed."""
    config = head.config
    for name, has in (("embed_tokens", config.has_embed_tokens), ("lm_head", config.has_lm_head)):
        if not has:
            continue
        if target is None:
            raise ValueError(f"z-lab's layout has no {name}; give --target, so that the head's can be compared with it")
        rows = head.tensors.pop(f"{name}.weight")
        count = config.vocab_size
        theirs = target.embedding_rows(count)[0] if name == "embed_tokens" else target.lm_head_rows(count)
        if not torch.equal(rows, theirs.to(rows.dtype)):
            raise ValueError(
                f"the head's {name} differs from {target.name}'s, and z-lab's layout has none. Use --to speculators."
            )
    config.has_embed_tokens = config.has_lm_head = False


def engine_warnings(config: DSparkConfig, layout: str | None = None) -> list[str]:
    """What engines (vLLM 0.32) refuse or do otherwise with this head in a layout (``None``: any), in words."""
    found = []
    if config.markov_head_type in ("gated", "rnn"):
        found.append(f"vLLM refuses markov_head_type={config.markov_head_type!r} when it loads the head.")
    dflash = layout in ("speculators", "zlab") and not config.enable_confidence_head
    if config.markov_rank == 0 and not dflash:
        found.append(
            "vLLM's process dies at a DSpark head with markov_rank 0; without a confidence head, --to speculators or "
            "zlab makes it a DFlash head, which vLLM serves."
        )
    if config.layer_kind == "gemma4" and not config.attention_k_eq_v:
        found.append("vLLM refuses Gemma 4 layers whose values are not the keys' projection (attention_k_eq_v false).")
    if config.layer_kind == "gemma4" and layout is None and not (config.has_embed_tokens and config.has_lm_head):
        found.append("vLLM takes no embeddings from a Gemma 4 target: convert with --target, which writes them.")
    if -1 in config.target_layer_ids:
        found.append("target_layer_ids has -1 (the embedding output), which no engine has been tried with.")
    if not config.sample_from_anchor and layout in (None, "deepspec"):
        found.append("sample_from_anchor is false: DeepSpec's own code ignores that and drafts from the wrong slots.")
    return found


def _dtype(head: Checkpoint) -> torch.dtype:
    return head.tensors["fc.weight"].dtype


def _own_embeddings(head: Checkpoint, target: Target | None, native: float) -> None:
    if head.config.has_embed_tokens:
        return
    if target is None:
        raise ValueError(
            "the head borrows the target's embeddings but must bring changed ones (mask_embedding, embedding_scale); "
            "give --target so that they can be written into the file"
        )
    rows, scaled = target.embedding_rows(head.config.vocab_size, native)
    head.tensors["embed_tokens.weight"] = rows.to(_dtype(head))
    head.config.has_embed_tokens = True
    head.config.embedding_scale *= scaled


def _write_mask_row(head: Checkpoint, target: Target | None, mask_row: int | None, native: float) -> str:
    """Other layouts know a mask token, not a mask vector: it becomes the embedding of an id that no text holds."""
    config = head.config
    spare = target.spare_token_id(config.vocab_size) if mask_row is None and target is not None else mask_row
    if spare is None:
        raise ValueError(
            "this head has a mask vector of its own (mask_embedding); other layouts only know a mask token. Give "
            "--mask-token-id with an id that no text holds (an unused or padding row of the vocabulary): its embedding "
            "in the exported file becomes the vector. With --target whose tokenizer leaves rows unused, the last such "
            "row is taken."
        )
    if not 0 <= spare < config.vocab_size:
        raise ValueError(f"--mask-token-id {spare}: it must be 0 to {config.vocab_size - 1}; give an unused id")
    rows = head.tensors["embed_tokens.weight"].clone()
    rows[spare] = (head.tensors.pop("mask_embedding") / native).to(rows.dtype)
    head.tensors["embed_tokens.weight"] = rows
    config.mask_token_id = spare
    return f"the head's own mask vector is written as the embedding of id {spare}; that id must not occur in texts."


def _layer_config(config: DSparkConfig) -> dict[str, Any]:
    """A complete Qwen3 configuration of the draft's layers: readers fill in no defaults."""
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "hidden_act rms_norm_eps attention_bias max_position_embeddings initializer_range bos_token_id eos_token_id "
        "pad_token_id"
    )
    fields = {name: getattr(config, name) for name in names.split()}
    rest = "model_type attention_dropout max_window_layers layer_types sliding_window use_sliding_window use_cache"
    whole = Qwen3Config(
        **fields,
        rope_parameters=dict(config.rope_parameters),
        layer_types=["full_attention"] * config.num_hidden_layers,
    ).to_dict()
    kept = ["rope_parameters", *rest.split()]
    return {**fields, **{name: whole.get(name) for name in kept}, "tie_word_embeddings": False}


def _draft_fields(config: DSparkConfig) -> dict[str, Any]:
    return {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type if config.markov_rank else "vanilla",
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "sample_from_anchor": config.sample_from_anchor,  # readers differ in what they take when it is missing
        "dtype": _dtype_name(config),
        "tie_word_embeddings": False,
    }


def _dtype_name(config: DSparkConfig) -> str:
    return str(config.dtype or "float32").removeprefix("torch.")


def _gemma4_config(config: DSparkConfig, target: Target | None) -> dict[str, Any]:
    """The draft's layers as a Gemma 4 text configuration in the spelling that DeepSpec's code reads."""
    if target is None:
        raise ValueError(
            "DeepSpec's heads with Gemma 4's layers record which kind of Gemma 4 the target is (model_type); give "
            "--target"
        )
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "rms_norm_eps attention_bias attention_k_eq_v final_logit_softcapping max_position_embeddings "
        "initializer_range bos_token_id eos_token_id pad_token_id"
    )
    if target.text.model_type not in GEMMA4_TYPES:
        raise ValueError(
            f"{target.name} is a {target.text.model_type}; DeepSpec's layout has Gemma 4's layers for "
            "Gemma 4 targets only"
        )
    return {
        **{name: getattr(config, name) for name in names.split()},
        "model_type": target.text.model_type,
        "target_model_type": target.config.model_type,
        "target_text_model_type": target.text.model_type,
        "head_dim": config.head_dim,
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "hidden_activation": config.hidden_act,
        "attention_dropout": 0.0,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_parameters": {"full_attention": dict(config.rope_parameters)},
        "tie_word_embeddings": False,
    }


def _deepspec(config: DSparkConfig, target: Target | None) -> dict[str, Any]:
    if config.num_target_layers is None:
        raise ValueError("num_target_layers is not known, which DeepSpec's config.json needs; give --target")
    extra = {
        name: getattr(config, name)
        for name in ("confidence_temperatures", "draft_top_k", "target_name_or_path", "target_revision")
        if getattr(config, name) is not None
    }
    gemma = config.layer_kind == "gemma4"
    return {
        **(_gemma4_config(config, target) if gemma else _layer_config(config)),
        **_draft_fields(config),
        **extra,
        "architectures": ["Gemma4DSparkModel" if gemma else "Qwen3DSparkModel"],
        "num_anchors": config.num_anchors,  # DeepSpec's loader needs it
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
    }


def _zlab(config: DSparkConfig, target: Target | None) -> dict[str, Any]:
    if config.num_target_layers is None:
        raise ValueError("num_target_layers is not known, which z-lab's config.json has; give --target")
    return {
        **_layer_config(config),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
        "dtype": _dtype_name(config),
        "num_target_layers": config.num_target_layers,
    }


def _speculators(config: DSparkConfig, target: Target | None) -> dict[str, Any]:
    kind = "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"
    draft = _draft_fields(config)
    if kind == "dflash":
        draft = {name: value for name, value in draft.items() if "markov" not in name and "confidence" not in name}
    if target is None:
        raise ValueError(
            "the speculators layout names its target (verifier), from which engines take embeddings and lm_head; a "
            "missing one loads garbage without an error. Give --target."
        )
    return {
        **draft,
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [one + 1 for one in config.target_layer_ids],
        "draft_vocab_size": config.draft_vocab_size,
        # vLLM takes false for causal blocks in *all* layers of a DFlash head, and ignores it in a DSpark one; for the
        # library it is about sliding layers only, of which there are none.
        "sliding_window_non_causal": kind == "dflash",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": config.max_draft_tokens,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": target.architectures, "name_or_path": target.name},
        },
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "transformer_layer_config": _layer_config(config),
    }
