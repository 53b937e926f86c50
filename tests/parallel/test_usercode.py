"""What a user's file may do wrong is told in the user's terms: the file, the function, the line, and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from supernode.errors import DataError, ModelError
from supernode.parallel.usercode import build_user_data, build_user_model, load_function

GOOD = """
import torch
from torch import nn
from neighbour import WIDTH

def build(): return nn.Linear(WIDTH, 2)
def raises(): raise RuntimeError("no weights at hand")
def quits():
    import sys
    sys.exit(3)
def nothing(): return None
def kind(): return nn.Linear
def lazy(): return nn.LazyLinear(3)
def meta(): return nn.Linear(2, 2, device="meta")
def frozen():
    model = nn.Linear(2, 2)
    model.requires_grad_(False)
    return model
def empty_model(): return nn.Identity()
def wants_more(width): return nn.Linear(width, 2)
not_a_function = 3

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter([])

class NoLength:
    def __getitem__(self, index): return index

class BadLength(NoLength):
    def __len__(self): raise NotImplementedError("length unknown")

def stream(): return Stream()
def no_length(): return NoLength()
def bad_length(): return BadLength()
def generator(): return (pair for pair in [])
def empty(): return []
def pairs(): return [(1, 2)]
def loader(): return torch.utils.data.DataLoader([(1, 2), (3, 4)], batch_size=2)
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    (tmp_path / "net.py").write_text(GOOD)
    return tmp_path / "net.py"


def test_the_function_is_called_and_its_module_returned(user: Path) -> None:
    model = build_user_model(f"{user}:build")

    assert isinstance(model, nn.Linear)
    assert model.in_features == 3


def test_a_file_is_imported_once_and_finds_its_neighbours_later_too(user: Path) -> None:
    user.write_text(
        "import torch\nclass Shared: pass\ndef one():\n    import late\n    return late.X\ndef two(): return Shared\n"
    )
    (user.parent / "late.py").write_text("X = 4\n")

    late = load_function(f"{user}:one", key="model", error=ModelError)()
    kinds = {load_function(f"{user}:two", key=key, error=ModelError)() for key in ("model", "data.dataset")}

    assert late == 4
    assert len(kinds) == 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", r"raised RuntimeError: no weights at hand \(net\.py, line 7\)"),
        ("quits", "raised SystemExit"),
        ("nothing", "returned a NoneType"),
        ("kind", "returned a type"),
        ("lazy", "leaves `weight` without values"),
        ("meta", "leaves `weight` without values"),
        ("frozen", "no parameter to train"),
        ("empty_model", "no parameter to train"),
        ("wants_more", "raised TypeError"),
        ("not_a_function", "no function `not_a_function`"),
    ],
)
def test_a_function_that_returns_no_model_is_named(user: Path, function: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        build_user_model(f"{user}:{function}")

    assert str(user) in caught.value.message
    assert caught.value.hint


def test_a_misspelt_function_is_guessed(user: Path) -> None:
    with pytest.raises(ModelError, match="no function `biuld`") as caught:
        build_user_model(f"{user}:biuld")

    assert "did you mean `build`" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"import nowhere_to_be_found", "fails at import: ModuleNotFoundError"),
        (b"def build(:\n", "fails at import: SyntaxError"),
        (b"raise SystemExit('bye')", "fails at import: SystemExit"),
        (b"x = \xff", "fails at import: SyntaxError"),
        (b"a\0b", "fails at import: "),
        (b"", "has no function"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "broken.py"
    file.write_bytes(content)

    with pytest.raises(ModelError, match=words) as caught:
        load_function(f"{file}:build", key="model", error=ModelError)

    assert "broken.py" in caught.value.message
    assert "`model`" in caught.value.hint


@pytest.mark.parametrize("name", ["none.py", "."])
def test_a_file_that_is_not_there_is_named_with_its_key(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"`data\.dataset` names .* no file"):
        load_function(f"{tmp_path / name}:build", key="data.dataset", error=DataError)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("stream", "without `__len__`"),
        ("no_length", "without `__len__`"),
        ("bad_length", "length"),
        ("generator", "without `__len__`"),
        ("empty", "empty data set"),
        ("raises", "no weights at hand"),
        ("nothing", "returned a NoneType"),
    ],
)
def test_a_data_set_that_cannot_be_taken_up_again_is_refused(user: Path, function: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        build_user_data(f"{user}:{function}", key="data.dataset")

    assert caught.value.hint


def test_a_data_loader_stands_for_its_data_set(user: Path) -> None:
    assert build_user_data(f"{user}:loader", key="data.dataset") == [(1, 2), (3, 4)]
    assert len(build_user_data(f"{user}:pairs", key="data.dataset")) == 1
