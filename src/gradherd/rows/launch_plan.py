"""What the kernels of a group of layers need to know, laid out once for many steps.

A plan has the launches of a group of layers: tables of sizes and strides, and of tiles, which say
what each program of a kernel works on. Only addresses are missing.

Shapes: B examples, T positions, C channels, q columns of the input side, W of the output side.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gradherd.rows.launch_graph import KernelLaunch, LaunchPlan
from gradherd.rows.projections import kernel_columns

Strides = tuple[int, int, int]

# The fastest on an H200, of ResNet-18 and ResNet-50 (positions side by side), ViT-B/16 (channels).
COMBINE_BLOCK = {True: (128, 64), False: (64, 32)}
"""Positions and outputs of a program, by whether outputs lie side by side."""
PROJECT_BLOCK = {True: (64, 128), False: (64, 64)}
"""Positions and channels of a program, by whether channels lie side by side."""
WINDOW_BLOCK, NORM_BLOCK = 1024, 2048
"""Elements of a program of windows, and of one of norms over rows of positions."""
NORM_LAST_BLOCK = (16, 256)
"""Positions and channels of a program of norms whose channels lie side by side."""
NORM_STAGES = {True: 3, False: 2}  # blocks that are loaded ahead, by the same
_SHARED_BYTES = 96 << 10  # every GPU of today has so many
_MOST_COLUMNS = 128  # of a program, whose sums are in registers
OPTIONS: dict[str, dict[str, int]] = {}
"""Options of Triton by kernel, such as `num_warps`; its own defaults where there are none."""


@dataclass(frozen=True, eq=False)
class ProductLayer:
    """How the columns of a weight are computed: project, add up the window, multiply."""

    examples: int
    outputs: int
    columns: int
    """q."""
    row: int
    """Elements between the columns of two examples."""
    add: bool
    """Whether to add to the columns of an earlier use."""
    positions: int
    """Of the output gradient."""
    grad_strides: Strides
    """Over examples, positions, outputs."""
    grad_dtype: torch.dtype
    width: int
    """W."""
    output_signs: Tensor | None = None
    """(O,) float32, if outputs are folded."""
    free: int = -1
    """The column that is 1 for the bias, if there is one."""
    thin_strides: Strides | None = None
    """Over examples, positions, columns, for an input that is projected already."""
    input_dtype: torch.dtype = torch.float32
    side: Tensor | None = None
    """(C, S) matrix that projects the input; S is `size`."""
    input_positions: int = 0
    input_strides: Strides = (0, 0, 0)
    """Over examples, positions, channels."""
    window: tuple[int, ...] = ()
    """Height and width of input and output, columns of the window, then stride, padding and
    dilation of both dimensions."""
    signs: Tensor | None = None
    """(places of the window, S) float32."""
    is_aligned: bool = True
    """Whether all addresses are multiples of 16 bytes."""

    @property
    def size(self) -> int:
        """Columns that kernels compute."""
        return kernel_columns(self.columns)

    @cached_property
    def scratch(self) -> int:
        """Bytes of the projected input, before and after the window."""
        if self.thin_strides is not None:
            return 0
        positions = self.input_positions + (self.positions if self.window else 0)
        return self.examples * positions * self.size * self.thin_dtype.itemsize

    @property
    def thin_dtype(self) -> torch.dtype:
        """Dtype of the projected input: that of the product."""
        return self.grad_dtype


@dataclass(frozen=True, eq=False)
class NormLayer:
    """How the gradients of a norm's scale and shift are computed."""

    examples: int
    channels: int
    positions: int
    row: int
    add: bool
    input_strides: tuple[int, int]
    """Over examples and positions."""
    grad_strides: tuple[int, int]
    input_dtype: torch.dtype
    grad_dtype: torch.dtype
    stats_dtype: torch.dtype
    is_last: bool
    """Whether channels lie side by side, else positions do."""
    per_channel: bool
    """Whether there is one mean for each channel (BatchNorm), else for each position."""
    is_aligned: bool = True
    scratch: ClassVar[int] = 0


def make_plan(
    layers: list[ProductLayer | NormLayer], device: torch.device, addresses: int
) -> LaunchPlan:
    """Lay out the launches of a group.

    Args:
        layers: The layers.
        device: Where they are.
        addresses: Room for so many addresses.
    """
    builder = _PlanBuilder(layers, device)
    for at, layer in enumerate(layers):
        if isinstance(layer, ProductLayer):
            builder.add_product(at, layer)
        else:
            builder.add_norm(at, layer)
    return builder.build(addresses)


