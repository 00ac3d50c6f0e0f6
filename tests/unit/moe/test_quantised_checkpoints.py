"""Experts of 8-bit floats from the tensors of checkpoints: DeepSeek-V3's, transformers' and gpt-oss's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raymoe.errors import ConfigError
from raymoe.fp8 import dequantise_weight
from raymoe.moe import CheckpointFiles, QuantisedExperts, load_quantised_experts, quantise_experts
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation
from tests.unit.moe.checkpoint_cases import (
    COUNTS,
    HIDDEN,
    PREFIX,
    Tensors,
    by_definition,
    fused,
    model,
    mxfp4,
    separate,
)
from tests.unit.moe.grouped_cases import Exact, RowsCase, near

E8M0 = torch.float8_e8m0fnu


def same(one: QuantisedExperts, other: QuantisedExperts) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys() and one.activation == other.activation
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor.double(), theirs[name].double()), name


def wide(experts: QuantisedExperts, name: str) -> Tensor:
    return dequantise_weight(getattr(experts, name).detach(), getattr(experts, f"{name}_scale_inv").detach())


# 8 bits. Weights that were quantised one by one are those of quantise_experts, padding included.


@pytest.mark.parametrize("inner", [256, 128, 72])
def test_weights_of_single_experts(inner: int) -> None:
    experts = model(inner)
    same(load_quantised_experts(separate(experts), PREFIX), quantise_experts(experts))


@pytest.mark.parametrize("inner", [128, 72])
@pytest.mark.parametrize("dtype", [E8M0, torch.uint8], ids=str)
def test_scales_that_are_exponents(dtype: torch.dtype, inner: int) -> None:
    experts = model(inner)
    tensors = {
        name: tensor.to(E8M0).view(dtype) if name.endswith("scale_inv") else tensor
        for name, tensor in separate(experts, power_of_two=True).items()
    }
    same(load_quantised_experts(tensors, PREFIX), quantise_experts(experts, power_of_two=True))


@pytest.mark.parametrize(
    ("inner", "activation"), [(256, SWIGLU), (128, SWIGLU), (128, GPT_OSS), (72, GPT_OSS)], ids=str
)
def test_weights_of_all_experts_together(inner: int, activation: Activation) -> None:
    experts = model(inner, activation)
    same(load_quantised_experts(fused(experts), PREFIX, activation=activation), quantise_experts(experts))


def test_a_rank_takes_its_experts() -> None:
    for tensors in (separate(model(72)), fused(model(128, GPT_OSS)), mxfp4(64)):
        full = load_quantised_experts(tensors, PREFIX)
        part = load_quantised_experts(tensors, PREFIX, experts=[3, 1])
        for name, tensor in part.state_dict().items():
            assert torch.equal(tensor.float(), full.state_dict()[name].float()[[3, 1]]), name


def test_experts_of_a_checkpoint_compute_what_its_weights_say() -> None:
    tensors, case = separate(model(72)), RowsCase(COUNTS)
    exact = {
        name: torch.stack(
            [
                dequantise_weight(tensors[full], tensors[f"{full}_scale_inv"])
                for full in (f"{PREFIX}.{number}.{name}.weight" for number in range(len(COUNTS)))
            ]
        )
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    x, groups, own = case.rows(HIDDEN, 5), case.groups, case.own()
    y = load_quantised_experts(tensors, PREFIX)(x, groups.offsets, groups.counts)
    h = Exact(groups).gated(x, torch.cat((exact["gate_proj"], exact["up_proj"]), 1), SWIGLU.form)
    want = Exact(groups).linear(h, exact["down_proj"])
    near(y[own], want[own], 6e-2)  # the rows are quantised twice
    swapped = Exact(groups).gated(x, torch.cat((exact["up_proj"], exact["gate_proj"]), 1), SWIGLU.form)
    with pytest.raises(AssertionError):
        near(y[own], Exact(groups).linear(swapped, exact["down_proj"])[own], 6e-2)


@pytest.mark.thorough
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_weights_that_transformers_quantised(scale_fmt: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize  # takes seconds

    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=scale_fmt)
    quantiser = SimpleNamespace(quantization_config=config)
    case, tensors = RowsCase(COUNTS), {}
    weights = {"gate_up_proj": case.drawn(4, 256, 384, seed=1), "down_proj": case.drawn(4, 384, 128, seed=2)}
    for name, weight in weights.items():
        tensors |= Fp8Quantize(quantiser).convert({f"{PREFIX}.{name}": weight})
    scales = tensors[f"{PREFIX}.down_proj_scale_inv"]
    assert scales.shape == (4, 3, 1) and scales.dtype == (E8M0 if scale_fmt == "ue8m0" else torch.float32)
    loaded = load_quantised_experts(tensors, PREFIX)
    for name, weight in weights.items():
        values = (tensors[f"{PREFIX}.{name}"], tensors[f"{PREFIX}.{name}_scale_inv"])
        theirs = Fp8Dequantize(quantiser)._dequantize_one(*values, torch.float32)
        assert torch.equal(wide(loaded, name), theirs)
        near(theirs, weight, 4e-2)


# Files.


def write(folder: Path, tensors: Tensors) -> None:
    """Write two files and an index, as large checkpoints have them."""
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name].contiguous() for name in places if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


class RecordedFiles(CheckpointFiles):
    """Notes what is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return super().__getitem__(name)

    def part(self, name: str, number: int) -> Tensor:
        self.read.append(f"{name}[{number}]")
        return super().part(name, number)


