"""vLLM on CPU ranks with a tiny Qwen3-MoE: `python -m tests.hosts.vllm_model CASE …` prints a line of JSON.

Each rank is a process with an engine of its own, as in vLLM's examples of data parallelism.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import queue
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.hosts.vllm_prompts import LENGTHS, PROMPTS, RECORDED, SPREADS

LIMIT_S = 260.0
"""How long a case may take in all: pytest ends itself when a test takes 300 s."""
ENDS = time.monotonic() + LIMIT_S


def make_model(folder: str) -> None:
    """Write a model of two layers, with weights large enough that its experts choose the tokens."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **heads, **experts, max_position_embeddings=256, tie_word_embeddings=False)
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)


def make_engine(folder: str, ranks: int, dtype: str, options: dict[str, Any] | None) -> Any:
    """Make an engine in this process. `options` None leaves raymoe out of its config."""
    from vllm import LLM

    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=dtype,
        enable_expert_parallel=ranks > 1,
        enable_prefix_caching=False,
        additional_config={} if options is None else {"raymoe": options},
        **sizes,
    )


def generate(engine: Any, chosen: list[int]) -> list[dict[str, Any]]:
    """Generate for some prompts; return the tokens of each and their log-probabilities."""
    from vllm import SamplingParams

    fixed: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    parameters = [SamplingParams(max_tokens=LENGTHS[index], **fixed) for index in chosen]
    outputs = engine.generate([{"prompt_token_ids": PROMPTS[index]} for index in chosen], parameters, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        {
            "tokens": list(completion.token_ids),
            "logprobs": [
                step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
            ],
        }
        for completion in completions
    ]


ROUTES: dict[int, list[list[int]]] = {}
"""In the process of a worker: for each layer the experts of its tokens, one step after another."""


def record_routes(model: Any, config: Any) -> None:
    """Let the routers of a worker's model record into `ROUTES`, in the way of `enable_return_routed_experts`.

    vLLM returns what they record on GPUs alone.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCapturer,
        bind_routed_experts_capturer,
    )

    recorder = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
    capture = recorder.capture

    def keep(layer: int, ids: Any) -> None:
        capture(layer, ids)  # finds this rank's tokens among `ids`, and refuses other numbers of rows
        ROUTES.setdefault(layer, []).extend(recorder.device_buffer[: len(ids), layer].tolist())

    recorder.capture = keep
    bind_routed_experts_capturer(model, recorder)


def first_routes(model: Any, tokens: int) -> list[list[list[int]]]:
    """Return the recorded experts of the first tokens, layer by layer."""
    return [ROUTES[layer][:tokens] for layer in sorted(ROUTES)]


def begin_recording(engine: Any) -> None:
    engine.apply_model(partial(record_routes, config=engine.llm_engine.vllm_config))


def recorded(engine: Any) -> list[list[list[int]]]:
    """Return the routes of the prompt `RECORDED`, if it was alone in its rank's first steps."""
    (routes,) = engine.apply_model(partial(first_routes, tokens=RECORDED_TOKENS))
    return list(routes)


RECORDED_TOKENS = len(PROMPTS[RECORDED]) + LENGTHS[RECORDED] - 1
"""The tokens of a prompt whose experts are needed: no step follows the last one."""


def dispatches(rank: int) -> list[int]:
    """Read the tokens of each dispatch of a rank's worker so far (`tests/hosts/vllm_watched.py`)."""
    written = Path(os.environ["RAYMOE_TEST_DISPATCHES"], str(rank))
    return [int(line) for line in written.read_text().split()] if written.exists() else []


def run_alone(folder: str, rank: int, dtype: str) -> dict[str, Any]:
    """Generate in one process."""
    from vllm.model_executor.custom_op import op_registry_oot

    engine = make_engine(folder, 1, dtype, {})
    found = generate(engine, list(range(len(PROMPTS))))
    loaded = "raymoe.integrations.vllm" in sys.modules
    begin_recording(engine)
    generate(engine, [RECORDED])
    known = {"registered": "RoutedExperts" in op_registry_oot, "loaded": loaded}
    return {"found": found, "routes": recorded(engine), **known}


def run_spread(folder: str, rank: int, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    """Generate on two ranks, three times, with other prompts on each."""
    engine = make_engine(folder, 2, dtype, options)
    begin_recording(engine)
    calls = []
    for spread in SPREADS:
        before = len(dispatches(rank))
        found = generate(engine, spread[rank])
        calls.append({"found": found, "dispatches": len(dispatches(rank)) - before})
    return {"calls": calls, "routes": recorded(engine)}


def run_until_it_fails(folder: str, rank: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """Generate, and return the error that ends it."""
    engine = make_engine(folder, 2, "float32", options)
    began, raised = time.monotonic(), ""
    try:
        generate(engine, [rank])
    except Exception as error:  # noqa: BLE001  the test judges it
        raised = f"{type(error).__name__}: {error}"
    return {"raised": raised, "seconds": time.monotonic() - began, "dispatches": len(dispatches(rank))}


def work(
    case: Callable[..., dict[str, Any]],
    folder: str,
    rank: int,
    ranks: int,
    port: int,
    results: Any,
    arguments: tuple[Any, ...],
) -> None:
    """Run a case on one rank."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="INFO",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_HOST_IP="127.0.0.1",
    )
    if ranks > 1:
        place = {"VLLM_DP_RANK": rank, "VLLM_DP_RANK_LOCAL": rank, "VLLM_DP_SIZE": ranks, "VLLM_DP_MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, VLLM_DP_MASTER_IP="127.0.0.1")
    results.put((rank, case(folder, rank, *arguments)))
    results.close()
    results.join_thread()
    os._exit(0)  # engines of ranks wait for one another when they end


def on_ranks(ranks: int, case: Callable[..., dict[str, Any]], folder: str, *arguments: Any) -> list[dict[str, Any]]:
    """Run a case in a process for each rank; return the results of those that gave one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results: Any = mp.Queue()
    processes = [
        mp.Process(target=work, args=(case, folder, rank, ranks, port, results, arguments)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, dict[str, Any]] = {}
    try:
        while len(found) < ranks and time.monotonic() < ENDS:
            try:
                rank, result = results.get(timeout=1)
                found[rank] = result
            except queue.Empty:
                assert any(process.is_alive() for process in processes), "a rank ended without a result"
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert len(found) == ranks, f"{len(found)} of {ranks} ranks gave a result within {LIMIT_S} s"
    return [found[rank] for rank in sorted(found)]


def main(case: str, options: str = "{}") -> None:
    mp.set_start_method("spawn")
    with tempfile.TemporaryDirectory() as folder:
        maker = mp.Process(target=make_model, args=(folder,))
        maker.start()
        maker.join()
        os.environ["RAYMOE_TEST_DISPATCHES"] = folder
        if case == "own":
            found: Any = on_ranks(2, run_until_it_fails, folder, None)
        elif case == "killed":
            os.environ["RAYMOE_TEST_KILL"] = "1"
            found = on_ranks(2, run_until_it_fails, folder, {"timeout_s": 5})
        elif case == "alone":
            found = on_ranks(1, run_alone, folder, "float32")
        else:
            found = {
                "alone": on_ranks(1, run_alone, folder, case),
                "spread": on_ranks(2, run_spread, folder, case, json.loads(options)),
            }
    print(json.dumps({"result": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
