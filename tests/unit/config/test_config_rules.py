"""Rules between keys: combinations that are refused or accepted."""

from typing import get_args

import pytest

from raymoe.config import load_job
from raymoe.config.sections import ABILITIES, ExchangeSection, OtherSystem
from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from tests.unit.config.configs_on_disk import problems, write

IMPOSSIBLE = [
    ("layer", "world.ranks=3", "32 experts do not divide among 3 ranks, 30 or 33 would"),
    ("layer", "shape.experts=30", "30 experts do not divide among 4 ranks, 28 or 32 would"),
    ("exchange", "exchange.slots=7", "32 experts do not fit into 7 slots on each of 4 ranks, 8 do"),
    ("layer", "exchange.slots=8", "workload layer has no slots, leave slots out, or run workload exchange"),
    ("exchange", "shape.topk=33", "topk 33 is more than the 32 experts"),
    ("exchange", "shape.hidden=1023", "a row of 1023 bfloat16 has 2046 bytes, not a multiple of 16, hidden 1024 would"),
    ("exchange", "exchange.wire=float16", "rows of bfloat16 cannot cross as float16"),
    ("exchange", "exchange.capacity=100", "since one rank receives at least 2048 rows, write 2048 or more, or worst"),
    ("exchange", "exchange.capacity=0.5", "capacity 0.5 overflows with any routing"),
    ("exchange", "routing.kind=trace", "kind trace needs a file"),
    ("exchange", "routing.alpha=2", "means nothing with routing.kind uniform, it belongs to zipf"),
    ("exchange", "routing.share=0.2", "means nothing with routing.kind uniform, it belongs to hot"),
    ("exchange", "routing.file=x.npy", "means nothing with routing.kind uniform, it belongs to trace"),
    ("p2p", "world.ranks=1", "one rank has no peer to send to"),
    ("p2p", "p2p.pairs=[[0, 1], [7, 2]]", "there is no rank 7 among 4 ranks, ranks are 0 to 3"),
    ("layer", "exchange.backend=row_push", "row_push is no exchange, so no layer can use it"),
    ("layer", "exchange.wire=float8_e4m3", "rows of a layer cannot cross as float8_e4m3"),
    ("layer", "exchange.layout=token", "the experts of workload layer take no rows by token, write expert or rank"),
    ("layer", "layer.recompute=true", "nothing is recomputed without a backward pass, write backward: true"),
    (
        "layer",
        "layer={experts_dtype: float8_e4m3, backward: true}",
        "experts of float8_e4m3 have no gradients, leave out backward or experts_dtype",
    ),
    (
        "layer",
        "layer.microbatches=2",
        "microbatches are of a layer with a router, write router.kind: softmax or sigmoid",
    ),
    (
        "layer",
        "layer={microbatches: 2, backward: true}",
        "microbatches have no backward pass, leave out backward or microbatches",
    ),
    (
        "layer",
        "layer={overlap: combine, backward: true}",
        "a combine beside its product is of passes without gradients, leave out backward or overlap",
    ),
    (
        "layer",
        "layer={overlap: combine, microbatches: 2, router: {kind: sigmoid}}",
        "microbatches have the exchange of others beside their products, leave out microbatches or overlap",
    ),
    ("layer", "layer.experts_dtype=fp8", "only float8_e4m3 is allowed here, did you mean 'float8_e4m3'?"),
    ("layer", "layer={router: {kind: sigmoid, groups: 5}}", "32 experts in 5 groups"),
    ("layer", "layer={router: {kind: sigmoid, groups: 16}}", "the best 1 of 16 groups of 2 experts do not hold top-4"),
    ("layer", "layer.router.groups=4", "means nothing with layer.router.kind given"),
    ("exchange", "world.domain=3", "4 ranks do not divide into domains of 3, 1, 2 or 4 would"),
    ("p2p", "world.domain=2", "workload p2p has one domain, not 2, leave world.domain out"),
    ("exchange", "world.domain=0", "must be auto, or a number from 1 to 1024"),
    ("exchange", "exchange.wire.dispatch=float32", "rows of bfloat16 cannot cross as float32"),
    (
        "exchange",
        "exchange.output=raw",
        "means nothing with exchange.wire.dispatch left out, it belongs to float8_e4m3",
    ),
    ("p2p", "world.share_gpu=true", "only GPU ranks can share a GPU, and device is auto"),
    ("p2p", "p2p={sms: 8, transports: [copy_engine, collective]}", "copy_engine, collective take no number of SMs"),
]


