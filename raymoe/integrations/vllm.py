"""Run the expert parallelism of vLLM on raymoe: a plugin, and no change to vLLM.

    vllm serve MODEL --data-parallel-size 8 --enable-expert-parallel --additional-config '{"raymoe": {}}'

vLLM loads the entry point `raymoe` of the group `vllm.general_plugins` in each of its processes. An engine whose
additional config has the key `raymoe` takes it; `Options` has the options. Other engines stay as they are. Router,
attention and weights are vLLM's, and so are the experts, unless `"experts": "raymoe"` asks for raymoe's products. vLLM
takes raymoe for its `allgather_reducescatter`, the default backend.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.platforms import current_platform

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8, FP8_BLOCK
from raymoe.integrations.vllm_rows import ExpertRowsOfLayer, ExpertWeights, FailureWatch, Options
from raymoe.memory.world import World

_logger = init_logger("vllm.raymoe")
ALIGNMENT = 16
"""Products take rows of an expert from multiples of this on."""


def make_rows(moe: Any, options: Options, *, raw: bool, alignment: int, exact: bool) -> ExpertRowsOfLayer:
    """Make what brings the rows of one layer; `raw` rows come as fp8 with scales."""
    on_gpu = current_platform.is_cuda()
    device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
    world = World.of(get_ep_group().cpu_group, device=device, timeout_s=options.timeout_s, shared=True)
    spec = ExchangeSpec(
        moe.max_num_tokens,
        moe.hidden_dim,
        moe.num_experts,
        moe.experts_per_token,
        dtype=str(moe.in_dtype).removeprefix("torch."),
        wire=FP8 if raw else None,
        output="raw" if raw else "dequantised",
        layout=options.layout,
        alignment=alignment,
        depth=0,
    )
    # Experts on CPUs take ids of this rank's experts, those on GPUs ids of all experts.
    first_id = world.rank * spec.local_experts(world.size) if on_gpu else 0
    rows = ExpertRowsOfLayer(world, spec, options, exact=exact, first_id=first_id)
    if on_gpu:
        world.shared(FailureWatch).add(rows.largest)
    _logger.info_once(
        "raymoe (%s) moves the rows of %d experts between %d ranks; this is rank %d",
        rows.largest.backend,
        moe.num_experts,
        world.size,
        world.rank,
    )
    return rows


class RaymoePrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """The steps before and after the experts of one layer: a dispatch and a combine."""

    activation_format = mk.FusedMoEActivationFormat.Standard

    def __init__(self, moe: Any, rows: ExpertRowsOfLayer) -> None:
        super().__init__()
        self.moe, self.rows = moe, rows

    def topk_indices_dtype(self) -> torch.dtype:
        """Return the dtype of the ids that the router gives."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> None:
        """Return no limit: that is for rows in batches of an expert each."""
        return

    def num_dispatchers(self) -> int:
        """Return the number of ranks."""
        return self.rows.world.size

    def output_is_reduced(self) -> bool:
        """Return that no rank has to add the results of others."""
        return True

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *others: Any,
        defer_input_quant: bool = False,  # noqa: ARG002
    ) -> tuple[Any, ...]:
        """Send the tokens, and return the rows for this rank's experts. `others` are the last arguments of vLLM's."""
        _, _, apply_router_weight_on_input, quant_config = others
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights.to(a1.dtype)
        return self.rows_of(a1, topk_weights, topk_ids, quant_config)

    def rows_of(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, quant_config: Any) -> tuple[Any, ...]:
        """Return what `prepare` returns: rows, their scales, counts by expert, and ids and weights of the rows."""
        raise NotImplementedError

    def most_tokens(self, here: int) -> int:
        """Return the most tokens of any rank in this step, which all ranks know; this one has `here`."""
        ranks, parts = get_forward_context().dp_metadata, self.moe.moe_parallel_config.sp_size
        return here if ranks is None else -(-int(ranks.num_tokens_across_dp_cpu.max()) // parts)


class AroundItsExperts(RaymoePrepareAndFinalize):
    """The steps around the experts that vLLM chose."""

    def __init__(self, moe: Any, options: Options, experts: Any, eager: bool) -> None:
        self.quantises = not experts.expects_unquantized_inputs and experts.quant_config.quant_dtype is not None
        exact = eager or not current_platform.is_cuda()
        super().__init__(moe, make_rows(moe, options, raw=self.quantises, alignment=1, exact=exact))

    def rows_of(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, quant_config: Any) -> tuple[Any, ...]:
        """Bring the rows that came, numbered for experts that take any order."""
        most, scales = self.most_tokens(len(x)), None
        if self.quantises:  # with vLLM's own rounding, so that the experts see the same values as without raymoe
            quantised = quant_config.quant_dtype, False, quant_config.block_shape
            x, scales = moe_kernel_quantize_input(x, quant_config.a1_scale, *quantised)
        brought = self.rows.bring(x, ids, weights, most, scales)
        ids = brought.ids if current_platform.is_cuda() else brought.ids.clamp(min=0)  # the weight of no expert is 0
        counts = mk.ExpertTokensMetadata(expert_num_tokens=brought.counts, expert_num_tokens_cpu=None)
        return brought.x, brought.scales, counts, ids, brought.weights

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Write the sums of the results to `output`. `topk_weights` and `topk_ids` are those of the rows."""
        rows, reduce, weighted = fused_expert_output, weight_and_reduce_impl, False
        if not isinstance(reduce, TopKWeightAndReduceNoOP):  # the experts have left weights and sums out
            if self.rows.spec.layout == "expert":
                weighted = not apply_router_weight_on_input
            elif len(rows):
                reduce = TopKWeightAndReduceContiguous() if isinstance(reduce, TopKWeightAndReduceDelegate) else reduce
                rows = reduce.apply(None, rows, topk_weights, topk_ids, apply_router_weight_on_input)
        self.rows.combine(rows, weighted, output)


class AroundProducts(RaymoePrepareAndFinalize):
    """The steps around `RaymoeExperts`, which find the rows themselves, wherever they are."""

    def __init__(self, moe: Any, options: Options, experts: RaymoeExperts) -> None:
        on_gpu = current_platform.is_cuda()
        raw = on_gpu and experts.quant_config.quant_dtype is not None  # between CPU ranks rows cross wide
        super().__init__(moe, make_rows(moe, options, raw=raw, alignment=ALIGNMENT, exact=not on_gpu))
        self._experts, experts.rows = experts, self.rows

    def rows_of(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        quant_config: Any,  # noqa: ARG002
    ) -> tuple[Any, ...]:
        """Return all rows that there is memory for. Nobody reads the ids and the weights."""
        got = self.rows.send(x, ids, weights, self.most_tokens(len(x)))
        weights = got.weights[:, None]
        return got.x, None, None, torch.empty_like(weights, dtype=torch.int32), weights

    def finalize(self, output: torch.Tensor, *others: Any) -> None:
        """Write the weighted sums of the products to `output`. `others` are the last arguments of vLLM's."""
        _, _, _, apply_router_weight_on_input, _ = others
        self.rows.combine(self._experts.take_results(), not apply_router_weight_on_input, output)


class RaymoeExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """The experts of one layer by raymoe's products, of the rows that its dispatch brought, wherever they are."""

    rows: ExpertRowsOfLayer
    """Set by the `AroundProducts` of the layer."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        self._results: torch.Tensor | None = None

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Return that rows come in a tensor of two dimensions."""
        return mk.FusedMoEActivationFormat.Standard

    # vLLM asks these of the experts that it chooses from. It does not choose these: `_why_not_own` decides.

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:  # noqa: ARG004
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SILU)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:  # noqa: ARG004
        return True

    def workspace_shapes(self, *_: Any) -> tuple[tuple[int, ...], ...]:
        """Return the least that vLLM allocates: the products make their results themselves."""
        return (1,), (1,), (1, 1)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Return that weights and sums are left to the combine."""
        return TopKWeightAndReduceDelegate()

    def apply(
        self,
        output: torch.Tensor,  # noqa: ARG002
        hidden_states: torch.Tensor,  # noqa: ARG002
        w1: torch.Tensor,
        w2: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        """Multiply the rows of the last dispatch, and keep the results for the combine."""
        scales = None if self.w1_scale is None else (self.w1_scale, self.w2_scale)
        self._results = self.rows.multiply(ExpertWeights(w1, w2, scales))

    def take_results(self) -> torch.Tensor:
        """Return the results of the last `apply`, once."""
        results, self._results = self._results, None
        assert results is not None, "a combine follows the experts"
        return results


def _why_not(layer: Any, config: Any, own: bool = False) -> str | None:
    """Say why raymoe cannot take a layer whose experts are spread over ranks, and what to do; None where it can.

    `own` asks for raymoe's own experts.
    """
    moe = layer.moe_config
    backend = moe.moe_parallel_config.all2all_backend
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        return f"the platform is {current_platform.device_name}, and raymoe has CUDA and CPU ranks"
    if backend != "allgather_reducescatter":
        return f"all2all_backend is {backend}: leave it out, and raymoe takes the place of allgather_reducescatter"
    if config.parallel_config.enable_elastic_ep:
        return "elastic EP is on, and ranks of a world do not change: leave it out"
    if moe.is_lora_enabled:
        return "LoRA is on, whose experts need to know the adapter of each row: leave it out"
    if layer.expert_placement_strategy != "linear":
        return f"experts are placed {layer.expert_placement_strategy}, and raymoe places them linear"
    if current_platform.is_cpu() and not config.model_config.enforce_eager:
        return "torch.compile cannot trace it on CPUs: give enforce_eager"
    return _why_not_own(layer) if own else _why_not_its_experts(layer)


def _why_not_its_experts(layer: Any) -> str | None:
    """Say why raymoe cannot bring rows to the experts that vLLM chose."""
    kernel, moe = layer.quant_method.moe_kernel, layer.moe_config
    if not isinstance(getattr(kernel, "impl", None), mk.FusedMoEKernelModularImpl):
        return f"{type(layer.quant_method).__name__} has no modular kernel here: take another moe_backend"
    experts = kernel.fused_experts
    if experts.activation_format() != mk.FusedMoEActivationFormat.Standard:
        return f"{type(experts).__name__} takes rows in batches of an expert each: take another moe_backend"
    quant = experts.quant_config
    blocks = quant.quant_dtype is torch.float8_e4m3fn and list(quant.block_shape or ()) == [FP8_BLOCK, FP8_BLOCK]
    if quant.quant_dtype is not None and not blocks and not experts.expects_unquantized_inputs:
        return (
            f"experts take rows as {quant.quant_dtype} with blocks of {quant.block_shape}, and raymoe brings rows "
            f"as {moe.in_dtype} or as float8_e4m3fn with blocks of {FP8_BLOCK}"
        )
    return None


def _why_not_own(layer: Any) -> str | None:
    """Say why raymoe's products cannot be the experts."""
    method, moe = layer.quant_method, layer.moe_config
    instead = 'leave out "experts": "raymoe"'
    if moe.activation != MoEActivation.SILU or not moe.is_act_and_mul or moe.has_bias:
        return f"its experts are not SwiGLU without biases: {instead}"
    if moe.intermediate_size_per_partition != moe.intermediate_size_per_partition_unpadded:
        return f"{type(method).__name__} pads its experts here: {instead}"
    blocks = isinstance(method, Fp8MoEMethod) and list(method.weight_block_size or ()) == [FP8_BLOCK, FP8_BLOCK]
    if not isinstance(method, UnquantizedFusedMoEMethod) and not blocks:
        return f"its weights are those of {type(method).__name__}, neither wide nor fp8 in blocks of 128: {instead}"
    return None


class RaymoeRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """vLLM's layer of experts. Where the engine's config asks for raymoe, its kernel gets raymoe's dispatch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        chosen = config.additional_config.get("raymoe") if isinstance(config.additional_config, dict) else None
        if chosen is None or not self.moe_config.moe_parallel_config.use_all2all_kernels:
            return
        options, method = Options.of(chosen), self.quant_method
        process = method.process_weights_after_loading

        def process_and_take(layer: Any) -> None:
            """Make the kernel from the loaded weights, then give it raymoe's dispatch."""
            own = options.experts == "raymoe"
            if not own:  # else the weights stay as they are in the checkpoint
                process(layer)
            if why_not := _why_not(layer, config, own):
                raise ConfigError(f"raymoe cannot take the experts of {layer.layer_name}: {why_not}")
            kernel = method.moe_kernel
            if kernel is not None and isinstance(kernel.prepare_finalize, RaymoePrepareAndFinalize):
                return  # weights may be loaded again
            if own:
                method.moe_quant_config = method.get_fused_moe_quant_config(layer)
                experts = RaymoeExperts(layer.moe_config, method.moe_quant_config)
                ours: RaymoePrepareAndFinalize = AroundProducts(layer.moe_config, options, experts)
            else:
                experts = kernel.fused_experts
                ours = AroundItsExperts(layer.moe_config, options, experts, config.model_config.enforce_eager)
            method.moe_kernel = mk.FusedMoEKernel(ours, experts)

        method.process_weights_after_loading = process_and_take


def register() -> None:
    """Make the layer known to vLLM, which calls this in each of its processes, perhaps several times."""
    if RoutedExperts.__name__ not in op_registry_oot:
        RoutedExperts.register_oot(RaymoeRoutedExperts, name=RoutedExperts.__name__)
