"""Routes: which replica a request goes to.

A replica keeps the beginnings of texts that it has read, so a request goes where the longest beginning of its prompt
was read, unless that replica has much more to do than another one. Requests of a session stay with one replica as long
as it is there. All others go to where the least is under way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

KEY_TOKENS = 32  # between the places up to which a beginning is known
MOST_KEYS = 256  # of one prompt: a beginning of 8,192 tokens
MOST_HOMES = 1 << 17  # beginnings that are remembered, in some 20 MB


@dataclass(frozen=True, slots=True)
class Route:
    """What a request is routed by: its `session`, if any, and its beginnings, the shortest first.

    `num_samples` is how much it adds to the load of a replica.
    """

    keys: tuple[Hashable, ...] = ()
    session: Hashable = None
    num_samples: int = 1

    @classmethod
    def of(cls, tenant: str, tokens: Seq[int], session: str = "", num_samples: int = 1) -> Route:
        """The route of a prompt. Beginnings and sessions of different tenants are different."""
        keys, key = list[int](), hash(tenant)
        for end in range(KEY_TOKENS, min(len(tokens), KEY_TOKENS * MOST_KEYS) + 1, KEY_TOKENS):
            key = hash((key, tuple(tokens[end - KEY_TOKENS : end])))
            keys.append(key)
        return cls(tuple(keys), (tenant, session) if session else None, num_samples)


@dataclass(slots=True)
class RouteTable:
    """Where beginnings and sessions were last answered. `places` is how many samples a replica answers at once."""

    places: int
    homes: OrderedDict[Hashable, str] = field(default_factory=OrderedDict)  # the latest use last
    last_turn: dict[str, int] = field(default_factory=dict)
    num_turns: int = 0

    def ranked(self, route: Route, loads: Mapping[str, int]) -> list[str]:
        """All replicas that are there, the one that should take the request first.

        `loads` are their samples under way. A beginning does not go to its home where that has half a batch more to do
        than the least loaded replica, which then reads the beginning too and is its home from there on.
        """
        by_load = sorted(loads, key=lambda name: (loads[name], self.last_turn.get(name, 0)))
        home = self.homes.get(route.session) if route.session is not None else None
        if home not in loads:
            known = (self.homes.get(key) for key in reversed(route.keys))
            home = next((name for name in known if name in loads), None)
            if home is not None and loads[home] - loads[by_load[0]] > max(1, self.places // 2):
                home = None
        return by_load if home is None else sorted(by_load, key=lambda name: name != home)

    def note(self, route: Route, replica: str) -> None:
        """Note that a replica took a request."""
        self.num_turns += 1
        self.last_turn[replica] = self.num_turns
        for key in (*route.keys, *(() if route.session is None else (route.session,))):
            self.homes[key] = replica
            self.homes.move_to_end(key)
        while len(self.homes) > MOST_HOMES:
            self.homes.popitem(last=False)
