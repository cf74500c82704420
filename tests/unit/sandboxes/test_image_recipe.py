"""Recipes: what fits together, what is refused, and what a step's name depends on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollmill.errors import ImageError
from rollmill.sandboxes.images.recipe import Beside, Build, Step, digest_of, key_of, parse, read
from rollmill.sandboxes.images.refusals import Refusal

WHOLE = """
base = "debian-12"

[build]
memory_mib = 512

[[step]]
file = "/opt/app/main.py"
source = "main.py"
mode = "0600"

[[step]]
pip = ["numpy==2.1.0"]
wheels = "wheels"

[[step]]
run = ["sh", "-c", "make"]
env = { LANG = "C.UTF-8" }
cwd = "/opt/app"
timeout_s = 60.0
"""


def test_a_recipe_is_a_base_and_steps_in_order():
    recipe = parse(WHOLE)
    assert (recipe.base, recipe.build) == ("debian-12", Build(memory_mib=512))
    assert [step.what() for step in recipe.step] == ["file /opt/app/main.py", "pip numpy==2.1.0", "run sh -c make"]


def test_the_recipe_of_the_page_is_one():
    page = (Path(__file__).parents[3] / "docs/how-to/sandboxes.md").read_text(encoding="utf-8")
    block = page.partition("```text\nbase = ")[2].partition("```")[0]
    assert [step.what().split()[0] for step in parse(f"base = {block}").step] == ["file", "pip", "run"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "makes nothing"),
        ("base = 1", "cannot be read"),
        ("bse = 'x'", "unknown field `bse`"),
        ("base = ", "cannot be read"),
        ("base = 'x'\n[[step]]", "it has none of file, pip and run"),
        ("base = 'x'\n[[step]]\nrun = ['a']\npip = ['b']", "it has pip and run of"),
        ("base = 'x'\n[[step]]\nrun = []", "is no command"),
        ("base = 'x'\n[[step]]\nrun = ['a']\nwheels = 'w'", "wheels means nothing for run"),
        ("base = 'x'\n[[step]]\nrun = ['a']\nnetwork = true", "no backend gives builds one"),
        ("base = 'x'\n[[step]]\nrun = ['a']\ntimeout_s = 0.0", "must be above 0"),
        ("[[step]]\nrun = ['a']", "run needs a base"),
        ("base = 'x'\n[[step]]\npip = ['a']", "pip download --only-binary :all: -d wheels a"),
        ("base = 'x'\n[[step]]\npip = ['--index-url=x']\nwheels = 'w'", "are not packages"),
        ("base = 'x'\n[[step]]\npip = []\nwheels = 'w'", "are not packages"),
        ("[[step]]\nfile = '/a'", "either a source or a text"),
        ("[[step]]\nfile = '/a'\ntext = ''\nsource = 'b'", "either a source or a text"),
        ("[[step]]\nfile = 'a'\ntext = ''", "is not absolute"),
        ("[[step]]\nfile = '/'\ntext = ''", "is not absolute"),
        ("[[step]]\nfile = '/a'\ntext = ''\nmode = '4755'", "no octal number up to 0777"),
        ("[[step]]\nfile = '/a'\ntext = ''\nmode = 'rw'", "no octal number up to 0777"),
        ("[[step]]\nfile = '/a'\ntext = ''\nenv = { A = 'b' }", "env means nothing for file"),
        ("base = 'x'\n" + "[[step]]\nrun = ['a']\n" * 101, "101 steps, most is 100"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused_with_what_is_wrong(text, words):
    with pytest.raises(ImageError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert caught.value.reason == Refusal.RECIPE.value


@pytest.mark.parametrize("data", [b"\xff", b"#" * (1024**2 + 1)])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, data):
    (tmp_path / "r.toml").write_bytes(data)
    for path in (tmp_path / "r.toml", tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ImageError) as caught:
            read(path)
        assert caught.value.reason == Refusal.RECIPE.value


# -- files beside it --------------------------------------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path: Path) -> Beside:
    place = tmp_path / "recipe"
    (place / "tree/in").mkdir(parents=True)
    (place / "main.py").write_text("print(1)\n", encoding="ascii")
    (place / "main.py").chmod(0o750)
    (place / "tree/in/f").write_text("x", encoding="ascii")
    os.link(place / "tree/in/f", place / "tree/in/g")
    (tmp_path / "secret").write_text("secret", encoding="ascii")
    (place / "link").symlink_to(tmp_path / "secret")
    (place / "out").symlink_to(tmp_path)
    return Beside(place)


def listed(beside: Beside, step: Step) -> list[tuple[str, int, bytes]]:
    return [(entry.path.decode(), entry.mode, content.read(100)) for entry, content in beside.entries(step)]


def test_a_file_comes_with_its_mode_or_the_one_that_is_given_and_without_its_time(beside):
    step = Step(file="/opt/main.py", source="main.py")
    assert listed(beside, step) == [("opt/main.py", 0o750, b"print(1)\n")]
    assert listed(beside, Step(file="/m", source="main.py", mode="600")) == [("m", 0o600, b"print(1)\n")]
    assert listed(beside, Step(file="/m", text="text")) == [("m", 0o644, b"text")]
    before = digest_of(beside.entries(step))
    os.utime(beside.directory("tree") / "../main.py", (1, 1))
    assert digest_of(beside.entries(step)) == before


def test_a_directory_comes_whole_at_its_new_place(beside):
    found = [(e.path, e.link) for e, _ in beside.entries(Step(file="/opt/t/", source="tree"))]
    assert found == [(b"opt/t", b""), (b"opt/t/in", b""), (b"opt/t/in/f", b""), (b"opt/t/in/g", b"opt/t/in/f")]


@pytest.mark.parametrize(
    "source", ["link", "out/secret", "../secret", "/etc/passwd", "missing", "", "tree/../../secret"]
)
def test_what_does_not_lie_beside_the_recipe_is_not_taken_in(beside, source):
    with pytest.raises(ImageError) as caught:
        listed(beside, Step(file="/x", source=source))
    assert caught.value.reason in (Refusal.RECIPE.value, Refusal.TRAVERSAL.value, Refusal.NAME.value)


@pytest.mark.parametrize("name", ["out", "..", "/", "main.py"])
def test_a_directory_elsewhere_is_refused(beside, name):
    with pytest.raises(ImageError):
        beside.directory(name)


def test_the_name_of_a_step_depends_on_its_words_on_its_files_and_on_what_lies_below():
    step = Step(run=("make",), env={"A": "1", "B": "2"})
    name = key_of(step, below=["x"], inputs="")
    assert name == key_of(Step(run=("make",), env={"B": "2", "A": "1"}), below=["x"], inputs="")
    others = [
        key_of(Step(run=("make",), env={"A": "1", "B": "3"}), below=["x"], inputs=""),
        key_of(step, below=["y"], inputs=""),
        key_of(step, below=["x"], inputs="z"),
        key_of(step, below=["x", "y"], inputs=""),
    ]
    assert len({name, *others}) == 5
