"""Pickles from strangers: data comes through whole, and no code of theirs is run."""

from __future__ import annotations

import argparse
import datetime
import io
import os
import pathlib
import pickle
import signal
import subprocess
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
    """A class of somebody's."""

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


def test_images_come_back():
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 3), (1, 2, 3))
    assert load_pickle(pickle.dumps(image), where="file").getpixel((1, 1)) == (1, 2, 3)


MALICE = {
    "os.system": lambda mark: Calls(os.system, f"touch {mark}"),
    "subprocess": lambda mark: Calls(subprocess.call, ["touch", str(mark)]),
    "exec": lambda mark: Calls(exec, f"open({str(mark)!r}, 'w')"),
    "eval": lambda mark: Calls(eval, f"open({str(mark)!r}, 'w')"),
    "open": lambda mark: Calls(open, str(mark), "w"),
    "pathlib": lambda mark: Calls(Path.touch, Path(mark)),
    "getattr": lambda mark: Calls(getattr, "text", "upper"),
    "torch.load": lambda mark: Calls(torch.load, str(mark)),
    "torch.save": lambda mark: Calls(torch.save, 1, str(mark)),
    "numpy.save": lambda mark: Calls(np.save, str(mark), np.ones(1)),
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_program_is_refused(tmp_path):
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
    with pytest.raises(DataError, match="TorchScript"):
        load_torch(file.getvalue(), where="file")


def test_unlisted_objects_become_placeholders_where_a_part_is_enough():
    content = {"lr": 1.0, "mine": Mine(), "many": [Mine()]}
    with pytest.raises(DataError, match=r"Mine.*Ask for less\."):
        load_pickle(pickle.dumps(content), where="file", remedy="Ask for less.")
    back = load_pickle(pickle.dumps(content), where="file", tolerant=True)
    assert back["lr"] == 1.0 and type(back["mine"]).__name__ == "Mine" and not isinstance(back["mine"], Mine)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text", "zeros"])
@pytest.mark.parametrize("write", [pickle.dumps, as_torch_file], ids=["pickle", "torch"])
def test_damage_is_an_error_with_the_file(damage, write, tmp_path):
    data = bytearray(write({"x": torch.arange(100), "names": ["a" * 50] * 3}))
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


@pytest.mark.parametrize(
    ("code", "thing", "attribute"),
    [
        (b"cargparse\nNamespace\n(N(dS'__eq__'\ncbuiltins\nint\nstb.", argparse.Namespace, "__eq__"),
        (b"cpathlib\nPosixPath\n(N(dS'exists'\ncbuiltins\nint\nstb.", pathlib.PosixPath, "exists"),
        (b"cpathlib\nPosixPath\n(N(dS'added'\nI1\nstb.", pathlib.PosixPath, "added"),
        (
            b"ctorch._utils\n_rebuild_tensor_v2\n(N(dS'__defaults__'\n)stb.",
            torch._utils._rebuild_tensor_v2,
            "__defaults__",
        ),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(dS'added'\nI1\nsb.", torch._utils._rebuild_tensor_v2, "added"),
        (
            b"ctorch.distributed.checkpoint.filesystem\nSerializationFormat\n(S'torch_save'\ntR(dS'_value_'\nI1\nsb.",
            SerializationFormat.TORCH_SAVE,
            "_value_",
        ),
        (b"csignal\nSignals\n(I9\ntR(dS'_name_'\nI1\nsb.", signal.SIGKILL, "_name_"),
    ],
)
@pytest.mark.parametrize("tolerant", [False, True])
def test_a_pickle_changes_no_class_and_no_function(code, thing, attribute, tolerant):
    missing = object()
    before = getattr(thing, attribute, missing)
    with pytest.raises(DataError, match="holds a change of"):
        load_pickle(code, where="file", tolerant=tolerant)
    assert getattr(thing, attribute, missing) is before or getattr(thing, attribute) == before
