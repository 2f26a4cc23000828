"""Coupled sampling: the noise itself, an exact distribution, and one text a seed whatever drafts it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import make_target
from scipy.stats import chisquare, gumbel_r, kstest

from specdec_hf import DSparkConfig, DSparkDraftModel, SpeculativeConfig, enable_speculation, last_speculation
from specdec_hf.coupling import CoupledNoise, _mixed

CPU = torch.device("cpu")
PROMPT = [3, 5, 1, 4]


def test_known_answers():
    """SplitMix64's published first outputs for seed 0, and the noise's own bits: they must never change."""
    assert [_mixed(0), _mixed(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    noise = CoupledNoise(7, 2, 5, CPU).block([0, 1], [0, 3], 2)
    assert noise.shape == (2, 2, 5)
    assert noise.dtype == torch.float32


def test_noise_is_gumbel_and_independent():
    noise = CoupledNoise(3, 4, 20_000, CPU).block([0, 1, 2, 3], [0, 0, 0, 1], 4)
    assert kstest(noise.flatten().double().numpy(), gumbel_r.cdf).pvalue > 1e-3
    assert noise.isfinite().all()
    assert torch.equal(noise, CoupledNoise(3, 4, 20_000, CPU).block([0, 1, 2, 3], [0, 0, 0, 1], 4))
    correlations = torch.corrcoef(noise.view(16, -1)).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / 20_000**0.5


def test_noise_depends_on_seed_row_position_alone():
    noise = CoupledNoise(3, 4, 50, CPU)
    whole = noise.block([0, 1, 2, 3], [5, 5, 5, 5], 6)
    assert torch.equal(noise.block([2], [7], 3)[0], whole[2, 2:5])
    assert torch.equal(CoupledNoise([8, 3], 2, 50, CPU).block([1], [5], 6)[0], whole[0])
    assert torch.equal(CoupledNoise(3, 1, 40, CPU).block([0], [5], 6)[0], whole[0, :, :40])
    with pytest.raises(ValueError, match="2 entries for 3 rows"):
        CoupledNoise([1, 2], 3, 50, CPU)


def small_target(vocab_size: int = 96, **overrides: Any) -> Any:
    sizes = {"num_hidden_layers": 2, "vocab_size": vocab_size, "eos_token_id": None, "spread": 2.0, **overrides}
    return enable_speculation(make_target(**sizes))


def dspark_head(target: Any) -> DSparkDraftModel:
    torch.manual_seed(1)
    return DSparkDraftModel(DSparkConfig.for_target(target.config, block_size=4, markov_rank=4)).eval()


def sampled(target: Any, ids: Any, strategy: str, head: Any = None, seed: Any = 5, **kwargs: Any) -> Any:
    options = {k: kwargs.pop(k) for k in ("num_assistant_tokens", "num_assistant_tokens_schedule") if k in kwargs}
    config = SpeculativeConfig(strategy=strategy, coupling="gumbel", seed=seed, **options)
    settings = {"do_sample": True, "max_new_tokens": 16, "temperature": 0.8, "top_p": 0.95, "top_k": 0, **kwargs}
    return target.generate(ids, assistant_model=head, speculative=config, **settings)


def drafters(target: Any) -> list[tuple[str, Any]]:
    return [
        ("dspark", dspark_head(target)),
        ("draft_model", make_target(seed=0, num_hidden_layers=2, spread=2.0)),  # the target's twin
        ("draft_model", make_target(seed=9, num_hidden_layers=1)),
        ("prompt_lookup", None),
    ]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_same_seed_same_text(batch: int, schedule: str) -> None:
    target = small_target()
    ids = torch.randint(3, 96, (batch, 6)).repeat(1, 2)
    mask = torch.ones_like(ids)
    mask[1:3, :3] = 0
    texts, accepted = [], []
    for strategy, head in drafters(target):
        for width in (1, 2, 4):
            options = {"num_assistant_tokens": width, "num_assistant_tokens_schedule": schedule}
            text = sampled(target, ids, strategy, head, attention_mask=mask, **options)
            texts.append(text.tolist())
            accepted.append(last_speculation(target).accepted)
    assert all(text == texts[0] for text in texts)
    assert max(accepted) > 0
    assert min(accepted) < max(accepted)
    other = sampled(target, ids, "prompt_lookup", attention_mask=mask, seed=6)
    assert other.tolist() != texts[0]
    # Nothing drafted at all, by plain forwards: the noise of a position is that of the tokens before it.
    noise, plain = CoupledNoise(5, batch, 96, CPU), ids[:1]
    for _ in range(16):
        scores = target(plain).logits[:, -1] / 0.8
        ranked = scores.sort(descending=True)
        below = ranked.values.softmax(-1).cumsum(-1) - ranked.values.softmax(-1) > 0.95
        scores[0, ranked.indices[0][below[0]]] = float("-inf")
        plain = torch.cat((plain, (scores + noise.block([0], [plain.shape[1]], 1)[:, 0]).argmax(-1)[:, None]), dim=1)
    assert plain[0].tolist() == texts[0][0]


def test_a_row_is_what_it_is_alone() -> None:
    target = small_target()
    ids = torch.randint(3, 96, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    together = sampled(target, ids, "prompt_lookup", seed=[4, 5, 6], attention_mask=mask)
    for row, seed in enumerate((4, 5, 6)):
        alone = ids[row : row + 1][:, mask[row] == 1]
        assert sampled(target, alone, "prompt_lookup", seed=seed)[0].tolist()[-16:] == together[row].tolist()[-16:]


def test_processors_and_criteria_of_a_users_own_see_the_same_text() -> None:
    """They force one position at a time, with the same noise."""
    target = small_target()
    ids = torch.randint(3, 96, (2, 8))
    expected = sampled(target, ids, "prompt_lookup")
    neutral = lambda input_ids, scores, **kwargs: torch.zeros(input_ids.shape[0], dtype=torch.bool)  # noqa: E731
    result = sampled(target, ids, "draft_model", make_target(seed=0, num_hidden_layers=2), stopping_criteria=[neutral])
    assert result.tolist() == expected.tolist()


def test_a_text_goes_on_as_if_it_had_not_been_interrupted() -> None:
    target = small_target()
    ids = torch.randint(3, 96, (1, 8))
    whole = sampled(target, ids, "prompt_lookup", max_new_tokens=16)
    half = sampled(target, ids, "prompt_lookup", max_new_tokens=7)
    assert sampled(target, half, "prompt_lookup", max_new_tokens=9).tolist() == whole.tolist()


@pytest.mark.parametrize("strategy", ["dspark", "draft_model"])
def test_the_distribution_is_exact(strategy: str) -> None:
    """The joint of three tokens over 4000 rows and seeds, by chi-square; a draft that errs must not show."""
    target = small_target(vocab_size=5, spread=1.2, bos_token_id=1, pad_token_id=0)
    head = dspark_head(target) if strategy == "dspark" else make_target(vocab_size=5, seed=3, num_hidden_layers=1)
    joint = torch.ones(1, dtype=torch.float64)
    for done in range(3):
        tails = torch.tensor(list(itertools.product(range(5), repeat=done)), dtype=torch.long).view(5**done, done)
        ids = torch.cat((torch.tensor([1, 3, 2]).expand(len(tails), -1), tails), dim=1)
        joint = (joint[:, None] * (target(ids).logits[:, -1].detach() / 0.8).softmax(-1).double()).flatten()
    rows = 4000
    ids = torch.tensor([[1, 3, 2]]).expand(rows, -1)
    text = sampled(target, ids, strategy, head, seed=11, max_new_tokens=4, top_p=1.0)[:, 3:6]
    assert 0.05 < last_speculation(target).acceptance_by_position[0] < 0.95
    counts = torch.bincount((text * torch.tensor([25, 5, 1])).sum(-1), minlength=125)
    few = joint * rows < 5
    seen = torch.cat((counts[~few], counts[few].sum()[None])).double()
    wanted = torch.cat((joint[~few], joint[few].sum()[None])) * rows
    assert (counts[joint < 1e-12] == 0).all()
    assert chisquare(seen.numpy(), (wanted * seen.sum() / wanted.sum()).numpy()).pvalue > 1e-3


def test_without_a_seed_torchs_own_decides() -> None:
    target, ids = small_target(), torch.tensor([PROMPT])
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(sampled(target, ids, "prompt_lookup", seed=None).tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"coupling": "gumble"}, ValueError, "did you mean 'gumbel'"),
        ({"seed": 3}, ValueError, "coupling='gumbel'"),
        ({"coupling": "gumbel", "seed": 0.5}, TypeError, "integer"),
        ({"coupling": "gumbel", "seed": True}, TypeError, "integer"),
        ({"coupling": "gumbel", "generator": torch.Generator()}, ValueError, "pass seed="),
    ],
)
def test_refused(fields: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        SpeculativeConfig(**fields)


def test_greedy_is_greedy() -> None:
    target, ids = small_target(), torch.tensor([PROMPT])
    plain = target.generate(ids, do_sample=False, max_new_tokens=12)
    text = sampled(target, ids, "prompt_lookup", do_sample=False, max_new_tokens=12, temperature=None, top_p=None)
    assert text.tolist() == plain.tolist()
