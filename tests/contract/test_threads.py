"""Two calls on one model in two threads: each sees its own hidden states."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec_hf import DSparkDraftModel, enable_speculation

GOLDEN = Path(__file__).parent.parent / "golden" / "deepspec"


def test_threads_sharing_a_model_keep_their_taps_apart() -> None:
    expected = load_file(GOLDEN / "expected.safetensors")
    model = enable_speculation(AutoModelForCausalLM.from_pretrained(GOLDEN / "target"))
    head = DSparkDraftModel.from_pretrained(GOLDEN / "vanilla")
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    prompts = [expected["prompt.0"][None], expected["prompt.3"][None]]
    alone = [model.generate(ids, assistant_model=head, **settings) for ids in prompts]
    results: dict[int, object] = {}
    start = threading.Barrier(2)

    def run(i: int) -> None:
        start.wait()
        results[i] = [model.generate(prompts[i], assistant_model=head, **settings) for _ in range(4)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, single in enumerate(alone):
        assert len(results[i]) == 4
        for out in results[i]:
            assert torch.equal(out.sequences, single.sequences)
            # the same acceptance: a foreign hidden state in the draft's context would lower it
            assert out.speculation.accepted_lengths == single.speculation.accepted_lengths
