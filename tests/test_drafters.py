"""What is special to each drafter: what prompt lookup finds, how a draft model's cache is kept, what is refused.

That their text is right is the contract tests' matter.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_target

from specdec_hf import DSparkConfig, DSparkDraftModel, SpeculativeConfig, drafters, enable_speculation, last_speculation
from specdec_hf.drafters.prompt_lookup import PromptLookupDrafter
from specdec_hf.policies import fitting_tokens

sys.path.insert(0, str(Path(__file__).parent / "contract"))
from test_distribution import PASSES, PROMPT, exact_joint, fit, options_of, sample, small_target


def target_of(family: str = "llama", **overrides: Any) -> Any:
    model = enable_speculation(make_target(family, **overrides))
    model.generation_config.eos_token_id = None
    return model


# -- prompt lookup ----------------------------------------------------------------------------------------------------


def look_up(text: list[int], limit: int = 4, sizes: tuple[int, ...] = (3, 2), ends: tuple[int, ...] = ()) -> list[int]:
    drafter = PromptLookupDrafter(list(sizes), set(ends))
    request = SimpleNamespace(ids=torch.tensor([[*text, 0, 0]]), lengths=[len(text)], limits=[limit])
    proposal = drafter.propose(request)
    assert proposal.probs is None
    assert proposal.tokens.shape == (1, proposal.width)
    return proposal.tokens[0, : proposal.lengths[0]].tolist()


def test_what_followed_is_drafted():
    assert look_up([5, 6, 7, 8, 9, 10, 11, 5, 6, 7]) == [8, 9, 10, 11]
    assert look_up([5, 6, 7, 8, 9, 10, 11, 5, 6, 7], limit=2) == [8, 9]


def test_the_longest_match_first_then_the_latest():
    assert look_up([1, 2, 3, 9, 8, 2, 3, 7, 7, 1, 2, 3], limit=1) == [9]
    assert look_up([2, 3, 9, 8, 2, 3, 7, 7, 1, 2, 3], limit=1) == [7]
    assert look_up([2, 3, 9, 8, 5, 3, 7, 7, 1, 4, 3]) == []
    assert look_up([2, 3, 9, 8, 5, 3, 7, 7, 1, 4, 3], limit=1, sizes=(1,)) == [7]


def test_nothing_found():
    for text in ([], [4], [4, 4], [4, 5, 6, 7, 8], [1, 2, 1]):
        assert look_up(text) == []
    assert look_up([4, 5, 4, 5], limit=0) == []


def test_a_loop_is_drafted_whole():
    assert look_up([9, 1, 2, 1, 2], limit=5) == [1, 2, 1, 2, 1]
    assert look_up([8, 8, 8], limit=4) == [8, 8, 8, 8]


def test_a_draft_ends_with_the_text():
    assert look_up([5, 6, 7, 2, 9, 9, 5, 6, 7], ends=(2,)) == [2]
    assert look_up([5, 6, 7, 8, 2, 9, 5, 6, 7], ends=(2,)) == [8, 2]


def test_bytes_that_straddle_tokens_are_no_match():
    """As bytes, [1 << 24, 0, 0] holds [0, 0]'s pattern and [256] that of [1] shifted."""
    assert look_up([1, 256, 7, 256, 1, 1 << 24, 9, 65536, 256], limit=1, sizes=(1,)) == [1]
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        text = torch.randint(0, 4, (24,), generator=generator).mul(256).tolist()
        begins = [i for i in range(len(text) - 2) if text[i : i + 2] == text[-2:]]
        expected = [text[begins[-1] + 2]] if begins else []
        assert look_up(text, limit=1, sizes=(2,)) == expected


def test_rows_are_their_own():
    drafter = PromptLookupDrafter([2], set())
    ids = torch.tensor([[0, 0, 1, 2, 1, 2, 0], [3, 4, 5, 3, 4, 0, 0], [3, 4, 5, 6, 0, 0, 0]])
    proposal = drafter.propose(SimpleNamespace(ids=ids, lengths=[6, 5, 4], limits=[1, 3, 3]))
    assert proposal.lengths == [1, 3, 0]
    assert proposal.tokens.tolist() == [[1, 0, 0], [5, 3, 4], [0, 0, 0]]


