"""bitsandbytes weights for any architecture of transformers: `llm.int8`, `nf4` and `fp4`.

Owns which matrices are quantized and by which of bitsandbytes' layers; its arithmetic is its own, and
the same as that of a model that transformers loads with a `BitsAndBytesConfig`. Knows nothing of steps.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from perflab.errors import ConfigError, ModelError, NotNative
from perflab.models.loaded import LoadedModel
from perflab.models.runner import HFRunner, _private_view

SCHEMES = ("llm.int8", "nf4", "fp4")
OUTLIER_THRESHOLD = 6.0  # of activations, transformers' default: their columns stay in the model's dtype
_PARTS = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj", "gate_up_proj"),
    "down": ("down_proj",),
}
_CPU_ROWS = 32  # bitsandbytes' 4-bit kernel for AVX-512 takes matrices of whole panels and blocks only


class BnbRunner(HFRunner):
    """Transformers' module with its linear layers in bitsandbytes' formats; the loaded module stays as it is.

    weights: `llm.int8`, `nf4` or `fp4`. keep: rules of matrices to leave in the loaded dtype (see
    `EngineConfig.keep`); head and embedding always are. With `llm.int8` a column with an outlier in any
    token of a step is computed unquantized for all of them, so logits depend on who shares the step.

    Raises ModelError where bitsandbytes is missing or does not run here, NotNative for `fp8`, ConfigError
    for a rule that names nothing.
    """

    def __init__(
        self,
        model: LoadedModel,
        weights: str,
        keep: str = "",
        progress: Callable[[str], None] | None = None,
    ) -> None:
        check(model, weights)
        _import()
        if model.device.type == "cpu":
            warnings.warn(
                f"weights={weights!r}: bitsandbytes is slow on a CPU; int8-dynamic and int4 are made for it",
                stacklevel=3,
            )
        self.loaded_bytes = tensor_bytes(model.module)
        say = progress or (lambda message: None)
        module = _private_view(model.module)
        names = _chosen(module, keep)
        for count, name in enumerate(names, 1):
            say(f"Quantizing to {weights}: matrix {count} of {len(names)}")
            module.set_submodule(name, _quantized(module.get_submodule(name), weights, model))
        super().__init__(replace(model, module=module), packed=False)
        self.weights = weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, scales and buffers that exist now; compare `loaded_bytes`."""
        return tensor_bytes(self.module)


def check(model: LoadedModel, weights: str) -> None:
    """Raises ModelError or NotNative where `weights` cannot run on the model's device and dtype."""
    if weights == "fp8":
        raise NotNative(
            "weights='fp8' is skipped: processors have no fp8 products, and on a GPU it is not implemented; "
            "use int8-dynamic on a CPU, llm.int8 on a GPU"
        )
    if weights not in SCHEMES:
        raise ConfigError(f"weights={weights!r}: bitsandbytes has {', '.join(SCHEMES)}")
    if model.device.type not in ("cpu", "cuda"):
        raise ModelError(f"weights={weights!r}: bitsandbytes runs on cpu and cuda, not on {model.device}")
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"weights={weights!r}: load the model in fp32, bf16 or fp16, not {model.dtype}")


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of the memory behind parameters, buffers and bitsandbytes' scales, shared ones once."""
    sizes: dict[int, int] = {}
    for tensor in _tensors(module):
        memory = tensor.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
    return sum(sizes.values())


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        weight = getattr(part, "weight", None)
        holders = (weight, getattr(part, "state", None), getattr(weight, "quant_state", None))
        for holder in holders:
            for name in ("CB", "SCB", "absmax", "code"):
                if isinstance(found := getattr(holder, name, None), Tensor):
                    yield found


def _import() -> Any:
    for name in ("autograd._functions", "backends.cpu.ops"):  # a line per call, and one about a download
        logging.getLogger(f"bitsandbytes.{name}").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError as error:
        raise ModelError(
            f"bitsandbytes is missing or does not load ({error}): pip install 'perflab[quant]'"
        ) from None
    return bitsandbytes


def _chosen(module: Any, keep: str) -> list[str]:
    """Names of the linear layers to quantize: what transformers would, less what the rules keep."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    skip = HfQuantizer.get_modules_to_not_convert(module, None, module._keep_in_fp32_modules)
    names = [
        name
        for name, child in module.named_modules()
        if type(child) in (nn.Linear, Conv1D) and should_convert_module(name, skip)
    ]
    if not names:
        raise ModelError(f"{type(module).__name__} has no linear layers that bitsandbytes could quantize")
    numbers = [number for name in names if (number := _layer(name)) is not None]
    last = max(numbers, default=0)
    for rule in filter(None, (part.strip() for part in keep.split(","))):
        kept = {name for name in names if _matches(rule, name, last)}
        if not kept and rule != "head":
            raise ConfigError(f"keep={rule!r} names no matrix: use head, first, last, down, layers.3.down")
        names = [name for name in names if name not in kept]
    return names


def _layer(name: str) -> int | None:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else None


def _matches(rule: str, name: str, last: int) -> bool:
    rule = {"first": "layers.0", "last": f"layers.{last}"}.get(rule, rule)
    found = re.fullmatch(r"(?:layers\.(\d+))?\.?(\w*)", rule)
    if found is None:
        return False
    number, part = found.groups()
    leaf = name.rpartition(".")[2]
    return (number is None or int(number) == _layer(name)) and (not part or leaf in _PARTS.get(part, (part,)))


def _quantized(linear: Any, weights: str, model: LoadedModel) -> nn.Module:
    """The layer of bitsandbytes for `nn.Linear` or GPT-2's transposed `Conv1D`, its bias shared."""
    bnb = _import()
    matrix: Tensor = linear.weight.detach()
    if not isinstance(linear, nn.Linear):
        matrix = matrix.T.contiguous()
    rows, columns = matrix.shape
    has_bias = linear.bias is not None
    layer: Any
    with torch.device("meta"):
        if weights == "llm.int8":
            layer = bnb.nn.Linear8bitLt(
                columns, rows, has_bias, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD
            )
        else:
            layer = bnb.nn.Linear4bit(
                columns, rows, has_bias, model.dtype, compress_statistics=False, quant_type=weights
            )
    if weights == "llm.int8":
        layer.weight = bnb.nn.Int8Params(matrix.cpu(), requires_grad=False).to(model.device)
    else:
        layer.weight = bnb.nn.Params4bit(
            matrix, requires_grad=False, compress_statistics=False, quant_type=weights
        ).to(model.device)
        if rows % _CPU_ROWS or columns % layer.weight.blocksize:
            layer.support_avx512bf16_for_cpu = False  # it would raise; the plain path takes any shape
    if has_bias:
        layer.bias = linear.bias
    return layer.eval()
