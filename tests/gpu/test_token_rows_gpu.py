"""Layout `token`, and DeepEP's interface over it, on two GPUs: eager, captured, as fp8, and on a stream of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.fp8 import quantise  # noqa: E402
from raymoe.integrations.deep_ep import ElasticBuffer  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.workload.exchange.received import dequantised  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402
from tests.gpu.torchrun_ranks import torchrun  # noqa: E402
from tests.unit.exchange.exchange_cases import ENGINE, MANY, Case, batches, open_exchange  # noqa: E402
from tests.unit.exchange.test_token_rows import TokenResult, judge, result_of, run_case, sums_for  # noqa: E402
from tests.unit.moe.gradient_cases import Gradients, judge_gradients, run_gradients  # noqa: E402

RANKS = 2
HOPPER = torch.cuda.get_device_capability() >= FUSED_CAPABILITY if GPUS else False

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(GPUS < RANKS, reason=f"NCCL needs a GPU for each of {RANKS} ranks: {GPUS} here"),
    pytest.mark.timeout(300),
]

CAPTURABLE = [*(("fused", MANY, "staged", ENGINE) if HOPPER else ()), "allgather"]
SPEC = ExchangeSpec(tokens=33, hidden=256, experts=8, topk=3, layout="token")
EAGER = [
    Case(RANKS, SPEC, name, ("uniform", "one", "masked", "repeated", "none"), seed=3, prefix=True, given=True)
    for name in (*CAPTURABLE, "collective")
]
REPLAYED = [Case(RANKS, SPEC, name, ("uniform", "masked", "one"), seed=4, ragged=False) for name in CAPTURABLE]
GRADIENTS = [
    Case(RANKS, replace(SPEC, dtype="float32", depth=0), name, ("uniform", "repeated"), seed=5, weighted=False)
    for name in (*CAPTURABLE, "collective")
]


def run_eagerly(rank: int) -> list[list[TokenResult]]:
    torch.cuda.set_device(rank)
    with World.of() as world:
        return [run_case(world, case) for case in EAGER]


def replay(rank: int) -> list[list[TokenResult]]:
    """Capture a step of each case once, and replay it for all of its batches."""
    torch.cuda.set_device(rank)
    with World.of() as world:
        return [replay_case(world, case) for case in REPLAYED]


def replay_case(world: World, case: Case) -> list[TokenResult]:
    results = []
    with open_exchange(world, case) as exchange, torch.cuda.stream(torch.cuda.Stream()):
        held = batches(case, 0)[world.rank].on(world.device)
        sums = torch.empty(case.spec.rows(RANKS), case.spec.hidden, dtype=held.x.dtype, device=world.device)
        exchange.combine(sums, exchange.dispatch(held.x, held.ids, held.weights), weighted=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            got = exchange.dispatch(held.x, held.ids, held.weights)
            y = exchange.combine(sums, got, weighted=False)
        for step in range(len(case.routing)):
            batch = batches(case, step)[world.rank].on(world.device)
            for memory, values in ((held.x, batch.x), (held.ids, batch.ids), (held.weights, batch.weights)):
                memory.copy_(values)
            sums.copy_(sums_for(sums, world.rank, step))
            graph.replay()
            torch.cuda.synchronize()
            results.append(result_of(got, sums, y))
        exchange.check()
        del graph
    return results


def run_backward(rank: int) -> list[list[Gradients]]:
    torch.cuda.set_device(rank)
    with World.of() as world:
        return [run_gradients(world, case) for case in GRADIENTS]


def test_rows_by_token_equal_the_plan(tmp_path: Path) -> None:
    answers = torchrun(RANKS, tmp_path, "nccl", run_eagerly)
    for index, case in enumerate(EAGER):
        judge(case, [answer[index] for answer in answers])


def test_captured_rows_by_token_equal_the_plan(tmp_path: Path) -> None:
    answers = torchrun(RANKS, tmp_path, "nccl", replay)
    for index, case in enumerate(REPLAYED):
        judge(case, [answer[index] for answer in answers])


def test_gradients_by_token_equal_autograd_in_float64(tmp_path: Path) -> None:
    answers = torchrun(RANKS, tmp_path, "nccl", run_backward)
    for index, case in enumerate(GRADIENTS):
        judge_gradients(case, [answer[index] for answer in answers], bound=1e-5)


def call_buffer(rank: int) -> dict[str, Any]:
    """Call a buffer with rows of both kinds, at once and on its own stream, eagerly and captured."""
    torch.cuda.set_device(rank)
    dist.barrier()
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=64, hidden=512, explicitly_destroy=True)
    source = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn(40 + rank, 512, generator=source, device="cuda", dtype=torch.bfloat16)
    weights, ids = torch.rand(len(x), 8, generator=source, device="cuda").topk(3)
    found: dict[str, Any] = {"workspaces": []}
    for expands in (False, True):
        for quantised in (False, True) if HOPPER else (False,):
            rows = quantise(x) if quantised else x
            sent = dequantised(*rows).bfloat16() if quantised else x
            for asynchronous in (False, True):
                for tokens in (64, 41):
                    options = {"do_expand": expands, "async_with_compute_stream": asynchronous, "num_sms": 16}
                    received, _, _, handle, event = buffer.dispatch(
                        *(rows, ids, weights, None, 8, tokens), do_cpu_sync=not asynchronous, **options
                    )
                    event.current_stream_wait()
                    plain = dequantised(*received).bfloat16() if isinstance(received, tuple) else received
                    y, _, event = buffer.combine(plain, handle, async_with_compute_stream=asynchronous)
                    event.current_stream_wait()
                    owners = torch.stack([((ids // 4) == each).any(1) for each in range(RANKS)]).sum(0)
                    times = torch.full_like(owners, 3) if expands else owners
                    name = f"expands {expands}, quantised {quantised}, asynchronous {asynchronous}, {tokens}"
                    wanted = sent.float() * times[:, None]
                    found[name] = float((y.float() - wanted).abs().max() / wanted.abs().max())
                    again = buffer.dispatch(rows, handle=handle, do_expand=expands)[0]
                    moved = again[0].float() if isinstance(again, tuple) else again
                    first = received[0].float() if isinstance(received, tuple) else received
                    there = int(handle.got.expert_offsets[-1])
                    found[name + ", again"] = float((moved[:there] - first[:there]).abs().nan_to_num(9.0).max())
            found["workspaces"].append(len(buffer._workspaces))
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            options = {"num_experts": 8, "num_sms": 16, "do_cpu_sync": False}
            received, local, _, handle, _ = buffer.dispatch(x, ids, weights, **options)
            ends = handle.psum_num_recv_tokens_per_scaleup_rank
            y, _, event = buffer.combine(received, handle, async_with_compute_stream=True)
            event.current_stream_wait()
        ids.copy_(ids.roll(1, 0))
        graph.replay()
        torch.cuda.synchronize()
        owners = torch.stack([((ids // 4) == each).any(1) for each in range(RANKS)]).sum(0)
        wanted = x.float() * owners[:, None]
        found["captured"] = float((y.float() - wanted).abs().max() / wanted.abs().max())
        found["tokens"] = int(ends[-1]), int((local >= 0).any(1).sum())
        del graph
    buffer.check()
    buffer.destroy()
    return found


def test_a_program_for_deep_ep_runs_on_gpus(tmp_path: Path) -> None:
    for found in torchrun(RANKS, tmp_path, "nccl", call_buffer):
        one, other = found.pop("tokens")
        assert one == other > 0
        workspaces = found.pop("workspaces")
        assert not HOPPER or max(workspaces) <= 4, "exchanges of a form share one workspace for all numbers of tokens"
        for name, error in found.items():
            assert error <= (0.0 if name.endswith("again") else 1e-2), (name, error)
