"""The law of what may go from the store, by hand."""

from __future__ import annotations

from typing import Any

from rollmill.sandboxes.images.collection import ImageStock, Inventory, Removal, choose

# Three images: `a` and `b` share `base`; sizes are powers of two, so that every sum tells what is in it.
SIZES = {"base": 1, "a1": 2, "b1": 4, "c1": 8, "stray": 16}
IMAGES = {
    "a": ImageStock(layers=("base", "a1"), used_wall_s=100.0),
    "b": ImageStock(layers=("base", "b1"), used_wall_s=200.0),
    "c": ImageStock(layers=("c1",), used_wall_s=300.0),
}


def gone(*, now_wall_s: float = 1000.0, images: Any = None, **options: Any) -> Removal:
    held = {name: frozenset(options.pop(name, ())) for name in ("held_images", "held_layers")}
    inventory = Inventory(images=IMAGES if images is None else images, layers=SIZES, **held)
    return choose(inventory, now_wall_s=now_wall_s, **options)


def test_only_a_layer_of_no_image_goes_when_there_is_room():
    assert gone() == Removal(layers=("stray",), left_bytes=15)


def test_a_held_layer_of_no_image_stays():
    assert gone(held_layers=("stray",)) == Removal(left_bytes=31)


def test_the_least_recently_used_go_first_and_a_shared_layer_goes_with_its_last_image():
    # a frees a1 (2), b frees b1 and base (5), c frees c1 (8).
    assert gone(budget_bytes=14) == Removal(images=("a",), layers=("a1", "stray"), left_bytes=13)
    assert gone(budget_bytes=12) == Removal(images=("a", "b"), layers=("a1", "b1", "base", "stray"), left_bytes=8)
    assert gone(budget_bytes=0).left_bytes == 0


def test_a_held_image_stays_with_its_layers_and_the_rest_of_the_budget_is_missed():
    removal = gone(budget_bytes=0, held_images=("b",))
    assert removal == Removal(images=("a", "c"), layers=("a1", "c1", "stray"), left_bytes=5, over_bytes=5)


def test_an_image_whose_layers_are_all_held_is_spared():
    removal = gone(budget_bytes=0, held_layers=("base", "a1"))
    assert removal.images == ("b", "c")
    assert removal.left_bytes == removal.over_bytes == 3


def test_an_image_without_a_name_goes_after_the_grace_and_not_before():
    images = {**IMAGES, "old": ImageStock(layers=("stray",), used_wall_s=500.0, named=False)}
    assert gone(images=images, grace_s=501.0).images == ()
    assert gone(images=images, grace_s=500.0) == Removal(images=("old",), layers=("stray",), left_bytes=15)
    assert gone(images=images, grace_s=0.0, held_images=("old",)).images == ()


def test_what_somebody_wants_gone_goes_unless_it_is_held():
    assert gone(remove=["c"]).images == ("c",)
    assert gone(remove=["c"], held_images=("c",)).images == ()
    assert gone(remove=["unknown"]).images == ()


def test_a_manifest_that_names_a_missing_layer_does_no_harm():
    images = {"x": ImageStock(layers=("nowhere",), used_wall_s=1.0)}
    assert gone(images=images, budget_bytes=0, held_images=("x", "y")).left_bytes == 0
