"""One claim for each image in use, whoever asks how often and is cancelled when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from image_builders import add_tars, file, new_store, tar
from rollmill.errors import ImageError
from rollmill.sandboxes.images import ImageStore, ImageStoreSettings
from rollmill.sandboxes.images.uses import ImageUses

ONE, TWO = tar(file("one")), tar(file("two"))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return new_store(tmp_path / "store")


@pytest.fixture
def run(store: ImageStore) -> Callable[[Callable[[ImageUses], Awaitable[Any]]], None]:
    """Runs a body with uses, and sees that no claim is left when they are closed."""

    def whole(body: Callable[[ImageUses], Awaitable[Any]]) -> None:
        async def main() -> None:
            uses = ImageUses(store.settings, what="test")
            async with asyncio.timeout(10):
                await body(uses)
            await uses.close()

        asyncio.run(main())
        assert claims(store) == 0

    return whole


def claims(store: ImageStore) -> int:
    return len(list(store.layout.part("holds").iterdir()))


def test_many_users_of_one_image_make_one_claim_that_goes_with_the_last(store, run):
    add_tars(store, ONE, name="a")
    add_tars(store, ONE, name="b")

    async def body(uses: ImageUses) -> None:
        found = await asyncio.gather(*(uses.acquire("ab"[i % 2], user=str(i)) for i in range(20)))
        assert len({one.digest for one in found}) == 1
        assert claims(store) == 1
        for i in range(20):
            uses.release(str(i))
            uses.release(str(i))
            assert claims(store) == (i < 19)

    run(body)


def test_a_user_may_ask_again_and_moves_with_the_name(store, run):
    add_tars(store, ONE, name="a")

    async def body(uses: ImageUses) -> None:
        one = await uses.acquire("a", user="s")
        assert await uses.acquire("a", user="s") == one == uses.in_use("s")
        await asyncio.to_thread(add_tars, store, TWO, name="a")
        two = await uses.acquire("a", user="s")
        assert two.digest != one.digest
        assert claims(store) == 1
        uses.release("s")
        assert claims(store) == 0
        assert uses.in_use("s") is None

    run(body)


def test_a_snapshot_shares_the_image_of_its_sandbox(store, run):
    image = add_tars(store, ONE, name="a")

    async def body(uses: ImageUses) -> None:
        await uses.acquire("a", user="sandbox")
        uses.share("sandbox", to="snapshot")
        uses.share("nobody", to="other")
        uses.release("sandbox")
        assert claims(store) == 1
        with pytest.raises(ImageError, match="held by test"):
            await asyncio.to_thread(store.remove, "a")
        assert (await uses.acquire(image.digest, user="restored")).digest == image.digest
        uses.release("snapshot")
        uses.release("restored")
        assert claims(store) == 0

    run(body)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 50])
def test_whoever_is_cancelled_keeps_no_claim_and_disturbs_no_other(store, run, turns):
    add_tars(store, ONE, name="a")

    async def body(uses: ImageUses) -> None:
        calls = [asyncio.ensure_future(uses.acquire("a", user=str(i))) for i in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        calls[0].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert uses.in_use("1") == uses.in_use("2") is not None
        for i in range(3):
            uses.release(str(i))
        assert claims(store) == 0
        only = asyncio.ensure_future(uses.acquire("a", user="x"))
        for _ in range(turns):
            await asyncio.sleep(0)
        only.cancel()
        await asyncio.gather(only, return_exceptions=True)
        uses.release("x")
        while uses._taking:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert claims(store) == 0

    run(body)


def test_an_unknown_image_is_refused_each_time_until_it_is_there(store, run):
    async def body(uses: ImageUses) -> None:
        for _ in range(2):
            with pytest.raises(ImageError, match="is not in the store"):
                await uses.acquire("a", user="s")
        await asyncio.to_thread(add_tars, store, ONE, name="a")
        await uses.acquire("a", user="s")

    run(body)


def test_a_claim_for_what_is_on_a_disk_needs_no_process_and_goes_with_what_it_is_for(store):
    image = add_tars(store, ONE, name="a")

    async def first() -> None:
        uses = ImageUses(store.settings, what="test")
        await uses.pin(image.digest, holder="5eed", name="kept", what="snapshot kept")
        await uses.pin(image.digest, holder="5eed", name="kept", what="snapshot kept")  # again: the same claim
        await uses.pin(image.digest, holder="5eed", name="lost", what="snapshot lost")
        await uses.pin(image.digest, holder="0ther", name="other", what="snapshot other")
        with pytest.raises(ImageError, match="is not in the store"):
            await uses.pin("sha256:" + "0" * 64, holder="5eed", name="none", what="snapshot none")
        await uses.close()

    async def second() -> None:
        uses = ImageUses(store.settings, what="test")
        assert await uses.unpin_all_but(["kept", "never"], holder="5eed") == ("lost",)
        await uses.unpin(holder="0ther", name="other")
        assert store.collect(budget_bytes=0).images == ()
        assert store.show("a").held_by == ("snapshot kept",)
        await uses.unpin(holder="5eed", name="kept")
        await uses.unpin(holder="5eed", name="kept")
        await uses.close()

    asyncio.run(first())
    assert claims(store) == 3
    asyncio.run(second())
    assert store.collect(budget_bytes=0).images == (image.digest,)


def test_letting_go_makes_no_store_where_there_is_none(tmp_path):
    async def main() -> None:
        uses = ImageUses(ImageStoreSettings(directory=tmp_path / "none"), what="test")
        await uses.unpin(holder="5eed", name="kept")
        assert await uses.unpin_all_but([], holder="5eed") == ()
        await uses.close()

    asyncio.run(main())
    assert not (tmp_path / "none").exists()
