"""A compute graph without data, and how much memory ggml's allocator gives it.

llama.cpp reserves its compute buffer by building the worst graph and laying out every tensor of it
once (`ggml_gallocr_reserve`, ggml/src/ggml-alloc.c). The size depends on shapes, on when a tensor is
read last, on which operations may write over their input, and on best-fit placement. This module
repeats that walk on shapes alone, so a plan needs no llama.cpp; `memory.layers` says what the graphs
of the architectures look like.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

Shape = tuple[int, int, int, int]

# ggml_op_can_inplace (ggml-alloc.c): these may write their result over an input of the same layout.
_IN_PLACE = frozenset(
    (
        "fill",
        "scale",
        "add",
        "add_id",
        "sub",
        "mul",
        "div",
        "sqr",
        "sqrt",
        "log",
        "unary",
        "rope",
        "rms_norm",
        "clamp",
        "soft_max",
        "diag_mask_inf",
    )
)


@dataclass(eq=False)
class Tensor:
    """One node or leaf: shape `ne` (ggml order), strides in elements, bytes an element, what it reads."""

    ne: Shape
    size: int = 4
    op: str = "none"
    sources: tuple[Tensor, ...] = ()
    view_of: Tensor | None = None
    strides: Shape = (1, 1, 1, 1)
    external: bool = False
    input: bool = False
    output: bool = False
    host: bool = False
    scratch: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer, with the scratch some operations keep behind their result."""
        return prod(self.ne) * self.size + self.scratch

    def same_layout(self, other: Tensor) -> bool:
        """ggml_are_same_layout: type, shape and strides."""
        return (self.ne, self.size, self.strides) == (other.ne, other.size, other.strides)


def shape(*ne: int) -> Shape:
    """A shape filled up with ones."""
    filled = (*ne, 1, 1, 1, 1)[:4]
    return (filled[0], filled[1], filled[2], filled[3])


def dense(ne: Shape) -> Shape:
    """The strides of a contiguous tensor, in elements."""
    return (1, ne[0], ne[0] * ne[1], ne[0] * ne[1] * ne[2])


@dataclass
class Graph:
    """Nodes and leafs in the order llama.cpp's `ggml_build_forward_expand` calls give them."""

    nodes: list[Tensor] = field(default_factory=list)
    leafs: list[Tensor] = field(default_factory=list)
    _seen: set[Tensor] = field(default_factory=set)

    def new(self, *ne: int, size: int = 4) -> Tensor:
        """An input of the graph: filled by the program before each run."""
        return Tensor(shape(*ne), size, strides=dense(shape(*ne)), input=True)

    def weight(self, *ne: int, size: int = 4, host: bool = False) -> Tensor:
        """A tensor that lives in another buffer (weights, caches); `host`: never on a device."""
        return Tensor(shape(*ne), size, strides=dense(shape(*ne)), external=True, host=host)

    def op(self, name: str, ne: Iterable[int], *sources: Tensor, size: int = 4) -> Tensor:
        """The result of an operation, with memory of its own unless it may write over an input."""
        full = shape(*ne)
        return Tensor(full, size, name, sources, strides=dense(full))

    def view(self, source: Tensor, ne: Iterable[int], strides: Shape | None = None, *extra: Tensor) -> Tensor:
        """A view, reshape, permutation, or write into `source`: no memory of its own."""
        full = shape(*ne)
        root = source.view_of or source
        return Tensor(full, source.size, "view", (source, *extra), root, strides or dense(full))

    def expand(self, tensor: Tensor) -> Tensor:
        """Append `tensor` and everything it reads that is not there yet, sources first, left to right."""
        stack: list[tuple[Tensor, int]] = [(tensor, 0)]
        if tensor in self._seen:
            return tensor
        self._seen.add(tensor)
        while stack:
            node, index = stack.pop()
            if index < len(node.sources):
                stack.append((node, index + 1))
                source = node.sources[index]
                if source not in self._seen:
                    self._seen.add(source)
                    stack.append((source, 0))
            else:
                (self.leafs if node.op == "none" else self.nodes).append(node)
        return tensor


