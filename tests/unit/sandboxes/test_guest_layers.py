"""How one layer is laid over another, as files of this machine; no sandbox runs."""

import errno
import os
import stat

import pytest

from rollmill.sandboxes.guest.layers import is_whiteout, lay, remove


def whiteout(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, 0)
    except PermissionError:
        pytest.skip("this user may make no whiteouts here")


def opaque(path):
    try:
        os.setxattr(path, "user.overlay.opaque", b"y")
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("the file system of the tests has no extended attributes")


@pytest.fixture
def upper(tmp_path):
    path = tmp_path / "upper"
    path.mkdir()
    return path


@pytest.fixture
def lower(tmp_path):
    path = tmp_path / "lower"
    path.mkdir()
    return path


def laid(upper, lower):
    flags = os.O_RDONLY | os.O_DIRECTORY
    source, target = os.open(upper, flags), os.open(lower, flags)
    try:
        lay(source, target)
    finally:
        os.close(source)
        os.close(target)


def test_files_of_the_upper_layer_win_and_the_others_stay(upper, lower):
    (lower / "d").mkdir()
    (lower / "d/both").write_bytes(b"lower")
    (lower / "d/old").write_bytes(b"old")
    (upper / "d").mkdir(mode=0o750)
    (upper / "d/both").write_bytes(b"upper")
    (upper / "d/both").chmod(0o640)
    os.utime(upper / "d/both", ns=(1, 2))
    laid(upper, lower)
    assert (lower / "d/both").read_bytes() == b"upper"
    assert (lower / "d/old").read_bytes() == b"old"
    found = (lower / "d/both").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o640, 2)
    assert stat.S_IMODE((lower / "d").stat().st_mode) == 0o750


def test_a_whiteout_takes_the_place_of_what_it_hides_and_stays_for_what_is_below(upper, lower):
    (lower / "file").write_bytes(b"x")
    (lower / "tree/deep").mkdir(parents=True)
    for name in ("file", "tree", "of_the_image"):
        whiteout(upper / name)
    laid(upper, lower)
    for name in ("file", "tree", "of_the_image"):
        assert is_whiteout((lower / name).lstat())


def test_a_directory_over_a_whiteout_or_a_file_lets_nothing_of_below_through(upper, lower):
    whiteout(lower / "was_removed")
    (lower / "was_file").write_bytes(b"x")
    for name in ("was_removed", "was_file"):
        (upper / name).mkdir()
        (upper / name / "new").write_bytes(b"new")
    laid(upper, lower)
    for name in ("was_removed", "was_file"):
        assert (lower / name / "new").read_bytes() == b"new"
        assert os.getxattr(lower / name, "user.overlay.opaque") == b"y"


def test_an_opaque_directory_hides_what_was_in_it_and_stays_opaque(upper, lower):
    (lower / "d").mkdir()
    (lower / "d/old").write_bytes(b"old")
    (upper / "d").mkdir()
    opaque(upper / "d")
    (upper / "d/new").write_bytes(b"new")
    laid(upper, lower)
    assert os.listdir(lower / "d") == ["new"]
    assert os.getxattr(lower / "d", "user.overlay.opaque") == b"y"


def test_a_directory_that_was_opaque_below_stays_so_under_one_that_is_not(upper, lower):
    (lower / "d").mkdir()
    opaque(lower / "d")
    (upper / "d").mkdir()
    laid(upper, lower)
    assert os.getxattr(lower / "d", "user.overlay.opaque") == b"y"


def test_hard_links_of_a_layer_stay_one_file(upper, lower):
    (upper / "d").mkdir()
    (upper / "a").write_bytes(b"x")
    os.link(upper / "a", upper / "d/b")
    os.link(upper / "a", upper / "c")
    (lower / "c").write_bytes(b"in the way")
    laid(upper, lower)
    assert len({os.stat(lower / name).st_ino for name in ("a", "c", "d/b")}) == 1
    assert os.stat(lower / "a").st_nlink == 3