def test_a_round_takes_less_than_a_millisecond():
    text = torch.randint(0, 50_000, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.tensor([text + [0] * 100])
    drafter = PromptLookupDrafter([3, 2], set())
    request = SimpleNamespace(ids=ids, lengths=[4000], limits=[10])
    times = []
    for _ in range(30):
        start = time.perf_counter()
        assert drafter.propose(request).lengths == [0]
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


def test_sizes_come_from_the_call():
    model = target_of()

    def sizes(**fields):
        return drafters.resolve(SpeculativeConfig(strategy="prompt_lookup", **fields), None, model)._sizes

    assert sizes() == [3, 2]
    assert sizes(max_matching_ngram_size=5) == [5, 4, 3, 2]
    assert sizes(max_matching_ngram_size=1) == [1]
    assert sizes(min_matching_ngram_size=4) == [4]
    assert sizes(min_matching_ngram_size=1, max_matching_ngram_size=2) == [2, 1]
    with pytest.raises(ValueError, match="min_matching_ngram_size=3 is larger"):
        sizes(min_matching_ngram_size=3, max_matching_ngram_size=2)
    knobs = {"speculative": "prompt_lookup", "min_new_tokens": 2, "max_new_tokens": 2, "do_sample": False}
    with pytest.raises(ValueError, match="max_matching_ngram_size=0: must be an integer of at least 1"):
        model.generate(torch.tensor([[5, 6]]), max_matching_ngram_size=0, **knobs)


def test_prompt_lookup_takes_no_assistant():
    model = target_of()
    with pytest.raises(TypeError, match="takes no assistant_model"):
        model.generate(torch.tensor([[3, 4]]), speculative="prompt_lookup", assistant_model=target_of())


@pytest.mark.parametrize("strategy", ["prompt_lookup", "draft_model"])
@pytest.mark.parametrize("case", ["top_p", "combined"])
def test_sampling_is_exact(strategy: str, case: str) -> None:
    """One-hot drafts of tokens that stood in the prompt; drafts of another model."""
    from test_distribution import CASES

    target = small_target()
    prompt = [3, 5, 1, 3, 5] if strategy == "prompt_lookup" else PROMPT
    head = None if strategy == "prompt_lookup" else small_target(seed=4, num_hidden_layers=1)
    options = {**options_of(case), "speculative": SpeculativeConfig(strategy=strategy, min_matching_ngram_size=1)}
    tokens = sample(target, head, prompt=prompt, **options)
    assert fit(tokens, exact_joint(target, prompt, CASES[case][1])) > PASSES
    stats = last_speculation(target)
    assert stats.drafted > 0 and stats.acceptance_by_position[0] < 0.98
    # "combined" forbids repeated n-grams, which is all that prompt lookup proposes: every draft is replaced there
    assert stats.acceptance_by_position[0] > 0.02 or (strategy, case) == ("prompt_lookup", "combined")


# -- draft model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral"])
def test_the_targets_twin_is_always_right(family: str, batch: int) -> None:
    """One token lost, fed twice or at a wrong position in the draft's cache, and it would err."""
    target, twin = target_of(family), make_target(family)
    ids = torch.randint(3, 96, (batch, 11))
    mask = torch.ones_like(ids)
    mask[1:, :4] = 0
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 31}
    for width in (1, 3, 5):
        plain = target.generate(ids, **settings)
        config = SpeculativeConfig(strategy="draft_model", num_assistant_tokens=width)
        text = target.generate(ids, **settings, assistant_model=twin, speculative=config)
        stats = last_speculation(target)
        assert text.tolist() == plain.tolist()
        assert stats.accepted == stats.drafted > 0
        assert stats.rounds == batch * -(-30 // (width + 1))


def test_each_token_is_fed_to_the_draft_once() -> None:
    target, draft, fed = target_of(), make_target(seed=8, num_hidden_layers=1), []
    hook = lambda module, args: fed.append(args[0].shape[1])  # noqa: E731
    handle = draft.model.layers[0].register_forward_pre_hook(hook)
    target.generate(torch.randint(3, 96, (1, 9)), do_sample=False, max_new_tokens=20, assistant_model=draft,
                    speculative=SpeculativeConfig(strategy="draft_model", num_assistant_tokens=3))  # fmt: skip
    handle.remove()
    stats = last_speculation(target)
    whole = sum(a == p for a, p in zip(stats.accepted_draft_tokens[0], stats.proposal_lengths[0], strict=True))
    assert fed[0] == 9
    # a forward a drafted token, and one token more where the last drafted one had not been read
    assert len(fed) - 1 == stats.drafted
    assert stats.drafted <= sum(fed[1:]) <= stats.drafted + whole


@pytest.mark.parametrize(("own", "targets"), [(96, 128), (128, 96), (90, 96)])
def test_padded_vocabularies(own: int, targets: int) -> None:
    """The narrower of both bounds what is drafted; a target's token that the draft lacks does no harm."""
    target, draft = target_of(vocab_size=targets), make_target(vocab_size=own, seed=0)
    ids = torch.randint(3, targets, (2, 9))
    for sampling in ({"do_sample": False}, {"do_sample": True, "repetition_penalty": 1.2}):
        torch.manual_seed(3)
        config = SpeculativeConfig(strategy="draft_model")
        text = target.generate(ids, max_new_tokens=20, assistant_model=draft, speculative=config, **sampling)
        assert last_speculation(target).drafted > 0
        if not sampling["do_sample"]:
            assert text.tolist() == target.generate(ids, max_new_tokens=20, **sampling).tolist()


def test_another_dtype_and_eos_and_schedule() -> None:
    target, draft = target_of(), make_target().to(torch.bfloat16)
    ids = torch.randint(3, 96, (3, 9))
    settings = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": [7, 8, 9, 10, 11, 12, 13]}
    plain = target.generate(ids, **settings)
    for schedule in ("constant", "heuristic", "heuristic_transient", "adaptive"):
        text = target.generate(
            ids, **settings, assistant_model=draft, speculative="draft_model", num_assistant_tokens_schedule=schedule
        )
        assert text.tolist() == plain.tolist()


def test_a_drafts_confidence_cuts_and_stops_drafting() -> None:
    target, draft, forwards = target_of(), make_target(seed=5, num_hidden_layers=1), []
    ids = torch.randint(3, 96, (1, 9))
    plain = target.generate(ids, do_sample=False, max_new_tokens=24)
    draft.register_forward_hook(lambda *args: forwards.append(1))
    for threshold in (0.0, 0.6, 1.0):
        forwards.clear()
        config = SpeculativeConfig(strategy="draft_model", assistant_confidence_threshold=threshold)
        text = target.generate(ids, do_sample=False, max_new_tokens=24, assistant_model=draft, speculative=config)
        assert text.tolist() == plain.tolist()
        stats = last_speculation(target)
        if threshold == 1.0:
            assert stats.drafted == 0
            assert len(forwards) == 1 + stats.rounds - 1  # one a round but the last, which has no room for a draft
    lengths = [length for row in stats.proposal_lengths for length in row]
    assert set(lengths) == {0}


def test_only_the_new_turn_reaches_the_draft() -> None:
    target, draft, fed = target_of(), make_target(seed=1, num_hidden_layers=1), []
    settings = {"do_sample": False, "max_new_tokens": 8, "assistant_model": draft, "speculative": "draft_model"}
    first = target.generate(torch.randint(3, 96, (1, 12)), return_dict_in_generate=True, **settings)
    following = torch.cat((first.sequences, torch.randint(3, 96, (1, 5))), dim=1)
    draft.model.layers[0].register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    from specdec_hf._hf import CACHE_KEY

    cache = first[CACHE_KEY]
    text = target.generate(following, **settings, **{CACHE_KEY: cache})
    assert text.tolist() == target.generate(following, do_sample=False, max_new_tokens=8).tolist()
    assert fed[0] <= 5 + 3  # the message, the last token, and drafted tokens that were not read or not kept


def test_what_is_refused() -> None:
    target, ids = target_of(), torch.tensor([[3, 4, 5]])
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, block_size=3, num_hidden_layers=1))
    for draft, error, match in (
        (None, ValueError, "needs a draft: pass assistant_model"),
        (head, TypeError, "say speculative='dspark'"),
        (torch.nn.Linear(2, 2), TypeError, "not Linear"),
        (make_target(vocab_size=5000), ValueError, r"5000 token ids and the target 96.*another tokenizer"),
    ):
        with pytest.raises(error, match=match):
            target.generate(ids, assistant_model=draft, speculative="draft_model", max_new_tokens=3)


