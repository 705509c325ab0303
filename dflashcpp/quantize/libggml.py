"""ggml's quantisation functions through ctypes, from any library at hand: all give the same bytes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file.types import TensorType, block_size, row_bytes
from dflashcpp.progress import SILENT, Progress
from dflashcpp.quantize.floats import FLOATS

if TYPE_CHECKING:
    import numpy as np

# ggml_quantize_requires_imatrix: without one the library aborts the process
_ABORTS = frozenset({TensorType.IQ2_XXS, TensorType.IQ2_XS, TensorType.IQ1_S})


class LibGgml:
    """One loaded library. Its calls release the GIL, so threads quantise at the same time.

    The library checks next to nothing in a release build: a row that is no multiple of the block
    gives silent garbage, a missing importance matrix ends the process. So every call is checked here.
    """

    def __init__(self, path: str | Path, origin: str = "a given file") -> None:
        self.path = Path(path)
        self.origin = origin
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort must not start a debugger
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise DflashError(f"{path} cannot be loaded: {error}") from None
        try:
            self._declare()
        except AttributeError as error:
            raise DflashError(f"{path} is no libggml-base: {error}") from None
        self._check_sizes()

    def _declare(self) -> None:
        lib = self._lib
        lib.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
        lib.ggml_row_size.restype = ctypes.c_size_t
        lib.ggml_quantize_init.argtypes = [ctypes.c_int]
        lib.ggml_quantize_init.restype = None
        # type, source, target, first element, rows, row length, importance matrix
        lib.ggml_quantize_chunk.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        lib.ggml_quantize_chunk.restype = ctypes.c_size_t

    def _check_sizes(self) -> None:
        """The library must agree with our block table, or offsets would be wrong."""
        for kind in TensorType:
            if self.supports(kind):
                length = block_size(kind)
                theirs = self._lib.ggml_row_size(kind, length)
                if theirs != row_bytes(kind, length):
                    raise DflashError(
                        f"{self.path}: {kind.name} has another block size than expected ({theirs})"
                    )

    def supports(self, kind: int) -> bool:
        """Whether the library can make this type (older ones lack the newest types)."""
        kind = TensorType(kind)
        return kind in FLOATS or hasattr(self._lib, f"quantize_{_c_name(kind)}")

    def row_size(self, kind: int, length: int) -> int:
        """Bytes of a row of `length` numbers; DflashError when no row of that length exists."""
        return row_bytes(kind, length)

    def quantize(self, kind: int, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """float32 [n, k] -> uint8 [n, bytes per row], in `out` when given. Thread-safe.

        DflashError: k is no multiple of the type's block, or the type cannot be made.
        """
        import numpy as np

        kind = TensorType(kind)
        self._check_type(kind)
        rows = np.ascontiguousarray(rows, np.float32)
        count, length = rows.shape
        shape = (count, row_bytes(kind, length))
        if out is None:
            out = np.empty(shape, np.uint8)
        elif out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(f"out must be contiguous uint8 {shape}")
        written = self._lib.ggml_quantize_chunk(
            int(kind), rows.ctypes.data, out.ctypes.data, 0, count, length, None
        )
        if written != out.nbytes:
            raise DflashError(f"{self.path} wrote {written} bytes of {kind.name} instead of {out.nbytes}")
        return out

    def _check_type(self, kind: TensorType) -> None:
        if kind in _ABORTS:
            raise DflashError(f"{kind.name} needs an importance matrix, which a drafter does not have")
        if not self.supports(kind):
            raise DflashError(
                f"{self.path} ({self.origin}) cannot make {kind.name}",
                hint="build the pinned llama.cpp: dflashcpp build",
            )


def _c_name(kind: TensorType) -> str:
    """ggml's function suffix: small letters, but a K-quant's capital K (`q4_K`, `iq4_nl`)."""
    name = kind.name.lower()
    return name[:-1] + "K" if name.endswith("_k") else name


def find_libraries() -> Iterator[tuple[Path, str]]:
    """Libraries that are there already, best first, each with where it comes from."""
    own = _own_build()
    if own is not None:
        yield own, "our own build"
    for package, patterns in (
        ("llama_cpp", ("lib/" + _file_name(),)),
        ("xllamacpp", ("xllamacpp*.so", "*.pyd")),
    ):
        folder = _package_folder(package)
        for pattern in patterns if folder else ():
            assert folder is not None
            for path in sorted(folder.glob(pattern)):
                yield path, f"the installed package {package}"


def _own_build() -> Path | None:
    from dflashcpp.llamacpp import find_build

    build = find_build() or find_build(patched=False)
    return build.libggml if build is not None else None


def _file_name() -> str:
    return {"darwin": "libggml-base.dylib", "win32": "ggml-base.dll"}.get(sys.platform, "libggml-base.so")


def _package_folder(name: str) -> Path | None:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places and spec and spec.origin:
        return Path(spec.origin).parent
    return Path(places[0]) if places else None


def load_libggml(progress: Progress = SILENT) -> LibGgml:
    """The first library that loads: our build, llama-cpp-python, xllamacpp; else ggml-base is built now.

    DflashError when there is none and it cannot be built (no compiler).
    """
    for path, origin in find_libraries():
        try:
            return LibGgml(path, origin)
        except DflashError as error:
            progress.say(f"{error.message}; looking further")
    from dflashcpp.llamacpp import build_ggml_base

    return LibGgml(build_ggml_base(progress), "built for this")
