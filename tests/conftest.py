"""Shared by all tests: one CPU thread, a fixed seed, tiny random targets by family, a byte-level tokenizer.

Nothing here reaches the network. A target costs milliseconds to build, so each test gets its own and may change it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported: it reads this once

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from specdec_hf import costs

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

VOCAB_SIZE = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # a tied random model mostly repeats its last token
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "phi3": {"sliding_window": None},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 8, "final_logit_softcapping": 20.0},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 8},
    "gpt2": {},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
}
"""Families of targets by transformers' model type, with what their configurations need beyond ``SMALL``."""


def make_target(family: str = "llama", seed: int = 0, spread: float = 6.0, **overrides: Any) -> Any:
    """A tiny random causal LM in float32, in eval mode.

    Args:
        family: a key of ``FAMILIES``.
        seed: of the weights; the global random state is left as it was.
        spread: how far apart its logits lie (their standard deviation, roughly). Fresh weights give nearly equal
            logits, and greedy decoding would then turn on rounding.
        overrides: configuration fields, e.g. ``num_hidden_layers=2`` or ``eos_token_id=None``.
    """
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; known: {', '.join(FAMILIES)}")
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)  # layers that matter beside the residual
            probe = torch.randint(3, config.vocab_size, (2, 16))
            output = model.get_output_embeddings().weight
            if not model.config.tie_word_embeddings:
                output.mul_(spread / model(probe).logits.std().clamp_min(1e-6))
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes with a small chat template, built in memory. Ids: 0 pad, 1 bos, 2 eos, then bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = _byte_characters()
    special = ["<pad>", "<bos>", "<eos>"]
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )
    return tokenizer


def _byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte, in the order of the bytes (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


@pytest.fixture(autouse=True)
def seed() -> None:
    """Each test starts from the same random state, whatever ran before it in this worker."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def costs_of_the_tests(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What forwards cost is measured anew in each run and kept apart from the user's own tables."""
    monkeypatch.setattr(costs, "_folder", lambda: tmp_path_factory.getbasetemp() / "costs")


@pytest.fixture
def tiny_target() -> Callable[..., Any]:
    """``make_target``: ``tiny_target("qwen3", num_hidden_layers=2)``."""
    return make_target


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """``make_tokenizer``, once a session; a target for it needs ``vocab_size=260`` or more."""
    return make_tokenizer()
