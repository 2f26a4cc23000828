"""The DSpark drafter: what it allocates and what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_hf import DSparkConfig, DSparkDraftModel, SpeculativeConfig
from specdec_hf.drafters import dspark
from specdec_hf.drafters.base import Observation, Prompt
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


def test_plain_rounds_are_read_together_and_nothing_is_lost(tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context after plain rounds is the one of a head that reads along, whenever it is asked for."""
    target = tiny_target("llama")
    config = DSparkConfig.for_target(target.config, block_size=3, num_hidden_layers=2)
    head = DSparkDraftModel(config).eval().bind(target)
    torch.manual_seed(0)
    reads: list[int] = []
    extend = head.extend_context
    monkeypatch.setattr(
        head, "extend_context", lambda *args, **kw: reads.append(args[2].shape[1]) or extend(*args, **kw)
    )

    def run(most_unread: int, rounds: list[list[int]], leaving: int | None = None) -> Any:
        monkeypatch.setattr(dspark, "_MOST_UNREAD", most_unread)
        drafter = DSparkDrafter(head, target.config.vocab_size, SpeculativeConfig())
        generator = torch.Generator().manual_seed(1)
        prompt = [torch.randn(2, 4, target.config.hidden_size, generator=generator) for _ in drafter.target_layer_ids]
        ids, positions = torch.zeros(2, 4, dtype=torch.long), torch.arange(4).expand(2, -1)
        drafter.start(Prompt(ids, prompt, positions, None, [0, 0], capacity=100, state=None))
        reads.clear()
        at = torch.tensor([4, 4])
        for number, counts in enumerate(rounds):
            columns = max(counts) if max(counts) > 1 else 1
            taps = [torch.randn(2, columns, target.config.hidden_size, generator=generator) for _ in prompt]
            taps = [tap[: len(drafter._lengths)] for tap in taps]
            drafter.observe(Observation(taps, at[:, None] + torch.arange(columns), ids[: len(counts), :1], counts))
            for tap in taps:
                tap.fill_(float("nan"))  # a compiled target writes over its outputs
            at = at + torch.tensor(counts)
            if number == leaving:
                drafter.park({1: 1})
                drafter.select_rows([0])
                at, rounds[number + 1 :] = at[:1], [counts[:1] for counts in rounds[number + 1 :]]
        return drafter

    plain = [[1, 1]] * 7
    for rounds, leaving in ((plain, None), ([[2, 3], *plain, [3, 1], *plain], None), ([*plain, [2, 1], *plain], 3)):
        numbers = [0] if leaving is not None else [0, 1]
        eager = run(1, [list(counts) for counts in rounds], leaving).state(numbers)
        assert len(reads) >= len(rounds)
        drafter = run(5, [list(counts) for counts in rounds], leaving)
        assert len(reads) < len(rounds) and max(reads) == 5
        lazy = drafter.state(numbers)
        assert torch.equal(lazy.lengths, eager.lengths)
        for row, length in enumerate(eager.lengths.tolist()):
            torch.testing.assert_close(lazy.keys[:, row, :, :length], eager.keys[:, row, :, :length])
            torch.testing.assert_close(lazy.values[:, row, :, :length], eager.values[:, row, :, :length])
        drafter = run(5, [list(counts) for counts in rounds], leaving)
        monkeypatch.setattr(drafter, "_chain", lambda request, drafter=drafter: drafter._context.lengths.tolist())
        assert drafter.propose(None) == eager.lengths[: len(numbers)].tolist()
