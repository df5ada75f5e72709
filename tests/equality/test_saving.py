"""`save()`: what is in the folder, and what is there when it is killed or the disk is full.

Headers and indices that are damaged: each is a `CheckpointError` that names the file.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import CheckpointError, megacompile, save
from tests.checkpoints import Net, ids, on_meta, values
from tests.equality.nets import Applies, from_config
from tests.zoo import unlike

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def made(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def read(folder: Path) -> dict[str, torch.Tensor]:
    return values(megacompile(on_meta(), checkpoint=folder))


def test_files_have_at_most_that_size_and_an_index(tmp_path: Path) -> None:
    """Or there is one file, in a new folder. Updates in the background are waited for; a part and a
    plain model are saved too."""
    model: Any = megacompile(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids()).backward()
    optimizer.step()
    save(model, tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == ["model.safetensors"]
    assert unlike(values(model), read(tmp_path / "a" / "b")) == []
    assert "head.weight" not in safetensors.load_file(tmp_path / "a" / "b" / "model.safetensors")
    save(model.layers[1], tmp_path / "part")
    assert "up.weight" in safetensors.load_file(tmp_path / "part" / "model.safetensors")
    folder = tmp_path / "several"
    save(model, folder, max_shard_size=2000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = [name for name in names(folder) if name.endswith(".safetensors")]
    assert len(files) > 1 and set(index["weight_map"].values()) == set(files)
    total = 0
    for name in files:
        tensors = safetensors.load_file(folder / name)
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors.values()]
        total += sum(sizes)
        assert sum(sizes) <= 2000 or len(sizes) == 1
    assert index["metadata"]["total_size"] == total
    assert unlike(values(model), read(folder)) == []


@pytest.mark.parametrize(("name", "size"), [("tied", "5GB"), ("mixtral", 2000)])
def test_transformers_reads_it(name: str, size: Any, tmp_path: Path) -> None:
    model = megacompile(from_config(name))
    save(model, tmp_path / "ours", max_shard_size=size)
    back, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert unlike(values(back), values(model)) == []
    back.save_pretrained(tmp_path / "theirs")
    theirs = safetensors.load_file(tmp_path / "theirs" / "model.safetensors")
    ours: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "ours").glob("*.safetensors"):
        ours |= safetensors.load_file(file)
    assert unlike(theirs, ours) == []
    again = on_meta(from_config, name=name)
    megacompile(again, checkpoint=tmp_path / "ours")
    assert unlike(values(model), values(again)) == []


def test_an_older_save_is_replaced_whatever_files_it_had(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    sizes: tuple[int | str, ...] = (2000, "5GB", 4000, 2000, "5GB")
    for seed, size in enumerate(sizes):
        model = made(seed)
        save(model, tmp_path, max_shard_size=size)
        assert unlike(values(model), read(tmp_path)) == []
        shards = [name for name in names(tmp_path) if "-of-" in name]
        assert len({name[-17:] for name in shards}) <= 1  # of one save
        assert not any(name.endswith(".incomplete") for name in names(tmp_path))
    assert names(tmp_path) == ["model.safetensors", "notes.txt"]


def killed(
    old: nn.Module, new: nn.Module, tmp_path: Path, before: int, size: int
) -> Iterator[Path]:
    """Folders with the old model in which a save of the new one was killed, each at another place;
    what was left there is in nobody's way."""
    save(old, tmp_path / "old", max_shard_size=before)
    for place in range(100):
        folder = tmp_path / str(place)
        shutil.copytree(tmp_path / "old", folder)
        if not _interrupted(place, new, folder, size):
            break
        yield folder
        save(new, folder, max_shard_size=size)
        assert not any(name.endswith(".incomplete") for name in names(folder))
    assert place > 4


@pytest.mark.parametrize(("before", "size"), [(2000, 2000), (10**9, 2000)])
def test_who_is_killed_leaves_the_old_one_or_none_or_the_new_one(
    before: int, size: int, tmp_path: Path
) -> None:
    """In this process an exception that `save` does not catch stands for the kill."""
    old, new = made(0), made(1)
    seen = set()
    for folder in killed(old, new, tmp_path, before, size):
        try:
            found = read(folder)
        except CheckpointError as error:
            assert str(folder) in str(error)
            seen.add("none")
        else:
            assert unlike(found, values(old)) == [] or unlike(found, values(new)) == []
            seen.add("new" if unlike(found, values(new)) == [] else "old")
    assert unlike(values(new), read(folder)) == []
    assert seen >= {"old", "new"}


@pytest.mark.parametrize(
    ("other", "size"), [({}, 10**9), ({"rms_norm_eps": 0.5}, 2000), ({"rms_norm_eps": 0.5}, 10**9)]
)
def test_weights_never_meet_the_config_of_another_save(
    other: dict[str, Any], size: int, tmp_path: Path
) -> None:
    """`from_pretrained` would take it: the shapes are the same, and the numbers are not."""
    models = []
    for k, changed in enumerate(({}, other)):
        torch.manual_seed(k)
        models.append(from_config("qwen2", **changed).eval())
    tokens = torch.arange(8)[None]
    logits = [model(tokens).logits for model in models]
    seen = set()
    for folder in killed(models[0], models[1], tmp_path, size, size):
        try:
            found = transformers.AutoModelForCausalLM.from_pretrained(folder)
        except OSError as error:
            assert "no file named" in str(error)
            seen.add("none")
            continue
        (which,) = [k for k in (0, 1) if torch.equal(found.eval()(tokens).logits, logits[k])]
        seen.add(("old", "new")[which])
    assert seen == ({"old", "new"} if size > 2000 and not other else {"old", "none", "new"})


