"""The options of the engine and of speculation, as frozen values.

This file decides names, defaults and bounds, also for the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from forerun.errors import InvalidRequest
from forerun.limits import INT64, refusal, shown, whole
from forerun.shape import MOST_DEPTH, MOST_NODES, MOST_WIDTH, StaticTree

Verification = Literal["coupled", "token", "block"]
VERIFICATIONS: tuple[Verification, ...] = ("coupled", "token", "block")
Quantization = Literal["int8", "int4", "fp8"]
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4", "fp8")
CPU_QUANTIZATIONS = QUANTIZATIONS[:2]
KernelChoice = Literal["auto", "native", "torch"]
KERNEL_CHOICES: tuple[KernelChoice, ...] = ("auto", "native", "torch")
AUTO: Literal["auto"] = "auto"
MOST_COUNT = 2**53  # of bytes, tokens or sequences: exact in float64, and products with small sizes fit 64 bits
MOST_THREADS = 1024  # of a process; torch crashes with many more
AUTO_DEPTH = 16  # the maximum depth if the depth is chosen automatically
DEFAULT_DEPTH = 4


def require_whole(name: str, value: object, least: int, most: int = MOST_COUNT) -> None:
    """Raise InvalidRequest unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequest(name, f"{shown(value)} must be a whole number of at least {least}.")
    if value > most:
        raise InvalidRequest(name, f"{shown(value)} must be at most {most}.")


def require_url(name: str, text: str) -> None:
    """Raise InvalidRequest unless a text begins like the URL of a server."""
    if not text.startswith(("http://", "https://")):
        raise InvalidRequest(name, f"{shown(text)} is not a URL: begin it with http:// or https://.")


@dataclass(frozen=True, slots=True, init=False)
class Speculation:
    """How a request is drafted: chains of `depth` tokens or, if `width` > 1, trees of at most `nodes` draft tokens.

    With the depth "auto", the default, the engine chooses the depth of each round from measured gain and cost, down to
    0; with `auto=True` a number is the maximum. Otherwise a number is the depth of every round.

    The nodes of a tree are chosen in every round, by probability; with `tree` its shape is fixed, and sets depth, width
    and nodes. `drafter` names a member of the engine's mix; None leaves the choice to the engine.

    `depth` and `width` are at most 256. `nodes` may exceed the size of a tree of this depth and width; None means
    `width` times the depth. A tree has at most 512 nodes. Raises InvalidRequest naming the field.
    """

    depth: int  # with `auto` the maximum
    width: int
    nodes: int | None
    drafter: str | None
    tree: StaticTree | None
    auto: bool

    def __init__(
        self,
        depth: int | Literal["auto"] = AUTO,
        width: int = 1,
        nodes: int | None = None,
        drafter: str | None = None,
        tree: StaticTree | None = None,
        auto: bool = False,
    ) -> None:
        if isinstance(depth, str) and depth == AUTO:
            depth, auto = AUTO_DEPTH if tree is None else DEFAULT_DEPTH, True
        values = {"depth": depth, "width": width, "nodes": nodes, "drafter": drafter, "tree": tree}
        for name, value in (values | {"auto": auto and tree is None}).items():
            object.__setattr__(self, name, value)
        for name, least, most in (("depth", 0, MOST_DEPTH), ("width", 1, MOST_WIDTH), ("nodes", 1, INT64)):
            value = getattr(self, name)
            if name != "nodes" or value is not None:
                first = "use auto, or" if name == "depth" else "use"
                fix = f"{first} a whole number from {least} to {MOST_NODES if name == 'nodes' else most}"
                object.__setattr__(self, name, whole(f"speculation.{name}", value, fix, least, most))
        if self.tree is not None:
            self._take_shape(self.tree)
        if self.nodes is not None and self.nodes_within(self.depth) > MOST_NODES:
            raise refusal("speculation.nodes", self.nodes, f"use at most {MOST_NODES}, or a smaller depth or width")
        if self.drafter is not None and not isinstance(self.drafter, str):
            fix = f"use {shown(None)}, or the name of a member of the drafter"
            raise refusal("speculation.drafter", self.drafter, fix)

    @property
    def shown_depth(self) -> int | str:
        """The depth as users write it."""
        return AUTO if self.auto else self.depth

    def nodes_within(self, depth: int) -> int:
        """The largest number of draft tokens of a tree with this `depth`."""
        if self.width == 1:
            return min(depth, depth if self.nodes is None else self.nodes)
        limit = min(depth * self.width, MOST_NODES) if self.nodes is None else self.nodes
        level, full_tree = 1, 0
        for _ in range(depth):
            level *= self.width
            full_tree += level
            if full_tree >= limit:
                return limit
        return full_tree

    def _take_shape(self, tree: object) -> None:
        """Set depth, width and nodes to those of a static tree; values that the user has given must agree."""
        if not isinstance(tree, StaticTree):
            raise refusal("speculation.tree", tree, "use a StaticTree; StaticTree.load reads a file")
        of_tree = {"depth": tree.depth, "width": tree.width, "nodes": len(tree.paths)}
        defaults = {"depth": DEFAULT_DEPTH, "width": 1, "nodes": None}
        for name, value in of_tree.items():
            if (current := getattr(self, name)) not in (value, defaults[name]):
                raise InvalidRequest(f"speculation.{name}", f"{current} is not the tree's, {value}: leave it out.")
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, option: bool | int | str | Speculation | None, default: Speculation) -> Speculation:
        """A request's speculation: None or True is the default, False no drafting, a number or "auto" a depth."""
        if option is None or option is True:
            return default
        if isinstance(option, Speculation):
            return option
        if option is False:
            return cls(depth=0)
        if not isinstance(option, Integral):
            if isinstance(option, str) and option == AUTO:
                return cls()
            words = ", ".join(map(shown, (True, False, AUTO)))
            raise refusal("speculation", option, f"use {words}, a depth, or a Speculation (in JSON an object)")
        return cls(depth=option)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of batching and verification.

    `max_num_seqs` is the batch size, `chunk_tokens` the largest number of prompt tokens in one pass; "auto" adapts it
    so that short prompts do not wait long for a pass. `verification` is "coupled" (the same seed gives the same tokens
    as plain decoding), or "token" or "block" (the same distribution, by rejection sampling; accepts more at high
    temperatures). With `prefix_cache` common prefixes of a tenant's texts are prefilled once, if memory allows; answers
    do not change.
    """

    max_num_seqs: int = 16
    chunk_tokens: int | Literal["auto"] = 512
    verification: Verification = "coupled"
    speculation: Speculation = Speculation()
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        require_whole("max_num_seqs", self.max_num_seqs, 1)
        if self.chunk_tokens != AUTO:
            require_whole("chunk_tokens", self.chunk_tokens, 1)
        if not isinstance(self.prefix_cache, bool):
            raise InvalidRequest("prefix_cache", f"{shown(self.prefix_cache)} must be True or False.")
        if self.verification not in VERIFICATIONS:
            raise InvalidRequest(
                "verification", f"{shown(self.verification)} must be one of {', '.join(VERIFICATIONS)}."
            )
