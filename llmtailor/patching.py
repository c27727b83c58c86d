"""Functions and attributes of other libraries that are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any


def patch_method(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a function of an object, a class or a module by the decorated one, which gets the replaced one first."""

    def replace(function: Callable[..., Any]) -> None:
        stock = getattr(owner, name)

        @wraps(stock)
        def calling(*args: Any, **kwargs: Any) -> Any:
            return function(stock, *args, **kwargs)

        setattr(owner, name, calling)

    return replace


def next_call(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Do what `patch_method` does for one call only."""

    def replace(function: Callable[..., Any]) -> None:
        stock, replacing = getattr(owner, name), ExitStack()

        @wraps(stock)
        def calling(*args: Any, **kwargs: Any) -> Any:
            replacing.close()
            return function(stock, *args, **kwargs)

        replacing.enter_context(replaced(owner, name, calling))

    return replace


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give an object another attribute in this context."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # that of its class
