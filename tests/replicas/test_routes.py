"""Routes: beginnings and sessions stay where they are known, and all else goes to where the least is under way."""

import pytest

from forerun.replicas.routes import KEY_TOKENS, MOST_KEYS, Route, RouteTable

BEGINNING = tuple(range(KEY_TOKENS * 4))
IDLE = {"a": 0, "b": 0, "c": 0}


def home(table: RouteTable, route: Route, loads: dict[str, int]) -> str:
    """Where a request goes, which is noted."""
    ranked = table.ranked(route, loads)
    assert sorted(ranked) == sorted(loads)
    table.record(route, ranked[0])
    return ranked[0]


def test_a_conversation_stays_where_its_beginning_was_read_and_new_ones_take_turns() -> None:
    table = RouteTable(16)
    homes = {}
    for tenant in "xyz":
        homes[tenant] = home(table, Route.of(tenant, BEGINNING), IDLE)
    assert sorted(homes.values()) == ["a", "b", "c"]  # one text of three tenants is three beginnings
    for tenant, name in homes.items():
        for turn in range(3):
            assert home(table, Route.of(tenant, (*BEGINNING, *range(100 * turn))), IDLE) == name


@pytest.mark.parametrize("tenant", ["x", "y"])
@pytest.mark.parametrize("num_more", [0, 31, 40])
@pytest.mark.parametrize("num_common", [0, 30, 31, 32, 63, 64, 95])
def test_keys_are_equal_as_far_as_whole_steps_of_texts_of_a_tenant_are(
    num_common: int, num_more: int, tenant: str
) -> None:
    first, second = ([*range(num_common), token, *range(num_more)] for token in (1000, 2000))
    one, other = Route.of("x", first).keys, Route.of(tenant, second).keys
    assert len(one) == len(other) == len(first) // KEY_TOKENS
    num_shared = num_common // KEY_TOKENS if tenant == "x" else 0
    assert one[:num_shared] == other[:num_shared]
    assert not set(one[num_shared:]) & set(other[num_shared:])


def test_the_longest_known_beginning_counts() -> None:
    table = RouteTable(16)
    table.record(Route.of("", BEGINNING[:KEY_TOKENS]), "b")
    table.record(Route.of("", (*BEGINNING[:KEY_TOKENS], *[7] * KEY_TOKENS)), "c")
    assert home(table, Route.of("", (*BEGINNING[:KEY_TOKENS], *[7] * KEY_TOKENS, 1, 2)), IDLE) == "c"
    table.record(Route.of("", BEGINNING), "b")
    table.record(Route.of("", BEGINNING[:KEY_TOKENS]), "a")
    assert home(table, Route.of("", (*BEGINNING, 1)), IDLE) == "b"


def test_what_is_not_known_goes_to_where_the_least_is_under_way() -> None:
    table = RouteTable(16)
    assert home(table, Route.of("", (1, 2, 3)), {"a": 2, "b": 1, "c": 3}) == "b"
    assert home(table, Route.of("", BEGINNING), {"a": 2, "b": 3, "c": 1}) == "c"


def test_a_beginning_leaves_a_replica_that_has_half_a_batch_more_to_do() -> None:
    table, route = RouteTable(8), Route.of("", BEGINNING)
    assert home(table, route, {"a": 0, "b": 1}) == "a"
    assert home(table, route, {"a": 4, "b": 0}) == "a"
    assert home(table, route, {"a": 5, "b": 0}) == "b"
    assert home(table, route, {"a": 0, "b": 4}) == "b"  # which has read it now
    assert home(table, route, {"a": 9, "b": 13}) == "b"  # what both have to do is no difference
    table = RouteTable(1)
    assert home(table, route, {"a": 0, "b": 1}) == "a"
    assert home(table, route, {"a": 1, "b": 0}) == "a"
    assert home(table, route, {"a": 2, "b": 0}) == "b"


def test_a_session_stays_whatever_is_to_do_until_its_replica_is_gone() -> None:
    table, route = RouteTable(2), Route.of("", (1, 2), session="s")
    assert home(table, route, {"a": 1, "b": 0}) == "b"
    assert home(table, Route.of("", BEGINNING, session="s"), {"a": 0, "b": 50}) == "b"
    assert home(table, Route.of("other", (1, 2), session="s"), {"a": 0, "b": 50}) == "a"
    assert home(table, route, {"a": 9, "c": 3}) == "c"
    assert home(table, route, {"a": 0, "b": 0, "c": 5}) == "c"


def test_long_prompts_and_many_beginnings_are_bounded() -> None:
    assert len(Route.of("", range(KEY_TOKENS * (MOST_KEYS + 9))).keys) == MOST_KEYS
    table = RouteTable(1)
    table.homes.update(dict.fromkeys(range(1 << 17), "a"))
    table.record(Route.of("", BEGINNING), "b")
    assert len(table.homes) == 1 << 17
    assert home(table, Route.of("", BEGINNING), {"a": 0, "b": 0}) == "b"  # the oldest were forgotten


def test_what_was_used_last_is_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.replicas.routes.MOST_HOMES", 2)
    table = RouteTable(4)
    for key in ("a", "b", "a", "c"):
        table.record(Route((key,)), "r1")
    assert list(table.homes) == ["a", "c"]
