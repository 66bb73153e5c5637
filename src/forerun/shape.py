"""StaticTree: a fixed shape of draft trees, as in Medusa (Cai et al., 2024).

This file decides how large drafts may be, and how a file describes a shape: each node is a path of ranks, and [0, 2] is
the third most likely draft token after the most likely one after the root.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forerun.errors import InvalidTree
from forerun.limits import shown

RankPath = tuple[int, ...]
EXAMPLE = "[[0], [1], [0, 0]]"
MOST_RANK = 255  # tokens of higher ranks are accepted too rarely to be worth their time
MOST_WIDTH = MOST_RANK + 1
MOST_DEPTH = 256  # of a draft: longer than any useful one, as each depth is a pass of a draft model
MOST_NODES = 512  # of a draft: verifying a tree takes time and memory quadratic in its nodes


@dataclass(frozen=True)
class StaticTree:
    """The nodes of a tree without the root, each as the ranks on its path; rank 0 is the drafter's most likely token.

    Paths may be given in any order; they are stored by depth. Ranks may be skipped. Raises InvalidTree if there is no
    path, or if a path is not a list of whole numbers from 0 to MOST_RANK, occurs twice, or lacks its parent.
    """

    paths: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if isinstance(self.paths, str) or not isinstance(self.paths, Sequence):
            raise InvalidTree(f"{spelled(self.paths)} is not a list of paths: write one as {EXAMPLE}")
        if not self.paths:
            raise InvalidTree(f"it has no paths: write at least one, as in {EXAMPLE}")
        if len(self.paths) > MOST_NODES:
            raise InvalidTree(f"it has {len(self.paths)} paths: write at most {MOST_NODES}")
        paths = tuple(sorted((checked(path) for path in self.paths), key=lambda path: (len(path), path)))
        known: set[RankPath] = {()}
        for path in paths:
            if path in known:
                raise InvalidTree(f"the path {spelled(path)} occurs twice: leave one out")
            if path[:-1] not in known:
                missing = next(path[:end] for end in range(1, len(path)) if path[:end] not in known)
                raise InvalidTree(f"the path {spelled(path)} has no parent: add {spelled(missing)}")
            known.add(path)
        object.__setattr__(self, "paths", paths)

    @classmethod
    def load(cls, path: str | Path) -> StaticTree:
        """The shape in a JSON file: a list of paths, each a list of ranks. Raises InvalidTree, naming the file."""
        try:
            return cls(json.loads(Path(path).read_text(encoding="utf-8-sig")))
        except OSError as error:
            raise InvalidTree(f"{path}: it cannot be read ({error.strerror}): name a file with {EXAMPLE}") from error
        except InvalidTree as error:
            raise InvalidTree(f"{path}: {error.problem}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidTree(f"{path}: not JSON in UTF-8 ({error}): write it as {EXAMPLE}") from error

    @cached_property
    def below(self) -> Mapping[RankPath, Sequence[int]]:
        """The ranks of each node's children, ascending; () is the root."""
        children: dict[RankPath, list[int]] = {path: [] for path in ((), *map(tuple, self.paths))}
        for path in self.paths:
            children[tuple(path[:-1])].append(path[-1])
        return children

    @property
    def depth(self) -> int:
        """Number of draft tokens on the longest path."""
        return len(self.paths[-1])

    @property
    def width(self) -> int:
        """How many draft tokens must be drawn after a node to include all of its children."""
        return 1 + max(path[-1] for path in self.paths)

    def cut(self, depth: int) -> StaticTree | None:
        """The tree of its paths of at most `depth` draft tokens; None if there are none."""
        kept = [path for path in self.paths if len(path) <= depth]
        if len(kept) == len(self.paths):
            return self
        return StaticTree(kept) if kept else None


def checked(path: object) -> RankPath:
    """A path as a tuple of ranks. Raises InvalidTree if it is not valid."""
    if not isinstance(path, Sequence) or isinstance(path, str) or not path:
        raise InvalidTree(f"{spelled(path)} is not a path: write a list of ranks, as in {EXAMPLE}")
    if len(path) > MOST_DEPTH:
        raise InvalidTree(f"the path {spelled(path)} has {len(path)} ranks: write at most {MOST_DEPTH}")
    for rank in path:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= MOST_RANK:
            fix = f"write a whole number from 0 to {MOST_RANK}"
            raise InvalidTree(f"{spelled(rank)} in the path {spelled(path)} is not a rank: {fix}")
    return tuple(path)


def spelled(value: object) -> str:
    """A value in JSON syntax, shortened."""
    try:
        text = json.dumps(value, default=shown)
    except (ValueError, TypeError, RecursionError):  # too many digits, keys that are no strings, or a list in itself
        text = shown(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