def test_files_are_read_where_they_are_needed(tmp_path: Path) -> None:
    single, together = separate(model(72)), mxfp4(64)
    write(tmp_path, single)
    files = RecordedFiles(tmp_path)
    assert files.read == [] and len(files) == len(single) and set(files) == set(single)
    same(load_quantised_experts(files, PREFIX, experts=[2]), load_quantised_experts(single, PREFIX, experts=[2]))
    assert set(files.read) == {name for name in single if ".2." in name}
    save_file(together, tmp_path / "alone.safetensors")
    files = RecordedFiles(tmp_path / "alone.safetensors")
    same(load_quantised_experts(files, PREFIX, experts=[3]), load_quantised_experts(together, PREFIX, experts=[3]))
    parts = {f"{PREFIX}.{name}[3]" for name in ("gate_up_proj_blocks", "gate_up_proj_scales")}
    assert parts < set(files.read) and not [name for name in files.read if "[" not in name and "bias" not in name]


def test_exponents_and_a_folder_without_an_index(tmp_path: Path) -> None:
    tensors = separate(model(72), power_of_two=True)
    stored = {name: each.to(E8M0) if name.endswith("scale_inv") else each for name, each in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    same(load_quantised_experts(CheckpointFiles(tmp_path), PREFIX), load_quantised_experts(tensors, PREFIX))


def test_bad_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "no.safetensors"):
        with pytest.raises(ConfigError, match="is neither a safetensors file nor a folder with one"):
            CheckpointFiles(path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ConfigError, match=r"names \.\./a\.safetensors; an index names files of its own folder"):
        CheckpointFiles(tmp_path)
    write(tmp_path, separate(model(72)))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match="needs the package safetensors: pip install safetensors"):
        load_quantised_experts(CheckpointFiles(tmp_path), PREFIX)


# 4 bits.


def four_bits(tensors: Tensors, name: str) -> Tensor:
    """Return a weight [E, N, K]."""
    blocks, scales = tensors[f"{PREFIX}.{name}_blocks"], tensors[f"{PREFIX}.{name}_scales"]
    return by_definition(blocks.flatten(2), scales)


@pytest.mark.thorough
def test_transformers_reads_the_same_numbers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes seconds

    tensors = mxfp4(96)
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = tensors[f"{PREFIX}.{name}_blocks"], tensors[f"{PREFIX}.{name}_scales"]
        theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
        assert torch.equal(theirs.double(), four_bits(tensors, name)), "all are exact in bfloat16"


@pytest.mark.parametrize("inner", [128, 96])
def test_four_bits_keep_their_numbers(inner: int) -> None:
    tensors = mxfp4(inner)
    loaded = load_quantised_experts(tensors, PREFIX)
    gate_up, down = wide(loaded, "gate_up_proj"), wide(loaded, "down_proj")
    assert loaded.activation == GPT_OSS and gate_up.shape == (len(COUNTS), 256, HIDDEN) and down.shape[2] == 128
    assert torch.equal(gate_up[:, : 2 * inner].double(), four_bits(tensors, "gate_up_proj"))
    assert torch.equal(down[:, :, :inner].double(), four_bits(tensors, "down_proj"))
    assert not gate_up[:, 2 * inner :].any() and not down[:, :, inner:].any()
    assert loaded.gate_up_proj_bias is not None and not loaded.gate_up_proj_bias[:, 2 * inner :].any()


