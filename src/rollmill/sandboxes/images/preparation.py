"""One image in the making: layers one above the other, claimed as they are made, and named at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollmill.sandboxes.images.holds import Hold
from rollmill.sandboxes.images.layers import LayerSource, LayerStore
from rollmill.sandboxes.images.layout import Layout
from rollmill.sandboxes.images.records import ImageConfig, Layer, Manifest, StoredImage
from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.images.work import Work


class Preparation:
    """Adds layers to one image. `ImageStore.preparing` gives it, and lets its claim go at the end.

    Args:
        name: that the image will have.
        hold: the claim on what is done so far.
        layers: those of the base, the lowest first.
        config: what the base says of its programs.
        work: bounds.
        layout: of the store.
        makers: of layers.
        finish: writes manifest and name.
    """

    def __init__(
        self,
        name: str,
        *,
        hold: Hold,
        layers: tuple[Layer, ...],
        config: ImageConfig,
        work: Work,
        layout: Layout,
        makers: LayerStore,
        finish: Callable[[Manifest], StoredImage],
    ) -> None:
        self.name = name
        self.config = config
        self.work = work
        self.layers = layers
        self._hold = hold
        self._layout = layout
        self._makers = makers
        self._finish = finish

    def add(self, source: LayerSource) -> Layer:
        """Put a layer on top, made if it is not in the store.

        Raises:
            ImageError: if it is refused.
        """
        self._check_count()
        layer = self._makers.add(source, below=self.layers[::-1], work=self.work, hold=self._hold)
        self.layers = (*self.layers, layer)
        return layer

    def reuse(self, layer_id: str) -> bool:
        """Put a layer on top that the store may have; `False` if it has not."""
        self._check_count()
        with self._makers.books_open():
            layer = self._layout.read_layer(layer_id)
            if layer is None:
                return False
            self._hold.add_layer(layer_id)
        self.layers = (*self.layers, layer)
        return True

    def _check_count(self) -> None:
        most = self.work.limits.layers
        if len(self.layers) >= most:
            what = f"the image {self.name!r} has more than {most} layers (limits.layers)"
            raise refused(Refusal.TOO_MANY, f"{what}; flatten it, as by exporting a container of it")

    def _check_size(self) -> None:
        """Bound the whole: layers that were there already have passed no bound of this preparation."""
        limits = self.work.limits
        content = sum(one.facts.content_bytes for one in self.layers)
        inodes = sum(one.facts.inodes for one in self.layers)
        if content > limits.total_bytes:
            what = f"the image {self.name!r} has {content} bytes, most is {limits.total_bytes} (limits.total_bytes)"
            raise refused(Refusal.TOO_LARGE, what)
        if inodes > limits.inodes:
            what = f"the image {self.name!r} has {inodes} entries, most is {limits.inodes} (limits.inodes)"
            raise refused(Refusal.TOO_MANY, what)

    def directories(self) -> tuple[Path, ...]:
        """Return the directories of the layers so far, the uppermost first."""
        return tuple(self._makers.tree(one) for one in reversed(self.layers))

    def finish(self, config: ImageConfig | None = None) -> StoredImage:
        """Write the manifest, and give the image its name.

        Raises:
            ImageError: if it has no layer.
        """
        if not self.layers:
            raise refused(Refusal.MALFORMED, f"the image {self.name!r} would have no layer at all")
        self._check_size()
        self.work.enter("write the manifest")
        manifest = Manifest(layers=tuple(one.id for one in self.layers), config=config or self.config)
        return self._finish(manifest)
