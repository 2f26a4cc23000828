"""Training text: stores that resume, prompts, continuous batches against plain generate."""

from __future__ import annotations

import json
import random

import pytest
import torch

from specdec_hf.training.batching import ContinuousBatch, PlainBatch, text_batch
from specdec_hf.training.data import (
    Sampling,
    first_loop,
    loop_start,
    opening,
    provenance,
    write_answers,
    write_user_turns,
)
from specdec_hf.training.sources import TextSettings, given_prompts
from specdec_hf.training.store import Sequence, TokenStore, draft_vocabulary


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def text(length: int, answer: int, source: int = 0) -> Sequence:
    return Sequence(torch.arange(length), torch.arange(length) >= length - answer, source)


def test_store_round_trip_and_resume(tmp_path):
    store = TokenStore(tmp_path / "s", {"seed": 1})
    store.append([text(5, 2, 7), text(3, 1, 8)], {7, 8, 9})
    again = TokenStore(tmp_path / "s", {"seed": 1})
    assert again.done == {7, 8, 9}
    again.append([text(4, 4, 1)], {1})
    loaded = TokenStore(tmp_path / "s").load()
    assert [len(item.ids) for item in loaded] == [5, 3, 4] and [item.source for item in loaded] == [7, 8, 1]
    assert loaded[0].mask.tolist() == [False] * 3 + [True] * 2
    assert not list((tmp_path / "s").glob("*.tmp"))


