"""A toy language model and its drafter: tables over a dozen words; speculative sampling by right and wrong rules."""

import random
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

WORDS = tuple(f" {letter}" for letter in "abcdefghijkl")
Rule = Literal["exact", "careless", "greedy", "drifting"]
CARELESS = 0.3  # the share of draft tokens that are accepted although they should be rejected


def softmax(logits: np.ndarray) -> np.ndarray:
    """The softmax of the logits."""
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


@dataclass
class ToyModel:
    """The next word depends on the last one alone: row i of `logits` is for the word after word i."""

    logits: np.ndarray
    drafts: np.ndarray
    laws: dict[tuple[int, float, str], np.ndarray] = field(default_factory=dict)

    @classmethod
    def random(cls, seed: int = 0, sharpness: float = 2.0, nearness: float = 1.0) -> "ToyModel":
        """A random table, and that of a drafter whose logits differ from it by noise of size `nearness`."""
        noise = np.random.default_rng(seed)
        logits = sharpness * noise.standard_normal((len(WORDS), len(WORDS)))
        return cls(logits, logits + nearness * noise.standard_normal(logits.shape))

    def law(self, last: int, temperature: float, table: str = "logits") -> np.ndarray:
        """The law of the next word."""
        if (last, temperature, table) not in self.laws:
            row: np.ndarray = getattr(self, table)[last]
            greedy = np.eye(len(WORDS))[int(row.argmax())]
            self.laws[last, temperature, table] = softmax(row / temperature) if temperature else greedy
        return self.laws[last, temperature, table]


@dataclass
class Round:
    """The words of a round, and the numbers of drafted and accepted words."""

    words: list[int]
    drafted: int
    accepted: int


def draw(law: np.ndarray, noise: random.Random) -> int:
    """A word drawn from the law."""
    return min(int(law.cumsum().searchsorted(noise.random(), "right")), len(law) - 1)


def speculate(model: ToyModel, last: int, temperature: float, depth: int, rule: Rule, noise: random.Random) -> Round:
    """A round of speculative sampling, by the exact rejection rule or by a wrong rule."""
    text = [last]
    draft_words: list[tuple[int, np.ndarray]] = []
    for _ in range(depth):
        q = model.law(text[-1], 0.0 if rule == "greedy" else temperature, "drafts")
        draft_words.append((draw(q, noise), q))
        text.append(draft_words[-1][0])
    words: list[int] = []
    for draft_word, q in draft_words:
        p = model.law(words[-1] if words else last, temperature)
        chance = min(1.0, p[draft_word] / q[draft_word])
        if rule == "greedy":
            chance = float(draft_word == int(p.argmax()))
        elif rule == "careless":
            chance += (1 - chance) * CARELESS
        if noise.random() >= chance:
            rest = (p - q).clip(0)
            words.append(draw(p if rule == "greedy" or rest.sum() == 0 else rest / rest.sum(), noise))
            return Round(words, depth, len(words) - 1)
        words.append(draft_word)
    words.append(draw(model.law(words[-1] if words else last, temperature), noise))
    return Round(words, depth, depth)
