"""Files from strangers: bad ones give an error in words. No crash, no gigabytes, no code run, no path out.

Fixed seeds; each case is one change or several of a good ``config.json``, in each layout that is read.
"""

from __future__ import annotations

import json
import pickle
import random
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from specdec_hf import DSparkDraftModel
from specdec_hf.interop.convert import convert
from specdec_hf.interop.info import describe

GOLDEN = Path(__file__).parent / "golden"
TARGET = str(GOLDEN / "deepspec" / "target")
ALLOWED = (ValueError, OSError)
LIMIT = 300_000_000
"""Bytes of memory that a refused file may take on top; a believed size would take thousands of times as much."""
JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    -(10**30),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "abc",
    "../../../../etc/passwd",
    "\u0000",
    "x" * 10_000,
    [],
    [[]],
    [-5],
    [10**9],
    [None],
    ["1"],
    [0] * 5_000,
    {},
    {"a": {"b": {"c": [1, {"d": None}]}}},
    {"rope_type": "yarn"},
    {"rope_type": "default", "rope_theta": -1},
    {"full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 1e9}},
]
HANDLED_BY_TRANSFORMERS = {"transformers_version", "architectures", "dtype", "_name_or_path", "quantization_config"}


def zlab_fields() -> dict[str, Any]:
    fields = json.loads((GOLDEN / "deepspec" / "vanilla" / "config.json").read_text())
    for name in ("markov_rank", "markov_head_type", "target_layer_ids", "mask_token_id", "enable_confidence_head"):
        fields.pop(name)
    return {**fields, "dflash_config": {"target_layer_ids": [0, 2, 4], "mask_token_id": 97}}


