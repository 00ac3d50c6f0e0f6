"""The message and the location of every kind of problem in a config."""

import pytest

from raymoe.config import load_job
from tests.unit.config.configs_on_disk import problems, refused, write

LINES = [
    ("shape: {hiden: 8}", "shape.hiden = 8: unknown key, did you mean 'hidden'?"),
    ("tokens: 8", "tokens = 8: unknown key, write tokens below shape"),
    ("shape.tokens: 8", "shape.tokens = 8: unknown key, write tokens below shape"),
    ("world: {zzz: 8}", "world.zzz = 8: unknown key, valid here: ranks, domain, device"),
    ("world: {ranks: 2, ranks: 4}", "world.ranks = 4: duplicate key, it was first given in line 2"),
    ("1: 2", "the key 1 is not text"),
    ("? [a]\n: 2", "the key [a] is not text"),
    ('world: {ranks: "2"}', 'world.ranks = "2": a whole number is wanted, remove the quotes'),
    ("world: {ranks: 2.0}", "world.ranks = 2.0: a whole number is wanted, write 2"),
    ("world: {ranks: 2.5}", "world.ranks = 2.5: a whole number is wanted, found a number"),
    ("world: {ranks: true}", "world.ranks = true: a whole number is wanted, found true or false"),
    ("world: {ranks: 010}", "world.ranks = 010: a whole number is wanted, write 10, or 8 if octal was meant"),
    ("world: {ranks: 1:30}", "world.ranks = 1:30: a whole number is wanted, write 90 if minutes were meant"),
    ("world: {ranks: 0}", "world.ranks = 0: 0 is below the least value 1"),
    ("world: {ranks: 9999999999}", "world.ranks = 9999999999: 9999999999 is above the greatest value 1024"),
    ("world: {wait_timeout_s: 0}", "world.wait_timeout_s = 0: 0 is not above 0"),
    ("world: {wait_timeout_s: .nan}", "world.wait_timeout_s = .nan: not a finite number"),
    ("world: {cpus: 1e999}", "world.cpus = 1e999: not a finite number"),
    ("world: 4", "world = 4: a mapping is wanted, found a number"),
    ("world:", "world: a mapping is wanted, found nothing"),
    ("world: {device: gpu}", "world.device = gpu: not one of auto, cuda, cpu"),
    ("steps: {verify: yes}", "steps.verify = yes: true or false is wanted, write true"),
    ("steps: {verify: n}", "steps.verify = n: true or false is wanted, write false"),
    ("steps: {verify: 1}", "steps.verify = 1: true or false is wanted, found a number"),
    ("steps: {graph: true}", "CUDA graphs need GPU ranks and these are CPU ranks, write auto or false"),
    (
        "layer: {recompute: most}",
        "layer.recompute = most: not one of nothing, activation, all, true or false",
    ),
    ("steps: {graph: 0}", "steps.graph = 0: not one of auto, true or false"),
    ("steps: {graph: off}", "steps.graph = off: not one of auto, true or false, write false"),
    ("name: 12", "name = 12: text is wanted, put it in quotes"),
    ("name: a/b", "name = a/b: not a name"),
    (
        "exchange: {backend: nccl}",
        "exchange.backend = nccl: not one of auto, fused, staged, collective, allgather, host",
    ),
    ("exchange: {backend: colective}", "did you mean 'collective'?"),
    ("exchange: {backend: nccl}", "did you mean 'collective'?"),
    ("world: {device: gpu}", "did you mean 'cuda'?"),
    ("exchange: {wire: fp8}", "did you mean 'float8_e4m3'?"),
    ("exchange: {sms: 0}", "exchange.sms = 0: must be auto, or a number from 1 to 1024"),
    ("exchange: {sms: many}", "exchange.sms = many: must be auto, or a number from 1 to 1024"),
    ("exchange: {output: scaled}", "exchange.output = scaled: not one of raw, dequantised"),
    ("exchange: {capacity: 0.0}", "exchange.capacity = 0.0: must be worst, or a number of rows"),
    ("exchange: {capacity: 70000.5}", "or a factor such as 1.25"),
    ("exchange: {capacity: true}", "exchange.capacity = true: must be worst, or a number of rows"),
    ("exchange: {wire: fp8}", "exchange.wire = fp8: not one of bfloat16, float16, float32, float8_e4m3"),
    ("exchange: {wire: {combine: float8_e4m3}}", "float8_e4m3: not one of bfloat16, float16, float32"),
    ("exchange: {wire: {combine: bf16}}", "exchange.wire.combine = bf16: not one of"),
    (
        "p2p: {transports: [TMA]}",
        "p2p.transports.0 = TMA: not one of auto, copy_engine, tma, collective, host, did you",
    ),
    ("p2p: {sms: 0}", "p2p.sms = 0: must be auto, or a number from 1 to 1024"),
    ("p2p: {pairs: [[0, 1], [0, 1]]}", "must be all, or different pairs of two ranks such as [[0, 1], [1, 0]]"),
    ("p2p: {pairs: [[1, 1]]}", "must be all, or different pairs of two ranks"),
    ("p2p: {pairs: []}", "p2p.pairs = []: must be all, or different pairs of two ranks"),
    ("p2p: {pairs: [0, 1]}", "must be all, or different pairs of two ranks"),
    ("p2p: {pairs: some}", "p2p.pairs = some: must be all, or different pairs of two ranks"),
    ("p2p: {pairs: [[0, {}]]}", "must be all, or different pairs of two ranks"),
    ("p2p: {bytes: []}", "p2p.bytes = []: the list is empty, give one value or more"),
    ("p2p: {bytes: 4KiB}", "p2p.bytes = 4KiB: a list is wanted, found text"),
    ("p2p: {bytes: [1, 4kib]}", "p2p.bytes.1 = 4kib: has the unknown unit 'kib', did you mean 4KiB?"),
    ("p2p: {bytes: [0]}", "p2p.bytes.0 = 0: 0 is below the least value 1"),
    ("name: !!python/name:os.system x", "the tag !!python/name:os.system is not allowed"),
    ("shape: !mine {tokens: 4}", "the tag !mine is not allowed"),
    ("world: {<<: 3}", "only a mapping, or a list of them, can be merged in"),
]


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_a_problem_is_reported_with_its_line_key_and_value(tmp_path, line, expected):
    reported = problems(tmp_path, f"workload: layer\n{line}\n")
    assert len(reported) == 1
    assert reported[0].startswith("x.yaml: line 2")
    assert expected in reported[0]