def test_store_refuses(tmp_path):
    with pytest.raises(ValueError, match="holds no texts"):
        TokenStore(tmp_path / "none").load()
    TokenStore(tmp_path / "s", {"seed": 1}).append([text(5, 2)], {0})
    with pytest.raises(ValueError, match="seed differ"):
        TokenStore(tmp_path / "s", {"seed": 2})
    (tmp_path / "s" / "part-00000.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="part-00000"):
        TokenStore(tmp_path / "s").load()
    (tmp_path / "s" / "provenance.json").write_text("{")
    with pytest.raises(ValueError, match=r"provenance\.json"):
        TokenStore(tmp_path / "s")


def test_prompts_leave_out_the_evaluation_sets(tmp_path):
    one, held = tmp_path / "one.jsonl", tmp_path / "held.jsonl"
    one.write_text(
        "\n".join(json.dumps({"turns": [turn]}) for turn in ("What is 2 + 2?", "what is 2+2", "Name a tree."))
    )
    held.write_text(json.dumps({"turns": ["name a TREE"]}))
    settings = TextSettings(prompts=["one.jsonl"], exclude=["held.jsonl"])
    assert given_prompts(settings, tmp_path, True) == [user("What is 2 + 2?")]
    with pytest.raises(ValueError, match="no prompt is left"):
        given_prompts(TextSettings(prompts=["held.jsonl"], exclude=["held.jsonl"]), tmp_path, True)
    one.write_text('{"turns": ["good"]}\n{bad\n')
    with pytest.raises(ValueError, match=r"one\.jsonl, line 2"):
        given_prompts(settings, tmp_path, True)


def test_loops_are_found():
    assert loop_start(list(range(40))) is None
    assert loop_start([1, 2, 3, *range(10, 30), *range(10, 34)]) is None
    assert loop_start([5, *[7] * 16]) == 5
    copied = [*range(50), *range(10, 34)]
    assert loop_start(copied) == 50
    rng = random.Random(0)
    for _ in range(300):
        answer = [rng.randrange(rng.choice([2, 5, 90])) for _ in range(60)] * rng.choice([1, 2])
        starts = (loop_start(answer[:length]) for length in range(1, len(answer) + 1))
        assert first_loop(answer) == next((start for start in starts if start is not None), None)


def test_draft_vocabulary():
    ids, coverage = draft_vocabulary(
        [Sequence(torch.tensor([3, 9, 9, 9, 50, 50]), torch.tensor([0, 1, 1, 1, 1, 1]).bool(), 0)], 2, 60
    )
    assert ids.tolist() == [9, 50] and coverage == 1.0
    ids, coverage = draft_vocabulary([text(20, 10)], 30, 60)
    assert len(ids) == 30 and set(range(20)) <= set(ids.tolist())
    with pytest.raises(ValueError, match="draft_vocab_size=61"):
        draft_vocabulary([text(5, 2)], 61, 60)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_continuous_batch_equals_generate(tiny_target, family):
    target = tiny_target(family)
    jobs = [(number, torch.randint(3, 96, (3 + number % 5,)).tolist(), 0.0, 6 + number % 4) for number in range(17)]
    done = {row.number: row for row in ContinuousBatch(target, 5, 32).run(iter(jobs), {2}, lambda answer: None)}
    assert len(done) == len(jobs)
    assert target.config._attn_implementation == "sdpa"
    for number, ids, _, limit in jobs:
        plain = target.generate(torch.tensor([ids]), max_new_tokens=limit, do_sample=False)[0].tolist()
        assert done[number].ids == plain
        assert done[number].stopped == (plain[-1] == 2)


def test_continuous_batch_samples_the_target(tiny_target):
    target = tiny_target(num_hidden_layers=1)
    ids = [5, 6, 7]
    expected = torch.softmax(target(torch.tensor([ids])).logits[0, -1] / 2.0, -1)
    jobs = ((number, ids, 2.0, 1) for number in range(4000))
    drawn = torch.tensor([row.ids[-1] for row in ContinuousBatch(target, 50, 8).run(jobs, set(), lambda answer: None)])
    found = torch.bincount(drawn, minlength=96) / len(drawn)
    assert (found - expected).abs().sum() < 0.12


def test_continuous_batch_refuses_sliding_windows(tiny_target):
    with pytest.raises(ValueError, match="full attention"):
        ContinuousBatch(tiny_target("gemma2"), 4, 16)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mistral", "qwen3_moe"])
def test_any_family_writes(tiny_target, family):
    target = tiny_target(family)
    batch = text_batch(target, 4, 24)
    assert isinstance(batch, PlainBatch) == (family in ("gemma2", "mistral"))
    jobs = [(number, torch.randint(3, 96, (3 + number % 3,)).tolist(), 0.0, 6 + number % 4) for number in range(9)]
    done = {row.number: row for row in batch.run(jobs, {2}, lambda answer: None)}
    for number, ids, _, limit in jobs:
        assert (
            done[number].ids == target.generate(torch.tensor([ids]), max_new_tokens=limit, do_sample=False)[0].tolist()
        )
    drawn = [[row.ids for row in batch.run([(7, [5], 1.0, 8)], set(), lambda answer: None)] for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_answers_and_user_turns(tiny_target, byte_tokenizer, tmp_path):
    target = tiny_target(vocab_size=260, spread=1.5)
    before, after = opening(byte_tokenizer)
    assert byte_tokenizer.decode(before) == "u:" and byte_tokenizer.decode(after) == "\na:"
    sampling = Sampling(batch_size=8, max_new_tokens=20, max_prompt_tokens=60, seed=3)
    turns = write_user_turns(target, byte_tokenizer, 3, sampling, max_tokens=200)
    assert len(set(turns)) == len(turns)
    prompts = [user(f"question {number}") for number in range(20)]
    about = provenance(byte_tokenizer, "tiny", "float32", {"prompts": "test"}, sampling)
    store = TokenStore(tmp_path, about)
    first = write_answers(target, byte_tokenizer, prompts, store, sampling, max_tokens=60, part_size=4)
    assert 60 <= first < 200 and 0 < len(store.done) < 20
    store = TokenStore(tmp_path, about)
    write_answers(target, byte_tokenizer, prompts, store, sampling, part_size=4)
    texts = store.load()
    assert store.done == set(range(20))
    assert len({item.source for item in texts}) == len(texts)
    for item in texts:
        assert byte_tokenizer.decode(item.ids[~item.mask]) == f"u:question {item.source}\na:"
        assert 8 <= int(item.mask.sum()) <= 20


def test_bad_settings(byte_tokenizer):
    with pytest.raises(ValueError, match="greedy_share=1"):
        Sampling(temperature=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        Sampling(batch_size=0)

    class NoTemplate:
        chat_template = None

    with pytest.raises(ValueError, match="no chat template"):
        opening(NoTemplate())
