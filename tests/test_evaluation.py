"""`specdec eval`: what is counted, what is refused, and a whole run on tiny models with its JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target, make_tokenizer
from typer.testing import CliRunner

from specdec_hf import DSparkConfig, DSparkDraftModel, cli, enable_speculation, last_speculation, plots
from specdec_hf.answers import Answer, Counts, acceptance, answer, first_difference, speed
from specdec_hf.evaluation import Settings, estimate, estimate_text, evaluate, run_evaluation
from specdec_hf.loading import Pair, load_pair
from specdec_hf.options import parse_settings
from specdec_hf.prompts import encode, read_conversations
from specdec_hf.repetition import GRAM, RUN, repeats_from
from specdec_hf.report import shares, table, verdict, warnings_of

runner = CliRunner()


def tiny_pair(dtype: torch.dtype = torch.float32, **head_fields: Any) -> Pair:
    target = make_target("llama", vocab_size=259, num_hidden_layers=2, eos_token_id=None).to(dtype)
    torch.manual_seed(0)
    fields = {"num_hidden_layers": 1, "block_size": 3, "markov_rank": 4, "target_layer_ids": [0], **head_fields}
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, **fields)).to(dtype).eval()
    return Pair(target, make_tokenizer(), head, "tiny target", "tiny head", "", "float32")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, str]:
    """Directories of a tiny target and its head."""
    pair = tiny_pair()
    pair.model.save_pretrained(tmp_path / "target")
    pair.tokenizer.save_pretrained(tmp_path / "target")
    pair.head.save_pretrained(tmp_path / "head")
    return str(tmp_path / "target"), str(tmp_path / "head")


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, *lines: Any) -> Path:
        path = tmp_path / name
        path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
        return path

    return write


def chain(drafted: int, accepted: int, committed: int) -> Counts:
    return Counts(drafted, drafted, accepted, committed)


# -- where a text begins to repeat itself -----------------------------------------------------------------------------


def test_a_text_without_repetition_is_kept() -> None:
    assert repeats_from(list(range(200))) == 200
    assert repeats_from([]) == 0


@pytest.mark.parametrize("period", [1, 2, 5, 40])
def test_a_loop_is_cut_where_the_copy_begins(period: int) -> None:
    opening, loop = list(range(100, 130)), list(range(period))
    text = opening + loop * (60 // period + 2)
    assert repeats_from(text) == len(opening) + period


def test_a_short_copy_is_no_loop() -> None:
    """RUN 4-grams in a row copy RUN + GRAM - 1 tokens; one fewer is left alone."""
    phrase = list(range(50, 50 + RUN + GRAM - 1))
    assert repeats_from([1, 2, *phrase, 3, 4, *phrase, 5]) == 2 + len(phrase) + 2
    assert repeats_from([1, 2, *phrase, 3, 4, *phrase[:-1], 5]) == 2 + 2 * len(phrase) + 2


def test_rounds_beyond_the_cut_are_not_counted() -> None:
    tokens = [*range(30), *range(30)]  # the copy begins at token 30
    rounds = [chain(3, 2, 3)] * 9 + [chain(3, 3, 4)] * 8  # ends: 1 + 27 = 28, then 32: across the cut
    one = Answer(tokens, [float(i) for i in range(60)], rounds)
    assert one.counted() == rounds[:9]
    assert one.keep == 28 and one.seconds_for(one.keep) == 27.0
    assert Answer(tokens, [0.0] * 60).keep == 30, "plain decoding counts up to the cut itself"
    whole = Answer(list(range(4)), [0.0] * 4, [chain(3, 2, 3)])
    assert whole.counted() == whole.rounds and whole.keep == 4


# -- the figures ------------------------------------------------------------------------------------------------------


def test_acceptance_by_hand() -> None:
    figures = acceptance([chain(3, 3, 4), chain(3, 1, 2), chain(3, 0, 1), chain(1, 1, 2)])
    assert figures["tau"] == 9 / 4
    assert (figures["drafted"], figures["accepted"], figures["rejected"], figures["rate"]) == (10, 5, 5, 0.5)
    assert figures["survival"] == [3 / 4, 1 / 3, 1 / 3]
    assert figures["conditional"] == [3 / 4, 1 / 2, 1.0] and figures["reached"] == [4, 2, 1]
    assert figures["lengths"] == [0, 1, 2, 0, 1]
    assert acceptance([])["tau"] is None and acceptance([chain(0, 0, 1)])["rate"] is None


def test_acceptance_of_trees_is_by_depth() -> None:
    figures = acceptance([Counts(7, 3, 2, 3), Counts(7, 2, 0, 1)])
    assert (figures["drafted"], figures["rejected"], figures["tau"]) == (14, 12, 2.0)
    assert figures["survival"] == [0.5, 0.5, 0.0] and figures["reached"] == [2, 1, 1]


def test_a_share_of_few_rounds_is_not_shown() -> None:
    row = acceptance([chain(2, 0, 1)] * 11 + [chain(2, 2, 3)])
    assert shares(row, "conditional") == [1 / 12, None] and shares(row, "survival") == [1 / 12, 1 / 12]


def test_speed_by_hand() -> None:
    """Equal texts count up to the same token; the first token's time is the prompt's."""
    plain = Answer([5, 6, 7], [1.0, 2.0, 3.0])
    drafted = Answer([5, 6, 7], [1.0, 1.5, 1.5], [chain(2, 1, 2)])
    other = Answer([5, 6, 8], [2.0, 2.0, 2.0], [chain(2, 1, 2)])
    figures = speed([(plain, drafted), (plain, other), (plain, drafted)])
    assert figures["median"] == pytest.approx(2.0)
    assert figures["total"] == pytest.approx(9.0 / 5.0)
    assert figures["each"] == pytest.approx([2.0, 1.5, 2.0])


def test_an_answer_agrees_with_the_statistics() -> None:
    pair = tiny_pair()
    model = enable_speculation(pair.model)
    ids = torch.arange(5, 15)[None]
    state = torch.get_rng_state()
    one = answer(model, pair.head, ids, 20, temperature=1.0, seed=3)
    assert torch.get_rng_state().equal(state)
    stats = last_speculation(model)
    assert [row[0] for row in one.rounds] == stats.proposal_lengths[0]
    assert 1 + sum(row.committed for row in one.rounds) == len(one.tokens) == len(one.arrivals) == 20
    assert acceptance(one.rounds)["tau"] == pytest.approx(stats.mean_accepted_length)
    assert acceptance(one.rounds)["survival"] == pytest.approx(stats.acceptance_by_position)
    assert one.arrivals == sorted(one.arrivals)
    assert one.tokens == answer(model, pair.head, ids, 20, temperature=1.0, seed=3).tokens
    assert one.tokens != answer(model, pair.head, ids, 20, temperature=1.0, seed=4).tokens


def test_a_stop_token_clips_the_last_round() -> None:
    pair = tiny_pair()
    model = enable_speculation(pair.model)
    ids = torch.arange(5, 15)[None]
    plain = answer(model, None, ids, 20).tokens
    stop = next(token for place, token in enumerate(plain) if place > 3 and token not in plain[:place])
    one = answer(model, pair.head, ids, 20, eos_token_id=stop, pad_token_id=0)
    assert one.tokens == plain[: plain.index(stop) + 1]
    assert 1 + sum(row.committed for row in one.rounds) == len(one.tokens)


def test_first_difference_and_its_gap() -> None:
    pair = tiny_pair()
    model = enable_speculation(pair.model)
    ids = torch.arange(5, 15)[None]
    plain = answer(model, None, ids, 8).tokens
    assert first_difference(model, ids, plain, plain, "p") is None
    wrong = [*plain[:5], (plain[5] + 1) % 259, *plain[6:]]
    found = first_difference(model, ids, plain, wrong, "p")
    assert (found.place, found.plain_token, found.draft_token) == (5, plain[5], wrong[5])
    logits = model(torch.cat((ids, torch.tensor([plain[:5]])), dim=1)).logits[0, -1].detach().topk(2).values
    assert found.gap == pytest.approx(float(logits[0] - logits[1]), rel=1e-4)
    assert not found.near_tie
    shorter = first_difference(model, ids, plain, plain[:6], "p")
    assert (shorter.place, shorter.draft_token) == (6, None)


def test_a_difference_in_float32_fails_and_is_said() -> None:
    from specdec_hf.evaluation import _Run

    run = _Run(tiny_pair(), {}, Settings())
    near = first_difference(run.model, torch.arange(5, 9)[None], [1, 2], [1, 3], "p")
    assert run.lossless([], 3)["verdict"] == "equal"
    assert run.lossless([near], 3)["verdict"] == "failed"
    assert verdict(run.lossless([near], 3)) == "2 of 3, NOT EXPLAINED"
    half = _Run(tiny_pair(torch.bfloat16), {}, Settings())
    tie = type(near)("p", 1, 2, 3, gap=0.1, spacing=0.06)
    assert half.lossless([tie], 3)["verdict"] == "near ties"
    assert half.lossless([tie, type(near)("p", 1, 2, 3, gap=2.0, spacing=0.06)], 3)["verdict"] == "failed"


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_of_both_shapes(data: Callable[..., Path]) -> None:
    chat = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    }
    first, second = read_conversations(data("p.jsonl", {"turns": ["x", "y"]}, "", chat))
    assert [turn.messages[0]["content"] for turn in first.turns] == ["x", "y"]
    assert [len(turn.messages) for turn in second.turns] == [2, 1]
    assert [turn.answer for turn in second.turns] == ["b", None]
    assert second.source == "p.jsonl:3"
    assert len(read_conversations(data("p.jsonl", {"turns": ["x"]}, "broken"), limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["x"', r"bad\.jsonl, line 2: not readable as JSON"),
        ({"turns": []}, r"line 2: has the keys 'turns'"),
        ({"prompt": "x"}, r"line 2: has the keys 'prompt'"),
        ([1], "line 2: has a list"),
        ({"turns": ["x", " "]}, "line 2: ' ' stands where a text is needed"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "line 2: .*needs a role"),
        ({"messages": [{"role": "user", "content": None}]}, "line 2: None stands"),
        ({"messages": [{"role": "system", "content": "x"}]}, "line 2: holds no user message"),
    ],
)
def test_a_bad_line_is_named(data: Callable[..., Path], line: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_conversations(data("bad.jsonl", {"turns": ["x"]}, line))


def test_no_file_no_prompts(data: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a file"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_conversations(data("empty.jsonl", "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["\xe4"]}\n')
    with pytest.raises(ValueError, match="line 1: not readable"):
        read_conversations(tmp_path / "latin.jsonl")
    with pytest.raises(ValueError, match="--data"):
        run_evaluation([])


def test_without_a_chat_template_the_text_stands_alone(byte_tokenizer: Any) -> None:
    raw = make_tokenizer()
    raw.chat_template = None
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert raw.decode(encode(raw, messages)[0]) == "ab\nc"
    assert raw.decode(encode(byte_tokenizer, messages)[0]) == "u:ab\na:c\na:"
    raw.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match="roles user, assistant: no system role"):
        encode(raw, messages)


# -- whole runs -------------------------------------------------------------------------------------------------------


def test_evaluate_covers_data_sets_temperatures_and_thresholds(data: Callable[..., Path]) -> None:
    paths = [data("a.jsonl", {"turns": ["one", "two"]}, {"turns": ["three"]}), data("b.jsonl", {"turns": ["four"]})]
    sets = {path.stem: read_conversations(path) for path in paths}
    settings = Settings(max_new_tokens=12, thresholds=(0.0, 1.0), sweep_prompts=1, all_turns=True)
    pair = tiny_pair()
    result = evaluate(pair, sets, settings)
    assert [(r["data"], r["temperature"], r["answers"]) for r in result["results"]] == [
        ("a", 0.0, 3),
        ("b", 0.0, 1),
        ("a", 1.0, 3),
        ("b", 1.0, 1),
    ]
    for row in result["results"]:
        assert 1.0 <= row["tau"] <= 4.0 and row["speed_up"]["median"] > 0
        assert (row["lossless"] is None) == (row["temperature"] == 1.0)
    assert all(row["lossless"]["verdict"] == "equal" for row in result["results"][:2])
    assert result["macro"][0]["tau"] == pytest.approx((result["results"][0]["tau"] + result["results"][1]["tau"]) / 2)
    assert [(row["threshold"], row["data"]) for row in result["sweep"]] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert (
        result["sweep"][2]["drafted"] == 0 and result["sweep"][2]["tau"] == 1.0 and result["sweep"][2]["rate"] is None
    )
    assert result["provenance"]["prompts"] == {"a": 2, "b": 1} and result["provenance"]["dtype"] == "float32"
    text = table(result)
    assert "mean of sets" in text and "cut where it begins to repeat itself" in text and "bonus token counted" in text
    assert max(map(len, text.splitlines()[:12])) <= 120
    json.dumps(result)


def test_settings_reach_the_drafts(data: Callable[..., Path]) -> None:
    sets = {"a": read_conversations(data("a.jsonl", {"turns": ["one"]}))}
    tree = parse_settings("dspark", "draft_tree_nodes=6,num_assistant_tokens=6")
    settings = Settings(max_new_tokens=12, temperatures=(0.0,), thresholds=(0.0, 1.0), speculation=tree)
    result = evaluate(tiny_pair(), sets, settings)
    row, (loose, strict) = result["results"][0], result["sweep"]
    assert row["drafted"] > 4 * row["rounds"] and len(row["survival"]) == 3, "nodes and depth"
    assert row["lossless"]["verdict"] == "equal"
    assert loose["drafted"] > 0 and strict["drafted"] == 0
    assert result["provenance"]["speculation"] == {
        "strategy": "dspark", "draft_tree_nodes": 6, "num_assistant_tokens": 6
    }  # fmt: skip
    json.dumps(result)


def test_prompts_beyond_the_window_are_left_out_and_said(data: Callable[..., Path]) -> None:
    sets = {"a": read_conversations(data("a.jsonl", {"turns": ["x" * 600]}, {"turns": ["short"]}))}
    settings = Settings(max_new_tokens=8, temperatures=(0.0,), thresholds=())
    result = evaluate(tiny_pair(), sets, settings)
    assert (result["results"][0]["answers"], result["results"][0]["left_out"]) == (1, 1)
    assert "1 turns were left out" in warnings_of(result)[0]
    with pytest.raises(ValueError, match="no prompt fits the target's 512 positions"):
        evaluate(tiny_pair(), {"a": sets["a"][:1]}, settings)


def test_a_head_without_confidence_has_no_sweep(data: Callable[..., Path]) -> None:
    sets = {"a": read_conversations(data("a.jsonl", {"turns": ["x"]}))}
    settings = Settings(max_new_tokens=6, temperatures=(0.0,))
    result = evaluate(tiny_pair(enable_confidence_head=False), sets, settings)
    assert result["sweep"] == [] and "threshold" not in table(result)


def test_dry_run_estimates(data: Callable[..., Path]) -> None:
    sets = {"a": read_conversations(data("a.jsonl", {"turns": ["x", "y"]}, {"turns": ["z"]}))}
    found = estimate(tiny_pair(), sets, Settings(all_turns=True, thresholds=(0.0, 0.5), sweep_prompts=1))
    assert found["calls"] == 2 * 3 * 2 + 2
    assert found["seconds"] > 0
    assert "14 calls" in estimate_text(found)
    assert "about 3.0 hours at most" in estimate_text({**found, "seconds": 10_800})


@pytest.mark.parametrize(
    "change",
    [{"limit": 0}, {"max_new_tokens": 1}, {"temperatures": ()}, {"temperatures": (-1.0,)}, {"thresholds": (2,)}],
)
def test_settings_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least|must lie in"):
        Settings(**change)


def test_load_pair_refuses_with_value_and_rule() -> None:
    with pytest.raises(ValueError, match="bfloat16, float32, float16"):
        load_pair(None, None, "int3")
    with pytest.raises(ValueError, match="--draft"):
        load_pair("some/model", None)


def test_the_command_writes_json_and_one_html(
    saved: tuple[str, str], data: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = data("<a & b>.jsonl", {"turns": ["Hello."]}, {"turns": ["Again?"]})
    common = ["eval", "--data", str(path), "--target", saved[0], "--draft", saved[1], "--dtype", "float32"]
    common += ["--max-new-tokens", "8", "--output", str(tmp_path / "out")]
    dry = runner.invoke(cli.app, [*common, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "minutes at most" in dry.output and not (tmp_path / "out").exists()
    done = runner.invoke(cli.app, [*common, "--threshold", "0.5", "--sweep-prompts", "1"])
    assert done.exit_code == 0, done.output
    assert "2 of 2" in done.output
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["eval.json", "report.html"]
    record = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert record["provenance"]["seed"] == 0 and record["provenance"]["versions"]["torch"] == torch.__version__
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 6
    assert "&lt;a &amp; b&gt;" in page and "<a & b>" not in page
    assert "http://" not in page and "https://" not in page, "needs no network"


def test_no_plots_no_run(monkeypatch: pytest.MonkeyPatch, data: Callable[..., Path], tmp_path: Path) -> None:
    """Without matplotlib an output directory is refused before anything is loaded or written."""
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'specdec_hf\[plots\]'"):
        run_evaluation([data("a.jsonl", {"turns": ["x"]})], "t", "d", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
