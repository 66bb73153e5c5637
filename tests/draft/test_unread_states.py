"""The memory of states that drafters have not read yet."""

import torch

from forerun.draft.model.unread_states import TextStates, UnreadStates
from forerun.models.runner import Read


def test_unread_states_are_copied_after_their_round() -> None:
    """Otherwise a paused text would hold the states of all rows of every round that it was in."""
    rounds, states, tokens = torch.arange(80.0).view(5, 8, 1, 2), UnreadStates(), list[int]()
    for number, of_round in enumerate(rounds):
        tokens += [number, number]
        states.add(7, TextStates(None, tokens, 0), [of_round[2:4]], in_round=True)
    pieces = states.of([Read(7, tokens)])
    assert torch.equal(torch.cat(pieces), rounds[:, 2:4].flatten(0, 1))
    assert [piece.untyped_storage().nbytes() == piece.nbytes for piece in pieces] == [True] * 4 + [False]
    states.retire(7)
    (ended,) = states.ended
    assert all(piece.untyped_storage().nbytes() == piece.nbytes for piece in ended.pieces)
    assert states.num_bytes == sum(piece.nbytes for piece in ended.pieces)


def test_a_text_with_a_shared_prefix_does_not_hold_the_states_of_a_round() -> None:
    of_round, states, tokens = torch.arange(16.0).view(8, 1, 2), UnreadStates(), [3, 4]
    states.add(7, TextStates("", tokens, 0), [of_round[2:4]], in_round=True)
    assert states.share(8, TextStates("", [*tokens], 0))
    (shared,) = states.of([Read(8, tokens)])
    assert torch.equal(shared, of_round[2:4])
    assert shared.untyped_storage().nbytes() < of_round.nbytes
