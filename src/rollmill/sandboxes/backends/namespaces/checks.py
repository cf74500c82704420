"""What namespace sandboxes refuse before they start, and how a start that failed is explained."""

from __future__ import annotations

import errno
import os

from rollmill.errors import ConfigError, ImageError, IsolationError, SandboxError, SandboxRetryable
from rollmill.sandboxes.backends.namespaces.channel import SetupFailed
from rollmill.sandboxes.isolation import WORDS, Protection
from rollmill.sandboxes.records import DirectoryImage, Image, SandboxSpec

_RETRY_AFTER_S = 1.0
_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE)
_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)
_BAD_PATHS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)
# To show the host's would undo what keeps the sandbox away from it.
_OWN_DIRECTORIES = ("", "proc", "sys", "dev")


def check_spec(spec: SandboxSpec) -> None:
    """Refuse a spec before anything is started.

    Raises:
        ImageError: if something that it names is not there.
        ConfigError: if something is to be shown where a sandbox has its own.
    """
    check_image(spec.image)
    for path in spec.expose:
        if not path.startswith("/") or not os.path.exists(path):
            raise ImageError(f"{path!r} is to be shown in the sandbox and is no absolute path of something that exists")
        top = os.path.normpath(path).split("/")[1]
        if top in _OWN_DIRECTORIES:
            raise ConfigError(
                f"{path!r} cannot be shown in a sandbox: /{top} is its own. Name a directory below another."
            )


def check_image(image: Image) -> None:
    """Refuse an image that cannot be used.

    Raises:
        ImageError: if directories of it are not there.
    """
    if not isinstance(image, DirectoryImage):
        return
    if not image.layers:
        raise ImageError("an image of no directories is no image; give at least one")
    for path in image.layers:
        if not path.startswith("/") or not os.path.isdir(path):
            raise ImageError(f"the layer {path!r} is no absolute path of a directory; was the image unpacked here?")


def explain_failure(error: SetupFailed, *, sandbox_id: str) -> SandboxError | IsolationError:
    """Return the error of a set-up that failed: whose fault it is, and what to do."""
    what = f"sandbox {sandbox_id} could not be set up, at the step {error.step!r}: {error}"
    if error.errno in _NO_ROOM:
        return SandboxRetryable(
            f"{what}. The machine, or this user's namespaces (user.max_*_namespaces), are used up, or limits are "
            "too small for an empty sandbox.",
            after_s=_RETRY_AFTER_S,
        )
    if error.step == "mount the root" and error.errno in _BAD_PATHS:
        return ImageError(f"{what}. A directory of the image, or a path to be shown, cannot be reached.")
    if error.errno in _REFUSALS:
        advice = WORDS[Protection.NAMESPACES][1]
        return IsolationError(
            f"{what}. The kernel refuses it, and nothing was started without it. {advice}. Inside a container, let "
            "its seccomp profile allow this and do not mask its /proc. `rollmill sandbox doctor` says more."
        )
    return SandboxError(what)
