"""The same items in the same order, few ahead, errors raised here, and no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from recsys_basis.batches.prefetch import prefetch


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


class Source:
    """0, 1, ... ``count`` - 1; keeps count of those made, and of the thread that made them."""

    def __init__(self, count: int, fails: bool = False) -> None:
        self.count, self.fails = count, fails
        self.made = 0
        self.makers: set[str] = set()
        self.progress = threading.Condition()

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            with self.progress:
                self.makers.add(threading.current_thread().name)
                self.made += 1
                self.progress.notify()
            yield number
        if self.fails:
            raise OSError("row group 7 cannot be read")

    def wait_for(self, made: int) -> None:
        with self.progress:
            assert self.progress.wait_for(lambda: self.made >= made, timeout=20)


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_the_same_items_in_the_same_order(ahead: int) -> None:
    source = Source(20)
    assert list(prefetch(source, ahead)) == list(range(20))
    assert not threads()
    assert any(name.startswith("prefetch") for name in source.makers) == (ahead > 0)
    assert len(source.makers) == 1


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_thread_makes_just_so_many_ahead(ahead: int) -> None:
    source = Source(20)
    with closing(prefetch(source, ahead)) as items:
        for number in items:
            source.wait_for(min(number + 1 + ahead, 20))  # while this item is in use
            assert source.made <= number + 1 + ahead


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_an_error_comes_in_place_of_the_item_that_was_being_made(ahead: int) -> None:
    seen = []
    with (
        pytest.raises(OSError, match="row group 7"),
        closing(prefetch(Source(5, fails=True), ahead)) as items,
    ):
        for number in items:
            seen.append(number)
    assert seen == list(range(5))
    assert not threads()


def test_leaving_early_ends_the_thread_without_making_the_rest() -> None:
    source = Source(10**9)
    with pytest.raises(ZeroDivisionError), closing(prefetch(source, 4)) as items:
        for number in items:
            assert threads()
            if number == 2:
                raise ZeroDivisionError
    assert not threads()
    assert source.made <= 2 + 1 + 4
