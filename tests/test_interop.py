"""Heads in and out of other layouts: weights bit for bit, drafts equal, wrong readings named, engines' limits said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from specdec_hf import DSparkConfig, DSparkDraftModel, cli
from specdec_hf.interop import check as checking
from specdec_hf.interop.check import check_head
from specdec_hf.interop.convert import convert
from specdec_hf.interop.engines import serve_command
from specdec_hf.interop.formats import Answers
from specdec_hf.interop.info import describe
from specdec_hf.interop.reading import read_head

GOLDEN = Path(__file__).parent / "golden"
DEEPSPEC, HD32, SPECULATORS = GOLDEN / "deepspec", GOLDEN / "deepspec_hd32", GOLDEN / "speculators"
TARGET = str(DEEPSPEC / "target")
KINDS = ("vanilla", "gated", "rnn")


def edited(source: Path, out: Path, drop: tuple[str, ...] = (), **fields: Any) -> str:
    """A copy of a head with other fields in config.json; the path."""
    shutil.copytree(source, out)
    config = {**json.loads((source / "config.json").read_text()), **fields}
    (out / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name not in drop}))
    return str(out)


def fields_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


@torch.no_grad()
def first_round(head: Any, want: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the first greedy round after prefill, by the names of the golden file."""
    length, anchor = want["taps"].shape[1], want["anchor"]
    context = head.new_context(1)
    head.extend_context(context, want["taps"], torch.arange(length)[None])
    hidden, base = head.draft_block(context, anchor, torch.tensor([length]))
    previous, state, logits = anchor, None, []
    for slot in range(hidden.shape[1]):
        row, _, state = head.markov_step(state, previous, hidden[:, slot], base[:, slot])
        previous = head.draft_to_target(row.argmax(-1))
        logits.append(row)
    return {"block_hidden": hidden, "base_logits": base, "logits": torch.stack(logits, 1)}


def golden_round(kind: str, prompt: int = 0, golden: Path = DEEPSPEC) -> dict[str, torch.Tensor]:
    prefix = f"{kind}.round0.{prompt}."
    expected = load_file(golden / "expected.safetensors")
    return {name[len(prefix) :]: value for name, value in expected.items() if name.startswith(prefix)}


# -- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_equal_with_golden_drafts(kind: str, layout: str, tmp_path: Path) -> None:
    first, there, back = tmp_path / "first", tmp_path / "there", tmp_path / "back"
    convert(str(DEEPSPEC / kind), str(first))
    convert(str(first), str(there), layout, TARGET)
    convert(str(there), str(back))
    tensors = load_file(back / "model.safetensors")
    same_tensors(tensors, load_file(first / "model.safetensors"))
    same_tensors(tensors, load_file(DEEPSPEC / kind / "model.safetensors"))
    want = golden_round(kind)
    got = first_round(DSparkDraftModel.from_pretrained(back), want)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], atol=1e-5, rtol=0)
    unsaid = {"target_name_or_path", "num_target_layers", "num_anchors"}  # speculators has no field for the latter two
    same = set(fields_of(first)) - unsaid
    assert {name: fields_of(back).get(name) for name in same} == {name: fields_of(first)[name] for name in same}


@pytest.mark.parametrize("name", ["vanilla", "reduced"])
def test_speculators_file_comes_back_as_its_library_wrote_it(name: str, tmp_path: Path) -> None:
    convert(str(SPECULATORS / name), str(tmp_path / "own"))
    convert(str(tmp_path / "own"), str(tmp_path / "back"), "speculators", TARGET)
    same_tensors(load_file(tmp_path / "back/model.safetensors"), load_file(SPECULATORS / name / "model.safetensors"))
    ours, theirs = fields_of(tmp_path / "back"), fields_of(SPECULATORS / name)
    theirs["speculators_config"]["verifier"]["name_or_path"] = TARGET
    theirs.pop("transformers_version")
    assert ours == theirs
    assert fields_of(tmp_path / "own")["target_layer_ids"] == [0, 2, 4]


def test_speculators_weights_draft_as_deepspecs(tmp_path: Path) -> None:
    """The reduced head's logits are the whole one's at its 64 ids: same weights, embeddings borrowed or cut."""
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    want = golden_round("vanilla")
    for name in ("vanilla", "reduced"):
        convert(str(SPECULATORS / name), str(tmp_path / name))
        head = DSparkDraftModel.from_pretrained(tmp_path / name).bind(target)
        got = first_round(head, want)["base_logits"]
        torch.testing.assert_close(got, want["base_logits"][..., head.draft_token_ids()], atol=1e-5, rtol=0)


