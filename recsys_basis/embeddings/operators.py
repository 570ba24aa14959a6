"""The lookup and its update as operators of torch.library, so that torch.compile and torch.export see them.

recsys_basis::lookup             a function of its arguments alone: what an exported model calls
recsys_basis::lookup_and_update  one whose backward updates the rows of a live module, found by its number

The module's weights and state are no arguments of the second: a compiler that saw them written would have
to prove that no copy of a table is needed. Backward's operator returns the anchor's gradient, so it is never
left out as dead code.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
from torch.library import custom_op

from recsys_basis.embeddings.cpp_lookup import CppLookup
from recsys_basis.embeddings.features import Bags, Features, Pooling
from recsys_basis.embeddings.spec import BagsKernel
from recsys_basis.embeddings.torch_lookup import TorchLookup

if TYPE_CHECKING:
    from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags

_modules: WeakValueDictionary[int, RowOptimizedEmbeddingBags] = WeakValueDictionary()
_numbers = itertools.count()


def number_of(module: RowOptimizedEmbeddingBags) -> int:
    """A new number by which operators find ``module`` as long as it lives in this process."""
    number = next(_numbers)
    _modules[number] = module
    return number


def lookup_of(kernel: BagsKernel, features: Features) -> CppLookup | TorchLookup:
    """The lookup of ``embedding.kernel``. Raises ImportError where C++ was not compiled."""
    return CppLookup(features) if kernel == "cpp" else TorchLookup(features)


@custom_op(
    "recsys_basis::lookup",
    mutates_args=(),
    schema="(Tensor weights, Tensor indices, Tensor offsets, Tensor? per_sample_weights, Tensor starts, "
    "Tensor sizes, str[] tables, str pooling, str kernel) -> Tensor",
)
def lookup(
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    starts: torch.Tensor,
    sizes: torch.Tensor,
    tables: list[str],
    pooling: str,
    kernel: str,
) -> torch.Tensor:
    """Pooled vectors [B, F * D]: weights [R, D], then the fields of ``Bags`` and of ``Features``."""
    features = Features(tuple(tables), starts, sizes, cast(Pooling, pooling))
    bags = Bags(indices, offsets, per_sample_weights)
    return lookup_of(cast(BagsKernel, kernel), features).pool(weights, bags)


@lookup.register_fake
def _lookup_shape(
    weights: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *rest: Any
) -> torch.Tensor:
    _, _, _, tables, _, _ = rest
    shape = (offsets.shape[0] - 1) // len(tables), len(tables) * weights.shape[1]
    return weights.new_empty(shape, dtype=torch.float32)


@custom_op(
    "recsys_basis::lookup_and_update",
    mutates_args=(),
    schema="(Tensor anchor, Tensor indices, Tensor offsets, Tensor? per_sample_weights, int module) "
    "-> Tensor",
)
def lookup_and_update(
    anchor: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    module: int,
) -> torch.Tensor:
    """Pooled vectors [B, F * D] of the module of that number; its rows change in backward.

    ``anchor`` is what autograd differentiates by, so that it calls backward.
    """
    bags = _modules[module]
    return bags.lookup.pool(bags.weights, Bags(indices, offsets, per_sample_weights))


@lookup_and_update.register_fake
def _pooled_shape(
    anchor: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    module: int,
) -> torch.Tensor:
    bags = _modules[module]
    num_features = len(bags.features.tables)
    return anchor.new_empty((offsets.shape[0] - 1) // num_features, num_features * bags.embedding_dim)


@custom_op(
    "recsys_basis::update",
    mutates_args=(),
    schema="(Tensor gradient, Tensor indices, Tensor offsets, Tensor? per_sample_weights, int module, "
    "bool weights_need_gradient) -> (Tensor, Tensor)",
)
def _update(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    module: int,
    weights_need_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the gradients by row and hand them to the module; gradients of anchor and per-sample weights."""
    bags, batch = _modules[module], Bags(indices, offsets, per_sample_weights)
    of_weights = gradient.new_empty(0)
    if weights_need_gradient:  # with the weights that forward saw, so before the update
        of_weights = bags.lookup.per_sample_gradient(gradient, bags.weights, batch)
    bags.receive(bags.lookup.sum_by_row(gradient, batch, bags.clip.needs_counts))
    return gradient.new_empty(0), of_weights


@_update.register_fake
def _gradient_shapes(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    module: int,
    weights_need_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient.new_empty(0), gradient.new_empty(indices.shape[0] if weights_need_gradient else 0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, indices, offsets, per_sample_weights, ctx.module = inputs
    ctx.save_for_backward(indices, offsets, per_sample_weights)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    indices, offsets, per_sample_weights = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3]
    of_anchor, of_weights = _update(
        gradient.contiguous(), indices, offsets, per_sample_weights, ctx.module, wanted
    )
    return of_anchor, None, None, of_weights if wanted else None, None


lookup_and_update.register_autograd(_backward, setup_context=_save_for_backward)