def test_other_special_ids_are_told() -> None:
    target, ids = target_of(), torch.tensor([[3, 4, 5]])
    with pytest.warns(UserWarning, match=r"eos_token_id=\[7\] and the target \[2\]"):
        target.generate(ids, assistant_model=make_target(eos_token_id=7), speculative="draft_model", max_new_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        target.generate(ids, assistant_model=make_target(seed=3), speculative="draft_model", max_new_tokens=3)


def test_a_model_without_a_strategys_name_goes_to_transformers() -> None:
    """A plain assistant_model stays transformers' own assisted generation."""
    target, ids = target_of(), torch.tensor([[3, 4, 5]])
    text = target.generate(ids, assistant_model=make_target(seed=3), do_sample=False, max_new_tokens=5)
    assert last_speculation(target) is None
    assert text.shape == (1, 8)


@pytest.mark.parametrize(("price", "tokens"), [(0.0, 5), (0.05, 5), (0.1, 4), (0.25, 2), (0.5, 1), (1.0, 1), (3.0, 1)])
def test_a_dear_draft_drafts_few_tokens(price, tokens):
    assert fitting_tokens(price) == tokens


def test_a_draft_models_default_follows_the_weights():
    wide = {"hidden_size": 128, "intermediate_size": 512}
    target, lengths = target_of(num_hidden_layers=6, **wide), {}
    for layers, draft in ((1, target_of(num_hidden_layers=1)), (6, target_of(num_hidden_layers=6, **wide))):
        target.generate(torch.arange(3, 9)[None], assistant_model=draft, speculative="draft_model", max_new_tokens=30)
        lengths[layers] = max(last_speculation(target).proposal_lengths[0])
    assert lengths[1] >= 4 and lengths[6] == 1