def test_shifted_layers_would_show(tmp_path: Path) -> None:
    convert(str(DEEPSPEC / "vanilla"), str(tmp_path / "a"))
    convert(str(tmp_path / "a"), str(tmp_path / "b"), "speculators", TARGET)
    assert fields_of(tmp_path / "b")["aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert fields_of(tmp_path / "b")["sample_from_anchor"] is True
    assert "model_type" not in fields_of(tmp_path / "b")


def test_deepspec_export_has_what_loaders_need(tmp_path: Path) -> None:
    convert(str(SPECULATORS / "vanilla"), str(tmp_path / "own"))
    with pytest.raises(ValueError, match="num_target_layers"):
        convert(str(tmp_path / "own"), str(tmp_path / "no"), "deepspec")
    notes = convert(str(tmp_path / "own"), str(tmp_path / "out"), "deepspec", TARGET)
    assert not [note for note in notes if "uninitialised" in note]
    same_tensors(load_file(tmp_path / "out/model.safetensors"), load_file(DEEPSPEC / "vanilla/model.safetensors"))
    written, theirs = fields_of(tmp_path / "out"), fields_of(DEEPSPEC / "vanilla")
    theirs.pop("transformers_version")
    # num_anchors is not in speculators' file; sample_from_anchor is always written.
    assert {**written, "num_anchors": 8} == {**theirs, "sample_from_anchor": True, "target_name_or_path": TARGET}
    edited(tmp_path / "own", tmp_path / "blind", num_target_layers=6)
    assert "uninitialised" in " ".join(convert(str(tmp_path / "blind"), str(tmp_path / "bare"), "deepspec"))


# -- what is only ours -----------------------------------------------------------------------------------------------


def own_head(directory: Path, target: Any, **overrides: Any) -> Any:
    torch.manual_seed(1)
    fields: dict[str, Any] = {"num_hidden_layers": 1, "block_size": 4, "markov_rank": 8, **overrides}
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, **fields)).eval()
    head.save_pretrained(directory)
    return head


