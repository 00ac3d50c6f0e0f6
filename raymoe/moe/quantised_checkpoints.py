"""Experts of 8-bit floats from the tensors of a checkpoint, as its files have them.

| from | below the prefix | dtype, sizes |
| --- | --- | --- |
| DeepSeek-V3 | `0.gate_proj.weight`, `0.gate_proj.weight_scale_inv`; up_proj, down_proj | e4m3 `[F, H]` |
| transformers | `gate_up_proj`, `gate_up_proj_scale_inv`; down_proj | e4m3 `[E, 2F, H]`, or MXFP4 `[E, 2F, H / 2]` |
| gpt-oss | `gate_up_proj_blocks`, `gate_up_proj_scales`; down_proj | MXFP4 `[E, 2F, H / 32, 16]` |
| DeepSeek-V4 | `0.w1.weight`, `0.w1.scale`; w3 (up), w2 (down) | e4m3 `[F, H]`, or MXFP4 `[F, H / 2]` |

e4m3 has a scale for each 128 x 128, and MXFP4 for 32 of a row. Scales are float32, or exponents of powers of two
(ue8m0): float8_e8m0fnu or bytes. One expert is read and re-encoded at a time, into tensors that hold those of the rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.fp8 import FP8_BLOCK
from raymoe.moe.checkpoint_files import CheckpointFiles
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation
from raymoe.moe.mxfp4 import MX_GROUP, reencode_mxfp4
from raymoe.moe.product_fp8_operators import Scaled
from raymoe.moe.quantised_experts import QuantisedExperts, ScaledWeights

_E4M3 = torch.float8_e4m3fn
_FOUR_BITS = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
"""Dtypes under which checkpoints have two elements of four bits in a byte."""
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def load_quantised_experts(
    tensors: Mapping[str, Tensor],
    prefix: str,
    *,
    experts: Sequence[int] | None = None,
    activation: Activation | None = None,
    device: torch.device | str | None = None,
) -> QuantisedExperts:
    """Take the experts whose tensors are below `prefix`, such as "model.layers.3.mlp.experts", from a checkpoint.

    `tensors` maps names to tensors: a `state_dict`, or `CheckpointFiles`, which reads what is taken. `experts` are the
    numbers of those that the rank holds, by default all. The activation is SwiGLU, and that of gpt-oss for its names,
    where gate and up take turns. F is padded to a multiple of 128, as by `quantise_experts`. MXFP4 is
    re-encoded without an error, or refused (`raymoe.moe.mxfp4`).

    >>> from raymoe.fp8 import quantise_weight
    >>> tensors = {}
    >>> for name, size in {"gate": (72, 16), "up": (72, 16), "down": (16, 72)}.items():
    ...     values, scales = quantise_weight(torch.ones(size))
    ...     tensors |= {f"0.{name}_proj.weight": values, f"0.{name}_proj.weight_scale_inv": scales}
    >>> loaded = load_quantised_experts(tensors, "")
    >>> list(loaded.gate_up_proj.shape), list(loaded.gate_up_proj_scale_inv.shape), list(loaded.down_proj.shape)
    ([1, 256, 16], [1, 2, 1], [1, 16, 128])
    """
    below = f"{prefix}." if prefix else ""
    source = _source_of(tensors, below, activation)
    numbers = range(source.count) if experts is None else experts
    wrong = [number for number in numbers if not 0 <= number < source.count]
    if wrong or not numbers:
        raise ConfigError(f"experts {list(numbers)} of {prefix!r} were asked for; it has 0 to {source.count - 1}")
    filled = _FilledWeights(len(numbers), source.interleaved, device)
    for place, number in enumerate(numbers):
        filled.put(place, source.gate_up(number), source.down(number))
    biases = source.biases(numbers)
    return QuantisedExperts(filled.weights(*biases), source.activation if activation is None else activation)


# The tensors of a checkpoint, by their names.


class _Source(Protocol):
    """The experts of a checkpoint."""

    @property
    def count(self) -> int: ...
    @property
    def activation(self) -> Activation:
        """The activation of models with such a checkpoint."""

    @property
    def interleaved(self) -> bool: ...

    def gate_up(self, number: int) -> list[Scaled]:
        """Return gate and up of an expert, or one pair in which they take turns."""

    def down(self, number: int) -> Scaled: ...
    def biases(self, numbers: Sequence[int]) -> tuple[Tensor | None, Tensor | None]: ...


_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_SCALES = ("weight_scale_inv", "scale")


def _source_of(tensors: Mapping[str, Tensor], below: str, activation: Activation | None) -> _Source:
    interleaved = None if activation is None else activation.interleaved
    if f"{below}gate_up_proj_blocks" in tensors:
        return _Fused(tensors, below, interleaved is not False, ("_blocks", "_scales"), GPT_OSS)
    if f"{below}gate_up_proj_scale_inv" in tensors:
        return _Fused(tensors, below, bool(interleaved))
    for names in _NAMES:
        for scale in _SCALES:
            if f"{below}0.{names[0]}.{scale}" in tensors:
                if interleaved:
                    raise ConfigError(f"{below}0.{names[0]} and {names[1]} are two tensors, and cannot take turns")
                return _Separate(tensors, below, names, scale)
    raise ConfigError(
        f"no tensor {below}0.gate_proj.weight_scale_inv, {below}0.w1.scale, {below}gate_up_proj_scale_inv or "
        f"{below}gate_up_proj_blocks; the prefix of the experts of a layer is needed, and weights of 8 or 4 bits: "
        "quantise_experts makes them from wider ones"
    )


@dataclass(frozen=True)
class _Separate:
    """Each weight of each expert has a tensor of its own."""

    tensors: Mapping[str, Tensor]
    below: str
    names: tuple[str, str, str]
    scale: str
    activation = SWIGLU
    interleaved = False

    @property
    def count(self) -> int:
        number = 0
        while f"{self.below}{number}.{self.names[0]}.weight" in self.tensors:
            number += 1
        return number

    def gate_up(self, number: int) -> list[Scaled]:
        gate, up = (self._pair(number, name) for name in self.names[:2])
        if gate[0].shape != up[0].shape:
            raise ConfigError(
                f"{self.below}{number}: {self.names[0]} is {list(gate[0].shape)} and {self.names[1]} "
                f"{list(up[0].shape)}; both need the same sizes"
            )
        return [gate, up]

    def down(self, number: int) -> Scaled:
        return self._pair(number, self.names[2])

    def biases(self, numbers: Sequence[int]) -> tuple[None, None]:
        biased = [f"{self.below}{number}.{name}.bias" for number in numbers for name in self.names]
        if present := [name for name in biased if name in self.tensors]:
            raise ConfigError(f"{present[0]} is a bias of one expert; biases are taken as {self.below}down_proj_bias")
        return None, None

    def _pair(self, number: int, name: str) -> Scaled:
        full = f"{self.below}{number}.{name}"
        weight, scales = _taken(self.tensors, f"{full}.weight"), _taken(self.tensors, f"{full}.{self.scale}")
        return _scaled(weight, scales, f"{full}.weight")


@dataclass(frozen=True)
class _Fused:
    """A tensor has a weight of all experts, gate and up together."""

    tensors: Mapping[str, Tensor]
    below: str
    interleaved: bool
    endings: tuple[str, str] = ("", "_scale_inv")
    """The ends of the names of weights and of scales."""
    activation: Activation = SWIGLU

    @property
    def count(self) -> int:
        name = self._names("gate_up_proj")[0]
        return self.tensors.length(name) if isinstance(self.tensors, CheckpointFiles) else len(self.tensors[name])

    def gate_up(self, number: int) -> list[Scaled]:
        name = self._names("gate_up_proj")[0]
        weight, scales = self._tensors("gate_up_proj", number)
        if self.interleaved:
            return [_scaled(weight, scales, name, number)]
        outputs = len(weight) // 2
        if weight.dtype in _FOUR_BITS:
            halves = zip(weight.chunk(2), scales.chunk(2), strict=True)
            return [
                _scaled(*half, f"{name} ({part})", number) for half, part in zip(halves, ("gate", "up"), strict=True)
            ]
        if outputs % FP8_BLOCK:
            raise ConfigError(
                f"{name} has gate and up of {outputs} rows each, and a scale for 128 rows of both; {outputs} must be a "
                "multiple of 128, or gate and up separate tensors"
            )
        values, numbers = _scaled(weight, scales, name, number)
        return list(zip(values.chunk(2), numbers.chunk(2), strict=True))

    def down(self, number: int) -> Scaled:
        return _scaled(*self._tensors("down_proj", number), self._names("down_proj")[0], number)

    def biases(self, numbers: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        names = (f"{self.below}{name}_bias" for name in ("gate_up_proj", "down_proj"))
        gate_up, down = (self.tensors[name][list(numbers)] if name in self.tensors else None for name in names)
        return gate_up, down

    def _names(self, name: str) -> tuple[str, str]:
        values, scales = (f"{self.below}{name}{ending}" for ending in self.endings)
        return values, scales

    def _tensors(self, name: str, number: int) -> tuple[Tensor, Tensor]:
        values, scales = (_taken(self.tensors, full, number) for full in self._names(name))
        return values, scales


def _taken(tensors: Mapping[str, Tensor], name: str, number: int | None = None) -> Tensor:
    """Return a tensor, or the part of an expert."""
    if name not in tensors:
        raise ConfigError(f"no tensor {name}, which belongs to the others of its expert")
    if number is None:
        return tensors[name]
    return tensors.part(name, number) if isinstance(tensors, CheckpointFiles) else tensors[name][number]


# Values and scales.


def _scaled(weight: Tensor, scales: Tensor, name: str, number: int | None = None) -> Scaled:
    """Return e4m3 values and float32 scales of a weight [N, K] of an expert."""
    shown = name if number is None else f"{name}, expert {number}"
    rows = len(weight)
    if weight.dtype in _FOUR_BITS:
        pairs, exponents = weight.view(torch.uint8).reshape(rows, -1), _exponent_bytes(scales)
        size = [rows, pairs.shape[1] * 2 // MX_GROUP]
        if exponents is None or list(scales.shape) != size or pairs.shape[1] % (MX_GROUP // 2):
            raise ConfigError(
                f"{shown} is {weight.dtype} {list(weight.shape)} with scales {scales.dtype} {list(scales.shape)}; "
                f"4-bit floats have a scale for each {MX_GROUP} columns, a power of two: {size} are needed"
            )
        return reencode_mxfp4(pairs, exponents, shown)
    if weight.dtype != _E4M3 or weight.dim() != 2:
        raise ConfigError(f"{shown} is {weight.dtype} {list(weight.shape)}; torch.float8_e4m3fn [N, K] is needed")
    size = [-(-length // FP8_BLOCK) for length in weight.shape]
    if list(scales.shape) != size:
        raise ConfigError(
            f"{shown} of {list(weight.shape)} has scales {list(scales.shape)}; {size} are needed, one for each "
            f"{FP8_BLOCK} rows and {FP8_BLOCK} columns"
        )
    numbers = scales_as_float32(scales)
    if not bool(numbers.isfinite().all()):
        raise ConfigError(f"{shown} has a scale that is no finite number; the checkpoint is damaged")
    return weight, numbers


def _exponent_bytes(scales: Tensor) -> Tensor | None:
    """Return the exponents plus 127 of scales that are powers of two, None of others."""
    if scales.dtype in _EXPONENTS:
        return scales.view(torch.uint8)
    exponents = scales.to(torch.float8_e8m0fnu)
    return exponents.view(torch.uint8) if torch.equal(exponents.float(), scales.float()) else None


def scales_as_float32(scales: Tensor) -> Tensor:
    """Return the scales of a checkpoint as float32. Bytes and float8_e8m0fnu are exponents plus 127 (ue8m0).

    >>> scales_as_float32(torch.tensor([126, 130], dtype=torch.uint8)).tolist()
    [0.5, 8.0]
    """
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(torch.float32)


class _FilledWeights:
    """The weights of a rank's experts, which are filled one expert after the other. The first one has the sizes."""

    def __init__(self, experts: int, interleaved: bool, device: torch.device | str | None) -> None:
        self.experts, self.interleaved, self.device = experts, interleaved, device
        self._tensors: list[Tensor] = []
        self._sizes: list[list[int]] = []
        self.padding = 0

    def put(self, place: int, gate_up: list[Scaled], down: Scaled) -> None:
        """Copy an expert's weights to its place."""
        sizes = [list(values.shape) for values, _ in (*gate_up, down)]
        if not self._tensors:
            self._allocate(gate_up, down)
            self._sizes = sizes
        if sizes != self._sizes:
            raise ConfigError(f"weights of an expert are {sizes}, and those of another one {self._sizes}")
        gate_up_values, gate_up_scales, down_values, down_scales = (tensor[place] for tensor in self._tensors)
        for part, (values, scales) in enumerate(gate_up):
            _copy(gate_up_values[part * len(gate_up_values) // 2 :], values)
            _copy(gate_up_scales[part * len(gate_up_scales) // 2 :], scales)
        _copy(down_values, down[0])
        _copy(down_scales, down[1])

    def weights(self, gate_up_bias: Tensor | None, down_bias: Tensor | None) -> ScaledWeights:
        """Return the weights with the biases, which are padded as they are."""
        device = self._tensors[0].device
        if gate_up_bias is not None:
            halves = (gate_up_bias,) if self.interleaved else gate_up_bias.chunk(2, dim=1)
            padding = 2 * self.padding if self.interleaved else self.padding
            gate_up_bias = torch.cat([torch.nn.functional.pad(half, (0, padding)) for half in halves], 1).to(device)
        down_bias = None if down_bias is None else down_bias.to(device)
        gate_up, gate_up_scales, down, down_scales = self._tensors
        return ScaledWeights(gate_up, gate_up_scales, down, down_scales, gate_up_bias, down_bias)

    def _allocate(self, gate_up: list[Scaled], down: Scaled) -> None:
        rows, columns = sum(len(values) for values, _ in gate_up), gate_up[0][0].shape[1]
        outputs, inner = down[0].shape
        if rows != 2 * inner or outputs != columns:
            raise ConfigError(
                f"gate and up have {rows} rows of {columns} and down {outputs} of {inner}; [2F, H] and [H, F] are "
                "needed"
            )
        self.padding = -inner % FP8_BLOCK
        device = gate_up[0][0].device if self.device is None else torch.device(self.device)
        for size in ((rows + 2 * self.padding, columns), (outputs, inner + self.padding)):
            blocks = [-(-length // FP8_BLOCK) for length in size]
            self._tensors.append(torch.zeros(self.experts, *size, dtype=torch.uint8, device=device).view(_E4M3))
            self._tensors.append(torch.ones(self.experts, *blocks, device=device))


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy to the target's first rows and columns."""
    target[: source.shape[0], : source.shape[1]].copy_(source)
