"""Routes: prefix-aware choice of a replica for each request.

A replica caches the prefixes of the texts that it has processed, so a request goes to the replica with the longest
cached prefix of its prompt, unless that replica has a much higher load than another. Requests of a session stay with
one replica while it exists. All others go to the replica with the lowest load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

KEY_TOKENS = 32  # granularity of prefixes
MOST_KEYS = 256  # per prompt: prefixes of up to 8,192 tokens
MOST_HOMES = 1 << 17  # stored prefixes, about 20 MB


@dataclass(frozen=True, slots=True)
class Route:
    """The properties that a request is routed by: hashes of its prefixes (`keys`, shortest first) and its `session`.

    `num_samples` is added to the load of the chosen replica.
    """

    keys: tuple[Hashable, ...] = ()
    session: Hashable = None
    num_samples: int = 1

    @classmethod
    def of(cls, tenant: str, tokens: Seq[int], session: str = "", num_samples: int = 1) -> Route:
        """The route of a prompt. Prefixes and sessions of different tenants are distinct."""
        keys, key = list[int](), hash(tenant)
        for end in range(KEY_TOKENS, min(len(tokens), KEY_TOKENS * MOST_KEYS) + 1, KEY_TOKENS):
            key = hash((key, tuple(tokens[end - KEY_TOKENS : end])))
            keys.append(key)
        return cls(tuple(keys), (tenant, session) if session else None, num_samples)


@dataclass(slots=True)
class RouteTable:
    """The last replica (home) of prefixes and sessions. `places`: samples that a replica runs at the same time."""

    places: int
    homes: OrderedDict[Hashable, str] = field(default_factory=OrderedDict)  # least recently used first
    last_turn: dict[str, int] = field(default_factory=dict)
    num_turns: int = 0

    def ranked(self, route: Route, loads: Mapping[str, int]) -> list[str]:
        """All available replicas, the best one for the request first.

        `loads`: their numbers of open samples. A prefix's home is not used if its load exceeds that of the least loaded
        replica by half a batch; the latter then becomes its home.
        """
        by_load = sorted(loads, key=lambda name: (loads[name], self.last_turn.get(name, 0)))
        home = self.homes.get(route.session)
        if home not in loads:
            known = (self.homes.get(key) for key in reversed(route.keys))
            home = next((name for name in known if name in loads), None)
            if home is not None and loads[home] - loads[by_load[0]] > max(1, self.places // 2):
                home = None
        return sorted(by_load, key=lambda name: name != home)

    def record(self, route: Route, replica: str) -> None:
        """Record that a replica received a request."""
        self.num_turns += 1
        self.last_turn[replica] = self.num_turns
        for key in (*route.keys, *(() if route.session is None else (route.session,))):
            self.homes[key] = replica
            self.homes.move_to_end(key)
        while len(self.homes) > MOST_HOMES:
            self.homes.popitem(last=False)
