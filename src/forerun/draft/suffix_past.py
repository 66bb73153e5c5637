"""Past: the answers of sequences that are gone, by tenant, for suffix decoding.

Decides how much is kept and what is forgotten first: the oldest answer of all tenants. Kept on disk as text, a line an
answer; trees are grown anew from it. Knows nothing of drafting.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.draft.suffix_tree import Leaf, Node, SuffixTree
from forerun.errors import InvalidRequest

FORM = 1  # of the file
MAX_SIZE = 2_000_000  # nodes and leaves in all: some 300 MB


class Past:
    """Contexts of past answers, each tenant's apart. At most `max_size` nodes and leaves in all."""

    def __init__(self, depth: int, max_size: int = MAX_SIZE) -> None:
        self.depth, self.max_size = depth, max_size
        self.trees: dict[str, SuffixTree] = {}
        self.answers: OrderedDict[int, tuple[str, list[int]]] = OrderedDict()  # by sequence, the oldest first
        self.size = 0

    def add(self, seq_id: int, tenant: str, answer: Sequence[int]) -> None:
        """Keep an answer; the oldest ones go until there is room. One too large for all room is not kept."""
        self.drop(seq_id)
        tree = self.trees.setdefault(tenant, SuffixTree(self.depth))
        before = tree.size
        text = tree.begin()
        for token in answer:
            tree.append(token)
        tree.begin()  # it grows no more
        self.size += tree.size - before
        self.answers[seq_id] = tenant, text
        while self.size > self.max_size:
            self.drop(next(iter(self.answers)))

    def drop(self, seq_id: int) -> None:
        """Forget an answer; unknown ones are none."""
        if seq_id not in self.answers:
            return
        tenant, text = self.answers.pop(seq_id)
        tree = self.trees[tenant]
        before = tree.size
        tree.remove(text)
        self.size += tree.size - before
        if not tree.root.children:
            del self.trees[tenant]

    def find(self, tenant: str, text: Sequence[int]) -> list[Node | Leaf]:
        """What is stored for the last 1, 2, ... tokens of a tenant's text."""
        tree = self.trees.get(tenant)
        return [] if tree is None else tree.find(text[-self.depth :])

    def save(self, path: Path, vocabulary: str) -> None:
        """Write all answers, the oldest first; `vocabulary` tells tokenizers apart. The old file stays until then."""
        head = {"forerun_suffix": FORM, "vocabulary": vocabulary}
        lines = [head, *({"tenant": tenant, "tokens": text} for tenant, text in self.answers.values())]
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        part.replace(path)

    def load(self, path: Path, vocabulary: str) -> None:
        """Add a file's answers, as if they were older than all others. Raises InvalidRequest for any other file."""
        lines = path.read_text(encoding="utf-8").splitlines()
        entries = [parsed(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
        if not entries or entries[0].get("forerun_suffix") != FORM:
            raise InvalidRequest("suffix", f"{path} holds no past answers: name another file")
        if entries[0].get("vocabulary") != vocabulary:
            raise InvalidRequest("suffix", f"{path} was written for another tokenizer: name another file")
        newer, self.answers = self.answers, OrderedDict()
        first = min([0, *newer]) - len(entries)
        for number, entry in enumerate(entries[1:]):
            self.add(first + number, str(entry["tenant"]), [int(token) for token in entry["tokens"]])
        self.answers.update(newer)


def parsed(line: str, place: str) -> dict[str, Any]:
    """A line's entry. Raises InvalidRequest where it is none."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or not ("forerun_suffix" in entry or {"tenant", "tokens"} <= set(entry)):
        raise InvalidRequest("suffix", f"{place} is damaged: delete the line, or the file")
    return entry