@pytest.mark.parametrize(("workload", "setting", "expected"), IMPOSSIBLE, ids=[setting for _, setting, _ in IMPOSSIBLE])
def test_an_impossible_combination_is_reported_at_the_last_setting(tmp_path, workload, setting, expected):
    reported = problems(tmp_path, f"workload: {workload}\n", setting)
    assert len(reported) == 1
    assert reported[0].startswith("--set ") and expected in reported[0]


EIGHT_BITS = "workload: layer\nworld: {ranks: 2, device: DEVICE}\nlayer: {experts_dtype: float8_e4m3}\n"


@pytest.mark.parametrize(
    ("device", "setting", "expected"),
    [
        ("cuda", "exchange.wire=bfloat16", "rows cross as bfloat16 and experts of float8_e4m3 take float8_e4m3"),
        ("cuda", "exchange.backend=collective", "backend collective has no float8_e4m3 on GPUs, take fused or staged"),
        ("cuda", "layer.backward=true", "experts of float8_e4m3 have no gradients"),
        ("cpu", "exchange.wire=float8_e4m3", "rows cannot cross as float8_e4m3 between CPU ranks"),
        ("cuda", "exchange={wire: float8_e4m3, output: raw}", None),
        ("cuda", "exchange={wire: {combine: float16}}", None),
        ("cpu", "exchange.backend=collective", None),
    ],
    ids=str,
)
def test_8_bit_experts_choose_their_wire(tmp_path, device, setting, expected):
    text = EIGHT_BITS.replace("DEVICE", device)
    if expected is None:
        assert load_job(write(tmp_path, text), [setting]).layer.experts_dtype == "float8_e4m3"
        return
    (problem,) = problems(tmp_path, text, setting)
    assert expected in problem


def test_a_backward_pass_of_8_bit_experts_is_refused_with_its_line(tmp_path):
    (problem,) = problems(tmp_path, "workload: layer\nlayer:\n  experts_dtype: float8_e4m3\n  backward: true\n")
    assert "line 3, layer.experts_dtype = float8_e4m3: experts of float8_e4m3 have no gradients" in problem


def test_more_rows_than_offsets_can_count_are_refused(tmp_path):
    (problem,) = problems(tmp_path, "workload: layer\nshape: {tokens: 16777216, topk: 64, experts: 64}\n")
    assert "line 2, shape.tokens = 16777216: a rank may receive 4294967536 rows, offsets count to 2147483647" in problem


@pytest.mark.parametrize(
    "shape",
    [
        {"experts": 30},
        {"topk": 33},
        {"hidden": 1023},
        {"tokens": 2**24, "topk": 32},
        {"tokens": 2**24 - 1, "topk": 32},
        {"tokens": 2**24 - 2, "topk": 32},
        {"tokens": 512},
    ],
    ids=str,
)
def test_rules_refuse_the_shapes_that_a_spec_refuses(tmp_path, shape):
    shape = {"tokens": 512, "hidden": 1024, "experts": 32, "topk": 4} | shape
    settings = [f"shape.{key}={value}" for key, value in shape.items()]
    try:
        ExchangeSpec(**shape).check(ranks=4)
    except ConfigError:
        assert problems(tmp_path, "workload: exchange\n", *settings)
    else:
        load_job(write(tmp_path, "workload: exchange\n"), settings)


def test_every_backend_has_its_abilities():
    *exchanges, others = get_args(ExchangeSection.model_fields["backend"].annotation)
    assert {*exchanges, *(get_args(others) or [others])} == set(ABILITIES)
    assert set(get_args(OtherSystem)) < set(ABILITIES)


OWN_ROUTER = "layer: {router: {kind: softmax}}\n"


@pytest.mark.parametrize(
    ("config", "setting", "expected"),
    [
        (OWN_ROUTER, "routing={kind: hot}", "routing hot beside a softmax router, which chooses experts itself"),
        (OWN_ROUTER, "routing.masked=0.5", "0.5 of the ids masked beside a softmax router"),
        ("world: {device: cuda}\n", "shape.dtype=float32", "experts on GPUs are not float32"),
        ("world: {device: cpu}\n", "exchange.backend=fused", "fused is no backend of cpu ranks"),
        ("world: {device: cuda, domain: 2}\n", "exchange.backend=collective", "collective does not cross 2 domains of"),
        ("world: {device: cpu}\n", "steps.graph=true", "CUDA graphs need GPU ranks and these are CPU ranks"),
    ],
)
def test_an_impossible_layer_is_refused(tmp_path, config, setting, expected):
    (problem,) = problems(tmp_path, f"workload: layer\n{config}", setting)
    assert expected in problem


