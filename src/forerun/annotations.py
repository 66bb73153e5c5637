"""Shape annotations for public functions: `Float[Tensor, "batch nodes vocab"]`.

They are jaxtyping's if it is installed, and tests check them at run time. Otherwise an annotation is the type of the
array without its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["Bool", "Float", "Int", "Int8", "ProgressCallback", "Shaped"]

ProgressCallback = Callable[[str, float], None]  # (description of the work, finished fraction)

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
