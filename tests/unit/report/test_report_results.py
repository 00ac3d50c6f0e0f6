"""Lines of results.jsonl and summary.json."""

import json
import math
import pickle

import pytest

from raymoe.report.results import KEYS, LATER_KEYS, Generation, Summary, complete, decode, encode, generations_of

CONTRACT = """
run generation case workload op backend transport wire graph pattern src dst bytes ranks domains chunks tokens rows
hidden ffn experts topk dtype routing seed layout alignment padding sms stages beside l2 leaves_out skipped stopped
samples runs us_p50 us_p99 us_min us_max us_by_rank us_over_steps host_us_p50 timeline
bytes_wire gbps_wire gbps_link bytes_net bytes_memory gbps_memory
bytes_weights tflops tokens_per_s bytes_peak bytes_kept expert_load_imbalance expert_load
rows_busiest rows_capacity losses starts verified max_error
device commit
"""


def test_keys_are_those_of_the_contract():
    assert list(KEYS) == CONTRACT.split()


def test_a_line_has_every_key_and_null_where_nothing_applies():
    line = complete({"case": "c", "op": "copy", "us_p50": 1.5}, run="r", generation=2, commit=None)
    assert list(line) == list(KEYS)
    assert (line["run"], line["generation"], line["us_p50"], line["hidden"], line["commit"]) == (
        "r",
        2,
        1.5,
        None,
        None,
    )
    assert decode(encode(line)) == line
    assert encode(line).count("\n") == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_line_that_json_cannot_hold_is_refused(value):
    with pytest.raises(ValueError, match=r"case 'c' has max_error"):
        complete({"case": "c", "max_error": value}, run="r", generation=0, commit=None)


def test_a_line_without_a_case_or_not_completed_is_refused():
    with pytest.raises(ValueError, match="names no case"):
        complete({"op": "copy"}, run="r", generation=0, commit=None)
    with pytest.raises(ValueError, match=r"keys of results\.jsonl"):
        encode({"case": "c"})


def test_a_line_of_an_earlier_version_is_read_with_nulls():
    line = complete({"case": "c", "op": "copy", "us_p50": 1.5}, run="r", generation=2, commit=None)
    earlier = {key: value for key, value in line.items() if key not in LATER_KEYS}
    assert decode(json.dumps(earlier)) == line
    with pytest.raises(ValueError, match=r"keys of results\.jsonl|not those of results\.jsonl"):
        decode(json.dumps({key: value for key, value in earlier.items() if key != "op"}))


@pytest.mark.parametrize("text", ["", "[1]", '{"case": "c"}', "{", '"x"'])
def test_a_foreign_line_is_refused(text):
    with pytest.raises(ValueError):
        decode(text)


@pytest.mark.parametrize(
    ("code", "status"), [(0, "done"), (1, "failed"), (6, "failed"), (130, "stopped"), (143, "stopped"), (137, "failed")]
)
def test_status_follows_the_exit_code(code, status):
    assert Summary.of(code, "", [], []).status == status


def test_summary_has_the_shape_of_the_contract():
    generation = Generation(1.25, "rank 2 died", 2)
    summary = Summary.of(4, "rank 2 died twice", ["a", "b"], {"a"}, [generation, Generation(number=1, began="restart")])
    assert json.loads(json.dumps(summary.as_dict())) == {
        "status": "failed",
        "exit_code": 4,
        "message": "rank 2 died twice",
        "cases": {"a": "done", "b": "not done"},
        "generations": [
            {"ready_s": 1.25, "cause": "rank 2 died", "culprit": 2, "number": 0, "began": "start"},
            {"ready_s": None, "cause": None, "culprit": None, "number": 1, "began": "restart"},
        ],
    }
    assert generations_of(summary.as_dict()) == summary.generations
    assert pickle.loads(pickle.dumps(summary)) == summary
