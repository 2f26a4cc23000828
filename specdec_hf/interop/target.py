"""What a conversion has to know of the target: its name and configuration, and embeddings where they are exported."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..heads._borrowed import text_config
from ..heads.dspark import DSparkConfig


class Target:
    """A target by name; its weights are loaded only when embeddings are asked for.

    Args:
        name: directory or Hub repository, written into files as it is.
        hub: ``revision``, ``token``, ...

    Raises:
        OSError, ValueError: no model's configuration there.
    """

    def __init__(self, name: str, hub: dict[str, Any] | None = None) -> None:
        self.name, self._hub = name, hub or {}
        self.config = AutoConfig.from_pretrained(name, **self._hub)
        self.text = text_config(self.config)

    @property
    def architectures(self) -> list[str]:
        """Class names of the target, as its own file says."""
        return list(self.config.architectures or [])

    @cached_property
    def model(self) -> Any:
        """The target, in the dtype of its file."""
        return AutoModelForCausalLM.from_pretrained(self.name, dtype="auto", **self._hub).eval()

    def tokenizer(self) -> Any:
        """The target's tokenizer, ``None`` where it has none."""
        try:
            found = AutoTokenizer.from_pretrained(self.name, **self._hub)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if found("a")["input_ids"] else None  # without files transformers makes one that knows no text

    @torch.no_grad()
    def embedding_rows(self, count: int, native: float = 1.0) -> tuple[torch.Tensor, float]:
        """[count, D] rows for ids 0 to count - 1, and the factor that makes them what the embedding *module* gives.

        Some modules scale inside. Where theirs is the factor ``native``, the rows are the bare weights.
        """
        module = self.model.get_input_embeddings()
        rows = module(torch.arange(count)).detach()
        if native != 1.0:
            bare = module.weight.detach()[:count]
            if torch.allclose(bare.float() * native, rows.float(), rtol=0.01):  # bfloat16 rounds the factor
                return bare.clone(), native
        return rows.clone(), 1.0

    def lm_head_rows(self, count: int) -> torch.Tensor:
        """[count, D] rows of the lm_head.

        Raises:
            ValueError: it is no plain linear layer without bias.
        """
        module: Any = self.model.get_output_embeddings()
        plain: bool = module.__class__ is torch.nn.Linear and module.bias is None  # a subclass may be quantised
        if not plain:
            raise ValueError(
                f"{self.name}: the lm_head is {module}; only a linear layer without bias can be written into a head's "
                "file. Train the head with an lm_head of its own (has_lm_head=True)."
            )
        return module.weight.detach()[:count].clone()

    def spare_token_id(self, vocab_size: int) -> int | None:
        """The last id below ``vocab_size`` that the tokenizer does not use; ``None`` without one."""
        tokenizer = self.tokenizer()
        if tokenizer is None:
            return None
        used = set(tokenizer.get_vocab().values())
        return next((one for one in range(vocab_size - 1, -1, -1) if one not in used), None)

    def check(self, config: DSparkConfig) -> None:
        """Compare the configurations' sizes. Raises ValueError that names what differs."""
        text = self.text
        for field, ours, theirs in (
            ("target_hidden_size", config.target_hidden_size, text.hidden_size),
            ("num_target_layers", config.num_target_layers, text.num_hidden_layers),
        ):
            if ours is not None and ours != theirs:
                raise ValueError(
                    f"the head has {field}={ours}, but {self.name} has {theirs}; give the head's own target"
                )
        if max(config.target_layer_ids) >= text.num_hidden_layers - 1:
            raise ValueError(
                f"target_layer_ids={config.target_layer_ids}, but {self.name} has {text.num_hidden_layers} layers and "
                "the last is never a tap; give the head's own target, or --target-layer-ids"
            )
        if config.vocab_size > text.vocab_size:
            raise ValueError(
                f"the head has vocab_size={config.vocab_size}, but {self.name} has {text.vocab_size}; give its own "
                "target"
            )