def test_four_bits_are_the_numbers_of_the_experts() -> None:
    tensors, case = mxfp4(96), RowsCase(COUNTS)
    x, groups, own = case.rows(HIDDEN, 5), case.groups, case.own()
    y = load_quantised_experts(tensors, PREFIX)(x, groups.offsets, groups.counts)
    gate_up, down = four_bits(tensors, "gate_up_proj"), four_bits(tensors, "down_proj")
    h = Exact(groups).gated(x, gate_up, GPT_OSS.form, tensors[f"{PREFIX}.gate_up_proj_bias"])
    near(y[own], Exact(groups).linear(h, down, tensors[f"{PREFIX}.down_proj_bias"])[own], 6e-2)


def test_four_bits_with_gate_before_up() -> None:
    tensors = mxfp4(96)
    loaded = load_quantised_experts(tensors, PREFIX, activation=SWIGLU)
    gate_up, want = wide(loaded, "gate_up_proj"), four_bits(tensors, "gate_up_proj")
    bias, want_bias = loaded.gate_up_proj_bias, tensors[f"{PREFIX}.gate_up_proj_bias"]
    assert bias is not None
    for part, place in enumerate((slice(0, 96), slice(128, 224))):
        assert torch.equal(gate_up[:, place].double(), want[:, part * 96 : part * 96 + 96])
        assert torch.equal(bias[:, place], want_bias[:, part * 96 : part * 96 + 96])
    assert not gate_up[:, 96:128].any() and not gate_up[:, 224:].any()