def test_a_layer_on_gpus_may_be_float16_without_a_backward_pass(tmp_path):
    job = "workload: layer\nworld: {device: cuda}\nshape: {dtype: float16}\n"
    assert load_job(str(write(tmp_path, job)), []).shape.dtype == "float16"
    (problem,) = problems(tmp_path, job, "layer.backward=true")
    assert "experts on GPUs are not float16 with a backward pass" in problem and "write bfloat16" in problem


def test_the_exchange_of_a_layer_may_have_a_limit_of_sms(tmp_path):
    assert load_job("layer_deepseek_v3", ["exchange.sms=48"]).exchange.sms == 48
    (problem,) = problems(tmp_path, "workload: layer\nworld: {device: cpu}\n", "exchange.sms=12")
    assert "CPU ranks have no SMs" in problem


CPU, CUDA = "world: {device: cpu}", "world: {device: cuda}"
SPANNING_CUDA = "world: {device: cuda, domain: 2}"
ON_A_DEVICE = [
    (CPU, "exchange.backend=fused", "fused is no backend of cpu ranks, auto chooses one that is"),
    (CPU, "exchange.backend=staged", "staged is no backend of cpu ranks"),
    (CPU, "exchange.backend=row_push", "row_push is no backend of cpu ranks"),
    (CPU, "exchange.backend=nccl_bare", "nccl_bare is no backend of cpu ranks"),
    (CPU, "exchange.sms=12", "CPU ranks have no SMs"),
    (CPU, "exchange.wire=float8_e4m3", "rows cannot cross as float8_e4m3 between CPU ranks"),
    (CPU, "steps.graph=true", "CUDA graphs need GPU ranks"),
    (CPU, "exchange.transport=copy_engine", "CPU ranks have no copy engine, write auto or leave it out"),
    (
        f"{CUDA}\nexchange: {{backend: fused}}",
        "exchange.transport=copy_engine",
        "backend fused has no choice of transport, backend staged takes copy_engine",
    ),
    (
        f"{CUDA}\nexchange: {{transport: copy_engine}}",
        "exchange.wire=float8_e4m3",
        "the copy engine cannot convert rows to float8_e4m3, leave wire or transport out",
    ),
    (CUDA, "exchange.backend=host", "host is no backend of cuda ranks, auto chooses one that is"),
    (
        f"{CUDA}\nexchange: {{wire: float8_e4m3}}",
        "exchange.backend=collective",
        "backend collective has no float8_e4m3",
    ),
    (f"{CUDA}\nexchange: {{wire: float8_e4m3}}", "exchange.backend=allgather", "backend allgather has no float8_e4m3"),
    (f"{CUDA}\nexchange: {{wire: float8_e4m3}}", "exchange.backend=nccl_bare", "backend nccl_bare has no float8_e4m3"),
    (
        f"{CUDA}\nsteps: {{graph: true}}",
        "exchange.backend=collective",
        "backend collective waits on the host, so no CUDA graph can capture it",
    ),
    (SPANNING_CUDA, "exchange.backend=collective", "collective does not cross 2 domains of GPU ranks, fused, staged,"),
    ("world: {device: cuda, ranks: 2, domain: 2}", "exchange.net.chunk=50", "these ranks have one, set world.domain,"),
    (CPU, "exchange.net.chunk=50", "rows between CPU ranks cross at once, write auto or leave it out"),
    ("world: {domain: 2}", "exchange.backend=row_push", "row_push does not cross 2 domains of GPU ranks"),
    (
        f"{SPANNING_CUDA}\nexchange: {{wire: float8_e4m3}}",
        "shape.hidden=1032",
        "rows of 1032 elements cannot cross 2 domains as float8_e4m3, leave wire out, or write hidden 1040",
    ),
]


@pytest.mark.parametrize(("text", "setting", "expected"), ON_A_DEVICE, ids=[setting for _, setting, _ in ON_A_DEVICE])
def test_settings_that_the_device_cannot_do_are_refused(tmp_path, text, setting, expected):
    (problem,) = problems(tmp_path, f"workload: exchange\n{text}\n", setting)
    assert problem.startswith("--set ") and expected in problem


def test_the_impossible_case_of_a_matrix_is_named(tmp_path):
    text = f"workload: exchange\n{CUDA}\nmatrix: {{exchange.backend: [fused, host]}}\n"
    (problem,) = problems(tmp_path, text)
    assert "host is no backend of cuda ranks (case backend=host)" in problem


