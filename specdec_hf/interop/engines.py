"""Commands that serve a target with a head on vLLM and SGLang, printed only after the head has been checked.

Facts: vLLM 0.32 and SGLang's server arguments. vLLM runs exports of this package in every layout that it reads
(``scripts/check_engines.py``); SGLang's command has not been run by us.
"""

from __future__ import annotations

import json
import os
import shlex

from transformers import AutoConfig

from ..heads.dspark import DSparkConfig
from .formats import Answers, detect, raw_config
from .reading import read_head
from .target import Target
from .writing import engine_warnings

ENGINES = ("vllm", "sglang")


def serve_command(target: str, head: str, engine: str = "vllm") -> tuple[str, list[str]]:
    """The command line that serves ``target`` with ``head``.

    Args:
        target: directory or Hub repository.
        head: directory or repository in DeepSpec's, speculators' or z-lab's layout.
        engine: ``vllm`` or ``sglang``.

    Returns:
        The command for a shell, and notes.

    Raises:
        ValueError: the engine cannot load this head, or it does not belong to the target; says what to do.
        OSError: the head or the target's configuration cannot be read.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: it must be one of {', '.join(ENGINES)}")
    fields = raw_config(head, {})
    layout = detect(fields, head)
    if layout == "specdec":
        raise ValueError(
            f"{head} is in this package's layout, which engines do not read. First: "
            + shlex.join(
                ["specdec", "convert", head, f"{head.rstrip('/')}-deepspec", "--to", "deepspec", "--target", target]
            )
        )
    chosen = Target(target)
    config = read_head(head, Answers(vocab_size=chosen.text.vocab_size)).config
    chosen.check(config)
    if layout == "transformers":
        raise ValueError(f"{head} is transformers' DFlash assistant: model.generate(assistant_model=...) runs it there")
    dflash = layout == "zlab" or fields.get("speculators_model_type") == "dflash"
    if engine == "vllm" and not dflash:
        refuse_vllm(config)
    tokens = config.max_draft_tokens
    notes = _notes(config, layout, target, head)
    method = "dflash" if dflash else "dspark"
    if engine == "vllm":
        speculative = {"method": method, "model": head, "num_speculative_tokens": tokens}
        words = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    else:
        words = [
            "python",
            "-m",
            "sglang.launch_server",
            "--model-path",
            target,
            "--speculative-algorithm",
            method.upper(),
        ]
        words += ["--speculative-draft-model-path", head, f"--speculative-{method}-block-size", str(config.block_size)]
        notes.append("this command follows SGLang's documentation; it has not been run with this package's exports.")
    return shlex.join(words), notes


def refuse_vllm(config: DSparkConfig) -> None:
    """Raise ValueError for a DSpark head that vLLM 0.32 refuses or dies at."""
    problem = next((one for one in engine_warnings(config) if one.startswith("vLLM")), None)
    if problem is not None:
        raise ValueError(f"{problem} generate() of this package runs it as it is.")


def _notes(config: DSparkConfig, layout: str, target: str, head: str) -> list[str]:
    notes = [one for one in engine_warnings(config) if not one.startswith("vLLM")]
    if layout == "speculators":
        named = config.target_name_or_path
        if (
            named
            and named != target
            and not (os.path.isdir(named) and os.path.realpath(named) == os.path.realpath(target))
        ):
            notes.append(f"the head names {named} as its target, not {target}; embeddings are taken from the former.")
        if not named:
            raise ValueError(
                f"{head} names no target (verifier.name_or_path), so engines load garbage; convert it again"
            )
        if not os.path.isdir(named):
            AutoConfig.from_pretrained(named)  # OSError where nothing is there: engines would go on without a word
    return notes
