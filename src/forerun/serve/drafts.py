"""Drafts: what a stream tells of its rounds to a body with `draft_details`."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from forerun.accept.delta import Delta
from forerun.serve.spelled import TokenTexts


def draft_object(delta: Delta, round_: int, arms: Seq[str], texts: TokenTexts) -> dict[str, Any]:
    """What a round drafted: its tokens and the text that it made certain, each with its origin, and its guesses.

    `first` is the ordinal of the first token, `token` of a segment that of the token behind it. A guess's `parent` is
    the number of the guess that it follows, -1 the text so far.
    """
    draft, arm = delta.draft, -1 if delta.outcome is None else delta.outcome.drafter
    assert draft is not None, "only what was asked for is told"
    if draft.tokens and len(arms) == 1:
        arm = 0
    guesses = zip(draft.tokens, draft.parents, draft.accepted, strict=True)
    return {
        "round": round_,
        "drafter": arms[arm] if 0 <= arm < len(arms) else None,
        "first": draft.first,
        "tokens": [
            {"id": token, "text": texts.text_of(token), "origin": origin.value}
            for token, origin in zip(delta.token_ids, delta.origins, strict=True)
        ],
        "segments": [
            {"text": segment.text, "origin": segment.origin.value, "token": place}
            for segment, place in zip(delta.segments, draft.places, strict=True)
        ],
        "guesses": [
            {"id": token, "text": texts.text_of(token), "parent": parent, "accepted": accepted}
            for token, parent, accepted in guesses
        ],
    }