def packed(tensors: Tensors, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Return weights [E, N, K / 2] of a dtype with their scales."""
    return {
        name: (
            tensors[f"{PREFIX}.{name}_blocks"].flatten(2).view(dtype),
            tensors[f"{PREFIX}.{name}_scales"].view(E8M0),
        )
        for name in ("gate_up_proj", "down_proj")
    }


def check_same_numbers(single: Tensors, tensors: Tensors) -> None:
    loaded, other = (load_quantised_experts(each, PREFIX, activation=SWIGLU) for each in (single, tensors))
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(wide(loaded, name), wide(other, name))
    assert load_quantised_experts(single, PREFIX).activation == SWIGLU


@pytest.mark.parametrize("dtype", [torch.int8, torch.float4_e2m1fn_x2], ids=str)
def test_four_bits_of_single_experts(dtype: torch.dtype) -> None:
    tensors, single = mxfp4(96), {}
    weights = packed(tensors, torch.uint8)
    for number in range(len(COUNTS)):
        (gate_up, gate_up_scales), (down, down_scales) = (
            (values[number], scales[number]) for values, scales in weights.values()
        )
        for name, weight, scales in zip(
            ("w1", "w3", "w2"), (*gate_up.chunk(2), down), (*gate_up_scales.chunk(2), down_scales), strict=True
        ):
            single[f"{PREFIX}.{number}.{name}.weight"] = weight.contiguous().view(dtype)
            single[f"{PREFIX}.{number}.{name}.scale"] = scales
    check_same_numbers(single, tensors)


@pytest.mark.parametrize("scales", [E8M0, torch.float32], ids=str)
def test_four_bits_under_the_names_of_eight(scales: torch.dtype) -> None:
    tensors, together = mxfp4(96), {}
    for name, (weight, exponents) in packed(tensors, torch.int8).items():
        together |= {f"{PREFIX}.{name}": weight, f"{PREFIX}.{name}_scale_inv": exponents.to(scales)}
    check_same_numbers(together, tensors)


class LargeResults(TorchDispatchMode):
    """Notes the results of operations with more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.large = limit, set[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() * result.element_size() > self.limit:
            self.large.add((result.element_size(), *result.shape))
        return result


def test_one_expert_at_a_time_is_wide() -> None:
    tensors = mxfp4(128, experts=24)
    with LargeResults(4 * 256 * HIDDEN) as results:
        load_quantised_experts(tensors, PREFIX)
    assert results.large == {(1, 24, 256, HIDDEN), (1, 24, HIDDEN, 128)}, "the results alone, of bytes"


# Refusals.


def changed(tensors: Tensors, **changes: Any) -> Tensors:
    """Replace tensors; names are those after the prefix, with `__` for a dot. None leaves one out."""
    given = {f"{PREFIX}.{name.removeprefix('of_').replace('__', '.')}": tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in (tensors | given).items() if tensor is not None}


def damaged() -> Tensors:
    tensors = mxfp4(64)
    blocks, scales = (tensors[f"{PREFIX}.gate_up_proj_{name}"] for name in ("blocks", "scales"))
    blocks[2, 7, 4, 3], scales[2, 7, 4] = 7, 60
    return tensors


def nan_scales() -> Tensors:
    tensors = separate(model(72), power_of_two=True)
    name = f"{PREFIX}.1.up_proj.weight_scale_inv"
    return tensors | {name: torch.full((1, 2), 255, dtype=torch.uint8)}


E4M3 = torch.float8_e4m3fn
REFUSALS: dict[str, tuple[Any, str]] = {
    "no experts": (lambda: {"a": torch.ones(1)}, r"no tensor model\.layers\.3\.mlp\.experts\.0\.gate_proj\.weight_sc"),
    "bits too far apart": (
        damaged,
        r"experts\.gate_up_proj_blocks, expert 2, the block from row 0 and column 128 on: its elements have bits",
    ),
    "no scale": (
        lambda: changed(separate(model(72)), of_2__down_proj__weight_scale_inv=None),
        r"no tensor model\.layers\.3\.mlp\.experts\.2\.down_proj\.weight_scale_inv",
    ),
    "wide weights": (
        lambda: changed(separate(model(72)), of_0__up_proj__weight=torch.ones(72, HIDDEN)),
        r"0\.up_proj\.weight is torch\.float32 \[72, 160\]; torch\.float8_e4m3fn",
    ),
    "other scales": (
        lambda: changed(separate(model(72)), of_0__up_proj__weight_scale_inv=torch.ones(72, 1)),
        r"0\.up_proj\.weight of \[72, 160\] has scales \[72, 1\]; \[1, 2\] are needed",
    ),
    "scales of nan": (nan_scales, r"1\.up_proj\.weight has a scale that is no finite number"),
    "gate and up differ": (
        lambda: changed(separate(model(72)), of_0__up_proj__weight=torch.ones(64, HIDDEN).to(E4M3)),
        r"experts\.0: gate_proj is \[72, 160\] and up_proj \[64, 160\]",
    ),
    "down differs": (
        lambda: changed(separate(model(72)), of_0__down_proj__weight=torch.ones(HIDDEN, 80).to(E4M3)),
        r"gate and up have 144 rows of 160 and down 160 of 80",
    ),
    "an expert differs": (
        lambda: (
            separate(model(72)) | {name: each for name, each in separate(model(80)).items() if f"{PREFIX}.3." in name}
        ),
        r"weights of an expert are \[\[80, 160\], \[80, 160\], \[160, 80\]\], and those of another one \[\[72",
    ),
    "a bias of one expert": (
        lambda: changed(separate(model(72)), of_1__down_proj__bias=torch.ones(HIDDEN)),
        r"1\.down_proj\.bias is a bias of one expert",
    ),
    "blocks of gate and up": (lambda: fused(model(72)), r"gate and up of 72 rows each, and a scale for 128 rows of"),
    "scales of four bits": (
        lambda: changed(mxfp4(64), down_proj_scales=torch.full((4, HIDDEN, 2), 0.3)),
        r"down_proj_blocks, expert 0 is torch\.uint8 \[160, 2, 16\] with scales torch\.float32 \[160, 2\]; 4-bit flo",
    ),
    "other scales of four bits": (
        lambda: changed(mxfp4(64), gate_up_proj_scales=torch.ones(4, 128, 4)),
        r"gate_up_proj_blocks, expert 0 is .* a power of two: \[128, 5\] are needed",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_one_sentence(case: str) -> None:
    tensors, message = REFUSALS[case]
    with pytest.raises(ConfigError, match=message) as caught:
        load_quantised_experts(tensors(), PREFIX)
    assert "\n" not in str(caught.value) and not str(caught.value).endswith(".")


def test_experts_that_are_not_there_are_refused() -> None:
    tensors = separate(model(72))
    for numbers in ([4], [-1], []):
        with pytest.raises(ConfigError, match=r"of 'model\.layers\.3\.mlp\.experts' were asked for; it has 0 to 3"):
            load_quantised_experts(tensors, PREFIX, experts=numbers)
    with pytest.raises(ConfigError, match="are two tensors, and cannot take turns"):
        load_quantised_experts(tensors, PREFIX, activation=GPT_OSS)


def test_experts_of_a_checkpoint_go_to_a_device() -> None:
    loaded = load_quantised_experts(mxfp4(64), PREFIX, device="meta")
    assert {parameter.device.type for parameter in loaded.parameters()} == {"meta"}
