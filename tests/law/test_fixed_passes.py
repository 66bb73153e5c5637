"""Every drafter over passes of fixed shape, as on a GPU: the output is plain decoding's, token for token."""

import pytest
import torch
from drafters import DRAFTERS, as_draft
from test_conformance_output import CHAIN, MIXED, TREE, answers, plain

from forerun.config import Speculation
from forerun.device import Placement
from forerun.llm import LLM
from kit.checkpoints import TARGET
from kit.unchecked import unchecked

FIXED = Placement(torch.device("cpu"), fixed=True)
BATCHES = ((CHAIN, 1), (TREE, 8), (Speculation(5), 8))


@pytest.mark.short("cascade-of-heads", "mix-of-3")
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_output_is_that_of_plain_decoding(name: str) -> None:
    llm = LLM(str(TARGET), as_draft(name), dtype="float32", device=FIXED)
    for speculation, batch in BATCHES:
        with unchecked():
            found = answers(llm, MIXED, batch, speculation)
        assert found == plain(MIXED, "float32")[:batch], (speculation, batch)
    assert llm.stats.num_accepted > 0