def gemma4_fields() -> dict[str, Any]:
    fields = json.loads((GOLDEN / "deepspec" / "vanilla" / "config.json").read_text())
    rope = {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
    gemma = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    return {**fields, **gemma, "model_type": "gemma4_text", "hidden_activation": "silu", "rope_parameters": rope}


def transformers_fields() -> dict[str, Any]:
    fields = json.loads((GOLDEN / "deepspec" / "vanilla" / "config.json").read_text())
    for name in ("vocab_size", "markov_rank", "markov_head_type"):
        fields.pop(name)
    return {**fields, "layer_types": ["full_attention"] * 2, "model_type": "muse_glimmer_assistant"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A good configuration of each layout."""
    own = tmp_path_factory.mktemp("own") / "head"
    convert(str(GOLDEN / "deepspec" / "vanilla"), str(own))
    read = {
        "specdec": own,
        "deepspec": GOLDEN / "deepspec" / "vanilla",
        "speculators": GOLDEN / "speculators" / "reduced",
    }
    found = {name: json.loads((path / "config.json").read_text()) for name, path in read.items()}
    return {**found, "zlab": zlab_fields(), "gemma4": gemma4_fields(), "transformers": transformers_fields()}


def damaged(fields: dict[str, Any], random_: random.Random) -> dict[str, Any]:
    """One to three fields lost or replaced by junk, at the top or one level inside."""
    result = json.loads(json.dumps(fields))
    for _ in range(random_.choice((1, 1, 2, 3))):
        holder = result
        inner = [value for value in result.values() if isinstance(value, dict) and value]
        if inner and random_.random() < 0.4:
            holder = random_.choice(inner)
        name = random_.choice(sorted(set(holder) - HANDLED_BY_TRANSFORMERS) or ["extra"])
        if random_.random() < 0.15:
            holder.pop(name, None)
        else:
            holder[name] = random_.choice(JUNK)
    return result


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


LAYOUTS = ("specdec", "deepspec", "speculators", "zlab", "gemma4", "transformers")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_configurations_give_errors(good: dict[str, Any], layout: str, tmp_path: Path) -> None:
    """Weights stay those of a good file, so that only what the configuration says is at stake."""
    random_ = random.Random(layout)
    source = GOLDEN / ("speculators/reduced" if layout == "speculators" else "deepspec/vanilla")
    directory = tmp_path / "head"
    directory.mkdir()
    save_file(load_file(source / "model.safetensors"), directory / "model.safetensors")
    before, refused, cases = peak(), 0, 40
    for number in range(cases):
        fields = damaged(good[layout], random_)
        (directory / "config.json").write_text(json.dumps(fields))
        for call in (
            lambda: DSparkDraftModel.from_pretrained(directory),
            lambda: describe(str(directory)),
            lambda to=number: convert(str(directory), str(tmp_path / f"out{to}"), target=TARGET),
        ):
            try:
                call()
            except ALLOWED as error:
                assert str(error), fields
                refused += 1
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}\n{json.dumps(fields)[:2000]}") from error
    assert refused > cases, "hardly anything was refused: the cases are too tame"
    assert peak() - before < LIMIT


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', "{", "\x00\x01", '{"a":' * 3_000, "[" * 100_000])
def test_what_is_no_configuration(text: str, tmp_path: Path) -> None:
    save_file(load_file(GOLDEN / "deepspec/vanilla/model.safetensors"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    for call in (
        lambda: DSparkDraftModel.from_pretrained(tmp_path),
        lambda: describe(str(tmp_path)),
        lambda: convert(str(tmp_path), str(tmp_path / "out")),
    ):
        with pytest.raises(ALLOWED):
            call()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 65_536, "intermediate_size": 1_048_576, "num_hidden_layers": 256},
        {"vocab_size": 16_777_216, "hidden_size": 65_536, "markov_rank": 16_384},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 4_096, "head_dim": 4_096, "num_hidden_layers": 200},
    ],
    ids=["wide", "words", "deep", "heads"],
)
def test_huge_sizes_allocate_nothing(good: dict[str, Any], layout: str, sizes: dict[str, int], tmp_path: Path) -> None:
    fields = json.loads(json.dumps(good[layout]))
    (fields["transformer_layer_config"] if layout == "speculators" else fields).update(sizes)
    save_file(load_file(GOLDEN / "deepspec/vanilla/model.safetensors"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    before = peak()
    with pytest.raises(ALLOWED):
        convert(str(tmp_path), str(tmp_path / "out"), target=TARGET)
    with pytest.raises(ALLOWED):
        DSparkDraftModel.from_pretrained(tmp_path)
    assert peak() - before < LIMIT


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt", "adapter_model.bin"])
def test_pickles_are_not_read(name: str, tmp_path: Path) -> None:
    traps = tmp_path / "sprung"
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text((GOLDEN / "deepspec/vanilla/config.json").read_text())
    (head / name).write_bytes(pickle.dumps(Touch(traps)))
    for call in (
        lambda: DSparkDraftModel.from_pretrained(head),
        lambda: describe(str(head)),
        lambda: convert(str(head), str(tmp_path / "out")),
    ):
        with pytest.raises(ALLOWED, match="pickle"):
            call()
    assert not traps.exists()


def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    """``auto_map`` names a module beside the weights; nothing imports it, and it does not come out of a conversion."""
    trap, head = tmp_path / "sprung", tmp_path / "head"
    head.mkdir()
    for name in ("modeling.py", "configuration.py", "custom_generate.py"):
        (head / name).write_text(f"open({str(trap)!r}, 'w')\nclass Head: pass\nclass Config: pass\n")
    remote = {
        "AutoModel": "modeling.Head",
        "AutoConfig": "configuration.Config",
        "AutoModelForCausalLM": "modeling.Head",
    }
    save_file(load_file(GOLDEN / "deepspec/vanilla/model.safetensors"), head / "model.safetensors")
    for layout in ("deepspec", "specdec"):
        convert(str(GOLDEN / "deepspec/vanilla"), str(tmp_path / "good")) if layout == "specdec" else None
        source = GOLDEN / "deepspec/vanilla" if layout == "deepspec" else tmp_path / "good"
        fields = json.loads((source / "config.json").read_text())
        (head / "config.json").write_text(json.dumps({**fields, "auto_map": remote}))
        DSparkDraftModel.from_pretrained(head)
        describe(str(head))
        convert(str(head), str(tmp_path / f"out-{layout}"))
        assert "auto_map" not in json.loads((tmp_path / f"out-{layout}" / "config.json").read_text())
    loaded = AutoModel.from_pretrained(head, trust_remote_code=False)
    assert type(loaded) is DSparkDraftModel
    assert not trap.exists()


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/hostname",
        "..",
        "",
        "a/b.safetensors",
        "x.bin",
        5,
        None,
        ["a"],
        "a\x00.safetensors",
    ],
    ids=[str(number) for number in range(10)],
)
def test_an_index_cannot_leave_its_directory(shard: Any, tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    save_file(load_file(GOLDEN / "deepspec/vanilla/model.safetensors"), tmp_path / "outside.safetensors")
    (head / "config.json").write_text((GOLDEN / "deepspec/vanilla/config.json").read_text())
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": shard}}))
    for call in (lambda: DSparkDraftModel.from_pretrained(head), lambda: convert(str(head), str(tmp_path / "out"))):
        with pytest.raises(ALLOWED):
            call()


@pytest.mark.parametrize("index", [[], None, {"weight_map": []}, {"weight_map": None}, {"weight_map": {}}])
def test_an_index_of_another_kind(index: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((GOLDEN / "deepspec/vanilla/config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ALLOWED):
        DSparkDraftModel.from_pretrained(tmp_path)


def header(fields: Any, body: bytes = b"") -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**40) + b"{}",
        header(b"{not json"),
        header({"fc.weight": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4]}}, b"\0" * 4),
        header({"fc.weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\0" * 4),
        header({"fc.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**60]}}, b"\0" * 4),
        header({"fc.weight": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
    ],
    ids=["empty", "2^63", "2^40", "no json", "huge shape", "negative", "far offset", "dtype"],
)
def test_hostile_safetensors(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((GOLDEN / "deepspec/vanilla/config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(data)
    before = peak()
    for call in (lambda: DSparkDraftModel.from_pretrained(tmp_path), lambda: describe(str(tmp_path))):
        with pytest.raises(ALLOWED, match="cannot be read as safetensors"):
            call()
    assert peak() - before < LIMIT


def test_tables_cannot_point_outside(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "speculators/reduced/model.safetensors")
    (tmp_path / "config.json").write_text((GOLDEN / "speculators/reduced/config.json").read_text())
    for value in (-(2**40), 2**40, 2**62):
        save_file({**tensors, "d2t": torch.full_like(tensors["d2t"], value)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="d2t"):
            convert(str(tmp_path), str(tmp_path / "out"))