class _Blocks:
    """ggml_dyn_tallocr with one chunk: best fit, the last block without end."""

    _ENDLESS = 1 << 62

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._free: list[list[int]] = [[0, self._ENDLESS]]
        self.peak = 0

    def round(self, size: int) -> int:
        return -(-size // self._alignment) * self._alignment

    def take(self, size: int) -> int:
        size = self.round(size)
        best, best_size = len(self._free) - 1, self._ENDLESS
        for index, (_, length) in enumerate(self._free[:-1]):
            if size <= length <= best_size:
                best, best_size = index, length
        block = self._free[best]
        offset = block[0]
        block[0] += size
        block[1] -= size
        if not block[1]:
            del self._free[best]
        self.peak = max(self.peak, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        size = self.round(size)
        if not size:
            return
        for index, block in enumerate(self._free):
            if block[0] + block[1] == offset:
                block[1] += size
                after = self._free[index + 1] if index + 1 < len(self._free) else None
                if after and block[0] + block[1] == after[0]:
                    block[1] += after[1]
                    del self._free[index + 1]
                return
            if offset + size == block[0]:
                block[0], block[1] = offset, block[1] + size
                return
        self._free.append([offset, size])
        self._free.sort()


@dataclass
class _Use:
    children: int = 0
    views: int = 0
    offset: int = 0
    allocated: bool = False


def _ours(tensor: Tensor) -> bool:
    """Whether the tensor's memory is this buffer's to give and take."""
    root = tensor.view_of or tensor
    return not root.external


class _Layout:
    """ggml_gallocr_alloc_graph_impl with a buffer on the device and one on the host."""

    def __init__(self, graph: Graph, alignment: int) -> None:
        self._device, self._host = _Blocks(alignment), _Blocks(_HOST_ALIGNMENT)
        self._uses: dict[Tensor, _Use] = {}
        self._run(graph)

    @property
    def peaks(self) -> tuple[int, int]:
        return self._device.peak, self._host.peak

    def _blocks(self, tensor: Tensor) -> _Blocks:
        return self._host if tensor.host else self._device

    def _use(self, tensor: Tensor) -> _Use:
        use = self._uses.get(tensor)
        if use is None:
            use = self._uses[tensor] = _Use()
        return use

    def _run(self, graph: Graph) -> None:
        for leaf in graph.leafs:
            self._place(leaf)
        read = [[source for source in node.sources if _ours(source)] for node in graph.nodes]
        for node, sources in zip(graph.nodes, read, strict=True):
            if node.view_of is not None and _ours(node):
                self._use(node.view_of).views += 1
            for source in sources:
                self._use(source).children += 1
                if source.input:
                    self._place(source)
        for node, sources in zip(graph.nodes, read, strict=True):
            for source in sources:
                self._place(source)
            self._place(node)
            for source in sources:
                self._release(source)

    def _place(self, node: Tensor) -> None:
        if node.external or node.view_of is not None:
            return
        use = self._use(node)
        if use.allocated:
            return
        use.allocated = True
        if node.op in _IN_PLACE and any(self._inherit(node, use, parent) for parent in node.sources):
            return
        use.offset = self._blocks(node).take(node.nbytes)

    def _inherit(self, node: Tensor, use: _Use, parent: Tensor) -> bool:
        held = self._use(parent)
        root = parent.view_of
        if not held.allocated or parent.output or (root and root.output) or not node.same_layout(parent):
            return False
        if held.children != 1 or held.views != 0:
            return False
        use.offset = held.offset
        held.allocated = False
        return True

    def _release(self, parent: Tensor) -> None:
        use = self._use(parent)
        use.children -= 1
        if use.children or use.views:
            return
        root = parent.view_of
        if root is None:
            self._free(parent)
            return
        root_use = self._use(root)
        root_use.views -= 1
        if not root_use.views and not root_use.children:
            self._free(root)

    def _free(self, tensor: Tensor) -> None:
        use = self._use(tensor)
        if use.allocated and not tensor.output:
            use.allocated = False
            self._blocks(tensor).give(use.offset, tensor.nbytes)


_HOST_ALIGNMENT = 32  # TENSOR_ALIGNMENT (ggml-impl.h)
_DEVICE_ALIGNMENT = 128  # ggml_backend_cuda_buffer_type_get_alignment


def host_bytes(graph: Graph) -> int:
    """Bytes ggml reserves for `graph` when everything runs on the CPU."""
    return _Layout(graph, _HOST_ALIGNMENT).peaks[0]


def device_bytes(graph: Graph) -> int:
    """Bytes on one device that runs everything but the lookup of embeddings.

    It holds what a CPU would, copies of the inputs included, but not the input nobody reads
    (ready-made embeddings). Where the copies land moves the layout of a drafter with convolutions by
    up to three percent.
    """
    read = {source for node in graph.nodes for source in node.sources}
    used = Graph(graph.nodes, [leaf for leaf in graph.leafs if leaf in read])
    return _Layout(used, _DEVICE_ALIGNMENT).peaks[0]


def beside_device_bytes(graph: Graph) -> int:
    """Bytes on the host beside such a device: the inputs and the looked-up rows.

    As the split in `ggml_backend_sched_split_graph` (ggml-backend.cpp) leaves them. Changes `graph`.
    """
    return _Layout(_split(graph), _DEVICE_ALIGNMENT).peaks[1]


def _split(graph: Graph) -> Graph:
    split = Graph(leafs=list(graph.leafs))
    for leaf in graph.leafs:
        leaf.host = leaf.host or leaf.input
    for node in graph.nodes:
        if node.view_of is not None:
            node.host = node.view_of.host
        elif any(source.external and source.host for source in node.sources):
            node.host = True
    on_host = [node for node in graph.nodes if node.host and node.view_of is None]
    copies: dict[Tensor, Tensor] = {}
    rest: list[Tensor] = []
    for node in graph.nodes:
        if node in on_host:
            continue
        if node.view_of is None:
            node.sources = tuple(_copied(source, copies) for source in node.sources)
        rest.append(node)
    split.nodes += on_host
    for source, copy in copies.items():
        split.nodes += [Tensor(source.ne, op="kept", sources=(source,), external=True), copy]
    split.nodes += rest
    return split


def _copied(source: Tensor, copies: dict[Tensor, Tensor]) -> Tensor:
    if not source.host or source.external:
        return source
    if source not in copies:
        copies[source] = Tensor(source.ne, source.size, "copy", strides=source.strides)
    return copies[source]