def _step(is_aligned: bool, *sizes: int) -> int:
    """Return how many elements, at most 8, divide all strides and lengths that a kernel reads."""
    return math.gcd(8, *sizes) if is_aligned else 1


_Key = tuple[str, tuple[tuple[str, Any], ...]]


class _PlanBuilder:
    """Collects the tiles of each kernel, by kernel and constants."""

    def __init__(self, layers: list[ProductLayer | NormLayer], device: torch.device) -> None:
        # Imported here: Triton is optional, and absent where there is no GPU.
        from gradherd.rows import triton_rows

        self._kernels, self._device = triton_rows, device
        shape = (len(layers), triton_rows.FIELDS)
        self._fields = {name: np.zeros(shape, np.int64) for name in ("product", "window", "norm")}
        self._tiles: dict[_Key, list[tuple[int, int]]] = {}
        self._places: list[int] = []
        self._offsets: list[int] = []
        self._scratch = 0
        self._held: list[Tensor | None] = []

    def _tile(self, kernel: str, at: int, count: int, **constants: Any) -> None:
        # Layers with equal constants share a launch: constants are compiled into the kernel.
        key = (kernel, tuple(constants.items()))
        self._tiles.setdefault(key, []).append((at, count))

    def _reserve(self, at: int, which: tuple[int, ...], elements: int, dtype: torch.dtype) -> None:
        """Let addresses of a layer point to new scratch memory."""
        for one in which:
            self._places.append(at * self._kernels.POINTERS + one)
            self._offsets.append(self._scratch)
        # Each piece starts at a multiple of 128 bytes, a cache line of the device.
        self._scratch += -(-elements * dtype.itemsize // 128) * 128

    def add_product(self, at: int, layer: ProductLayer) -> None:
        """Add the kernels of a weight."""
        types, fields = self._kernels.TYPES, self._fields["product"][at]
        thin = types[layer.thin_dtype]
        thin_strides = (layer.positions * layer.size, layer.size, 1)
        if layer.thin_strides is not None:
            thin_strides = layer.thin_strides
        else:
            self._add_projection(at, layer)
        self._held.append(layer.output_signs)
        signs = 0 if layer.output_signs is None else layer.output_signs.data_ptr()
        fields[7:20] = (
            layer.width, layer.positions, layer.outputs, layer.columns, *layer.grad_strides,
            layer.add, *thin_strides, layer.row, signs,
        )  # fmt: skip
        last = layer.grad_strides[2] == 1
        outer = layer.grad_strides[:2] if last else layer.grad_strides[::2]
        inner = (layer.outputs, layer.width) if last else (layer.positions,)
        # Smaller tiles where there are few of them, so that all multiprocessors have work.
        most, block = COMBINE_BLOCK[last]
        columns = min(_MOST_COLUMNS, layer.size)
        folds = -(-layer.outputs // layer.width)
        parts = layer.examples * -(-layer.columns // columns)
        block = block if parts * (-(-layer.width // block)) >= 256 else block // 2
        # Two blocks are on their way while a third is multiplied.
        row = (columns + block * (folds if folds <= 4 else 1)) * layer.grad_dtype.itemsize
        while most > 16 and 2 * most * row > _SHARED_BYTES:
            most //= 2
        self._tile(
            "combine_kernel",
            at,
            parts * -(-layer.width // block),
            G=types[layer.grad_dtype],
            THIN=thin,
            LAST=last,
            STEP=_step(layer.is_aligned, *outer, *inner),
            DENSE=layer.thin_strides is None,
            FOLDS=folds,
            Q=columns,
            BT=min(32, most) if layer.positions <= 32 else most,
            BO=block,
        )

    def _add_projection(self, at: int, layer: ProductLayer) -> None:
        assert layer.side is not None
        types, fields = self._kernels.TYPES, self._fields["product"][at]
        thin = types[layer.thin_dtype]
        examples, positions = layer.examples, layer.input_positions
        strides = layer.input_strides
        last = strides[2] == 1
        if last and strides[0] == positions * strides[1]:
            # One long example: no tiles that are filled in part.
            examples, positions = 1, examples * positions
        self._held.append(layer.side)
        free = -1 if layer.window else layer.free
        fields[:7] = (
            layer.side.data_ptr(), len(layer.side), positions, *strides, free,
        )  # fmt: skip
        self._reserve(
            at,
            (2,) if layer.window else (2, 3),
            layer.examples * layer.input_positions * layer.size,
            layer.thin_dtype,
        )
        outer = strides[:2] if last else strides[::2]
        block, channels = PROJECT_BLOCK[last]
        # Elements of twice the size, half as many.
        block = block // 2 if layer.thin_dtype == torch.float32 else block
        own = min(_MOST_COLUMNS, layer.size)
        channels = min(channels, 64) if own > 16 else channels
        self._tile(
            "project_kernel",
            at,
            examples * -(-positions // block) * (layer.size // own),
            X=types[layer.input_dtype],
            THIN=thin,
            LAST=last,
            STEP=_step(layer.is_aligned, *outer, len(layer.side) if last else positions),
            Q=own,
            BT=block,
            BC=channels,
        )
        if layer.window:
            assert layer.signs is not None
            self._held.append(layer.signs)
            height, width, rows, columns, across, *rest = layer.window
            count = layer.examples * rows * columns
            self._fields["window"][at, :16] = (
                layer.signs.data_ptr(), count, len(layer.signs), layer.free,
                height, width, rows, columns, across, *rest, layer.size,
            )  # fmt: skip
            self._reserve(at, (3,), count * layer.size, layer.thin_dtype)
            block = WINDOW_BLOCK // own
            programs = -(-count // block) * (layer.size // own)
            self._tile("window_kernel", at, programs, THIN=thin, Q=own, BT=block)

    def add_norm(self, at: int, layer: NormLayer) -> None:
        """Add the kernel of a norm."""
        types = self._kernels.TYPES
        self._fields["norm"][at, :10] = (
            layer.examples * layer.channels, layer.channels, layer.positions,
            *layer.input_strides, *layer.grad_strides, 0, layer.add, layer.row,
        )  # fmt: skip
        kinds = {
            "X": types[layer.input_dtype],
            "G": types[layer.grad_dtype],
            "STATS": types[layer.stats_dtype],
        }
        if layer.is_last:
            rows, block = NORM_LAST_BLOCK
            steps = (*layer.input_strides, *layer.grad_strides)
            self._tile(
                "norm_last_kernel",
                at,
                layer.examples * -(-layer.channels // block),
                **kinds,
                STEP=_step(layer.is_aligned, layer.channels, *steps),
                PER_CHANNEL=layer.per_channel,
                ROWS=rows,
                BLOCK=block,
                STAGES=NORM_STAGES[True],
            )
            return
        # Triton's blocks are powers of two.
        block = min(1024, 1 << max(0, layer.positions - 1).bit_length())
        rows = max(1, NORM_BLOCK // block)
        self._tile(
            "norm_first_kernel",
            at,
            -(-layer.examples * layer.channels // rows),
            **kinds,
            STEP=_step(layer.is_aligned, layer.positions),
            ROWS=rows,
            BLOCK=block,
            STAGES=NORM_STAGES[False],
        )

    def build(self, addresses: int) -> LaunchPlan:
        """Copy the tables to the device."""
        fields = {
            name: torch.from_numpy(table).to(self._device) for name, table in self._fields.items()
        }
        launches = []
        order = ["project_kernel", "window_kernel", "combine_kernel"]
        order += ["norm_first_kernel", "norm_last_kernel"]
        # Projections come first: windows and products read what they write, in the same stream.
        for (kernel, constants), layers in sorted(
            self._tiles.items(), key=lambda item: order.index(item[0][0])
        ):
            tiles = np.concatenate(
                [
                    np.stack([np.full(count, at), np.arange(count)], 1).astype(np.int32)
                    for at, count in layers
                ]
            )
            table = kernel.split("_")[0]
            launches.append(
                KernelLaunch(
                    getattr(self._kernels, kernel),
                    len(tiles),
                    fields[table if table in ("window", "norm") else "product"],
                    torch.from_numpy(tiles).to(self._device),
                    dict(constants),
                    OPTIONS.get(kernel, {}),
                )
            )
        return LaunchPlan(
            launches,
            addresses,
            self._device,
            np.array(self._places, np.int64),
            np.array(self._offsets, np.int64),
            max(1, self._scratch),
            self._held,
        )
