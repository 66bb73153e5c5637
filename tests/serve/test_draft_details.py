"""`draft_details`: the rounds in a stream agree with the engine's counters, and the answer is the same."""

from typing import Any

import pytest

from forerun.sampling.params import SamplingParams
from kit.checkpoints import SMALL
from kit.engines import plain
from kit.servers import TEMPLATE, Running, drafting, serving

PROMPT = "Once upon a time"
BODIES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 0.9, "seed": 3, "max_tokens": 40, "speculation": {"depth": 3, "width": 2}},
    {"temperature": 1.2, "seed": 4, "max_tokens": 40, "speculation": {"depth": 4, "drafter": "ngram"}},
    {"temperature": 0.7, "seed": 5, "max_tokens": 60, "stop": ["little girl", ". She"], "n": 3},
    {"temperature": 0.7, "seed": 6, "max_tokens": 20, "speculation": False},
]
server = serving(lambda: drafting(f"mix[ngram,model:{SMALL}]"))


def chunks_of(server: Running, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream with `draft_details`."""
    return server.events(path, **{"stream_options": {"include_usage": True}, "draft_details": True} | body)


def path_of(nodes: list[dict[str, Any]]) -> list[int]:
    """The indices of accepted nodes, from the root down; asserts that they form one path."""
    path: list[int] = []
    at: int | None = -1
    while at is not None:
        found = [i for i, node in enumerate(nodes) if node["accepted"] and node["parent"] == at]
        assert len(found) <= 1
        at = found[0] if found else None
        path += found
    assert len(path) == sum(node["accepted"] for node in nodes)
    return path


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_rounds_add_up_to_the_answer_and_to_the_counts(server: Running, number: int) -> None:
    body = {"prompt": PROMPT, **BODIES[number]}
    chunks = chunks_of(server, **body)
    params = SamplingParams(**{name: value for name, value in BODIES[number].items() if name != "speculation"})
    expected = plain().generate(PROMPT, params, use_tqdm=False)[0]
    rounds: dict[int, list[dict[str, Any]]] = {sample.index: [] for sample in expected.outputs}
    for chunk in chunks:
        for choice in chunk["choices"]:
            rounds[choice["index"]].append(choice["draft"])
            assert "".join(part["text"] for part in choice["draft"]["segments"]) == choice["text"]
    for sample in expected.outputs:
        of_sample = rounds[sample.index]
        assert [each["round"] for each in of_sample] == list(range(1, len(of_sample) + 1))
        assert [token["id"] for each in of_sample for token in each["tokens"]] == list(sample.token_ids)
        assert "".join(part["text"] for each in of_sample for part in each["segments"]) == sample.text
        tokens = [token for each in of_sample for token in each["tokens"]]
        for each in of_sample:
            assert each["first"] == sum(len(earlier["tokens"]) for earlier in of_sample[: each["round"] - 1])
            check_origins(each, last=each is of_sample[-1])
            for part in each["segments"]:
                assert part["token"] < each["first"] + len(each["tokens"])
                assert tokens[part["token"]]["origin"] == part["origin"]
    usage, every = chunks[-1]["usage"]["speculation"], [each for of_sample in rounds.values() for each in of_sample]
    assert usage["num_rounds"] == len(every)
    assert usage["num_drafted"] == sum(len(each["guesses"]) for each in every)
    assert usage["num_accepted"] == sum(node["accepted"] for each in every for node in each["guesses"])
    drafters = {each["drafter"] for each in every if each["guesses"]}
    assert drafters <= set(server.llm.drafter_names)
    assert (drafters == {"ngram"}) or number != 2
    assert bool(drafters) is (number != 4)


def check_origins(each: dict[str, Any], last: bool) -> None:
    """A round's tokens are its accepted draft tokens and one of another origin; the answer's end may cut them."""
    nodes = each["guesses"]
    path = path_of(nodes)
    ids, origins = [nodes[i]["id"] for i in path], ["drafted"] * len(path)
    leaf = path[-1] if path else -1
    refused = any(node["parent"] == leaf for node in nodes)
    origins.append(("recovered" if refused else "bonus") if nodes else "target")
    tokens = each["tokens"]
    assert [token["origin"] for token in tokens] == origins[: len(tokens)]
    assert [token["id"] for token in tokens[: len(ids)]] == ids[: len(tokens)]
    assert len(tokens) == len(origins) or last
    if refused and len(tokens) == len(origins):
        assert tokens[-1]["id"] not in [node["id"] for node in nodes if node["parent"] == leaf]


def test_a_chat_stream_has_draft_details_too(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "chat_template": TEMPLATE, "temperature": 0}
    chunks = chunks_of(server, "/v1/chat/completions", **body, max_completion_tokens=12)
    drafts = [choice["draft"] for chunk in chunks for choice in chunk["choices"] if "draft" in choice]
    contents = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(part["text"] for each in drafts for part in each["segments"]) == "".join(contents)
    assert sum(len(each["tokens"]) for each in drafts) == 12


def test_draft_details_are_recorded_only_if_requested(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=PROMPT, draft_details=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "draft_details"
    chunks = chunks_of(server, prompt=PROMPT, draft_details=False)
    assert all("draft" not in choice for chunk in chunks for choice in chunk["choices"])
    deltas = list(server.llm.stream(PROMPT, SamplingParams(max_tokens=4, temperature=0)))
    assert all(delta.draft is None for delta in deltas)