@pytest.mark.parametrize("workload", ["finetune", "laye", "1"])
def test_an_unknown_workload_is_reported_with_the_known_ones(tmp_path, workload):
    (reported,) = problems(tmp_path, f"workload: {workload}\n")
    assert "not one of p2p, exchange, overlap, pointwise, products, layer" in reported


def test_a_missing_workload_is_reported(tmp_path):
    assert problems(tmp_path, "name: x\n") == [
        "x.yaml: workload: required, one of p2p, exchange, overlap, pointwise, products or layer"
    ]


def test_all_problems_are_reported_together_in_file_order(tmp_path):
    text = """\
        workload: layr
        shape:
          hiden: 1024
          topk: 50
        steps: {verify: on,
          cuont: 3}
        shape: {}
        routing: {alpha: 2}
        world: {ranks: 5}
        """
    error = refused(write(tmp_path, text))
    assert [(problem.line, problem.key) for problem in error.problems] == [
        (1, "workload"),
        (3, "shape.hiden"),
        (4, "shape.topk"),
        (5, "steps.verify"),
        (6, "steps.cuont"),
        (7, "shape"),
        (8, "routing.alpha"),
        (9, "world.ranks"),
    ]
    assert str(error).endswith("x.yaml has 8 problems; the first is line 1, workload = layr: not one of "
                               "p2p, exchange, overlap, pointwise, products, layer, train, "
                               "did you mean 'layer'?")  # fmt: skip


def test_a_key_with_a_problem_is_not_checked_against_other_keys(tmp_path):
    """The default of 32 experts does not divide among 3 ranks, but the user did not write it."""
    (reported,) = problems(tmp_path, "workload: layer\nworld: {ranks: 3}\nshape: {experts: x}\n")
    assert "shape.experts" in reported
    (reported,) = problems(tmp_path, "workload: layer\nworld: {ranks: 3}\nshape: 8\n")
    assert "shape = 8: a mapping is wanted" in reported


@pytest.mark.parametrize("line", ["routing: zipf", "layer: {router: softmax}", "steps: 3", "steps: null"])
def test_a_value_in_place_of_a_section_is_one_problem(tmp_path, line):
    (reported,) = problems(tmp_path, f"workload: exchange\n{line}\n")
    assert "a mapping is wanted" in reported


def test_quoted_values_are_cut_and_made_printable(tmp_path):
    (reported,) = problems(tmp_path, 'workload: "a\\nb\\e[31m' + "x" * 500 + '"\n')
    assert "\\n" in reported and "\x1b" not in reported and len(reported) < 300


def test_numbers_of_any_length_are_reported_without_a_crash(tmp_path):
    for digits in ("9" * 5000, "0" * 5000, "1:" * 900 + "1", "1." + "9" * 5000, "0x" + "f" * 5000, "1e" + "9" * 400):
        assert "world.ranks" in problems(tmp_path, f"workload: layer\nworld: {{ranks: {digits}}}\n")[0]


def test_scientific_notation_is_read_as_a_number(tmp_path):
    job = load_job(write(tmp_path, "workload: layer\nworld: {cpus: 1e-3, wait_timeout_s: 2E1}\n"))
    assert (job.world.cpus, job.world.wait_timeout_s) == (0.001, 20.0)
