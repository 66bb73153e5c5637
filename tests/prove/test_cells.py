"""Cells: chosen from the exact distribution alone, which also gives every impossible text."""

from collections.abc import Sequence
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from forerun.prove.cells import LEAST_EXPECTED, MOST_CELLS, Cells, TokenIds, choose_cells
from forerun.prove.chi_square import chi_square

END = 3


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def after(laws: Tensor, texts: Sequence[TokenIds]) -> list[dict[int, float]]:
    rows = laws[[text[-1] if text else 0 for text in texts]].tolist()
    return [{token: chance for token, chance in enumerate(row) if chance} for row in rows]


LAWS = table([[0.5, 0.3, 0.0, 0.2], [0.9, 0.1, 0.0, 0.0], [0.2, 0.2, 0.6, 0.0], [1.0, 0.0, 0.0, 0.0]])


def test_probabilities_are_products_and_texts_end() -> None:
    cells = choose_cells(lambda texts: after(LAWS, texts), 200, [END])
    for text, chance in cells.chances.items():
        expected = 1.0
        for i, token in enumerate(text):
            expected *= LAWS[text[i - 1] if i else 0, token].item()
        assert chance == pytest.approx(expected)
        assert chance * 200 >= LEAST_EXPECTED
        assert END not in text[:-1]
        assert len(text) == cells.num_tokens or text[-1] == END
    assert cells.chances[END,] == pytest.approx(0.2)


def test_texts_of_probability_zero_are_excluded() -> None:
    cells = choose_cells(lambda texts: after(LAWS, texts), 200, [END])
    length = cells.num_tokens
    assert not cells.excludes((0,) * length)
    assert not cells.excludes((END,))
    assert cells.excludes((2,) + (0,) * length)  # of chance 0
    assert cells.excludes((0,) * (length - 1))  # too short
    assert cells.excludes((END, 0, 0, 0))  # behind an end
    assert cells.excludes(())


def test_flat_distributions_have_short_texts_and_few_cells() -> None:
    flat = torch.full((40, 40), 1 / 40, dtype=torch.float64)
    cells = choose_cells(lambda texts: after(flat, texts), 30_000)
    assert cells.num_tokens == 2
    assert len(cells.chances) == MOST_CELLS
    assert sum(cells.chances.values()) == pytest.approx(MOST_CELLS / 1600)


def test_peaked_distributions_have_long_texts() -> None:
    cells = choose_cells(lambda texts: after(table([[0.9, 0.1], [0.9, 0.1]]), texts), 2000)
    assert cells.num_tokens == 4
    assert sum(cells.chances.values()) > 0.9


def test_all_texts_are_counted() -> None:
    """Also texts without a cell of their own, many or few."""
    cells = choose_cells(lambda texts: after(LAWS, texts), 1000, [END])
    exact = [text for text, chance in cells.chances.items() for _ in range(round(1000 * chance))]
    others = [(1,) * cells.num_tokens] * (1000 - len(exact))
    assert cells.test(exact + others).p_value > 0.5
    assert cells.test([next(iter(cells.chances))] * 1000).p_value < 1e-12
    assert cells.test([(1,) * cells.num_tokens] * 1000).p_value < 1e-12


@pytest.mark.parametrize("rest", [LEAST_EXPECTED - 1, LEAST_EXPECTED + 1, 100])
def test_a_rest_that_is_too_small_for_a_cell_joins_the_smallest_one(rest: int) -> None:
    cells = Cells(1, {(0,): 0.6, (1,): 0.4 - rest / 1000}, {}, frozenset())
    texts: Sequence[TokenIds] = [(0,)] * 590 + [(1,)] * 400 + [(2,)] * 10
    small = chi_square([590, 410], [600, 400])
    large = chi_square([590, 400, 10], [600, 400 - rest, rest])
    assert astuple(cells.test(texts)) == pytest.approx(astuple(small if rest < LEAST_EXPECTED else large))


def test_two_cells_are_enough_and_what_follows_an_unlikely_prefix_is_unknown() -> None:
    one, two = (Cells(2, {(0, i): 0.4 for i in range(num)}, {(): {0: 1.0}}, frozenset()) for num in (1, 2))
    assert (one.enough, two.enough) == (False, True)
    assert (two.excludes((0, 7)), two.excludes((1, 7))) == (False, True)


def test_no_law_is_asked_for_after_all_texts_have_ended() -> None:
    asked = list[Sequence[TokenIds]]()

    def laws(texts: Sequence[TokenIds]) -> list[dict[int, float]]:
        asked.append(texts)
        return [{END: 1.0}]

    assert choose_cells(laws, 200, [END]).chances == {(END,): 1.0}
    assert asked == [[()]]
