"""The operators as compilers see them: the same bits compiled, exported and eager; torch's own checks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from embeddings.test_bags import bags_of, make_input
from support.kernels import require_kernels
from torch import nn

from recsys_basis.embeddings import operators
from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.spec import BagsKernel


@pytest.fixture(params=["torch", "cpp"])
def kernel(request: pytest.FixtureRequest) -> BagsKernel:
    if request.param == "cpp":
        require_kernels()
    kernel: BagsKernel = request.param
    return kernel


class Model(nn.Module):
    """Bags and one layer over them."""

    def __init__(self, bags: RowOptimizedEmbeddingBags) -> None:
        super().__init__()
        self.bags = bags
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 1)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(self.bags(indices, offsets, weights))
        return output


@pytest.mark.parametrize("wants_weights", [False, True])
def test_operators_pass_torchs_own_checks(kernel: BagsKernel, wants_weights: bool) -> None:
    bags = bags_of(kernel)
    indices, offsets, weights = make_input(6, seed=1)
    weights.requires_grad_(wants_weights)
    of = bags.features
    rest = (weights.detach(), of.starts, of.sizes, list(of.tables), "sum", kernel)
    for kept in (bags.weights, bags.weights.bfloat16()):
        torch.library.opcheck(operators.lookup, (kept, indices, offsets, *rest))
    # Not test_aot_dispatch_*, which run backward twice and compare: the first run has changed the rows.
    torch.library.opcheck(
        operators.lookup_and_update,
        (bags.anchor, indices, offsets, weights, bags.number),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_compiled_training_is_eager_training_bit_for_bit(kernel: BagsKernel) -> None:
    models = [Model(bags_of(kernel, "mean")) for _ in range(2)]
    compiled = torch.compile(models[1], backend="aot_eager", fullgraph=True, dynamic=True)
    for seed in range(4):
        indices, offsets, weights = make_input(5 + seed, seed)
        gradients = []
        for model in (models[0], compiled):
            own = weights.clone().requires_grad_()
            model(indices, offsets, own).square().sum().backward()
            gradients.append(own.grad)
        assert gradients[0] is not None
        assert torch.equal(*gradients)
    assert torch.equal(models[0].bags.weights, models[1].bags.weights)
    assert not torch.equal(models[0].bags.weights, bags_of(kernel).weights)  # it did train


def test_an_exported_model_gives_the_models_output_for_any_batch(kernel: BagsKernel, tmp_path: Path) -> None:
    model = Model(bags_of(kernel)).eval()
    samples, items = torch.export.Dim("samples", min=2), torch.export.Dim("items")
    with torch.no_grad():
        program = torch.export.export(
            model, make_input(6, seed=1), dynamic_shapes=({0: items}, {0: 4 * samples + 1}, {0: items})
        )
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2")
        assert "recsys_basis.lookup.default" in loaded.graph_module.code
        for batch_size in (6, 11):
            batch = make_input(batch_size, seed=2)
            assert torch.equal(loaded.module()(*batch), model(*batch))


def test_a_copy_updates_its_own_rows(kernel: BagsKernel) -> None:
    bags = bags_of(kernel)
    before = bags.weights.clone()
    other = copy.deepcopy(bags)
    other(*make_input(6, seed=1)).sum().backward()
    assert torch.equal(bags.weights, before)
    assert not torch.equal(other.weights, before)
