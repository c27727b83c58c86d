"""Functions of other libraries that are replaced by one that calls them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a function of an object, a class or a module by the decorated one, which gets the replaced one first."""

    def replace(function: Callable[..., Any]) -> None:
        stock = getattr(owner, name)

        @wraps(stock)
        def calling(*args: Any, **kwargs: Any) -> Any:
            return function(stock, *args, **kwargs)

        setattr(owner, name, calling)

    return replace