def test_links_pipes_and_sockets_are_made_again_and_no_link_is_followed(upper, lower, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"untouched")
    (upper / "link").symlink_to(outside)
    (upper / "to_file").symlink_to(outside / "secret")
    os.mkfifo(upper / "pipe", 0o600)
    os.mknod(upper / "socket", stat.S_IFSOCK | 0o600)
    (upper / "d").mkdir()
    (upper / "d/secret").write_bytes(b"changed")
    (lower / "d").symlink_to(outside)  # a layer below has a link where this one has a directory
    (upper / "to_file2").write_bytes(b"changed")
    (lower / "to_file2").symlink_to(outside / "secret")
    laid(upper, lower)
    assert os.readlink(lower / "link") == str(outside)
    assert stat.S_ISFIFO((lower / "pipe").lstat().st_mode)
    assert stat.S_ISSOCK((lower / "socket").lstat().st_mode)
    assert (lower / "d/secret").read_bytes() == b"changed"
    assert not (lower / "d").is_symlink()
    assert (outside / "secret").read_bytes() == b"untouched"
    assert os.listdir(outside) == ["secret"]


def test_holes_of_a_file_are_not_filled(upper, lower):
    with open(upper / "sparse", "wb") as stream:
        stream.seek(1 << 40)
        stream.write(b"end")
        stream.truncate(1 << 41)
    laid(upper, lower)
    found = (lower / "sparse").stat()
    assert found.st_size == 1 << 41
    assert found.st_blocks * 512 < 1 << 20
    with open(lower / "sparse", "rb") as stream:
        stream.seek(1 << 40)
        assert stream.read(3) == b"end"


def test_extended_attributes_are_kept_and_the_overlays_own_are_not(upper, lower):
    (upper / "f").write_bytes(b"x")
    opaque(upper)
    os.removexattr(upper, "user.overlay.opaque")
    os.setxattr(upper / "f", "user.mine", b"1")
    os.setxattr(upper / "f", "user.overlay.origin", b"\0" * 30)
    laid(upper, lower)
    assert os.listxattr(lower / "f") == ["user.mine"]


def nest(directory, *, depth):
    """Make a chain of directories that is deeper than a path can name, with two names of one file at its ends."""
    (directory / "first").write_bytes(b"deep")
    at = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 50, dir_fd=at)
        inner = os.open("d" * 50, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    top = os.open(directory, os.O_RDONLY)
    os.link("first", "last", src_dir_fd=top, dst_dir_fd=at)
    os.close(top)
    os.close(at)


def count(directory):
    depth, at = 0, os.open(directory, os.O_RDONLY)
    while (names := [name for name in os.listdir(at) if name.startswith("d")]) != []:
        inner = os.open(names[0], os.O_RDONLY, dir_fd=at)
        os.close(at)
        at, depth = inner, depth + 1
    linked = os.stat("last", dir_fd=at).st_nlink
    os.close(at)
    return depth, linked


def test_no_depth_is_too_deep_to_be_laid_or_removed(upper, lower):
    nest(upper, depth=1500)
    laid(upper, lower)
    laid(upper, lower)  # once more over what is there
    assert count(lower) == (1500, 2)
    for directory in (upper, lower):
        at = os.open(directory, os.O_RDONLY)
        remove("d" * 50, at)
        os.close(at)
        assert os.listdir(directory) == ["first"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owners_are_kept(upper, lower):
    (upper / "f").write_bytes(b"x")
    (upper / "l").symlink_to("f")
    for name in ("f", "l"):
        os.chown(upper / name, 1_900_001_000, 1_900_001_001, follow_symlinks=False)
    os.chown(upper, 1_900_000_000, 1_900_000_000)
    laid(upper, lower)
    for name, owner in (("f", (1_900_001_000, 1_900_001_001)), ("l", (1_900_001_000, 1_900_001_001))):
        found = (lower / name).lstat()
        assert (found.st_uid, found.st_gid) == owner
    assert lower.stat().st_uid == 1_900_000_000