class Killed(BaseException):
    """No `except Exception` sees it."""


def _interrupted(place: int, model: nn.Module, folder: Path, size: int) -> bool:
    left = [place]

    def counted(stock: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return stock(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", counted(os.fsync))
        patch.setattr("os.replace", counted(os.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        try:
            save(model, folder, max_shard_size=size)
        except Killed:
            return True
    return False


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before anything is written; while it is written; and by the library that writes, whom
    the system refuses to write beyond a limit on the size of files."""
    model = made(0)
    save(model, tmp_path)
    there = names(tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, fault in (("shutil.disk_usage", lambda path: usage), ("os.fsync", full)):
        with monkeypatch.context() as patch:
            patch.setattr(name, fault)
            with pytest.raises(CheckpointError):
                save(made(1), tmp_path)
        assert names(tmp_path) == there
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        with pytest.raises(CheckpointError):
            save(made(1), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == there and unlike(values(model), read(tmp_path)) == []


DEEP = "[" * 100_000
INDEX = "model.safetensors.index.json"


def pair() -> Any:
    """A model of the tensors in the file."""
    params = {"a": nn.Parameter(torch.ones(2, 3)), "c": nn.Parameter(torch.ones(1))}
    return Applies(lambda m: m, **params, b=torch.zeros(4, dtype=torch.int64))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    safetensors.save_file(pair().state_dict(), str(path), {"format": "pt"})
    return path


def parts(path: Path) -> tuple[Any, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path: Path, header: bytes, tensors: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + tensors)


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


def reads(path: Path) -> bool:
    """Is a checkpoint read, whole? Else it is refused in a line that names the folder."""
    with torch.device("meta"):
        model = pair()
    try:
        megacompile(model, device="cpu", checkpoint=path)
    except CheckpointError as error:
        assert str(path.parent) in str(error) and len(str(error)) < 100_000, error
        return False
    assert all(map(torch.equal, model.state_dict().values(), pair().state_dict().values()))
    return True


def test_files_that_are_cut(file: Path) -> None:
    assert reads(file)
    data = file.read_bytes()
    for end in range(len(data)):
        file.write_bytes(data[:end])
        assert not reads(file), end


# bytes, or what the entry of "c" has instead
HEADERS: dict[str, bytes | dict[str, Any]] = {
    "deep inside": b'{"a": ' + DEEP.encode(),
    "not utf-8": b'{"\xff": 1}',
    "a list": b"[1, 2]",
    "an entry is a list": b'{"a": [1]}',
    "many digits": b'{"a": ' + b"9" * 5000 + b"}",
    "twice": b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "offsets are text": {"data_offsets": "ab"},
    "offsets are one": {"data_offsets": [0]},
    "negative": {"data_offsets": [-4, 0]},
    "backwards": {"data_offsets": [60, 56]},
    "out of the file": {"data_offsets": [10**9, 10**9 + 4]},
    "huge": {"data_offsets": [2**64, 2**64 + 4]},
    "overlap": {"data_offsets": [0, 4]},
    "shape is deep": {"shape": [[1]]},
    "shape is huge": {"shape": [2**40, 2**40]},
    "shape is true": {"shape": [True]},
    "dtype is a list": {"dtype": ["F32"]},
    "dtype is unknown": {"dtype": "F33"},
    "dtype is null": {"dtype": None},
    "a shape of texts": {"shape": ["a"]},
    "an offset is a text": {"data_offsets": [56, "60"]},
    "an offset is not whole": {"data_offsets": [56.5, 60]},
    "no dtype": {"dtype": ...},
}


def test_headers_that_are_refused(file: Path) -> None:
    header, tensors = parts(file)
    for case, change in HEADERS.items():
        if isinstance(change, dict):
            entry = {k: v for k, v in (header["c"] | change).items() if v is not ...}
            change = text(header | {"c": entry})
        write(file, change, tensors)
        assert not reads(file), case
    write(file, text(header | {"__metadata__": [1]}), tensors)
    assert not reads(file)


INDICES: dict[str, bytes] = {
    "a list is a file": b'{"weight_map": {"a": ["model.safetensors"]}}',
    "pairs": b'{"weight_map": [["a", "model.safetensors"]]}',
    "deep": DEEP.encode(),
    "none": b"",
    "not utf-8": b'{"weight_map": {"\xff": "model.safetensors"}}',
    "dots": b'{"weight_map": {"a": ".."}}',
    "no name": b'{"weight_map": {"a": ""}}',
    "a zero byte": b'{"weight_map": {"a": "a\\u0000b"}}',
    "a lone surrogate": b'{"weight_map": {"a": "\\ud800"}}',
    "a long name": b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}',
    "itself": b'{"weight_map": {"a": "model.safetensors.index.json"}}',
}


def test_indices_that_are_refused(file: Path) -> None:
    index = file.parent / INDEX
    index.write_bytes(text({"weight_map": dict.fromkeys("abc", file.name)}))
    assert reads(index)
    for case, data in INDICES.items():
        index.write_bytes(data)
        assert not reads(index), case


def test_a_folder_in_the_place_of_a_file(file: Path) -> None:
    file.unlink()
    file.mkdir()
    assert not reads(file.parent)
