"""Shape annotations for public functions: `Float[Tensor, "batch nodes vocab"]`.

They are jaxtyping's where it is installed, and tests check them at run time. Where it is not installed, an annotation
is the bare type of the array, so that the package works without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["Bool", "Float", "Int", "Int8", "ProgressCallback", "Shaped"]

ProgressCallback = Callable[[str, float], None]  # (what is going on, fraction done)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Int8, Shaped
else:
    try:
        from jaxtyping import Bool, Float, Int, Int8, Shaped
    except ImportError:

        class Bool:
            """An annotation without its shape: `Bool[Tensor, "batch"]` is Tensor."""

            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Float = Int = Int8 = Shaped = Bool
