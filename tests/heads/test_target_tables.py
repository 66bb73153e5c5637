"""What drafters have of their target is what its decoder has, in families that scale, centre, shift or bound it too."""

from pathlib import Path

import pytest
import torch

from forerun.errors import UnsupportedModel
from forerun.heads.fresh import TargetTables
from forerun.heads.medusa.joint import target_weights
from forerun.heads.trained_layer import LayerStack
from forerun.models.loading import Blueprint
from kit.checkpoints import TARGET
from kit.sparse import DENSE, write_sparse

GRANITE = {"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 3.0, "logits_scaling": 4.0} | {
    "hidden_act": "silu"
}


@pytest.fixture(params=[*DENSE, "granite"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Blueprint:
    changes = GRANITE if request.param == "granite" else {}
    return Blueprint.of(
        str(write_sparse(tmp_path, "starcoder2" if changes else request.param, **changes)), kernels="torch"
    )


@pytest.mark.short("gemma2")
def test_embedding_and_norm_are_the_decoders_own_and_some_rows_of_the_head_give_what_all_do(target: Blueprint) -> None:
    decoder, tables = target.load(64).decoder, TargetTables.of(target)
    assert torch.allclose(tables.embedding, decoder.embedding)
    assert torch.allclose(tables.norm, decoder.norm.float())
    ids, states = torch.tensor([7, 3, 500]), 3 * torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(target.head_rows(ids)(states), decoder.head(states)[:, ids], atol=1e-4)


def test_what_training_does_not_compute_is_refused(target: Blueprint) -> None:
    with pytest.raises(UnsupportedModel, match=f"a {target.config.family} .* cannot be trained: choose"):
        LayerStack.of(target.config, target_weights(target))
    plain = Blueprint.of(str(TARGET))
    LayerStack.of(plain.config, target_weights(plain))
