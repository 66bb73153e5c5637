"""Prompts, and texts made of random tokens."""

import random

from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET

VOCAB = 512  # of the stories models
TOKENIZER = Tokenizer.load(TARGET)
PROMPTS = ("Once upon a time", "Lily and Tom went to the park. Lily and Tom", "The", "One day, a big dog", "She said")
STARTS = ("Once upon a time", "Lily and Tom went to the park", "The", "One day, a big dog", "She said", "They")


def random_text(length: int, seed: int) -> list[int]:
    """Independent random tokens after the begin token."""
    rng = random.Random(seed)
    return [1, *(rng.randrange(3, VOCAB) for _ in range(length - 1))]


def story(length: int, seed: int) -> list[int]:
    """Random text with repetitions, so that every kind of drafter has something to draft."""
    rng = random.Random(seed)
    text = [1]
    while len(text) < length:
        start = rng.randrange(len(text))
        text += text[start : start + rng.randint(1, 6)] if rng.random() < 0.6 else [rng.randrange(3, VOCAB)]
    return text[:length]