@pytest.mark.parametrize(
    "settings",
    [
        ["world.device=cuda"],
        ["world.device=cuda", "exchange.backend=fused", "exchange.sms=24", "steps.graph=true"],
        ["world.device=cuda", "exchange.backend=fused", "exchange.wire=float8_e4m3", "exchange.output=dequantised"],
        ["world.device=cuda", "exchange.backend=row_push", "exchange.wire={dispatch: float8_e4m3}"],
        ["world.device=cuda", "world.share_gpu=true", "exchange.backend=staged"],
        ["world.device=cuda", "exchange.backend=collective", "steps.graph=auto"],
        ["world.device=cuda", "exchange.transport=copy_engine"],
        ["world.device=cuda", "exchange.wire={dispatch: float8_e4m3, combine: float32}"],
        ["world.device=cuda", "exchange.backend=staged", "matrix={exchange.transport: [auto, copy_engine]}"],
        ["exchange.backend=fused"],
        ["exchange.backend=host"],
        ["steps.graph=true"],
        ["world.ranks=8", "world.domain=2", "world.device=cpu"],
        ["world.ranks=8", "world.domain=2"],
        ["world.ranks=8", "world.domain=2", "exchange.backend=staged", "exchange.transport=copy_engine"],
        ["world.ranks=8", "world.domain=2", "world.device=cuda", "exchange.capacity=4096"],
        ["world.domain=2", "world.device=cuda", "world.share_gpu=true", "steps.graph=true"],
        ["world.ranks=8", "world.domain=8", "world.device=cuda"],
        ["world.domain=2", "world.device=cuda", "exchange.wire=float8_e4m3", "exchange.backend=staged"],
        ["world.device=cuda", "exchange.net.chunk=50"],
    ],
    ids=str,
)
def test_possible_exchange_settings_are_accepted(tmp_path, settings):
    load_job(write(tmp_path, "workload: exchange\n"), settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["workload=p2p", "world.ranks=3"],
        ["workload=p2p", "world.device=cuda", "p2p.sms=8", "p2p.transports=[copy_engine, tma]"],
        ["workload=p2p", "p2p.sms=8"],
        ["workload=p2p", "p2p.pairs=all"],
        ["workload=p2p", "p2p.pairs=[[0, 3]]", "matrix={p2p.pattern: [pairs, all_to_all]}"],
        ["world.ranks=1", "shape.tokens=1"],
        ["world.domain=auto", "workload=layer"],
        ["workload=layer", "world.domain=2", "world.device=cpu", "layer.backward=true"],
        ["workload=layer", "world.domain=2", "world.device=cuda", "layer.backward=true", "steps.graph=true"],
        ["workload=layer", "world.domain=2", "exchange.backend=staged"],
        ["shape.hidden=4", "shape.dtype=float32"],
        ["exchange.wire=bfloat16"],
        ["exchange.wire={dispatch: bfloat16, combine: bfloat16}"],
        ["exchange.wire={dispatch: bfloat16, combine: float32}"],
        ["exchange.wire.combine=float16"],
        ["exchange.capacity=2048"],
        ["workload=exchange", "exchange.slots=11", "world.ranks=3"],
        ["exchange.capacity=1.25"],
        ["exchange.capacity=1", "routing.masked=1"],
        ["exchange.capacity=1", "routing.ragged=true"],
        ["routing.kind=zipf", "routing.alpha=1e-1"],
        ["routing.kind=hot", "routing.share=1"],
        ["steps.graph=false"],
    ],
    ids=str,
)
def test_possible_combinations_are_accepted(tmp_path, settings):
    load_job(write(tmp_path, "workload: layer\n"), settings)


def test_a_trace_is_found_beside_its_config(tmp_path):
    config = write(tmp_path, "workload: layer\nrouting: {kind: trace, file: ids.npy}\n", "jobs/x.yaml")
    (tmp_path / "jobs/ids.npy").touch()
    assert load_job(config).routing.file == str(tmp_path / "jobs/ids.npy")


def test_a_missing_trace_file_is_refused(tmp_path):
    (problem,) = problems(tmp_path, "workload: layer\nrouting:\n  kind: trace\n  file: ids.npy\n")
    assert problem == "x.yaml: line 4, routing.file = ids.npy: no such file, looked for ids.npy"


def test_sections_of_other_workloads_are_checked_and_left_out(tmp_path):
    job = load_job(write(tmp_path, "workload: layer\np2p: {bytes: [4KiB]}\n"))
    assert "p2p" not in job.resolved()
    assert "p2p.bytes" in problems(tmp_path, "workload: layer\np2p: {bytes: [4Kb]}\n")[0]


def test_a_setting_may_make_a_key_of_the_file_meaningless(tmp_path):
    config = write(tmp_path, "workload: layer\nrouting: {kind: zipf, alpha: 2}\n")
    assert load_job(config, ["routing.kind=uniform"]).resolved()["routing"].get("alpha") is None
    assert load_job(config).routing.alpha == 2
