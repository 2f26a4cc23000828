"""Does vLLM serve a head that went through `specdec convert`, and draft with it as it should? Both layouts, greedy.

Needs this package here and a vLLM environment of your own (never this one), whose Python is given:

    python scripts/check_engines.py --vllm-python VENV/bin/python [--target DIR --head DIR --expected FILE]

Without arguments for a head: the golden test set, for which vLLM 0.32 on a CPU printed, in both layouts:
4 of 4 texts equal, 67 drafts, 335 drafted, 128 accepted. Wrong layer ids give 81 / 405 / 113, and no error.

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
LAYOUTS = ("deepspec", "speculators")
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def serve(target: str, head: str, expected: str, tokens: int) -> None:
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
    speculative = {"method": "dspark", "model": head, "num_speculative_tokens": tokens}
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


def check(vllm_python: str, target: str, head: str, expected: str, want: tuple[int, ...] | None) -> int:
    """Convert into both layouts, serve each, compare; the exit status."""
    from specdec_hf.interop.convert import convert
    from specdec_hf.interop.reading import read_head

    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        own = os.path.join(folder, "own")
        convert(head, own)
        tokens = read_head(own).config.max_draft_tokens
        for layout in LAYOUTS:
            out = os.path.join(folder, layout)
            convert(own, out, layout, target)
            words = [vllm_python, __file__, "--serve", target, out, expected, str(tokens)]
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"equal"')]
            if not lines:
                print(f"{layout}: vLLM failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
                failed = 1
                continue
            got = json.loads(lines[-1])
            right = got["equal"] == got["prompts"] and want in (None, tuple(got[name] for name in COUNTERS))
            failed |= not right
            said = ", ".join(f"{name[4:].replace('_', ' ')} {got[name]}" for name in COUNTERS)
            verdict = "as expected" if right else "WRONG"
            print(f"{layout}: {got['equal']} of {got['prompts']} texts equal; {said}: {verdict}")
    return failed


def main() -> int:
    """Parse and run."""
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:5], int(sys.argv[5]))
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
        return check(chosen.vllm_python, *given, want=None)
    golden = (str(GOLDEN / name) for name in ("target", "vanilla", "expected.safetensors"))
    return check(chosen.vllm_python, *golden, want=(67, 335, 128))


if __name__ == "__main__":
    sys.exit(main())