def test_mask_vector_becomes_a_row(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    head = own_head(tmp_path / "own", target, embedding_scale=3.0).bind(target)
    with pytest.raises(ValueError, match="--target"):
        convert(str(tmp_path / "own"), str(tmp_path / "no"), "deepspec")
    with pytest.raises(ValueError, match="--mask-token-id"):
        convert(str(tmp_path / "own"), str(tmp_path / "no"), "deepspec", TARGET)
    with pytest.raises(ValueError, match="0 to 97"):
        convert(str(tmp_path / "own"), str(tmp_path / "no"), "deepspec", TARGET, Answers(mask_token_id=98))
    notes = convert(str(tmp_path / "own"), str(tmp_path / "out"), "deepspec", TARGET, Answers(mask_token_id=96))
    assert "id 96" in " ".join(notes)
    assert "multiplied" in " ".join(notes)
    other = DSparkDraftModel.from_pretrained(tmp_path / "out")
    assert other.config.mask_token_id == 96
    assert other.config.embedding_scale == 1.0
    taps = torch.randn(1, 9, head.fc.in_features)
    want = {"taps": taps, "anchor": torch.tensor([5])}
    for name, tensor in first_round(head, want).items():
        torch.testing.assert_close(first_round(other, want)[name], tensor, atol=1e-5, rtol=0)


def test_spare_row_is_one_that_the_tokenizer_leaves(tiny_target: Any, byte_tokenizer: Any, tmp_path: Path) -> None:
    target = tiny_target("qwen3", vocab_size=264)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    own_head(tmp_path / "own", target)
    convert(str(tmp_path / "own"), str(tmp_path / "out"), "speculators", str(tmp_path / "target"))
    assert fields_of(tmp_path / "out")["mask_token_id"] == 263
    assert "embed_tokens.weight" in load_file(tmp_path / "out/model.safetensors")


@pytest.mark.parametrize(
    ("overrides", "layout", "message"),
    [
        ({"qk_norm": False}, "deepspec", "qk_norm=False"),
        ({"final_logit_softcapping": 30.0}, "speculators", "final_logit_softcapping"),
        ({"sliding_window": 8}, "speculators", "sliding_window"),
        ({"draft_vocab_size": 50, "mask_token_id": 97}, "deepspec", "--to speculators"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(
    overrides: dict[str, Any], layout: str, message: str, tmp_path: Path
) -> None:
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    head = own_head(tmp_path / "own", target, **overrides)
    if head.config.has_reduced_vocab:
        head.set_draft_vocabulary(torch.arange(50))
        head.save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match=message):
        convert(str(tmp_path / "own"), str(tmp_path / "out"), layout, TARGET, Answers(mask_token_id=96))
    assert not (tmp_path / "out").exists()


def test_export_warns_of_what_engines_refuse(tmp_path: Path) -> None:
    for kind in ("gated", "rnn"):
        convert(str(DEEPSPEC / kind), str(tmp_path / kind))
        notes = convert(str(tmp_path / kind), str(tmp_path / f"{kind}-out"), "deepspec")
        assert f"vLLM refuses markov_head_type='{kind}'" in " ".join(notes)
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    own_head(tmp_path / "none", target, markov_rank=0, mask_token_id=97)
    assert "rank 0" in " ".join(convert(str(tmp_path / "none"), str(tmp_path / "none-out"), "speculators", TARGET))


# -- other layouts in ------------------------------------------------------------------------------------------------


def zlab(tmp_path: Path, **fields: Any) -> str:
    """A DFlash directory as z-lab lays it out, from a golden head's weights."""
    out = tmp_path / "zlab"
    out.mkdir()
    config = fields_of(DEEPSPEC / "vanilla")
    for name in ("markov_rank", "markov_head_type", "target_layer_ids", "mask_token_id", "enable_confidence_head"):
        config.pop(name)
    inner = {"target_layer_ids": [0, 2, 4], "mask_token_id": 97}
    (out / "config.json").write_text(json.dumps({**config, "dflash_config": inner, **fields}))
    left_out = ("markov_head", "confidence_head", "embed_tokens", "lm_head")
    tensors = load_file(DEEPSPEC / "vanilla/model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith(left_out)}, out / "model.safetensors")
    return str(out)


def test_zlab_dflash_predicts_from_mask_slots_only(tmp_path: Path) -> None:
    convert(zlab(tmp_path), str(tmp_path / "own"))
    head = DSparkDraftModel.from_pretrained(tmp_path / "own")
    assert head.config.sample_from_anchor is False
    assert head.max_draft_tokens == 4
    assert head.config.target_layer_ids == [0, 2, 4]
    want = golden_round("vanilla")
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    got = first_round(head.bind(target), want)
    torch.testing.assert_close(got["block_hidden"], want["block_hidden"][:, 1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"mask_token_id": 97}, "--target-layer-ids"),
        ({"target_layer_ids": [0, 2, 4]}, "--mask-token-id"),
        ({"target_layer_ids": [0], "mask_token_id": 97, "fc_layernorm": True}, "fc_layernorm"),
        ([1], "must be a dict"),
    ],
)
def test_zlab_unknowns_are_asked_for(inner: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_head(zlab(tmp_path, dflash_config=inner))


def test_deepspec_dflash_has_no_markov_head(tmp_path: Path) -> None:
    source = edited(DEEPSPEC / "vanilla", tmp_path / "in", markov_rank=0, enable_confidence_head=False)
    tensors = load_file(DEEPSPEC / "vanilla/model.safetensors")
    kept = {n: t for n, t in tensors.items() if not n.startswith(("markov_head", "confidence_head"))}
    save_file(kept, Path(source) / "model.safetensors")
    convert(source, str(tmp_path / "out"))
    head = DSparkDraftModel.from_pretrained(tmp_path / "out")
    assert head.max_draft_tokens == 5
    same_tensors(load_file(tmp_path / "out/model.safetensors"), kept)


@pytest.mark.parametrize(
    ("drop", "fields", "message"),
    [
        (("sample_from_anchor",), {}, "--sample-from-anchor"),
        (("aux_hidden_state_layer_ids",), {}, "--target-layer-ids"),
        (("mask_token_id",), {}, "mask_token_id"),
        (("transformer_layer_config",), {}, "transformer_layer_config"),
        ((), {"transformer_layer_config": {"model_type": "qwen3"}}, "hidden_size"),
        ((), {"speculators_model_type": "eagle3"}, "eagle3"),
        ((), {"aux_hidden_state_layer_ids": ["1"]}, "damaged"),
        ((), {"markov_rank": 10**9}, "markov_rank"),
    ],
)
def test_speculators_unknowns_are_asked_for(
    drop: tuple[str, ...], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = edited(SPECULATORS / "vanilla", tmp_path / "in", drop, **fields)
    with pytest.raises(ValueError, match=message):
        read_head(source)


def test_answers_fill_in_what_a_file_does_not_say(tmp_path: Path) -> None:
    source = edited(
        SPECULATORS / "vanilla", tmp_path / "in", ("sample_from_anchor", "aux_hidden_state_layer_ids", "mask_token_id")
    )
    config = read_head(source, Answers([0, 2, 4], False, 97)).config
    assert (config.target_layer_ids, config.sample_from_anchor, config.mask_token_id) == ([0, 2, 4], False, 97)


def test_rope_missing_is_an_error(tmp_path: Path) -> None:
    layer = fields_of(SPECULATORS / "vanilla")["transformer_layer_config"]
    layer.pop("rope_parameters")
    with pytest.raises(ValueError, match="rope_theta"):
        read_head(edited(SPECULATORS / "vanilla", tmp_path / "in", transformer_layer_config=layer))


def test_draft_vocabulary_tables_are_compared(tmp_path: Path) -> None:
    tensors = load_file(SPECULATORS / "reduced/model.safetensors")
    ids = tensors["d2t"] + torch.arange(64)
    wrong = (
        ({"d2t": ids}, "absolute ids"),
        ({"t2d": ~tensors["t2d"]}, "t2d and d2t"),
        ({"d2t": tensors["d2t"].int()}, "int64"),
    )
    for number, (change, message) in enumerate(wrong):
        source = Path(edited(SPECULATORS / "reduced", tmp_path / str(number)))
        save_file({**tensors, **change}, source / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            read_head(str(source))


def test_layout_is_told_by_fields(tmp_path: Path) -> None:
    renamed = edited(SPECULATORS / "vanilla", tmp_path / "deepspec-dspark", architectures=["Qwen3DSparkModel"])
    assert read_head(renamed).layout == "speculators"
    assert read_head(edited(DEEPSPEC / "vanilla", tmp_path / "x", architectures=["Other"])).layout == "deepspec"
    with pytest.raises(ValueError, match="no layout that is known"):
        read_head(TARGET)
    with pytest.raises(ValueError, match="specdec convert"):
        DSparkDraftModel.from_pretrained(renamed)


def test_files_are_not_overwritten_and_paths_do_not_escape(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(FileExistsError, match="not an empty directory"):
        convert(str(DEEPSPEC / "vanilla"), str(tmp_path / "full"))
    source = Path(edited(DEEPSPEC / "vanilla", tmp_path / "in"))
    (source / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"fc.weight": "../outside.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="beside it"):
        read_head(str(source))


# -- check -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hd32() -> tuple[Any, list[torch.Tensor]]:
    expected = load_file(HD32 / "expected.safetensors")
    return AutoModelForCausalLM.from_pretrained(HD32 / "target"), [expected[f"prompt.{i}"][None] for i in range(4)]


@pytest.fixture
def fewer_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the time of the readings that a test is not about."""
    whole = checking._readings
    monkeypatch.setattr(checking, "_readings", lambda *args: [r for r in whole(*args) if "embeddings" not in r[0]])


@pytest.mark.usefixtures("fewer_readings")
def test_check_names_layer_ids_that_are_off_by_one(hd32: Any, tmp_path: Path) -> None:
    target, prompts = hd32
    for name, ids in (("below", [-1, 1, 3]), ("above", [1, 3, 5])):
        source = edited(HD32 / "vanilla", tmp_path / name, target_layer_ids=ids)
        result = check_head(source, target, prompts=prompts)
        assert result.best.option == "--target-layer-ids 0,2,4", result.report()
        assert f"target_layer_ids [0, 2, 4] instead of {ids} fits" in result.report()


@pytest.mark.usefixtures("fewer_readings")
def test_check_command_names_layer_ids_that_are_off_by_one(hd32: Any, tmp_path: Path) -> None:
    source = edited(HD32 / "vanilla", tmp_path / "in", target_layer_ids=[-1, 1, 3])
    words = [word for ids in hd32[1] for word in ("--prompt-ids", ",".join(map(str, ids[0].tolist())))]
    said = run("convert", source, "--check", "--target", str(HD32 / "target"), *words)
    assert "Convert again with --target-layer-ids 0,2,4" in said.output, (said.output, said.exception)
    with pytest.raises(ValueError, match="0 to 97"):
        check_head(source, hd32[0], prompts=[[98]])


def test_check_says_nothing_of_a_right_head(hd32: Any) -> None:
    target, prompts = hd32
    result = check_head(str(HD32 / "vanilla"), target, prompts=prompts)
    assert result.best is result.readings[0], result.report()
    assert "read rightly" in result.report()


@pytest.mark.usefixtures("fewer_readings")
def test_check_names_the_anchor_slot(hd32: Any, tmp_path: Path) -> None:
    target, prompts = hd32
    source = edited(HD32 / "vanilla", tmp_path / "in", sample_from_anchor=False)
    assert check_head(source, target, prompts=prompts).best.option == "--sample-from-anchor"


def test_check_reports_a_head_that_fits_nothing() -> None:
    reading = checking.Reading("as the file says", "", 1, 40, 41)
    assert "No reading fits" in checking.CheckResult([reading, reading], "4 prompts").report()


# -- commands --------------------------------------------------------------------------------------------------------


def run(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


def test_convert_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("convert", str(DEEPSPEC / "gated"), str(tmp_path / "a"))
    assert done.exit_code == 0, done.output
    done = run("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "speculators", "--target", TARGET)
    assert "note: vLLM refuses" in done.output
    assert run("convert", str(tmp_path / "a")).exception is not None
    assert "give --target MODEL" in str(run("convert", str(tmp_path / "a"), "--check").exception)
    monkeypatch.setattr(checking, "_readings", lambda config, *rest: [("as the file says", "", config)])
    monkeypatch.setattr(checking.CheckResult, "report", lambda self: f"measured {self.readings[0].rounds > 0}")
    assert "measured True" in run("convert", str(tmp_path / "a"), "--check", "--target", TARGET).output
    assert "integers with commas" in str(run("convert", "x", "y", "--target-layer-ids", "a").exception)


@pytest.mark.parametrize("source", [DEEPSPEC / "vanilla", SPECULATORS / "reduced"], ids=str)
def test_info(source: Path) -> None:
    text = describe(str(source))
    assert "layers [0, 2, 4]" in text
    assert "Markov head vanilla, rank 8" in text
    assert text in run("info", str(source)).output


def test_info_counts_and_says_calibration(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    head = own_head(tmp_path, target, confidence_temperatures=[1.0, 2.0, 1.5, 1.25])
    text = describe(str(tmp_path))
    assert "temperatures 1, 2, 1.5, 1.25" in text
    assert f"{sum(p.numel() for p in head.parameters()):,} in the file" in text
    assert "mask a vector of its own" in text


def test_serve_command(tmp_path: Path) -> None:
    line, notes = serve_command(TARGET, str(DEEPSPEC / "vanilla"))
    speculative = json.dumps({"method": "dspark", "model": str(DEEPSPEC / "vanilla"), "num_speculative_tokens": 5})
    assert line == f"vllm serve {TARGET} --speculative-config '{speculative}'"
    assert notes == []
    line, notes = serve_command(TARGET, str(DEEPSPEC / "vanilla"), "sglang")
    assert "--speculative-algorithm DSPARK" in line
    assert "has not been run" in notes[0]
    with pytest.raises(ValueError, match="gated"):
        serve_command(TARGET, str(DEEPSPEC / "gated"))
    with pytest.raises(ValueError, match="num_target_layers=8"):
        serve_command(TARGET, edited(DEEPSPEC / "vanilla", tmp_path / "x", num_target_layers=8))
    convert(str(DEEPSPEC / "vanilla"), str(tmp_path / "own"))
    with pytest.raises(ValueError, match="--to deepspec"):
        serve_command(TARGET, str(tmp_path / "own"))
    convert(str(tmp_path / "own"), str(tmp_path / "spec"), "speculators", TARGET)
    assert run("serve-command", "--target", TARGET, "--head", str(tmp_path / "spec")).output.startswith("vllm serve")
    with pytest.raises(ValueError, match="names no target"):
        config = fields_of(tmp_path / "spec")["speculators_config"]
        config["verifier"]["name_or_path"] = None
        serve_command(TARGET, edited(tmp_path / "spec", tmp_path / "nameless", speculators_config=config))
