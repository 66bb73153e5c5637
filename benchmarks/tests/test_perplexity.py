"""The perplexity of pages: the same pages everywhere, judged as transformers' logits judge them."""

import pytest
import torch
from benchmarks.perplexity import documentation, pages_of, pages_text, perplexity
from transformers import AutoModelForCausalLM

from forerun import LLM
from kit.checkpoints import TARGET


def test_pages_are_judged_by_their_second_halves_as_transformers_judges_them() -> None:
    llm = LLM(str(TARGET), dtype="float32", use_tqdm_on_load=False)
    tokens = llm.tokenizer.encode(pages_text(llm, 3 * 64))
    pages = pages_of(tokens, 3, 64, begins=tokens[0])
    assert [len(page) for page in pages] == [64] * 3
    assert {page[0] for page in pages} == {tokens[0]}
    assert pages_of(tokens, 3, 64, None)[1] == tokens[64:128]
    model, losses = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32), []
    with torch.inference_mode():
        for page in pages:
            logits = model(torch.tensor([page])).logits[0, 32:-1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(page[33:]), reduction="none"))
    assert perplexity(llm, pages) == pytest.approx(torch.cat(losses).mean().exp().item(), rel=1e-4)


def test_the_text_is_the_same_every_time_and_long_enough() -> None:
    length = 0
    for passage, again in zip(documentation(), documentation(), strict=True):
        assert passage == again
        length += len(passage)
        if length > 100_000:
            return
    pytest.fail(f"{length} characters are all")
