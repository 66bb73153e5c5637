"""The spelling of drafters, and the error messages for misspellings."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft.auto import RECORD, DrafterRecord
from forerun.draft.many.cascade import CascadeDrafter
from forerun.draft.many.mix import MixDrafter
from forerun.draft.model.model import ModelDrafter
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.draft.text.ngram import NgramDrafter
from forerun.draft.vocab.translate import TranslatingDrafter
from forerun.drafters import PLANNERS, plan_drafter
from forerun.errors import ModelNotFound, UnknownDrafter
from forerun.heads.adapter.drafter import EarlyExitDrafter
from kit.checkpoints import SMALL, TARGET
from law.drafters import context

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,5}(-[a-z0-9]{1,4})?", fullmatch=True)
ARGUMENTS = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=12)
SPELLED = st.recursive(
    st.tuples(NAMES, st.none() | ARGUMENTS, st.just(())),
    lambda inner: st.tuples(NAMES, st.none(), st.lists(inner, min_size=1, max_size=3).map(tuple)),
    max_leaves=6,
)


def spec_of(name: str, argument: str | None, members: tuple[Any, ...]) -> DraftSpec:
    """Built outside of strategies: the type checks draw random members, which strategies must not do."""
    return DraftSpec(name, argument, tuple(spec_of(*member) for member in members))


@given(SPELLED)
@settings(max_examples=200, deadline=None)
def test_a_spec_is_parsed_back_from_its_text(spelled: tuple[str, str | None, tuple[Any, ...]]) -> None:
    spec = spec_of(*spelled)
    assert parse_spec(str(spec)) == spec


def test_specs_of_all_spellings() -> None:
    cascade = parse_spec(" cascade[ suffix , model: /a b/c ,mix[ngram:5]] ")
    members = (DraftSpec("suffix"), DraftSpec("model", "/a b/c"), DraftSpec("mix", members=(DraftSpec("ngram", "5"),)))
    assert cascade == DraftSpec("cascade", members=members)
    assert parse_spec('model:"C:\\[a],b"') == DraftSpec("model", "C:\\[a],b")
    assert parse_spec("early-exit:8") == DraftSpec("early-exit", "8")


@pytest.mark.parametrize(
    ("text", "position", "fix"),
    [
        ("", 1, "name"),
        ("  ", 3, "name"),
        ("Ngram", 1, "small letters"),
        ("./models/draft", 1, "model:DIR"),
        ("owner/name", 6, "model:owner/name"),
        ("ngram:", 7, "after the colon"),
        ("ngram:,", 7, "after the colon"),
        ("ngram,model:A", 6, "brackets"),
        ("ngram]", 6, "remove"),
        ("model:a[b]", 8, "double quotes"),
        ("cascade[ngram", 14, "close the list"),
        ("cascade[]", 9, "name"),
        ("cascade[ngram,]", 15, "name"),
        ("cascade[ngram[", 15, "name"),
        ('model:"a', 7, "close the quotation"),
        ("ngram 5", 7, "remove"),
    ],
)
def test_a_misspelling_is_located_and_its_fix_named(text: str, position: int, fix: str) -> None:
    with pytest.raises(UnknownDrafter, match=rf"at position {position}: .*{fix}"):
        parse_spec(text)


@given(st.text('ab:[]," 5-', max_size=12))
@settings(max_examples=300, deadline=None)
def test_any_text_parses_or_is_refused_with_a_position(text: str) -> None:
    refusal = None
    try:
        parse_spec(text)
    except UnknownDrafter as error:
        refusal = str(error)
    assert refusal is None or "at position" in refusal


@pytest.mark.parametrize("num_lists", [33, 300, 10_000])
def test_lists_that_are_nested_too_deeply_are_refused(num_lists: int, tmp_path: Path) -> None:
    text = "mix[" * num_lists + "ngram" + "]" * num_lists
    with pytest.raises(UnknownDrafter, match="'\\[' at position 132: nest at most 32 lists of drafters"):
        parse_spec(text)
    record = {"drafter": "medusa", "argument": "", "target": "0", "temperature": 0.0, "mixed_with": text}
    (tmp_path / RECORD).write_text(json.dumps(record | {"acceptance_at_depth": [0.5], "tokens_per_round": [1.5]}))
    assert DrafterRecord.read(tmp_path) is None
    inner = parse_spec("mix[" * 32 + "ngram" + "]" * 32)
    assert parse_spec(str(inner)) == inner


def test_names_become_drafters() -> None:
    target = context().target.load(64)
    ngram = plan_drafter("ngram:6", context()).build({}, None, target)
    assert isinstance(ngram, NgramDrafter)
    assert ngram.max_n == 6
    assert isinstance(plan_drafter("ngram", context()).build({}, None, target), NgramDrafter)
    name, progress = f"model:{SMALL}", []
    plan = plan_drafter(name, context())
    memory = plan.models[name]
    assert memory.bytes_per_token == 5 * 2 * 4 * 8 * 4  # layers, K and V, heads, their width, float32
    assert memory.bytes_per_position == 2 * 8 * 4  # cosine and sine of a head, float32
    assert memory.weights_bytes > 250_000 * 4
    model = plan.build({name: 256}, lambda what, done: progress.append((what, done)), target)
    assert isinstance(model, ModelDrafter)
    assert model.vocab_size == context().target.config.vocab_size
    assert progress[-1][1] == 1.0
    exits = plan_drafter("early-exit:2", context())
    assert (dict(exits.models), exits.fingerprint()) == ({}, "")
    drafter = exits.build({}, None, target)
    assert isinstance(drafter, EarlyExitDrafter)
    assert (drafter.target, drafter.layer) == (target, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("oracle[ngram]", "no drafter 'oracle': choose one of " + ", ".join(sorted(PLANNERS))),
        ("cascade", "two members or more: name the cheapest first"),
        *((name, f"{name}:DIR") for name in ("eagle", "block", "medusa")),
        ("cascade:ngram", "two members or more"),
        ("cascade[ngram]", "two members or more"),
        (f"cascade[model:{SMALL},ngram]", "'ngram' cannot verify the drafts .* as in cascade.ngram,model:SMALL"),
        (f"cascade[ngram,cascade[ngram,model:{SMALL}]]", "cannot verify the drafts"),
        ("cascade[ngram:x,ngram]", "whole number"),
        (f"cascade[mix[ngram,suffix],model:{SMALL}]", "put the cascade into the mix"),
        ("mix", "two members or more, as in mix.ngram,model:DIR"),
        ("mix:ngram", "two members or more"),
        ("mix[ngram]", "two members or more"),
        ("mix[ngram,mix[suffix,ngram:5]]", "write mix.ngram,suffix,ngram:5."),
        ("mix[ngram,early-exit:9]", "at most 4"),
        ("ngram:x", "whole number"),
        ("ngram:0", "whole number"),
        (f"ngram:{'9' * 5000}", "whole number"),
        (f"early-exit:{'9' * 5000}", "at least 1 and at most 4"),
        ("ngram[ngram]", "no list"),
        ("model", "model:DIR"),
        ("model[ngram]", "no list"),
        ("early-exit", "at least 1 and at most 4, as the target has 5, for instance early-exit:1"),
        ("early-exit:0", "at least 1 and at most 4"),
        ("early-exit:5", "at most 4, as the target has 5"),
        ("early-exit:x", "at least 1"),
        ("early-exit[ngram]", "no list"),
        ("ngrm", r"there is no drafter 'ngrm': did you mean ngram\?"),
        ("sufix", r"'sufix': did you mean suffix\?"),
        ("early-exits", r"'early-exits': did you mean early-exit\?"),
        ("model:/no/such/folder", "/no/such/folder"),
    ],
)
def test_drafters_that_cannot_be_built_are_refused(text: str, message: str) -> None:
    with pytest.raises(ModelNotFound if "/no/" in text else UnknownDrafter, match=message):
        plan_drafter(text, context())


def test_a_cascade_plans_for_all_of_its_members() -> None:
    """One checkpoint may serve twice, with a cache for each."""
    small, large = f"model:{SMALL}", f"model:{TARGET}"
    alone = {name: plan_drafter(name, context()) for name in (small, large)}
    plan = plan_drafter(f"cascade[cascade[{small},{small}],{large},{small}]", context())
    names = [small, f"{small} (2)", large, f"{small} (3)"]
    assert plan.models == dict.fromkeys(names, alone[small].models[small]) | alone[large].models
    prints = [alone[name].fingerprint() for name in (small, small, large, small)]
    assert plan.fingerprint() == " ".join(prints)
    assert plan.build_judge is None
    sizes = dict(zip(names, (64, 128, 192, 256), strict=True))
    found, drafter = [], plan.build(sizes, None, context().target.load(64))
    for _ in range(3):
        assert isinstance(drafter, CascadeDrafter)
        assert isinstance(drafter.judge, ModelDrafter)
        found.append(drafter.judge.runner.cache.blocks.num_blocks * 64)
        drafter = drafter.lower
    assert isinstance(drafter, ModelDrafter)
    assert [drafter.runner.cache.blocks.num_blocks * 64, *found[::-1]] == [64, 128, 192, 256]


def test_a_mix_plans_for_all_of_its_members() -> None:
    """Caches and members have their own names, although one checkpoint serves three times."""
    small = f"model:{SMALL}"
    alone = plan_drafter(small, context())
    plan = plan_drafter(f"mix[ngram,{small},cascade[ngram,{small}],{small}]", context())
    names = [small, f"{small} (2)", f"{small} (3)"]
    assert plan.models == dict.fromkeys(names, alone.models[small])
    assert plan.fingerprint() == " ".join([alone.fingerprint()] * 3)
    assert (plan.num_members, plan.build_judge) == (4, None)
    sizes = dict(zip(names, (64, 128, 192), strict=True))
    drafter = plan.build(sizes, None, context().target.load(64))
    assert isinstance(drafter, MixDrafter)
    assert drafter.names == ("ngram", small, f"cascade[ngram,{small}]", f"{small} (2)", "merged")
    _, first, cascade, last = drafter.members
    assert isinstance(cascade, CascadeDrafter)
    models = [member for member in (first, cascade.judge, last) if isinstance(member, ModelDrafter)]
    assert [member.runner.cache.blocks.num_blocks * 64 for member in models] == [64, 128, 192]


def test_a_draft_model_with_other_ids_is_translated(tmp_path: Path) -> None:
    """A tokenizer in which two names are swapped; everything else is the target's."""
    shutil.copytree(SMALL, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = (token for token, token_id in vocab.items() if token_id in (300, 301))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    name = f"model:{tmp_path}"
    drafter = plan_drafter(name, context()).build({name: 256}, None, context().target.load(64))
    assert isinstance(drafter, TranslatingDrafter)
    assert drafter.model.shared is not None
    known = drafter.model.shared.known
    assert known[300:302] == [301, 300]
    assert all(own == token for token, own in enumerate(known) if own >= 0 and token not in (300, 301))
