"""What drafters have of their target is what its decoder has, in families that scale, centre, shift or bound it too."""

from pathlib import Path

import pytest
import torch

from forerun.heads.fresh import TargetTables
from forerun.models.families import FAMILIES
from forerun.models.loading import Blueprint
from kit.sparse import write_architecture


@pytest.mark.short("Gemma2*", "Granite*", "Starcoder2*")
@pytest.mark.parametrize("architecture", FAMILIES)
def test_tables_are_the_decoders_own_and_some_rows_of_its_head_give_what_all_do(
    architecture: str, tmp_path: Path
) -> None:
    folder = write_architecture(tmp_path, architecture, embedding_multiplier=3.0, logits_scaling=4.0)
    target = Blueprint.of(str(folder), dtype="float32", kernels="torch")
    decoder, tables = target.load(64).decoder, TargetTables.of(target)
    assert torch.allclose(tables.embedding, decoder.embedding)
    assert torch.allclose(tables.norm, decoder.norm.float())
    ids = torch.tensor([7, 3, 500])
    assert tables.head.cap == target.config.logits_cap
    states = 3 * torch.randn(5, target.config.hidden, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(target.head_rows(ids)(states), decoder.head(states)[:, ids], atol=1e-4)
    assert torch.allclose(tables.head(states), decoder.head(states), atol=1e-4)
    assert torch.allclose(tables.head[ids](states), decoder.head(states)[:, ids], atol=1e-4)
