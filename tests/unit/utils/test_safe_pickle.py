"""Untrusted pickles: data loads completely, and none of their code runs."""

from __future__ import annotations

import argparse
import datetime
import io
import os
import pathlib
import pickle
import resource
import signal
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat

from slime.utils.errors import DataError
from slime.utils.safe_pickle import load_pickle, load_torch, read_torch_file


class Calls:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Mine:
    """A user-defined class."""

    def __init__(self):
        self.value = 3


def as_torch_file(content, **options) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


DATA = {
    "plain": [None, True, 1, 2.5, 3j, "text", b"bytes", (1, 2), {1}, frozenset({2}), slice(1, 2), range(3)],
    "containers": [OrderedDict(a=1), defaultdict(list, b=[1]), Counter("aab"), deque([1, 2])],
    "times": [datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(seconds=3), Decimal("1.5")],
    "path": Path("a") / "b",
    "args": Namespace(lr=1e-6, dtype=torch.bfloat16),
    "numpy": [np.arange(3, dtype=np.int32), np.float64(2.5), np.random.RandomState(0).get_state()[1]],
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_data_comes_back_as_it_was(protocol):
    back = load_pickle(pickle.dumps(DATA, protocol), where="file")
    assert back["plain"] == DATA["plain"] and back["containers"] == DATA["containers"] and back["path"] == DATA["path"]
    assert back["times"] == DATA["times"] and back["args"] == DATA["args"]
    assert all(np.array_equal(got, want) for got, want in zip(back["numpy"], DATA["numpy"], strict=True))


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_tensors_come_back_as_they_were(is_zip):
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.ones(2, dtype=torch.bfloat16), torch.tensor([True])]
    content = {"tensors": tensors, "parameter": torch.nn.Parameter(torch.ones(1)), "args": DATA["args"]}
    back = load_torch(as_torch_file(content, _use_new_zipfile_serialization=is_zip), where="file")
    assert all(torch.equal(got, want) for got, want in zip(back["tensors"], tensors, strict=True))
    assert torch.equal(back["parameter"], content["parameter"]) and back["args"] == DATA["args"]


MALICE = {
    "os.system": lambda mark: Calls(os.system, f"touch {mark}"),
    "eval": lambda mark: Calls(eval, f"open({str(mark)!r}, 'w')"),
    "pathlib": lambda mark: Calls(Path.touch, Path(mark)),
    "getattr": lambda mark: Calls(getattr, "text", "upper"),
    "torch.load": lambda mark: Calls(torch.load, str(mark)),
    "import": lambda mark: Calls(__import__, "antigravity"),
}


@pytest.mark.parametrize("kind", MALICE)
@pytest.mark.parametrize("write", [pickle.dumps, as_torch_file], ids=["pickle", "torch"])
def test_code_is_refused_and_not_run(kind, write, tmp_path):
    mark = tmp_path / "ran"
    data = write({"good": 1, "bad": MALICE[kind](mark)})
    load = load_pickle if write is pickle.dumps else load_torch
    with pytest.raises(DataError, match=r"file\.pt holds .+, and reading that could run code"):
        load(data, where="file.pt")
    load(data, where="file.pt", tolerant=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["os.system", "system", "posixpath.os.system"])
def test_dotted_names_do_not_lead_from_a_listed_module_to_another(name, tmp_path):
    code = b"\x80\x04\x8c\x07pathlib\x8c" + bytes([len(name)]) + name.encode() + b"\x93\x8c\x04true\x85R."
    with pytest.raises(DataError, match="could run code"):
        load_pickle(code, where="file")


def test_unlisted_objects_become_placeholders_where_a_part_is_enough():
    content = {"lr": 1.0, "mine": Mine(), "many": [Mine()]}
    with pytest.raises(DataError, match=r"Mine.*Ask for less\."):
        load_pickle(pickle.dumps(content), where="file", remedy="Ask for less.")
    back = load_pickle(pickle.dumps(content), where="file", tolerant=True)
    assert back["lr"] == 1.0 and type(back["mine"]).__name__ == "Mine" and not isinstance(back["mine"], Mine)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text", "zeros"])
