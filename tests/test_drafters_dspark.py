"""The DSpark drafter: what it allocates and what it keeps."""

from __future__ import annotations

from typing import Any

import torch

from specdec_hf import DSparkConfig, DSparkDraftModel, SpeculativeConfig
from specdec_hf.drafters.base import Prompt
from specdec_hf.drafters.dspark import DSparkDrafter


def test_the_context_grows_with_the_text_not_with_the_budget(tiny_target: Any) -> None:
    target = tiny_target("llama")
    head = (
        DSparkDraftModel(DSparkConfig.for_target(target.config, block_size=3, num_hidden_layers=1)).eval().bind(target)
    )
    drafter = DSparkDrafter(head, target.config.vocab_size, SpeculativeConfig())
    taps = [torch.zeros(1, 5, target.config.hidden_size) for _ in drafter.target_layer_ids]
    ids, positions = torch.zeros(1, 5, dtype=torch.long), torch.arange(5)[None]
    drafter.start(Prompt(ids, taps, positions, None, [0], capacity=2**20, state=None))
    assert drafter.state([0]).capacity < 1000  # a call without a length limit must not allocate for 2**20 tokens
