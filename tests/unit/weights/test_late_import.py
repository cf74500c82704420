"""A late module runs at its first use; the table of transformers' classes is read once per installation."""

import importlib
import sys

import pytest

from rollmill.weights.late_import import installation_key, kept, late, run_late


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """A package `late_parent` whose `costly` and `other` note that they ran."""
    costly = tmp_path / "late_parent" / "costly"
    costly.mkdir(parents=True)
    (tmp_path / "late_parent" / "__init__.py").write_text("runs = []\n")
    (costly / "__init__.py").write_text("import late_parent\nlate_parent.runs.append('costly')\nanswer = 42\n")
    (costly / "part.py").write_text("import late_parent\nlate_parent.runs.append('part')\n")
    (tmp_path / "late_parent" / "other.py").write_text(
        "import late_parent\nlate_parent.runs.append('other')\nfrom late_parent.costly import answer\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("late_parent")
    for name in [name for name in sys.modules if name.startswith("late_parent")]:
        del sys.modules[name]


def test_a_late_module_runs_once_at_the_first_use_of_a_name_after_the_block(parent):
    with late(["late_parent.costly"]):
        importlib.import_module("late_parent.costly")
    assert parent.runs == []
    assert (parent.costly.answer, parent.costly.answer) == (42, 42)
    assert parent.runs == ["costly"]


def test_a_late_package_runs_before_its_submodule(parent):
    with late(["late_parent.costly"]):
        importlib.import_module("late_parent.costly")
    importlib.import_module("late_parent.costly.part")
    assert parent.runs == ["costly", "part"]


def test_a_submodule_that_its_late_package_imports_itself_runs_once(parent):
    costly = importlib.import_module("pathlib").Path(parent.__file__).parent / "costly"
    (costly / "__init__.py").write_text("import late_parent\nlate_parent.runs.append('costly')\nfrom . import part\n")
    with late(["late_parent.costly"]):
        importlib.import_module("late_parent.costly")
    part = importlib.import_module("late_parent.costly.part")
    assert parent.runs == ["costly", "part"]
    assert parent.costly.part is part is sys.modules["late_parent.costly.part"]
    assert part.__spec__ is not None
    assert importlib.reload(part) is part


def test_a_late_module_that_another_one_needs_runs_then(parent):
    with late(["late_parent.costly", "late_parent.other"]):
        importlib.import_module("late_parent.costly")
        importlib.import_module("late_parent.other")
    run_late(["late_parent.other", "late_parent.costly", "late_parent.absent"])
    assert parent.runs == ["other", "costly"]


def test_a_module_that_was_imported_before_stays_as_it_is(parent):
    before = importlib.import_module("late_parent.costly")
    with late(["late_parent.costly"]):
        assert importlib.import_module("late_parent.costly") is before
    assert parent.runs == ["costly"]


def test_after_the_block_imports_are_as_usual(parent):
    with late(["late_parent.costly"]):
        pass
    importlib.import_module("late_parent.costly")
    assert parent.runs == ["costly"]


def test_a_missing_name_of_a_late_module_is_an_attribute_error(parent):
    with late(["late_parent.costly"]):
        importlib.import_module("late_parent.costly")
    with pytest.raises(AttributeError, match="missing"):
        _ = parent.costly.missing


TABLE = {"llama": {frozenset({"torch"}): {"modeling_llama": {"B", "A"}}, frozenset(): {"configuration_llama": set()}}}


def counted(table):
    calls = []

    def make(path):
        calls.append(path)
        return table

    return make, calls


def test_the_table_is_made_once_and_then_read(tmp_path):
    make, calls = counted(TABLE)
    models, file = tmp_path / "models", tmp_path / "cache" / "key.json"
    assert kept(make, of=models, file=file)(models) == TABLE
    # transformers asks with the folder and with the file in it.
    assert kept(make, of=models, file=file)(str(models / "__init__.py")) == TABLE
    assert len(calls) == 1
    assert [path.name for path in file.parent.iterdir()] == ["key.json"]


def test_the_table_of_one_model_is_made_as_usual(tmp_path):
    make, calls = counted(TABLE)
    answer = kept(make, of=tmp_path / "models", file=tmp_path / "key.json")
    answer(tmp_path / "models" / "llama")
    answer(str(tmp_path / "models" / "llama" / "__init__.py"))
    assert len(calls) == 2
    assert not (tmp_path / "key.json").exists()


@pytest.mark.parametrize("content", [b"", b"[", b'["d",["a"]]', b"7", b"\xff"])
def test_a_damaged_table_is_made_again(tmp_path, content):
    make, calls = counted(TABLE)
    (tmp_path / "key.json").write_bytes(content)
    assert kept(make, of=tmp_path / "models", file=tmp_path / "key.json")(tmp_path / "models") == TABLE
    assert len(calls) == 1


def test_a_table_that_cannot_be_kept_is_given_all_the_same(tmp_path):
    make, _ = counted({"llama": {1}})
    (tmp_path / "file").write_text("no folder")
    for file in (tmp_path / "key.json", tmp_path / "file" / "key.json"):
        assert kept(make, of=tmp_path / "models", file=file)(tmp_path / "models") == {"llama": {1}}
    assert not (tmp_path / "key.json").exists()


def test_an_installation_has_one_key_and_other_folders_have_none(tmp_path):
    numpy = importlib.import_module("numpy")
    folder = importlib.import_module("pathlib").Path(numpy.__file__).parent
    assert installation_key("numpy", beside=folder) == installation_key("numpy", beside=folder) is not None
    assert installation_key("numpy", beside=tmp_path / "numpy") is None
    assert installation_key("a-package-that-is-not-there", beside=folder) is None