@pytest.mark.parametrize("write", [pickle.dumps, as_torch_file], ids=["pickle", "torch"])
def test_damage_is_an_error_with_the_file(damage, write, tmp_path):
    data = bytearray(write({"x": list(range(100)), "names": ["a" * 50] * 3}))
    data = {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "flipped": bytes([data[0] ^ 0xFF]) + data[1:],
        "text": b"not a pickle at all",
        "zeros": bytes(len(data)),
    }[damage]
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"file\.pt \(\d+ bytes\) is cut or damaged"):
        read_torch_file(path) if write is as_torch_file else load_pickle(path.read_bytes(), where=path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="nothing.pt cannot be read"):
        read_torch_file(tmp_path / "nothing.pt")


def nested(levels: int) -> bytes:
    """A list of ten times one list of ten times ...: a few bytes each, but 10**levels items to traverse."""
    code = b"\x80\x04]q\x00"
    for level in range(levels):
        code += b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1])
    return code + b"."


def tensor_code(size: bytes, stride: bytes = b"(I1\nt", num_elements: int = 4) -> bytes:
    """The pickle that ``torch.save`` writes for a tensor, with other numbers."""
    storage = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI%d\ntQ" % num_elements
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"I0\n" + size + stride + b"I00\nNtR."


def archive(code: bytes, content: bytes = bytes(16), **options) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as parts:
        parts.writestr("archive/data.pkl", code)
        parts.writestr("archive/data/0", content)
        parts.writestr("archive/version", b"3\n")
    return file.getvalue()


GLOBAL_STATE = {
    "the bases of a class": b"cargparse\nNamespace\n(N(dS'__bases__'\n(cbuiltins\nobject\ntstb.",
    "a class's method": b"cargparse\nNamespace\n(N(dS'__eq__'\ncbuiltins\nint\nstb.",
    "the qualname of a function": b"ctorch._utils\n_rebuild_tensor_v2\n(N(dS'__qualname__'\nS'x'\nstb.",
    "a member of an enumeration": b"csignal\nSignals\n(I9\ntR(dS'_name_'\nI1\nsb.",
    "a member of torch's":
        b"ctorch.distributed.checkpoint.filesystem\nSerializationFormat\n(S'torch_save'\ntR(dS'_value_'\nI1\nsb.",
    "the fields of a record": b"cargparse\nNamespace\n)\x81}S'__class__'\ncargparse\nNamespace\nsb.",
}  # fmt: skip
THINGS = (
    argparse.Namespace, pathlib.PosixPath, torch._utils._rebuild_tensor_v2, signal.SIGKILL,
    SerializationFormat.TORCH_SAVE, torch.float32,
)  # fmt: skip


@pytest.mark.parametrize("name", GLOBAL_STATE)
@pytest.mark.parametrize("tolerant", [False, True])
def test_a_pickle_changes_nothing_that_was_there_before(name, tolerant):
    def states() -> list:
        names = ("__bases__", "__name__", "__qualname__", "__defaults__", "_name_", "_value_", "itemsize", "__eq__")
        return [{name: getattr(thing, name, None) for name in (*names, "exists")} for thing in THINGS]

    before = states()
    with pytest.raises(DataError, match="could run code"):
        load_pickle(GLOBAL_STATE[name], where="file", tolerant=tolerant)
    assert states() == before and argparse.Namespace(a=1) == argparse.Namespace(a=1)


