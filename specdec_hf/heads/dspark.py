"""The DSpark head: a parallel block backbone fed by the target's hidden states, a Markov head and a confidence head.

One round of the paper's drafting is three calls: :meth:`DSparkDraftModel.extend_context` with the hidden states of
newly committed tokens, :meth:`DSparkDraftModel.draft_block` for the whole block at once, and
:meth:`DSparkDraftModel.markov_step` slot by slot. Sampling, verification and caches of the target are not known here.

Letters: B rows, T context tokens, K ``block_size``, P proposals of a block (K, or K - 1 when the anchor slot predicts
nothing), N anchors, D draft and Dt target hidden size, m taps, V target and Vd draft vocabulary, r Markov rank.
Source: Cheng et al., "DSpark", 2026, and the checkpoints of DeepSpec.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers import initialization as init

from ._borrowed import BorrowedTarget, check_target
from ._card import CardOnPush
from ._config_sources import spread_layers
from ._context import DraftContext
from ._dspark_config import DSparkConfig
from ._dspark_training import BlockTraining, DSparkOutput
from ._layers import ConfidenceHead, DSparkLayer, DSparkRMSNorm, DSparkRotary, MarkovHead
from ._loading import HUB_KEYWORDS, check_digests, check_values, compare_tensors, tensor_shapes, weight_files
from ._vocabulary import DraftVocabulary

__all__ = ["DSparkConfig", "DSparkDraftModel", "DSparkOutput", "DraftContext", "spread_layers"]

logger = logging.getLogger(__name__)


class DSparkDraftModel(CardOnPush, BlockTraining, DraftVocabulary, PreTrainedModel):
    """Drafts a block of tokens for a target model; see the module's docstring for one round.

    ``from_pretrained`` reads this package's directories and DeepSpec's (``Qwen3DSparkModel``) as they are.
    """

    config_class = DSparkConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["DSparkLayer"]
    _supports_sdpa = True

    config: DSparkConfig
    d2t: torch.Tensor

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.has_embed_tokens else None
        self.mask_embedding = nn.Parameter(torch.zeros(width)) if config.mask_token_id is None else None
        self.fc = nn.Linear(config.target_hidden_size * len(config.target_layer_ids), width, bias=False)
        self.hidden_norm = DSparkRMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList([DSparkLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = DSparkRMSNorm(width, config.rms_norm_eps)
        self.rotary = DSparkRotary(config)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.has_lm_head else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.has_reduced_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self._borrowed: BorrowedTarget | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DSparkRotary):
            init.copy_(module.inv_freq, module.compute()[0])
        elif module is self:
            if self.mask_embedding is not None:
                init.normal_(self.mask_embedding, mean=0.0, std=self.config.initializer_range)
            if self.config.has_reduced_vocab:
                init.zeros_(self.d2t)
        elif isinstance(module, DSparkLayer) and module.sandwich:
            init.ones_(module.layer_scalar)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_borrowed": None}  # copies and pickles are unbound: a weak reference cannot travel

    @property
    def generation_config(self) -> Any:
        """Not there: a head only drafts. transformers' own assisted generation asks for it, which only happens when a
        target without the speculative generate() was given this head.
        """
        raise ValueError(
            f"{type(self).__name__} was given as assistant_model to a model without speculation. Call "
            "specdec_hf.enable_speculation(model) once and repeat, or pass "
            "custom_generate=specdec_hf.speculative_decoding(head) instead of assistant_model=head."
        )

    def get_input_embeddings(self) -> nn.Module | None:
        """The head's own embeddings, or ``None`` when they are borrowed."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        """The head's own lm_head, or ``None`` when it is borrowed."""
        return self.lm_head

    # -- loading and joining ------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """As :meth:`transformers.PreTrainedModel.from_pretrained`, for safetensors files of this layout or DeepSpec's.

        Args:
            pretrained_model_name_or_path: directory or Hub repository of a head.
            **kwargs: ``dtype``, ``device_map``, ``revision``, ``subfolder``, ``cache_dir``, ``local_files_only``,
                ``token`` and the others of transformers; fields of :class:`DSparkConfig` override ``config.json``.

        Returns:
            The head. Where the file has no ``embed_tokens`` or ``lm_head``, they will be borrowed by :meth:`bind`.

        Raises:
            ValueError: not a head, a pickle, a truncated file, a file of the Hub's cache that is not what the Hub has
                (by its SHA-256), or tensors that are not those of ``config.json``.
            OSError: nothing there, or not reachable.
        """
        if kwargs.get("use_safetensors") is False or kwargs.get("gguf_file"):
            raise ValueError("a head is read from safetensors only; leave out use_safetensors=False and gguf_file")
        if pretrained_model_name_or_path is None or kwargs.get("state_dict") is not None:
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        source = os.fspath(pretrained_model_name_or_path)
        hub = {name: kwargs[name] for name in HUB_KEYWORDS if kwargs.get(name) is not None}
        config = kwargs.pop("config", None)
        if not isinstance(config, DSparkConfig):
            fields = set(DSparkConfig._field_names()) - {"dtype"}
            overrides = {name: kwargs.pop(name) for name in fields & set(kwargs)}
            config = DSparkConfig.from_pretrained(config or source, **hub, **overrides)
        config = copy.deepcopy(config)
        files = weight_files(source, kwargs.get("variant"), hub)
        check_digests(files)
        found = tensor_shapes(files)
        absent = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in found]
        borrowed = [name for name in absent if getattr(config, f"has_{name}")]
        config.note_owned("embed_tokens" not in absent, "lm_head" not in absent)
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in cls(config).state_dict().items()}
        compare_tensors(expected, found, source)
        if borrowed:
            names = " and ".join(borrowed)
            logger.warning("%s has no %s: bind(target) will borrow what is missing from the target.", source, names)
        kwargs["use_safetensors"] = True
        loaded = super().from_pretrained(source, *model_args, config=config, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded)._check_loaded(source)
        return loaded

    def _check_loaded(self, source: str) -> None:
        check_values(self, source)
        if self.config.has_reduced_vocab and self.d2t.device.type != "meta":
            self._check_draft_ids(self.draft_token_ids())

    def bind(self, target: nn.Module) -> DSparkDraftModel:
        """Join the head to its target: check that they belong together, and borrow what the head does not own.

        The target is held weakly and is neither registered nor saved. Cheap when called again with the same target.

        Args:
            target: the loaded target model; under a PEFT adapter, quantised or compiled is fine.

        Returns:
            Itself.

        Raises:
            TypeError: not a model. ValueError: sizes, layers, taps or vocabulary do not fit; says what to use.
        """
        if self._borrowed is None or not self._borrowed.is_target(target):
            check_target(self.config, target)
            self._borrowed = BorrowedTarget(target)
        return self

    # -- vocabulary ---------------------------------------------------------------------------------------------------

    @property
    def max_draft_tokens(self) -> int:
        """P: most tokens that one block proposes."""
        return self.config.max_draft_tokens

    def to_target_logits(self, logits: torch.Tensor, vocab_size: int | None = None) -> torch.Tensor:
        """Draft logits [..., Vd] as logits [..., V'] over target ids, -inf where the head cannot propose.

        Args:
            vocab_size: V', the width of the target's logits, which padding may make larger than V; default V.
        """
        size = self.config.vocab_size if vocab_size is None else vocab_size
        if logits.shape[-1] == size and not self.config.has_reduced_vocab:
            return logits
        wide = logits.new_full((*logits.shape[:-1], size), float("-inf"))
        if not self.config.has_reduced_vocab:
            wide[..., : logits.shape[-1]] = logits
            return wide
        return wide.index_copy_(-1, self.draft_token_ids().to(logits.device), logits)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        weight = self.norm.weight
        if self.embed_tokens is not None:
            embedded = self.embed_tokens(ids.to(weight.device))
        else:
            embedded = self._require_target("embed_tokens").embed(ids, self.config.embedding_norm)
            embedded = embedded.to(weight.device, weight.dtype)
        scale = self.config.embedding_scale
        if scale == 1.0:
            return embedded
        return embedded * float(
            torch.tensor(scale, dtype=embedded.dtype)
        )  # Gemma rounds the factor to the weights' type

    def _require_target(self, part: str) -> BorrowedTarget:
        if self._borrowed is None:
            raise ValueError(f"this head has no {part} of its own; call head.bind(target) first to borrow the target's")
        return self._borrowed

    def _block_embeddings(self, anchor_ids: torch.Tensor) -> torch.Tensor:
        """[..., K, D]: the anchor's embedding, then K - 1 times the mask's, for anchors [...]."""
        size, mask_id = self.config.block_size, self.config.mask_token_id
        if mask_id is None:
            anchor, mask = self._embed(anchor_ids)[..., None, :], self.mask_embedding
            assert mask is not None
            return torch.cat((anchor, mask.expand(*anchor.shape[:-2], size - 1, -1)), dim=-2)
        ids = anchor_ids.new_full((*anchor_ids.shape, size), mask_id)
        ids[..., 0] = anchor_ids
        return self._embed(ids)

    def project_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits [..., Vd] of normed hidden states [..., D], in the lm_head's dtype."""
        if self.lm_head is not None:
            logits = self.lm_head(hidden)
        else:
            d2t = self.d2t if self.config.has_reduced_vocab else None
            logits = self._require_target("lm_head").logits(hidden, d2t).to(hidden.device)
            if logits.shape[-1] > self.config.draft_vocab_size:  # the target's may be padded
                logits = logits[..., : self.config.draft_vocab_size]
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # -- decoding: one round ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def new_context(self, batch_size: int, capacity: int = 256) -> DraftContext:
        """An empty context for B rows, with room for ``capacity`` tokens each, on the head's device and in its dtype.

        Raises:
            ValueError: fewer than one row.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: it must be at least 1; give the rows that are decoded")
        config, weight = self.config, self.norm.weight
        room = max(capacity, 1) + config.block_size
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, room, config.head_dim)
        return DraftContext(weight.new_zeros(shape), weight.new_zeros(shape))

    @torch.no_grad()
    def extend_context(
        self,
        context: DraftContext,
        taps: torch.Tensor | Sequence[torch.Tensor],
        positions: torch.Tensor,
        counts: torch.Tensor | None = None,
        max_length: int | None = None,
    ) -> None:
        """Add committed tokens to the context; their keys and values are computed once. Never waits for a device.

        Args:
            context: of :meth:`new_context`; changed in place.
            taps: [B, T, m * Dt], or m tensors [B, T, Dt] in the order of ``target_layer_ids``; any dtype and device.
            positions: [B, T] the tokens' positions (of padded rows: as the target counts them).
            counts: [B] int64, how many of the T tokens of each row are real (the rest is padding at the right);
                ``None``: all, the fast path.
            max_length: the *exact* longest row afterwards, if the caller knows it; else an upper bound is kept, which
                grows by T a call. With ``counts`` and one row, it also restores the path without a mask.
        """
        weight = self.norm.weight
        if not isinstance(taps, torch.Tensor):
            taps = torch.cat([tap.to(weight.device, weight.dtype) for tap in taps], dim=-1)
        hidden = self.hidden_norm(self.fc(taps.to(weight.device, weight.dtype)))
        steps = hidden.shape[1]
        rotary = self.rotary(positions.to(weight.device), weight.dtype)
        context.reserve(context.max_length + steps + self.config.block_size)
        destination = None
        if counts is not None:
            counts = counts.to(weight.device)
            # Padding lands behind the row's end, where it is never seen; it is zeroed in case it holds NaN.
            padding = torch.arange(steps, device=weight.device) >= counts[:, None]
            hidden = hidden.masked_fill(padding[..., None], 0.0)
        if counts is not None or not context.uniform:
            destination = context.lengths[:, None] + torch.arange(steps, device=weight.device)
        for index, layer in enumerate(self.draft_layers()):
            keys, values = layer.self_attn.keys_values(hidden, rotary)
            context.write(index, keys, values, destination)
        context.advance(steps, counts, max_length)

    @torch.no_grad()
    def draft_block(
        self,
        context: DraftContext,
        anchor_ids: torch.Tensor,
        positions: torch.Tensor,
        num_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The parallel stage: all slots of one block per row in one forward. The context stays as it is.

        Keys of all K slots always count, since the slots see each other; what follows runs for the slots asked for.

        Args:
            context: keys and values of every committed token before the anchor.
            anchor_ids: [B] last committed token.
            positions: [B] the anchor's position.
            num_tokens: K' proposals wanted, 1 to P; default P.

        Returns:
            Hidden states [B, K', D] (normed) and base logits [B, K', Vd] (float32). Entry k predicts the token at the
            anchor's position + 1 + k.

        Raises:
            ValueError: ``num_tokens`` out of range, or rows of a number other than the context's.
        """
        config, weight = self.config, self.norm.weight
        wanted = config.max_draft_tokens if num_tokens is None else num_tokens
        if not 1 <= wanted <= config.max_draft_tokens:
            raise ValueError(
                f"num_tokens={num_tokens}: it must be 1 to {config.max_draft_tokens} for this head; lower it"
            )
        if anchor_ids.shape != (context.batch_size,):
            shape = list(anchor_ids.shape)
            raise ValueError(f"anchor_ids is {shape}, but the context has {context.batch_size} rows; give one id a row")
        hidden = self._block_embeddings(anchor_ids)
        size = config.block_size
        steps = torch.arange(size, device=weight.device)
        rotary = self.rotary(positions.to(weight.device)[:, None] + steps, weight.dtype)
        context.reserve(context.max_length + size)
        total = context.max_length + size
        destination = None if context.uniform else context.lengths[:, None] + steps
        skipped, last = size - config.max_draft_tokens, config.num_hidden_layers - 1
        slots = slice(skipped, skipped + wanted)
        masks: dict[int | None, torch.Tensor | None] = {}
        for index, layer in enumerate(self.draft_layers()):
            window = config.window_of_layer(index)
            first = max(0, context.max_length - window) if window is not None and context.uniform else 0
            if window not in masks:
                masks[window] = self._block_mask(context, total, window, first)
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            keys, values = attention.keys_values(normed, rotary)
            context.write(index, keys, values, destination)
            keys, values = context.keys[index][:, :, first:total], context.values[index][:, :, first:total]
            mask = masks[window]
            if index == last and wanted < size:  # beyond the last layer's keys, only the slots asked for matter
                normed, hidden = normed[:, slots], hidden[:, slots]
                rotary = (rotary[0][:, slots], rotary[1][:, slots])
                mask = mask[:, :, slots] if mask is not None and mask.shape[2] > 1 else mask
            attended = attention.attend(attention.queries(normed, rotary), keys, values, mask)
            hidden = layer.after_attention(hidden, attended)
        hidden = self.norm(hidden)
        return hidden, self.project_logits(hidden).float()

    def _block_mask(self, context: DraftContext, total: int, window: int | None, first: int) -> torch.Tensor | None:
        """[B, 1, 1 or K, total - first] keys that each slot sees, ``None`` for all of them."""
        size, per_slot = self.config.block_size, window is not None and self.config.window_per_slot
        if context.uniform and not (per_slot and context.max_length + size - 1 > window):  # type: ignore[operator]
            return None
        places = torch.arange(first, total, device=context.lengths.device)
        lengths = context.lengths[:, None, None]
        seen = places < lengths + size
        if window is not None:
            slots = torch.arange(size if per_slot else 1, device=places.device)[:, None]
            seen = seen & (places >= lengths + slots - window)
        return seen[:, None]

    def markov_step(
        self,
        state: torch.Tensor | None,
        previous_ids: torch.Tensor,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        top_k: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The sequential stage for one slot.

        Args:
            state: what the slot before returned; ``None`` at the first.
            previous_ids: [B] *target* ids of the token before (the anchor at the first slot).
            hidden: [B, D], this slot's of :meth:`draft_block`.
            base_logits: [B, Vd], this slot's.
            top_k: add the bias to this many best base logits only and make the others -inf; the draft distribution is
                then that truncated one. Default: the configuration's ``draft_top_k``; 0 is all.

        Returns:
            Logits [B, Vd], confidence logits [B] (uncalibrated; ``None`` without the head), and the next state.
        """
        head, top_k = self.markov_head, self.config.draft_top_k if top_k is None else top_k
        if head is None:
            return base_logits, self._confidence(hidden, None), None
        embedded = head.embed(previous_ids.to(hidden.device))
        confidence = self._confidence(hidden, embedded)
        latent, state = head.latent(state, embedded, hidden)
        if not top_k or top_k >= base_logits.shape[-1]:
            return base_logits + head.markov_w2(latent), confidence, state
        best, index = base_logits.topk(top_k, dim=-1, sorted=False)
        bias = (head.markov_w2.weight[index] @ latent[..., None]).squeeze(-1)
        logits = torch.full_like(base_logits, float("-inf")).scatter_(-1, index, best + bias)
        return logits, confidence, state

    def confidence_probs(self, confidence_logits: torch.Tensor) -> torch.Tensor:
        """Calibrated probabilities [..., K'] that a slot's token survives, of the first K' slots' logits."""
        temperatures = self.config.confidence_temperatures
        if temperatures is not None:
            used = temperatures[: confidence_logits.shape[-1]]
            confidence_logits = confidence_logits / confidence_logits.new_tensor(used)
        return torch.sigmoid(confidence_logits)


AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
