"""Images of sandboxes on one node: unpacked once, shared by all, kept while somebody holds them.

`ImageStore` keeps them, `prepare_image` makes them, and a sandbox names one by `NamedImage`.
"""

from rollmill.sandboxes.images.prepare import prepare_image
from rollmill.sandboxes.images.records import ImageConfig, StoredImage
from rollmill.sandboxes.images.refusals import Refusal
from rollmill.sandboxes.images.settings import ImageStoreSettings
from rollmill.sandboxes.images.sources import SourceKind
from rollmill.sandboxes.images.store import CollectReport, HeldImage, ImageStore
from rollmill.sandboxes.images.work import ImageLimits, ImageProgress

__all__ = [
    "CollectReport",
    "HeldImage",
    "ImageConfig",
    "ImageLimits",
    "ImageProgress",
    "ImageStore",
    "ImageStoreSettings",
    "Refusal",
    "SourceKind",
    "StoredImage",
    "prepare_image",
]