LENGTHS = {
    "a bytearray": b"cbuiltins\nbytearray\n(I1099511627776\ntR.",
    "a bytearray of protocol 5": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "bytes of protocol 4": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "a frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "a range": b"cbuiltins\nrange\n(I1099511627776\ntR.",
    "an index of the memo": b"\x80\x04Nr\xff\xff\xff\xff" + b"\x94" * 5 + b"j\xfe\xff\xff\xff.",
    "lists in lists": nested(30),
    "an array": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
    b"(I1\n(I4294967296\nI4294967296\ntcnumpy\ndtype\n(S'f8'\ntRI00\nC\x00tb.",
    "a dtype of objects": b"cnumpy._core.multiarray\nscalar\n(cnumpy\ndtype\n(S'O8'\ntRC\x08AAAAAAAAtR.",
    "an image": b"cPIL.Image\nImage\n)\x81(lp0\n(dag0\nS'RGB'\nag0\n(I1000000\nI1000000\ntag0\nNag0\nC\x01aab.",
}
OPERATIONS = {
    "INST of a program": b"(S'true'\nios\nsystem\n.",
    "OBJ of a program": b"(cos\nsystem\nS'true'\no.",
    "an extension": b"\x80\x02\x82\x01.",
    "a call of what it made": b"cargparse\nNamespace\n)\x81(tR.",
    "a reference": b"S'thing'\nQ.",
    "a path of an image": b"cPIL.PngImagePlugin\nPngImageFile\n(S'/etc/hostname'\ntR.",
    "a class of torch": b"ctorch\nTensor\n(I1099511627776\ntR.",
    "a tensor of any function": b"ctorch._tensor\n_rebuild_from_type_v2\n(cpathlib\nPath\nctorch\nTensor\n(tNtR.",
    "a bare object of any class": b"ccopyreg\n_reconstructor\n(cpathlib\nPosixPath\ncbuiltins\nobject\nNtR.",
    "a factory": b"ccollections\ndefaultdict\n(cpathlib\nPath\ntR.",
}


@pytest.fixture
def memory():
    """Makes loads fail that take more than four GiB beyond the current memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", LENGTHS | OPERATIONS)
def test_lengths_that_lie_and_operations_of_code_are_one_error(name, memory):
    with pytest.raises(DataError, match="file holds|file .* is cut or damaged") as told:
        load_pickle((LENGTHS | OPERATIONS)[name], where="file")
    assert len(str(told.value)) < 500


@pytest.mark.parametrize(
    "data",
    [
        archive(tensor_code(b"(I1099511627776\nt")),
        archive(tensor_code(b"(I1099511627776\nt", b"(I0\nt")),
        archive(tensor_code(b"(I5\nt")),
        archive(tensor_code(b"(I-1\nt")),
        archive(tensor_code(b"(I4\nt", num_elements=2**40), content=b""),
        archive(tensor_code(b"(I4\nt"), content=bytes(1 << 24), compression=zipfile.ZIP_DEFLATED),
        archive(b"\x80\x02(S'storage'\nctorch\nFloatStorage\nS'../x'\nS'cpu'\nI4\ntQ."),
        archive(b"\x80\x02(S'module'\nctorch\nFloatStorage\nS'0'\nS'cpu'\ntQ."),
        archive(tensor_code(b"(I4\nt"))[:-40],
        b"ustar" * 200,
    ],
)
def test_an_archive_whose_parts_lie_is_one_error(data, memory):
    with pytest.raises(DataError, match="file holds|is cut or damaged"):
        load_torch(data, where="file")


def test_an_image_of_a_file_comes_back_from_its_pixels(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    image_module.new("P", (4, 3), 7).save(tmp_path / "a.png")
    with image_module.open(tmp_path / "a.png") as image:
        data, pixel = pickle.dumps(image), image.getpixel((3, 2))
    back = load_pickle(data, where="file")
    assert type(back) is image_module.Image and back.mode == "P" and back.getpixel((3, 2)) == pixel


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_of_every_kind_come_back(protocol):
    arrays = [
        np.arange(6, dtype=">i2").reshape(2, 3), np.asfortranarray(np.ones((2, 3), np.float16)), np.array(["a", "bc"]),
        np.array([b"x"]), np.array(["a", None, [1]], dtype=object), np.zeros((0, 3)), np.array(2 + 1j),
        np.array([True]),
    ]  # fmt: skip
    data = pickle.dumps([*arrays, np.dtype(">U3")], protocol)
    back, wanted = load_pickle(data, where="file"), pickle.loads(data)
    assert back.pop() == np.dtype(">U3") and [a.dtype for a in back] == [a.dtype for a in wanted[:-1]]
    assert all(np.array_equal(got, a) for got, a in zip(back, arrays, strict=True))


def test_tensors_that_share_or_repeat_their_bytes_come_back(tmp_path):
    base = torch.arange(10.0)
    tensors = [base, base[2:5], base[:2].expand(3, 2), torch.zeros(0, 4), torch.ones(3).to(torch.float8_e4m3fn)]
    tensors[3].note = 5  # torch stores it with another function
    back = load_torch(as_torch_file(tensors), where="file")
    assert all(torch.equal(got.float(), want.float()) for got, want in zip(back, tensors, strict=True))
    back[0][2] = 50
    assert back[1][0] == 50
