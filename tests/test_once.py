"""What is worked out once: by identity, and never for a thing that is no more."""

from __future__ import annotations

from nanum.once import Once


def test_equal_things_are_not_the_same_thing() -> None:
    once: Once[int] = Once()
    first, second = [1], [1]
    assert [once((x,), lambda x=x: id(x)) for x in (first, second, first)] == [id(first), id(second), id(first)]  # type: ignore[misc]


def test_a_thing_that_nobody_else_holds_is_not_taken_for_the_next() -> None:
    once: Once[int] = Once()
    assert [once(([i],), lambda i=i: i) for i in range(1000)] == list(range(1000))  # type: ignore[misc]


def test_results_are_made_once() -> None:
    once: Once[object] = Once()
    key = (object(), "gather")
    assert once(key, object) is once(key, object)
    assert once((*key, 1), object) is not once(key, object)


def test_a_bounded_memory_lets_the_oldest_go() -> None:
    once: Once[int] = Once(at_most=2)
    things = [object(), object(), object()]
    for i, thing in enumerate(things):
        once((thing,), lambda i=i: i)  # type: ignore[misc]
    assert [once((thing,), lambda: -1) for thing in (things[2], things[1], things[0])] == [2, 1, -1]
