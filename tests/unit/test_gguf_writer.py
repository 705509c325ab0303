"""Writing: what comes out is what went in, and nothing half-written ever stands under the final name."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import GgufWriter, Kv, TensorType, ValueType, read_header, writer


def simple(path: Path, rows: int = 4) -> GgufWriter:
    out = GgufWriter(path)
    out.add("general.architecture", Kv.string("dflash"))
    out.declare("a.weight", (32, rows), TensorType.F32)
    out.declare("b", (5,), TensorType.F16)
    return out


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.endswith(".partial")]


def test_the_gguf_package_reads_what_the_writer_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a b.gguf"
    values = np.arange(128, dtype=np.float32).reshape(4, 32)
    with simple(path) as out:
        out.add("n", Kv.u32(7))
        out.add("eps", Kv.f32(1e-5))
        out.add("yes", Kv.bool(True))
        out.add("taps", Kv.array(ValueType.INT32, [2, 14, -1]))
        out.add("texts", Kv.array(ValueType.STRING, ["", "ünï", "a" * 300]))
        out.begin()
        out.write("b", 0, np.arange(5, dtype=np.float16))
        out.write("a.weight", 256, values[2:])
        out.write("a.weight", 0, values[:2])
        promised = out.header
        out.commit()
    reader = gguf.GGUFReader(path)
    assert [t.name for t in reader.tensors] == ["a.weight", "b"]
    assert np.array_equal(reader.tensors[0].data, values)
    assert reader.tensors[1].data.tolist() == [0, 1, 2, 3, 4]
    assert reader.fields["taps"].contents() == [2, 14, -1]
    assert reader.fields["texts"].contents() == ["", "ünï", "a" * 300]
    header = read_header(path)
    assert header == promised
    assert path.stat().st_size == header.size
    assert leftovers(tmp_path) == []


def test_values_of_another_file_are_copied_byte_for_byte(tmp_path: Path) -> None:
    first, second = tmp_path / "1.gguf", tmp_path / "2.gguf"
    raw = Kv(ValueType.ARRAY, ValueType.STRING, 1, b"\x02\0\0\0\0\0\0\0\xff\xfe")  # not UTF-8
    for path, values in ((first, {"t": raw}), (second, None)):
        with GgufWriter(path) as out:
            for key, value in (values or read_header(first).kv).items():
                out.add(key, value)
            out.begin()
            out.commit()
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Kv.u32(-1), "does not fit a metadata value of type UINT32"),
        (lambda: Kv.u32(2**32), "does not fit"),
        (lambda: Kv.scalar(ValueType.INT32, 1.5), "does not fit"),
        (lambda: Kv.array(ValueType.INT32, [1, "2"]), "does not fit"),
        (lambda: Kv.string(3), "must be text"),  # type: ignore[arg-type]
        (lambda: Kv.scalar(ValueType.BOOL, 1), "true or false"),
    ],
)
def test_a_value_that_does_not_fit_its_type_is_refused(make, words: str) -> None:
    with pytest.raises(DflashError, match=words):
        make()


def test_wrong_declarations_are_refused(tmp_path: Path) -> None:
    out = simple(tmp_path / "x.gguf")
    for call, words in [
        (lambda: out.add("general.architecture", Kv.u32(1)), "is set twice"),
        (lambda: out.add("", Kv.u32(1)), "is empty"),
        (lambda: out.add("general.alignment", Kv.u32(64)), "alignment"),
        (lambda: out.declare("b", (1,), 0), "declared twice"),
        (lambda: out.declare("c", (33, 2), TensorType.Q8_0), "a multiple of 32"),
        (lambda: out.declare("c", (0,), 0), "impossible shape"),
        (lambda: out.declare("c", (), 0), "impossible shape"),
        (lambda: out.declare("c", (1,) * 5, 0), "impossible shape"),
        (lambda: out.declare("c" * 64, (1,), 0), "1 to 63 bytes"),
    ]:
        with pytest.raises(DflashError, match=words):
            call()
    with out:
        out.begin()
        with pytest.raises(DflashError, match="already laid out"):
            out.add("late", Kv.u32(1))


def test_bytes_outside_a_tensor_and_missing_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(DflashError, match=r"not all bytes were written of: a\.weight"), simple(path) as out:
        out.begin()
        out.write("b", 0, bytes(10))
        for offset, size in ((-1, 1), (512, 1), (500, 13)):
            with pytest.raises(DflashError, match="do not fit"):
                out.write("a.weight", offset, bytes(size))
        out.commit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_any_exception_leaves_the_old_file_as_it_was(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    with pytest.raises(failure), simple(path) as out:
        out.begin()
        out.write("b", 0, bytes(10))
        assert leftovers(tmp_path)
        raise failure
    assert path.read_bytes() == b"old"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("call", ["open", "fstat", "ftruncate", "pwrite"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_a_signal_right_after_any_call_that_makes_the_file_leaves_nothing(
    call: str, failure: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = getattr(os, call)

    def interrupted(*arguments: object) -> object:
        found = done(*arguments)
        if leftovers(tmp_path):  # the call was one for our file, or comes after it
            monkeypatch.setattr(writer.os, call, done)
            raise failure
        return found

    monkeypatch.setattr(writer.os, call, interrupted)
    with pytest.raises(failure), simple(tmp_path / "x.gguf") as out:
        out.begin()
    assert list(tmp_path.iterdir()) == []


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with simple(tmp_path / "x.gguf") as out:
        out.begin()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_foreseen_and_says_how_much_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 3 << 20})
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage)
    out = GgufWriter(tmp_path / "x.gguf")
    out.declare("a", (1 << 20, 2), TensorType.F32)
    with pytest.raises(DflashError, match=r"the file needs 8\.0 MiB, .* has 3\.0 MiB free"):
        out.begin()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no room: the file needs"),
        (errno.EDQUOT, r"quota is used up; it needs \d"),
        (errno.EFBIG, r"no file of that size; it needs \d"),
        (errno.EIO, "cannot be written"),
    ],
)
def test_a_disk_that_fails_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    real = os.pwrite

    def fail(fd: int, data: object, at: int) -> int:
        if at > 0:  # the header went through
            raise OSError(number, os.strerror(number))
        return real(fd, data, at)  # type: ignore[arg-type]

    monkeypatch.setattr(writer.os, "pwrite", fail)
    with pytest.raises(DflashError, match=words), simple(tmp_path / "x.gguf") as out:
        out.begin()
        out.write("a.weight", 0, bytes(512))
        out.commit()
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(writer.os, "pwrite", lambda fd, data, at: real(fd, data[:7], at))
    path = tmp_path / "x.gguf"
    data = np.random.default_rng(0).bytes(512)
    with simple(path) as out:
        out.begin()
        out.write("a.weight", 0, data)
        out.write("b", 0, bytes(10))
        out.commit()
    start = read_header(path).data_start
    assert path.read_bytes()[start : start + 512] == data


def test_many_threads_write_at_once_and_a_late_one_cannot_touch_a_closed_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    rows = np.random.default_rng(0).standard_normal((64, 32), dtype=np.float32)
    with simple(path, rows=64) as out:
        out.begin()
        threads = [threading.Thread(target=out.write, args=("a.weight", i * 128, rows[i])) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        out.write("b", 0, bytes(10))
        out.commit()
        with pytest.raises(DflashError, match="not open"):
            out.write("b", 0, bytes(10))
    assert np.array_equal(gguf.GGUFReader(path).tensors[0].data, rows)


def test_a_link_keeps_pointing_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "real" / "x.gguf")
    with GgufWriter(link) as out:
        out.begin()
        out.commit()
    assert link.is_symlink()
    assert read_header(tmp_path / "real" / "x.gguf").kv == {}


def test_a_missing_folder_and_a_folder_as_name_are_said(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="no/such does not exist"):
        GgufWriter(tmp_path / "no" / "such" / "x.gguf").begin()
    with pytest.raises(DflashError, match="is a folder"):
        GgufWriter(tmp_path).begin()


CHILD = """
import sys, time
from dflashcpp.gguf_file import GgufWriter
with GgufWriter(sys.argv[1]) as out:
    out.declare("a", (1024,), 0)
    out.begin()
    print("ready", flush=True)
    time.sleep(60)
"""


def interrupted(path: Path, number: int) -> int:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert leftovers(path.parent)
    child.send_signal(number)
    child.stdout.close()
    return child.wait(timeout=30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_sigterm_and_a_closed_terminal_leave_nothing_but_the_old_file(
    tmp_path: Path, number: int
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    assert interrupted(path, number) != 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
    assert path.read_bytes() == b"old"


def test_what_kill_9_leaves_is_hidden_and_goes_with_the_next_attempt(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    interrupted(path, signal.SIGKILL)
    assert not path.exists()
    assert len(leftovers(tmp_path)) == 1
    with simple(path) as out, simple(path) as other:
        out.begin()
        assert len(leftovers(tmp_path)) == 1
        other.begin()  # another writer of the same name is at work: its file is not touched
        assert len(leftovers(tmp_path)) == 2
    assert leftovers(tmp_path) == []
